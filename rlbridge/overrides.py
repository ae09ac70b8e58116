"""Checks what the user typed before Hydra composes it, so that a slip is one clear line and not a stack trace.

Hydra alone would create any key behind ``+`` and accept any value; here every key must exist in ``JobConfig`` and every
group option in ``conf/``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override, QuotedString, Sweep
from hydra.errors import HydraException

from rlbridge.config import JobConfig
from rlbridge.config_parse import leaf_keys, suggestion, unknown_key
from rlbridge.transport.errors import ConfigError

CONFIG_PACKAGE = "rlbridge.conf"

Groups = Mapping[str, Sequence[str]]
"""Options by config group."""


def config_groups(extra: Path | None = None) -> dict[str, list[str]]:
    """The config groups that ship with rlbridge, with those of a user's ``--config-dir`` added."""
    groups: dict[str, list[str]] = {}
    for root in (files(CONFIG_PACKAGE), *([extra] if extra is not None else [])):
        for folder in root.iterdir():
            if folder.is_dir() and not folder.name.startswith(("_", ".")):
                options = [Path(entry.name).stem for entry in folder.iterdir() if entry.name.endswith(".yaml")]
                groups[folder.name] = sorted({*groups.get(folder.name, []), *options})
    return {name: options for name, options in groups.items() if options}


def check_overrides(arguments: Sequence[str], groups: Groups) -> None:
    """Check the overrides of one command line.

    Raises:
        ConfigError: one is malformed, names an unknown key or option, or adds or removes a setting.
    """
    for argument in arguments:
        override = _parse(argument)
        name = str(override.key_or_group)
        if name.split(".")[0].split("/")[0] == "hydra":
            continue
        if name in groups:
            _check_group(override, name, groups[name])
        else:
            _check_key(override, name, groups)


def _parse(argument: str) -> Override:
    try:
        return OverridesParser.create().parse_override(argument)
    except HydraException as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"cannot read {argument!r} ({reason}); write key=value, e.g. trainer.steps=40") from error


def _check_group(override: Override, group: str, options: Sequence[str]) -> None:
    if override.is_delete() or override.is_add():
        raise ConfigError(f"{override.input_line!r}: group {group!r} is always there; write {group}=OPTION")
    for option in _values(override, options):
        if not isinstance(option, str):
            raise ConfigError(f"{override.input_line!r}: {group} is a config group{suggestion('', options)}")
        if option not in options:
            raise ConfigError(f"{group}={option}: no such option{suggestion(option, options)}")


def _check_key(override: Override, key: str, groups: Groups) -> None:
    valid = leaf_keys(JobConfig)
    if key not in valid:
        raise unknown_key(key, [*valid, *groups])
    if override.is_delete():
        raise ConfigError(f"{override.input_line!r}: settings cannot be removed; give {key} another value")
    if override.is_add() and not override.is_force_add():
        raise ConfigError(f"{override.input_line!r}: {key} exists already; write {key}=VALUE without the +")


def _values(override: Override, options: Sequence[str]) -> list[Any]:
    value = override.value()
    if isinstance(value, Glob):
        return value.filter(list(options)) or [", ".join(value.include)]
    if isinstance(value, Sweep):
        return list(override.sweep_iterator())
    return [value.text if isinstance(value, QuotedString) else value]
