"""torch_checkpointing, configured for the CPU as its troubleshooting page says (not pinned, blocking copies)."""

from __future__ import annotations

from typing import Any

from torch_checkpointing.checkpoint_manager import CheckpointManager
from torch_checkpointing.config import AsyncCheckpointSaverConfig
from torch_checkpointing.staging import CheckpointStagerConfig

from bench.systems.system import System


class TorchCheckpointing(System):
    _written_behind: Any = None

    def prepare(self) -> None:
        staging = CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False)
        self._manager = CheckpointManager(
            CheckpointManager.Config(save=AsyncCheckpointSaverConfig(staging_config=staging))
        )
        self._manager.prewarm_staging(self.program.state())

    def begin(self, step: int) -> None:
        self.finish()
        self._written_behind = self._manager.save(str(self.place(step)), self.program.state())

    def before_step(self) -> None:
        with self._manager.lock():  # what its users wrap the optimizer's step in
            pass

    def finish(self) -> None:
        if self._written_behind is not None:
            self._written_behind.result()
            self._written_behind = None

    def load(self) -> None:
        self._manager.load(str(self.newest), into=self.program.state())

    def close(self) -> None:
        self._manager.close()
