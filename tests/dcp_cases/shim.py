"""Puts this engine where torch.distributed.checkpoint has FileSystemWriter and FileSystemReader.

Imported first by every ported test file, and so also by each rank that a test spawns. With DCP_ENGINE=torch it leaves
torch's own storage in place: the control, which tells what fails for another reason than the engine.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _storage_utils, filesystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.testing._internal import common_distributed

from surefoot.integrations.dcp import SurefootReader, SurefootWriter, options_of


class PathWriter(SurefootWriter):
    """A FileSystemWriter by its arguments: the path is the folder, and an id is another path."""

    def __init__(self, path: str | os.PathLike[str], *args: Any, overwrite: bool = True, **ignored: Any) -> None:
        super().__init__(os.fspath(path), overwrite=overwrite)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        super().reset(None)
        if checkpoint_id:
            self._options = options_of(os.fspath(checkpoint_id), None)


class PathReader(SurefootReader):
    """A FileSystemReader by its arguments."""

    def __init__(self, path: str | os.PathLike[str], *args: Any, **ignored: Any) -> None:
        super().__init__(os.fspath(path))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        super().reset(None)
        if checkpoint_id:
            self._options = options_of(os.fspath(checkpoint_id), None)

    def read_metadata(self, *args: Any, **ignored: Any) -> Metadata:
        """With the path as the id, as a FileSystemWriter has it."""
        metadata = super().read_metadata()
        assert metadata.storage_meta is not None
        metadata.storage_meta.checkpoint_id = self._options.folder
        return metadata


def _never_skip(*_: Any, **__: Any) -> Callable[[Any], Any]:
    return lambda test: test


common_distributed.skip_if_lt_x_gpu = _never_skip

if os.environ.get("DCP_ENGINE", "surefoot") == "surefoot":
    for module in (dcp, filesystem, _storage_utils):
        vars(module).update(FileSystemWriter=PathWriter, FileSystemReader=PathReader)
