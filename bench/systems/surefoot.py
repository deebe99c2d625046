"""Surefoot as a job uses it: `Checkpointer`, the agent's staging memory, and two copies on two Redis holders."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from bench.systems.system import System
from surefoot import Checkpointer

FLUSH_SECONDS = 60.0


class Asked:
    """A schedule that the benchmark keeps: a step is due when it says so."""

    due_now = False

    def due(self, step: int, level: int) -> bool:
        return self.due_now


class Surefoot(System):
    prepares = True
    """Whether the first save is prepared before the loop, as it is in a job whose first steps save nothing."""

    def prepare(self) -> None:
        os.environ["SUREFOOT_GENERATION"] = "1"
        self._due: dict[int, float] = {}
        self._asked: Any = Asked()
        self._mine = self._opened()
        self._mine.restore()
        if self.prepares:
            self._mine._saver.prepare()
            self._mine._saver._join_preparation()  # it would go on beside the first steps; its whole time is reported

    def begin(self, step: int) -> None:
        self._asked.due_now = True
        began = time.monotonic()
        self._due[self._mine.step()] = began
        self._asked.due_now = False

    def before_step(self) -> None:
        self._mine._saver.join()  # what its hook on the optimizer does, where it can be timed

    def finish(self) -> None:
        self._mine._saver.wait()
        if not self._mine._backend.wait_for_flush(FLUSH_SECONDS):
            raise RuntimeError("a save did not reach its holders")

    def incomplete(self) -> list[str]:
        whole = {e["step"] for e in diary() if e.get("copies") == 2}
        return [f"step {step} has not two copies" for step in self._due if step not in whole]

    def drains(self) -> list[float]:
        return [e["at"] - self._due[e["step"]] for e in diary() if e.get("copies") == 2]

    def load(self) -> None:
        os.environ["SUREFOOT_GENERATION"] = "2"
        reading = self._opened()
        assert reading.restore() == max(self._due)
        reading._end(flush_seconds=0.0)

    def close(self) -> None:
        self._mine._end(flush_seconds=1.0)

    def _opened(self) -> Checkpointer:
        made = Checkpointer(model=self.program.model, optimizer=self.program.optimizer)
        made._saves.schedule = self._asked
        return made


class Unprepared(Surefoot):
    """A job whose very first step saves: that save waits for the preparation, and the wait is its stall."""

    prepares = False


def diary() -> list[dict[str, Any]]:
    return [json.loads(entry) for entry in Path(os.environ["BENCH_DIARY"]).read_text().splitlines()]
