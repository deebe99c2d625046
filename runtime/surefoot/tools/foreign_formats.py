"""Writes and reads folders of torch.distributed.checkpoint.

torch's own FileSystemWriter and FileSystemReader do the format; the planners here give and take one band or stored
chunk at a time. Nothing pickled is run: plain values are read with `weights_only=True`. (The folder's `.metadata` is
torch's own pickle, read by torch: import only folders that you trust.)
"""

from __future__ import annotations

import io
import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
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
from surefoot.format.layouts import itemsize
from surefoot.geometry import Box
from surefoot.staging import as_integer_elements
from surefoot.state import SavedTensor, dtype_from_name, dtype_name
from surefoot.state.entries import unescaped
from surefoot.state.modules import ImportedParts, StateDict, parts_of
from surefoot.tools.rank_streams import Band, BandReader, bands_of


def write_dcp_folder(folder: Path, whole: StateDict, tensors: Mapping[str, SavedTensor], bands: BandReader) -> None:
    """Writes a folder that `dcp.load` reads; refuses one that has a checkpoint."""
    if (folder / ".metadata").exists():
        raise ConfigurationError(f"{folder} has a checkpoint already: name an empty or new folder")
    # nothing is resolved ahead: a band is emptied when the next one is asked for
    writer = FileSystemWriter(folder, thread_count=1, per_thread_copy_ahead=0, overwrite=False)
    save({}, storage_writer=writer, planner=_Exporting(whole, tensors, bands), no_dist=True)


class _Exporting(SavePlanner):
    """Plans every band as a chunk of its tensor, in the order in which the bands are read."""

    def __init__(self, whole: StateDict, tensors: Mapping[str, SavedTensor], bands: BandReader) -> None:
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
        data = TensorWriteData(chunk, TensorProperties(dtype=dtype_from_name(what.dtype)), torch.Size(what.shape))
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

    def saved(self, name: str) -> SavedTensor:
        kind = self._of(name)
        return SavedTensor(dtype_name(kind.properties.dtype), tuple(kind.size))

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


# ---- safetensors files -----------------------------------------------------------------------------------------------
# Writes and reads weights as Hugging Face safetensors files, in bands. Used by export and import. Written by hand,
# because the library wants whole tensors in memory; what is written is read by it.

FILE_BYTES = 5_000_000_000
DTYPES = ("float32", "float16", "bfloat16")
"""What floating point weights can be written as."""
_FLOATING = ("float64", *DTYPES)

_TYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "complex64": "C64",
}


@dataclass(frozen=True, slots=True)
class FileForm:
    """The size of weight files, and the type of their numbers."""

    file_bytes: int = FILE_BYTES
    """Files are not larger, unless one tensor is; more than one get an index."""
    dtype: str | None = None
    """What floating point tensors become; None: they stay as they were saved."""

    def of(self, what: SavedTensor) -> SavedTensor:
        """Describes a tensor as it is written."""
        return SavedTensor(self.dtype, what.shape) if self.dtype and what.dtype in _FLOATING else what


def write_safetensors(
    folder: Path, tensors: Mapping[str, SavedTensor], bands: BandReader, prefix: str, form: FileForm
) -> int:
    """Writes `tensors`, named without `prefix`; returns their bytes.

    A file gets its name once it is complete.

    Raises:
        StateMismatch: safetensors lack a tensor's type, or the type asked for lacks its values.
    """
    written = {name: form.of(what) for name, what in tensors.items()}
    for name, what in written.items():
        if what.dtype not in _TYPES:
            raise StateMismatch(f"{name} is {what.dtype}, which safetensors files do not have: export to dcp instead")
    folder.mkdir(parents=True, exist_ok=True)
    files = list(_files(written, form.file_bytes))
    places: dict[str, str] = {}
    for number, names in enumerate(files):
        one = len(files) == 1
        file = "model.safetensors" if one else f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        _write_file(folder / file, {n: (tensors[n], written[n]) for n in names}, bands, prefix)
        places |= dict.fromkeys((_own_name(n, prefix) for n in names), file)
    total = sum(_size(what) for what in written.values())
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return total


def _files(tensors: Mapping[str, SavedTensor], limit: int) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, what in tensors.items():
        if names and size + _size(what) > limit:
            yield names
            names, size = [], 0
        names.append(name)
        size += _size(what)
    yield names


def _write_file(
    path: Path, tensors: Mapping[str, tuple[SavedTensor, SavedTensor]], bands: BandReader, prefix: str
) -> None:
    """Writes one file of tensors, each as it was saved and as it is written."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, (_, what) in tensors.items():
        end = position + _size(what)
        kind = {"dtype": _TYPES[what.dtype], "shape": list(what.shape), "data_offsets": [position, end]}
        header[_own_name(name, prefix)] = kind
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for band in bands_of({name: saved for name, (saved, _) in tensors.items()}):
                if band.size_bytes:
                    read = _cast(bands.read(band.name, band.box), tensors[band.name][1].dtype, band.name)
                    file.write(as_integer_elements(read).numpy().tobytes())
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _cast(read: torch.Tensor, dtype: str, name: str) -> torch.Tensor:
    wanted = dtype_from_name(dtype)
    if read.dtype == wanted:
        return read
    found = read.to(wanted)
    if bool((read.isfinite() & ~found.isfinite()).any()):
        raise StateMismatch(f"{name} has values beyond {dtype}: export it as bfloat16 or as it is")
    return found


def _own_name(name: str, prefix: str) -> str:
    """The tensor's name in its model."""
    return unescaped(name.removeprefix(prefix))


def _size(what: SavedTensor) -> int:
    return prod(what.shape) * itemsize(what.dtype)


class Weights:
    """Reads parts of tensors from one file, or a folder of files."""

    def __init__(self, path: Path) -> None:
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if not files:
            raise ConfigurationError(f"{path} has no .safetensors files: name one, or a folder of them")
        self._where: dict[str, Path] = {}
        self._saved: dict[str, SavedTensor] = {}
        for file in files:
            self._look(file)

    def saved(self) -> dict[str, SavedTensor]:
        return self._saved

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Reads the rows of a band, mapping the file only meanwhile.

        What is mapped counts as memory.
        """
        with _opened(self._where[name]) as file:
            if not box.lengths:
                whole: torch.Tensor = file.get_tensor(name)
                return whole.clone()
            rows: torch.Tensor = file.get_slice(name)[box.offsets[0] : box.stops[0]]
            columns = (slice(o, o + n) for o, n in zip(box.offsets[1:], box.lengths[1:], strict=True))
            return rows[(slice(None), *columns)].clone()

    def _look(self, path: Path) -> None:
        with _opened(path) as file:
            for name in file.keys():  # noqa: SIM118  # it is no dictionary
                if name in self._where:
                    raise StateMismatch(f"tensor {name} is in {path} and in {self._where[name]}: keep one set of files")
                shape = tuple(file.get_slice(name).get_shape())
                nothing = file.get_slice(name)[0:0] if shape else file.get_tensor(name)
                self._where[name] = path
                self._saved[name] = SavedTensor(dtype_name(nothing.dtype), shape)


def _opened(path: Path) -> Any:
    from safetensors import safe_open

    return safe_open(path, framework="pt")
