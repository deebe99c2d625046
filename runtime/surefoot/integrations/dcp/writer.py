"""DCP's StorageWriter: stages, replicates and commits what the plan gives this rank."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from surefoot.checkpointer.links import Options
from surefoot.checkpointer.saving import Saver
from surefoot.errors import TierError
from surefoot.format.values import encode_values
from surefoot.geometry import Box
from surefoot.geometry.grids import Grid
from surefoot.integrations.dcp.common import KEY, connected, disconnect, step_of
from surefoot.state import Entry, dtype_name
from surefoot.state.entries import Place

SLOT_SECONDS = 60.0
COMMIT_SECONDS = 600.0


class Writer(StorageWriter):
    """Saves what DCP's plan gives this rank. Made on all ranks alike, once for all saves; `close` it at the end."""

    def __init__(self, folder: str | None = None, job: str | None = None) -> None:
        super().__init__()
        self._options = Options(folder=folder, interval_steps=1, keep=None, job=job)
        self._state: _Planned | None = None
        self._saver: Saver | None = None
        self._id = ""
        self._paths: dict[str, Any] = {}
        self._bytes: list[str] = []
        self._begun: set[int] = set()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._id = os.fspath(checkpoint_id) if checkpoint_id is not None else ""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        step_of(self._id)
        about = connected(self._options).link.attached
        if self._state is None:
            self._state = _Planned()
            self._saver = Saver(self._state, connected(self._options).link, about.rank, compare_all=False)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self._note([plan])
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self._note(plans)
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        if self._state is None or self._saver is None:
            raise RuntimeError("write_data was called on a Writer that DCP has not set up")
        link, step = connected(self._options).link, step_of(self._id)
        if step in self._begun:
            raise TierError(
                f"step {step} was saved before by this Writer, and saved bytes never change: give another id"
            )
        self._begun.add(step)
        self._state.take(plan, planner, {"paths": self._paths, "bytes": sorted(set(self._bytes))})
        staged = self._saver.save(step, SLOT_SECONDS)
        self._saver.wait()
        if staged != "staged" or self._saver.staged_step != step:
            raise TierError(f"step {step} could not be staged on rank {link.attached.rank} ({staged}): see the log")
        if not link.flush(COMMIT_SECONDS) or step in getattr(link, "lost", ()):
            raise TierError(f"step {step} of rank {link.attached.rank} did not reach its tiers: see the log")
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(index=i.index, size_in_bytes=_size(i), storage_data=None) for i in plan.items])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Nothing is left to do: a checkpoint is complete when every rank's part is committed."""

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=self._id) if self._id else None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return re.search(r"\d/?$", os.fspath(checkpoint_id)) is not None

    def close(self) -> None:
        """Ends the copying and draining threads of this process."""
        if self._saver is not None:
            self._saver.close()
            self._saver = self._state = None
        disconnect(self._options)

    def _note(self, plans: list[SavePlan]) -> None:
        for plan in plans:
            self._paths.update(plan.planner_data or {})
            self._bytes += [item.index.fqn for item in plan.items if item.tensor_data is None]


class _Planned:
    """What a save needs of a program, out of a plan."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._about: Mapping[str, Any] = {}

    def take(self, plan: SavePlan, planner: SavePlanner, about: Mapping[str, Any]) -> None:
        self._about = about
        self._entries = [_entry(item, planner.resolve_data(item)) for item in plan.items]

    def entries(self) -> list[Entry]:
        return self._entries

    def values(self, step: int) -> bytes:
        return encode_values({"step": step, KEY: dict(self._about)})


def _entry(item: WriteItem, data: torch.Tensor | io.BytesIO) -> Entry:
    nobody_else = Grid.alone(0)  # DCP has settled who saves what; which rank that is makes no difference here
    if isinstance(data, io.BytesIO):
        tensor = torch.frombuffer(bytearray(data.getvalue()), dtype=torch.uint8)
        shape = tuple(tensor.shape)
        return Entry(item.index.fqn, tensor, "uint8", Place(shape, Box.whole(shape), nobody_else), "split")
    assert item.tensor_data is not None, "a tensor's item says where it lies"
    chunk = item.tensor_data.chunk
    box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
    tensor = data.detach()
    return Entry(
        item.index.fqn, tensor, dtype_name(tensor.dtype), Place(tuple(item.tensor_data.size), box, nobody_else), "split"
    )


def _size(item: WriteItem) -> int:
    if item.tensor_data is None:
        return 0
    return int(torch.Size(item.tensor_data.chunk.sizes).numel() * item.tensor_data.properties.dtype.itemsize)
