"""Shares one sealed save between its writers: memory, layout, digest table.

Shared by the writers of `engine.Drain`. Whichever comes to a chunk first makes its digests, then sends it while its bytes
are still near the core; no writer waits for what another one's target does.
"""

from __future__ import annotations

import threading
import time

from surefoot.errors import ProtocolError
from surefoot.flush.slots import SealedSave
from surefoot.format.digests import block_digests
from surefoot.format.layouts import Stream
from surefoot.format.manifests import describe
from surefoot.protocol.bounds import MAX_PART_BYTES
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.identities import HolderId


class SaveWork:
    """Reads and digests one slot's save for all its writers."""

    def __init__(self, sealed: SealedSave, layout: Stream, memory: memoryview) -> None:
        if sealed.values_bytes > MAX_PART_BYTES:  # no reader would take it for a save
            raise ProtocolError(
                f"{sealed.save} has plain values of {sealed.values_bytes} bytes, and at most {MAX_PART_BYTES} are read again:"
                " keep large data in tensors, which are saved in chunks"
            )
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
        self._digests: dict[int, bytes] = {}
        self._begun: set[int] = set()
        """Chunks whose digests somebody makes or has made."""
        self._digested = threading.Event()
        self._stopped: set[HolderId] = set()
        self._lock = threading.Condition()
        if not self.chunk_lengths:
            self._describe()

    def digest(self, index: int) -> None:
        """Makes the digests of a chunk once for all writers.

        Unless another writer does or did; behind the last of all, the manifest.
        """
        with self._lock:
            if index in self._begun:
                return
            self._begun.add(index)
        try:
            found = block_digests(self.stream, self.layout.edges, self.layout.blocks_of_chunk(index))
            with self._lock:
                self._digests[index] = found
                self._lock.notify_all()
                last = len(self._digests) == len(self.chunk_lengths)
            if last:
                self._describe()
        except BaseException:
            with self._lock:
                self._digested.set()  # without a manifest the writers give the save up
                self._lock.notify_all()
            raise

    def digests(self, index: int) -> bytes:
        """The digests of a chunk on which some writer has begun.

        Empty where they could not be made.
        """
        with self._lock:
            self._lock.wait_for(lambda: index in self._digests or self._digested.is_set())
            return self._digests.get(index, b"")

    def _describe(self) -> None:
        self.table = b"".join(self._digests[index] for index in range(len(self.chunk_lengths)))
        sealed, tables = self.sealed, (self.table, self.values)
        self._manifest = describe(
            sealed.save, sealed.world, sealed.incarnation, self.layout, tables, saved_at=time.time()
        )
        self._digested.set()

    def manifest(self, target: HolderId) -> RankManifest | None:
        """Waits for the manifest, which every chunk has part in.

        None if the leg to `target` was stopped meanwhile.
        """
        while not self._digested.wait(0.1):
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
