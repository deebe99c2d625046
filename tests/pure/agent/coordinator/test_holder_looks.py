"""What an agent tells of a holder that it read for the operator, within one message."""

from __future__ import annotations

import pytest

from support.builders import endpoint, manifest
from surefoot.agent import coordinator_requests
from surefoot.protocol.messages import LookAtHolders

HOLDER = endpoint("n0")
REQUEST = LookAtHolders(7, (HOLDER,), 3)


def test_all_of_an_index_is_told_or_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = (manifest(2, 50, 0, 2), manifest(2, 50, 1, 2))
    told = coordinator_requests._told(REQUEST, HOLDER, entries, {"a": "{}"})
    assert told is not None
    assert (told.request, told.holder, len(told.manifests), told.layouts) == (7, HOLDER.holder, 2, {"a": "{}"})
    monkeypatch.setattr(coordinator_requests, "MOST_CHARACTERS", len(entries[0].to_json()))
    assert coordinator_requests._told(REQUEST, HOLDER, entries, {}) is None, "a part would be taken for all"


def test_layouts_are_told_as_far_as_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = manifest(2, 50, 0, 2)
    monkeypatch.setattr(coordinator_requests, "MOST_CHARACTERS", len(entry.to_json()) + 10)
    told = coordinator_requests._told(REQUEST, HOLDER, (entry,), {"a": "x" * 8, "b": "x" * 8, "c": "xx"})
    assert told is not None
    assert sorted(told.layouts) == ["a", "c"]
