"""What the operator keeps of layout records: bounded, counted once each, and at the same cost however many there are."""

from __future__ import annotations

import pytest

from support.operations import counted
from surefoot.errors import OutOfBounds
from surefoot.protocol.bounds import values_of
from surefoot.protocol.checkpoints.records import Layout
from surefoot_operator.memory import server_probe
from surefoot_operator.memory.server_probe import LayoutShelf

TEXT = Layout((), (), 0).to_json()
FEW, MANY = 10, 400


def test_one_more_record_costs_as_much_beside_many_as_beside_few() -> None:
    costs = {}
    for count in (FEW, MANY):
        shelf = LayoutShelf()
        for number in range(count):
            shelf.add(str(number), TEXT)
        costs[count] = counted(lambda shelf=shelf: shelf.add("one more", TEXT))  # type: ignore[misc]
    assert costs[MANY] <= costs[FEW] * 1.2


def test_a_record_that_comes_twice_counts_once_and_one_that_goes_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = LayoutShelf()
    shelf.max_values = 2 * values_of(TEXT)
    for digest in ("a", "b", "b", "a"):
        shelf.add(digest, TEXT)
    with pytest.raises(OutOfBounds, match="values of all layouts"):
        shelf.add("c", TEXT)
    assert shelf.digests == {"a", "b"}
    shelf.keep({"a"})
    assert "b" in shelf, "it was just read, and is named in a moment"
    monkeypatch.setattr(server_probe, "UNNAMED_SECONDS", -1.0)
    shelf.keep({"a"})
    shelf.add("c", TEXT)
    assert shelf.digests == {"a", "c"}
    with pytest.raises(OutOfBounds):
        shelf.add("b", TEXT)
