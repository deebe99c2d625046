"""Writes, commits, reads and seals rank saves on one holder.

A `Tier`, used by drain and restore (under the job's account) and by the operator (under the administrator's). One
thread at a time per client; one is cheap (a connection, opened at the first call), so each stream or operator task
takes its own. Every call means the one instance that the endpoint names: a Redis that restarted since is another holder.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NoReturn

from surefoot.errors import (
    AccessDenied,
    ChunkMissing,
    CopyUnsupported,
    Fenced,
    InvalidServerReply,
    OutOfBounds,
    ProtocolError,
    TierError,
    TierUnavailable,
)
from surefoot.memory_server import scripts
from surefoot.memory_server.connection import (
    Credentials,
    Dialogue,
    RespConnection,
    translate_parse_errors,
    translate_redis_errors,
)
from surefoot.protocol import bounds
from surefoot.protocol.checkpoints.records import CHUNK_BYTES, RankManifest
from surefoot.protocol.identities import Checkpoint, MemoryServerEndpoint, RankSave

# ---- fenced calls ----------------------------------------------------------------------------------------------------
# Describes one job's calls to one holder instance, as dialogues. The decisions of the holder, by script, and the
# records that the operator reads. Used below and by the operator's event loop.

_KEYS = 500
"""In one call: a script runs alone on its server."""
_PARSED = 256
"""Entries that are read without a pause: some milliseconds of whoever has other jobs to look after too."""


@dataclass(frozen=True, slots=True)
class MemoryServerIndex:
    """Holds a holder's index; `damaged` names entries that cannot be read.

    `refused` says of those among them that break a bound which one.
    """

    fence: int
    watermark: Checkpoint | None
    manifests: tuple[RankManifest, ...]
    damaged: tuple[str, ...]
    refused: tuple[str, ...] = ()


Entries = dict[bytes, tuple[bytes, RankManifest | ProtocolError]]
"""Entries of an index by name, as they were sent and as they read, or why they cannot be read."""


class FencedCalls:
    """Describes calls that this one instance carries out for one job."""

    def __init__(self, endpoint: MemoryServerEndpoint, job: str) -> None:
        self._endpoint, self._job = endpoint, job
        self._read: tuple[Any, MemoryServerIndex] | None = None
        self._parsed: Entries = {}
        """Of the index that was read last."""

    def __str__(self) -> str:
        return str(self._endpoint.instance)

    def fence(self, epoch: int) -> Dialogue[None]:
        """Makes the holder refuse writers older than `epoch`.

        Raises Fenced if it already knows a newer one.
        """
        self._expect_ok((yield from self._run(scripts.SEAL, epoch, [], [])), f"sealing for epoch {epoch}")

    def commit(self, manifest: RankManifest, writer_epoch: int, chunk_lengths: tuple[int, ...]) -> Dialogue[None]:
        """Makes the rank save visible if all parts are complete; see `Tier.commit`."""
        save, text = manifest.save, manifest.to_json()
        where = [scripts.layout_key(self._job, manifest.layout), *scripts.data_of(self._job, save, manifest.chunks)]
        lengths = [manifest.digests_bytes, manifest.values_bytes, *chunk_lengths]
        if len(chunk_lengths) != manifest.chunks:
            raise ValueError(f"{save} has {manifest.chunks} chunks; {len(chunk_lengths)} lengths were given")
        doing = f"committing {save}"
        result = yield from self._run(
            scripts.COMMIT, writer_epoch, where, [scripts.index_field(save), text, "", *lengths]
        )
        if result[0] == "conflict" and len(result) < 2:
            self._rejected(result, doing)
        if result[0] == "conflict" and self._differs(result[1], manifest):
            # the entry there is damaged: replace exactly what was seen, so that a racing commit is not lost
            result = yield from self._run(
                scripts.COMMIT, writer_epoch, where, [scripts.index_field(save), text, result[1], *lengths]
            )
        elif result[0] == "conflict":
            # the same save, described at another time: repeat its own words, so that the fence is checked and raised
            result = yield from self._run(
                scripts.COMMIT, writer_epoch, where, [scripts.index_field(save), result[1], "", *lengths]
            )
        self._expect_ok(result, doing)

    def drop(self, save: RankSave, writer_epoch: int, chunks: int) -> Dialogue[None]:
        """Removes the index entry, then its data, some keys at a time. Absent is success.

        What an interrupted one leaves has no entry, and is swept.
        """
        names = scripts.names_of(self._job, save, chunks)
        first = list(islice(names, _KEYS))
        result = yield from self._run(scripts.DROP, writer_epoch, first, [scripts.index_field(save)])
        self._expect_ok(result, f"dropping {save}")
        yield from self.delete_uncommitted(save, writer_epoch, names)

    def delete_uncommitted(self, save: RankSave, writer_epoch: int, names: Iterable[str]) -> Dialogue[bool]:
        """Removes data keys of a save; False: it has an index entry.

        Keys that are gone already are no error.
        """
        doing = f"removing what is left of {save}"
        left = iter(names)
        while more := list(islice(left, _KEYS)):
            result = yield from self._run(scripts.SWEEP, writer_epoch, more, [scripts.index_field(save)])
            if result[0] == "indexed":
                return False
            self._expect_ok(result, doing)
        return True

    def set_watermark(self, checkpoint: Checkpoint, writer_epoch: int) -> Dialogue[None]:
        """Stores the newest checkpoint that is on enough holders, for later readers."""
        value = f"{checkpoint.generation}:{checkpoint.step}"
        result = yield from self._run(scripts.MARK, writer_epoch, [scripts.watermark_key(self._job)], [value])
        self._expect_ok(result, f"marking {checkpoint}")

    def index(
        self, only: Checkpoint | None = None, known: Entries | None = None, most_entries: int | None = None
    ) -> Dialogue[MemoryServerIndex]:
        """Fence, watermark and every visible rank save, as of one moment.

        What reads as before is not read again: most looks at an index find nothing new.

        Args:
            only: Whose entries alone are parsed, which is most of what an index costs; what was read before stays known.
            known: What was read of other holders, and this index adds to: each copy of a save has the same entry.
            most_entries: The administrator's bound, who reads for all jobs: a larger index raises OutOfBounds unread.
        """
        of_it = f"{only.generation}:{only.step}:".encode() if only is not None else b""
        script, limits = (scripts.READ, []) if most_entries is None else (scripts.LOOK, limits_of(most_entries))
        result = yield from self._run(script, 0, [scripts.watermark_key(self._job)], limits)
        self._expect_ok(result, "reading the index")
        if only is None and self._read is not None and self._read[0] == result:
            return self._read[1]
        with translate_parse_errors(str(self), "reading the index"):
            _, fence, watermark, entries = result
            found, damaged, refused = [], [], []
            before, parsed = self._parsed if known is None else known, Entries()
            for name, text in zip(entries[::2], entries[1::2], strict=True):
                if not name.startswith(of_it):
                    continue
                read = before.get(name)
                if read is None or read[0] != text:
                    read = (text, _manifest(name, text))
                    if len(parsed) % _PARSED == _PARSED - 1:
                        yield []
                parsed[name] = read
                if isinstance(read[1], RankManifest):
                    found.append(read[1])
                    continue
                entry = f"{self}: index entry {name.decode(errors='replace')[: bounds.MAX_KEY_BYTES]}"
                damaged.append(entry)
                if isinstance(read[1], OutOfBounds):
                    refused.append(f"{entry}: {read[1]}")
            marked = _watermark(watermark)
            if watermark and marked is None:
                damaged.append(f"{self}: watermark")  # a note, written again by whoever keeps house
            index = MemoryServerIndex(
                fence=int(fence or -1),
                watermark=marked,
                manifests=tuple(sorted(found, key=lambda m: m.save)),
                damaged=tuple(damaged),
                refused=tuple(refused),
            )
        if known is not None:
            known.update(parsed)
        if only is None:
            self._read, self._parsed = (result, index), parsed
        return index

    def read_layout(self, digest: str) -> Dialogue[str]:
        """Reads a layout record; its digest is the caller's to check.

        Raises OutOfBounds for one that is longer than any; no more than that is read of it.
        """
        with translate_redis_errors(str(self), f"reading the layout {digest}"):
            reply = yield ("GETRANGE", scripts.layout_key(self._job, digest), 0, bounds.MAX_LAYOUT_BYTES)
        record = text_of(reply, str(self), f"layout {digest}")
        if not record:
            raise ChunkMissing(f"{self} does not have the layout {digest}")
        name = f"{self}: layout {digest}"
        bounds.check_json(name, record, bounds.MAX_LAYOUT_BYTES, bounds.MAX_LAYOUT_VALUES)
        return record.decode(errors="replace")

    def _run(self, script: scripts.Script, epoch: int, more_keys: list[str], arguments: list[Any]) -> Dialogue[Any]:
        job = self._job
        named = [
            scripts.fence_key(job),
            scripts.instance_key(job),
            scripts.absent_key(job),
            scripts.index_key(job),
            *more_keys,
        ]
        call = [script.sha, len(named), *named, epoch, self._endpoint.instance.run_id, *arguments]
        with translate_redis_errors(str(self), f"running {script.name}"):
            result = yield ("EVALSHA", *call)
        with translate_parse_errors(str(self), f"running {script.name}"):
            return [result[0].decode(), *result[1:]]

    def _expect_ok(self, result: Any, doing: str) -> None:
        if result[0] != "ok":
            self._rejected(result, doing)

    def _rejected(self, result: Any, doing: str) -> NoReturn:
        with translate_parse_errors(str(self), doing):
            self._raise_rejection(result, doing)
        raise TierError(f"{self} answered {result[0][:60]!r} while {doing}: its scripts are of another version")

    def _raise_rejection(self, result: Any, doing: str) -> None:
        match result[0]:
            case "damaged":
                raise InvalidServerReply(
                    f"{self} refused {doing}: {result[1].decode(errors='replace')} is no number, it was overwritten or"
                    " damaged; restart that Redis, the other copies stay"
                )
            case "large":
                what, size, most = (part.decode(errors="replace") for part in result[1:4])
                raise OutOfBounds(f"{self} of job {self._job}", what, size, f"0 to {most}")
            case "fenced":
                raise Fenced(f"{self} refused {doing}: epoch {result[1].decode()} rules this job now")
            case "replaced":
                raise TierUnavailable(
                    f"{self} is gone while {doing}: the Redis there restarted and holds nothing of it"
                )
            case "missing":
                key, length = result[1].decode(), result[2].decode()
                raise ChunkMissing(f"{self} refused {doing}: {key} has {length} bytes, not what the manifest says")
            case "conflict":
                raise TierError(f"{self} refused {doing}: another save of that name is there, with other bytes")

    def _differs(self, entry: bytes, manifest: RankManifest) -> bool:
        """Whether the entry there is unreadable; raises if it is readable and describes other bytes."""
        with translate_parse_errors(str(self), f"committing {manifest.save}"):
            found = _manifest(scripts.index_field(manifest.save).encode(), entry)
        if isinstance(found, RankManifest) and not found.same_bytes_as(manifest):
            self._rejected(["conflict"], f"committing {manifest.save}")
        return not isinstance(found, RankManifest)


def limits_of(most_entries: int) -> list[int]:
    """ARGV of the scripts that bound what they read; see `scripts.LOOK`."""
    return [bounds.MAX_KEY_BYTES, min(most_entries, bounds.MAX_INDEX_ENTRIES), bounds.MAX_INDEX_BYTES]


def text_of(reply: Any, where: str, what: str) -> bytes:
    """Returns a string reply; raises HolderDamaged for any other."""
    if not isinstance(reply, bytes):
        raise InvalidServerReply(
            f"{where} answered {type(reply).__name__} where the {what} was asked for: it is no holder"
        )
    return reply


def _watermark(text: bytes) -> Checkpoint | None:
    """The watermark, or None if there is none or it cannot be read."""
    epoch, _, step = text.decode(errors="replace").partition(":")
    try:
        return Checkpoint(int(epoch), int(step)) if step else None
    except ValueError:
        return None


def _manifest(name: bytes, text: bytes) -> RankManifest | ProtocolError:
    """The manifest in an index entry; why it is none if it is damaged or not of that name."""
    try:
        manifest = RankManifest.from_json(text)
    except ProtocolError as error:
        return error.with_traceback(None)  # which would keep what was read, for as long as the entry stays
    return (
        manifest if scripts.index_field(manifest.save).encode() == name else ProtocolError("it describes another save")
    )


# ---- client ----------------------------------------------------------------------------------------------------------

MAX_VALUE_BYTES = 64 * 1024 * 1024
"""The longest value that a server takes: `proto-max-bulk-len` in server.conf."""


class MemoryServerClient:
    """Accesses one job's data on one holder; connects at the first call."""

    def __init__(
        self, endpoint: MemoryServerEndpoint, job: str, credentials: Credentials, call_seconds: float = 1.0
    ) -> None:
        self.endpoint = endpoint
        self.calls = FencedCalls(endpoint, job)
        self._job = job
        near = credentials.socket_to(endpoint.server_id)
        self._damaged: tuple[str, ...] = ()
        self._connection = RespConnection(endpoint.host, endpoint.port, credentials, call_seconds, endpoint.tls, near)

    def __str__(self) -> str:
        return str(self.endpoint.instance)

    @property
    def name(self) -> str:
        return f"memory:{self.endpoint.server_id}"

    # ---- decisions of the holder ------------------------------------------------------------------------------------

    def fence(self, epoch: int) -> None:
        """Makes the holder refuse writers older than `epoch`.

        Raises Fenced if it already knows a newer one.
        """
        self._connection.run_exchange(self.calls.fence(epoch))

    def commit(self, manifest: RankManifest, writer_epoch: int, chunk_lengths: tuple[int, ...]) -> None:
        """Makes the rank save visible if all parts are complete; see `Tier.commit`."""
        self._connection.run_exchange(self.calls.commit(manifest, writer_epoch, chunk_lengths))

    def drop(self, save: RankSave, writer_epoch: int, chunks: int) -> None:
        """Removes index entry and data in one step. Absent is success."""
        self._connection.run_exchange(self.calls.drop(save, writer_epoch, chunks))

    def delete_uncommitted(self, save: RankSave, writer_epoch: int, names: Sequence[str]) -> bool:
        """Removes data keys of a save; False: it has an index entry."""
        return self._connection.run_exchange(self.calls.delete_uncommitted(save, writer_epoch, names))

    def set_watermark(self, checkpoint: Checkpoint, writer_epoch: int) -> None:
        """Stores the newest checkpoint that is on enough holders, for later readers."""
        self._connection.run_exchange(self.calls.set_watermark(checkpoint, writer_epoch))

    def index(self, only: Checkpoint | None = None) -> MemoryServerIndex:
        """Fence, watermark and every visible rank save, as of one moment.

        `only`: the entries of this checkpoint alone are parsed.
        """
        return self._connection.run_exchange(self.calls.index(only))

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
        self._put(scripts.layout_key(self._job, digest), text.encode(), "writing a layout")

    def put_chunk(self, save: RankSave, index: int, data: bytes | memoryview) -> None:
        self._put(scripts.chunk_key(self._job, save, index), data, f"writing chunk {index} of {save}")

    def send_chunk(self, save: RankSave, index: int, data: bytes | memoryview) -> None:
        """Sends a chunk and waits for the reply to the one before.

        Otherwise as `put_chunk`: the holder stores one chunk while the next travels.
        """
        flat = data.cast("B") if isinstance(data, memoryview) else data
        with translate_redis_errors(str(self), f"writing chunk {index} of {save}"):
            self._connection.send("SET", scripts.chunk_key(self._job, save, index), flat)
            if self._connection.due > 1:
                self._connection.receive()

    def copy_chunk(self, source: RankSave, save: RankSave, index: int) -> bool:
        """Has Redis copy a chunk of another save; nothing of it travels.

        False: there is none of that name.
        """
        self.wait_stored()
        named = scripts.chunk_key(self._job, source, index), scripts.chunk_key(self._job, save, index)
        try:
            with translate_redis_errors(str(self), f"copying chunk {index} of {source} for {save}"):
                return bool(self._connection.call("COPY", *named, "REPLACE"))
        except TierError as error:
            # an account may not, a server that only speaks like Redis may not know it: it takes what is sent
            if isinstance(error, AccessDenied) or type(error) is TierError:
                raise CopyUnsupported(str(error)) from error
            raise

    def wait_stored(self) -> None:
        """Waits until all sent chunks are stored; raises as `put_chunk` does."""
        with translate_redis_errors(str(self), "writing chunks"):
            while self._connection.due:
                self._connection.receive()

    def put_digests(self, save: RankSave, data: bytes | memoryview) -> None:
        self._put(scripts.digests_key(self._job, save), data, f"writing the digests of {save}")

    def put_values(self, save: RankSave, data: bytes | memoryview) -> None:
        self._put(scripts.values_key(self._job, save), data, f"writing the values of {save}")

    def read_layout(self, digest: str) -> str:
        return self._connection.run_exchange(self.calls.read_layout(digest))

    def read_values(self, save: RankSave) -> bytes:
        return self._get(scripts.values_key(self._job, save), f"values of {save}")

    def read_digests(self, save: RankSave, offset: int, length: int) -> bytes:
        return self._range(scripts.digests_key(self._job, save), offset, length, f"digests of {save}")

    def read_chunk(self, save: RankSave, index: int, offset: int, length: int) -> memoryview:
        found = memoryview(bytearray(length))
        if length:
            self._connection.close_if_pending()
            self.request_chunk(save, index, offset, length)
            self.receive_chunk(save, index, found)
        return found

    def request_chunk(self, save: RankSave, index: int, offset: int, length: int) -> None:
        """Requests bytes that `take_chunk` reads, in the order of the requests."""
        with translate_redis_errors(str(self), f"asking for chunk {index} of {save}"):
            key = scripts.chunk_key(self._job, save, index)
            self._connection.send("GETRANGE", key, offset, offset + length - 1)

    def receive_chunk(self, save: RankSave, index: int, into: memoryview) -> None:
        """Fills `into` with what was asked for longest ago."""
        with translate_redis_errors(str(self), f"reading chunk {index} of {save}"):
            length = self._connection.receive_into(into)
        if length != len(into):
            raise ChunkMissing(f"{self} has {length} of {len(into)} bytes of chunk {index} of {save}")

    def close(self) -> None:
        """Closes the connection; a later call opens another."""
        self._connection.close()

    # ---- how --------------------------------------------------------------------------------------------------------

    def _put(self, key: str, data: bytes | memoryview, doing: str) -> None:
        flat = data.cast("B") if isinstance(data, memoryview) else data
        if len(flat) > MAX_VALUE_BYTES:  # the server would close the connection, and nobody knew why
            raise TierError(
                f"{doing}: {len(flat)} bytes, and a holder takes at most {MAX_VALUE_BYTES} in one value: keep large"
                " data in tensors, which are saved in chunks"
            )
        with translate_redis_errors(str(self), doing):
            self._connection.call("SET", key, flat)

    def _get(self, key: str, what: str) -> bytes:
        with translate_redis_errors(str(self), f"reading the {what}"):
            found = self._connection.call("GET", key)
        if found is None:
            raise ChunkMissing(f"{self} does not have the {what}")
        return text_of(found, str(self), what)

    def _range(self, key: str, offset: int, length: int, what: str) -> bytes:
        """In pieces of a chunk, so that no table is a reply for which the server cuts its reader off."""
        pieces = []
        for start in range(offset, offset + length, CHUNK_BYTES):
            last = min(start + CHUNK_BYTES, offset + length) - 1
            with translate_redis_errors(str(self), f"reading the {what}"):
                reply = self._connection.call("GETRANGE", key, start, last)
            piece = text_of(reply, str(self), what)
            if len(piece) != last - start + 1:
                raise ChunkMissing(f"{self} has {len(piece)} of {last - start + 1} bytes from {start} of the {what}")
            pieces.append(piece)
        return b"".join(pieces)
