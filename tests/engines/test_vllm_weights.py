"""New weights for a running vLLM engine, written through the discovered map: it answers like a fresh engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from real_engines import run_programs, write_checkpoint, write_job

pytestmark = pytest.mark.timeout(900)
DEADLINE_S = 400.0  # an engine is there after half a minute on two quiet cores
PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 9], [100, 50, 199, 20, 10, 5, 4]]
NEW_TOKENS = 12


def run_engine(folder: Path, name: str, model: Path, *updates: Path) -> dict[str, Any]:
    """Start an engine on ``model``, replace its weights by each of ``updates``, and let it answer in between."""
    job = write_job(
        folder / f"{name}.json",
        model=str(model),
        updates=[str(update) for update in updates],
        prompts=PROMPTS,
        new_tokens=NEW_TOKENS,
        outcome=str(folder / f"{name}-outcome.json"),
        deadline_s=DEADLINE_S,
    )
    run_programs("live_engine.py", [[job]], folder, DEADLINE_S)
    return dict(msgspec.json.decode((folder / f"{name}-outcome.json").read_bytes()))


@pytest.mark.parametrize(
    ("kind", "tied", "repacked"),
    [
        ("dense", True, []),
        ("moe", False, [f"model.layers.1.mlp.experts.routed_experts.{name}_weight" for name in ("w13", "w2")]),
    ],
    ids=["dense, tied", "experts, prepacked after loading"],
)
def test_replaced_weights_answer_like_a_fresh_engine_also_when_sent_again(tmp_path, kind, tied, repacked):
    one, other = (write_checkpoint(tmp_path / f"{seed}", kind, seed=seed, tied=tied) for seed in (1, 2))
    engine = run_engine(tmp_path, "updated", one, other, other, one)
    fresh = run_engine(tmp_path, "fresh", other)
    assert engine["repacked"] == fresh["repacked"] == repacked
    before, after, again, back = engine["answers"]
    (expected,) = fresh["answers"]
    assert [len(answer["tokens"]) for answer in expected] == [NEW_TOKENS] * len(PROMPTS)
    assert all(mine["tokens"] != its["tokens"] for mine, its in zip(before, expected, strict=True))
    assert after == expected  # tokens and their logprobs, bit for bit
    assert again == expected
    assert back == before
