"""Closes a Checkpointer at interpreter exit, while threads can still be started.

The standard library ends every thread pool before `atexit` calls anybody: what is closed only there can neither write the
parts of its last save side by side nor list what is old. Called by `facade`.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable
from typing import Any


def call_at_exit(handler: Callable[[], None]) -> None:
    """Calls `handler`, a method, once threads are to end and again with `atexit`; it must bear being called twice.

    Its object is not kept alive by the first.
    """
    atexit.register(handler)
    weak: weakref.WeakMethod[Any] = weakref.WeakMethod(handler)

    def call() -> None:
        method = weak()
        if method is not None:
            method()

    # how concurrent.futures itself hears of the end; called in reverse order, so ahead of its own handler
    threading._register_atexit(call)  # type: ignore[attr-defined]  # typeshed leaves it out
