"""Caches values derived from cached API objects.

Called by `platform`: a cluster has thousands of nodes, a job is observed twice a second, and hardly anything
has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, Generic, TypeVar

T = TypeVar("T")
Object = dict[str, Any]


class DerivedCache(Generic[T]):
    """Keeps a value for each object of one kind.

    The cluster cache replaces objects and never changes one, so the same object has the same value.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[Object, Hashable, T]] = {}

    def all(
        self, found: Iterable[Object], make: Callable[[Object], T], besides: Callable[[Object], Hashable]
    ) -> list[T]:
        """Returns `make` of each object, computed only for changed ones.

        `besides`: what else its value depends on. Values of objects that are gone are dropped.
        """
        old, self._known = self._known, {}
        made: list[T] = []
        for one in found:
            uid, other = one["metadata"]["uid"], besides(one)
            known = old.get(uid)
            same = known is not None and known[0] is one and known[1] == other
            value = known[2] if known is not None and same else make(one)
            self._known[uid] = (one, other, value)
            made.append(value)
        return made
