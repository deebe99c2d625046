"""Writes and reads weights as Hugging Face safetensors files, in bands.

Used by export and import. Written by hand, because the library wants whole tensors in memory; what is written is read
by it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from surefoot.errors import ConfigurationError, StateMismatch
from surefoot.format.dtypes import itemsize
from surefoot.geometry import Box
from surefoot.staging import elements
from surefoot.state import Saved, dtype_name, dtype_named
from surefoot.state.tensor_names import unescaped
from surefoot.tools.stream_copy import BandReader, bands_of

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

    def of(self, what: Saved) -> Saved:
        """Describes a tensor as it is written."""
        return Saved(self.dtype, what.shape) if self.dtype and what.dtype in _FLOATING else what


def write(folder: Path, tensors: Mapping[str, Saved], bands: BandReader, prefix: str, form: FileForm) -> int:
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


def _files(tensors: Mapping[str, Saved], limit: int) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, what in tensors.items():
        if names and size + _size(what) > limit:
            yield names
            names, size = [], 0
        names.append(name)
        size += _size(what)
    yield names


def _write_file(path: Path, tensors: Mapping[str, tuple[Saved, Saved]], bands: BandReader, prefix: str) -> None:
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
                    file.write(elements(read).numpy().tobytes())
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _cast(read: torch.Tensor, dtype: str, name: str) -> torch.Tensor:
    wanted = dtype_named(dtype)
    if read.dtype == wanted:
        return read
    found = read.to(wanted)
    if bool((read.isfinite() & ~found.isfinite()).any()):
        raise StateMismatch(f"{name} has values beyond {dtype}: export it as bfloat16 or as it is")
    return found


def _own_name(name: str, prefix: str) -> str:
    """The tensor's name in its model."""
    return unescaped(name.removeprefix(prefix))


def _size(what: Saved) -> int:
    return prod(what.shape) * itemsize(what.dtype)


class Weights:
    """Reads parts of tensors from one file, or a folder of files."""

    def __init__(self, path: Path) -> None:
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if not files:
            raise ConfigurationError(f"{path} has no .safetensors files: name one, or a folder of them")
        self._where: dict[str, Path] = {}
        self._saved: dict[str, Saved] = {}
        for file in files:
            self._look(file)

    def saved(self) -> dict[str, Saved]:
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
                self._saved[name] = Saved(dtype_name(nothing.dtype), shape)


def _opened(path: Path) -> Any:
    from safetensors import safe_open

    return safe_open(path, framework="pt")
