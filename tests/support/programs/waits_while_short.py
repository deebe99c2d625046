"""`python waits_while_short.py WORLD SECONDS SCRIPT [ARGUMENTS]`: runs a script, slowly while its world has fewer ranks.

A small training is over before a node has come back; at its own pace it would never be seen in a world that grew again.
"""

from __future__ import annotations

import runpy
import sys
import time
from typing import Any

from surefoot.checkpointer import Checkpointer

world, seconds = int(sys.argv[1]), float(sys.argv[2])
step = Checkpointer.step


def waited(self: Checkpointer, *given: Any, **named: Any) -> int:
    if self.status.world_size < world:
        time.sleep(seconds)
    return step(self, *given, **named)


Checkpointer.step = waited  # type: ignore[method-assign]
sys.argv = sys.argv[3:]
runpy.run_path(sys.argv[0], run_name="__main__")
