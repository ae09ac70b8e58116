"""Tags: everything escaped, nothing by accident."""

from __future__ import annotations

import html
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlbridge.report.markup import Markup, data_block, joined, tag


@given(st.text(), st.text())
def test_text_comes_out_as_it_went_in_and_opens_no_tag(content: str, attribute: str) -> None:
    made = tag("p", content, title=attribute)
    assert made.startswith("<p ")
    assert made.count("<") == 2
    inside = made.removeprefix("<p ").removesuffix("</p>")
    title, _, text = inside.partition(">")
    assert html.unescape(text) == content
    assert html.unescape(title) == f'title="{attribute}"'


def test_markup_is_kept_text_is_escaped_none_is_left_out() -> None:
    assert tag("p", Markup("<b>1</b>"), " < 2", None) == "<p><b>1</b> &lt; 2</p>"
    assert joined([tag("i", "a"), "&"]) == "<i>a</i>&amp;"


def test_attributes_are_written_as_html_has_them() -> None:
    made = tag("rect", class_="bar", aria_label="x", x=1.0, y=2.345, width=3, hidden=True, role=None, open=False)
    assert made == '<rect class="bar" aria-label="x" x="1" y="2.35" width="3" hidden></rect>'
    assert tag("meta", name="viewport").startswith('<meta name="viewport">')


def test_data_cannot_end_its_block() -> None:
    content = {"</script>": ["<!--", 1, None]}
    block = data_block(content, class_="data")
    inside = block.split(">", 1)[1].removesuffix("</script>")
    assert "<" not in inside
    assert json.loads(inside) == content
    with pytest.raises(ValueError, match="not JSON compliant"):
        data_block(float("nan"))
