"""Reads a W&B run's own file: records in LevelDB's log format, behind seven bytes of their header."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

BLOCK_BYTES = 32 << 10
HEADER = struct.Struct("<IHB")
FULL, LAST = 1, 4


def history(path: Path) -> list[dict[str, Any]]:
    """What was logged, in its order, by name; `_step` is each one's step."""
    record_kind: Any = import_module("wandb.proto.wandb_internal_pb2").Record
    found = []
    for content in _records(path.read_bytes()):
        record = record_kind()
        record.ParseFromString(content)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            found.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return found


def _records(content: bytes) -> Iterator[bytes]:
    at, part = 7, b""
    while at + HEADER.size <= len(content):
        left = BLOCK_BYTES - at % BLOCK_BYTES
        if left < HEADER.size:
            at += left
            continue
        _, size, kind = HEADER.unpack_from(content, at)
        at += HEADER.size
        part += content[at : at + size]
        at += size
        if kind in (FULL, LAST):
            yield part
            part = b""
