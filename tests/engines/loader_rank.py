"""One rank of vLLM models, from construction to loading, as a process: ``loader_rank.py RANK JOB.json``.

It stops before vLLM's post-processing, where the parameters are what vLLM's loader wrote. Of each case it leaves
``CASE/rank-N.found`` (an ``Outcome``) and ``CASE/rank-N.safetensors``: the parameters after vLLM's own load.
The job is JSON of the type ``Job``.
"""

import faulthandler
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file

from rlbridge.sync.layout.checkpoint import read_spec
from rlbridge.sync.layout.discover import discover
from rlbridge.sync.layout.source_map import SourceMap
from rlbridge.sync.layout.spec import CheckpointSpec
from rlbridge.sync.layout.trace import trace_layout


class Case(msgspec.Struct, frozen=True):
    """One model in one engine.

    Attributes:
        name: of the folder with the outcome.
        model: a Hugging Face directory.
        dtype: of the engine.
        experts_apart: each rank has whole experts instead of a slice of each one.
    """

    name: str
    model: str
    dtype: str
    experts_apart: bool = False


class Job(msgspec.Struct, frozen=True):
    """What all ranks do, in this order; each prints its stacks and exits after ``deadline_s``."""

    folder: str
    ranks: int
    cases: list[Case]
    deadline_s: float


class Outcome(msgspec.Struct, frozen=True):
    """What one rank found.

    Attributes:
        layouts: what discovery made of vLLM's loader, by method.
        disturbed: parameters that discovery did not give back as they were.
    """

    layouts: dict[str, SourceMap]
    disturbed: list[str]


def main(rank: int, job: Job) -> None:
    faulthandler.dump_traceback_later(job.deadline_s, exit=True)
    torch.set_num_threads(1)
    for case in job.cases:
        folder = Path(job.folder) / case.name
        folder.mkdir(exist_ok=True)
        outcome, loaded = run(rank, job, case)
        (folder / f"rank-{rank}.found").write_bytes(msgspec.msgpack.encode(outcome))
        save_file(loaded, folder / f"rank-{rank}.safetensors")


def run(rank: int, job: Job, case: Case) -> tuple[Outcome, dict[str, torch.Tensor]]:
    """Let vLLM load the checkpoint, then discover its layout."""
    with vllm_ranks(rank, job, case) as config:
        model = construct(config, "cpu")
        load(model, config)
        loaded = {name: tensor.clone() for name, tensor in parameters(model).items()}
        layouts = discovered(model, read_spec(Path(case.model)))
        disturbed = [name for name, tensor in parameters(model).items() if not torch.equal(tensor, loaded[name])]
        if not case.experts_apart:  # vLLM reads values while it constructs such a model
            without_memory = construct(config, "meta")
            layouts["trace without weights"] = trace_layout(
                read_spec(Path(case.model)), without_memory.load_weights, lambda: parameters(without_memory)
            )
    return Outcome(layouts, disturbed), loaded


def discovered(model: torch.nn.Module, spec: CheckpointSpec) -> dict[str, SourceMap]:
    """The layout of a model with weights, by method."""

    def live() -> dict[str, torch.Tensor]:
        return parameters(model)

    return {method: discover(spec, model.load_weights, live, method=method) for method in ("auto", "probe", "trace")}


@contextmanager
def vllm_ranks(rank: int, job: Job, case: Case) -> Iterator[Any]:
    """vLLM's configuration and its process groups over gloo."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs

    config = EngineArgs(
        model=case.model,
        dtype=case.dtype,
        tensor_parallel_size=job.ranks,
        enable_expert_parallel=case.experts_apart,
        distributed_executor_backend="mp",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=64,
    ).create_engine_config()
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(
            world_size=job.ranks,
            rank=rank,
            local_rank=rank,
            distributed_init_method=f"file://{job.folder}/{case.name}/rendezvous",
            backend="gloo",
            timeout=timedelta(seconds=job.deadline_s),
        )
        try:
            parallel_state.ensure_model_parallel_initialized(job.ranks, 1)
            yield config
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()


def construct(config: Any, device: str) -> torch.nn.Module:
    """The model without values, as vLLM's own loader makes it; another one of the same configuration is forgotten."""
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    config.compilation_config.static_forward_context.clear()  # where layers register under their names
    with set_default_torch_dtype(config.model_config.dtype), torch.device(device):
        return initialize_model(config)


def load(model: torch.nn.Module, config: Any) -> None:
    """vLLM reads the checkpoint's files by itself."""
    from vllm.model_executor.model_loader import get_model_loader

    get_model_loader(config.load_config).load_weights(model, config.model_config)


def parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The live tensors; tied ones under both of their names."""
    return {name: parameter.detach() for name, parameter in model.named_parameters(remove_duplicate=False)}


if __name__ == "__main__":
    main(int(sys.argv[1]), msgspec.json.decode(Path(sys.argv[2]).read_bytes(), type=Job))
