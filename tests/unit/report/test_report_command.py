"""``rlbridge report`` on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from example_runs import SUMMARY, write_run

from rlbridge.cli import main
from rlbridge.report.comparison import short_names
from rlbridge.report.reading import read_run


def report(*arguments: str) -> int:
    with pytest.raises(SystemExit) as leaving:
        main(["report", *arguments])
    return int(leaving.value.code or 0)


def test_it_prints_where_the_page_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = (str(write_run(tmp_path / "runs", name)) for name in ("one", "two"))
    elsewhere = str(tmp_path / "page.html")
    for arguments, path in (
        ([one], f"{one}/report.html"),
        ([one, "--output", elsewhere], elsewhere),
        ([one, two], str(tmp_path / "runs" / "report.html")),
    ):
        assert report(*arguments) == 0
        assert capsys.readouterr() == (f"{path}\n", "")
        assert Path(path).read_text().startswith("<!doctype html>")


def test_a_wrong_run_is_one_clear_line_and_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(str(tmp_path / "gone")) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("rlbridge: error: no run ")
    assert err.count("\n") == 1


def test_runs_are_told_apart_by_what_differs(tmp_path: Path) -> None:
    def names(*runs: tuple[str, str, int]) -> list[str]:
        folders = [write_run(tmp_path / f"{len(runs)}", n, SUMMARY | {"sync_mode": m, "seed": s}) for n, m, s in runs]
        return short_names([read_run(str(folder)) for folder in folders])

    assert names(("a", "fully_sync", 0), ("b", "fully_async", 1)) == ["fully_sync", "fully_async"]
    three = [("a", "fully_sync", 0), ("b", "fully_sync", 1), ("c", "fully_async", 1)]
    assert names(*three) == ["fully_sync s0", "fully_sync s1", "fully_async s1"]
    assert names(*three, ("d", "fully_async", 1)) == ["a", "b", "c", "d"]
