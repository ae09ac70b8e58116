"""Ways in which backends load: modules, replaced and tied tensors, meta devices, values that are read, other ranks."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from rlbridge.sync.layout.elements import paint
from rlbridge.sync.layout.live import owners, specs
from rlbridge.sync.layout.spec import CheckpointSpec, TensorSpec
from rlbridge.sync.layout.trace import trace, trace_layout
from rlbridge.transport.errors import LayoutError


def spec_of(dtype="float32", **shapes) -> CheckpointSpec:
    return CheckpointSpec({n: TensorSpec(tuple(s), dtype) for n, s in shapes.items()})


def identity(spec, found, runtime):
    """Every runtime tensor is the checkpoint tensor of its name."""
    assert (found.untraced, found.opaque) == ({}, [])
    assert [(b.runtime, b.tensor) for b in found.boxes] == [(n, n) for n in runtime]
    for box in found.boxes:
        shape = spec.tensors[box.tensor].shape
        assert (box.start, box.count, box.offset) == ((0,) * len(shape), shape, 0)


class Model(torch.nn.Module):
    def __init__(self, device="cpu", tied=False):
        super().__init__()
        self.embed = torch.nn.Embedding(6, 4, device=device)
        self.norm = torch.nn.LayerNorm(4, device=device)
        self.head = torch.nn.Linear(4, 6, bias=False, device=device)
        if tied:
            self.head.weight = self.embed.weight


MODEL = spec_of(**{n: t.shape for n, t in Model("meta").state_dict().items()})


def load_by_module(model, weights):
    model.load_state_dict(dict(weights))


def load_by_assignment(model, weights):
    model.load_state_dict(dict(weights), assign=True)


def load_by_copy(model, weights):
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, weight in weights:
        assert weight.shape == parameters[name].shape
        parameters[name].data.copy_(weight.to(parameters[name].device))


def load_by_data(model, weights):
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, weight in weights:
        parameters[name].data = weight.to(parameters[name].device, parameters[name].dtype)


def load_by_parameter(model, weights):
    for name, weight in weights:
        path, _, last = name.rpartition(".")
        setattr(model.get_submodule(path), last, torch.nn.Parameter(weight.contiguous()))


def load_twice(model, weights):
    listed = list(weights)
    load_by_copy(model, listed[::-1])
    load_by_copy(model, listed)


def load_by_set(model, weights):
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, weight in weights:
        parameters[name].set_(weight)


LOADERS = [
    load_by_module,
    load_by_assignment,
    load_by_copy,
    load_by_data,
    load_by_parameter,
    load_twice,
    load_by_set,
]


@pytest.mark.parametrize("load", LOADERS)
@pytest.mark.parametrize("listing", ["parameters", "state_dict"])
def test_modules_are_traced_and_left_as_they_were(load, listing):
    model = Model()

    def live_tensors():
        return model.state_dict() if listing == "state_dict" else dict(model.named_parameters())

    before = {name: tensor.detach().clone() for name, tensor in live_tensors().items()}
    found = trace(MODEL, lambda weights: load(model, weights), live_tensors)
    identity(MODEL, found, live_tensors())
    assert all(torch.equal(tensor, before[name]) for name, tensor in live_tensors().items())
    assert model.head(model.norm(model.embed(torch.tensor([1])))).isfinite().all()


@pytest.mark.parametrize("load", [load_by_module, load_by_copy, load_twice, load_by_parameter])
def test_models_on_the_meta_device_need_no_memory(load):
    model = Model("meta")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layout = trace_layout(MODEL, lambda weights: load(model, weights), lambda: dict(model.named_parameters()))
    assert [(box.runtime, box.tensor) for box in layout.boxes] == [(n, n) for n in MODEL.tensors]
    assert layout.runtime == MODEL.tensors
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tied_weights_have_one_owner_and_the_last_write_wins(device):
    model = Model(device, tied=True)
    found = trace(MODEL, lambda weights: load_by_copy(model, weights), model.state_dict)
    assert found.untraced == {}
    assert {(b.runtime, b.tensor) for b in found.boxes if b.runtime == "embed.weight"} == {
        ("embed.weight", "head.weight")
    }
    assert "head.weight" not in {box.runtime for box in found.boxes}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_planning_knows_both_names_of_a_tied_weight(device):
    model = Model(device, tied=True)
    layout = trace_layout(MODEL, lambda weights: load_by_copy(model, weights), model.state_dict)
    assert [(box.runtime, box.tensor) for box in layout.aliases] == [("embed.weight", "embed.weight")]
    assert list(layout.runtime) == ["embed.weight", "norm.weight", "norm.bias"]


def test_a_loader_that_unties_is_not_believed():
    model = Model(tied=True)
    found = trace(MODEL, lambda weights: load_by_assignment(model, weights), model.state_dict)
    assert found.untraced == {"head.weight": "loading gives it memory of its own"}
    assert model.head.weight.data_ptr() == model.embed.weight.data_ptr() or torch.equal(
        model.head.weight, model.embed.weight
    )


def test_what_is_never_loaded_is_in_no_box():
    spec = spec_of(a=(4, 3), unused=(7,))
    live = {"a": torch.zeros(6, 3), "never": torch.zeros(5), "table": torch.arange(3)}

    def load(weights):
        for name, weight in weights:
            if name == "a":
                live["a"][1:5] = weight

    found = trace(spec, load, lambda: live)
    assert (found.untraced, found.opaque) == ({}, [])
    assert [(box.runtime, box.offset, box.count) for box in found.boxes] == [("a", 3, (4, 3))]


def test_a_loader_may_read_its_own_tables():
    spec = spec_of(**{f"experts.{i}": (4, 3) for i in range(6)})
    live = {"w": torch.zeros(2, 4, 3), "expert_map": torch.tensor([-1, -1, 0, -1, 1, -1])}

    def load(weights):
        for name, weight in weights:
            local = live["expert_map"][int(name.split(".")[1])].item()
            if local >= 0:
                live["w"][local].copy_(weight)

    found = trace(spec, load, lambda: live)
    assert found.untraced == {}
    assert [(box.tensor, box.offset) for box in found.boxes] == [("experts.2", 0), ("experts.4", 12)]


def test_views_that_are_not_contiguous_count_row_major():
    spec = spec_of(a=(4, 3))
    live = {"out": torch.zeros(3, 8)[:, 2:6].T}
    found = trace(spec, lambda weights: live["out"].copy_(dict(weights)["a"]), lambda: live)
    assert paint(spec, specs(owners(live)), found.boxes)["out"].tolist() == list(range(1, 13))


# Values.

SCALED = spec_of(**{name: shape for i in range(3) for name, shape in ((f"l{i}.w", (4, 3)), (f"l{i}.scale", ()))})


def scaled(read):
    live = {f"l{i}.w": torch.full((4, 3), 5.0) for i in range(3)} | {"norm": torch.zeros(3)}
    spec = CheckpointSpec({"norm": TensorSpec((3,), "float32"), **SCALED.tensors})

    def load(weights):
        found = dict(weights)
        live["norm"].copy_(found["norm"])
        for i in range(3):
            w, scale = found[f"l{i}.w"], found[f"l{i}.scale"]
            live[f"l{i}.w"].copy_(w * read(scale) if i == 1 else w)

    return trace(spec, load, lambda: live), live


@pytest.mark.parametrize(
    ("read", "op"),
    [
        (torch.Tensor.item, "aten._local_scalar_dense"),
        (torch.Tensor.tolist, "Tensor.tolist"),
        (lambda scale: float(scale.numpy()), "Tensor.numpy"),
        (lambda scale: 2.0 if scale > 0 else 1.0, "aten._local_scalar_dense"),
    ],
)
def test_values_that_are_read_cost_only_what_they_reach(read, op):
    found, live = scaled(read)
    assert found.untraced == {"l1.w": f"aten.mul after {op} read values"}
    assert {box.runtime for box in found.boxes} == {"norm", "l0.w", "l2.w"}
    assert all((live[f"l{i}.w"] == 5.0).all() for i in range(3))


def test_operations_of_unknown_shape_are_run_on_real_tensors():
    spec = spec_of(a=(4, 3), b=(4, 3))
    live = {"a": torch.zeros(4, 3), "b": torch.zeros(12)}

    def load(weights):
        found = dict(weights)
        live["a"].copy_(found["a"])
        nonzero = found["b"][found["b"] != 0]
        live["b"][: nonzero.numel()].copy_(nonzero)

    found = trace(spec, load, lambda: live)
    assert list(found.untraced) == ["b"]
    assert [box.runtime for box in found.boxes] == ["a"]


def test_a_check_of_values_costs_nothing():
    spec = spec_of(a=(4, 3), b=(2, 2))
    live = {n: torch.zeros(t.shape) for n, t in spec.tensors.items()}

    def load(weights):
        for name, weight in dict(weights).items():
            if not weight.isfinite().all():
                raise ValueError(name)
            live[name].copy_(weight)

    identity(spec, trace(spec, load, lambda: live), live)


def test_what_a_streaming_loader_decides_by_values_is_untraced():
    spec = spec_of(a=(4, 4), b=(4, 4))
    live = {n: torch.zeros(t.shape) for n, t in spec.tensors.items()}

    def load(weights):
        for name, weight in weights:
            transposed = name == "a" and weight[0, 0].item() > 0
            live[name].copy_(weight.T if transposed else weight)

    found = trace(spec, load, lambda: live)
    assert found.untraced == {"a": "written after aten._local_scalar_dense read values"}
    assert [box.runtime for box in found.boxes] == ["b"]


def test_a_swallowed_error_is_noticed():
    spec = spec_of(a=(4, 3))
    live = {"a": torch.zeros(4, 3)}

    def load(weights):
        for _, weight in weights:
            try:
                scale = weight.max().item()
            except Exception:
                scale = 3.0
            live["a"].copy_(weight * scale)

    found = trace(spec, load, lambda: live)
    assert list(found.untraced) == ["a"]
    assert found.boxes == []


def test_the_number_of_reruns_is_bounded():
    letters = "abcdefghijkl"
    spec = spec_of(**dict.fromkeys(letters, ()))
    live = {"out": torch.zeros(len(letters))}
    loads = []

    def load(weights):
        loads.append(1)
        for i, (_, weight) in enumerate(weights):
            live["out"][i].fill_(weight.item())

    found = trace(spec, load, lambda: live)
    assert found.untraced == {"out": "aten._local_scalar_dense reads values"}
    assert len(loads) < len(letters)
    assert (live["out"] == 0).all()


def test_a_loader_that_fails_leaves_everything_untraced_with_its_error():
    spec = spec_of(a=(4, 3), b=(2,))
    live = {n: torch.zeros(t.shape) for n, t in spec.tensors.items()}

    def load(weights):
        for name, weight in weights:
            live[name].copy_(weight)
        raise KeyError("lm_head")

    found = trace(spec, load, lambda: live)
    assert (found.boxes, found.opaque) == ([], [])
    assert found.untraced == dict.fromkeys("ab", "the loader cannot be traced: KeyError: 'lm_head'")


def test_planning_without_weights_names_what_cannot_be_traced():
    spec = spec_of(a=(4, 3), s=(1,))
    live = {"a": torch.empty(4, 3, device="meta")}

    def load(weights):
        found = dict(weights)
        live["a"].copy_(found["a"] * found["s"].item())

    with pytest.raises(LayoutError, match=r"a: aten\.mul after aten\._local_scalar_dense read values"):
        trace_layout(spec, load, lambda: live)


def test_a_changed_shape_is_untraced():
    spec = spec_of(a=(4, 3))
    model = torch.nn.ParameterDict({"a": torch.zeros(2, 3)})

    def load(weights):
        model["a"].data = dict(weights)["a"]

    found = trace(spec, load, lambda: dict(model.items()))
    assert found.untraced == {"a": "loading makes it float32 [4, 3] instead of float32 [2, 3]"}
    assert model["a"].shape == (2, 3)


def test_a_loader_that_communicates_is_not_followed_but_nothing_is_sent(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        spec = spec_of(a=(4, 3), b=(4, 3))
        live = {n: torch.zeros(t.shape) for n, t in spec.tensors.items()}

        def load(weights):
            for name, weight in weights:
                if name == "a":
                    dist.broadcast(weight, 0)
                live[name].copy_(weight)

        found = trace(spec, load, lambda: live)
    finally:
        dist.destroy_process_group()
    assert found.untraced == {"a": "c10d.broadcast_ communicates with other ranks"}
    assert [box.runtime for box in found.boxes] == ["b"]


def test_parameters_that_are_distributed_tensors():
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        param = distribute_tensor(torch.zeros(6, 4), mesh, [Shard(1)], src_data_rank=None)
        spec = spec_of(w=(6, 4))

        def load(weights):
            for _, weight in weights:
                param.copy_(distribute_tensor(weight, mesh, [Shard(1)], src_data_rank=None))

        found = trace(spec, load, lambda: {"w": param.to_local()})
    finally:
        dist.destroy_process_group()
    assert found.untraced == {}
    assert [(box.start, box.count, box.offset, box.strides) for box in found.boxes] == [((0, 2), (6, 2), 0, (2, 1))]


def test_memory_is_not_taken():
    # Together 12 TB; a machine that had to hold one of them would fail.
    spec = spec_of(a=(1 << 20, 1 << 20), b=(1 << 20, 1 << 20), c=(1 << 20, 1 << 20))
    live = {"out": torch.empty(3, 1 << 19, 1 << 20, device="meta")}

    def load(weights):
        stacked = torch.stack([weight[::2] for weight in dict(weights).values()]).clone()
        live["out"].copy_(stacked)

    layout = trace_layout(spec, load, lambda: live)
    assert [(box.tensor, box.step, math.prod(box.count)) for box in layout.boxes] == [
        (name, (2, 1), 1 << 39) for name in "abc"
    ]
