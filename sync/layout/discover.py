"""Layout discovery: from a backend's own loader to a map of where every checkpoint element lies at run time."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rlbridge.sync.layout.dtypes import bit_view
from rlbridge.sync.layout.elements import Ids
from rlbridge.sync.layout.live import LiveTensors, owners, restored, specs, tied_names
from rlbridge.sync.layout.probe import LoadWeights, Probed, probe, probed_tensors
from rlbridge.sync.layout.recover import recover
from rlbridge.sync.layout.source_map import Box, SourceMap
from rlbridge.sync.layout.spec import CheckpointSpec
from rlbridge.sync.layout.verify import verify
from rlbridge.transport.errors import LayoutError


def discover(spec: CheckpointSpec, load_weights: LoadWeights, live_tensors: LiveTensors, *, seed: int = 0) -> SourceMap:
    """Find out what ``load_weights`` does, without knowing the backend.

    The loader is run a few times on made-up values; the live tensors have their own bits again afterwards, also after
    an error. Elements are addressed by row-major index over a tensor's shape, contiguous or not. Costs a copy of the
    live tensors, one of the probed ones, and 8 bytes per runtime element.

    Args:
        spec: the checkpoint that the loader understands.
        load_weights: the backend's own loader. It gets each (name, tensor) once, in the spec's order, one tensor in
            existence at a time, and may collect or reorder them.
        live_tensors: runtime name to plain tensor, asked anew after each load. Tied weights may be listed under all
            their names: the first one owns the elements. A sharded tensor is given as its local shard.
        seed: of the random values that prove the result.

    Raises:
        LayoutError: the loader does something else than copy (and cast, move, skip, pad); a dtype cannot be followed;
            live tensors overlap in part.
    """
    names = list(spec.tensors)
    with restored(live_tensors), torch.no_grad():
        runtime = specs(owners(live_tensors()))
        aside = _aside(spec, live_tensors)
        probed = probe(spec, load_weights, live_tensors, names)
        _check_shapes(runtime, live_tensors)
        ids = verify(spec, load_weights, live_tensors, names, probed, seed)
        aliases = _tied_aliases(spec, load_weights, live_tensors, ids, seed)
        _check_aside(aside, live_tensors)
    return SourceMap(runtime, recover(spec, runtime, ids), aliases)


def landed_nowhere(spec: CheckpointSpec, layout: SourceMap) -> list[str]:
    """Checkpoint tensors of which this worker keeps nothing: other pipeline stages' ones, or unused ones."""
    landed = {box.tensor for box in [*layout.boxes, *layout.aliases]}
    return [name for name in spec.tensors if name not in landed]


def _tied_aliases(
    spec: CheckpointSpec, load_weights: LoadWeights, live_tensors: LiveTensors, ids: Mapping[str, Ids], seed: int
) -> list[Box]:
    """Boxes of checkpoint tensors whose elements another tensor overwrote in tied weights.

    A checkpoint may store both names of a tied weight. The loader then writes the same memory twice, and only the
    last one shows. Leaving that one out makes the other one visible.
    """
    runtime = specs(owners(live_tensors()))
    tied = tied_names(live_tensors()) & set(ids)
    boxes = recover(spec, runtime, ids)
    shown = {box.tensor for box in boxes}
    hidden = {name for name in spec.tensors if name not in shown}
    winners = {box.tensor for box in boxes if box.runtime in tied}
    if not hidden or not winners:
        return []
    names = [name for name in spec.tensors if name not in winners]
    probed = probe(spec, load_weights, live_tensors, names)
    only_tied = Probed({name: probed.ids[name] for name in tied}, probed.first_pass)
    found = verify(spec, load_weights, live_tensors, names, only_tied, seed)
    return [box for box in recover(spec, runtime, found) if box.tensor in hidden]


def _aside(spec: CheckpointSpec, live_tensors: LiveTensors) -> dict[str, torch.Tensor]:
    """Copies of the live tensors that are not probed."""
    probed = probed_tensors(spec, live_tensors)
    return {name: tensor.clone() for name, tensor in owners(live_tensors()).items() if name not in probed}


def _check_aside(aside: Mapping[str, torch.Tensor], live_tensors: LiveTensors) -> None:
    now = live_tensors()
    changed = [
        name for name, tensor in aside.items() if not torch.equal(bit_view(tensor), bit_view(now[name].detach()))
    ]
    if changed:
        raise LayoutError(f"the loader writes tensors that layout discovery cannot follow: {', '.join(changed)}")


def _check_shapes(runtime: Mapping[str, object], live_tensors: LiveTensors) -> None:
    now = specs(owners(live_tensors()))
    changed = sorted(name for name in {*runtime, *now} if runtime.get(name) != now.get(name))
    if changed:
        raise LayoutError(
            f"loading changes the shape or dtype of runtime tensors, or which there are: {', '.join(changed[:20])}; "
            "discover the layout before post-processing"
        )
