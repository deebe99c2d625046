"""One sealed save as its threads see it: the memory it lies in, its layout, and the digest table made beside the writing.

Shared by the hasher and the writers of `engine.Drain`; `hash_into` runs in the hasher's thread, everything else is
read-only or an event.
"""

from __future__ import annotations

import threading
import time

from surefoot.drain.slots import SealedSave
from surefoot.errors import ProtocolError
from surefoot.format.digests import block_digests
from surefoot.format.layouts import Stream
from surefoot.format.manifests import describe
from surefoot.protocol.identities import HolderId
from surefoot.protocol.records import RankManifest


class SaveWork:
    """What is being drained from one slot."""

    def __init__(self, sealed: SealedSave, layout: Stream, memory: memoryview) -> None:
        end = sealed.stream_bytes + sealed.values_bytes
        if sealed.stream_bytes != layout.layout.stream_bytes or end > memory.nbytes:
            raise ProtocolError(
                f"{sealed.save}: {sealed.stream_bytes} + {sealed.values_bytes} bytes were staged into a slot of"
                f" {memory.nbytes} with a layout of {layout.layout.stream_bytes}: the save is not written"
            )
        self.sealed = sealed
        self.layout = layout
        self.chunk_lengths = layout.layout.chunk_lengths()
        self.stream = memory[: sealed.stream_bytes]
        self.values = bytes(memory[sealed.stream_bytes : end])
        self.table = b""
        self._manifest: RankManifest | None = None
        self._hashed = threading.Event()
        self._stopped: set[HolderId] = set()
        self._lock = threading.Lock()

    def hash(self) -> None:
        """Makes the digest table and the manifest, then lets the waiting writers go on."""
        sealed = self.sealed
        try:
            parts = []
            for number in range(len(self.chunk_lengths)):
                parts.append(block_digests(self.stream, self.layout.edges, self.layout.blocks_of_chunk(number)))
            self.table = b"".join(parts)
            tables = (self.table, self.values)
            self._manifest = describe(
                sealed.save, sealed.world, sealed.incarnation, self.layout, tables, saved_at=time.time()
            )
        finally:
            self._hashed.set()  # without a manifest the writers give the save up

    def wait_hashed(self) -> None:
        """Until the hasher has left the memory too."""
        self._hashed.wait()

    def manifest(self, target: HolderId) -> RankManifest | None:
        """The manifest once hashing is done; None if the leg to `target` was stopped meanwhile."""
        while not self._hashed.wait(0.1):
            if self.is_stopped(target):
                return None
        return self._manifest

    def chunk(self, index: int) -> memoryview:
        start = self.layout.layout.chunk_starts[index]
        return self.stream[start : start + self.chunk_lengths[index]]

    def start(self, target: HolderId) -> None:
        with self._lock:
            self._stopped.discard(target)

    def stop(self, target: HolderId) -> None:
        with self._lock:
            self._stopped.add(target)

    def is_stopped(self, target: HolderId) -> bool:
        with self._lock:
            return target in self._stopped

    def release(self) -> None:
        """Lets go of the arena's memory; no thread reads it any more."""
        self.stream.release()
