"""Tests of `memory.server_probe`."""

from __future__ import annotations

import pytest

from support.operations import counted
from surefoot.errors import OutOfBounds
from surefoot.memory_server.provisioning import ServerMemory
from surefoot.protocol.bounds import count_json_values
from surefoot.protocol.checkpoints.records import Layout
from surefoot_operator.memory import server_probe
from surefoot_operator.memory.server_probe import LayoutCache, QuotaInputs, may_exceed_quota, quota_violation

# ---- quota -----------------------------------------------------------------------------------------------------------
# Whose account on a holder is closed: a table.

GIB = 1 << 30
SERVER = 8 * GIB


@pytest.mark.parametrize(
    ("held", "used", "jobs", "size_limit", "closed", "over"),
    [
        pytest.param(7.9, 8.0, 1, None, False, False, id="alone it may have all"),
        pytest.param(6.0, 6.5, 2, None, False, False, id="much, while there is room"),
        pytest.param(6.0, 6.9, 2, None, False, True, id="more than half where there is none"),
        pytest.param(4.0, 7.9, 2, None, False, False, id="its half, however full it is"),
        pytest.param(2.0, 7.9, 4, None, False, False, id="a fourth of four"),
        pytest.param(2.1, 7.9, 4, None, False, True, id="more than a fourth of four"),
        pytest.param(6.0, 6.5, 2, None, True, True, id="closed it stays until there is room"),
        pytest.param(6.0, 5.9, 2, None, True, False, id="and is opened then"),
        pytest.param(4.0, 7.9, 2, None, True, False, id="or once it has its half"),
        pytest.param(3.0, 3.1, 1, 2.0, False, True, id="more than its own limit, alone"),
        pytest.param(2.01, 3.1, 1, 2.0, False, False, id="what a save takes beside its bytes"),
        pytest.param(2.0, 3.1, 2, 2.0, True, False, id="below its own limit again"),
    ],
)
def test_a_job_is_closed_out_where_it_takes_what_others_need(
    held: float, used: float, jobs: int, size_limit: float | None, closed: bool, over: bool
) -> None:
    terms = QuotaInputs(jobs, None if size_limit is None else int(size_limit * GIB))
    memory = ServerMemory(int(used * GIB), SERVER)
    found = quota_violation(int(held * GIB), memory, terms, closed)
    assert bool(found) == over
    assert not over or "keep fewer checkpoints" in found
    assert not over or closed or may_exceed_quota(memory, terms.size_limit_bytes), "nobody would have looked"


def test_a_server_without_a_limit_divides_nothing() -> None:
    assert not quota_violation(100 * GIB, ServerMemory(100 * GIB, 0), QuotaInputs(3), False)
    assert not may_exceed_quota(ServerMemory(100 * GIB, 0), None)


def test_a_server_with_room_is_not_measured() -> None:
    assert not may_exceed_quota(ServerMemory(5 * GIB, SERVER), 6 * GIB)


# ---- layout shelf ----------------------------------------------------------------------------------------------------
# What the operator keeps of layout records: bounded, counted once each, and at the same cost however many there are.

TEXT = Layout((), (), 0).to_json()
FEW, MANY = 10, 400


def test_one_more_record_costs_as_much_beside_many_as_beside_few() -> None:
    costs = {}
    for count in (FEW, MANY):
        shelf = LayoutCache()
        for number in range(count):
            shelf.add(str(number), TEXT)
        costs[count] = counted(lambda shelf=shelf: shelf.add("one more", TEXT))  # type: ignore[misc]
    assert costs[MANY] <= costs[FEW] * 1.2


def test_a_record_that_comes_twice_counts_once_and_one_that_goes_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = LayoutCache()
    shelf.max_value_count = 2 * count_json_values(TEXT)
    for digest in ("a", "b", "b", "a"):
        shelf.add(digest, TEXT)
    with pytest.raises(OutOfBounds, match="values of all layouts"):
        shelf.add("c", TEXT)
    assert shelf.digests == {"a", "b"}
    shelf.remove_unreferenced({"a"})
    assert "b" in shelf, "it was just read, and is named in a moment"
    monkeypatch.setattr(server_probe, "UNREFERENCED_SECONDS", -1.0)
    shelf.remove_unreferenced({"a"})
    shelf.add("c", TEXT)
    assert shelf.digests == {"a", "c"}
    with pytest.raises(OutOfBounds):
        shelf.add("b", TEXT)
