"""Plain values come back exactly as they went, or are refused by name."""

from __future__ import annotations

import math
import random
from argparse import Namespace
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass
from datetime import UTC
from enum import Enum, Flag
from pathlib import PurePosixPath
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.errors import StateMismatch, StateNotRestorable
from surefoot.format.values import decode_values, encode_values

hashable = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers(),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=6,
)
plain = st.recursive(
    hashable | st.binary().map(bytearray) | st.sets(hashable, max_size=3),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(hashable, inner, max_size=4)
        | st.dictionaries(st.text(), inner, max_size=4)
        | st.dictionaries(st.sampled_from(["~", "of", "a"]), inner, max_size=3).map(OrderedDict)
    ),
    max_leaves=12,
)


def spelled(value: Any) -> str:
    """Type, order and bits as text: not-a-number is equal to itself, and only sets have no order, at any depth."""
    if isinstance(value, dict):
        inside = [f"{spelled(k)}: {spelled(v)}" for k, v in value.items()]
    elif isinstance(value, Namespace | SimpleNamespace):
        inside = [f"{k}={spelled(v)}" for k, v in vars(value).items()]
    elif isinstance(value, Place):
        inside = [spelled(value.row), spelled(value.column)]
    elif isinstance(value, slice):
        inside = [spelled(value.start), spelled(value.stop)]
    elif isinstance(value, list | tuple | deque):
        inside = [spelled(v) for v in value]
    elif isinstance(value, set | frozenset):
        inside = sorted(spelled(v) for v in value)
    else:
        inside = [repr(value)]
    return f"{type(value).__name__}({', '.join(inside)})"


def same(a: Any, b: Any) -> bool:
    return spelled(a) == spelled(b)


@given(st.dictionaries(st.text(), plain, max_size=4))
def test_plain_values_come_back_with_type_order_and_bits(values: dict[str, Any]) -> None:
    back = decode_values(encode_values(values))
    assert same(back, values)


@pytest.mark.parametrize(
    "value",
    [
        math.inf,
        -math.inf,
        -0.0,
        5e-324,
        10**5000,
        -(2**4000),
        {1: "one", (2, 3): [4]},
        {"~": "tuple", "of": [1]},
        random.Random(7).getstate(),
        np.float64(0.1),
        np.float32("nan"),
        np.int64(-3),
        np.bool_(True),
        np.arange(6, dtype=">u4").reshape(2, 3)[:, ::2],
        np.zeros((0, 3)),
        np.array(1.5),
        np.random.default_rng(1).bit_generator.state,
    ],
    ids=lambda value: type(value).__name__,
)
def test_numbers_states_and_arrays_come_back_exactly(value: Any) -> None:
    back = decode_values(encode_values({"state": value}))["state"]
    assert type(back) is type(value)
    if isinstance(value, (np.ndarray, np.generic)):
        assert back.dtype == value.dtype
        assert back.shape == value.shape
        assert back.tobytes() == value.tobytes()
        assert not isinstance(back, np.ndarray) or back.flags.writeable
    else:
        assert repr(back) == repr(value) if not isinstance(value, int) else back == value


class Colour(Enum):
    RED, BLUE = 1, "b"


class Rights(Flag):
    READ, WRITE = 1, 2


@dataclass(frozen=True, slots=True)
class Place:
    row: int
    column: Place | None = None


@dataclass
class Counted:
    """Its own code must not run when it is read back."""

    count: int = 0

    def __post_init__(self) -> None:
        self.count += 1


class Pair(NamedTuple):
    left: Any
    right: Any = None


def _namespace(held: dict[str, Any]) -> Namespace:
    made = Namespace()
    vars(made).update(held)  # its own constructor sets attributes, and refuses what an object gives to nobody
    return made


leaf = (
    hashable
    | st.fractions()
    | st.decimals(allow_nan=False)
    | st.datetimes(timezones=st.none() | st.just(UTC))
    | st.dates()
    | st.times()
    | st.timedeltas()
    | st.uuids()
    | st.builds(range, st.integers(), st.integers(), st.integers(1, 5))
    | st.text().map(PurePosixPath)
    | st.builds(slice, hashable, hashable)
    | st.sampled_from([*Colour, *Rights, Rights.READ | Rights.WRITE, ..., int, float, dict])
    | st.builds(np.datetime64, st.datetimes())
    | st.text(st.characters(exclude_characters="\0", codec="utf-8")).map(np.str_)
)
nested = st.recursive(
    leaf,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(lambda items: deque(items, 5))
        | st.dictionaries(hashable, inner, max_size=3).map(lambda d: defaultdict(int, d))
        | st.dictionaries(st.text(), inner, max_size=3).map(lambda d: SimpleNamespace(**d))
        | st.dictionaries(st.text(), inner, max_size=3).map(_namespace)
        | st.builds(Pair, inner, inner)
        | st.builds(Place, inner, inner)
    ),
    max_leaves=10,
)


@given(st.dictionaries(st.text(), nested, max_size=3))
def test_what_json_cannot_say_comes_back_by_its_kind(values: dict[str, Any]) -> None:
    text = encode_values(values)
    back = decode_values(text)
    assert encode_values(back) == text
    assert same(back, values)


@pytest.mark.parametrize("made", [SimpleNamespace(__dict__=1, __class__=2), _namespace({"__dict__": 1})])
def test_a_namespace_may_hold_names_that_no_attribute_can_be_set_by(made: Any) -> None:
    back = decode_values(encode_values({"made": made}))["made"]
    assert (type(back), vars(back)) == (type(made), vars(made))


def test_no_code_of_a_class_runs_when_its_values_are_read() -> None:
    assert decode_values(encode_values({"a": Counted()}))["a"].count == 1
    factory = decode_values(encode_values({"a": defaultdict(list, {1: [2]})}))["a"]
    assert factory[3] == []


def test_a_class_itself_is_read_as_its_name_alone() -> None:
    back = decode_values(encode_values({"kind": OrderedDict, "mine": Pair, "call": encode_values}))
    assert back["kind"] is OrderedDict
    assert str(back["mine"]) == f"{__name__}:Pair"
    assert str(back["call"]) == "surefoot.format.values:encode_values"


def test_a_class_that_is_not_loaded_or_has_changed_is_refused_by_name() -> None:
    for change in ((b":Colour", b":Gone"), (b"RED", b"GREEN"), (b":Colour", b":Pair")):
        with pytest.raises(StateMismatch, match=r"the enum .*of that name|no longer has"):
            decode_values(encode_values({"a": Colour.RED}).replace(*change))
    with pytest.raises(StateMismatch, match=r"field 'rows'.* no longer has"):
        decode_values(encode_values({"a": Place(1)}).replace(b'"row"', b'"rows"'))
    with pytest.raises(StateMismatch, match="none of that name"):  # a class that is neither enum nor dataclass
        decode_values(encode_values({"a": Place(1)}).replace(f"{__name__}:Place".encode(), b"subprocess:Popen"))


class Odd:
    """Nothing has a kind for it."""


class Mapped(dict[str, int]):
    """A dictionary that would come back as another."""


def test_what_nothing_here_says_goes_through_the_hook_and_back() -> None:
    odd = Odd()

    def said(value: Any, inner: Any) -> dict[str, Any] | None:
        return {"~": "odd", "of": inner(7)} if value is odd else None

    def read(kind: str, body: Any, inner: Any) -> Any:
        return {"odd": lambda: (odd, inner(body["of"]))}[kind]()

    data = encode_values({"a": [odd, 1]}, other=said)
    assert decode_values(data, other=read) == {"a": [(odd, 7), 1]}
    with pytest.raises(StateMismatch, match=r"a\[0\] is of kind 'odd'"):
        decode_values(data)
    with pytest.raises(StateMismatch, match=r"a\[0\] is of kind 'odd'"):
        decode_values(data, other=lambda kind, body, inner: {}[kind])


@pytest.mark.parametrize("value", [Odd(), Mapped(a=1), lambda: 0, np.array([Odd()], object), np.ma.array([1]), pytest])
def test_what_nothing_can_say_is_refused_by_its_path(value: Any) -> None:
    with pytest.raises(StateNotRestorable, match=r"optimizer\.groups\[1\]\.odd is .*, wh"):
        encode_values({"optimizer": {"groups": [{}, {"odd": value}]}})


def test_text_without_utf8_and_classes_made_in_functions_are_refused() -> None:
    with pytest.raises(StateNotRestorable, match="name is text that has no UTF-8 form"):
        encode_values({"name": "\ud800"})
    inside = Enum("inside", {"A": 1}, module=__name__)
    with pytest.raises(StateNotRestorable, match="define it at the top of a module"):
        encode_values({"a": inside.A})  # type: ignore[attr-defined]  # made just now


def test_a_value_that_contains_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(StateNotRestorable, match="does it contain itself"):
        encode_values({"endless": endless})


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"format":1,"values":{}}', b'{"format":2,"values":[]}', b"\xff"])
def test_foreign_values_are_refused(data: bytes) -> None:
    with pytest.raises(StateMismatch):
        decode_values(data)
