"""DCP's StorageWriter: stages, replicates and commits what the plan gives this rank."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from surefoot.checkpointer.backends import LibraryOptions
from surefoot.checkpointer.saving import Saver
from surefoot.errors import TierError, Unreadable
from surefoot.format.values import encode_values
from surefoot.geometry import Box
from surefoot.geometry.grids import Grid
from surefoot.integrations.common import KEY, connected, disconnect, new_id, options_of, step_of
from surefoot.integrations.named_checkpoint import named_checkpoint
from surefoot.restore.catalogue import SaveSource, read_catalogue
from surefoot.state import Entry, dtype_name
from surefoot.state.entries import Place

SLOT_SECONDS = 60.0
COMMIT_SECONDS = 600.0


class Writer(StorageWriter):
    """Saves what DCP's plan gives this rank.

    Made on all ranks alike; `close` one at the end. Writers of one folder and job share one staging memory and the
    threads that drain it.

    Args:
        folder: where checkpoints lie; under an agent its tiers are used.
        job: parts the folder among jobs.
        overwrite: whether a save may take the place of a complete checkpoint of its id, or of the newest where it has
            none. Nothing is written over: an id with a number is refused either way, another is a step of its own.
    """

    def __init__(self, folder: str | None = None, job: str | None = None, *, overwrite: bool = True) -> None:
        super().__init__()
        self._overwrite = overwrite
        self._options = options_of(folder, job)
        self._id = ""
        self._step = 0
        self.save_id = new_id()
        """Of one save; DCP's metadata names it."""
        self._paths: dict[str, Any] = {}
        self._bytes: list[str] = []

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._id = os.fspath(checkpoint_id) if checkpoint_id is not None else ""
        self.save_id = new_id()
        self._paths, self._bytes = {}, []

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Connects and chooses the step: the id's number, or the next.

        Every rank chooses the same one without asking another: all read the tiers before any of them writes, once, and
        count what they saved since alike. `finish` checks it.
        """
        if self._options not in _staging:
            link = connected(self._options).link
            state = _Planned()
            _staging[self._options] = _DcpStaging(state, Saver(state, link, link.attached.rank))
        named = step_of(self._id)
        self._step = named if named is not None else _staging[self._options].next_step(connected(self._options).sources)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Refuses a checkpoint that is there already, before any rank writes.

        Raises:
            TierError: it is, and `overwrite` is False.
            Unreadable: a tier that may have it gives no answer.
        """
        if not self._overwrite:
            self._refuse_present()
        self._note([plan])
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self._note(plans)
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        staging = _staging.get(self._options)
        if staging is None:
            raise RuntimeError("write_data was called on a Writer that DCP has not set up")
        link, step = connected(self._options).link, self._step
        if step in staging.begun:
            raise TierError(
                f"step {step} was saved before by this program, and saved bytes never change: give another id"
            )
        staging.begun.add(step)
        staging.state.take(plan, planner, self._about())
        staged = staging.saver.save(step, SLOT_SECONDS)
        staging.saver.wait()
        if staged != "staged" or staging.saver.staged_step != step:
            raise TierError(f"step {step} could not be staged on rank {link.attached.rank} ({staged}): see the log")
        if not link.flush(COMMIT_SECONDS) or step in getattr(link, "lost", ()):
            raise TierError(f"step {step} of rank {link.attached.rank} did not reach its tiers: see the log")
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(index=i.index, size_in_bytes=_size(i), storage_data=step) for i in plan.items])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Raises TierError if ranks committed their parts for different steps."""
        steps = sorted({r.storage_data for of_rank in results for r in of_rank})
        if len(steps) > 1:
            raise TierError(
                f"ranks saved {self._id or 'one checkpoint'!r} as different steps, {steps}: they did not see the same"
                " checkpoints when they began. Give the id a number at its end, like 'step-100'"
            )

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=self._id, save_id=self.save_id) if self._id else None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return bool(os.fspath(checkpoint_id))

    def close(self) -> None:
        """Ends this folder's and job's copying and draining threads."""
        staging = _staging.pop(self._options, None)
        if staging is not None:
            staging.saver.close()
        disconnect(self._options)

    def _refuse_present(self) -> None:
        try:
            reader, _ = named_checkpoint(self._id, read_catalogue(connected(self._options).sources))
        except Unreadable as unreadable:
            if unreadable.absent:
                return
            raise
        step = reader.manifest(0).save.step
        reader.close()
        which = repr(self._id) if self._id else "the newest"
        raise TierError(f"Checkpoint already exists: {which} is step {step}, and overwrite is False: give another id")

    def _about(self) -> dict[str, Any]:
        named = sorted(set(self._bytes))
        return {"paths": self._paths, "bytes": named, "id": self._id, "save_id": self.save_id}

    def _note(self, plans: list[SavePlan]) -> None:
        for plan in plans:
            self._paths.update(plan.planner_data or {})
            self._bytes += [item.index.fqn for item in plan.items if item.tensor_data is None]


class _Planned:
    """Gives a save the entries and values of a DCP plan."""

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


@dataclass(slots=True)
class _DcpStaging:
    """Stages the saves of one connection; a second would stage into memory that is drained no more."""

    state: _Planned
    saver: Saver
    begun: set[int] = field(default_factory=set)
    """Steps that were saved, or tried."""
    found: int | None = None
    """The highest step that was there before this program's first save without a number; None: not looked for yet."""

    def next_step(self, sources: tuple[SaveSource, ...]) -> int:
        """The step after all that are there.

        Raises:
            Unreadable: a tier does not answer. Its checkpoints may have the number that would be given.
        """
        if self.found is None:
            catalogue = read_catalogue(sources)
            if catalogue.silent:
                raise Unreadable(f"{', '.join(catalogue.silent)} gave no answer: the next free step is unknown")
            steps = (m.save.step for reading in catalogue.readings if reading is not None for m in reading.manifests)
            self.found = max(steps, default=0)
        return max(self.found, *self.begun, 0) + 1


_staging: dict[LibraryOptions, _DcpStaging] = {}


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
