"""Reads many small records of the persistent tier at once.

Each alone is a round trip to a server far away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")

READERS = 16
"""Reads under way at once: a thousand at 50 ms take three seconds, and the connections are few enough for any server."""


def read_together(read: Callable[[A], B], items: Iterable[A]) -> list[B]:
    """Reads several things in threads; results in their order.

    Raises what the first of them in that order raised.
    """
    wanted = list(items)
    if len(wanted) < 2:
        return [read(item) for item in wanted]
    with ThreadPoolExecutor(min(READERS, len(wanted)), thread_name_prefix="surefoot-reading") as pool:
        return list(pool.map(read, wanted))
