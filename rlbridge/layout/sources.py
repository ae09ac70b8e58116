"""Finds or makes the layout that a user names: a saved file, a model and a parallelism, a directory in an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

from rlbridge.catalog.layouts import Placed, rollout_layouts, trainer_layouts
from rlbridge.catalog.models import MODELS, shape_of, spec_of
from rlbridge.config_parse import suggestion
from rlbridge.layout.saved import KnownLayout, load
from rlbridge.sync.layout.spec import CheckpointSpec
from rlbridge.transport.errors import ConfigError

ENGINES = ("transformers", "trainer", "vllm")
"""Backends that can run on this machine; the first is the default."""
Method = Literal["auto", "trace", "probe"]


class Source(NamedTuple):
    """What a layout is asked of.

    Attributes:
        where: a directory, a ``config.json``, a built-in model or a saved layout.
        engine, parallel: one of them at most; a directory without either is opened in the first of ``ENGINES``.
        rank: which rank under ``parallel``.
        dtype: of the engine's weights; ``None`` for the checkpoint's, where the engine can have it.
        method: how the layout of an engine is discovered.
    """

    where: str
    engine: str | None
    parallel: str | None
    rank: int
    dtype: str | None
    method: Method


def parse_source(text: str, defaults: Source) -> Source:
    """Read ``WHERE[:ENGINE]`` or ``WHERE[:PARALLELISM[:RANK]]``; what ``text`` does not say ``defaults`` do.

    Raises:
        ConfigError: the rank is not a number, or engine and parallelism are both given.
    """
    if Path(text).exists():
        where, parts = text, []
    else:
        where, *parts = text.split(":")
    if len(parts) > 2 or (len(parts) == 2 and not parts[1].isdecimal()):
        raise ConfigError(
            f"{text}: cannot read it; give WHERE, WHERE:ENGINE, WHERE:PARALLELISM or WHERE:PARALLELISM:RANK"
        )
    _, engine, parallel, rank, *_ = defaults
    if parts and parts[0] not in ENGINES and not any(character.isdecimal() for character in parts[0]):
        raise ConfigError(f"{text}: {parts[0]!r} is no engine{suggestion(parts[0], ENGINES)}")
    if parts:
        engine, parallel = (parts[0], None) if parts[0] in ENGINES else (None, parts[0])
    if len(parts) == 2:
        rank = int(parts[1])
    if engine is not None and parallel is not None:
        raise ConfigError("--engine runs a real loader and --parallel only calculates; give one of them")
    return defaults._replace(where=where, engine=engine, parallel=parallel, rank=rank)


def known_layout(source: Source) -> KnownLayout:
    """The layout of ``source``.

    Raises:
        ConfigError: there is no such model, engine, parallelism or rank.
        LayoutError: discovery failed.
    """
    path = Path(source.where)
    if source.where not in MODELS and path.is_file() and not _is_config(path):
        if source.engine or source.parallel:
            raise ConfigError(f"{path} is a saved layout; an engine or a parallelism says nothing of it")
        return load(path)
    if source.parallel is not None:
        return _calculated(source, source.parallel)
    if path.is_dir() and source.where not in MODELS:
        return _discovered(path, source.engine or ENGINES[0], source.dtype, source.method)
    shape_of(source.where)  # a typo is answered before anything else
    raise ConfigError(f"{source.where}: there are no weights to load; say how it is cut, e.g. --parallel tp4 --rank 1")


def _is_config(path: Path) -> bool:
    with path.open("rb") as file:
        return path.suffix == ".json" and b'"kind":"rlbridge layout"' not in file.read(64)


def _calculated(source: Source, parallel: str) -> KnownLayout:
    shape = shape_of(source.where)
    of_trainer = any(part.startswith(("fsdp", "hsdp")) for part in parallel.split("."))
    placed = (trainer_layouts if of_trainer else rollout_layouts)(shape, parallel, gpus_per_node=8)
    worker = _worker(placed, parallel, source.rank)
    tensors = spec_of(source.where).tensors
    if any(box.tensor not in tensors for box in worker.layout.boxes):
        raise ConfigError(f"{source.where}: its safetensors files have other tensors than its config.json says")
    named = {box.tensor: tensors[box.tensor] for box in worker.layout.boxes}
    return KnownLayout(f"{source.where} {parallel}, {worker.worker}", CheckpointSpec(named), worker.layout)


def _worker(placed: list[Placed], parallel: str, rank: int) -> Placed:
    if not 0 <= rank < len(placed):
        raise ConfigError(f"--rank {rank}: {parallel} has ranks 0 to {len(placed) - 1}")
    return placed[rank]


def _discovered(directory: Path, engine: str, dtype: str | None, method: Method) -> KnownLayout:
    if engine not in ENGINES:
        raise ConfigError(f"no engine {engine!r}{suggestion(engine, ENGINES)}")
    spec = spec_of(directory)
    chosen = dtype or ("bfloat16" if {tensor.dtype for tensor in spec.tensors.values()} == {"bfloat16"} else "float32")
    from rlbridge.layout.engines import OPEN
    from rlbridge.sync.layout.discover import discover

    with OPEN[engine](directory, chosen) as backend:
        layout = discover(spec, backend.load_weights, backend.live_tensors, method=method)
    return KnownLayout(f"{directory} in {engine}", spec, layout)
