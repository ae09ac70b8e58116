"""Medians of several runs by recipe and sync mode, as a Markdown table: ``python docs/tools/modes_table.py runs/*``."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

COLUMNS = {
    "AGST ms": ("agst_s", 1e3),
    "trainer stall ms": ("trainer_stall_s_per_update", 1e3),
    "rollout stall ms": ("rollout_stall_s_per_update", 1e3),
    "transfer ms": ("transfer_s_per_update", 1e3),
    "to 0.9 s": ("time_to_target_s", 1.0),
    "wall s": ("wall_s", 1.0),
    "eval accuracy": ("eval_accuracy", 1.0),
    "max staleness": ("max_staleness_seen", 1.0),
}


def cell(summaries: list[dict[str, Any]], key: str, scale: float) -> str:
    """The median over the runs that have the value, and how many lack it."""
    values = [summary[key] * scale for summary in summaries if summary.get(key) is not None]
    missing = len(summaries) - len(values)
    text = f"{median(values):.3g}" if values else "-"
    return text + (f" ({missing} never)" if missing and values else "")


def main(folders: list[str]) -> None:
    """Print the table of the finished runs among ``folders``."""
    runs: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for folder in folders:
        path = Path(folder) / "summary.json"
        if path.is_file():
            summary = json.loads(path.read_text())
            runs[summary["recipe"], summary["sync_mode"]].append(summary)
    out = sys.stdout
    out.write(f"| recipe | sync | runs | {' | '.join(COLUMNS)} |\n|{'---|' * (3 + len(COLUMNS))}\n")
    for (recipe, mode), summaries in runs.items():
        cells = " | ".join(cell(summaries, *column) for column in COLUMNS.values())
        out.write(f"| {recipe} | {mode} | {len(summaries)} | {cells} |\n")


if __name__ == "__main__":
    main(sys.argv[1:])
