"""Axes: from values to picture coordinates, and which values get a tick. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

_LEAST = 1e-100
"""What is smaller is nothing: its logarithm would leave the numbers."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps ``low .. high`` onto ``start .. end`` (pixels of the picture; ``end`` may be the smaller one).

    Attributes:
        log: equal ratios have equal lengths; ``low`` must be positive.
        whole: ticks are whole numbers only.
    """

    low: float
    high: float
    start: float
    end: float
    log: bool = False
    whole: bool = False

    def __call__(self, value: float) -> float:
        """The coordinate of ``value``."""
        low, high, at = (
            (math.log10(v) for v in (self.low, self.high, value)) if self.log else (self.low, self.high, value)
        )
        return self.start + (at - low) / (high - low) * (self.end - self.start)

    def ticks(self, about: int = 5) -> list[float]:
        """Round values within the scale, at most about ``about`` of them."""
        return (
            _decades(self.low, self.high, about) if self.log else _round_values(self.low, self.high, about, self.whole)
        )


def linear(values: Iterable[float], start: float, end: float, *, from_zero: bool = False, whole: bool = False) -> Scale:
    """A scale whose ends are ticks, so that nothing touches the frame by chance; a single value gets room around it."""
    low, high = _extent(values)
    low, high = (min(low, 0.0), max(high, 0.0)) if from_zero else (low, high)
    if high - low < _LEAST:
        low, high = (0.0, 1.0) if abs(low) < _LEAST else (low - abs(low) / 2, high + abs(high) / 2)
        low, high = (math.floor(low), math.ceil(high)) if whole else (low, high)
    step = _step(high - low, 5, whole)
    return Scale(math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step, start, end, whole=whole)


def tight(values: Iterable[float], start: float, end: float, *, whole: bool = False) -> Scale:
    """A scale from the least value to the greatest: the horizontal axis of something that was counted or timed."""
    low, high = _extent(values)
    return Scale(low, high if high > low else low + 1, start, end, whole=whole)


def logarithmic(values: Iterable[float], start: float, end: float) -> Scale:
    """A logarithmic scale of whole decades around the positive ones among ``values``."""
    low, high = _extent(value for value in values if value > _LEAST)
    if low <= 0:
        return Scale(1.0, 10.0, start, end, log=True)
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    return Scale(10.0**first, 10.0 ** max(last, first + 1), start, end, log=True)


def _extent(values: Iterable[float]) -> tuple[float, float]:
    finite = [value for value in values if math.isfinite(value)]
    return (min(finite), max(finite)) if finite else (0.0, 0.0)


def _step(span: float, about: int, whole: bool) -> float:
    """The smallest of 1, 2, 5 times a power of ten that cuts ``span`` into at most ``about`` pieces."""
    rough = span / about
    power: float = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    return max(1.0, step) if whole else step


def _round_values(low: float, high: float, about: int, whole: bool) -> list[float]:
    step = _step(high - low, about, whole)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def _decades(low: float, high: float, about: int) -> list[float]:
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    stride = max(1, math.ceil((last - first) / about))
    return [10.0**power for power in range(first, last + 1, stride)]
