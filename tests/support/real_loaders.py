"""Loaders of real libraries over tiny random Hugging Face directories, and what layout discovery must say of them."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from rlbridge.sync.layout.checkpoint import read_spec
from rlbridge.sync.layout.discover import Method, alone, discover
from rlbridge.sync.layout.dtypes import bit_view
from rlbridge.sync.layout.elements import by_tensor, paint
from rlbridge.sync.layout.loading import AnyRank
from rlbridge.sync.layout.source_map import SourceMap
from rlbridge.sync.layout.spec import CheckpointSpec
from rlbridge.transport.errors import LayoutError

Weights = Iterable[tuple[str, torch.Tensor]]
KINDS = ("dense", "tied", "moe")
METHODS: tuple[Method, ...] = ("auto", "probe")  # where nothing had to be probed, "auto" is what "trace" gives


def write_model(directory: Path, kind: str, vocabulary: int = 50) -> Path:
    """A tiny model in bfloat16 as Hugging Face writes it: ``dense`` (Qwen3), ``tied`` (its head) or ``moe``."""
    import transformers
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(0)
    sizes = {"vocab_size": vocabulary, "hidden_size": 16, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": kind == "tied"}
    if kind == "moe":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
        config = transformers.Qwen3MoeConfig(**sizes, **heads, **experts, initializer_range=0.2)
    else:
        config = transformers.Qwen3Config(**sizes, **heads, intermediate_size=24, initializer_range=0.2)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for parameter in model.parameters():  # norms would all be one, so that a swapped pair would not show
        torch.nn.init.normal_(parameter)
    model.save_pretrained(directory)
    return directory


class TransformersModel:
    """A model of transformers, on any parallelism that ``from_pretrained`` knows, and a loader for it.

    ``from_pretrained`` has no loader to hand over: this is the adapter that a user writes, over transformers' own
    conversion (which renames, stacks experts and cuts shards). Live tensors keep their memory, as FSDP2 needs it.
    transformers loads in threads unless ``HF_DEACTIVATE_ASYNC_LOAD`` is set; a trace does not follow casts made there.
    """

    def __init__(self, directory: Path, dtype: torch.dtype, **parallel: int) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.distributed import DistributedConfig

        how = {"distributed_config": DistributedConfig(**parallel)} if parallel else {}
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, local_files_only=True, **how)
        self._dtype = dtype
        self._rules = get_model_conversion_mapping(self.model)

    def load_weights(self, weights: Weights) -> None:
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig

        kept = dict(self.model.named_parameters(remove_duplicate=False))
        config = LoadStateDictConfig(dtype=self._dtype, weight_mapping=copy.deepcopy(self._rules))
        info, _ = convert_and_load_state_dict_in_model(self.model, dict(weights), config)
        wrong = [*info.unexpected_keys, *info.mismatched_keys, *info.conversion_errors, *info.error_msgs]
        loaded = dict(self.model.named_parameters(remove_duplicate=False))
        for name, parameter in kept.items():
            if loaded[name] is not parameter:
                local(parameter).copy_(local(loaded[name]))
                module, _, last = name.rpartition(".")
                setattr(self.model.get_submodule(module), last, parameter)
        if wrong:
            raise LayoutError(f"transformers cannot load: {wrong}")

    def live_tensors(self) -> dict[str, torch.Tensor]:
        return {name: local(tensor) for name, tensor in self.model.state_dict(keep_vars=True).items()}


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's memory of a tensor."""
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


def read_weights(directory: Path) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors."""
    return load_file(directory / "model.safetensors")


def discovered(directory: Path, backend: Any, *, traceable: bool = True, any_rank: AnyRank = alone) -> SourceMap:
    """Discover the layout of ``backend``, which holds the checkpoint, by trace and by probe, and check both.

    The live tensors are what the engine itself loaded: the map must rebuild every bit of them from the files.
    """
    spec = read_spec(directory)
    engine = {name: tensor.clone() for name, tensor in backend.live_tensors().items()}
    found: dict[Method, SourceMap] = {}
    for method in METHODS:
        layout = discover(spec, backend.load_weights, backend.live_tensors, method=method, any_rank=any_rank)
        assert_equal(backend.live_tensors(), engine)  # restored
        assert_rebuilds(spec, layout, read_weights(directory), engine)
        assert not layout.opaque
        found[method] = layout
    assert bool(found["auto"].probed) != traceable, found["auto"].probed
    painted = [paint(spec, layout.runtime, layout.boxes) for layout in found.values()]
    assert all(np.array_equal(ids, painted[1][name]) for name, ids in painted[0].items())
    assert found["auto"].aliases == found["probe"].aliases
    return found["auto"]


def assert_rebuilds(
    spec: CheckpointSpec, layout: SourceMap, checkpoint: Mapping[str, torch.Tensor], engine: Mapping[str, torch.Tensor]
) -> None:
    """``layout`` says of every element of the engine's tensors where in the checkpoint it is, or that it is zero."""
    rebuilt = {}
    for name, ids in paint(spec, layout.runtime, layout.boxes).items():
        flat = torch.zeros(ids.size, dtype=engine[name].dtype)
        for tensor, elements, places in by_tensor(spec, ids):
            values = checkpoint[tensor].reshape(-1)[torch.from_numpy(elements)]
            flat[torch.from_numpy(places)] = values.to(flat.dtype)
        rebuilt[name] = flat.reshape(engine[name].shape)
    assert_equal(rebuilt, {name: engine[name] for name in rebuilt})


def assert_equal(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Bit for bit, names and dtypes too."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(bit_view(found[name]), bit_view(tensor)), name
