"""What goes into an engine and what comes out of it. The trainer reads these types and nothing else of ``rollout``."""

from __future__ import annotations

from typing import Literal

import msgspec


class SamplingParams(msgspec.Struct, frozen=True):
    """How tokens are drawn.

    Attributes:
        temperature: > 0; ignored if ``greedy``.
        top_p: nucleus mass in (0, 1]; 1 keeps everything.
        top_k: number of tokens kept; 0 keeps everything.
        max_new_tokens: a response is cut here (``finish_reason="length"``).
        greedy: take the most likely token (evaluation); logprobs are those of the untempered distribution.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    greedy: bool = False


class GenerationRequest(msgspec.Struct, frozen=True):
    """One response to be generated.

    Attributes:
        request_id: unique in the run.
        group: admission index of its prompt; all samples of a group share it.
        sample: index within the group.
        prompt_ids: tokens of the prompt, at least one.
        seed: seeds this request's own random stream, whatever it is batched with.
        sampling: how tokens are drawn.
    """

    request_id: int
    group: int
    sample: int
    prompt_ids: list[int]
    seed: int
    sampling: SamplingParams


class VersionSpan(msgspec.Struct, frozen=True):
    """Response tokens ``[start, stop)`` were sampled from forwards of policy ``version``."""

    start: int
    stop: int
    version: int


FinishReason = Literal["stop", "length", "abort"]


class Trajectory(msgspec.Struct, frozen=True):
    """One finished response.

    Attributes:
        request_id, group, sample, prompt_ids: as in the request.
        response_ids: sampled tokens ``[T]``, the end-of-sequence token included.
        logprobs: ``[T]`` log probability of each token under the distribution it was drawn from.
        versions: intervals that cover ``[0, T)`` without gaps, versions growing.
        finish_reason: ``stop`` (end of sequence), ``length`` (cut), ``abort`` (given back unfinished).
        replica: index of the rollout replica that made it.
    """

    request_id: int
    group: int
    sample: int
    prompt_ids: list[int]
    response_ids: list[int]
    logprobs: list[float]
    versions: list[VersionSpan]
    finish_reason: FinishReason
    replica: int

    @property
    def oldest_version(self) -> int:
        """Version of its oldest token: what staleness counts from."""
        return min(span.version for span in self.versions)
