"""rlbridge's own decode loop over any transformers causal language model.

    submit ──▶ waiting ──admit──▶ live rows ──ended──▶ trajectories
                        prefill    │    ▲
                                   └────┘ one forward, one token per row

Every ``step`` is one forward boundary: sequences of different lengths never wait for each other, and weights may
change between any two steps. Notation: ``B`` rows of a forward, ``T`` tokens of a row in it, ``L`` attended positions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch

from rlbridge.rollout.config import RolloutConfig
from rlbridge.rollout.engine.cache import RowCache
from rlbridge.rollout.engine.model import CausalModel, stop_tokens
from rlbridge.rollout.engine.rows import Ints, Rows
from rlbridge.rollout.engine.sampling import check_sampling, draw
from rlbridge.rollout.engine.weights import LiveWeights
from rlbridge.rollout.trajectory import GenerationRequest, Trajectory
from rlbridge.sync.config import KvCachePolicy
from rlbridge.transport.errors import ConfigError, SyncError, TaskError

_PREFILL_TOKENS = 16384
"""Most tokens (padding included) of one prefill forward: bounds its activations."""
_ADMIT_SHARE = 8
"""New rows wait until 1/8 of the rows is free (or all that wait fit): many small prefills cost more than they give."""


class TransformersEngine:
    """Implements ``Engine``. Weights on disk are never read: they arrive through ``load_weights`` or ``live_tensors``.

    Args:
        model_dir: a Hugging Face directory.
        config: sizes and dtype.
        replica: stamped on trajectories.

    Raises:
        ConfigError: the directory or the sizes are unusable.
    """

    def __init__(self, model_dir: Path, config: RolloutConfig, replica: int = 0) -> None:
        if config.max_rows < 1 or config.max_length < 2:
            raise ConfigError(
                f"rollout.max_rows={config.max_rows} must be at least 1 and "
                f"rollout.max_length={config.max_length} at least 2 (a prompt token and a response token)"
            )
        self._model = CausalModel(model_dir, config.dtype, config.max_length)
        self._weights = LiveWeights(self._model.module)
        self._max_length = config.max_length
        self._rows = Rows(config.max_rows, config.max_length, stop_tokens(model_dir), replica)
        self._cache = RowCache(config.max_rows, config.max_length)
        self._waiting: deque[GenerationRequest] = deque()
        self._version: int | None = None
        self._tokens_generated = 0

    @property
    def version(self) -> int | None:
        """Policy version of the weights; ``None`` until the first ``set_version``."""
        return self._version

    @property
    def has_work(self) -> bool:
        """Whether a request is waiting or being decoded."""
        return bool(self._waiting) or self._rows.count > 0

    @property
    def tokens_generated(self) -> int:
        """Tokens sampled since the engine was made."""
        return self._tokens_generated

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy checkpoint tensors into the live ones (see ``LiveWeights.load``)."""
        self._weights.load(weights)

    def live_tensors(self) -> dict[str, torch.Tensor]:
        """Every parameter and persistent buffer, tied ones under all of their names."""
        return self._weights.live()

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests: all of them or, if one is unusable, none (``TaskError``, ``ConfigError``)."""
        for request in requests:
            self._check(request)
        self._waiting.extend(requests)

    @torch.inference_mode()
    def step(self) -> list[Trajectory]:
        """Run one forward, over newly admitted prompts if there are any, else over all live rows."""
        if self._version is None:
            raise SyncError("the engine holds no policy version yet; call set_version once weights are loaded")
        if not self.has_work:
            return []
        if admitted := self._admissible():
            rows = self._rows.admit([self._waiting.popleft() for _ in range(admitted)])
            logits = self._prefill(rows)
        else:
            rows = slice(0, self._rows.count)
            logits = self._forward(np.arange(rows.stop), self._rows.cached, self._rows.cached, 0)
        return self._sample(rows, logits, self._version)

    def abort(self) -> list[Trajectory]:
        """Give back every sequence in mid-generation; requests that have not begun stay queued."""
        count = self._rows.count
        aborted = [self._rows.trajectory(row, "abort") for row in range(count)]
        self._rows.retire(np.ones(count, dtype=np.bool_))
        return aborted

    @torch.inference_mode()
    def set_version(self, version: int, kv_cache: KvCachePolicy) -> list[Trajectory]:
        """Say that the live tensors now hold ``version``; returns the trajectories that ``kv_cache`` aborted."""
        if self._version is not None and version <= self._version:
            raise SyncError(f"versions only grow: the engine holds {self._version}, and was told {version}")
        self._version = version
        if kv_cache is KvCachePolicy.ABORT:
            return self.abort()
        if kv_cache is KvCachePolicy.RECOMPUTE:
            rows = np.arange(self._rows.count)
            self._fill(rows, self._rows.cached, 0)
        return []

    def _check(self, request: GenerationRequest) -> None:
        who, prompt, limit = f"request {request.request_id}", request.prompt_ids, request.sampling.max_new_tokens
        check_sampling(request.sampling, who)
        if not prompt:
            raise TaskError(f"{who}: its prompt is empty; give at least one token")
        if min(prompt) < 0 or max(prompt) >= self._model.vocabulary:
            bad = next(token for token in prompt if not 0 <= token < self._model.vocabulary)
            raise TaskError(
                f"{who}: prompt token {bad} is outside the model's vocabulary of {self._model.vocabulary}; "
                "use the model's own tokenizer"
            )
        if len(prompt) + limit > self._max_length:
            raise TaskError(
                f"{who}: a prompt of {len(prompt)} tokens and max_new_tokens={limit} do not fit "
                f"rollout.max_length={self._max_length}; raise it to {len(prompt) + limit} or shorten one of them"
            )

    def _admissible(self) -> int:
        """How many waiting requests enter now."""
        free = self._rows.capacity - self._rows.count
        wanted = min(len(self._waiting), max(1, self._rows.capacity // _ADMIT_SHARE))
        return min(free, len(self._waiting)) if free >= wanted else 0

    def _prefill(self, rows: slice) -> torch.Tensor:
        """Logits after the prompts of new rows ``[B, V]``. Equal prompts (a group's samples) are computed once."""
        lengths = self._rows.prompt_length
        prompts = [self._rows.tokens[row, : lengths[row]].tobytes() for row in range(rows.start, rows.stop)]
        places: dict[bytes, int] = {}
        inverse = torch.tensor([places.setdefault(prompt, len(places)) for prompt in prompts])
        first_rows = rows.start + np.unique(inverse.numpy(), return_index=True)[1]
        logits = self._fill(first_rows, lengths[first_rows], rows.start)
        if len(places) < len(prompts):
            self._cache.move(rows.start + inverse, torch.arange(rows.start, rows.stop), int(lengths[rows].max()))
        return logits[inverse]

    def _fill(self, rows: Ints, lengths: Ints, start: int) -> torch.Tensor:
        """Compute keys and values of the first ``lengths`` tokens of ``rows`` into cache rows from ``start`` on.

        Returns the logits after the last of these tokens, ``[len(rows), V]``.
        """
        if not len(rows):
            return torch.empty(0, self._model.vocabulary)
        chunk = max(1, _PREFILL_TOKENS // int(lengths.max()))
        parts = [slice(at, at + chunk) for at in range(0, len(rows), chunk)]
        zeros = np.zeros_like(lengths)
        return torch.cat([self._forward(rows[p], zeros[p], lengths[p] - 1, start + p.start) for p in parts])

    def _forward(self, rows: Ints, first: Ints, last: Ints, start: int) -> torch.Tensor:
        """One forward over tokens ``first..last`` of each row, right-aligned; returns the last logits ``[B, V]``.

        Right-aligned, because then the last token of every row is in the last column and only it meets the head.
        Padding writes to the cache's dump and may attend to anything: nobody reads what it computes.
        """
        width, length = int((last - first).max()) + 1, int(last.max()) + 1
        positions = np.arange(1 - width, 1) + last[:, None]
        padding = positions < first[:, None]
        tokens = self._rows.tokens[rows[:, None], np.maximum(positions, 0)]
        slots = torch.from_numpy(np.where(padding, self._cache.dump, positions))
        self._cache.aim(start, slots, length)
        hidden = torch.arange(length) > slots[:, None, :, None]
        mask = torch.zeros(hidden.shape, dtype=self._model.dtype)
        mask.masked_fill_(hidden, torch.finfo(self._model.dtype).min)
        position_ids = torch.from_numpy(np.maximum(positions, 0))
        return self._model.last_logits(torch.from_numpy(tokens), position_ids, mask, self._cache)

    def _sample(self, rows: slice, logits: torch.Tensor, version: int) -> list[Trajectory]:
        """Draw a token for each of ``rows`` and retire those that ended."""
        tokens, logprobs = draw(logits, *self._rows.sampling(rows))
        if not bool(torch.isfinite(logprobs).all()):
            raise SyncError(f"the weights of version {version} give logits that are not finite; did training diverge?")
        ended = self._rows.record(rows, tokens.numpy(), logprobs.numpy(), version)
        self._tokens_generated += rows.stop - rows.start
        if not ended.any():
            return []
        finished = [self._rows.finished(row) for row in np.flatnonzero(ended).tolist()]
        source, target = self._rows.retire(ended)
        if len(source):
            length = int(self._rows.cached.max())
            self._cache.move(torch.from_numpy(source), torch.from_numpy(target), length)
        return finished
