"""A line's holders are told whole once and by their changes from then on: what is known at its end is what was meant."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.errors import ProtocolError
from surefoot.protocol.identities import MemoryServerEndpoint, MemoryServerInstance
from surefoot.protocol.memory_server_list import MemoryServerList, SentServers, list_changes
from surefoot.protocol.messages import Assign, MemoryServerChanges, MemoryServers
from surefoot.protocol.wire import decode, encode

_ENDPOINTS = st.builds(
    lambda node, life, host, tls, alone, server: MemoryServerEndpoint(
        MemoryServerInstance(f"n{node}", f"i{life}"), f"10.0.0.{host}", 6379, f"n{node}" if alone else "rack", tls, server
    ),
    st.integers(0, 4), st.integers(0, 1), st.integers(0, 1), st.booleans(), st.booleans(),
    st.integers(0, 2),
)  # fmt: skip
_LISTS = st.lists(_ENDPOINTS, max_size=6, unique_by=lambda e: e.instance).map(
    lambda found: tuple(sorted(found, key=lambda e: e.instance))
)


def assigned(holders: SentServers) -> Assign:
    return Assign(2, 8, 0, 8, 0, 1, 0, None, (), "t", True, None, holders, (), 2)


@given(st.lists(_LISTS, max_size=5))
def test_a_line_knows_what_was_meant_after_each_change(lists: list[SentServers]) -> None:
    line, told = MemoryServerList(), ()
    for wanted in lists:
        change = list_changes(told, wanted)
        if change is not None:
            read = decode(encode(change))
            assert isinstance(read, MemoryServerChanges)
            assert line.apply_message(read) is None
        assert line.apply_message(assigned(())) == assigned(wanted)
        assert line.apply_message(MemoryServers(2, (), (), 2)) == MemoryServers(2, wanted, (), 2)
        assert list_changes(wanted, wanted) is None
        told = wanted


def test_a_holder_that_goes_and_was_never_told_of_ends_the_line() -> None:
    with pytest.raises(ProtocolError, match="connects again"):
        MemoryServerList().apply_message(MemoryServerChanges((), (MemoryServerInstance("n0", "i0"),)))
