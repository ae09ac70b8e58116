"""Strided copies with casts, and bucket headers."""

from __future__ import annotations

import pytest
import torch

from rlbridge.sync.packing import check_header, pack, payload_digest, prepare, unpack, write_header
from rlbridge.sync.plan.program import HEADER_BYTES, BucketProgram, Piece
from rlbridge.transport.errors import PlanError, ProtocolError


def bucket(*pieces: Piece, size: int = 64) -> BucketProgram:
    return BucketProgram(3, size, None, (), pieces)


def test_pack_and_unpack_a_strided_part_with_a_cast():
    live = {"w": torch.arange(24, dtype=torch.float32).reshape(4, 6)}
    its = bucket(Piece("w", 1, (2, 3), (12, 2), "bfloat16", 0), size=12)
    payload = torch.zeros(12, dtype=torch.uint8)
    pack(its, live, payload)
    assert payload.view(torch.bfloat16).tolist() == [1, 3, 5, 13, 15, 17]
    there = {"w": torch.zeros(4, 6, dtype=torch.float64)}
    unpack(its, payload, there)
    assert there["w"].nonzero().tolist() == [[0, 1], [0, 3], [0, 5], [2, 1], [2, 3], [2, 5]]
    assert torch.equal(there["w"][::2, 1::2], live["w"][::2, 1::2].double())


@pytest.mark.parametrize("contiguous", [True, False])
def test_transposed_and_non_contiguous_tensors(contiguous):
    values = torch.randn(5, 7)
    live = {"w": values.clone() if contiguous else values.T.contiguous().T}
    its = bucket(Piece("w", 0, (7, 5), (1, 7), "float32", 0), size=140)
    payload = torch.zeros(140, dtype=torch.uint8)
    prepared = prepare(its, live)
    prepared.pack(payload)
    assert torch.equal(payload.view(torch.float32).view(7, 5), values.T)
    live["w"].zero_()
    prepared.unpack(payload)
    assert torch.equal(live["w"], values)


def test_a_tensor_that_begins_within_its_storage():
    base = torch.arange(20.0)
    live = {"w": base[8:].view(3, 4)}
    its = bucket(Piece("w", 4, (4,), (1,), "float32", 0), size=16)
    payload = torch.zeros(16, dtype=torch.uint8)
    pack(its, live, payload)
    assert payload.view(torch.float32).tolist() == [12, 13, 14, 15]


def test_neighbours_become_one_copy():
    live = {"w": torch.arange(64.0), "x": torch.arange(64.0)}
    pieces = [
        Piece("w", 0, (2, 4), (4, 1), "float32", 0),
        Piece("w", 8, (1, 8), (0, 1), "float32", 32),
        Piece("w", 20, (8,), (1,), "float32", 64),
        Piece("x", 28, (4,), (1,), "float32", 96),
        Piece("x", 0, (), (), "float32", 112),
    ]
    prepared = prepare(bucket(*pieces, size=116), live)
    assert [copy.shape for copy in prepared.copies] == [(16,), (8,), (4,), (1,)]
    payload = torch.zeros(116, dtype=torch.uint8)
    prepared.pack(payload)
    assert payload.view(torch.float32).tolist() == [*range(16), *range(20, 28), *range(28, 32), 0]


def test_parameters_that_require_grad():
    parameter = torch.nn.Parameter(torch.zeros(4))
    payload = torch.arange(4.0).view(torch.uint8)
    unpack(bucket(Piece("w", 0, (4,), (1,), "float32", 0), size=16), payload, {"w": parameter})
    assert parameter.tolist() == [0, 1, 2, 3]
    assert parameter.requires_grad


@pytest.mark.parametrize(
    ("piece", "text"),
    [
        (Piece("nope", 0, (1,), (1,), "float32", 0), "'nope'"),
        (Piece("w", 0, (9,), (1,), "float32", 0), "reaches element 8 of 'w'"),
        (Piece("w", 0, (8,), (1,), "float32", 48), "ends at byte 80 of 64"),
    ],
)
def test_programs_that_do_not_fit_the_tensors(piece, text):
    with pytest.raises(PlanError, match=text):
        prepare(bucket(piece), {"w": torch.zeros(8)})


@pytest.mark.parametrize(
    "payload", [torch.zeros(65, dtype=torch.uint8), torch.zeros(64), torch.zeros(128, dtype=torch.uint8)[::2]]
)
def test_payloads_of_the_wrong_kind(payload):
    prepared = prepare(bucket(), {})
    with pytest.raises(PlanError, match="payload must be"):
        prepared.pack(payload)
    with pytest.raises(PlanError, match="payload must be"):
        prepared.unpack(payload)


def message(size: int = 40) -> torch.Tensor:
    out = torch.arange(HEADER_BYTES + size, dtype=torch.uint8)
    write_header(out, 5, 6, 7, out[HEADER_BYTES:])
    return out


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        ((4, 6, 7), "epoch 5 instead of 4"),
        ((5, 8, 7), "version 6 instead of 8"),
        ((5, 6, 9), "bucket 7 instead of 9"),
    ],
)
def test_another_buckets_header(wanted, text):
    check_header(message(), 5, 6, 7)
    with pytest.raises(ProtocolError, match=text):
        check_header(message(), *wanted)


def test_damaged_headers():
    with pytest.raises(ProtocolError, match="too few"):
        check_header(message()[:10], 5, 6, 7)
    with pytest.raises(ProtocolError, match="payload bytes 40 instead of 39"):
        check_header(message()[:-1], 5, 6, 7)
    damaged = message()
    damaged[0] += 1
    with pytest.raises(ProtocolError, match="does not begin with a bucket header"):
        check_header(damaged, 5, 6, 7)


@pytest.mark.parametrize("live_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transposed", [False, True])
def test_packing_in_parts_gives_the_same_bytes_and_their_digest(live_dtype, transposed):
    """A long run, an array in long rows, and single elements, larger than one part together and each."""
    rows, columns = 900, 1100
    tensors = {"a": torch.randn(rows, columns).to(live_dtype), "b": torch.randn(7).to(live_dtype)}
    if transposed:
        tensors["a"] = tensors["a"].t().contiguous().t()
    half = columns // 2
    pieces = (
        Piece("a", 0, (rows // 2 * columns,), (1,), "bfloat16", 0),
        Piece("b", 1, (3,), (2,), "bfloat16", rows // 2 * columns * 2),
        Piece("a", rows // 2 * columns, (rows // 2, half), (columns, 1), "bfloat16", rows // 2 * columns * 2 + 6),
    )
    size_bytes = rows // 2 * (columns + half) * 2 + 6
    prepared = prepare(BucketProgram(0, size_bytes, None, (), pieces), tensors)
    whole, parts = (torch.zeros(size_bytes, dtype=torch.uint8) for _ in range(2))
    prepared.pack(whole)
    digest = prepared.pack_and_digest(parts)
    assert torch.equal(whole, parts)
    assert digest == payload_digest(whole)


def test_a_source_that_leaves_a_hole_in_its_payload_is_refused():
    tensors = {"a": torch.randn(8)}
    for at_bytes, size_bytes in ((0, 36), (4, 36)):
        bucket = BucketProgram(0, size_bytes, None, (), (Piece("a", 0, (8,), (1,), "float32", at_bytes),))
        with pytest.raises(PlanError, match="whole payload"):
            prepare(bucket, tensors).pack_and_digest(torch.zeros(size_bytes, dtype=torch.uint8))
