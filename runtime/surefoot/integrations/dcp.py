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

# ---- what reader and writer share ------------------------------------------------------------------------------------
# Shares this process' connections and ids between writer and reader.

KEY = "dcp"
"""Where a rank's values keep what DCP's plan says beside its tensors."""

EVERYTHING = sys.maxsize
"""How many checkpoints are kept without an agent: whoever names them removes them, as with every storage of DCP."""

_connected: dict[LibraryOptions, ConnectedBackend] = {}


def options_of(folder: str | None, job: str | None) -> LibraryOptions:
    """The options by which writers and readers share a connection."""
    return LibraryOptions(folder=folder, interval_steps=1, keep=EVERYTHING, job=job)


def new_id() -> str:
    """Makes the random id of one save or load."""
    return uuid.uuid4().hex


def step_of(checkpoint_id: str | os.PathLike[str]) -> int | None:
    """The number at the end of a checkpoint id, or None.

    A checkpoint without one is saved as the step after all others.
    """
    found = re.search(r"(\d+)/?$", os.fspath(checkpoint_id))
    return int(found[1]) if found is not None else None


def connected(options: LibraryOptions) -> ConnectedBackend:
    """This process' one connection with these options.

    All ranks make the first call: it may claim an epoch.
    """
    if options not in _connected:
        _connected[options] = connect_backend(options, None)
    return _connected[options]


def is_connected(options: LibraryOptions) -> bool:
    return options in _connected


def disconnect(options: LibraryOptions) -> None:
    """Ends the connection, if there is one."""
    found = _connected.pop(options, None)
    if found is not None:
        found.close(0)


# ---- checkpoint of an id ---------------------------------------------------------------------------------------------
# Finds the checkpoint that an id of DCP names.

PATIENCE_SECONDS = 60.0
"""How long a load waits for tiers that do not answer."""


def named_checkpoint(checkpoint_id: str, catalogue: Catalogue) -> tuple[CheckpointReader, Mapping[str, Any]]:
    """Opens the newest complete checkpoint that the id names.

    An id without a number is looked for by name: its step was given when it was saved, and is another each time.

    Args:
        checkpoint_id: empty: the newest of all.

    Returns:
        Its reader, which the caller closes, and the values of its rank 0.

    Raises:
        Unreadable: there is none (`absent`), or a tier that may have it gives no answer.
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
        if _is_named(checkpoint_id, values.get(KEY)):
            return reader, values
        reader.close()
    if catalogue.unanswered_sources:
        raise Unreadable(
            f"{', '.join(catalogue.unanswered_sources)} gave no answer: whether the checkpoint is there is unknown"
        )
    which = f"no complete checkpoint {checkpoint_id!r}" if checkpoint_id else "no complete checkpoint"
    raise Unreadable(f"there is {which} in {', '.join(s.name for s in catalogue.sources)}", absent=True)


def _is_named(wanted: str, about: Mapping[str, Any] | None) -> bool:
    """Whether a checkpoint that has the step of `wanted`, if that names one, was saved under such an id."""
    if not wanted:
        return True
    step = step_of(wanted)
    if about is None:  # a Checkpointer's, which has a step and no id
        return step is not None
    return about["id"] == wanted if step is None else step_of(about["id"]) == step


# ---- dcp -------------------------------------------------------------------------------------------------------------

SLOT_SECONDS = 60.0
COMMIT_SECONDS = 600.0


class SurefootWriter(StorageWriter):
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
            link = connected(self._options).backend
            state = _PlannedState()
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
            self._reject_present()
        self._note([plan])
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self._note(plans)
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        staging = _staging.get(self._options)
        if staging is None:
            raise RuntimeError("write_data was called on a Writer that DCP has not set up")
        link, step = connected(self._options).backend, self._step
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
        if not link.wait_for_flush(COMMIT_SECONDS) or step in getattr(link, "lost", ()):
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

    def _reject_present(self) -> None:
        try:
            reader, _ = named_checkpoint(self._id, read_catalogue(connected(self._options).sources))
        except Unreadable as unreadable:
            if unreadable.absent:
                return
            raise
        step = reader.manifest_of(0).save.step
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


class _PlannedState:
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

    state: _PlannedState
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
            if catalogue.unanswered_sources:
                raise Unreadable(
                    f"{', '.join(catalogue.unanswered_sources)} gave no answer: the next free step is unknown"
                )
            steps = (m.save.step for reading in catalogue.readings if reading is not None for m in reading.manifests)
            self.found = max(steps, default=0)
        return max(self.found, *self.begun, 0) + 1


_staging: dict[LibraryOptions, _DcpStaging] = {}


def _entry(item: WriteItem, data: torch.Tensor | io.BytesIO) -> Entry:
    nobody_else = Grid.alone(0)  # DCP has settled who saves what; which rank that is makes no difference here
    if isinstance(data, io.BytesIO):
        tensor = torch.frombuffer(bytearray(data.getvalue()), dtype=torch.uint8)
        shape = tuple(tensor.shape)
        return Entry(item.index.fqn, tensor, "uint8", TensorLocation(shape, Box.whole(shape), nobody_else), "split")
    assert item.tensor_data is not None, "a tensor's item says where it lies"
    chunk = item.tensor_data.chunk
    box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
    tensor = data.detach()
    return Entry(
        item.index.fqn,
        tensor,
        dtype_name(tensor.dtype),
        TensorLocation(tuple(item.tensor_data.size), box, nobody_else),
        "split",
    )


def _size(item: WriteItem) -> int:
    if item.tensor_data is None:
        return 0
    return int(torch.Size(item.tensor_data.chunk.sizes).numel() * item.tensor_data.properties.dtype.itemsize)


# ---- storage reader --------------------------------------------------------------------------------------------------
# Implements DCP's StorageReader on verified reads of any box.


class SurefootReader(StorageReader):
    """Reads what a Writer or a Checkpointer saved, at any world size.

    Each rank reads only what it needs, verified.

    Args:
        folder: where checkpoints lie, a path or URI; under an agent its tiers are used.
        job: the job's name below the folder.
    """

    def __init__(self, folder: str | None = None, job: str | None = None) -> None:
        super().__init__()
        self._options = options_of(folder, job)
        self._id = ""
        self.load_id = new_id()
        """Of one load; DCP's metadata names it."""
        self._reader: CheckpointReader | None = None
        self._names: dict[str, str] = {}
        self._plain: dict[str, Any] = {}
        self._saved: dict[str, SavedTensor] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._id = os.fspath(checkpoint_id) if checkpoint_id is not None else ""
        self.load_id = new_id()

    def read_metadata(self, *_: Any, **ignored: Any) -> Metadata:
        """Opens the checkpoint of this id; the same one on every rank.

        DCP asks a reader whose signature says `kwargs` again when this fails, for what it calls metadata of the rank.
        Did that succeed, the rank would go on without the collectives in which the others then wait for it for ever.
        """
        self.close()
        self._reader, values = named_checkpoint(self._id, read_catalogue(self._sources()))
        layouts = self._reader.layouts.list_tensors(self._reader.world_size)
        self._saved = {name: SavedTensor(t.dtype, t.shape) for name, t in layouts.items()}
        about = values.get(KEY)
        metadata = self._of_dcp(about) if about is not None else self._of_checkpointer(values)
        known = about or {}
        metadata.storage_meta = StorageMeta(known.get("id", self._id) or None, known.get("save_id"), self.load_id)
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """`read_metadata` has opened the checkpoint."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        if self._reader is None:
            raise RuntimeError("read_data was called on a Reader whose metadata DCP has not read")
        entries, finishing = [], []
        for item in plan.items:
            name = item.storage_index.fqn
            if item.type == LoadItemType.BYTE_IO:
                if name in self._plain:
                    planner.load_bytes(item, _pickled(self._plain[name]))
                    continue
                tensor = self._saved[name].empty()
                entries.append(_whole(name, tensor, self._saved[name]))
                finishing.append(partial(_load_bytes, planner, item, tensor))
                continue
            target = planner.resolve_tensor(item).detach()
            entry = self._entry_for(item, target)
            entries.append(entry)
            finishing.append(partial(_commit, planner, item, target, entry.tensor))
        with torch.no_grad():
            fill(self._reader, entries)
            for finish in finishing:
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

    def _of_dcp(self, about: Mapping[str, Any]) -> Metadata:
        self._names, self._plain = {name: name for name in self._saved}, {}
        kinds: dict[str, Any] = {n: _tensor_metadata(what) for n, what in self._saved.items()}
        kinds |= {name: BytesStorageMetadata() for name in about["bytes"]}
        return Metadata(kinds, planner_data=dict(about["paths"]))

    def _of_checkpointer(self, values: Mapping[str, Any]) -> Metadata:
        from torch.distributed.checkpoint._nested_dict import flatten_state_dict

        whole = state_dict_of(self._saved, values)
        flat, paths = flatten_state_dict(whole.tree)
        tensors = {key: v for key, v in flat.items() if isinstance(v, torch.Tensor) and id(v) in whole.names}
        self._names = {key: whole.names[id(v)] for key, v in tensors.items()}
        self._plain = {key: v for key, v in flat.items() if key not in tensors}
        kinds: dict[str, Any] = {key: _tensor_metadata(self._saved[name]) for key, name in self._names.items()}
        kinds |= {key: BytesStorageMetadata() for key in self._plain}
        return Metadata(kinds, planner_data=paths)

    def _entry_for(self, item: ReadItem, target: torch.Tensor) -> Entry:
        name = self._names[item.storage_index.fqn]
        what = self._saved[name]
        box = Box(tuple(item.storage_offsets), tuple(item.lengths))
        if tuple(target.shape) != box.lengths:
            raise ValueError(f"{item.storage_index.fqn}: {box} is wanted for a tensor of shape {tuple(target.shape)}")
        same_type = dtype_name(target.dtype) == what.dtype
        into = target if same_type else torch.empty(box.lengths, dtype=dtype_from_name(what.dtype), device="cpu")
        return Entry(name, into, what.dtype, TensorLocation(what.shape, box, None), "split")


def _whole(name: str, tensor: torch.Tensor, what: SavedTensor) -> Entry:
    return Entry(name, tensor, what.dtype, TensorLocation(what.shape, Box.whole(what.shape), None), "split")


def _tensor_metadata(what: SavedTensor) -> TensorStorageMetadata:
    """Describes a tensor as one chunk, in however many parts it was saved: any box of it can be read."""
    size = torch.Size(what.shape)
    chunk = ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)
    return TensorStorageMetadata(TensorProperties(dtype=dtype_from_name(what.dtype)), size, [chunk])


def _pickled(value: Any) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer


def _load_bytes(planner: LoadPlanner, item: ReadItem, tensor: torch.Tensor) -> None:
    planner.load_bytes(item, io.BytesIO(tensor.numpy().tobytes()))


def _commit(planner: LoadPlanner, item: ReadItem, target: torch.Tensor, read: torch.Tensor) -> None:
    if read is not target:
        target.copy_(read)
    planner.commit_tensor(item, target)
