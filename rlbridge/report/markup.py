"""HTML that cannot forget to escape: text becomes safe on its way into a tag, only ``Markup`` passes as it is. Pure."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable
from typing import Any


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


Child = str | None
"""What a tag may contain: ``Markup`` as it is, any other text escaped, ``None`` left out."""


def tag(name: str, /, *children: Child, **attributes: Any) -> Markup:
    """``<name attributes>children</name>``.

    An attribute's ``_`` is written ``-`` and one at the end is dropped (``class_``); ``None`` and ``False`` leave it
    out, ``True`` writes it bare, and floats get two decimals.
    """
    return Markup(f"<{name}{''.join(_attribute(*pair) for pair in attributes.items())}>{joined(children)}</{name}>")


def joined(children: Iterable[Child]) -> Markup:
    """Children of a tag, one after the other."""
    return Markup("".join(_safe(child) for child in children if child is not None))


def data_block(content: Any, **attributes: Any) -> Markup:
    """``content`` as JSON for the page's script; whatever strings it holds, they cannot end the block."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return tag("script", Markup(text), type="application/json", **attributes)


def _safe(child: str) -> str:
    return child if isinstance(child, Markup) else html.escape(child)


def _attribute(name: str, value: Any) -> str:
    if value is None or value is False:
        return ""
    written = name.rstrip("_").replace("_", "-")
    if value is True:
        return f" {written}"
    text = f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
    return f' {written}="{html.escape(text)}"'
