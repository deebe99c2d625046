"""Columns of a status come back as they were, say what people can read, and refuse what is damaged by name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot_operator.api.status_json import MOST_ENTRIES, numbers, packed_numbers, packed_texts, texts

names = st.sampled_from(["node-a", "node-b", "node-c.example", "a", "aa", "aaa", "0123abcd", "ffff0000"])


@given(st.lists(st.integers(-3, 5) | st.integers(), max_size=30))
def test_numbers_come_back(values: list[int]) -> None:
    assert numbers(packed_numbers(values)) == values


@given(st.lists(names, max_size=30) | st.lists(names | st.text(max_size=5), max_size=30))
def test_texts_come_back(values: list[str]) -> None:
    assert texts(packed_texts(values)) == values


@given(st.lists(st.binary(min_size=6, max_size=6).map(bytes.hex), min_size=64, max_size=80, unique=True))
def test_many_identities_are_packed_and_come_back(values: list[str]) -> None:
    column = packed_texts(values)
    assert len(column) < 9 * len(values)
    assert texts(column) == values


@pytest.mark.parametrize(
    ("values", "column"),
    [
        ([], ""),
        ([7], "7"),
        ([0, 1, 2, 3], "0..3"),
        ([1, 1, 1, 2, 5, 6], "1x3,2,5..6"),
        ([4, 2, 0], "4,2,0"),
    ],
)
def test_numbers_as_people_write_them(values: list[int], column: str) -> None:
    assert packed_numbers(values) == column


@pytest.mark.parametrize(
    ("values", "column"),
    [
        (["node-a"], "node-a"),
        (["node-a.example", "node-b.example"], "node-{a,b}.example"),
        (["a", "aa"], "a{,a}"),
        (["rack-1", "rack-1", "rack-2", "rack-2"], "rack-{1,2}|0x2,1x2"),
        (["a{b}", "c"], '["a{b}","c"]'),
    ],
)
def test_texts_as_people_write_them(values: list[str], column: str) -> None:
    assert packed_texts(values) == column


@pytest.mark.parametrize("column", ["x", "3..1", "1x0", f"0..{MOST_ENTRIES}", f"1x{MOST_ENTRIES + 1}", "1,,2"])
def test_damaged_numbers_are_refused(column: str) -> None:
    with pytest.raises(ValueError, match=r"number|entries"):
        numbers(column)


@pytest.mark.parametrize("column", ["[1]", "[", "#6:AAAA=", "#0:AAAA", "#6:AAAA", "{a,b}|2", "{a}{b}", "#6:A"])
def test_damaged_texts_are_refused(column: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        texts(column)
