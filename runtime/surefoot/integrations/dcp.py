"""torch.distributed.checkpoint on this engine: `dcp.save(..., storage_writer=Writer())`, `dcp.load(..., storage_reader=Reader())`.

    writer = Writer(folder="/checkpoints")
    dcp.save(state_dict, storage_writer=writer, checkpoint_id="step-100")
    dcp.load(state_dict, storage_reader=Reader(folder="/checkpoints"), checkpoint_id="step-100")

DCP plans; the engine stages, hashes, replicates and commits what its plan gives each rank, and reads any box back
verified. The number at the end of a checkpoint id is the step. A Reader also reads what a Checkpointer saved. Under an
agent both use its tiers, without one the folder (or SUREFOOT_PERSISTENT_URI).
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Mapping
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

from surefoot.checkpointer.links import Connected, Options, library_settings, link_of
from surefoot.checkpointer.restoring import fill
from surefoot.checkpointer.saving import Saver
from surefoot.errors import ConfigurationError, TierError, Unreadable
from surefoot.format.values import encode_values
from surefoot.geometry import Box
from surefoot.geometry.grids import Grid
from surefoot.restore.catalogue import Source, persistent_source, read_catalogue
from surefoot.restore.reader import CheckpointReader, ReadOptions
from surefoot.state import Entry, Saved, dtype_name, dtype_named, read_values
from surefoot.state.entries import Place
from surefoot.state.statedicts import state_dict_of

SLOT_SECONDS = 60.0
COMMIT_SECONDS = 600.0
PATIENCE_SECONDS = 60.0
"""How long a load waits for tiers that do not answer."""

_KEY = "dcp"
_connected: dict[Options, Connected] = {}


def step_of(checkpoint_id: str | os.PathLike[str]) -> int:
    """The number at the end of a checkpoint id."""
    found = re.search(r"(\d+)/?$", os.fspath(checkpoint_id))
    if found is None:
        raise ConfigurationError(
            f"checkpoint id {os.fspath(checkpoint_id)!r} has no number at its end: name it by its step, like 'step-100'"
        )
    return int(found[1])


def connected(options: Options) -> Connected:
    """This process' one connection with these options; the first call is made on all ranks alike."""
    if options not in _connected:
        _connected[options] = link_of(options, None)
    return _connected[options]


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
            raise TierError(f"step {step} was saved before by this Writer, and saved bytes never change: give another id")
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
        found = _connected.pop(self._options, None)
        if found is not None:
            found.close(0)

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
        return encode_values({"step": step, _KEY: dict(self._about)})


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


class Reader(StorageReader):
    """Reads what a Writer or a Checkpointer saved, at any world size; each rank reads only what it needs, verified."""

    def __init__(self, folder: str | None = None, job: str | None = None) -> None:
        super().__init__()
        self._options = Options(folder=folder, interval_steps=1, keep=None, job=job)
        self._id = ""
        self._reader: CheckpointReader | None = None
        self._names: dict[str, str] = {}
        self._plain: dict[str, Any] = {}
        self._saved: dict[str, Saved] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._id = os.fspath(checkpoint_id) if checkpoint_id is not None else ""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        self.close()
        sources = self._sources()
        catalogue = read_catalogue(sources)
        step = step_of(self._id) if self._id else None
        found = [f.checkpoint for f in catalogue.checkpoints() if f.complete and step in (None, f.checkpoint.step)]
        if not found:
            which = "no checkpoint" if step is None else f"no complete checkpoint of step {step}"
            raise Unreadable(f"there is {which} in {', '.join(s.name for s in sources)}", absent=True)
        self._reader = CheckpointReader(found[-1], catalogue, ReadOptions(patience_seconds=PATIENCE_SECONDS))
        layouts = self._reader.layouts.tensors(self._reader.world)
        self._saved = {name: Saved(t.dtype, t.shape) for name, t in layouts.items()}
        values = read_values(self._reader.values(0))
        about = values.get(_KEY)
        return self._of_dcp(about) if about is not None else self._of_checkpointer(values)

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
            entry = self._wanted(item, target)
            entries.append(entry)
            finishing.append(partial(_commit, planner, item, target, entry.tensor))
        with torch.no_grad():
            fill(self._reader, entries)
            for finish in finishing:
                finish()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return Writer.validate_checkpoint_id(checkpoint_id)

    def close(self) -> None:
        """Closes the connections of the last load."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _sources(self) -> tuple[Source, ...]:
        if self._options in _connected or "SUREFOOT_AGENT_SOCKET" in os.environ:
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

    def _wanted(self, item: ReadItem, target: torch.Tensor) -> Entry:
        name = self._names[item.storage_index.fqn]
        what = self._saved[name]
        box = Box(tuple(item.storage_offsets), tuple(item.lengths))
        if tuple(target.shape) != box.lengths:
            raise ValueError(f"{item.storage_index.fqn}: {box} is wanted for a tensor of shape {tuple(target.shape)}")
        same_type = dtype_name(target.dtype) == what.dtype
        into = target if same_type else torch.empty(box.lengths, dtype=dtype_named(what.dtype))
        return Entry(name, into, what.dtype, Place(what.shape, box, None), "split")


def _whole(name: str, tensor: torch.Tensor, what: Saved) -> Entry:
    return Entry(name, tensor, what.dtype, Place(what.shape, Box.whole(what.shape), None), "split")


def _tensor_metadata(what: Saved) -> TensorStorageMetadata:
    """One chunk, whatever was saved in how many parts: any box of it can be read."""
    size = torch.Size(what.shape)
    chunk = ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)
    return TensorStorageMetadata(TensorProperties(dtype=dtype_named(what.dtype)), size, [chunk])


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
