"""What is known about the sequences that decode together: one column per property, one row per live sequence.

Columns, so that a step costs a few vector operations whatever the number of rows. Live rows are ``[0, count)``.
Notation: ``R`` rows of capacity, ``S`` the longest sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rlbridge.rollout.engine.sampling import RowSampling, uniforms
from rlbridge.rollout.trajectory import FinishReason, GenerationRequest, Trajectory, VersionSpan

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class Rows:
    """The state of the live sequences, apart from their keys and values.

    Args:
        capacity: ``R``.
        length: ``S``.
        stop_tokens: tokens that end a response.
        replica: stamped on trajectories.
    """

    def __init__(self, capacity: int, length: int, stop_tokens: frozenset[int], replica: int) -> None:
        self.capacity = capacity
        self._stop_tokens = np.array(sorted(stop_tokens), dtype=np.int64)
        self._replica = replica
        self._requests: list[GenerationRequest] = []
        self.tokens = np.zeros((capacity, length), dtype=np.int64)
        self.prompt_length = np.zeros(capacity, dtype=np.int64)
        self.produced = np.zeros(capacity, dtype=np.int64)
        self._logprobs = np.zeros((capacity, length), dtype=np.float32)
        self._versions = np.zeros((capacity, length), dtype=np.int64)
        self._limit = np.zeros(capacity, dtype=np.int64)
        self._seeds = np.zeros(capacity, dtype=np.uint64)
        self._temperature = np.ones(capacity, dtype=np.float32)
        self._top_p = np.ones(capacity, dtype=np.float32)
        self._top_k = np.zeros(capacity, dtype=np.int64)
        self._greedy = np.zeros(capacity, dtype=np.bool_)
        self._columns: tuple[npt.NDArray[Any], ...] = (
            *(self.tokens, self.prompt_length, self.produced, self._logprobs, self._versions, self._limit),
            *(self._seeds, self._temperature, self._top_p, self._top_k, self._greedy),
        )

    @property
    def count(self) -> int:
        """Number of live rows."""
        return len(self._requests)

    @property
    def cached(self) -> Ints:
        """Tokens of each live row whose keys and values exist, int64 ``[count]``: all but the one sampled last."""
        return self.prompt_length[: self.count] + self.produced[: self.count] - 1

    def admit(self, requests: Sequence[GenerationRequest]) -> slice:
        """Append rows for ``requests``, which fit; returns where they are."""
        start = self.count
        for row, request in enumerate(requests, start):
            sampling, prompt = request.sampling, request.prompt_ids
            self.tokens[row, : len(prompt)] = prompt
            self.prompt_length[row] = len(prompt)
            self._limit[row] = sampling.max_new_tokens
            self._seeds[row] = request.seed & 0xFFFFFFFFFFFFFFFF
            # A greedy row samples from the plain distribution, so that its logprobs are the model's own.
            self._temperature[row] = 1.0 if sampling.greedy else sampling.temperature
            self._top_p[row] = 1.0 if sampling.greedy else sampling.top_p
            self._top_k[row] = 0 if sampling.greedy else sampling.top_k
            self._greedy[row] = sampling.greedy
        self._requests.extend(requests)
        admitted = slice(start, self.count)
        self.produced[admitted] = 0
        return admitted

    def sampling(self, rows: slice) -> tuple[RowSampling, torch.Tensor]:
        """How the next token of ``rows`` is drawn: parameters and one uniform number per row."""
        columns = (self._temperature, self._top_p, self._top_k, self._greedy)
        return RowSampling(*(torch.from_numpy(column[rows]) for column in columns)), uniforms(
            self._seeds[rows], self.produced[rows]
        )

    def record(self, rows: slice, tokens: Ints, logprobs: npt.NDArray[np.float32], version: int) -> Bools:
        """Append one sampled token to each of ``rows``; returns which live rows have ended, bool ``[count]``."""
        index, produced = np.arange(rows.start, rows.stop), self.produced[rows]
        self.tokens[index, self.prompt_length[rows] + produced] = tokens
        self._logprobs[index, produced] = logprobs
        self._versions[index, produced] = version
        self.produced[rows] += 1
        ended = np.zeros(self.count, dtype=np.bool_)
        ended[rows] = np.isin(tokens, self._stop_tokens) | (self.produced[rows] >= self._limit[rows])
        return ended

    def retire(self, ended: Bools) -> tuple[Ints, Ints]:
        """Forget rows and close the gaps with the last ones; returns the moves, (source rows, target rows)."""
        live = np.flatnonzero(~ended)
        remaining = len(live)
        source, target = live[live >= remaining], np.flatnonzero(ended[:remaining])
        for column in self._columns:
            column[target] = column[source]
        for old, new in zip(source.tolist(), target.tolist(), strict=True):
            self._requests[new] = self._requests[old]
        del self._requests[remaining:]
        return source, target

    def finished(self, row: int) -> Trajectory:
        """The trajectory of a row that ended by itself."""
        last = self.tokens[row, self.prompt_length[row] + self.produced[row] - 1]
        return self.trajectory(row, "stop" if last in self._stop_tokens else "length")

    def trajectory(self, row: int, reason: FinishReason) -> Trajectory:
        """What ``row`` has produced so far."""
        request, start, count = self._requests[row], int(self.prompt_length[row]), int(self.produced[row])
        return Trajectory(
            request_id=request.request_id,
            group=request.group,
            sample=request.sample,
            prompt_ids=request.prompt_ids,
            response_ids=self.tokens[row, start : start + count].tolist(),
            logprobs=self._logprobs[row, :count].tolist(),
            versions=_intervals(self._versions[row, :count].tolist()),
            finish_reason=reason,
            replica=self._replica,
        )


def _intervals(versions: list[int]) -> list[VersionSpan]:
    """Run lengths of the versions of a response's tokens."""
    bounds = [0, *(i for i in range(1, len(versions)) if versions[i] != versions[i - 1]), len(versions)]
    return [VersionSpan(start, stop, versions[start]) for start, stop in pairwise(bounds)]
