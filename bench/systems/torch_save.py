"""torch.save: blocks until the file is written. What most programs do."""

from __future__ import annotations

from typing import Any

import torch

from bench.systems.system import System


class TorchSave(System):
    def begin(self, step: int) -> None:
        torch.save(self.program.state(), self.place(step))

    def load(self) -> None:
        found: dict[str, Any] = torch.load(self.newest, weights_only=True)
        self.program.model.load_state_dict(found["model"])
        self.program.optimizer.load_state_dict(found["optimizer"])
