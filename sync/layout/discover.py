"""Layout discovery: from a backend's own loader to a map of where every checkpoint element lies at run time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch

from rlbridge.sync.layout.dtypes import torch_dtype
from rlbridge.sync.layout.guess import guess_boxes
from rlbridge.sync.layout.live import LiveTensors, restored, tied_names
from rlbridge.sync.layout.loading import AnyRank, Loader, LoadWeights
from rlbridge.sync.layout.opaque import settle, settle_copies
from rlbridge.sync.layout.probe import can_be_probed, probe
from rlbridge.sync.layout.reload import close_over_reload
from rlbridge.sync.layout.source_map import Box, SourceMap
from rlbridge.sync.layout.spec import CheckpointSpec
from rlbridge.sync.layout.trace import trace
from rlbridge.sync.layout.verify import Claims, Verdict, verify
from rlbridge.transport.errors import LayoutError, LoaderFailedError

Method = Literal["auto", "trace", "probe"]

_LISTED = 20


def alone(flag: bool) -> bool:
    """The ``any_rank`` of a loader that no other rank shares."""
    return flag


def discover(
    spec: CheckpointSpec,
    load_weights: LoadWeights,
    live_tensors: LiveTensors,
    *,
    seed: int = 0,
    method: Method = "auto",
    any_rank: AnyRank = alone,
) -> SourceMap:
    """Find out what ``load_weights`` does, without knowing the backend.

    The loader is run a few times on made-up values; the live tensors have their own bits again afterwards, also after
    an error. Elements are addressed by row-major index over a tensor's shape, contiguous or not. Whatever the method,
    random values prove the result bit for bit; what turns out to be no copy is in ``SourceMap.opaque``. If there is
    any, it is also proved that loading the opaque inputs alone renews it and leaves all copies as they are.

    Args:
        spec: the checkpoint that the loader understands.
        load_weights: the backend's own loader. It gets each (name, tensor) once, in the spec's order, one tensor in
            existence at a time, and may collect or reorder them. It must be repeatable.
        live_tensors: runtime name to plain tensor, asked anew after each load. Tied weights may be listed under all
            their names: the first one owns the elements. A sharded tensor is given as its local shard.
        seed: of the random values that prove the result.
        method: ``"auto"`` traces the loader and probes the runtime tensors that the trace cannot follow or is wrong
            about, ``"probe"`` does without the trace, ``"trace"`` without the probe.
        any_rank: True if it is called with True on any rank that shares this loader. **Contract:** loaders that
            communicate (a full tensor scattered from rank 0, say) have to be called equally often, in the same order,
            with the same tensors on all ranks. So every decision to run the loader that depends on what was found goes
            through ``any_rank``, and all ranks that share the loader call ``discover`` with the same spec, seed and
            method, and give an ``any_rank`` that is an all-reduce (logical or) among them. The default is for loaders
            that do not communicate.

    Raises:
        LoaderFailedError: the loader raised; the text names the checkpoint tensor that it had taken.
        LayoutError: a dtype is unknown; the loader changes shapes, or gives different results for the same values;
            live tensors overlap in part; ``method="trace"`` and something cannot be traced.
    """
    for tensor in spec.tensors.values():
        torch_dtype(tensor.dtype)
    with restored(live_tensors), torch.no_grad():
        loader = Loader(spec, load_weights, live_tensors, any_rank)
        claims, probed = _claims(loader, method, seed)
        claims = close_over_reload(loader, claims, seed)
        aliases = _tied_aliases(loader, claims, seed)
    return SourceMap(
        runtime=dict(loader.runtime),
        boxes=[box for name in loader.runtime for box in claims.boxes.get(name, [])],
        aliases=aliases,
        opaque=[part for name in loader.runtime for part in claims.opaque.get(name, [])],
        probed=probed,
    )


def landed_nowhere(spec: CheckpointSpec, layout: SourceMap) -> list[str]:
    """Checkpoint tensors of which this worker keeps nothing: other pipeline stages' ones, or unused ones."""
    landed = {box.tensor for box in [*layout.boxes, *layout.aliases]} | layout.opaque_inputs
    return [name for name in spec.tensors if name not in landed]


def _claims(loader: Loader, method: Method, seed: int) -> tuple[Claims, dict[str, str]]:
    """What is proved of every runtime tensor, and why some had to be probed although a trace was tried."""
    traced, reasons = _traced(loader, method)
    known = traced.only(set(loader.runtime) - set(reasons))
    if loader.any_rank(bool(known.boxes)):
        verdicts = verify(loader, known, seed)
        reasons |= dict.fromkeys(verdicts, "random values did not arrive as the trace says")
        known = known.only(set(known.boxes) - set(verdicts))
    if method == "trace" and loader.any_rank(bool(reasons)):
        raise LayoutError(
            "these runtime tensors cannot be traced:"
            + ("".join(f"\n  {name}: {why}" for name, why in list(reasons.items())[:_LISTED]) or " some on other ranks")
            + '\nUse method="auto", which probes them.'
        )
    if loader.any_rank(bool(reasons)):
        found = settle(loader, *_probed(loader, reasons, seed), seed)
        known = Claims(known.boxes | found.boxes, {}, known.opaque | found.opaque)
    return known, {} if method == "probe" else reasons


def _traced(loader: Loader, method: Method) -> tuple[Claims, dict[str, str]]:
    """What the trace says, and the runtime tensors of which it says nothing with the reason."""
    everything: dict[str, list[Box]] = {name: [] for name in loader.runtime}
    if method == "probe":
        return Claims(everything), dict.fromkeys(loader.runtime, "not traced")
    found = trace(loader.spec, loader.load_weights, loader.live_tensors)
    claims = Claims(everything)
    for box in found.boxes:
        claims.boxes[box.runtime].append(box)
    for part in found.opaque:
        claims.opaque.setdefault(part.runtime, []).append(part)
    return claims, {name: why for name, why in found.untraced.items() if name in loader.runtime}


def _probed(
    loader: Loader, wanted: Iterable[str], seed: int, names: list[str] | None = None
) -> tuple[Claims, dict[str, Verdict]]:
    """Probe the runtime tensors ``wanted``, and what random values say of the claims; ``names``: what is loaded."""
    wanted = set(wanted)
    guesses = guess_boxes(loader, wanted, names)
    readable = wanted & can_be_probed(loader.spec, loader.live()).keys()
    # What cannot hold digits is claimed to hold no copy, which the proof confirms or makes opaque.
    claims = Claims(guesses | {name: [] for name in wanted - readable})
    verdicts = verify(loader, claims, seed, names)
    unclear = readable & ((wanted - guesses.keys()) | verdicts.keys())
    if not loader.any_rank(bool(unclear)):
        return claims, verdicts
    read = Claims({}, probe(loader, unclear, names))
    settled = claims.only(wanted - unclear)
    verdicts = {name: verdict for name, verdict in verdicts.items() if name not in unclear}
    verdicts |= verify(loader, read, seed, names)
    return Claims(settled.boxes, read.readings), verdicts


def _tied_aliases(loader: Loader, claims: Claims, seed: int) -> list[Box]:
    """Boxes of checkpoint tensors whose elements another tensor overwrote in tied weights.

    A checkpoint may store both names of a tied weight. The loader then writes the same memory twice, and only the
    last one shows. Leaving that one out makes the other one visible.
    """
    tied = tied_names(loader.live_tensors())
    shown = {box.tensor for boxes in claims.boxes.values() for box in boxes}
    shown |= {name for parts in claims.opaque.values() for part in parts for name in part.inputs}
    hidden = set(loader.spec.tensors) - shown
    winners = {box.tensor for name in tied for box in claims.boxes.get(name, [])}
    if not loader.any_rank(bool(hidden and winners)):
        return []
    left_out = set(loader.on_any_rank(winners if hidden else set()))
    names = [name for name in loader.spec.tensors if name not in left_out]
    try:
        found, verdicts = _probed(loader, tied, seed, names)
    except LoaderFailedError:  # one that wants the whole checkpoint shows one name only; who needs the other is told
        return []
    proved, _ = settle_copies(loader, found, verdicts)
    return [box for boxes in proved.values() for box in boxes if box.tensor in hidden]
