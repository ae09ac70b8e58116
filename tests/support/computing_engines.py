"""Small engines and trainers whose loaders do what real ones do beside copying, over one small checkpoint.

An engine's ``weights`` are everything that it computes with; after an update they must equal, bit for bit, what a fresh
engine has that loaded the exported checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from rlbridge.sync import CheckpointSpec, TensorSpec

SHAPES = {
    "embed": (512, 128),
    "norm": (128,),
    "a_log": (16,),
    "gate": (256, 128),
    "up": (256, 128),
    "down": (128, 256),
}
SPEC = CheckpointSpec({name: TensorSpec(shape, "bfloat16") for name, shape in SHAPES.items()})

Pairs = Iterable[tuple[str, torch.Tensor]]
Tensors = dict[str, torch.Tensor]


def weights_of(version: int) -> Tensors:
    """The fp32 weights that the trainer has at ``version``."""
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def checkpoint_of(version: int) -> Tensors:
    """What is exported as ``version``."""
    return {name: tensor.to(torch.bfloat16) for name, tensor in weights_of(version).items()}


def quantised(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``[out, in]`` as int8 and the scale of each row, fp32 ``[out, 1]``."""
    scale = weight.float().abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / 127
    return (weight.float() / scale).round().clamp(-127, 127).to(torch.int8), scale


class Rows:
    """Keeps rows ``rank`` of ``world`` of every tensor: an FSDP-like trainer, or an unsharded engine."""

    def __init__(self, rank: int = 0, world: int = 1, dtype: torch.dtype = torch.float32) -> None:
        self.rows = {n: slice(rank * s[0] // world, (rank + 1) * s[0] // world) for n, s in SHAPES.items()}
        self.weights = {n: torch.zeros(SHAPES[n], dtype=dtype)[rows].clone() for n, rows in self.rows.items()}

    def load_weights(self, weights: Pairs) -> None:
        for name, tensor in weights:
            self.weights[name].copy_(tensor[self.rows[name]])

    def live_tensors(self) -> Tensors:
        return self.weights

    def train(self, version: int) -> None:
        """Have the weights of ``version``."""
        for name, tensor in weights_of(version).items():
            self.weights[name].copy_(tensor[self.rows[name]])

    after_load: Callable[[], None] | None = None
    export: Callable[[str], torch.Tensor] | None = None


class Fused:
    """Rank ``rank`` of ``world`` of a bf16 engine: gate and up fused and cut by rows, down by columns."""

    after_load = None

    def __init__(self, rank: int = 0, world: int = 1) -> None:
        self.rank, self.world = rank, world
        bf16 = torch.bfloat16
        self.weights = {
            "embed": torch.zeros(512 // world, 128, dtype=bf16),
            "norm": torch.zeros(128, dtype=bf16),
            "a_log": torch.zeros(16, dtype=bf16),
            "gate_up": torch.zeros(512 // world, 128, dtype=bf16),
            "down": torch.zeros(128, 256 // world, dtype=bf16),
        }

    def load_weights(self, weights: Pairs) -> None:
        for name, tensor in weights:
            if name in ("gate", "up"):
                half = self.weights["gate_up"].chunk(2)[name == "up"]
                half.copy_(tensor.chunk(self.world)[self.rank])
            elif name == "embed":
                self.weights[name].copy_(tensor.chunk(self.world)[self.rank])
            elif name == "down":
                self.weights[name].copy_(tensor.chunk(self.world, dim=1)[self.rank])
            else:
                self.weights[name].copy_(tensor)

    def live_tensors(self) -> Tensors:
        return self.weights


class Computing:
    """``1 + w`` norms, ``-exp(a_log)``, int8 with scales, a cloned head, and a kernel layout made after loading."""

    def __init__(self) -> None:
        bf16 = torch.bfloat16
        self.live = {
            "embed": torch.zeros(512, 128, dtype=bf16),
            "head": torch.zeros(512, 128, dtype=bf16),  # tied in the checkpoint, a clone here
            "norm": torch.ones(128, dtype=bf16),
            "a": torch.zeros(16),
            "gate_up": torch.zeros(512, 128, dtype=bf16),
            "down": torch.zeros(128, 256, dtype=torch.int8),
            "down_scale": torch.zeros(128, 1),
        }
        self.kernel = torch.zeros(128, 512, dtype=bf16)
        self.loads = 0

    @property
    def weights(self) -> Tensors:
        return self.live | {"kernel": self.kernel}

    def load_weights(self, weights: Pairs) -> None:
        self.loads += 1
        for name, tensor in weights:
            if name == "embed":
                self.live["embed"].copy_(tensor)
                self.live["head"].copy_(tensor)
            elif name == "norm":
                self.live["norm"].copy_(1 + tensor)
            elif name == "a_log":
                self.live["a"].copy_(-torch.exp(tensor.float()))
            elif name == "down":
                for live, value in zip(("down", "down_scale"), quantised(tensor), strict=True):
                    self.live[live].copy_(value)
            else:
                self.live["gate_up"].chunk(2)[name == "up"].copy_(tensor)

    def after_load(self) -> None:
        """Swap the halves and transpose, as a fused kernel wants them: a new tensor each time."""
        gate, up = self.live["gate_up"].chunk(2)
        self.kernel = torch.cat([up, gate]).t().contiguous()

    def live_tensors(self) -> Tensors:
        return self.live


class Swapping(Computing):
    """Has its fused weight in the kernel's layout only; ``load_weights`` knows, and puts both halves in place."""

    after_load = None  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self.live["gate_up"] = torch.zeros(128, 512, dtype=torch.bfloat16)

    def load_weights(self, weights: Pairs) -> None:
        def others() -> Any:
            for name, tensor in weights:
                if name in ("gate", "up"):
                    self.live["gate_up"].t().chunk(2)[name == "gate"].copy_(tensor)
                else:
                    yield name, tensor

        super().load_weights(others())


class OffsetNorm(Rows):
    """A trainer that keeps ``norm - 1``, which its loader computes; ``export`` gives the checkpoint's norm back."""

    def load_weights(self, weights: Pairs) -> None:
        for name, tensor in weights:
            self.weights[name].copy_(tensor[self.rows[name]])
            if name == "norm":
                self.weights[name].sub_(1)

    def train(self, version: int) -> None:
        # The checkpoint's value plus or minus one is exact in fp32.
        super().train(version)
        self.weights["norm"].copy_(checkpoint_of(version)["norm"][self.rows["norm"]].float() - 1)

    def export(self, name: str) -> torch.Tensor:  # type: ignore[override]
        return self.weights[name] + 1


ENGINES: dict[str, Callable[[int, int], Any]] = {
    "float32": lambda rank, world: Rows(rank, world, torch.float32),
    "bfloat16": lambda rank, world: Rows(rank, world, torch.bfloat16),
    "fused": Fused,
    "computing": lambda rank, world: Computing(),
    "swapping": lambda rank, world: Swapping(),
    "offset_norm": OffsetNorm,
}


def wrong_at(engine: Any, fresh: Any, checkpoint: Tensors) -> list[str]:
    """Tensors of ``engine`` that differ in any bit from those of ``fresh`` after it loaded ``checkpoint``."""
    fresh.load_weights(iter(checkpoint.items()))
    if fresh.after_load is not None:
        fresh.after_load()
    want = fresh.weights
    return [name for name, tensor in engine.weights.items() if not torch.equal(tensor, want[name])]
