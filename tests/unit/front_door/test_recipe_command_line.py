"""A recipe's command line, from ``sys.argv`` to the exit status, with Hydra in the middle."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rlbridge.config import JobConfig
from rlbridge.recipe_main import recipe_main
from rlbridge.transport.errors import ConfigError, SyncError, WorkerError

RunRecipe = Callable[..., int]


@pytest.fixture
def jobs() -> list[JobConfig]:
    """The jobs that the recipe was asked to run."""
    return []


@pytest.fixture
def run_recipe(jobs: list[JobConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunRecipe:
    """Run the recipe ``grpo`` in an empty directory; what would train only notes its job."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, job: Callable[[JobConfig], int] = lambda _: 0) -> int:
        monkeypatch.setattr(sys, "argv", ["rlbridge", *arguments])

        def note(config: JobConfig) -> int:
            jobs.append(config)
            return job(config)

        with pytest.raises(SystemExit) as leaving:
            recipe_main("grpo", note)
        assert isinstance(leaving.value.code, int)
        return leaving.value.code

    return run


def test_settings_and_groups_reach_the_job(run_recipe: RunRecipe, jobs: list[JobConfig], tmp_path: Path) -> None:
    assert run_recipe("sync=fully_async", "trainer.steps=3", "++seed=7", "hydra.verbose=false") == 0
    assert [(job.sync.mode, job.trainer.steps, job.seed) for job in jobs] == [("fully_async", 3, 7)]
    assert list(tmp_path.iterdir()) == [], "Hydra must leave nothing outside the run's folder"


@pytest.mark.parametrize(
    "order", [("-m", "sync=fully_sync,fully_async", "seed=1"), ("seed=1", "-m", "sync=glob(fully*)")]
)
def test_a_multirun_runs_one_job_after_the_other(
    run_recipe: RunRecipe, jobs: list[JobConfig], tmp_path: Path, order: tuple[str, ...]
) -> None:
    assert run_recipe(*order) == 0
    assert {job.sync.mode for job in jobs} == {"fully_sync", "fully_async"}
    assert all(job.seed == 1 for job in jobs)
    assert [entry.name for entry in tmp_path.iterdir()] == ["runs"]


def test_a_multirun_ends_at_the_first_job_that_fails(run_recipe: RunRecipe, jobs: list[JobConfig]) -> None:
    def fail_second(job: JobConfig) -> int:
        if job.seed == 1:
            raise SyncError("the second broke")
        return 0

    assert run_recipe("-m", "seed=0,1,2", job=fail_second) == 1
    assert [job.seed for job in jobs] == [0, 1]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["algorithm.clp=1"], "unknown setting 'algorithm.clp'; did you mean 'algorithm.clip_low'?"),
        (["+algorithm.clp=1"], "unknown setting 'algorithm.clp'; did you mean 'algorithm.clip_low'?"),
        (["++algorithm.clp=1"], "unknown setting 'algorithm.clp'; did you mean 'algorithm.clip_low'?"),
        (["~algorithm.clp"], "unknown setting 'algorithm.clp'; did you mean 'algorithm.clip_low'?"),
        (["~algorithm.clip_low"], "settings cannot be removed"),
        (["+algorithm.clip_low=1"], "write algorithm.clip_low=VALUE without the +"),
        (["algoritm=grpo"], "unknown setting 'algoritm'; did you mean 'algorithm'?"),
        (["sync=fuly_async"], "sync=fuly_async: no such option; did you mean 'fully_async'?"),
        (["-m", "sync=fully_sync,fuly_async"], "sync=fuly_async: no such option; did you mean 'fully_async'?"),
        (["+sync=fully_async"], "write sync=OPTION"),
        (["~sync"], "write sync=OPTION"),
        (["sync=null"], "sync is a config group; choose one of"),
        (["algorithm={clp: 1}"], "algorithm is a config group; choose one of cispo, dapo, dr_grpo, grpo, gspo, "),
        (["trainer.steps"], "write key=value"),
        (["trainer.steps=abc"], "trainer.steps='abc': expected a whole number"),
        (["algorithm.group_size=1"], "algorithm.group_size=1"),
        (["seed=${nowhere}"], "nowhere"),
        (["algorithm=ppo"], "use `rlbridge run ppo`"),
        (["recipe=ppo", "algorithm=ppo"], "use `rlbridge run ppo`"),
        (["--cfg", "job", "algorithm.clp=1"], "did you mean 'algorithm.clip_low'?"),
        (["--cfg", "job", "-m"], "Only one of"),
    ],
)
def test_a_slip_is_one_clear_line_and_status_2(
    run_recipe: RunRecipe,
    jobs: list[JobConfig],
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    complaint: str,
) -> None:
    assert run_recipe(*arguments) == 2
    printed = capsys.readouterr().err
    assert complaint in printed
    assert "Traceback" not in printed
    assert len(printed.splitlines()) == 1
    assert jobs == []


@pytest.mark.parametrize(
    ("raised", "status", "line"),
    [
        (WorkerError("rollout-1 died"), 1, "rlbridge: error: rollout-1 died"),
        (ConfigError("task.path is empty"), 2, "rlbridge: error: task.path is empty"),
        (KeyboardInterrupt(), 130, "rlbridge: interrupted"),
        (ExceptionGroup("g", [ValueError("noise"), SyncError("the cause")]), 1, "rlbridge: error: the cause"),
        (BaseExceptionGroup("g", [SyncError("noise"), KeyboardInterrupt()]), 130, "rlbridge: interrupted"),
        (
            ZeroDivisionError("oops"),
            1,
            "rlbridge: error: unexpected ZeroDivisionError: oops (RLBRIDGE_DEBUG=1 shows where)",
        ),
    ],
)
def test_what_ends_a_job_becomes_status_and_one_message(
    run_recipe: RunRecipe, capsys: pytest.CaptureFixture[str], raised: BaseException, status: int, line: str
) -> None:
    def job(_: JobConfig) -> int:
        raise raised

    assert run_recipe(job=job) == status
    assert capsys.readouterr().err.strip() == line


def test_the_trace_is_shown_when_asked_for(
    run_recipe: RunRecipe, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLBRIDGE_DEBUG", "1")

    def job(_: JobConfig) -> int:
        raise WorkerError("rollout-1 died")

    assert run_recipe(job=job) == 1
    assert "Traceback" in capsys.readouterr().err


def test_hydras_own_options_work(
    run_recipe: RunRecipe, jobs: list[JobConfig], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_recipe("--cfg", "job", "sync=fully_async") == 0
    assert "mode: fully_async" in capsys.readouterr().out
    assert run_recipe("--help") == 0
    assert "sync: fully_async, fully_sync, receiver_staged, sender_staged" in capsys.readouterr().out
    monkeypatch.setenv("COMP_LINE", "rlbridge sync=ful")
    assert run_recipe("-sc", "query=bash") == 0
    assert capsys.readouterr().out.split() == ["sync=fully_async", "sync=fully_sync"]
    assert jobs == []


def test_a_users_own_config_directory_adds_options(
    run_recipe: RunRecipe, jobs: list[JobConfig], tmp_path: Path
) -> None:
    (tmp_path / "mine" / "trainer").mkdir(parents=True)
    (tmp_path / "mine" / "trainer" / "short.yaml").write_text("defaults: [default, _self_]\nsteps: 3\n")
    assert run_recipe("--config-dir", str(tmp_path / "mine"), "trainer=short") == 0
    assert jobs[0].trainer.steps == 3
    (tmp_path / "mine" / "trainer" / "short.yaml").write_text("defaults: [default, _self_]\nstep: 3\n")
    assert run_recipe("--config-dir", str(tmp_path / "mine"), "trainer=short") == 2
