"""What is reckoned of a large node follows from the part that is said to bind it."""

from __future__ import annotations

import pytest
from bench.node_model import figures


def test_a_slow_link_binds_a_drain_and_a_fast_one_leaves_it_to_redis() -> None:
    slow, fast = figures(10.0, 25.0), figures(10.0, 400.0)
    assert (slow.drain_bound, slow.drain) == ("the link", pytest.approx(80.0 / 3.125))
    assert fast.drain_bound == "Redis' threads"
    assert fast.drain == figures(10.0, 800.0).drain, "a faster link changes nothing then"


def test_servers_part_what_redis_takes_until_something_else_binds() -> None:
    one, four, eight = (figures(10.0, 400.0, servers=n) for n in (1, 4, 8))
    assert four.drain == pytest.approx(one.drain / 4)
    assert (eight.drain_bound, four.holder_gb) == ("16 cores", one.holder_gb), "they share the node's memory"


def test_time_and_memory_grow_with_the_state() -> None:
    one, twice = figures(10.0, 100.0), figures(20.0, 100.0)
    for name in ("stall", "drain", "restore", "staging_gb", "holder_gb"):
        assert getattr(twice, name) == pytest.approx(2 * getattr(one, name))
    assert one.fits
    assert not figures(80.0, 100.0).fits


def test_without_a_pin_a_holder_has_room_for_one_checkpoint_less() -> None:
    assert figures(10.0, 100.0, pinned=0).holder_gb == pytest.approx(figures(10.0, 100.0).holder_gb * 2 / 3)
