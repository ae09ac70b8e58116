"""A run's folder, whole and in pieces: what is there is read, what is missing is said, nothing is a traceback."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from example_runs import PLAN, SPANS, SUMMARY, UPDATES, write_run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlbridge.report.command import write_report
from rlbridge.report.reading import read_run
from rlbridge.transport.errors import ConfigError

FILES = ("config.yaml", "metrics.jsonl", "summary.json", "trace.json", "plan.json")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs"), "example")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path, "example")


def test_a_whole_run_is_read_whole(folder: Path) -> None:
    run = read_run(str(folder))
    assert run.notes == []
    assert (run.name, run.sync_mode, dict(run.plan)) == ("example", "fully_async", PLAN)
    assert run.summary == SUMMARY
    assert run.settings["sync"]["mode"] == "fully_async"
    assert run.series("weights", "transfer_s")[0] == (1, pytest.approx(0.08))
    assert run.series("eval", "accuracy") == [(0, 0.5), (UPDATES, 0.96875)]
    assert (run.workers("trainer"), run.workers("rollout")) == (["trainer-0"], ["rollout-0"])
    for worker, spans in SPANS.items():
        assert [(span.name, span.version) for span in run.spans[worker]] == [(s.name, s.version) for s in spans]
        assert [span.start_s for span in run.spans[worker]] == pytest.approx([s.start_s - 100 for s in spans])
        assert [span.duration_s for span in run.spans[worker]] == pytest.approx([s.duration_s for s in spans])


def test_a_run_is_found_by_its_name_in_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "runs", "mine")
    monkeypatch.chdir(tmp_path)
    assert write_report(["mine"]) == Path("runs/mine/report.html")


@pytest.mark.parametrize("name", FILES)
def test_each_missing_file_is_said_and_the_page_still_made(folder: Path, name: str) -> None:
    (folder / name).unlink()
    assert any(note.startswith(f"{name} is missing") for note in read_run(str(folder)).notes)
    assert f"{name} is missing" in write_report([str(folder)]).read_text()


@given(st.sampled_from(FILES), st.floats(0, 1), st.binary(max_size=8))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
def test_files_cut_off_or_broken_anywhere_give_a_page(
    whole: Path, tmp_path: Path, name: str, at: float, tail: bytes
) -> None:
    for file in FILES:
        (tmp_path / file).write_bytes((whole / file).read_bytes())
    content = (whole / name).read_bytes()
    (tmp_path / name).write_bytes(content[: int(at * len(content))] + tail)
    assert write_report([str(tmp_path)]).stat().st_size > 10_000


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("summary.json", "[]"),
        (
            "summary.json",
            json.dumps(SUMMARY | {"updates": "many", "agst_s": [1], "idle_s": 3, "staleness_seen": {"a": 1}}),
        ),
        ("summary.json", json.dumps(SUMMARY | {"max_staleness": "4", "reward_first": {}, "wall_s": -1, "seed": {}})),
        ("trace.json", '{"traceEvents": 3}'),
        ("trace.json", '{"traceEvents": [{"ph": "X", "name": 1, "pid": 1}]}'),
        ("trace.json", ""),
        ("plan.json", '{"bytes_by_stage": {"receive": "x"}, "bytes_total": [], "lower_bound_terms_s": {"a": "b"}}'),
        ("metrics.jsonl", '{"family": "train", "step": "x"}\n{"family": 3, "step": 1}\n[]\n'),
        ("config.yaml", "- 1\n- 2\n"),
        ("config.yaml", "a: ${b}\n{"),
    ],
)
def test_content_of_another_shape_is_said_too(folder: Path, name: str, content: str) -> None:
    (folder / name).write_text(content)
    assert any(name in note for note in read_run(str(folder)).notes)
    write_report([str(folder)])


def test_an_unfinished_run_has_the_figures_of_its_metrics(folder: Path) -> None:
    (folder / "summary.json").unlink()
    summary = read_run(str(folder)).summary
    assert summary["updates"] == UPDATES
    assert summary["reward_first"] == 0.25
    assert summary["trainer_stall_s_per_update"] == pytest.approx(0.02)
    assert summary["max_staleness"] == 4
    assert (summary["trained"], summary["agst_s"]) == (None, None)
    assert summary["idle_s"]["idle/trainer/wait_for_data"] == pytest.approx(1.1)


def test_an_unfinished_run_whose_configuration_is_odd_has_a_page(folder: Path) -> None:
    (folder / "summary.json").unlink()
    (folder / "config.yaml").write_text("recipe: [1]\nseed: {}\nsync: {mode: 3, max_staleness: many}\n")
    assert "many" in write_report([str(folder)]).read_text()
    (folder / "config.yaml").write_text("sync: 7\n")
    write_report([str(folder), str(folder)], str(folder / "two.html"))


def test_numbers_that_no_axis_can_hold_are_left_out(folder: Path) -> None:
    with (folder / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"family": "rollout", "step": 12, "reward": 1e300, "accuracy": 5e-324}\n')
    run = read_run(str(folder))
    assert run.series("rollout", "reward")[-1][0] == 11
    assert re.findall(r'[" ML]-?(?:nan|inf)\b', write_report([str(folder)]).read_text()) == []


def test_what_is_no_run_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no run 'nothing': runs/nothing is no folder"):
        write_report(["nothing"])
    with pytest.raises(ConfigError, match=r"is no run: it has none of config\.yaml"):
        write_report([str(tmp_path)])
    with pytest.raises(ConfigError, match=r"--output: .*page\.html cannot be written: No such file"):
        write_report([str(write_run(tmp_path, "run"))], str(tmp_path / "nowhere" / "page.html"))
