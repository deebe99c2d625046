"""Closes a Checkpointer at interpreter exit, while threads can still be started.

The standard library ends every thread pool before `atexit` calls anybody: what is closed only there can neither write the
parts of its last save side by side nor list what is old. Called by `checkpointer`.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any


def call_at_exit(handler: Callable[[], None]) -> None:
    """Calls a method before threads are joined at exit, and from `atexit`.

    The handler must tolerate two calls. The first registration holds only a weak reference to its object.
    """
    atexit.register(handler)
    weak: weakref.WeakMethod[Any] = weakref.WeakMethod(handler)

    def call() -> None:
        method = weak()
        if method is not None:
            method()

    # how concurrent.futures itself hears of the end; called in reverse order, so ahead of its own handler
    threading._register_atexit(call)  # type: ignore[attr-defined]  # typeshed leaves it out


_failed = threading.Event()


def fail_at_exit() -> None:
    """Has the process end with code 1.

    An error that is raised while the interpreter ends is printed, and does not change the code.
    """
    _failed.set()


def _end_with_failure() -> None:
    if _failed.is_set():
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


atexit.register(_end_with_failure)  # as early as possible: the last to register is the first to be called
