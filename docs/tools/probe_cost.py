"""What one pass of the probe costs, compared with the loader that it probes, on made-up layers of a language model.

OMP_NUM_THREADS=1 python docs/tools/probe_cost.py --parameters 1e8
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Callable, Iterable

import torch

from rlbridge.sync.layout.discover import discover
from rlbridge.sync.layout.guess import guess_boxes
from rlbridge.sync.layout.loading import Loader
from rlbridge.sync.layout.probe import digits_for, probe
from rlbridge.sync.layout.spec import CheckpointSpec, TensorSpec

HIDDEN, INNER, KV, VOCABULARY = 2048, 6144, 512, 32768


def layered(parameters: float) -> CheckpointSpec:
    """A checkpoint with a language model's shapes: an embedding and as many layers as fit."""
    shapes = {"embed": (VOCABULARY, HIDDEN)}
    layer = {"q": (HIDDEN, HIDDEN), "k": (KV, HIDDEN), "v": (KV, HIDDEN), "o": (HIDDEN, HIDDEN)}
    layer |= {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER), "norm": (HIDDEN,)}
    in_layer = sum(torch.Size(shape).numel() for shape in layer.values())
    for i in range(max(1, round((parameters - VOCABULARY * HIDDEN) / in_layer))):
        shapes |= {f"{i}.{name}": shape for name, shape in layer.items()}
    return CheckpointSpec({name: TensorSpec(shape, "bfloat16") for name, shape in shapes.items()})


class Engine:
    """Fuses q, k, v and gate, up, as engines do; ``live`` are its tensors."""

    def __init__(self, spec: CheckpointSpec) -> None:
        self.live: dict[str, torch.Tensor] = {}
        self.place: dict[str, torch.Tensor] = {}
        for i in sorted({name.split(".")[0] for name in spec.tensors if "." in name}, key=int):
            self._fuse(spec, f"{i}.qkv", [f"{i}.{kind}" for kind in "qkv"])
            self._fuse(spec, f"{i}.gate_up", [f"{i}.gate", f"{i}.up"])
        for name in spec.tensors:
            if name not in self.place:
                self._fuse(spec, name, [name])

    def _fuse(self, spec: CheckpointSpec, fused: str, names: list[str]) -> None:
        rows = [spec.tensors[name].shape[0] for name in names]
        self.live[fused] = torch.zeros((sum(rows), *spec.tensors[names[0]].shape[1:]), dtype=torch.bfloat16)
        self.place |= dict(zip(names, self.live[fused].split(rows), strict=True))

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """The loader: plain copies."""
        for name, tensor in weights:
            self.place[name].copy_(tensor)


def seconds(work: Callable[[], object]) -> float:
    """CPU time of one call, which other processes on the machine do not lengthen as they do wall time."""
    begin = time.process_time()
    work()
    return time.process_time() - begin


def passes(engine: Engine, spec: CheckpointSpec, rounds: int) -> tuple[float, dict[str, float], int]:
    """Median seconds of the loader alone, and of one pass with either reader, alternated; the number of passes.

    A pass fills in the poison, makes the digits, loads them, and reads.
    """
    loader = Loader(spec, engine.load, lambda: engine.live, lambda flag: flag)
    weights = {name: torch.ones(tensor.shape, dtype=torch.bfloat16) for name, tensor in spec.tensors.items()}
    readers = {"rectangles": lambda: guess_boxes(loader, engine.live), "anything": lambda: probe(loader, engine.live)}
    n_passes = digits_for(loader).passes
    alone: list[float] = []
    probing: dict[str, list[float]] = {name: [] for name in readers}
    for _ in range(rounds + 1):  # the first one touches the memory for the first time
        alone.append(seconds(lambda: engine.load(weights.items())))
        for name, read in readers.items():
            probing[name].append(seconds(read) / n_passes)
    return statistics.median(alone[1:]), {n: statistics.median(took[1:]) for n, took in probing.items()}, n_passes


def peak_gib() -> float:
    """Most memory this process ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 2**30


def main() -> None:
    """Print one line per figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=float, default=1e8)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    spec = layered(options.parameters)
    engine = Engine(spec)
    count = sum(torch.Size(tensor.shape).numel() for tensor in spec.tensors.values())
    lines = [f"{count / 1e6:.0f} M parameters in {len(spec.tensors)} tensors, bfloat16; CPU seconds of one thread"]
    for method in ("probe", "auto"):
        took_s = seconds(lambda method=method: discover(spec, engine.load, lambda: engine.live, method=method))
        lines.append(f"discovery, {method:5}      {took_s:7.2f} s, peak memory of the process {peak_gib():.2f} GiB")
    alone_s, probing_s, n_passes = passes(engine, spec, options.rounds)
    lines.insert(1, f"loader alone          {alone_s:7.3f} s")
    for name, pass_s in probing_s.items():
        lines.append(f"one of {n_passes} passes, {name:10} {pass_s:.3f} s, {pass_s / alone_s:.2f} times the loader")
    print("\n".join(lines))  # noqa: T201


if __name__ == "__main__":
    main()
