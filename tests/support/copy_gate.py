"""The copying thread stops ahead of a chosen copy until the test lets it on; everybody else copies as always."""

from __future__ import annotations

import threading

import pytest

from surefoot.staging import Stager
from surefoot.staging.host_copies import Copy, CopyBuffers


class CopyGate:
    """Armed ahead of a save, passed behind it: what the program does in between is done in the middle of the copy."""

    def __init__(self, patched: pytest.MonkeyPatch) -> None:
        self._copies, self._begun = 0, 0
        self._reached, self._on = threading.Event(), threading.Event()
        run = Copy.run_verified

        def gated(copy: Copy, digest: int, scratch: CopyBuffers) -> bool:
            if threading.current_thread().name == "surefoot-staging":
                if self._begun == self._copies:
                    self._reached.set()
                    assert self._on.wait(30)
                self._begun += 1
            return run(copy, digest, scratch)

        patched.setattr(Copy, "run_verified", gated)

    def arm(self, copies: int) -> None:
        """The thread makes so many copies of the next save and no more, until it may go on."""
        self._copies, self._begun = copies, 0
        self._reached.clear()
        self._on.clear()

    def wait(self, stager: Stager) -> None:
        """Returns when the thread stands there, or has come to the end."""
        while not self._reached.wait(0.001) and stager.is_busy:
            pass

    def go_on(self, stager: Stager) -> None:
        """The thread copies what is left, and this returns when it has."""
        self._on.set()
        while stager._current is not None and stager._current.work.has_work:
            self._on.wait(0.001)
