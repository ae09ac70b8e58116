"""Numbers as people read them, and the unit that an axis is drawn in. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

UNKNOWN = "–"  # noqa: RUF001 - an en dash, the sign for a value that was never measured


@dataclass(frozen=True, slots=True)
class Unit:
    """Values are divided by ``size`` before they are shown; ``name`` stands beside them."""

    size: float
    name: str


PLAIN = Unit(1.0, "")
_SECONDS = (Unit(1.0, "s"), Unit(1e-3, "ms"), Unit(1e-6, "µs"))
_BYTES = (Unit(1e12, "TB"), Unit(1e9, "GB"), Unit(1e6, "MB"), Unit(1e3, "kB"), Unit(1.0, "B"))


def seconds_unit(largest_s: float) -> Unit:
    """The unit for an axis of durations up to ``largest_s``."""
    return next((unit for unit in _SECONDS if largest_s >= unit.size), _SECONDS[-1])


def bytes_unit(largest: float) -> Unit:
    """The unit for an axis of byte counts up to ``largest``."""
    return next((unit for unit in _BYTES if largest >= unit.size), _BYTES[-1])


def seconds(value_s: float | None) -> str:
    """``0.00427`` as ``4.27 ms``; ``None`` as a dash."""
    if value_s is None:
        return UNKNOWN
    return "0 s" if value_s == 0 else _in(seconds_unit(abs(value_s)), value_s)


def tick_seconds(value_s: float) -> str:
    """A duration on an axis: ``0.0001`` as ``100 µs``."""
    unit = seconds_unit(value_s * (1 + 1e-9))
    return f"{value_s / unit.size:g} {unit.name}"


def plain(value: float) -> str:
    """A number on an axis, as short as it can be."""
    return f"{value:,g}"


def size(count: float | None) -> str:
    """``1072128`` as ``1.07 MB``; ``None`` as a dash."""
    return UNKNOWN if count is None else _in(bytes_unit(abs(count)), count)


def number(value: float | None, digits: int = 3) -> str:
    """A number with a fixed count of decimals; ``None`` as a dash."""
    return UNKNOWN if value is None else f"{value:,.{digits}f}"


def count(value: float | None) -> str:
    """A whole number with separators; ``None`` as a dash."""
    return number(value, 0)


def times(value: float) -> str:
    """A ratio: ``1.3 ×``, ``721 ×``."""
    return f"{significant(value)} ×"  # noqa: RUF001 - the multiplication sign


def percent(share: float) -> str:
    """A share of one: ``0.0072`` as ``0.7 %``."""
    return f"{100 * share:.1f} %"


def significant(value: float, digits: int = 3) -> str:
    """At least ``digits`` significant digits, without an exponent and without cutting whole numbers."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    power = int(f"{value:.{digits - 1}e}".partition("e")[2])  # after rounding: 9.999 is a 10
    decimals = max(0, digits - 1 - power)
    return f"{value:,.{min(decimals, 9)}f}"


def _in(unit: Unit, value: float) -> str:
    whole = unit.name == "B"
    return f"{significant(value / unit.size) if not whole else count(value)} {unit.name}"
