"""Reads many small records of the persistent tier at once, and a bad one again.

Each alone is a round trip to a server far away.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from surefoot import metrics
from surefoot.errors import ChunkMissing, Corrupt
from surefoot.protocol.timeouts import Backoff

A = TypeVar("A")
B = TypeVar("B")

READERS = 16
"""Reads under way at once: a thousand at 50 ms take three seconds, and the connections are few enough for any server."""
LOOKS = 3
"""Reads of one record before it counts as damaged or gone: a proxy, or a cache, may spoil one answer."""
LOOK_WAITS = Backoff(0.1, 0.3)


def read_together(read: Callable[[A], B], items: Iterable[A]) -> list[B]:
    """Reads several things in threads; results in their order.

    Raises what the first of them in that order raised.
    """
    wanted = list(items)
    if len(wanted) < 2:
        return [read(item) for item in wanted]
    with ThreadPoolExecutor(min(READERS, len(wanted)), thread_name_prefix="surefoot-reading") as pool:
        return list(pool.map(read, wanted))


def second_look(read: Callable[[], B]) -> B:
    """Reads again what came damaged or was not there; raises what the last read raised."""
    for look in range(1, LOOKS):
        try:
            return read()
        except (Corrupt, ChunkMissing):
            metrics.fallbacks.labels("bad_read_repeated").inc()
            time.sleep(LOOK_WAITS.seconds(look, random.random()))
    return read()
