"""The decode loop against transformers' own full forward, over the kinds of models, lengths and schedules."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlbridge.rollout.engine.protocol import Engine
from rlbridge.rollout.engine.sampling import RowSampling, log_probabilities
from rlbridge.rollout.engine.transformers_engine import TransformersEngine
from rlbridge.rollout.trajectory import GenerationRequest, SamplingParams, Trajectory, VersionSpan
from rlbridge.sync.config import KvCachePolicy
from rlbridge.transport.errors import SyncError

MakeEngine = Callable[..., TransformersEngine]
ModelDir = Callable[..., Path]
ARCHITECTURES = ["qwen3", "qwen3-tied", "llama", "gpt2"]


def request(index: int, prompt: list[int], **sampling: Any) -> GenerationRequest:
    params = SamplingParams(**{"max_new_tokens": 12, **sampling})
    return GenerationRequest(index, index // 4, index % 4, prompt, seed=1000 + index, sampling=params)


def some_requests(count: int, seed: int, **sampling: Any) -> list[GenerationRequest]:
    draw = random.Random(seed)
    prompts = [[draw.randrange(3, 20) for _ in range(draw.randint(1, 14))] for _ in range(count)]
    return [
        request(i, prompt, **{"max_new_tokens": draw.randint(1, 20), **sampling}) for i, prompt in enumerate(prompts)
    ]


def run(engine: Engine) -> dict[int, Trajectory]:
    done: dict[int, Trajectory] = {}
    while engine.has_work:
        done.update({trajectory.request_id: trajectory for trajectory in engine.step()})
    return done


@cache
def reference(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def full_logits(directory: Path, trajectory: Trajectory) -> torch.Tensor:
    """Logits that transformers' own forward, without a cache, gives for each response token, ``[T, V]``."""
    model = reference(directory)
    ids = torch.tensor([trajectory.prompt_ids + trajectory.response_ids])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0]
    return logits[len(trajectory.prompt_ids) - 1 : -1]


def assert_logprobs(trajectory: Trajectory, logits: torch.Tensor, sampling: SamplingParams) -> None:
    count = len(trajectory.response_ids)
    columns = RowSampling(
        torch.full((count,), sampling.temperature),
        torch.full((count,), sampling.top_p),
        torch.full((count,), sampling.top_k),
        torch.zeros(count, dtype=torch.bool),
    )
    expected = log_probabilities(logits, columns)[range(count), trajectory.response_ids]
    torch.testing.assert_close(torch.tensor(trajectory.logprobs), expected, atol=1e-4, rtol=0)


def test_it_is_an_engine(make_engine: MakeEngine) -> None:
    assert isinstance(make_engine(), Engine)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_tokens_and_logprobs_equal_a_full_recompute(
    name: str, make_engine: MakeEngine, model_dir: ModelDir
) -> None:
    requests = some_requests(21, seed=5, greedy=True)
    engine = make_engine(name)
    engine.submit(requests)
    done = run(engine)
    assert sorted(done) == list(range(21))
    for trajectory in done.values():
        logits = full_logits(model_dir(name), trajectory)
        assert trajectory.response_ids == logits.argmax(-1).tolist()
        assert_logprobs(trajectory, logits, SamplingParams(1))


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_eager_attention_takes_the_same_mask(name: str, make_engine: MakeEngine, model_dir: ModelDir) -> None:
    engine = make_engine(name)
    engine._model.module.set_attn_implementation("eager")
    engine.submit(some_requests(9, seed=6))
    for trajectory in run(engine).values():
        assert_logprobs(trajectory, full_logits(model_dir(name), trajectory), SamplingParams(1))


def test_a_long_prefill_is_split_into_several_forwards(
    make_engine: MakeEngine, model_dir: ModelDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlbridge.rollout.engine.transformers_engine._PREFILL_TOKENS", 30)
    engine = make_engine()
    engine.submit(some_requests(16, seed=8))
    for trajectory in run(engine).values():
        assert_logprobs(trajectory, full_logits(model_dir("qwen3"), trajectory), SamplingParams(1))


def test_greedy_equals_transformers_generate(make_engine: MakeEngine, model_dir: ModelDir) -> None:
    model = reference(model_dir("qwen3"))
    engine = make_engine()
    engine.submit([request(0, [5, 9, 3, 12], greedy=True, max_new_tokens=20)])
    ids = torch.tensor([[5, 9, 3, 12]])
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20)
    assert run(engine)[0].response_ids == expected[0, 4:].tolist()


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.6},  # trl#4159: a sampler that is hotter or colder than the trainer believes
        {"temperature": 1.7},
        {"temperature": 0.8, "top_p": 0.7},
        {"top_k": 5},
        {"temperature": 0.9, "top_k": 9, "top_p": 0.8},
    ],
)
def test_sampled_logprobs_are_those_of_the_sampling_distribution(
    sampling: dict[str, Any], make_engine: MakeEngine, model_dir: ModelDir
) -> None:
    engine = make_engine()
    engine.submit(some_requests(17, seed=2, **sampling))
    for trajectory in run(engine).values():
        assert_logprobs(trajectory, full_logits(model_dir("qwen3"), trajectory), SamplingParams(1, **sampling))


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
@pytest.mark.parametrize("schedule", [0, 1, 2])
def test_a_request_does_not_depend_on_its_company(name: str, schedule: int, make_engine: MakeEngine) -> None:
    requests = some_requests(30, seed=schedule)
    together, arrivals, done = make_engine(name, max_rows=5), random.Random(schedule), {}
    waiting = list(requests)
    while waiting or together.has_work:
        count = arrivals.randint(0, 3)
        together.submit(waiting[:count])
        del waiting[:count]
        done.update({trajectory.request_id: trajectory for trajectory in together.step()})
    alone = make_engine(name, max_rows=1)
    alone.submit(requests)
    for request_id, lonely in run(alone).items():
        assert done[request_id].response_ids == lonely.response_ids
        torch.testing.assert_close(done[request_id].logprobs, lonely.logprobs, atol=1e-4, rtol=0)


def test_samples_of_one_prompt_share_its_prefill_and_differ(make_engine: MakeEngine, model_dir: ModelDir) -> None:
    engine = make_engine(max_rows=8)
    prompts = [[4, 5, 6], [7, 8], [4, 5, 6, 7, 8]]
    engine.submit([request(i, prompts[i % 3]) for i in range(24)])
    done = run(engine)
    assert len({tuple(done[i].response_ids) for i in range(0, 24, 3)}) > 1
    for trajectory in done.values():
        assert_logprobs(trajectory, full_logits(model_dir("qwen3"), trajectory), SamplingParams(1))


def test_short_requests_do_not_wait_for_long_ones(make_engine: MakeEngine) -> None:
    engine = make_engine(max_rows=2, max_length=40)
    engine.submit([request(0, [5], max_new_tokens=30, greedy=True)])
    engine.submit([request(i, [5], max_new_tokens=3, greedy=True) for i in range(1, 5)])
    order: list[int] = []
    while engine.has_work:
        order += [trajectory.request_id for trajectory in engine.step()]
    assert order == [1, 2, 3, 4, 0]


def test_the_end_of_sequence_token_is_part_of_the_response(make_engine: MakeEngine) -> None:
    """trl PR#6357: with pad == eos, a mask of padding also hid the real EOS."""
    engine = make_engine("llama")  # stops at tokens 1 and 2, has no pad token
    engine.submit([request(i, [4 + i % 7], max_new_tokens=30, temperature=3.0) for i in range(40)])
    done = run(engine).values()
    stopped = [trajectory for trajectory in done if trajectory.finish_reason == "stop"]
    assert {trajectory.response_ids[-1] for trajectory in stopped} == {1, 2}
    for trajectory in done:
        body = trajectory.response_ids[: -1 if trajectory.finish_reason == "stop" else None]
        assert not {1, 2} & set(body)
        assert len(trajectory.logprobs) == len(trajectory.response_ids)
        assert trajectory.finish_reason == "stop" or len(trajectory.response_ids) == 30


def test_every_token_knows_its_version(make_engine: MakeEngine) -> None:
    """rllm PR#622: an update in mid-sequence, but the whole response was stamped with the version at its end."""
    engine = make_engine(max_length=100)
    engine.set_version(7, KvCachePolicy.KEEP)
    engine.submit([request(0, [5], max_new_tokens=80, greedy=True)])
    for _ in range(57):
        engine.step()
    before = engine.tokens_generated
    engine.set_version(8, KvCachePolicy.KEEP)
    trajectory = run(engine)[0]
    assert before == 57
    total = len(trajectory.response_ids)
    assert trajectory.versions == [VersionSpan(0, 57, 7), VersionSpan(57, total, 8)]
    assert trajectory.oldest_version == 7
    assert (trajectory.group, trajectory.sample, trajectory.replica) == (0, 0, 3)


def _update_in_mid_sequence(
    make_engine: MakeEngine, model_dir: ModelDir, load_checkpoint: Callable[..., None], policy: KvCachePolicy
) -> tuple[list[Trajectory], dict[int, Trajectory]]:
    """Eight greedy requests, new weights after 4 forwards: what the update gave back, and what ended after it."""
    engine = make_engine(max_length=40)
    engine.submit([request(i, [3 + i] * (1 + i), max_new_tokens=20, greedy=True) for i in range(8)])
    done = {trajectory.request_id: trajectory for _ in range(4) for trajectory in engine.step()}
    assert not done
    load_checkpoint(engine, model_dir("qwen3", 1))
    returned = engine.set_version(1, policy)
    return returned, run(engine)


def test_recompute_goes_on_as_if_the_new_weights_had_read_it_all(
    make_engine: MakeEngine, model_dir: ModelDir, load_checkpoint: Callable[..., None]
) -> None:
    returned, done = _update_in_mid_sequence(make_engine, model_dir, load_checkpoint, KvCachePolicy.RECOMPUTE)
    assert not returned
    assert len(done) == 8
    for trajectory in done.values():
        expected = torch.cat(
            [full_logits(model_dir("qwen3", 0), trajectory)[:4], full_logits(model_dir("qwen3", 1), trajectory)[4:]]
        )
        assert_logprobs(trajectory, expected, SamplingParams(1))


def test_keep_goes_on_with_the_old_keys_and_values(
    make_engine: MakeEngine, model_dir: ModelDir, load_checkpoint: Callable[..., None]
) -> None:
    returned, done = _update_in_mid_sequence(make_engine, model_dir, load_checkpoint, KvCachePolicy.KEEP)
    assert not returned
    differences = []
    for trajectory in done.values():
        new = full_logits(model_dir("qwen3", 1), trajectory).log_softmax(-1)
        recomputed = new[range(len(trajectory.response_ids)), trajectory.response_ids]
        differences.append((torch.tensor(trajectory.logprobs) - recomputed)[4:].abs().max().item())
    assert len(done) == 8
    assert max(differences) > 1e-2


def test_abort_gives_back_what_was_generated(
    make_engine: MakeEngine, model_dir: ModelDir, load_checkpoint: Callable[..., None]
) -> None:
    returned, done = _update_in_mid_sequence(make_engine, model_dir, load_checkpoint, KvCachePolicy.ABORT)
    assert not done
    assert sorted(trajectory.request_id for trajectory in returned) == list(range(8))
    for trajectory in returned:
        assert trajectory.finish_reason == "abort"
        assert trajectory.versions == [VersionSpan(0, 4, 0)]


def test_a_prompt_asked_again_after_an_update_equals_a_cold_engine(
    make_engine: MakeEngine, model_dir: ModelDir, load_checkpoint: Callable[..., None]
) -> None:
    """NeMo-RL PR#4018: a prefix cache that outlived 17 versions."""
    warm, cold = make_engine(), make_engine(seed=1)
    warm.submit([request(0, [4, 5, 6], greedy=True)])
    run(warm)
    load_checkpoint(warm, model_dir("qwen3", 1))
    warm.set_version(1, KvCachePolicy.KEEP)
    for engine in (warm, cold):
        engine.submit([request(1, [4, 5, 6], greedy=True)])
    again, fresh = run(warm)[1], run(cold)[1]
    assert again.response_ids == fresh.response_ids
    torch.testing.assert_close(again.logprobs, fresh.logprobs)


def test_bfloat16_is_near_float32(make_engine: MakeEngine, model_dir: ModelDir) -> None:
    engine = make_engine(dtype="bfloat16")
    assert {tensor.dtype for tensor in engine.live_tensors().values()} == {torch.bfloat16}
    engine.submit(some_requests(8, seed=0))
    for trajectory in run(engine).values():
        logits = full_logits(model_dir("qwen3"), trajectory).log_softmax(-1)
        expected = logits[range(len(trajectory.response_ids)), trajectory.response_ids]
        torch.testing.assert_close(torch.tensor(trajectory.logprobs), expected, atol=0.3, rtol=0)


def test_weights_that_are_not_finite_are_an_error(make_engine: MakeEngine) -> None:
    engine = make_engine()
    next(iter(engine.live_tensors().values())).fill_(float("nan"))
    engine.set_version(9, KvCachePolicy.KEEP)
    engine.submit([request(0, [4])])
    with pytest.raises(SyncError, match="version 9 give logits that are not finite"):
        run(engine)


def test_versions_only_grow(make_engine: MakeEngine) -> None:
    engine = make_engine()
    with pytest.raises(SyncError, match="holds 0, and was told 0"):
        engine.set_version(0, KvCachePolicy.KEEP)
