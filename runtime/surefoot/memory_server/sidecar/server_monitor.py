"""Watches every Redis server of the node, one thread each.

With one thread for all, a server that hangs would keep the others from being filled, and their figures would stand still.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from surefoot.memory_server.sidecar.memory_watch import Seen, Watch
from surefoot.memory_server.sidecar.sidecar_settings import CompanionSettings


class ServersWatch:
    """Owns a Watch and a thread for each server.

    Any thread may ask it.
    """

    def __init__(self, settings: CompanionSettings) -> None:
        self._watches = tuple(Watch(settings, server) for server in range(settings.servers))

    @property
    def seen(self) -> tuple[Seen, ...]:
        """The last known state of each server, by number."""
        return tuple(watch.seen for watch in self._watches)

    @property
    def reason(self) -> str:
        """Names each server that is not ready and why; empty: all are."""
        seen = enumerate(self.seen)
        return "\n".join(f"server {server}: {one.reason}" for server, one in seen if not one.ready)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watches until the block ends, and joins the threads.

        A look that is under way is waited for.
        """
        threads = [
            threading.Thread(target=watch.run, name=f"server-{server}") for server, watch in enumerate(self._watches)
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            for watch in self._watches:
                watch.ended.set()
            for thread in threads:
                thread.join()
