"""Each class of operations that a trace follows, compared with the same operation on numbered elements."""

from __future__ import annotations

import math

import pytest
import torch

from rlbridge.sync.layout.elements import first_ids, paint
from rlbridge.sync.layout.live import owners, specs
from rlbridge.sync.layout.spec import CheckpointSpec, TensorSpec
from rlbridge.sync.layout.trace import Traced, trace

A, B = (6, 10), (4, 10)
SPEC = CheckpointSpec({"a": TensorSpec(A, "float64"), "b": TensorSpec(B, "float64")})


def traced(spec, formula, live) -> Traced:
    """Trace ``out[:] = formula(**checkpoint)``."""
    return trace(spec, lambda weights: live["out"].copy_(formula(**dict(weights))), lambda: live)


def check(formula, boxes=None, spec=SPEC):
    """The boxes of ``out = formula(a, b)`` are what the formula does to numbers; constants must be 0."""
    firsts = first_ids(spec)
    ids = {
        name: torch.arange(firsts[name], firsts[name] + math.prod(tensor.shape), dtype=torch.float64)
        for name, tensor in spec.tensors.items()
    }
    expected = formula(**{name: flat.reshape(spec.tensors[name].shape) for name, flat in ids.items()})
    live = {"out": torch.full_like(expected, -1.0, memory_format=torch.contiguous_format)}
    found = traced(spec, formula, live)
    assert (found.untraced, found.opaque) == ({}, [])
    assert paint(spec, specs(owners(live)), found.boxes)["out"].tolist() == expected.reshape(-1).long().tolist()
    assert (live["out"] == -1).all()
    assert boxes is None or len(found.boxes) == boxes


def buffer(a, b):
    out = a.new_empty(12, 10)
    out.zero_()
    out[2:6] = b
    out[6:].copy_(a)
    out[7, ::2] = 0
    return out


def scattered(a, b):
    out = torch.zeros(9, 10, dtype=a.dtype)
    out[[7, 1, 3, 5]] = b
    out.index_copy_(1, torch.tensor([8, 0]), a.new_zeros(9, 2))
    return out


def columns_put(a, b):
    out = a.clone()
    out[:4, [0, 2, 4]] = b[:, [9, 8, 7]]
    return out


def windows(a, b):
    out = a.clone()
    a[0] = b[0]  # the copy keeps the old row
    out.unfold(0, 2, 2)[1].copy_(b[:2].T)
    return torch.cat([out, a])


def interleaved(a, b):
    out = torch.zeros(6, 10, 3, dtype=a.dtype)
    for i in (2, 0, 1, 0):
        out[..., i] = a if i else a.flip(0)
    out[:0] = b[:0, :, None]
    out[1:3, 4, 1:].zero_()
    out[:4, 2:4, 2] = b[:, 5:7]
    return out


def foreach(a, b):
    out = torch.empty(10, 10, dtype=a.dtype)
    torch._foreach_copy_([out[:6], out[6:]], [a, b])
    return out


def strided(a, b):
    return torch.as_strided(a, (3, 4), (20, 2), 3)


def rebound(a, b):
    out = torch.nn.Parameter(torch.empty(0, dtype=a.dtype))
    out.data = a.T.contiguous()
    out.data[2].copy_(b[0, :6])
    return out


FORMULAS = {
    "view": lambda a, b: a.view(2, 3, 5, 2),
    "unflatten and flatten": lambda a, b: a.unflatten(1, (5, 2)).flatten(0, 1),
    "transposed": lambda a, b: a.t().contiguous(),
    "permuted and merged": lambda a, b: a.view(2, 3, 10).permute(2, 0, 1).reshape(10, 6),
    "chunk, split, unbind": lambda a, b: torch.cat(
        [a.chunk(3)[1], a.split([1, 5])[1], torch.stack(b.unbind(1))[:, :1].T.expand(1, 10)]
    ),
    "narrow, select, slices": lambda a, b: a.narrow(1, 3, 4)[1::2, 1],
    "steps of steps": lambda a, b: a[::2, 1::3][1:, ::2],
    "cat of other dtypes": lambda a, b: torch.cat([a.float(), b]).float(),
    "cat with an empty one": lambda a, b: torch.cat([torch.empty(0, dtype=a.dtype), a]),
    "cat out": lambda a, b: torch.cat([a, b], out=torch.empty(10, 10, dtype=a.dtype)),
    "stack": lambda a, b: torch.stack([a[:4], b, a[2:]], dim=1),
    "hstack": lambda a, b: torch.hstack([a[:4], b]),
    "expand": lambda a, b: a[:, None].expand(6, 3, 10).reshape(18, 10),
    "repeat": lambda a, b: a.repeat(2, 1, 3),
    "tile": lambda a, b: b.tile(2),
    "repeat_interleave": lambda a, b: a.repeat_interleave(2, 1),
    "repeat_interleave by tensor": lambda a, b: b.repeat_interleave(torch.tensor([0, 2, 1, 3]), 0),
    "pad": lambda a, b: torch.nn.functional.pad(a, (1, 2, 3, 0)),
    "negative pad": lambda a, b: torch.nn.functional.pad(a, (-1, 2, -2, 1)),
    "flip": lambda a, b: a.flip(1),
    "roll": lambda a, b: a.roll((2, -3), (0, 1)),
    "roll all": lambda a, b: a.roll(7),
    "index_select": lambda a, b: a.index_select(1, torch.tensor([7, 1, 4, 4])),
    "rows by list": lambda a, b: a[[5, 0, 3]],
    "rows by bool": lambda a, b: a[torch.tensor([True, False, True, True, False, False])],
    "negative index": lambda a, b: a[:, torch.tensor([-1, -3])],
    "two indices": lambda a, b: a[torch.tensor([1, 5]), torch.tensor([2, 9])],
    "index grid": lambda a, b: a[torch.tensor([[0, 1], [5, 2]])],
    "boolean mask": lambda a, b: a[torch.arange(60).view(6, 10) % 7 == 3],
    "gather": lambda a, b: a.gather(1, torch.tensor([[3, 1], [0, 9]])),
    "take": lambda a, b: b.take(torch.tensor([39, 0, 7])),
    "scatter": lambda a, b: a.scatter(0, torch.tensor([[2] * 10]), b[:1]),
    "where": lambda a, b: torch.where(torch.arange(10) % 3 == 0, a[:4], b),
    "masked_fill": lambda a, b: a.masked_fill(torch.arange(10) > 6, 0.0),
    "tril": lambda a, b: a.tril(1),
    "rot90": lambda a, b: a.rot90(),
    "lossless casts": lambda a, b: a.to(torch.float32).clone(),
    "to the device and dtype": lambda a, b: a.to("cpu", torch.float64, copy=True),
    "deep copy": lambda a, b: __import__("copy").deepcopy(a),
    "fills": lambda a, b: buffer(a, b),
    "index_put and index_copy": scattered,
    "columns by index": columns_put,
    "overlapping writes": windows,
    "interleaved writes": interleaved,
    "foreach copy": foreach,
    "as_strided": strided,
    "data": rebound,
    "bits": lambda a, b: a.view(torch.int64).T.contiguous().view(torch.float64),
    "nothing": lambda a, b: torch.cat([a[:0], b, a[2:2]]),
    "scalar": lambda a, b: a[3, 4],
}


@pytest.mark.parametrize("name", FORMULAS)
def test_movement_is_followed(name):
    check(FORMULAS[name])


def test_interleaved_groups_are_one_box_each():
    def formula(a, b):
        return torch.cat([a.view(2, 3, 10), b.view(2, 2, 10)], dim=1).reshape(10, 10)

    check(formula, boxes=4)


def test_a_flat_buffer_cut_anywhere():
    spec = CheckpointSpec({"a": TensorSpec((7, 5), "float64"), "b": TensorSpec((3, 4, 5), "float64")})
    check(lambda a, b: torch.cat([a.reshape(-1), b.reshape(-1)])[11:72], boxes=5, spec=spec)


def test_a_scalar_checkpoint_tensor():
    spec = CheckpointSpec({"a": TensorSpec((), "float64"), "b": TensorSpec((1, 1), "float64")})
    check(lambda a, b: torch.stack([a, b[0, 0]]), boxes=2, spec=spec)


def opaque_ids(found: Traced, size: int) -> dict[int, tuple[str, ...]]:
    seen: dict[int, tuple[str, ...]] = {}
    for part in found.opaque:
        at = torch.as_strided(torch.arange(size), part.count, part.strides, part.offset).reshape(-1).tolist()
        assert not seen.keys() & set(at)
        seen |= dict.fromkeys(at, part.inputs)
    return seen


def arithmetic_on_a_slice(a, b):
    out = torch.cat([a, b])
    out[5:7, ::3].mul_(2)
    return out


def arithmetic_before_the_slice(a, b):
    return torch.cat([(a * 2)[1:3], b])


def arithmetic_of_two(a, b):
    out = torch.cat([a, b])
    out[1:3] += b[:2]
    return out


def arithmetic_with_padding(a, b):
    return torch.cat([a.new_zeros(2, 10), b]).exp()


def added_up(a, b):
    return torch.zeros(2, 10, dtype=b.dtype).index_add_(0, torch.tensor([0, 1]), b[:2])


def accumulated(a, b):
    return a.clone().index_put_((torch.tensor([1]),), b[:1], accumulate=True)


def arithmetic_of_parts(a, b):
    return torch.cat([a[:2], a.new_zeros(2, 10)]) + torch.cat([a.new_zeros(1, 10), b[:3, :5].repeat(1, 2)])


def arithmetic_of_parts_inputs():
    rows = [("a",), ("a", "b"), ("b",), ("b",)]
    return {row * 10 + column: inputs for row, inputs in enumerate(rows) for column in range(10)}


ARITHMETIC = {
    "in place on a slice": (
        arithmetic_on_a_slice,
        {5 * 10 + c: ("a",) for c in range(0, 10, 3)} | {6 * 10 + c: ("b",) for c in range(0, 10, 3)},
    ),
    "before a slice": (arithmetic_before_the_slice, dict.fromkeys(range(20), ("a",))),
    "of two": (arithmetic_of_two, dict.fromkeys(range(10, 30), ("a", "b"))),
    "of constants": (arithmetic_with_padding, dict.fromkeys(range(20, 60), ("b",))),
    "of two, element by element": (arithmetic_of_parts, arithmetic_of_parts_inputs()),
    "matmul": (lambda a, b: b @ a.T, dict.fromkeys(range(24), ("a", "b"))),
    "sorted": (lambda a, b: a.sort(dim=1).values, dict.fromkeys(range(60), ("a",))),
    "reduced": (lambda a, b: torch.stack([a.sum(), b.amax()]), {0: ("a",), 1: ("b",)}),
    "added up": (added_up, dict.fromkeys(range(20), ("b",))),
    "put on top": (accumulated, dict.fromkeys(range(60), ("a", "b"))),  # the whole operand: not told apart by index
    "chosen by values": (lambda a, b: a[:, b[0].long()], dict.fromkeys(range(60), ("a", "b"))),
}


@pytest.mark.parametrize("name", ARITHMETIC)
def test_exactly_the_computed_elements_are_opaque(name):
    formula, expected = ARITHMETIC[name]
    blank = {n: torch.zeros(t.shape, dtype=torch.float64) for n, t in SPEC.tensors.items()}
    live = {"out": formula(**blank).clone()}
    found = traced(SPEC, formula, live)
    assert found.untraced == {}
    assert opaque_ids(found, live["out"].numel()) == expected
    copied = {i for i, n in enumerate(paint(SPEC, specs(live), found.boxes)["out"].tolist()) if n}
    assert not copied & expected.keys()


def test_a_constant_that_is_filled_in_is_no_element():
    live = {"out": torch.zeros(A, dtype=torch.float64)}
    found = traced(SPEC, lambda a, b: torch.where(torch.arange(10) > 3, a, 5.0), live)
    assert [(box.start, box.count, box.offset) for box in found.boxes] == [((0, 4), (6, 6), 4)]


def test_the_reason_names_the_operations():
    live = {"out": torch.zeros(A)}
    found = traced(SPEC, lambda a, b: -torch.exp(a), live)
    assert [part.reason for part in found.opaque] == ["aten.exp, aten.neg"]


CASTS = [
    ("bfloat16", ["float32"], "bfloat16", True),
    ("bfloat16", ["float32", "float64"], "float16", True),
    ("float32", ["bfloat16"], "bfloat16", True),
    ("float32", ["bfloat16"], "float32", False),
    ("float32", ["bfloat16", "float32"], "bfloat16", True),
    ("float32", ["bfloat16", "float32"], "float16", False),
    ("float16", ["bfloat16"], "float32", False),
    ("float8_e4m3fn", ["bfloat16", "float32"], "float16", True),
    ("uint8", ["bfloat16"], "float32", True),
    ("int8", ["uint8"], "float32", False),
    ("int32", ["float32"], "int32", False),
]


@pytest.mark.parametrize(("source", "through", "runtime", "is_copy"), CASTS)
def test_casts_are_copies_if_they_equal_a_direct_one(source, through, runtime, is_copy):
    spec = CheckpointSpec({"a": TensorSpec(A, source)})
    live = {"out": torch.zeros(A, dtype=getattr(torch, runtime))}

    def formula(a):
        for dtype in through:
            a = a.to(getattr(torch, dtype))
        return a

    found = traced(spec, formula, live)
    assert (len(found.boxes), len(found.opaque), found.untraced) == (int(is_copy), int(not is_copy), {})
    assert is_copy or found.opaque[0].reason.startswith("cast through")


def test_bits_read_as_another_dtype_are_no_copy():
    spec = CheckpointSpec({"a": TensorSpec(A, "float8_e4m3fn")})
    live = {"out": torch.zeros(A, dtype=torch.uint8)}
    found = traced(spec, lambda a: a.view(torch.uint8), live)
    assert [part.reason for part in found.opaque] == ["bits of float8_e4m3fn read as uint8"]


def test_elements_viewed_as_narrower_ones_are_untraced():
    live = {"out": torch.zeros(6, 80, dtype=torch.uint8)}
    found = traced(SPEC, lambda a, b: a.view(torch.uint8), live)
    assert (found.boxes, found.opaque) == ([], [])
    assert found.untraced == {"out": "aten.copy_ views elements of another width"}


def test_an_irregular_movement_of_many_elements_is_untraced():
    spec = CheckpointSpec({"a": TensorSpec((2048, 1024), "float32"), "b": TensorSpec((4,), "float32")})
    live = {"out": torch.zeros(2048, 1024), "other": torch.zeros(4)}
    order = torch.randperm(1024, generator=torch.Generator().manual_seed(0)).expand(2048, 1024)

    def load(weights):
        found = dict(weights)
        live["out"].copy_(found["a"].gather(1, order))
        live["other"].copy_(found["b"])

    found = trace(spec, load, lambda: live)
    assert found.untraced == {"out": "aten.gather is too irregular to follow"}
    assert found.opaque == []
    assert [box.runtime for box in found.boxes] == ["other"]
