"""Disables a Checkpointer in processes that its rank forks.

Used by `facade` alone. A child that the program forks has its parent's sockets, exit handlers and objects, and neither
its threads nor its place in the world. One that ends by `sys.exit` would say goodbye in its parent's name, and nothing
would be saved from then on. DataLoader workers and `multiprocessing` leave by `os._exit`; a plain `os.fork` does not.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Inherited(Protocol):
    """What a child is born with and must not use."""

    def disown(self) -> None:
        """In the child, right behind the fork: lets go without a word, takes no lock and joins no thread."""
        ...


_watched: weakref.WeakSet[Inherited] = weakref.WeakSet()


def watch(owner: Inherited) -> None:
    """From now on `owner` is disowned in whatever this process forks."""
    _watched.add(owner)


def _disown_all() -> None:
    for owner in list(_watched):
        owner.disown()


# once for the process: what is registered here stays for ever
os.register_at_fork(after_in_child=_disown_all)
