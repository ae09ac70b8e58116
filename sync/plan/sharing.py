"""How to share work over links so that the busiest one has the least: a linear programme. Pure.

A :class:`Choice` is an amount of bytes that may be divided between options; each option loads links in proportion. The
programme minimises the greatest ``load / rate`` over the links. Links that no choice connects are solved apart, so that
every group of links is as even as it can be, not only the one with the busiest link.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import msgspec
import numpy as np

from rlbridge.transport.errors import PlanError

Loads = tuple[tuple[str, float], ...]
"""(link, bytes on it for each byte of the choice)."""

_PROGRAMME_OPTIONS_MAX = 100_000
"""Beyond this many options in one programme (seconds) work is shared by filling up the least loaded link instead."""
_STEPS = 1 << 20
"""Shares are multiples of 1 / _STEPS, so that the last bits of floating point leave no trace in a plan."""


class Choice(msgspec.Struct, frozen=True, array_like=True):
    """Work that can be divided.

    Attributes:
        size_bytes: amount.
        options: what each way to do it loads; at least one.
    """

    size_bytes: int
    options: tuple[Loads, ...]


class Shares(msgspec.Struct, frozen=True):
    """How the choices are divided.

    Attributes:
        fractions: per choice, one number for each option; they add up to 1.
        load_s: link to its seconds at these shares (before they are rounded).
        exact: whether no division has a smaller busiest link.
    """

    fractions: list[tuple[float, ...]]
    load_s: dict[str, float]
    exact: bool

    @property
    def busiest_s(self) -> float:
        """Seconds of the busiest link."""
        return max(self.load_s.values(), default=0.0)


def share(choices: Sequence[Choice], base: Mapping[str, float], rates: Mapping[str, float]) -> Shares:
    """Divide ``choices``.

    Args:
        choices: what can be divided.
        base: link to bytes that are there anyway.
        rates: link to bytes per second; every link has one.
    """
    fixed: dict[str, float] = defaultdict(float, base)
    fractions: list[tuple[float, ...]] = [(1.0,)] * len(choices)
    free: list[int] = []
    for i, choice in enumerate(choices):
        if len(choice.options) == 1 or not choice.size_bytes:
            fractions[i] = (1.0, *(0.0,) * (len(choice.options) - 1))
            _add(fixed, choice, fractions[i])
        else:
            free.append(i)
    exact = True
    for group in _connected(choices, free):
        problem = [choices[i] for i in group]
        if sum(len(choice.options) for choice in problem) <= _PROGRAMME_OPTIONS_MAX:
            solved = _programme(problem, fixed, rates)
        else:
            solved, exact = _filled_up(problem, fixed, rates), False
        for i, found in zip(group, solved, strict=True):
            fractions[i] = found
    load = defaultdict(float, fixed)
    for i in free:
        _add(load, choices[i], fractions[i])
        fractions[i] = _rounded(fractions[i])
    return Shares(fractions, {link: load[link] / rates[link] for link in sorted(load)}, exact)


def _add(load: dict[str, float], choice: Choice, fractions: Iterable[float]) -> None:
    for option, fraction in zip(choice.options, fractions, strict=True):
        for link, per_byte in option:
            load[link] += choice.size_bytes * fraction * per_byte


def _connected(choices: Sequence[Choice], free: Iterable[int]) -> list[list[int]]:
    """Groups of choices that share links, directly or through others."""
    parent: dict[str, str] = {}

    def root(link: str) -> str:
        while parent.setdefault(link, link) != link:
            parent[link] = parent[parent[link]]
            link = parent[link]
        return link

    links = {i: [link for option in choices[i].options for link, _ in option] for i in free}
    for its in links.values():
        for link in its[1:]:
            parent[root(link)] = root(its[0])
    groups: dict[str, list[int]] = defaultdict(list)
    for i, its in links.items():
        groups[root(its[0]) if its else ""].append(i)
    return list(groups.values())


def _programme(
    choices: Sequence[Choice], fixed: Mapping[str, float], rates: Mapping[str, float]
) -> list[tuple[float, ...]]:
    """Shares of least greatest load: a vertex of the programme, so that few choices are divided at all."""
    # scipy takes a second to load, and most of a run's processes never plan.
    from scipy.optimize import linprog
    from scipy.sparse import csr_array

    links = sorted({link for choice in choices for option in choice.options for link, _ in option})
    row = {link: i for i, link in enumerate(links)}
    unit = sum(choice.size_bytes for choice in choices) / min(rates[link] for link in links) or 1.0
    begins = np.cumsum([0, *(len(choice.options) for choice in choices)])
    count = int(begins[-1])
    cells = [
        (row[link], int(begins[c]) + o, choice.size_bytes * per_byte / rates[link] / unit)
        for c, choice in enumerate(choices)
        for o, option in enumerate(choice.options)
        for link, per_byte in option
    ]
    cells += [(i, count, -1.0) for i in range(len(links))]
    rows, columns, values = zip(*cells, strict=True)
    # Options whose load lowers a link (a first receiver need not be served) are negative: the base holds the rest.
    result = linprog(
        c=np.append(np.zeros(count), 1.0),
        A_ub=csr_array((values, (rows, columns)), shape=(len(links), count + 1)),
        b_ub=np.array([-fixed.get(link, 0.0) / rates[link] / unit for link in links]),
        A_eq=csr_array(
            (np.ones(count), (np.repeat(np.arange(len(choices)), np.diff(begins)), np.arange(count))),
            shape=(len(choices), count + 1),
        ),
        b_eq=np.ones(len(choices)),
        bounds=(0, None),
        method="highs-ds",
    )
    if result.status != 0:
        raise PlanError(f"the linear programme over {len(links)} links was not solved: {result.message}")
    return [tuple(result.x[a:b].tolist()) for a, b in pairwise(begins)]


def _filled_up(
    choices: Sequence[Choice], fixed: Mapping[str, float], rates: Mapping[str, float]
) -> list[tuple[float, ...]]:
    """Choices with the fewest options first, each to the option whose most loaded link is the least loaded."""
    load: dict[str, float] = defaultdict(float, fixed)
    found: list[tuple[float, ...]] = [()] * len(choices)
    portions = 8
    for i in sorted(range(len(choices)), key=lambda i: len(choices[i].options)):
        choice, counts = choices[i], [0] * len(choices[i].options)
        for _ in range(portions * len(counts)):
            step = choice.size_bytes / (portions * len(counts))
            after = [max((load[n] + step * x) / rates[n] for n, x in option) for option in choice.options]
            best = after.index(min(after))
            counts[best] += 1
            for link, per_byte in choice.options[best]:
                load[link] += step * per_byte
        found[i] = tuple(n / (portions * len(counts)) for n in counts)
    return found


def _rounded(fractions: Sequence[float]) -> tuple[float, ...]:
    """Multiples of ``1 / _STEPS`` that add up to 1."""
    steps = [max(0, round(fraction * _STEPS)) for fraction in fractions]
    steps[steps.index(max(steps))] += _STEPS - sum(steps)
    return tuple(step / _STEPS for step in steps)
