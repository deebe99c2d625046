"""Disables a Checkpointer in processes that its rank forks.

Used by `checkpointer` alone. A child that the program forks has its parent's sockets, exit handlers and objects, and neither
its threads nor its place in the world. One that ends by `sys.exit` would say goodbye in its parent's name, and nothing
would be saved from then on. DataLoader workers and `multiprocessing` leave by `os._exit`; a plain `os.fork` does not.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol

from surefoot.errors import ConfigurationError


class Inherited(Protocol):
    """An object that a forked child inherits and must not use."""

    def disown(self) -> None:
        """Releases the parent's objects in the child, right after the fork.

        Sends nothing, takes no lock and joins no thread: the parent's threads do not exist here.
        """
        ...


_watched: weakref.WeakSet[Inherited] = weakref.WeakSet()


def watch(owner: Inherited) -> None:
    """Disowns `owner` in every process that is forked from now on."""
    _watched.add(owner)


def called_in_child(call: str) -> ConfigurationError:
    """The error of a call in a process that a rank forked."""
    return ConfigurationError(
        f"{call}() was called in process {os.getpid()}, which a rank forked and which is no rank itself:"
        " only the process that built the Checkpointer may use it"
    )


def _disown_all() -> None:
    for owner in list(_watched):
        owner.disown()


# once for the process: what is registered here stays for ever
os.register_at_fork(after_in_child=_disown_all)
