"""Implements DCP's StorageWriter and StorageReader on Surefoot's checkpoints."""

from __future__ import annotations

import io
import os
import re
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from surefoot.checkpointer.backends import ConnectedBackend, LibraryOptions, connect_backend, library_settings
from surefoot.checkpointer.restoring import fill
from surefoot.checkpointer.saving import Saver
from surefoot.errors import TierError, Unreadable
from surefoot.format.values import encode_values
from surefoot.geometry import Box
from surefoot.geometry.sharding import Grid
from surefoot.restore.catalogue import Catalogue, SaveSource, persistent_source, read_catalogue
from surefoot.restore.reader import CheckpointReader, ReadOptions
from surefoot.state import Entry, SavedTensor, dtype_from_name, dtype_name, read_values
from surefoot.state.entries import TensorLocation
from surefoot.state.modules import state_dict_of

# ---- shared by reader and writer -------------------------------------------------------------------------------------
# Connections and ids of this process.

KEY = "dcp"
"""Key of a rank's values for the parts of DCP's plan other than tensors."""

EVERYTHING = sys.maxsize
"""Number of checkpoints kept without an agent: as with every DCP storage, the user who named them deletes them."""

_connected: dict[LibraryOptions, ConnectedBackend] = {}


def options_of(folder: str | None, job: str | None) -> LibraryOptions:
    """Builds the options that writers and readers of one connection have in common."""
    return LibraryOptions(folder=folder, interval_steps=1, keep=EVERYTHING, job=job)


def new_id() -> str:
    """Creates the random id of one save or load."""
    return uuid.uuid4().hex


def step_of(checkpoint_id: str | os.PathLike[str]) -> int | None:
    """Returns the number at the end of a checkpoint id, or None.

    A checkpoint whose id has no number is saved as the step after all others.
    """
    match = re.search(r"(\d+)/?$", os.fspath(checkpoint_id))
    return int(match[1]) if match is not None else None


def connected(options: LibraryOptions) -> ConnectedBackend:
    """Returns this process's only connection with these options, and opens it at the first call.

    All ranks must make the first call, because it may claim a generation.
    """
    if options not in _connected:
        _connected[options] = connect_backend(options, None)
    return _connected[options]


def is_connected(options: LibraryOptions) -> bool:
    return options in _connected


def disconnect(options: LibraryOptions) -> None:
    """Closes the connection, if there is one."""
    connection = _connected.pop(options, None)
    if connection is not None:
        connection.close(0)


# ---- checkpoint of an id ---------------------------------------------------------------------------------------------
# Finds the checkpoint that an id of DCP names.

PATIENCE_SECONDS = 60.0
"""How long a load waits for tiers that do not respond."""


def named_checkpoint(checkpoint_id: str, catalogue: Catalogue) -> tuple[CheckpointReader, Mapping[str, Any]]:
    """Opens the newest complete checkpoint that the id names.

    An id without a number is compared with the saved ids: its step was chosen when it was saved.

    Args:
        checkpoint_id: empty: the newest of all.

    Returns:
        Its reader, which the caller closes, and the values of its rank 0.

    Raises:
        Unreadable: there is none (`absent`), or a tier that may have it does not respond.
    """
    step = step_of(checkpoint_id)
    candidates = [checkpoint for checkpoint in catalogue.complete_checkpoints() if step in (None, checkpoint.step)]
    for checkpoint in reversed(candidates):
        reader = CheckpointReader(checkpoint, catalogue, ReadOptions(patience_seconds=PATIENCE_SECONDS))
        try:
            values = read_values(reader.read_values(0))
        except BaseException:
            reader.close()
            raise
        if _was_saved_as(checkpoint_id, values.get(KEY)):
            return reader, values
        reader.close()
    if catalogue.unanswered_sources:
        raise Unreadable(
            f"{', '.join(catalogue.unanswered_sources)} gave no answer: whether the checkpoint is there is unknown"
        )
    which = f"no complete checkpoint {checkpoint_id!r}" if checkpoint_id else "no complete checkpoint"
    raise Unreadable(f"there is {which} in {', '.join(s.name for s in catalogue.sources)}", absent=True)


def _was_saved_as(checkpoint_id: str, plan_record: Mapping[str, Any] | None) -> bool:
    """Returns whether a checkpoint was saved under an id.

    If the id ends in a number, the caller has already compared the step.
    """
    if not checkpoint_id:
        return True
    step = step_of(checkpoint_id)
    if plan_record is None:  # a Checkpointer's, which has a step and no id
        return step is not None
    return plan_record["id"] == checkpoint_id if step is None else step_of(plan_record["id"]) == step


# ---- dcp -------------------------------------------------------------------------------------------------------------

SLOT_SECONDS = 60.0
COMMIT_SECONDS = 600.0


class SurefootWriter(StorageWriter):
    """Saves the items that DCP's plan assigns to this rank.

    Create it with the same arguments on all ranks; `close` one at the end. Writers of one folder and job share one
    staging memory and the threads that flush it.

    Args:
        folder: a path or URI of the checkpoints; under an agent the agent's tiers are used.
        job: the job's name below the folder.
        overwrite: False: reject a save if a complete checkpoint of its id exists, or any if it has no id. Even with
            True nothing is overwritten: an id with the number of a saved step is rejected, any other is a new step.
    """

    def __init__(self, folder: str | None = None, job: str | None = None, *, overwrite: bool = True) -> None:
        super().__init__()
        self._overwrite = overwrite
        self._options = options_of(folder, job)
        self._checkpoint_id = ""
        self._step = 0
        self.save_id = new_id()
        """Random id of one save, recorded in DCP's metadata."""
        self._paths: dict[str, Any] = {}
        self._blob_names: list[str] = []

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._checkpoint_id = os.fspath(checkpoint_id) if checkpoint_id is not None else ""
        self.save_id = new_id()
        self._paths, self._blob_names = {}, []

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Connects and chooses the step: the id's number, or the next.

        Every rank chooses the same step without communication: all read the tiers once, before any of them writes, and
        count their own saves from then on. `finish` checks that they agree.
        """
        if self._options not in _staging:
            backend = connected(self._options).backend
            state = _PlannedState()
            _staging[self._options] = _DcpStaging(state, Saver(state, backend, backend.attached.rank))
        step = step_of(self._checkpoint_id)
        self._step = step if step is not None else _staging[self._options].next_step(connected(self._options).sources)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Rejects a checkpoint that already exists, before any rank writes.

        Raises:
            TierError: it exists, and `overwrite` is False.
            Unreadable: a tier that may have it does not respond.
        """
        if not self._overwrite:
            self._reject_present()
        self._record_plans([plan])
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self._record_plans(plans)
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Stages this rank's items and waits until they are in the tiers; raises TierError if they are not."""
        staging = _staging.get(self._options)
        if staging is None:
            raise RuntimeError("write_data was called on a Writer that DCP has not set up")
        backend, step = connected(self._options).backend, self._step
        if step in staging.begun:
            raise TierError(
                f"step {step} was saved before by this program, and saved bytes never change: give another id"
            )
        staging.begun.add(step)
        staging.state.take(plan, planner, self._plan_record())
        staged = staging.saver.save(step, SLOT_SECONDS)
        staging.saver.wait()
        if staged != "staged" or staging.saver.staged_step != step:
            raise TierError(f"step {step} could not be staged on rank {backend.attached.rank} ({staged}): see the log")
        if not backend.wait_for_flush(COMMIT_SECONDS) or step in getattr(backend, "lost", ()):
            raise TierError(f"step {step} of rank {backend.attached.rank} did not reach its tiers: see the log")
        done: Future[list[WriteResult]] = Future()
        done.set_result(
            [
                WriteResult(index=write_item.index, size_in_bytes=_item_bytes(write_item), storage_data=step)
                for write_item in plan.items
            ]
        )
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Raises TierError if ranks committed their parts for different steps."""
        steps = sorted({result.storage_data for rank_results in results for result in rank_results})
        if len(steps) > 1:
            raise TierError(
                f"ranks saved {self._checkpoint_id or 'one checkpoint'!r} as different steps, {steps}: they did not see"
                " the same checkpoints when they began. Give the id a number at its end, like 'step-100'"
            )

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=self._checkpoint_id, save_id=self.save_id) if self._checkpoint_id else None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return bool(os.fspath(checkpoint_id))

    def close(self) -> None:
        """Stops the copy and flush threads of this folder and job."""
        staging = _staging.pop(self._options, None)
        if staging is not None:
            staging.saver.close()
        disconnect(self._options)

    def _reject_present(self) -> None:
        try:
            reader, _ = named_checkpoint(self._checkpoint_id, read_catalogue(connected(self._options).sources))
        except Unreadable as unreadable:
            if unreadable.absent:
                return
            raise
        step = reader.manifest_of(0).save.step
        reader.close()
        which = repr(self._checkpoint_id) if self._checkpoint_id else "the newest"
        raise TierError(f"Checkpoint already exists: {which} is step {step}, and overwrite is False: give another id")

    def _plan_record(self) -> dict[str, Any]:
        blob_names = sorted(set(self._blob_names))
        return {"paths": self._paths, "bytes": blob_names, "id": self._checkpoint_id, "save_id": self.save_id}

    def _record_plans(self, plans: list[SavePlan]) -> None:
        for plan in plans:
            self._paths.update(plan.planner_data or {})
            self._blob_names += [item.index.fqn for item in plan.items if item.tensor_data is None]


class _PlannedState:
    """Gives a save the entries and values of a DCP plan."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._plan_record: Mapping[str, Any] = {}

    def take(self, plan: SavePlan, planner: SavePlanner, plan_record: Mapping[str, Any]) -> None:
        self._plan_record = plan_record
        self._entries = [_build_entry(item, planner.resolve_data(item)) for item in plan.items]

    def entries(self) -> list[Entry]:
        return self._entries

    def values(self, step: int) -> bytes:
        return encode_values({"step": step, KEY: dict(self._plan_record)})


@dataclass(slots=True)
class _DcpStaging:
    """Stages the saves of one connection.

    There is one per connection: a second would stage into memory that is no longer flushed.
    """

    state: _PlannedState
    saver: Saver
    begun: set[int] = field(default_factory=set)
    """Steps that this program saved, or tried to save."""
    found: int | None = None
    """Highest step that existed before this program's first save without a number; None: not read yet."""

    def next_step(self, sources: tuple[SaveSource, ...]) -> int:
        """Returns the step after all existing ones.

        Raises:
            Unreadable: a tier does not respond. Its checkpoints may already use the next number.
        """
        if self.found is None:
            catalogue = read_catalogue(sources)
            if catalogue.unanswered_sources:
                raise Unreadable(
                    f"{', '.join(catalogue.unanswered_sources)} gave no answer: the next free step is unknown"
                )
            steps = (m.save.step for reading in catalogue.readings if reading is not None for m in reading.manifests)
            self.found = max(steps, default=0)
        return max(self.found, *self.begun, 0) + 1


_staging: dict[LibraryOptions, _DcpStaging] = {}


def _build_entry(item: WriteItem, data: torch.Tensor | io.BytesIO) -> Entry:
    single_rank = Grid.alone(0)  # DCP has divided the saving among ranks; the rank's number is irrelevant
    if isinstance(data, io.BytesIO):
        tensor = torch.frombuffer(bytearray(data.getvalue()), dtype=torch.uint8)
        shape = tuple(tensor.shape)
        return Entry(item.index.fqn, tensor, "uint8", TensorLocation(shape, Box.whole(shape), single_rank), "split")
    assert item.tensor_data is not None, "a tensor's item says where it lies"
    chunk = item.tensor_data.chunk
    box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
    tensor = data.detach()
    return Entry(
        item.index.fqn,
        tensor,
        dtype_name(tensor.dtype),
        TensorLocation(tuple(item.tensor_data.size), box, single_rank),
        "split",
    )


def _item_bytes(item: WriteItem) -> int:
    if item.tensor_data is None:
        return 0
    return int(torch.Size(item.tensor_data.chunk.sizes).numel() * item.tensor_data.properties.dtype.itemsize)


# ---- storage reader --------------------------------------------------------------------------------------------------
# Implements DCP's StorageReader on verified reads of any box.


class SurefootReader(StorageReader):
    """Reads checkpoints of a Writer or a Checkpointer, at any world size.

    Each rank reads and verifies only the parts that it needs.

    Args:
        folder: a path or URI of the checkpoints; under an agent the agent's tiers are used.
        job: the job's name below the folder.
    """

    def __init__(self, folder: str | None = None, job: str | None = None) -> None:
        super().__init__()
        self._options = options_of(folder, job)
        self._checkpoint_id = ""
        self.load_id = new_id()
        """Random id of one load, recorded in DCP's metadata."""
        self._reader: CheckpointReader | None = None
        self._saved_names: dict[str, str] = {}
        self._plain_values: dict[str, Any] = {}
        self._saved: dict[str, SavedTensor] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._checkpoint_id = os.fspath(checkpoint_id) if checkpoint_id is not None else ""
        self.load_id = new_id()

    def read_metadata(self, *_: Any, **ignored: Any) -> Metadata:
        """Opens the checkpoint of this id, the same one on every rank.

        The keyword arguments must not be called `kwargs`: DCP would then call this again after a failure, for rank
        metadata. If that succeeded, the rank would skip collectives in which the others wait for it forever.
        """
        self.close()
        self._reader, values = named_checkpoint(self._checkpoint_id, read_catalogue(self._sources()))
        layouts = self._reader.layouts.list_tensors(self._reader.world_size)
        self._saved = {name: SavedTensor(t.dtype, t.shape) for name, t in layouts.items()}
        plan_record = values.get(KEY)
        metadata = self._dcp_metadata(plan_record) if plan_record is not None else self._checkpointer_metadata(values)
        record = plan_record or {}
        metadata.storage_meta = StorageMeta(
            record.get("id", self._checkpoint_id) or None, record.get("save_id"), self.load_id
        )
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Does nothing: `read_metadata` has opened the checkpoint."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads all items of the plan at once, then hands them to DCP's planner one by one."""
        if self._reader is None:
            raise RuntimeError("read_data was called on a Reader whose metadata DCP has not read")
        entries, finishers = [], []
        for item in plan.items:
            name = item.storage_index.fqn
            if item.type == LoadItemType.BYTE_IO:
                if name in self._plain_values:
                    planner.load_bytes(item, _pickle(self._plain_values[name]))
                    continue
                tensor = self._saved[name].empty()
                entries.append(_whole_entry(name, tensor, self._saved[name]))
                finishers.append(partial(_load_bytes, planner, item, tensor))
                continue
            target = planner.resolve_tensor(item).detach()
            entry = self._entry_for(item, target)
            entries.append(entry)
            finishers.append(partial(_commit_tensor, planner, item, target, entry.tensor))
        with torch.no_grad():
            fill(self._reader, entries)
            for finish in finishers:
                finish()
        self.close()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return SurefootWriter.validate_checkpoint_id(checkpoint_id)

    def close(self) -> None:
        """Closes the connections of the last load."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _sources(self) -> tuple[SaveSource, ...]:
        if is_connected(self._options) or "SUREFOOT_AGENT_SOCKET" in os.environ:
            return connected(self._options).sources
        settings = library_settings(self._options, os.environ)
        assert settings.persistent is not None, "library settings name a tier or raise"
        return (persistent_source(settings.persistent, settings.job),)

    def _dcp_metadata(self, plan_record: Mapping[str, Any]) -> Metadata:
        self._saved_names, self._plain_values = {name: name for name in self._saved}, {}
        kinds: dict[str, Any] = {n: _tensor_metadata(saved_tensor) for n, saved_tensor in self._saved.items()}
        kinds |= {name: BytesStorageMetadata() for name in plan_record["bytes"]}
        return Metadata(kinds, planner_data=dict(plan_record["paths"]))

    def _checkpointer_metadata(self, values: Mapping[str, Any]) -> Metadata:
        from torch.distributed.checkpoint._nested_dict import flatten_state_dict

        state_dict = state_dict_of(self._saved, values)
        flat, paths = flatten_state_dict(state_dict.tree)
        tensors = {key: v for key, v in flat.items() if isinstance(v, torch.Tensor) and id(v) in state_dict.names}
        self._saved_names = {key: state_dict.names[id(v)] for key, v in tensors.items()}
        self._plain_values = {key: v for key, v in flat.items() if key not in tensors}
        kinds: dict[str, Any] = {key: _tensor_metadata(self._saved[name]) for key, name in self._saved_names.items()}
        kinds |= {key: BytesStorageMetadata() for key in self._plain_values}
        return Metadata(kinds, planner_data=paths)

    def _entry_for(self, item: ReadItem, target: torch.Tensor) -> Entry:
        name = self._saved_names[item.storage_index.fqn]
        saved_tensor = self._saved[name]
        box = Box(tuple(item.storage_offsets), tuple(item.lengths))
        if tuple(target.shape) != box.lengths:
            raise ValueError(f"{item.storage_index.fqn}: {box} is wanted for a tensor of shape {tuple(target.shape)}")
        same_type = dtype_name(target.dtype) == saved_tensor.dtype
        destination = (
            target if same_type else torch.empty(box.lengths, dtype=dtype_from_name(saved_tensor.dtype), device="cpu")
        )
        return Entry(name, destination, saved_tensor.dtype, TensorLocation(saved_tensor.shape, box, None), "split")


def _whole_entry(name: str, tensor: torch.Tensor, saved_tensor: SavedTensor) -> Entry:
    return Entry(
        name,
        tensor,
        saved_tensor.dtype,
        TensorLocation(saved_tensor.shape, Box.whole(saved_tensor.shape), None),
        "split",
    )


def _tensor_metadata(saved_tensor: SavedTensor) -> TensorStorageMetadata:
    """Describes a tensor as one chunk, regardless of its saved parts, because any box of it can be read."""
    size = torch.Size(saved_tensor.shape)
    chunk = ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)
    return TensorStorageMetadata(TensorProperties(dtype=dtype_from_name(saved_tensor.dtype)), size, [chunk])


def _pickle(value: Any) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer


def _load_bytes(planner: LoadPlanner, item: ReadItem, tensor: torch.Tensor) -> None:
    planner.load_bytes(item, io.BytesIO(tensor.numpy().tobytes()))


def _commit_tensor(planner: LoadPlanner, item: ReadItem, target: torch.Tensor, read: torch.Tensor) -> None:
    if read is not target:
        target.copy_(read)
    planner.commit_tensor(item, target)
