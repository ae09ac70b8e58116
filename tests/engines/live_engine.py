"""A vLLM engine whose weights are replaced through the discovered map, as a process: ``live_engine.py JOB.json``.

The engine loads ``model`` by itself and answers; then each directory of ``updates`` is written into its live tensors,
and it answers again. Writes an ``Outcome`` to ``outcome``. The job is JSON of the type ``Job``.
"""

import faulthandler
import sys
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch
import vllm._custom_ops
import vllm.model_executor.layers.utils
from safetensors.torch import load_file
from vllm import LLM, SamplingParams
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.utils import replace_parameter

from rlbridge.sync.layout.checkpoint import read_spec
from rlbridge.sync.layout.discover import discover
from rlbridge.sync.layout.source_map import Box, SourceMap
from rlbridge.sync.packing import prepare
from rlbridge.sync.plan.program import BucketProgram, Piece


class Job(msgspec.Struct, frozen=True):
    """Which checkpoints, which prompts (token ids), and when to give up."""

    model: str
    updates: list[str]
    prompts: list[list[int]]
    new_tokens: int
    outcome: str
    deadline_s: float


class Answer(msgspec.Struct, frozen=True):
    """Greedy tokens of one prompt and the logprob of each."""

    tokens: list[int]
    logprobs: list[float]


class Outcome(msgspec.Struct, frozen=True):
    """What the engine did.

    Attributes:
        repacked: parameters that post-processing put into another form, so that they are not written in place.
        answers: by checkpoint (the first one is the engine's own load), by prompt.
    """

    repacked: list[str]
    answers: list[list[Answer]]


@dataclass
class Loaded:
    """vLLM's model as it was between its loading and its post-processing."""

    models: list[torch.nn.Module] = field(default_factory=list)
    layouts: list[SourceMap] = field(default_factory=list)
    places: dict[str, int] = field(default_factory=dict)

    def discover_while_loading(self, directory: Path) -> None:
        """Have layout discovery run inside vLLM's loading, before kernels get the weights."""
        vllm_loads = DefaultModelLoader.load_weights

        def load_weights(loader, model, config):
            vllm_loads(loader, model, config)
            self.models.append(model)
            self.layouts.append(discover(read_spec(directory), model.load_weights, lambda: parameters(model)))
            self.places.update({name: tensor.data_ptr() for name, tensor in parameters(model).items()})

        DefaultModelLoader.load_weights = load_weights

    def repacked(self) -> list[str]:
        """Parameters that are no longer where the loader wrote them."""
        now = parameters(self.models[0])
        return [name for name, place in self.places.items() if name not in now or now[name].data_ptr() != place]


def main(job: Job) -> None:
    faulthandler.dump_traceback_later(job.deadline_s, exit=True)
    keep_weights_live()
    loaded = Loaded()
    loaded.discover_while_loading(Path(job.model))
    engine = LLM(
        job.model,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        enforce_eager=True,
        enable_prefix_caching=False,
        distributed_executor_backend="uni",
        max_model_len=64,
        max_num_seqs=4,
    )
    answers = [answer(engine, job)]
    for directory in job.updates:
        update(loaded, Path(directory))
        answers.append(answer(engine, job))
    Path(job.outcome).write_bytes(msgspec.json.encode(Outcome(loaded.repacked(), answers)))


def keep_weights_live() -> None:
    """Linear layers multiply with their parameters instead of with a packed copy of them."""
    vllm._custom_ops._supports_onednn = False
    vllm.model_executor.layers.utils.check_cpu_sgl_kernel = lambda *_: False


def answer(engine: LLM, job: Job) -> list[Answer]:
    """Continue every prompt greedily."""
    sampling = SamplingParams(temperature=0.0, max_tokens=job.new_tokens, ignore_eos=True, logprobs=1, detokenize=False)
    results = engine.generate([{"prompt_token_ids": p} for p in job.prompts], sampling, use_tqdm=False)
    answers = []
    for result in results:
        tokens = list(result.outputs[0].token_ids)
        steps = zip(result.outputs[0].logprobs, tokens, strict=True)
        answers.append(Answer(tokens, [step[token].logprob for step, token in steps]))
    return answers


def update(loaded: Loaded, directory: Path) -> None:
    """Write a checkpoint into the engine, tensor by tensor, through the map.

    What post-processing repacked is written into a fresh tensor of the loader's form and processed again.
    """
    model, layout = loaded.models[0], loaded.layouts[0]
    live = parameters(model)
    again = {name: torch.zeros(layout.runtime[name].shape, dtype=live[name].dtype) for name in loaded.repacked()}
    write(layout, load_file(directory / "model.safetensors"), live | again)
    layers = {name.rpartition(".")[0] for name in again}
    for name, tensor in again.items():
        layer, _, attribute = name.rpartition(".")
        replace_parameter(model.get_submodule(layer), attribute, tensor)
    for name in layers:
        layer = model.get_submodule(name)
        layer.quant_method.moe_kernel.fused_experts.process_weights_after_loading(layer)


def write(layout: SourceMap, checkpoint: dict[str, torch.Tensor], live: dict[str, torch.Tensor]) -> None:
    """One bucket for each checkpoint tensor: its elements in the order of its boxes."""
    for number, (name, tensor) in enumerate(checkpoint.items()):
        boxes = [box for box in layout.boxes if box.tensor == name]
        parts = [tensor[elements(box)].contiguous().view(torch.uint8).reshape(-1) for box in boxes]
        begins = [sum(part.numel() for part in parts[:i]) for i in range(len(parts))]
        dtype = str(tensor.dtype).removeprefix("torch.")
        pieces = tuple(
            Piece(box.runtime, box.offset, box.count, box.strides, dtype, begin)
            for box, begin in zip(boxes, begins, strict=True)
        )
        payload = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
        prepare(BucketProgram(number, payload.numel(), "trainer-0", (), pieces), live).unpack(payload)


def elements(box: Box) -> tuple[slice, ...]:
    """The checkpoint elements of ``box`` as an index."""
    return tuple(
        slice(start, start + (count - 1) * step + 1, step)
        for start, count, step in zip(box.start, box.count, box.step, strict=True)
    )


def parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The live tensors; tied ones under both of their names."""
    return {name: parameter.detach() for name, parameter in model.named_parameters(remove_duplicate=False)}


if __name__ == "__main__":
    main(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Job))
