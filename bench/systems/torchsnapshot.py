"""torchsnapshot's async_take: copies inside the call, writes behind it."""

from __future__ import annotations

from typing import Any

from torchsnapshot import Snapshot

from bench.systems.dcp import join_world_of_one
from bench.systems.system import System


class TorchSnapshot(System):
    _pending: Any = None

    def prepare(self) -> None:
        join_world_of_one()

    def begin(self, step: int) -> None:
        self.finish()
        state = {"model": self.program.model, "optimizer": self.program.optimizer}
        self._pending = Snapshot.async_take(str(self.place(step)), state)

    def finish(self) -> None:
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def load(self) -> None:
        Snapshot(str(self.newest)).restore({"model": self.program.model, "optimizer": self.program.optimizer})
