"""The policy under training: a Hugging Face causal language model in fp32, whole or sharded, with or without critic."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from rlbridge.trainer.batch import Batch
from rlbridge.trainer.parallel import shard, world_size
from rlbridge.transport.errors import ConfigError, LayoutError


class Policy(nn.Module):
    """Language model and optional value head behind one forward, which FSDP2 needs to be a single entry.

    Always in evaluation mode: dropout would make the trainer's log probabilities differ from the sampler's.
    """

    def __init__(self, model: Any, *, with_values: bool) -> None:
        super().__init__()
        self.model = model
        self.value_head: nn.Linear | None = None
        if with_values:
            self.value_head = nn.Linear(int(model.config.hidden_size), 1)
            nn.init.zeros_(self.value_head.weight)
            nn.init.zeros_(self.value_head.bias)
        self.eval()
        if world_size() > 1:
            shard(self, _blocks(model))
        # Aliases of tied weights included: a checkpoint may name either.
        self._parameters_by_name: dict[str, nn.Parameter] = dict(model.named_parameters(remove_duplicate=False))

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """What the model says before each response token.

        Returns:
            logits ``[B, T, V]``, and values ``[B, T + 1]`` (``None`` without a value head), of the states in
            ``batch.positions``.
        """
        first = int(batch.positions.min())
        output = self.model(
            input_ids=batch.input_ids,
            use_cache=False,
            output_hidden_states=self.value_head is not None,
            logits_to_keep=batch.input_ids.shape[1] - first,
        )
        row = torch.arange(batch.rows).unsqueeze(1)
        logits = output.logits[row, batch.positions[:, :-1] - first]
        if self.value_head is None:
            return logits, None
        states = output.hidden_states[-1][row, batch.positions]
        return logits, self.value_head(states.float()).squeeze(-1)

    def live_tensors(self) -> dict[str, Tensor]:
        """This rank's part of every weight, by checkpoint name: plain tensors that share the parameters' memory.

        Tied weights appear once; a weight of which this rank holds no row is absent. The value head is no part of it.
        """
        live: dict[str, Tensor] = {}
        seen: set[int] = set()
        for name, parameter in self._parameters_by_name.items():
            local = _local(parameter)
            if local.numel() and local.data_ptr() not in seen:
                seen.add(local.data_ptr())
                live[name] = local
        return live

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy full checkpoint tensors into the parameters; a shard takes its rows, without communication.

        Raises:
            LayoutError: a name that the model does not have, or another shape.
        """
        for name, tensor in weights:
            parameter = self._parameters_by_name.get(name)
            if parameter is None:
                raise LayoutError(f"the policy has no weight {name!r}{_nearest(name, self._parameters_by_name)}")
            if parameter.shape != tensor.shape:
                raise LayoutError(
                    f"weight {name!r} has shape {tuple(tensor.shape)}, the policy's has {tuple(parameter.shape)}"
                )
            with torch.no_grad():
                _local(parameter).copy_(_local_rows(parameter, tensor))

    def frozen_copy(self) -> Policy:
        """The language model as it is now, without value head and gradient; sharded likewise, without communication."""
        from transformers import AutoModelForCausalLM

        config = copy.deepcopy(self.model.config)
        with torch.random.fork_rng(devices=[]):  # its random weights are overwritten; nobody's dice may move for them
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        frozen = Policy(model, with_values=False)
        with torch.no_grad():
            for name, parameter in frozen._parameters_by_name.items():
                _local(parameter).copy_(_local(self._parameters_by_name[name]))
            for own, theirs in zip(frozen.model.buffers(), self.model.buffers(), strict=True):
                own.copy_(theirs)
        return frozen.requires_grad_(False)

    def full_state(self) -> dict[str, Tensor]:
        """Every weight whole, by checkpoint name. Collective over the trainer ranks; meant for checkpoints only."""
        return {
            name: parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
            for name, parameter in self._parameters_by_name.items()
        }


def load_policy(model_dir: Path, *, with_values: bool) -> Policy:
    """Read a local Hugging Face checkpoint in fp32; shard it if trainer ranks have joined. Never asks the network.

    Raises:
        ConfigError: the directory is no checkpoint of a causal language model.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # the terminal belongs to rlbridge's own progress
    if not (model_dir / "config.json").is_file():
        raise ConfigError(f"{model_dir} has no config.json; give a local Hugging Face checkpoint")
    try:
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{model_dir} cannot be opened as a causal language model: {error}") from error
    return Policy(model, with_values=with_values)


def _blocks(model: Any) -> list[nn.Module]:
    """The decoder layers: the modules that Hugging Face itself never splits."""
    kinds = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in kinds]


def _local(parameter: nn.Parameter) -> Tensor:
    """This rank's memory of a parameter, without gradient."""
    data = parameter.detach()
    return data.to_local() if isinstance(data, DTensor) else data


def _local_rows(parameter: nn.Parameter, tensor: Tensor) -> Tensor:
    """The part of a full tensor that this rank holds: FSDP2 cuts dimension ``dim`` into ``ceil(n / ranks)`` each."""
    if not isinstance(parameter, DTensor):
        return tensor
    (placement,) = parameter.placements
    if not isinstance(placement, Shard):
        raise LayoutError(f"the policy's weights are laid out as {placement}, not as FSDP2 shards")
    parts = tensor.chunk(parameter.device_mesh.size(), placement.dim)
    own = parameter.device_mesh.get_local_rank()
    return parts[own] if own < len(parts) else tensor.narrow(placement.dim, 0, 0)


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
