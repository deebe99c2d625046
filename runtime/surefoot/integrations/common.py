"""Shares this process' connections and ids between writer and reader."""

from __future__ import annotations

import os
import re
import sys
import uuid

from surefoot.checkpointer.backends import ConnectedBackend, LibraryOptions, connect_backend

KEY = "dcp"
"""Where a rank's values keep what DCP's plan says beside its tensors."""

EVERYTHING = sys.maxsize
"""How many checkpoints are kept without an agent: whoever names them removes them, as with every storage of DCP."""

_connected: dict[LibraryOptions, ConnectedBackend] = {}


def options_of(folder: str | None, job: str | None) -> LibraryOptions:
    """The options by which writers and readers share a connection."""
    return LibraryOptions(folder=folder, interval_steps=1, keep=EVERYTHING, job=job)


def new_id() -> str:
    """Makes the random id of one save or load."""
    return uuid.uuid4().hex


def step_of(checkpoint_id: str | os.PathLike[str]) -> int | None:
    """The number at the end of a checkpoint id, or None.

    A checkpoint without one is saved as the step after all others.
    """
    found = re.search(r"(\d+)/?$", os.fspath(checkpoint_id))
    return int(found[1]) if found is not None else None


def connected(options: LibraryOptions) -> ConnectedBackend:
    """This process' one connection with these options.

    All ranks make the first call: it may claim an epoch.
    """
    if options not in _connected:
        _connected[options] = connect_backend(options, None)
    return _connected[options]


def is_connected(options: LibraryOptions) -> bool:
    return options in _connected


def disconnect(options: LibraryOptions) -> None:
    """Ends the connection, if there is one."""
    found = _connected.pop(options, None)
    if found is not None:
        found.close(0)
