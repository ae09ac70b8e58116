"""Checkpoints: ordinary Hugging Face directories, complete or absent."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec

from rlbridge.trainer.parallel import barrier, rank
from rlbridge.trainer.policy import Policy
from rlbridge.transport.errors import ConfigError

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


class TrainerState(msgspec.Struct, frozen=True):
    """What a checkpoint knows beside the weights (``trainer_state.json``): the policy version that they are."""

    policy_version: int


def save_checkpoint(policy: Policy, model_dir: Path, path: Path, version: int) -> None:
    """Write the policy to ``path``: configuration, safetensors, tokenizer, ``trainer_state.json``.

    ``AutoModelForCausalLM.from_pretrained(path)`` opens it. The directory appears under its name only once it is
    complete. Collective over the trainer ranks; rank 0 gathers the weights and writes.

    Args:
        model_dir: where the policy came from; its tokenizer and other small files are copied.

    Raises:
        ConfigError: ``path`` exists already.
    """
    if path.exists():
        raise ConfigError(f"checkpoint {path} exists already; choose another run name or remove it")
    barrier()  # no rank may look for the path after another one has written it
    state = policy.full_state()
    if rank() == 0:
        partial = path.with_name(f".{path.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)  # left over from a run that was killed
        partial.mkdir(parents=True)
        _copy_companions(model_dir, partial)
        policy.model.save_pretrained(partial, state_dict=state)
        (partial / "trainer_state.json").write_bytes(msgspec.json.encode(TrainerState(version)))
        partial.rename(path)
    barrier()


def read_trainer_state(path: Path) -> TrainerState:
    """What ``save_checkpoint`` noted in ``path``.

    Raises:
        ConfigError: the file is missing or unreadable.
    """
    file = path / "trainer_state.json"
    try:
        return msgspec.json.decode(file.read_bytes(), type=TrainerState)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{file} is no trainer state: {error}") from error


def _copy_companions(source: Path, target: Path) -> None:
    """Tokenizer, chat template, generation settings: whatever lies beside the weights."""
    for file in source.iterdir():
        if file.is_file() and not file.name.endswith(_WEIGHT_SUFFIXES):
            shutil.copy2(file, target / file.name)
