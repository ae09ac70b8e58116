"""Names of parallelisms: ``fsdp8.tp2`` for a trainer, ``tp4x8`` for rollouts. Pure.

A name is parts joined by dots, in any order, each a kind and a size. Sizes of 1 may be left out.

- Trainer: ``pp`` pipeline stages x (``fsdp`` shards, or ``hsdpRxS``: R replicas of S shards) x ``tp`` tensor-parallel
  ranks. ``ep`` spreads experts over the ranks of one replica of a stage, so it does not multiply: ``pp4.fsdp8.ep8`` is
  32 ranks. Ranks are counted with ``tp`` innermost, then shards, replicas, stages.
- Rollout: ``pp`` stages x ``max(tp, ep)`` ranks, and ``xR`` at the end for R replicas. Where ``ep`` is larger than
  ``tp``, attention is repeated over ``ep / tp`` groups (data-parallel attention); where it is smaller, each expert is
  sliced over the ``tp / ep`` ranks that share it.
"""

from __future__ import annotations

import re

import msgspec

from rlbridge.transport.errors import ConfigError

_TRAINER_KINDS = ("pp", "fsdp", "hsdp", "tp", "ep")
_ROLLOUT_KINDS = ("pp", "tp", "ep")


class TrainerParallel(msgspec.Struct, frozen=True):
    """A trainer's parallelism; ``replicas x shards`` is FSDP2's mesh.

    Attributes:
        stages, replicas, shards, tensor, experts: sizes, see the module's text.
    """

    stages: int = 1
    replicas: int = 1
    shards: int = 1
    tensor: int = 1
    experts: int = 1

    @property
    def ranks(self) -> int:
        """Workers in all."""
        return self.stages * self.replicas * self.shards * self.tensor


class RolloutParallel(msgspec.Struct, frozen=True):
    """Parallelism of equal rollout replicas.

    Attributes:
        stages, tensor, experts: sizes of one replica; ``experts`` is 0 where they are sliced like everything else.
        replicas: how many there are.
    """

    stages: int = 1
    tensor: int = 1
    experts: int = 0
    replicas: int = 1

    @property
    def stage_ranks(self) -> int:
        """Workers of one stage of one replica."""
        return max(self.tensor, self.experts)

    @property
    def ranks(self) -> int:
        """Workers of one replica."""
        return self.stages * self.stage_ranks


def trainer_parallel(name: str) -> TrainerParallel:
    """Parse a trainer's parallelism, e.g. ``fsdp8``, ``fsdp8.tp2``, ``pp4.fsdp8.ep8``, ``hsdp2x8``.

    Raises:
        ConfigError: the name cannot be read, or its sizes contradict each other.
    """
    found = _parts(name, name, _TRAINER_KINDS)
    if "fsdp" in found and "hsdp" in found:
        raise ConfigError(f"{name}: fsdp and hsdp are the same axis; give one of them")
    replicas, shards = found.get("hsdp", (1, *found.get("fsdp", (1,))))
    stages, tensor, experts = (found.get(kind, (1,))[0] for kind in ("pp", "tp", "ep"))
    if (shards * tensor) % experts:
        raise ConfigError(
            f"{name}: {shards * tensor} ranks of a stage cannot be cut into groups of ep{experts}: ep spreads experts "
            "over the ranks that fsdp and tp make"
        )
    return TrainerParallel(stages, replicas, shards, tensor, experts)


def rollout_parallel(name: str) -> RolloutParallel:
    """Parse a rollout's parallelism, e.g. ``tp4x8`` (8 replicas of 4 ranks), ``tp8.ep64x4``, ``pp2.tp8``.

    Raises:
        ConfigError: the name cannot be read, or its sizes contradict each other.
    """
    body, replicas = name, 1
    counted = re.fullmatch(r"(.+\d)x(\d+)", name)
    if counted:
        body, replicas = counted[1], _positive(name, int(counted[2]))
    found = _parts(name, body, _ROLLOUT_KINDS)
    stages, tensor = (found.get(kind, (1,))[0] for kind in ("pp", "tp"))
    experts = found.get("ep", (0,))[0]
    if experts and max(experts, tensor) % min(experts, tensor):
        raise ConfigError(f"{name}: one of tp{tensor} and ep{experts} must be a multiple of the other")
    return RolloutParallel(stages, tensor, experts, replicas)


def _parts(name: str, body: str, kinds: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for part in body.split("."):
        match = re.fullmatch(r"([a-z]+)(\d+)(?:x(\d+))?", part)
        kind = match[1] if match else ""
        if match is None or kind not in kinds or (match[3] is not None) != (kind == "hsdp"):
            choices = ", ".join("hsdpRxS" if choice == "hsdp" else f"{choice}N" for choice in kinds)
            raise ConfigError(f"{name}: cannot read {part!r}; parts are {choices}, joined by dots")
        if kind in found:
            raise ConfigError(f"{name}: {kind} is given twice")
        found[kind] = tuple(_positive(name, int(size)) for size in match.groups()[1:] if size is not None)
    return found


def _positive(name: str, size: int) -> int:
    if size < 1:
        raise ConfigError(f"{name}: sizes are at least 1")
    return size
