"""Writes, commits, reads and seals rank saves on one holder.

A `Tier`, used by drain and restore (under the job's account) and by the operator (under the administrator's). One
thread at a time per client; one is cheap (a connection, opened at the first call), so each stream or operator task
takes its own. Every call means the one instance that the endpoint names: a Redis that restarted since is another holder.
"""

from __future__ import annotations

from collections.abc import Sequence

from surefoot.errors import (
    AccessRefused,
    ChunkMissing,
    CopyRefused,
    TierError,
)
from surefoot.memory_server import keys
from surefoot.memory_server.connection import Credentials, Wire, explained
from surefoot.memory_server.fenced_calls import FencedCalls, HolderIndex, text_of
from surefoot.protocol.checkpoints.records import CHUNK_BYTES, RankManifest
from surefoot.protocol.identities import Checkpoint, HolderEndpoint, RankSave

MAX_VALUE_BYTES = 64 * 1024 * 1024
"""The longest value that a server takes: `proto-max-bulk-len` in server.conf."""


class HolderClient:
    """Accesses one job's data on one holder; connects at the first call."""

    def __init__(self, endpoint: HolderEndpoint, job: str, credentials: Credentials, call_seconds: float = 1.0) -> None:
        self.endpoint = endpoint
        self.calls = FencedCalls(endpoint, job)
        self._job = job
        near = credentials.socket_to(endpoint.server_id)
        self._damaged: tuple[str, ...] = ()
        self._wire = Wire(endpoint.host, endpoint.port, credentials, call_seconds, endpoint.tls, near)

    def __str__(self) -> str:
        return str(self.endpoint.holder)

    @property
    def name(self) -> str:
        return f"memory:{self.endpoint.server_id}"

    # ---- decisions of the holder ------------------------------------------------------------------------------------

    def seal(self, epoch: int) -> None:
        """Makes the holder refuse writers older than `epoch`.

        Raises Fenced if it already knows a newer one.
        """
        self._wire.converse(self.calls.seal(epoch))

    def commit(self, manifest: RankManifest, writer_epoch: int, chunk_lengths: tuple[int, ...]) -> None:
        """Makes the rank save visible if all parts are complete; see `Tier.commit`."""
        self._wire.converse(self.calls.commit(manifest, writer_epoch, chunk_lengths))

    def drop(self, save: RankSave, writer_epoch: int, chunks: int) -> None:
        """Removes index entry and data in one step. Absent is success."""
        self._wire.converse(self.calls.drop(save, writer_epoch, chunks))

    def sweep(self, save: RankSave, writer_epoch: int, names: Sequence[str]) -> bool:
        """Removes data keys of a save; False: it has an index entry."""
        return self._wire.converse(self.calls.sweep(save, writer_epoch, names))

    def set_watermark(self, checkpoint: Checkpoint, writer_epoch: int) -> None:
        """Stores the newest checkpoint that is on enough holders, for later readers."""
        self._wire.converse(self.calls.set_watermark(checkpoint, writer_epoch))

    def index(self, only: Checkpoint | None = None) -> HolderIndex:
        """Fence, watermark and every visible rank save, as of one moment.

        `only`: the entries of this checkpoint alone are parsed.
        """
        return self._wire.converse(self.calls.index(only))

    def manifests(self) -> tuple[RankManifest, ...]:
        """Lists the manifests of visible rank saves.

        The names of entries that cannot be read are in `damaged` afterwards.
        """
        index = self.index()
        self._damaged = index.damaged
        return index.manifests

    def manifests_of(self, checkpoint: Checkpoint) -> tuple[RankManifest, ...]:
        """Lists the manifests of one checkpoint; `damaged` then speaks of it alone."""
        index = self.index(checkpoint)
        self._damaged = index.damaged
        return index.manifests

    def damaged(self) -> tuple[str, ...]:
        return self._damaged

    # ---- bytes ------------------------------------------------------------------------------------------------------

    def put_layout(self, digest: str, text: str) -> None:
        self._put(keys.layout(self._job, digest), text.encode(), "writing a layout")

    def put_chunk(self, save: RankSave, index: int, data: bytes | memoryview) -> None:
        self._put(keys.chunk(self._job, save, index), data, f"writing chunk {index} of {save}")

    def send_chunk(self, save: RankSave, index: int, data: bytes | memoryview) -> None:
        """Sends a chunk and waits for the reply to the one before.

        Otherwise as `put_chunk`: the holder stores one chunk while the next travels.
        """
        flat = data.cast("B") if isinstance(data, memoryview) else data
        with explained(str(self), f"writing chunk {index} of {save}"):
            self._wire.ask("SET", keys.chunk(self._job, save, index), flat)
            if self._wire.due > 1:
                self._wire.answer()

    def copy_chunk(self, source: RankSave, save: RankSave, index: int) -> bool:
        """Has Redis copy a chunk of another save; nothing of it travels.

        False: there is none of that name.
        """
        self.settle()
        named = keys.chunk(self._job, source, index), keys.chunk(self._job, save, index)
        try:
            with explained(str(self), f"copying chunk {index} of {source} for {save}"):
                return bool(self._wire.call("COPY", *named, "REPLACE"))
        except TierError as error:
            # an account of before may not, a server that only speaks like Redis may not know it: it takes what is sent
            if isinstance(error, AccessRefused) or type(error) is TierError:
                raise CopyRefused(str(error)) from error
            raise

    def settle(self) -> None:
        """Waits until all sent chunks are stored; raises as `put_chunk` does."""
        with explained(str(self), "writing chunks"):
            while self._wire.due:
                self._wire.answer()

    def put_digests(self, save: RankSave, data: bytes | memoryview) -> None:
        self._put(keys.digests(self._job, save), data, f"writing the digests of {save}")

    def put_values(self, save: RankSave, data: bytes | memoryview) -> None:
        self._put(keys.values(self._job, save), data, f"writing the values of {save}")

    def read_layout(self, digest: str) -> str:
        return self._wire.converse(self.calls.read_layout(digest))

    def read_values(self, save: RankSave) -> bytes:
        return self._get(keys.values(self._job, save), f"values of {save}")

    def read_digests(self, save: RankSave, offset: int, length: int) -> bytes:
        return self._range(keys.digests(self._job, save), offset, length, f"digests of {save}")

    def read_chunk(self, save: RankSave, index: int, offset: int, length: int) -> memoryview:
        found = memoryview(bytearray(length))
        if length:
            self._wire.forget()
            self.ask_chunk(save, index, offset, length)
            self.take_chunk(save, index, found)
        return found

    def ask_chunk(self, save: RankSave, index: int, offset: int, length: int) -> None:
        """Requests bytes that `take_chunk` reads, in the order of the requests."""
        with explained(str(self), f"asking for chunk {index} of {save}"):
            key = keys.chunk(self._job, save, index)
            self._wire.ask("GETRANGE", key, offset, offset + length - 1)

    def take_chunk(self, save: RankSave, index: int, into: memoryview) -> None:
        """Fills `into` with what was asked for longest ago."""
        with explained(str(self), f"reading chunk {index} of {save}"):
            length = self._wire.take(into)
        if length != len(into):
            raise ChunkMissing(f"{self} has {length} of {len(into)} bytes of chunk {index} of {save}")

    def close(self) -> None:
        """Closes the connection; a later call opens another."""
        self._wire.close()

    # ---- how --------------------------------------------------------------------------------------------------------

    def _put(self, key: str, data: bytes | memoryview, doing: str) -> None:
        flat = data.cast("B") if isinstance(data, memoryview) else data
        if len(flat) > MAX_VALUE_BYTES:  # the server would close the connection, and nobody knew why
            raise TierError(
                f"{doing}: {len(flat)} bytes, and a holder takes at most {MAX_VALUE_BYTES} in one value: keep large"
                " data in tensors, which are saved in chunks"
            )
        with explained(str(self), doing):
            self._wire.call("SET", key, flat)

    def _get(self, key: str, what: str) -> bytes:
        with explained(str(self), f"reading the {what}"):
            found = self._wire.call("GET", key)
        if found is None:
            raise ChunkMissing(f"{self} does not have the {what}")
        return text_of(found, str(self), what)

    def _range(self, key: str, offset: int, length: int, what: str) -> bytes:
        """In pieces of a chunk, so that no table is a reply for which the server cuts its reader off."""
        pieces = []
        for start in range(offset, offset + length, CHUNK_BYTES):
            last = min(start + CHUNK_BYTES, offset + length) - 1
            with explained(str(self), f"reading the {what}"):
                reply = self._wire.call("GETRANGE", key, start, last)
            piece = text_of(reply, str(self), what)
            if len(piece) != last - start + 1:
                raise ChunkMissing(f"{self} has {len(piece)} of {last - start + 1} bytes from {start} of the {what}")
            pieces.append(piece)
        return b"".join(pieces)
