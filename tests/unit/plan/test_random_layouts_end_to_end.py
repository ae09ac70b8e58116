"""Random backends: what discovery, correspondence, planner and packing say together must be what the loaders do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlbridge.sync.correspondence import correspond
from rlbridge.sync.layout.discover import discover
from rlbridge.sync.layout.dtypes import bit_view, torch_dtype
from rlbridge.sync.layout.elements import first_ids, paint
from rlbridge.sync.layout.spec import CheckpointSpec, TensorSpec
from rlbridge.sync.packing import check_header, prepare, write_header
from rlbridge.sync.plan.planner import plan_transfer
from rlbridge.sync.plan.program import HEADER_BYTES
from rlbridge.sync.plan.simulate import simulate
from rlbridge.transport.errors import DigestMismatchError
from rlbridge.transport.topology import NodeRates, Topology

Checkpoint = dict[str, torch.Tensor]
Formula = Callable[[Checkpoint, int, int], torch.Tensor]
"""A runtime tensor as (checkpoint, rank, ranks) makes it; only moves and pads, so that it also works on ids."""


@dataclass(frozen=True)
class Backend:
    """A made-up engine: runtime name to formula and dtype."""

    formulas: dict[str, tuple[Formula, str]]
    text: str

    def __repr__(self) -> str:
        return self.text

    def build(self, checkpoint: Checkpoint, rank: int, ranks: int) -> Checkpoint:
        return {n: f(checkpoint, rank, ranks).contiguous().to(torch_dtype(d)) for n, (f, d) in self.formulas.items()}


class Worker:
    """One rank of a backend with live tensors and a loader that writes into them."""

    def __init__(self, backend: Backend, spec: CheckpointSpec, rank: int, ranks: int) -> None:
        self.backend, self.rank, self.ranks = backend, rank, ranks
        blank = {n: torch.zeros(t.shape, dtype=torch_dtype(t.dtype)) for n, t in spec.tensors.items()}
        generator = torch.Generator().manual_seed(rank)
        self.live = {
            n: torch.randint(-9, 9, t.shape, generator=generator).to(t.dtype)
            for n, t in backend.build(blank, rank, ranks).items()
        }

    def load(self, weights) -> None:
        for name, tensor in self.backend.build(dict(weights), self.rank, self.ranks).items():
            self.live[name].copy_(tensor)

    def discover(self, spec: CheckpointSpec):
        before = {n: t.clone() for n, t in self.live.items()}
        layout = discover(spec, self.load, lambda: self.live)
        assert all(torch.equal(bit_view(before[n]), bit_view(self.live[n])) for n in before)
        return layout


def _chunk(tensor: torch.Tensor, dim: int, rank: int, ranks: int) -> torch.Tensor:
    return tensor.chunk(ranks, dim)[rank] if tensor.shape[dim] % ranks == 0 else tensor


@st.composite
def specs(draw) -> CheckpointSpec:
    shapes = st.lists(st.sampled_from([1, 2, 3, 4, 8, 12]), min_size=0, max_size=3).map(tuple)
    dtypes = st.sampled_from(["float32", "bfloat16", "float16"])
    found = draw(st.lists(st.tuples(shapes, dtypes), min_size=1, max_size=4))
    return CheckpointSpec({f"w{i}": TensorSpec(*item) for i, item in enumerate(found)})


def _moved(draw, name: str, shape: tuple[int, ...], *, complete: bool) -> tuple[Formula, str]:
    """A formula for one checkpoint tensor; ``complete`` keeps every element on some rank."""
    order = draw(st.permutations(range(len(shape))))
    dim = draw(st.integers(0, len(shape) - 1)) if shape else None
    cut = draw(st.sampled_from(["none", "step", "narrow"])) if shape and not complete else "none"
    step = draw(st.integers(1, 3))

    def formula(checkpoint: Checkpoint, rank: int, ranks: int) -> torch.Tensor:
        tensor = checkpoint[name]
        if cut == "step":
            tensor = tensor.index_select(dim, torch.arange(tensor.shape[dim])[::step])
        elif cut == "narrow":
            tensor = tensor.narrow(dim, tensor.shape[dim] // 2, tensor.shape[dim] - tensor.shape[dim] // 2)
        tensor = tensor if dim is None else _chunk(tensor, dim, rank, ranks)
        return tensor.permute(order) if order else tensor

    return formula, f"{name}{order}/{dim}:{cut}{step}"


@st.composite
def backends(draw, spec: CheckpointSpec, *, complete: bool) -> Backend:
    """Shards, steps, permutations, transposes; then pads, concatenations, stacks, replicas, casts and skips."""
    formulas: dict[str, tuple[Formula, str]] = {}
    texts: list[str] = []
    waiting = list(spec.tensors)
    dtypes = st.sampled_from(["float32", "bfloat16", "float16"])
    while waiting:
        name = waiting.pop(0)
        if not complete and len(waiting) and draw(st.booleans()) and draw(st.booleans()):
            continue
        first, text = _moved(draw, name, spec.tensors[name].shape, complete=complete)
        how = draw(st.sampled_from(["plain", "pad", "cat", "stack", "replicate"]))
        if how == "cat" and waiting:
            other, other_text = _moved(draw, waiting[0], spec.tensors[waiting[0]].shape, complete=complete)
            waiting.pop(0)
            text += "+" + other_text
        elif how == "cat":
            other = first
        else:
            other = first

        def formula(checkpoint, rank, ranks, first=first, other=other, how=how):
            one = first(checkpoint, rank, ranks)
            if how == "pad":
                return torch.cat([one.reshape(-1), one.new_zeros(3)])
            if how == "cat":
                two = other(checkpoint, rank, ranks)
                return torch.cat([one.reshape(-1), one.new_zeros(1), two.reshape(-1)])
            if how == "stack":
                return torch.stack([torch.zeros_like(one), one], dim=one.dim())
            if how == "replicate":
                return torch.stack([one, one], dim=0)
            return one

        dtype = draw(dtypes)
        formulas[f"p{len(formulas)}"] = (formula, dtype)
        texts.append(f"{how} {dtype} {text}")
    return Backend(formulas, "; ".join(texts))


@st.composite
def jobs(draw):
    spec = draw(specs())
    senders = draw(backends(spec, complete=True))
    receivers = draw(backends(spec, complete=False))
    ranks = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 4]))
    replicas = draw(st.integers(1, 2))
    nodes = draw(st.integers(1, 3))
    return spec, senders, receivers, ranks, replicas, nodes, draw(st.sampled_from([32, 64, 4096]))


few = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@given(st.data())
@few
def test_the_map_says_exactly_what_the_loader_does(data):
    spec = data.draw(specs())
    backend = data.draw(backends(spec, complete=False))
    ranks = data.draw(st.sampled_from([1, 2, 4]))
    ids = {
        n: torch.arange(first, first + torch.Size(spec.tensors[n].shape).numel()).reshape(spec.tensors[n].shape)
        for n, first in first_ids(spec).items()
    }
    for rank in range(ranks):
        layout = Worker(backend, spec, rank, ranks).discover(spec)
        painted = paint(spec, layout.runtime, layout.boxes)
        for name, (formula, _) in backend.formulas.items():
            expected = formula(ids, rank, ranks).contiguous().reshape(-1)
            assert painted[name].tolist() == expected.tolist()


def _sender_dtypes(spec: CheckpointSpec, backend: Backend) -> dict[str, str]:
    """The runtime dtype that each checkpoint tensor passes through on the senders, found by loading it alone."""
    found = {}
    for chosen in spec.tensors:
        marked = {n: torch.full(t.shape, float(n == chosen)) for n, t in spec.tensors.items()}
        found[chosen] = next(d for f, d in backend.formulas.values() if f(marked, 0, 1).any())
    return found


@given(jobs())
@few
def test_delivery_equals_a_fresh_load_bit_for_bit(job):
    spec, sending, receiving, (n_send, n_receive), replicas, n_nodes, bucket_bytes = job
    senders = {f"t{r}": Worker(sending, spec, r, n_send) for r in range(n_send)}
    receivers = {f"r{i}.{r}": Worker(receiving, spec, r, n_receive) for i in range(replicas) for r in range(n_receive)}
    sender_maps = {name: worker.discover(spec) for name, worker in senders.items()}
    receiver_maps = {name: worker.discover(spec) for name, worker in receivers.items()}
    places = [*senders, *receivers]
    topology = Topology(
        nodes={name: f"node{i % n_nodes}" for i, name in enumerate(places)},
        rates=NodeRates(1e9, 1e9, 1e10),
    )
    correspondence = correspond(spec, sender_maps, receiver_maps)
    plan = plan_transfer(correspondence, topology, bucket_bytes=bucket_bytes)
    programs = {name: plan.program(name) for name in places}
    simulated = simulate(spec, sender_maps, receiver_maps, programs)
    assert sum(simulated.received_bytes.values()) == plan.report()["bytes_total"]
    assert (plan.buckets.payload_bytes <= bucket_bytes).all()

    generator = torch.Generator().manual_seed(5)
    weights = {n: torch.randn(t.shape, generator=generator).to(torch_dtype(t.dtype)) for n, t in spec.tensors.items()}
    for worker in senders.values():
        worker.load(iter(weights.items()))
    messages: dict[int, torch.Tensor] = {}
    for name in senders:
        for bucket in programs[name].buckets:
            message = torch.empty(HEADER_BYTES + bucket.payload_bytes, dtype=torch.uint8)
            prepare(bucket, senders[name].live).pack(message[HEADER_BYTES:])
            write_header(message, 1, 2, bucket.bucket, message[HEADER_BYTES:])
            messages[bucket.bucket] = message
    for name, worker in receivers.items():
        for bucket in programs[name].buckets:
            check_header(messages[bucket.bucket], 1, 2, bucket.bucket)
            prepare(bucket, worker.live).unpack(messages[bucket.bucket][HEADER_BYTES:])

    through = _sender_dtypes(spec, sending)
    exported = {n: w.to(torch_dtype(through[n])).to(w.dtype) for n, w in weights.items()}
    for name, worker in receivers.items():
        fresh = Worker(receiving, spec, worker.rank, worker.ranks)
        fresh.load(iter(exported.items()))
        painted = paint(spec, receiver_maps[name].runtime, receiver_maps[name].boxes)
        for tensor, live in worker.live.items():
            loaded = torch.from_numpy(painted[tensor] > 0)
            assert torch.equal(bit_view(live).reshape(-1)[loaded], bit_view(fresh.live[tensor]).reshape(-1)[loaded])


@given(jobs())
@settings(max_examples=10, deadline=None)
def test_the_plan_is_the_same_whatever_order_the_workers_joined_in(job):
    spec, sending, receiving, (n_send, n_receive), replicas, n_nodes, bucket_bytes = job
    senders = {f"t{r}": Worker(sending, spec, r, n_send).discover(spec) for r in range(n_send)}
    receivers = {
        f"r{i}.{r}": Worker(receiving, spec, r, n_receive).discover(spec)
        for i in range(replicas)
        for r in range(n_receive)
    }
    nodes = {name: f"node{i % n_nodes}" for i, name in enumerate([*senders, *receivers])}

    def planned(turn: int):
        def turned(items: dict) -> dict:
            return dict(list(items.items())[::turn])

        topology = Topology(nodes=turned(nodes), rates=NodeRates(1e9, 1e9, 1e10))
        return plan_transfer(correspond(spec, turned(senders), turned(receivers)), topology, bucket_bytes=bucket_bytes)

    one, other = planned(1), planned(-1)
    assert one.hash == other.hash
    assert one.report() == other.report()
    assert [one.program(worker) for worker in nodes] == [other.program(worker) for worker in nodes]


def test_a_flipped_bit_is_found():
    message = torch.zeros(HEADER_BYTES + 32, dtype=torch.uint8)
    write_header(message, 1, 2, 3, message[HEADER_BYTES:])
    check_header(message, 1, 2, 3)
    message[HEADER_BYTES + 7] ^= 4
    with pytest.raises(DigestMismatchError, match="bucket 3"):
        check_header(message, 1, 2, 3)
