"""From untyped mappings to frozen dataclasses, strictly. Pure; knows nothing of Hydra.

An unknown key or a value of the wrong type is a ``ConfigError`` that names the full key and, where it can, the nearest
valid name.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from rlbridge.transport.errors import ConfigError

T = TypeVar("T")

_WHOLE_LIMIT = 1 << 63
"""Workers, torch and files hold whole numbers in 64 bits, sign included."""


def parse_dataclass(cls: type[T], values: Mapping[str, Any], prefix: str = "") -> T:
    """Build ``cls``, nested dataclasses included, from ``values``; ``prefix`` leads its keys in messages.

    Keys that ``values`` lacks take the dataclass's defaults.

    Raises:
        ConfigError: a key is unknown, a required one is missing, or a value has the wrong type.
    """
    fields = _fields(cls)
    parsed: dict[str, Any] = {}
    for key, value in values.items():
        full_key = f"{prefix}{key}"
        if key not in fields:
            raise unknown_key(full_key, [f"{prefix}{name}" for name in fields])
        parsed[key] = _parse_value(fields[key], value, full_key)
    missing = [name for name in _required(cls) if name not in parsed]
    if missing:
        raise ConfigError(f"missing setting: {prefix}{missing[0]}")
    return cls(**parsed)


def leaf_keys(cls: type[Any], prefix: str = "") -> list[str]:
    """Every dotted key that a value can be given to, in the order of the dataclass."""
    keys: list[str] = []
    for name, hint in _fields(cls).items():
        full_key = f"{prefix}{name}"
        keys += leaf_keys(hint, f"{full_key}.") if _is_group(hint) else [full_key]
    return keys


def unknown_key(key: str, valid: Iterable[str]) -> ConfigError:
    """The error for a key that does not exist, with the nearest one of ``valid``."""
    return ConfigError(f"unknown setting {key!r}{suggestion(key, valid)}")


def suggestion(name: str, valid: Iterable[str]) -> str:
    """``; did you mean 'x'?``, or the choices if nothing is near and they are few, or nothing."""
    choices = list(valid)
    nearest = difflib.get_close_matches(name, choices, n=1, cutoff=0.5)
    if nearest:
        return f"; did you mean {nearest[0]!r}?"
    return f"; choose one of {', '.join(choices)}" if len(choices) <= 12 else ""


def _fields(cls: type[Any]) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _required(cls: type[Any]) -> list[str]:
    nothing = dataclasses.MISSING
    return [f.name for f in dataclasses.fields(cls) if f.default is nothing and f.default_factory is nothing]


def _parse_value(hint: Any, value: Any, key: str) -> Any:
    if _is_group(hint):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{key}={value!r}: expected a group of settings")
        return parse_dataclass(hint, value, f"{key}.")
    if _takes_text(hint) and isinstance(value, int) and not isinstance(value, bool):
        value = str(value)  # name=20261201 is text that looks like a number
    try:
        parsed = msgspec.convert(value, type=hint, strict=True)
    except msgspec.ValidationError:
        choices = _choices(hint)
        hint_text = suggestion(value, choices) if isinstance(value, str) and choices else ""
        raise ConfigError(f"{key}={value!r}: expected {_describe(hint)}{hint_text}") from None
    if isinstance(parsed, float) and not math.isfinite(parsed):
        raise ConfigError(f"{key}={value!r}: expected a finite number")
    if isinstance(parsed, int) and not -_WHOLE_LIMIT <= parsed < _WHOLE_LIMIT:
        raise ConfigError(f"{key}={value!r}: expected a whole number of at most 64 bits, less than {_WHOLE_LIMIT}")
    return parsed


def _is_group(hint: Any) -> bool:
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _takes_text(hint: Any) -> bool:
    return str in _alternatives(hint)


def _choices(hint: Any) -> list[str]:
    choices: list[str] = []
    for part in _alternatives(hint):
        if get_origin(part) is Literal:
            choices += get_args(part)
        elif isinstance(part, type) and issubclass(part, StrEnum):
            choices += [member.value for member in part]
    return choices


def _describe(hint: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", types.NoneType: "null"}
    parts = [names[part] for part in _alternatives(hint) if part in names]
    choices = _choices(hint)
    return " or ".join(([f"one of {', '.join(choices)}"] if choices else []) + parts)
