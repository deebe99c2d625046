"""No string becomes an element, whatever is in it."""

from __future__ import annotations

from html.parser import HTMLParser

from hypothesis import given
from hypothesis import strategies as st

from surefoot.protocol.text import plain
from surefoot_operator.cli.report.charts import Markup, decimal, element, joined


class Seen(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: dict[str, str | None] = {}
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= dict(attrs)

    def handle_data(self, data: str) -> None:
        self.text += data


@given(st.text(max_size=300))
def test_any_text_stays_text(text: str) -> None:
    found = Seen(element("p", text, title=text).text)
    assert found.tags == ["p"]
    assert found.text == plain(text)
    assert found.attributes == {"title": plain(text)}


def test_elements_nest_and_nothing_is_left_out_but_none() -> None:
    found = element("p", "a < b", element("b", "c"), None, Markup("&amp;"), class_="x", stroke_width=1.0, id=None)
    assert found.text == '<p class="x" stroke-width="1">a &lt; b<b>c</b>&amp;</p>'
    assert element("meta", charset="utf-8").text == '<meta charset="utf-8">'
    assert joined("<", Markup("<br>")).text == "&lt;<br>"


def test_long_text_is_cut_and_numbers_have_no_idle_digits() -> None:
    assert len(element("p", "x" * 10_000).text) < 2100
    assert [decimal(one) for one in (1.0, 1.25, 1.239, -0.001, 0.0, 1e6)] == ["1", "1.25", "1.24", "0", "0", "1000000"]
