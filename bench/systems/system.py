"""The surface of a system under measurement. A worker holds exactly one."""

from __future__ import annotations

import shutil
from pathlib import Path

from bench.program import Program


class System:
    """A save is `begin` (inside the training loop), `before_step` (ahead of the next optimizer step), and done when
    `finish` returns. What a user must wait for is waited for there, and so counted as stall."""

    kept = 2
    """Checkpoints that stay; older ones are removed between measurements."""

    def __init__(self, program: Program, folder: Path) -> None:
        self.program, self.folder = program, folder
        self._written: list[Path] = []

    def prepare(self) -> None:
        """What its users do once, before the loop. Its time is reported."""

    def begin(self, step: int) -> None:
        raise NotImplementedError

    def before_step(self) -> None:
        """Waits until the state may change."""

    def finish(self) -> None:
        """Waits until the last save is where it belongs."""

    def incomplete(self) -> list[str]:
        """Saves that were due and did not reach where they belong; asked at the end of the measurement."""
        return []

    def drains(self) -> list[float]:
        """Seconds from `begin` until the save was safe, of every save so far, where the system can say."""
        return []

    def load(self) -> None:
        """Reads the last save back into the program."""
        raise NotImplementedError

    def close(self) -> None: ...

    def place(self, step: int) -> Path:
        """A new place in the folder; the one before last is removed."""
        path = self.folder / f"step-{step}"
        self._written.append(path)
        while len(self._written) > self.kept:
            old = self._written.pop(0)
            shutil.rmtree(old, ignore_errors=True) if old.is_dir() else old.unlink(missing_ok=True)
        return path

    @property
    def newest(self) -> Path:
        return self._written[-1]
