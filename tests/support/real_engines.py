"""Real inference engines, each in processes of its own: nothing of an engine is imported into the tests.

These tests have an environment of their own (``make test-engines``), because engines pin what everything else does not.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.utils.logging import disable_progress_bar

PROGRAMS = Path(__file__).parents[1] / "engines"
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CACHE_ROOT": f"{sys.prefix}/cache",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
UNUSED = "model.layers.0.self_attn.rotary_emb.inv_freq"
"""A tensor that old checkpoints have and no engine loads."""


def write_checkpoint(
    directory: Path,
    kind: str,
    *,
    seed: int,
    kv_heads: int = 2,
    tied: bool = False,
    both_heads: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """A tiny Qwen3 (``dense``) or Qwen3-MoE (``moe``) as a trainer saves it, every parameter random.

    Args:
        both_heads: store a tied weight under both of its names, and a tensor that nobody loads.
    """
    disable_progress_bar()
    torch.manual_seed(seed)
    model = _model(kind, kv_heads, tied)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.2)
    model.to(dtype).save_pretrained(directory)
    if both_heads:
        tensors = load_file(directory / "model.safetensors")
        tensors |= {"lm_head.weight": tensors["model.embed_tokens.weight"].clone(), UNUSED: torch.rand(16)}
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _model(kind: str, kv_heads: int, tied: bool) -> torch.nn.Module:
    common = {
        "vocab_size": 200,  # engines pad it to 256
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": kv_heads,
        "head_dim": 32,
        "max_position_embeddings": 128,
        "tie_word_embeddings": tied,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if kind == "dense":
        return Qwen3ForCausalLM(Qwen3Config(**common))
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "mlp_only_layers": [0]}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**common, **moe))


def run_programs(script: str, argument_lists: Sequence[Sequence[str]], logs: Path, deadline_s: float) -> None:
    """Run a script of tests/engines in one process for each list of arguments, all at once; none outlives the call.

    Fails the test with the logs if one of them fails or the last one has not ended after ``deadline_s``.
    """
    environment = os.environ | ENVIRONMENT
    processes: list[psutil.Popen] = []
    files = [logs / f"{Path(script).stem}-{index}.log" for index in range(len(argument_lists))]
    try:
        for arguments, file in zip(argument_lists, files, strict=True):
            command = [sys.executable, "-P", str(PROGRAMS / script), *arguments]
            with file.open("w") as log:
                processes.append(psutil.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
        end_s = time.monotonic() + deadline_s
        while any(process.poll() is None for process in processes) and time.monotonic() < end_s:
            if any(process.poll() for process in processes):
                break  # the others wait for the one that failed
            time.sleep(0.1)
        statuses = [process.poll() for process in processes]
    finally:
        for process in processes:
            _kill(process)
    if any(status != 0 for status in statuses):
        ends = {None: f"killed: it had not ended after {deadline_s} s, or another one had failed"}
        texts = [
            f"{file.stem}: {ends.get(status, f'exit status {status}')}\n{file.read_text()}"
            for status, file in zip(statuses, files, strict=True)
        ]
        pytest.fail("\n".join(texts), pytrace=False)


def _kill(process: psutil.Popen) -> None:
    """End a process and what it started."""
    if process.poll() is None:
        for child in process.children(recursive=True):
            child.kill()
        process.kill()
    process.wait()


def run_rlbridge(*arguments: str, deadline_s: float) -> str:
    """Run the command line where vLLM is installed; returns its standard output."""
    command = [sys.executable, "-m", "rlbridge", *arguments]
    ended = subprocess.run(
        command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=deadline_s, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def write_job(path: Path, **job: object) -> str:
    """A program's job as a JSON file."""
    path.write_bytes(msgspec.json.encode(job))
    return str(path)
