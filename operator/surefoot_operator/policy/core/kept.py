"""Keeps derived values while what they came from is unchanged.

Pure to its callers: called by `indexes`. Nodes, holders and members of two thousand workers change seldom and are asked for
in each round; indexes made anew each time cost more than the decisions that use them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")
MOST_KEPT = 16
"""Of each function: as many jobs as reconcile beside each other, and a few."""


def kept_while_same(function: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Derives a value once for one and the same first argument.

    That argument is told by identity, others by equality. Nobody may change the value, or the argument. What it was
    derived from is kept as long, so that no other object can come to have its identity.
    """
    kept: OrderedDict[tuple[Hashable, ...], tuple[S, T]] = OrderedDict()

    @wraps(function)
    def once(source: S, /, *arguments: P.args, **named: P.kwargs) -> T:
        assert not named, "arguments are given by position, so that they can be looked up"
        key = (id(source), *arguments)
        found = kept.get(key)
        if found is None:
            found = kept[key] = (source, function(source, *arguments, **named))
            if len(kept) > MOST_KEPT:
                kept.popitem(last=False)
        else:
            kept.move_to_end(key)
        return found[1]

    return once
