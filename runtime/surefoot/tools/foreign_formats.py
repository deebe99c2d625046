"""Writes and reads folders of torch.distributed.checkpoint.

torch's own FileSystemWriter and FileSystemReader do the format; the planners here give and take one band or stored
chunk at a time. Nothing pickled is run: plain values are read with `weights_only=True`. (The folder's `.metadata` is
torch's own pickle, read by torch: import only folders that you trust.)
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
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
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_saver import save

from surefoot.errors import ConfigurationError, StateMismatch
from surefoot.geometry import Box
from surefoot.state import Saved, dtype_name, dtype_named
from surefoot.state.statedicts import ImportedParts, StateDict, parts_of
from surefoot.tools.stream_copy import Band, BandReader, bands_of


def write(folder: Path, whole: StateDict, tensors: Mapping[str, Saved], bands: BandReader) -> None:
    """Writes a folder that `dcp.load` reads; refuses one that has a checkpoint."""
    if (folder / ".metadata").exists():
        raise ConfigurationError(f"{folder} has a checkpoint already: name an empty or new folder")
    # nothing is resolved ahead: a band is emptied when the next one is asked for
    writer = FileSystemWriter(folder, thread_count=1, per_thread_copy_ahead=0, overwrite=False)
    save({}, storage_writer=writer, planner=_Exporting(whole, tensors, bands), no_dist=True)


class _Exporting(SavePlanner):
    """Plans every band as a chunk of its tensor, in the order in which the bands are read."""

    def __init__(self, whole: StateDict, tensors: Mapping[str, Saved], bands: BandReader) -> None:
        flat, self._paths = flatten_state_dict(whole.tree)
        names = {
            key: whole.names[id(v)] for key, v in flat.items() if isinstance(v, torch.Tensor) and id(v) in whole.names
        }
        self._plain = {key: value for key, value in flat.items() if key not in names}
        self._names, self._tensors, self._bands = names, tensors, bands
        self._boxes: dict[tuple[str, torch.Size], Box] = {}
        self._given = torch.empty(0, device="cpu")

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Everything was given at the start."""

    def create_local_plan(self) -> SavePlan:
        keys: dict[str, list[str]] = defaultdict(list)  # tied weights have several
        for key, name in self._names.items():
            keys[name].append(key)
        items = [self._item(key, band) for band in bands_of(self._tensors) for key in keys[band.name]]
        items += [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in self._plain]
        return SavePlan(items, planner_data=self._paths)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = create_default_global_save_plan(all_plans)
        metadata.planner_data = self._paths
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        key = write_item.index.fqn
        if write_item.type == WriteItemType.BYTE_IO:
            buffer = io.BytesIO()
            torch.save(self._plain[key], buffer)
            return buffer
        assert write_item.index.offset is not None, "every band was planned with its place"
        # torch's FileSystemWriter keeps the last band of every tensor until its file is whole: let it keep empty ones
        self._given.untyped_storage().resize_(0)
        self._given = self._bands.read(self._names[key], self._boxes[key, write_item.index.offset]).clone()
        return self._given

    def _item(self, key: str, band: Band) -> WriteItem:
        what = self._tensors[band.name]
        offset = torch.Size(band.box.offsets)
        self._boxes[key, offset] = band.box
        chunk = ChunkStorageMetadata(offset, torch.Size(band.box.lengths))
        data = TensorWriteData(chunk, TensorProperties(dtype=dtype_named(what.dtype)), torch.Size(what.shape))
        return WriteItem(MetadataIndex(key, offset), WriteItemType.SHARD, tensor_data=data)


class Folder:
    """A folder that `dcp.save` wrote, to be read chunk by chunk."""

    def __init__(self, path: Path) -> None:
        if not (path / ".metadata").is_file():
            raise ConfigurationError(
                f"{path} has no .metadata: it is not a folder that torch.distributed.checkpoint wrote"
            )
        self._reader = FileSystemReader(path)
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, True)
        self._key: dict[str, str] = {}

    def parts(self, model: str) -> ImportedParts:
        """The parts it holds, tensors as stand-ins.

        `model` names weights at the top.
        """
        flat: dict[str, Any] = {}
        keys: dict[int, str] = {}
        for key, kind in self._metadata.state_dict_metadata.items():
            if isinstance(kind, BytesStorageMetadata):
                flat[key] = self._value(key)
                continue
            flat[key] = torch.empty(kind.size, dtype=kind.properties.dtype, device="meta")
            keys[id(flat[key])] = key
        paths = self._metadata.planner_data
        found = parts_of(unflatten_state_dict(flat, paths) if paths else flat, model)
        self._key = {name: keys[id(tensor)] for name, tensor in found.tensors.items()}
        return found

    def boxes(self, name: str) -> tuple[Box, ...]:
        """The boxes of a tensor's stored chunks, sorted."""
        found = [Box(tuple(c.offsets), tuple(c.sizes)) for c in self._of(name).chunks]
        return tuple(sorted((box for box in found if box.volume), key=lambda box: box.offsets))

    def saved(self, name: str) -> Saved:
        kind = self._of(name)
        return Saved(dtype_name(kind.properties.dtype), tuple(kind.size))

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Reads one stored chunk."""
        kind, key = self._of(name), self._key[name]
        number = next(
            i for i, c in enumerate(kind.chunks) if tuple(c.offsets) == box.offsets and tuple(c.sizes) == box.lengths
        )
        index = MetadataIndex(key, torch.Size(box.offsets), number)
        nought = torch.Size([0] * len(box.offsets))
        item = ReadItem(LoadItemType.TENSOR, index, nought, index, nought, torch.Size(box.lengths))
        taking = _Taking(torch.empty(box.lengths, dtype=kind.properties.dtype, device="cpu"))
        self._reader.read_data(LoadPlan([item]), taking).wait()
        return taking.tensor

    def _of(self, name: str) -> TensorStorageMetadata:
        kind = self._metadata.state_dict_metadata[self._key[name]]
        assert isinstance(kind, TensorStorageMetadata), "only tensors are named"
        return kind

    def _value(self, key: str) -> Any:
        index = MetadataIndex(key)
        nothing = torch.Size([])
        taking = _Taking(torch.empty(0, device="cpu"))
        item = ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing)
        self._reader.read_data(LoadPlan([item]), taking).wait()
        try:
            return torch.load(taking.blob, weights_only=True)
        except Exception as error:  # pickle raises whatever it likes
            raise StateMismatch(
                f"{key} is not a plain value and is not read, since reading it would run code: {error}"
            ) from error


class _Taking(LoadPlanner):
    """Takes the one thing that is read."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.blob = tensor, io.BytesIO()

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        """Nothing to set up."""

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan([])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.blob = io.BytesIO(value.getvalue() if hasattr(value, "getvalue") else value.read())

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return self.tensor

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """It was read in place."""
