"""The garbage collector of an operator that keeps many objects: it looks seldom, and still finds what is garbage."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Iterator

import pytest

from surefoot_operator.controller.process_setup import configure_gc


@pytest.fixture
def looks() -> Iterator[list[str]]:
    """One entry for each time that it looked."""
    found: list[str] = []

    def told(phase: str, _: dict[str, int]) -> None:
        found.append(phase)

    former = gc.get_threshold()
    gc.callbacks.append(told)
    yield found
    gc.callbacks.remove(told)
    gc.unfreeze()
    gc.set_threshold(*former)


def test_a_page_of_pods_is_decoded_with_a_few_looks(looks: list[str]) -> None:
    text = json.dumps(
        [{"metadata": {"labels": {"a": str(n)}}, "status": {"conditions": [{}] * 6}} for n in range(10_000)]
    )
    configure_gc()
    looks.clear()
    decoded = json.loads(text)
    assert (len(decoded), looks.count("start") <= 5) == (10_000, True)


class _Node:
    other: _Node


def test_what_refers_to_itself_is_still_found(looks: list[str]) -> None:
    configure_gc()
    looks.clear()
    one, other = _Node(), _Node()
    one.other, other.other = other, one
    gone = weakref.ref(one)
    del one, other
    kept = []
    while "stop" not in looks:
        kept.append([None])
    assert gone() is None
