"""What the user sees of a run: live on a terminal, plain lines elsewhere, and a table at the end."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rlbridge.config import JobConfig
from rlbridge.tracking.final_table import final_table
from rlbridge.tracking.run_folder import RunFolder

_SPARKS = "▁▂▃▄▅▆▇█"
_HISTORY = 48


@dataclass(frozen=True, slots=True)
class StepView:
    """One training step as it is shown.

    Attributes:
        step, total: steps done and to do.
        reward, accuracy: means over the batch.
        tokens_per_s: generated since training began.
        version: the trainer's policy version.
        staleness: mean over the batch, in versions.
        trainer_stall_s, rollout_stall_s: stall of the last complete weight update, mean over the side's workers.
        eta_s: expected seconds to the last step.
    """

    step: int
    total: int
    reward: float
    accuracy: float
    tokens_per_s: float
    version: int
    staleness: float
    trainer_stall_s: float
    rollout_stall_s: float
    eta_s: float


class Progress(Protocol):
    """Shows a run while it goes on."""

    def message(self, text: str) -> None:
        """Show a line that stays."""
        ...

    def step(self, view: StepView) -> None:
        """Show the last training step."""
        ...

    def close(self, summary: Mapping[str, Any], folder: RunFolder) -> None:
        """Show how the run ended and give the terminal back. Idempotent."""
        ...


def open_progress(job: JobConfig) -> Progress:
    """The progress that ``tracking.progress`` asks for."""
    kind = job.tracking.progress
    if kind == "auto":
        kind = "rich" if sys.stdout.isatty() else "plain"
    title = f"{job.recipe} · {job.task.name} · sync={job.sync.mode.value} · seed {job.seed}"
    if kind == "rich":
        return RichProgress(title, Console())
    return PlainProgress(title, job.tracking.plain_every_s) if kind == "plain" else NoProgress()


class NoProgress:
    """Shows nothing."""

    def message(self, text: str) -> None:
        """Nothing."""

    def step(self, view: StepView) -> None:
        """Nothing."""

    def close(self, summary: Mapping[str, Any], folder: RunFolder) -> None:
        """Nothing."""


class PlainProgress:
    """Lines for logs and pipes: the first and the last step, and others at most every ``every_s`` seconds."""

    def __init__(self, title: str, every_s: float, console: Console | None = None) -> None:
        self._console = console or Console(width=110, highlight=False, soft_wrap=True)
        self._every_s = every_s
        self._shown_s = -every_s
        self._closed = False
        self.message(title)

    def message(self, text: str) -> None:
        """Show a line."""
        self._console.print(Text(text))

    def step(self, view: StepView) -> None:
        """Show a line if it is time."""
        now = time.monotonic()
        if now - self._shown_s < self._every_s and view.step not in (1, view.total):
            return
        self._shown_s = now
        self.message(f"step {view.step}/{view.total}  " + "  ".join(f"{k} {v}" for k, v in _facts(view)))

    def close(self, summary: Mapping[str, Any], folder: RunFolder) -> None:
        """Show the final table."""
        if not self._closed:
            self._closed = True
            self._console.print(final_table(summary, folder))


class RichProgress:
    """A live display that redraws in place; messages scroll by above it."""

    def __init__(self, title: str, console: Console) -> None:
        self._title = title
        self._console = console
        self._view: StepView | None = None
        self._rewards: deque[float] = deque(maxlen=_HISTORY)
        self._began_s = time.monotonic()
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=2, transient=True)
        self._live.start()

    def message(self, text: str) -> None:
        """Show a line above the live display."""
        self._console.print(Text(text, style="dim"))

    def step(self, view: StepView) -> None:
        """Redraw with the new step."""
        self._view = view
        self._rewards.append(view.reward)
        self._live.refresh()

    def close(self, summary: Mapping[str, Any], folder: RunFolder) -> None:
        """Stop the live display and show the final table."""
        if self._live.is_started:
            self._live.stop()
            self._console.print(final_table(summary, folder))

    def _render(self) -> RenderableType:
        elapsed = clock(time.monotonic() - self._began_s)
        heading = Text.assemble((self._title, "bold"), f"   {elapsed}")
        if self._view is None:
            return Group(heading, Text("starting workers, warming up ...", style="dim"))
        view = self._view
        grid = Table.grid(padding=(0, 3))
        for _ in range(4):
            grid.add_column()
        cells = [Text.assemble((f"{name} ", "dim"), (value, "bold")) for name, value in _facts(view)]
        for start in range(0, len(cells), 4):
            grid.add_row(*cells[start : start + 4])
        bar = Table.grid(padding=(0, 1))
        bar.add_row(Text(f"step {view.step}/{view.total}"), ProgressBar(view.total, view.step, width=40))
        curve = Text.assemble(("reward ", "dim"), (sparkline(list(self._rewards)), "green"))
        return Group(heading, bar, grid, curve)


def _facts(view: StepView) -> list[tuple[str, str]]:
    return [
        ("reward", f"{view.reward:.3f}"),
        ("accuracy", f"{view.accuracy:.3f}"),
        ("tokens/s", f"{view.tokens_per_s:,.0f}"),
        ("version", str(view.version)),
        ("staleness", f"{view.staleness:.2f}"),
        ("stall trainer", f"{view.trainer_stall_s * 1000:.1f} ms"),
        ("stall rollout", f"{view.rollout_stall_s * 1000:.1f} ms"),
        ("eta", clock(view.eta_s)),
    ]


def sparkline(values: list[float]) -> str:
    """``values`` as a row of blocks between their least and their greatest."""
    if not values:
        return ""
    low, high = min(values), max(values)
    scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_SPARKS[round((value - low) * scale)] for value in values)


def clock(seconds: float) -> str:
    """``83`` as ``1:23``, ``3723`` as ``1:02:03``."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
