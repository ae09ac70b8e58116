"""The page of a run in a real browser: nothing is loaded, nothing fails, the numbers are those of the run."""

from __future__ import annotations

import json
import shutil
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Page, browser
from example_runs import SPANS, SUMMARY, UPDATES, write_run

from rlbridge.report.command import write_report

pytestmark = pytest.mark.integration

KEYS = (
    *("reward_first", "reward_last", "agst_s", "trainer_stall_s_per_update", "rollout_stall_s_per_update"),
    *("max_staleness_seen", "transfer_s_per_update", "lower_bound_s", "bytes_per_update", "updates", "wall_s"),
    *("generated", "trained", "dropped", "queued", "tokens_per_s"),
)
HOSTILE = '</script><script>document.title="owned"</script><img src="http://127.0.0.1:9/x" onerror="alert(1)">'

VISIBLE_TEXTS = """
[...document.querySelectorAll("svg.chart text")].map(text => {
  const box = text.getBoundingClientRect();
  return {text: text.textContent, chart: text.closest("svg").ariaLabel, at: [box.left, box.top, box.right, box.bottom]};
})
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs"), "example")


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    with browser(tmp_path / "profile") as page:
        yield page


def numbers(page: Page) -> dict[str, Any]:
    """The page's key figures."""
    found = page.evaluate(
        "[...document.querySelectorAll('.figures data')].map(figure => [figure.dataset.key, figure.value])"
    )
    return {key: json.loads(value) for key, value in found}


def overlapping(texts: list[dict[str, Any]]) -> list[str]:
    """Pairs of texts of one chart that cover each other."""
    pairs = []
    for index, one in enumerate(texts):
        for other in texts[index + 1 :]:
            (l1, t1, r1, b1), (l2, t2, r2, b2) = one["at"], other["at"]
            apart = r1 <= l2 + 1 or r2 <= l1 + 1 or b1 <= t2 + 3 or b2 <= t1 + 3  # line boxes are higher than letters
            if one["chart"] == other["chart"] and not apart:
                pairs.append(f"{one['chart']}: {one['text']!r} and {other['text']!r}")
    return pairs


def colours(png: bytes) -> int:
    """How many different rows a picture has: an empty page has one."""
    chunks, at = b"", 8
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        if png[at + 4 : at + 8] == b"IDAT":
            chunks += png[at + 8 : at + 8 + length]
        at += 12 + length
    rows = zlib.decompress(chunks)
    width, height = struct.unpack(">II", png[16:24])
    stride = len(rows) // height
    assert stride > width
    return len({rows[index * stride : (index + 1) * stride] for index in range(height)})


def test_the_page_loads_nothing_fails_nowhere_and_tells_the_runs_numbers(page: Page, folder: Path) -> None:
    path = write_report([str(folder)])
    assert path == folder / "report.html"
    for dark in (False, True):
        page.open(path, dark=dark)
        assert page.errors == []
        assert page.requests == [path.as_uri()]
        shown = numbers(page)
        assert shown == {key: SUMMARY[key] for key in KEYS}
        assert colours(page.screenshot()) > 300
    ground = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(ground) == "rgb(20, 24, 28)"
    page.open(path)
    assert page.evaluate(ground) == "rgb(255, 255, 255)"


def test_nothing_overlaps_and_nothing_runs_over_the_window(page: Page, folder: Path) -> None:
    path = write_report([str(folder)])
    for width in (1240, 820, 390):
        page.open(path, width=width)
        texts = page.evaluate(VISIBLE_TEXTS)
        assert len(texts) > 60
        assert overlapping(texts) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_nothing_overlaps_at_the_bounds_of_what_a_run_can_say(page: Page, tmp_path: Path) -> None:
    extremes = (
        {"sync_mode": "fully_sync", "max_staleness": 0, "max_staleness_seen": 0, "staleness_seen": {"0": 384}},
        {"max_staleness": 64, "staleness_seen": {str(age): 10**age for age in range(9)}},
        {"idle_s": {f"idle/rollout/wait_for_{'something_long_' * n}": 10.0**n for n in range(8)}},
        {"staleness_seen": {}, "idle_s": {}, "transfer_s_per_update": None, "agst_s": None, "updates": 0},
    )
    for index, change in enumerate(extremes):
        page.open(write_report([str(write_run(tmp_path / "runs", f"run{index}", SUMMARY | change))]))
        assert overlapping(page.evaluate(VISIBLE_TEXTS)) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= 1240
        assert page.errors == []


def test_the_timeline_zooms_and_hovering_tells_values(page: Page, folder: Path) -> None:
    page.open(write_report([str(folder)]), height=4000)
    window = "document.querySelector('svg.timeline').dataset.window.split(' ').map(Number)"
    low, high = page.evaluate(window)
    assert (low, high) == (0, pytest.approx(UPDATES + 0.95))
    box = page.evaluate(
        "(({left, top, width, height}) => [left, top, width, height])"
        "(document.querySelector('svg.timeline').getBoundingClientRect())"
    )
    start, end, middle = box[0] + 0.4 * box[2], box[0] + 0.6 * box[2], box[1] + 0.03 * box[3]
    page.mouse("mousePressed", start, middle, button="left", buttons=1, clickCount=1)
    page.mouse("mouseMoved", end, middle, button="left", buttons=1)
    page.mouse("mouseReleased", end, middle, button="left", clickCount=1)
    low, high = page.evaluate(window)
    assert 0 < low < high < UPDATES
    assert high - low == pytest.approx(0.2 * box[2] / (box[2] * 998 / 1160) * (UPDATES + 0.95), rel=0.02)
    drawn = page.evaluate("document.querySelectorAll('svg.timeline .span.stall').length")
    versions = {
        span.version
        for spans in SPANS.values()
        for span in spans
        if span.name.startswith("stall") and low <= span.start_s - 100 <= high
    }
    assert drawn == pytest.approx(2 * len(versions), abs=2)
    work = page.evaluate(
        "(({left, top}) => [left + 3, top + 3])"
        "(document.querySelectorAll('svg.timeline .span.work')[1].getBoundingClientRect())"
    )
    page.mouse("mouseMoved", *work)
    hint = "document.querySelector('.hint').textContent"
    assert "trainer-0: work/trainer/step, version" in page.evaluate(hint)
    page.evaluate("[...document.querySelectorAll('.tools button')].at(-1).click()")
    assert page.evaluate(window) == [0, pytest.approx(UPDATES + 0.95)]
    chart = page.evaluate(
        "(({left, top, width, height}) => [left + width * 0.9, top + height / 2])"
        "(document.querySelector('svg.lines').getBoundingClientRect())"
    )
    page.mouse("mouseMoved", *chart)
    assert "step 11: mean of 10 steps" in page.evaluate(hint)
    assert page.errors == []


def test_it_reads_without_scripts(page: Page, folder: Path) -> None:
    page.open(write_report([str(folder)]), script=False)
    page.call("Emulation.setScriptExecutionDisabled", value=False)
    assert page.evaluate("document.querySelectorAll('svg.timeline .span').length") > 50
    assert page.evaluate("document.querySelectorAll('.tools').length") == 0
    assert numbers(page)["agst_s"] == SUMMARY["agst_s"]


def test_what_a_run_says_stays_text(page: Page, tmp_path: Path) -> None:
    summary = SUMMARY | {"exit_reason": HOSTILE, "lost_replicas": [HOSTILE], "idle_s": {f"idle/{HOSTILE}": 1.0}}
    folder = write_run(tmp_path / "runs", "hostile", summary)
    with (folder / "config.yaml").open("a") as config:
        config.write(f"# {HOSTILE}\n")
    trace = (folder / "trace.json").read_text().replace("rollout-0", json.dumps(HOSTILE)[1:-1])
    (folder / "trace.json").write_text(trace)
    for runs in ([folder], [folder, write_run(tmp_path / "runs", "other")]):
        path = write_report([str(run) for run in runs], str(tmp_path / "page.html"))
        page.open(path)
        assert page.evaluate("document.title").startswith("rlbridge: ")
        assert page.evaluate("document.images.length") == 0
        assert page.evaluate("document.body.textContent").count("onerror") >= 3
        assert page.requests == [path.as_uri()]
        assert page.errors == []


def test_a_killed_run_has_a_page_that_says_what_is_missing(page: Page, folder: Path, tmp_path: Path) -> None:
    killed = tmp_path / "killed"
    shutil.copytree(folder, killed)
    for name in ("summary.json", "trace.json"):
        (killed / name).unlink()
    whole = (killed / "metrics.jsonl").read_bytes()
    (killed / "metrics.jsonl").write_bytes(whole[:-30])
    page.open(write_report([str(killed)]))
    notes = page.evaluate("document.querySelector('.notes').textContent")
    for fact in ("metrics.jsonl has 1 broken line", "summary.json is missing", "trace.json is missing"):
        assert fact in notes
    assert numbers(page)["agst_s"] is None
    assert page.errors == []


def test_runs_side_by_side(page: Page, tmp_path: Path) -> None:
    modes = ("fully_sync", "sender_staged", "receiver_staged", "fully_async")
    runs = [write_run(tmp_path / "runs", mode, SUMMARY | {"sync_mode": mode}) for mode in modes]
    path = write_report([str(run) for run in runs])
    assert path == tmp_path / "runs" / "report.html"
    page.open(path)
    rows = page.evaluate("[...document.querySelectorAll('section table')][0].innerText")
    assert all(mode in rows for mode in modes)
    assert page.evaluate("document.querySelectorAll('details.run').length") == len(modes)
    page.evaluate("document.querySelectorAll('details.run').forEach(run => { run.open = true; })")
    assert overlapping(page.evaluate(VISIBLE_TEXTS)) == []
    assert page.errors == []
    assert page.requests == [path.as_uri()]
