"""Implements DCP's StorageReader on verified reads of any box."""

from __future__ import annotations

import io
import os
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
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from surefoot.checkpointer.backends import library_settings
from surefoot.checkpointer.restoring import fill
from surefoot.geometry import Box
from surefoot.integrations.common import KEY, connected, is_connected, new_id, options_of
from surefoot.integrations.dcp import Writer
from surefoot.integrations.named_checkpoint import named_checkpoint
from surefoot.restore.catalogue import SaveSource, persistent_source, read_catalogue
from surefoot.restore.reader import CheckpointReader
from surefoot.state import Entry, Saved, dtype_name, dtype_named
from surefoot.state.entries import Place
from surefoot.state.statedicts import state_dict_of


class Reader(StorageReader):
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
        self._saved: dict[str, Saved] = {}

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
        layouts = self._reader.layouts.tensors(self._reader.world)
        self._saved = {name: Saved(t.dtype, t.shape) for name, t in layouts.items()}
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
            entry = self._wanted(item, target)
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
        return Writer.validate_checkpoint_id(checkpoint_id)

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

    def _wanted(self, item: ReadItem, target: torch.Tensor) -> Entry:
        name = self._names[item.storage_index.fqn]
        what = self._saved[name]
        box = Box(tuple(item.storage_offsets), tuple(item.lengths))
        if tuple(target.shape) != box.lengths:
            raise ValueError(f"{item.storage_index.fqn}: {box} is wanted for a tensor of shape {tuple(target.shape)}")
        same_type = dtype_name(target.dtype) == what.dtype
        into = target if same_type else torch.empty(box.lengths, dtype=dtype_named(what.dtype), device="cpu")
        return Entry(name, into, what.dtype, Place(what.shape, box, None), "split")


def _whole(name: str, tensor: torch.Tensor, what: Saved) -> Entry:
    return Entry(name, tensor, what.dtype, Place(what.shape, Box.whole(what.shape), None), "split")


def _tensor_metadata(what: Saved) -> TensorStorageMetadata:
    """Describes a tensor as one chunk, in however many parts it was saved: any box of it can be read."""
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
