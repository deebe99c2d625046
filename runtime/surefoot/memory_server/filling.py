"""Pre-touches a new Redis' memory by writing and removing chunk-sized values.

No save pays for the pages then. Freed pages stay with the server (see MALLOC_ENVIRONMENT in `server`). Called where a
server is started, and by the companion; `go_on` is asked between values.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import redis

from surefoot.memory_server import keys
from surefoot.memory_server.connection import Wire
from surefoot.protocol.checkpoints.records import CHUNK_BYTES

VALUE_BYTES = CHUNK_BYTES + 64
"""What one value occupies: a whole class of the allocator."""
_BATCH = 16


def fill(wire: Wire, size: int, go_on: Callable[[int], bool] = lambda written: True) -> int:
    """Touches up to `size` free bytes; returns how many.

    `go_on(values written)` may end it early.
    """
    payload = memoryview(bytes(CHUNK_BYTES))
    written = 0
    try:
        while (written + 1) * VALUE_BYTES <= size:
            if written % _BATCH == 0 and not go_on(written):
                break
            try:
                wire.call("SET", f"{keys.FILL}{written}", payload)
            except redis.exceptions.OutOfMemoryError:
                break  # everything that there is has been touched
            written += 1
    finally:
        _remove(wire, written)
    return written * VALUE_BYTES


def _remove(wire: Wire, written: int) -> None:
    for start in range(0, written, _BATCH):
        # not UNLINK: the room is free again when this returns
        wire.call("DEL", *(f"{keys.FILL}{i}" for i in range(start, min(start + _BATCH, written))))


def remove_leftovers(wire: Wire) -> int:
    """Removes what an earlier fill left that was killed; how many values."""
    for first in count(step=_BATCH):
        if not wire.call("DEL", *(f"{keys.FILL}{i}" for i in range(first, first + _BATCH))):
            return first
    raise AssertionError("count() has no end")
