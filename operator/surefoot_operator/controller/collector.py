"""Sets Python's garbage collector for a process that keeps many objects.

Called by `__main__`. By default it looks through all that is young after every 700 new objects: while a page of pods is
decoded, which makes a hundred thousand, it takes three quarters of the time and finds nothing.
"""

from __future__ import annotations

import gc

YOUNG = 50_000
"""New objects after which the young are looked through: some milliseconds' worth."""


def begin_collector() -> None:
    """Leaves out what imports have made, and looks seldom."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, *gc.get_threshold()[1:])
