"""Plain values come back exactly as they went, or are refused by name."""

import math
import random
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.errors import StateMismatch
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
    elif isinstance(value, list | tuple):
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


class Odd:
    """Nothing JSON can say."""


def test_what_json_cannot_say_goes_through_the_hook_and_back() -> None:
    odd = Odd()
    data = encode_values({"a": [odd, 1]}, other=lambda value: b"odd" if value is odd else b"")
    assert decode_values(data, other=lambda raw: {b"odd": odd}[raw]) == {"a": [odd, 1]}


def test_what_nothing_can_say_is_refused_by_its_path() -> None:
    with pytest.raises(StateMismatch, match=r"optimizer\.groups\[1\]\.odd is a .*Odd"):
        encode_values({"optimizer": {"groups": [{}, {"odd": Odd()}]}})

    def refuse(_: Any) -> bytes:
        raise TypeError("no pickles here")

    with pytest.raises(StateMismatch, match=r"a\[0\] is a .*Odd, which cannot be saved: no pickles here"):
        encode_values({"a": [Odd()]}, other=refuse)
    with pytest.raises(StateMismatch, match="odd cannot be read back"):
        decode_values(encode_values({"odd": Odd()}, other=lambda _: b"x"), other=refuse)
    with pytest.raises(StateMismatch, match="odd is of kind 'other'"):
        decode_values(encode_values({"odd": Odd()}, other=lambda _: b"x"))
    with pytest.raises(StateMismatch, match="name is text that has no UTF-8 form"):
        encode_values({"name": "\ud800"})


def test_a_value_that_contains_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(StateMismatch, match="does it contain itself"):
        encode_values({"endless": endless})


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"format":2,"values":{}}', b'{"format":1,"values":[]}', b"\xff"])
def test_foreign_values_are_refused(data: bytes) -> None:
    with pytest.raises(StateMismatch):
        decode_values(data)
