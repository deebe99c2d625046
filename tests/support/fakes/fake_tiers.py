"""A Tier in memory, held to the same contract as the real ones, whose failures and damage a test chooses.

`hook(call, save)` is asked before every call and may raise whatever the real tier would; `flip` and `lose` damage what
is stored, as a disk or a bad cable would.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from surefoot.errors import ChunkMissing, Fenced, ProtocolError
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.identities import RankSave

Part = str | int
"""`digests`, `values`, or a chunk's number."""


def no_hook(call: str, save: RankSave | None) -> None:
    """Lets every call through."""


class MemoryPlace:
    """What outlives a connection: the stored bytes of one holder. `tier()` opens a connection to it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.fence = -1
        self.parts: dict[tuple[RankSave, Part], bytes] = {}
        self.layouts: dict[str, str] = {}
        self.index: dict[RankSave, str] = {}
        self.hook: Callable[[str, RankSave | None], None] = no_hook
        self.lock = threading.Lock()
        self.reads = 0
        self.read_bytes = 0

    def tier(self) -> MemoryTier:
        return MemoryTier(self)

    def flip(self, save: RankSave, part: Part | str, byte: int = 0) -> None:
        """Damages one byte of a part, of the layout (`layout:DIGEST`) or of the index entry (`manifest`)."""
        if part == "manifest":
            self.index[save] = _flipped(self.index[save].encode(), byte).decode("latin-1")
        elif isinstance(part, str) and part.startswith("layout:"):
            digest = part.removeprefix("layout:")
            self.layouts[digest] = _flipped(self.layouts[digest].encode(), byte).decode("latin-1")
        else:
            self.parts[save, part] = _flipped(self.parts[save, part], byte)

    def lose(self, save: RankSave, part: Part) -> None:
        del self.parts[save, part]


def _flipped(data: bytes, byte: int) -> bytes:
    position = byte % len(data)
    return data[:position] + bytes([data[position] ^ 0x01]) + data[position + 1 :]


class MemoryTier:
    """One connection to a MemoryPlace."""

    def __init__(self, place: MemoryPlace) -> None:
        self._place = place
        self._damaged: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self._place.name

    def put_layout(self, digest: str, text: str) -> None:
        self._place.hook("put_layout", None)
        self._place.layouts[digest] = text

    def put_chunk(self, save: RankSave, index: int, data: memoryview) -> None:
        self._put(save, index, bytes(data), "put_chunk")

    def put_values(self, save: RankSave, data: bytes) -> None:
        self._put(save, "values", bytes(data), "put_values")

    def put_digests(self, save: RankSave, data: bytes) -> None:
        self._put(save, "digests", bytes(data), "put_digests")

    def commit(self, manifest: RankManifest, writer_epoch: int, chunk_lengths: tuple[int, ...]) -> None:
        save, place = manifest.save, self._place
        place.hook("commit", save)
        with place.lock:
            self._guard(writer_epoch)
            wanted: list[tuple[Part, int]] = [
                ("digests", manifest.digests_bytes),
                ("values", manifest.values_bytes),
                *enumerate(chunk_lengths),
            ]
            for part, length in wanted:
                found = place.parts.get((save, part))
                if found is None or len(found) != length:
                    raise ChunkMissing(f"{self.name}: part {part} of {save} is not there with {length} bytes")
            if manifest.layout not in place.layouts:
                raise ChunkMissing(f"{self.name}: layout {manifest.layout} is not there")
            place.fence = writer_epoch
            place.index[save] = manifest.to_json()

    def manifests(self) -> tuple[RankManifest, ...]:
        self._place.hook("manifests", None)
        found, damaged = [], []
        for save, text in sorted(self._place.index.items()):
            try:
                manifest = RankManifest.from_json(text)
            except ProtocolError:
                damaged.append(f"{self.name}: index entry of {save}")
            else:
                found.append(manifest)
        self._damaged = tuple(damaged)
        return tuple(found)

    def damaged(self) -> tuple[str, ...]:
        return self._damaged

    def read_layout(self, digest: str) -> str:
        self._place.hook("read_layout", None)
        if digest not in self._place.layouts:
            raise ChunkMissing(f"{self.name}: layout {digest} is not there")
        return self._place.layouts[digest]

    def read_values(self, save: RankSave) -> bytes:
        return self._get(save, "values", "read_values")

    def read_digests(self, save: RankSave, offset: int, length: int) -> bytes:
        return self._range(save, "digests", offset, length, "read_digests")

    def read_chunk(self, save: RankSave, index: int, offset: int, length: int) -> bytes | memoryview:
        return self._range(save, index, offset, length, "read_chunk")

    def delete_save(self, save: RankSave, writer_epoch: int, chunks: int) -> None:
        self._place.hook("drop", save)
        with self._place.lock:
            self._guard(writer_epoch)
            self._place.index.pop(save, None)
            for part in ("digests", "values", *range(chunks)):
                self._place.parts.pop((save, part), None)

    def close(self) -> None:
        pass

    def _guard(self, writer_epoch: int) -> None:
        if writer_epoch < self._place.fence:
            raise Fenced(f"{self.name} refused epoch {writer_epoch}: epoch {self._place.fence} rules this job now")

    def _put(self, save: RankSave, part: Part, data: bytes, call: str) -> None:
        self._place.hook(call, save)
        self._place.parts[save, part] = data

    def _get(self, save: RankSave, part: Part, call: str) -> bytes:
        self._place.hook(call, save)
        data = self._place.parts.get((save, part))
        if data is None:
            raise ChunkMissing(f"{self.name}: part {part} of {save} is not there")
        self._place.reads += 1
        return data

    def _range(self, save: RankSave, part: Part, offset: int, length: int, call: str) -> bytes:
        data = self._get(save, part, call)[offset : offset + length]
        if len(data) != length:
            raise ChunkMissing(f"{self.name}: part {part} of {save} has {len(data)} of {length} bytes from {offset}")
        self._place.read_bytes += length
        return data
