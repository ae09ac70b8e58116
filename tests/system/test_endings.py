"""However a run ends, it ends in seconds, says why in one message, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from runs import Job, Start

pytestmark = pytest.mark.system

LONG = ["trainer.steps=100000", "algorithm.prompts_per_step=8", "algorithm.group_size=4"]


def left_over(folder: Path) -> list[str]:
    """Processes that still know the run's folder."""
    listing = subprocess.run(["ps", "-eo", "pid,stat,args"], capture_output=True, text=True, check=True).stdout
    return [line for line in listing.splitlines() if "rlbridge.worker" in line and str(folder) in line]


def children(job: Job) -> list[int]:
    """Process ids of the workers of a running job."""
    return [job.worker_pid(name) for name in ("trainer-0", "rollout-0")]


def check_gone(pids: list[int], within_s: float = 5.0) -> None:
    """All processes have ended within the time."""
    deadline = time.monotonic() + within_s
    alive = pids
    while alive and time.monotonic() < deadline:
        alive = [pid for pid in alive if Path(f"/proc/{pid}").exists()]
        time.sleep(0.05)
    assert not alive, f"processes {alive} outlived the run"


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def test_ctrl_c_ends_everything(start: Start) -> None:
    before = shared_memory()
    job = start("grpo", *LONG)
    job.wait_for_metric("train", 2)
    pids = children(job)
    job.interrupt()
    run = job.finish(30)
    assert run.status == 130, run.output
    assert "Traceback" not in run.output
    assert run.summary["exit_reason"] == "interrupted"
    check_gone(pids)
    assert shared_memory() <= before


def test_sigterm_ends_everything(start: Start) -> None:
    job = start("grpo", *LONG)
    job.wait_for_metric("train", 2)
    pids = children(job)
    job.process.terminate()
    run = job.finish(30)
    assert run.status == 143, run.output
    check_gone(pids)


def test_ctrl_c_while_workers_start(start: Start) -> None:
    job = start("grpo", *LONG)
    job.wait_for_log("trainer-0", timeout_s=60)
    pids = children(job) if (job.folder / "logs" / "rollout-0.log").exists() else []
    job.interrupt()
    run = job.finish(30)
    assert run.status == 130, run.output
    check_gone(pids)


def test_a_killed_controller_leaves_no_orphans(start: Start) -> None:
    job = start("grpo", *LONG)
    job.wait_for_metric("train", 2)
    pids = children(job)
    job.process.kill()
    job.process.communicate()
    check_gone(pids)


@pytest.mark.parametrize("mode", ["fully_sync", "fully_async"])
def test_one_dead_rollout_worker_is_survived(start: Start, mode: str) -> None:
    """Case 18: the run goes on with the others; what was lost is issued again and counted."""
    job = start("grpo", f"sync={mode}", "trainer.steps=40", "rollout.replicas=2")
    job.wait_for_metric("train", 3)
    os.kill(job.worker_pid("rollout-0"), signal.SIGKILL)
    run = job.finish()
    assert run.status == 0, run.output
    assert run.summary["policy_version"] == 40
    assert len(run.summary["lost_replicas"]) == 1
    assert "rollout-0" in run.summary["lost_replicas"][0]
    assert run.summary["generated"] == run.summary["trained"] + run.summary["dropped"] + run.summary["queued"]


def test_without_any_rollout_worker_the_run_ends_with_that_error(start: Start) -> None:
    job = start("grpo", *LONG)
    job.wait_for_metric("train", 2)
    os.kill(job.worker_pid("rollout-0"), signal.SIGKILL)
    run = job.finish(60)
    assert run.status == 1, run.output
    assert "rollout" in run.output.splitlines()[-1]
    assert "Traceback" not in run.output
    assert "rollout" in run.summary["exit_reason"]


def test_a_dead_trainer_ends_the_run(start: Start) -> None:
    job = start("grpo", *LONG)
    job.wait_for_metric("train", 2)
    os.kill(job.worker_pid("trainer-0"), signal.SIGKILL)
    run = job.finish(60)
    assert run.status == 1, run.output
    assert "trainer-0 killed by signal 9" in run.output
    assert "Traceback" not in run.output


def test_a_hanging_rollout_worker_is_noticed(start: Start) -> None:
    """A stopped process says nothing; its silence is noticed after ``dead_after_s`` and the run goes on."""
    job = start(
        "grpo", "rollout.replicas=2", "trainer.steps=30", "transport.dead_after_s=3", "transport.heartbeat_s=0.5"
    )
    job.wait_for_metric("train", 2)
    pid = job.worker_pid("rollout-1")
    os.kill(pid, signal.SIGSTOP)
    run = job.finish()
    assert run.status == 0, run.output
    assert "rollout-1" in run.summary["lost_replicas"][0]
    check_gone([pid])


def jsonl_task(tmp_path: Path, body: str) -> tuple[list[str], dict[str, str]]:
    """A task with prompts and a reward function of the user's own."""
    (tmp_path / "my_reward.py").write_text(body)
    lines = [json.dumps({"prompt": f"{i % 10}{i // 10}=", "answer": f"{i % 10}"}) for i in range(80)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    overrides = ["task=jsonl", f"task.path={tmp_path}/prompts.jsonl", "task.reward=my_reward:score"]
    return overrides, {"PYTHONPATH": str(tmp_path)}


def test_a_users_own_prompts_and_reward(start: Start, tmp_path: Path) -> None:
    body = "def score(prompt, response, record):\n    return float(response.startswith(record['answer']))\n"
    overrides, env = jsonl_task(tmp_path, body)
    run = start("grpo", *overrides, env=env).finish()
    assert run.status == 0, run.output
    assert run.summary["trained"] == 5 * 8 * 4


def test_a_failing_reward_function_ends_the_run_with_its_error(start: Start, tmp_path: Path) -> None:
    """Case 17: the failure reaches the user in seconds, with the function's own words."""
    body = "def score(prompt, response, record):\n    raise RuntimeError('the judge is out')\n"
    overrides, env = jsonl_task(tmp_path, body)
    run = start("grpo", *overrides, env=env).finish(90)
    assert run.status == 1, run.output
    assert "the judge is out" in run.output
    assert "Traceback" not in run.output
    assert "the judge is out" in run.summary["exit_reason"]


def test_ctrl_c_beats_a_reward_function_that_never_returns(start: Start, tmp_path: Path) -> None:
    body = "import time, pathlib\ndef score(prompt, response, record):\n"
    body += f"    pathlib.Path({str(tmp_path)!r}, 'stuck').touch()\n    time.sleep(10000)\n"
    overrides, env = jsonl_task(tmp_path, body)
    job = start("grpo", *overrides, env=env)
    deadline = time.monotonic() + 90
    while not (tmp_path / "stuck").exists():
        assert time.monotonic() < deadline
        assert job.process.poll() is None
        time.sleep(0.1)
    job.interrupt()
    assert job.finish(30).status == 130


@pytest.mark.parametrize("key", ["algorithm.clp=0.3", "+algorithm.clp=0.3", "sync=fuly_async"])
def test_misspelt_settings_are_refused_with_the_right_name(start: Start, key: str) -> None:
    """Case 24."""
    run = start("grpo", key).finish(60)
    assert run.status == 2, run.output
    assert "clip" in run.output or "fully_async" in run.output
    assert "Traceback" not in run.output
