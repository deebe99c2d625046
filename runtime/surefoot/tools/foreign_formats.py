"""Writes and reads folders of torch.distributed.checkpoint.

torch's own FileSystemWriter and FileSystemReader implement the format; the planners here pass one band or stored chunk
at a time. Plain values are read with `weights_only=True`, so that no pickled code runs. The folder's `.metadata` is
torch's own pickle, read by torch: import only folders that you trust.
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


def write_dcp_folder(
    folder: Path, state_dict: StateDict, tensors: Mapping[str, SavedTensor], bands: BandReader
) -> None:
    """Writes a folder that `dcp.load` reads; raises ConfigurationError if it already has a checkpoint."""
    if (folder / ".metadata").exists():
        raise ConfigurationError(f"{folder} has a checkpoint already: name an empty or new folder")
    # no copy ahead: `resolve_data` empties a band when the next one is requested
    writer = FileSystemWriter(folder, thread_count=1, per_thread_copy_ahead=0, overwrite=False)
    save({}, storage_writer=writer, planner=_BandPlanner(state_dict, tensors, bands), no_dist=True)


class _BandPlanner(SavePlanner):
    """Plans every band as a chunk of its tensor, in the order in which the bands are read."""

    def __init__(self, state_dict: StateDict, tensors: Mapping[str, SavedTensor], bands: BandReader) -> None:
        flat, self._paths = flatten_state_dict(state_dict.tree)
        names = {
            key: state_dict.names[id(v)]
            for key, v in flat.items()
            if isinstance(v, torch.Tensor) and id(v) in state_dict.names
        }
        self._plain = {key: value for key, value in flat.items() if key not in names}
        self._names, self._tensors, self._bands = names, tensors, bands
        self._boxes: dict[tuple[str, torch.Size], Box] = {}
        self._last_band = torch.empty(0, device="cpu")

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Does nothing: the constructor got everything."""

    def create_local_plan(self) -> SavePlan:
        keys_by_name: dict[str, list[str]] = defaultdict(list)  # tied weights have several
        for key, name in self._names.items():
            keys_by_name[name].append(key)
        items = [self._plan_band(key, band) for band in bands_of(self._tensors) for key in keys_by_name[band.name]]
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
        # torch's FileSystemWriter keeps each tensor's last band until its file is complete: let it keep empty ones
        self._last_band.untyped_storage().resize_(0)
        self._last_band = self._bands.read(self._names[key], self._boxes[key, write_item.index.offset]).clone()
        return self._last_band

    def _plan_band(self, key: str, band: Band) -> WriteItem:
        saved = self._tensors[band.name]
        offset = torch.Size(band.box.offsets)
        self._boxes[key, offset] = band.box
        chunk = ChunkStorageMetadata(offset, torch.Size(band.box.lengths))
        data = TensorWriteData(chunk, TensorProperties(dtype=dtype_from_name(saved.dtype)), torch.Size(saved.shape))
        return WriteItem(MetadataIndex(key, offset), WriteItemType.SHARD, tensor_data=data)


class Folder:
    """Reads a folder that `dcp.save` wrote, chunk by chunk."""

    def __init__(self, path: Path) -> None:
        if not (path / ".metadata").is_file():
            raise ConfigurationError(
                f"{path} has no .metadata: it is not a folder that torch.distributed.checkpoint wrote"
            )
        self._reader = FileSystemReader(path)
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, True)
        self._key_by_name: dict[str, str] = {}

    def parts(self, model: str) -> ImportedParts:
        """Returns the folder's parts of a program, with tensors as stand-ins.

        `model` is the part name for weights at the top of the state dict.
        """
        flat: dict[str, Any] = {}
        key_by_id: dict[int, str] = {}
        for key, metadata in self._metadata.state_dict_metadata.items():
            if isinstance(metadata, BytesStorageMetadata):
                flat[key] = self._read_value(key)
                continue
            flat[key] = torch.empty(metadata.size, dtype=metadata.properties.dtype, device="meta")
            key_by_id[id(flat[key])] = key
        paths = self._metadata.planner_data
        imported = parts_of(unflatten_state_dict(flat, paths) if paths else flat, model)
        self._key_by_name = {name: key_by_id[id(tensor)] for name, tensor in imported.tensors.items()}
        return imported

    def boxes(self, name: str) -> tuple[Box, ...]:
        """Returns the boxes of a tensor's stored chunks, sorted."""
        chunk_boxes = [Box(tuple(c.offsets), tuple(c.sizes)) for c in self._metadata_of(name).chunks]
        return tuple(sorted((box for box in chunk_boxes if box.volume), key=lambda box: box.offsets))

    def saved(self, name: str) -> SavedTensor:
        metadata = self._metadata_of(name)
        return SavedTensor(dtype_name(metadata.properties.dtype), tuple(metadata.size))

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Reads one stored chunk."""
        metadata, key = self._metadata_of(name), self._key_by_name[name]
        chunk_index = next(
            i
            for i, c in enumerate(metadata.chunks)
            if tuple(c.offsets) == box.offsets and tuple(c.sizes) == box.lengths
        )
        index = MetadataIndex(key, torch.Size(box.offsets), chunk_index)
        zero_offsets = torch.Size([0] * len(box.offsets))
        item = ReadItem(LoadItemType.TENSOR, index, zero_offsets, index, zero_offsets, torch.Size(box.lengths))
        planner = _SingleReadPlanner(torch.empty(box.lengths, dtype=metadata.properties.dtype, device="cpu"))
        self._reader.read_data(LoadPlan([item]), planner).wait()
        return planner.tensor

    def _metadata_of(self, name: str) -> TensorStorageMetadata:
        metadata = self._metadata.state_dict_metadata[self._key_by_name[name]]
        assert isinstance(metadata, TensorStorageMetadata), "only tensors are named"
        return metadata

    def _read_value(self, key: str) -> Any:
        index = MetadataIndex(key)
        empty = torch.Size([])
        planner = _SingleReadPlanner(torch.empty(0, device="cpu"))
        item = ReadItem(LoadItemType.BYTE_IO, index, empty, index, empty, empty)
        self._reader.read_data(LoadPlan([item]), planner).wait()
        try:
            return torch.load(planner.blob, weights_only=True)
        except Exception as error:  # unpickling may raise any exception
            raise StateMismatch(
                f"{key} is not a plain value and is not read, since reading it would run code: {error}"
            ) from error


class _SingleReadPlanner(LoadPlanner):
    """Receives the only tensor or value that is read."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.blob = tensor, io.BytesIO()

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        """Does nothing."""

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
        """Does nothing: the tensor was read in place."""


# ---- safetensors files -----------------------------------------------------------------------------------------------
# Writes and reads weights as Hugging Face safetensors files, in bands. Used by export and import. Files are written
# without the library, because it needs whole tensors in memory; the library can read them.

FILE_BYTES = 5_000_000_000
DTYPES = ("float32", "float16", "bfloat16")
"""Types to which floating point weights can be converted."""
_FLOATING_DTYPES = ("float64", *DTYPES)

_SAFETENSORS_TYPES = {
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
    """Sets the size of weight files, and the type of their numbers."""

    file_bytes: int = FILE_BYTES
    """Largest file in bytes, unless one tensor is larger. Several files get an index."""
    dtype: str | None = None
    """Type to which floating point tensors are converted; None: the saved type."""

    def of(self, saved: SavedTensor) -> SavedTensor:
        """Returns the type and shape in which a tensor is written."""
        return SavedTensor(self.dtype, saved.shape) if self.dtype and saved.dtype in _FLOATING_DTYPES else saved


def write_safetensors(
    folder: Path, tensors: Mapping[str, SavedTensor], bands: BandReader, prefix: str, form: FileForm
) -> int:
    """Writes `tensors`, named without `prefix`; returns their bytes.

    A file gets its name once it is complete.

    Raises:
        StateMismatch: safetensors do not have a tensor's type, or a value overflows the requested type.
    """
    written = {name: form.of(written_form) for name, written_form in tensors.items()}
    for name, written_form in written.items():
        if written_form.dtype not in _SAFETENSORS_TYPES:
            raise StateMismatch(
                f"{name} is {written_form.dtype}, which safetensors files do not have: export to dcp instead"
            )
    folder.mkdir(parents=True, exist_ok=True)
    files = list(_split_into_files(written, form.file_bytes))
    file_by_tensor: dict[str, str] = {}
    for file_index, names in enumerate(files):
        is_single = len(files) == 1
        file = "model.safetensors" if is_single else f"model-{file_index + 1:05d}-of-{len(files):05d}.safetensors"
        _write_file(folder / file, {n: (tensors[n], written[n]) for n in names}, bands, prefix)
        file_by_tensor |= dict.fromkeys((_name_in_model(n, prefix) for n in names), file)
    total_bytes = sum(_saved_bytes(written_form) for written_form in written.values())
    if len(files) > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": file_by_tensor}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return total_bytes


def _split_into_files(tensors: Mapping[str, SavedTensor], limit: int) -> Iterator[list[str]]:
    names: list[str] = []
    size_bytes = 0
    for name, saved in tensors.items():
        if names and size_bytes + _saved_bytes(saved) > limit:
            yield names
            names, size_bytes = [], 0
        names.append(name)
        size_bytes += _saved_bytes(saved)
    yield names


def _write_file(
    path: Path, tensors: Mapping[str, tuple[SavedTensor, SavedTensor]], bands: BandReader, prefix: str
) -> None:
    """Writes one file; `tensors` has each tensor's saved form and its written form."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, (_, written_form) in tensors.items():
        end = position + _saved_bytes(written_form)
        description = {
            "dtype": _SAFETENSORS_TYPES[written_form.dtype],
            "shape": list(written_form.shape),
            "data_offsets": [position, end],
        }
        header[_name_in_model(name, prefix)] = description
        position = end
    header_text = json.dumps(header, separators=(",", ":")).encode()
    header_text += b" " * (-len(header_text) % 8)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(len(header_text).to_bytes(8, "little") + header_text)
            for band in bands_of({name: saved for name, (saved, _) in tensors.items()}):
                if band.size_bytes:
                    tensor = _cast(bands.read(band.name, band.box), tensors[band.name][1].dtype, band.name)
                    file.write(as_integer_elements(tensor).numpy().tobytes())
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _cast(tensor: torch.Tensor, dtype: str, name: str) -> torch.Tensor:
    target_dtype = dtype_from_name(dtype)
    if tensor.dtype == target_dtype:
        return tensor
    cast = tensor.to(target_dtype)
    # float16 ends at 65504: do not export a finite value as infinity silently
    if bool((tensor.isfinite() & ~cast.isfinite()).any()):
        raise StateMismatch(f"{name} has values beyond {dtype}: export it as bfloat16 or as it is")
    return cast


def _name_in_model(name: str, prefix: str) -> str:
    """Returns the tensor's name in its model."""
    return unescaped(name.removeprefix(prefix))


def _saved_bytes(saved: SavedTensor) -> int:
    return prod(saved.shape) * itemsize(saved.dtype)


class Weights:
    """Reads parts of tensors from one file, or a folder of files."""

    def __init__(self, path: Path) -> None:
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if not files:
            raise ConfigurationError(f"{path} has no .safetensors files: name one, or a folder of them")
        self._file_by_tensor: dict[str, Path] = {}
        self._saved: dict[str, SavedTensor] = {}
        for file in files:
            self._index_file(file)

    def saved(self) -> dict[str, SavedTensor]:
        return self._saved

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Reads the rows of a band.

        The file is mapped only during the read, because mapped pages count as the process's memory.
        """
        with _open_safetensors(self._file_by_tensor[name]) as file:
            if not box.lengths:
                tensor: torch.Tensor = file.get_tensor(name)
                return tensor.clone()
            rows: torch.Tensor = file.get_slice(name)[box.offsets[0] : box.stops[0]]
            columns = (slice(o, o + n) for o, n in zip(box.offsets[1:], box.lengths[1:], strict=True))
            return rows[(slice(None), *columns)].clone()

    def _index_file(self, path: Path) -> None:
        with _open_safetensors(path) as file:
            for name in file.keys():  # noqa: SIM118  # it is no dictionary
                if name in self._file_by_tensor:
                    raise StateMismatch(
                        f"tensor {name} is in {path} and in {self._file_by_tensor[name]}: keep one set of files"
                    )
                shape = tuple(file.get_slice(name).get_shape())
                empty = file.get_slice(name)[0:0] if shape else file.get_tensor(name)
                self._file_by_tensor[name] = path
                self._saved[name] = SavedTensor(dtype_name(empty.dtype), shape)


def _open_safetensors(path: Path) -> Any:
    from safetensors import safe_open

    return safe_open(path, framework="pt")
