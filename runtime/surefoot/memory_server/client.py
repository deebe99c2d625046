"""Reads, writes and fences rank saves on one memory server.

A `Tier`, used by the flush engine and by restores (under the job's account) and by the operator (under the
administrator's). A client serves one thread at a time. Clients are cheap (a connection, opened at the first call), so
each stream and each operator task has its own. Every call is for the one instance that the endpoint names; a Redis that
restarted since is another instance and rejects it.
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
from surefoot.protocol.checkpoints.records import MAX_CHUNK_BYTES, RankManifest
from surefoot.protocol.identities import Checkpoint, MemoryServerEndpoint, RankSave

# ---- fenced calls ----------------------------------------------------------------------------------------------------
# Describes one job's calls to one memory server instance, as dialogues: the scripts that decide on the server, and the
# records that the operator reads. Used by the client below and by the operator's event loop.

_MAX_KEYS_PER_CALL = 500
"""Keys per script call: a script blocks its server while it runs."""
_ENTRIES_PER_PAUSE = 256
"""Index entries that are parsed without a pause: some milliseconds of an event loop that serves other jobs, too."""


@dataclass(frozen=True, slots=True)
class MemoryServerIndex:
    """The index of one job on a memory server, as of one moment."""

    fence: int
    """Newest generation that fenced or committed; -1: none."""
    watermark: Checkpoint | None
    """Newest checkpoint that is known to be on enough servers; None: unknown."""
    manifests: tuple[RankManifest, ...]
    """Manifests of the complete rank saves, sorted by save."""
    damaged_entries: tuple[str, ...]
    """Names of the entries that cannot be read."""
    out_of_bounds: tuple[str, ...] = ()
    """Names of damaged entries with a number or size out of bounds, each with the reason."""


Entries = dict[bytes, tuple[bytes, RankManifest | ProtocolError]]
"""Parsed entries by name: their text, and the manifest or the error why it cannot be read."""


class FencedCalls:
    """Describes the calls of one job to one memory server instance."""

    def __init__(self, endpoint: MemoryServerEndpoint, job: str) -> None:
        self._endpoint, self._job = endpoint, job
        self._last_reading: tuple[Any, MemoryServerIndex] | None = None
        self._known_entries: Entries = {}
        """Entries of the last complete index."""

    def __str__(self) -> str:
        return str(self._endpoint.instance)

    def fence(self, generation: int) -> Dialogue[None]:
        """Makes the server reject writers of generations older than `epoch`.

        Raises:
            Fenced: The server is already fenced for a newer generation.
        """
        self._expect_ok(
            (yield from self._run_script(scripts.FENCE, generation, [], [])), f"fencing for generation {generation}"
        )

    def commit(self, manifest: RankManifest, writer_generation: int, chunk_lengths: tuple[int, ...]) -> Dialogue[None]:
        """Adds the rank save to the index if all its parts are stored completely; see `Tier.commit`."""
        save, text = manifest.save, manifest.to_json()
        keys = [
            scripts.layout_key(self._job, manifest.layout),
            *scripts.list_data_keys(self._job, save, manifest.chunks),
        ]
        lengths = [manifest.digests_bytes, manifest.values_bytes, *chunk_lengths]
        if len(chunk_lengths) != manifest.chunks:
            raise ValueError(f"{save} has {manifest.chunks} chunks, but {len(chunk_lengths)} chunk lengths were passed")
        doing = f"committing {save}"
        # try to add a new entry first: an entry that is there already is rare
        result = yield from self._run_script(
            scripts.COMMIT, writer_generation, keys, [scripts.index_field(save), text, "", *lengths]
        )
        if result[0] == "conflict" and len(result) < 2:
            self._raise_for_outcome(result, doing)
        if result[0] == "conflict" and self._is_entry_damaged(result[1], manifest):
            # the present entry is damaged: replace exactly this one, so that a concurrent commit is not lost
            result = yield from self._run_script(
                scripts.COMMIT, writer_generation, keys, [scripts.index_field(save), text, result[1], *lengths]
            )
        elif result[0] == "conflict":
            # the same save with another time: commit the present entry again, so that the fence is checked and raised
            result = yield from self._run_script(
                scripts.COMMIT, writer_generation, keys, [scripts.index_field(save), result[1], "", *lengths]
            )
        self._expect_ok(result, doing)

    def delete_save(self, save: RankSave, writer_generation: int, chunks: int) -> Dialogue[None]:
        """Removes the index entry of a save, and then its data in portions; a missing save is no error.

        Data that an interrupted call leaves has no index entry and is swept later.
        """
        names = scripts.iterate_data_keys(self._job, save, chunks)
        # the entry goes with the first portion: from then on nothing refers to the data
        first_names = list(islice(names, _MAX_KEYS_PER_CALL))
        result = yield from self._run_script(
            scripts.DELETE, writer_generation, first_names, [scripts.index_field(save)]
        )
        self._expect_ok(result, f"deleting {save}")
        yield from self.delete_uncommitted(save, writer_generation, names)

    def delete_uncommitted(self, save: RankSave, writer_generation: int, names: Iterable[str]) -> Dialogue[bool]:
        """Removes data keys of a save that is not committed; returns False if it has an index entry.

        Missing keys are no error.
        """
        doing = f"deleting uncommitted data of {save}"
        remaining = iter(names)
        while portion := list(islice(remaining, _MAX_KEYS_PER_CALL)):
            result = yield from self._run_script(
                scripts.DELETE_UNCOMMITTED, writer_generation, portion, [scripts.index_field(save)]
            )
            if result[0] == "indexed":
                return False
            self._expect_ok(result, doing)
        return True

    def set_watermark(self, checkpoint: Checkpoint, writer_generation: int) -> Dialogue[None]:
        """Stores the newest checkpoint that is on enough memory servers, for later readers."""
        value = f"{checkpoint.generation}:{checkpoint.step}"
        result = yield from self._run_script(
            scripts.SET_WATERMARK, writer_generation, [scripts.watermark_key(self._job)], [value]
        )
        self._expect_ok(result, f"storing the watermark {checkpoint}")

    def read_index(
        self, only: Checkpoint | None = None, known: Entries | None = None, max_entries: int | None = None
    ) -> Dialogue[MemoryServerIndex]:
        """Reads fence, watermark and all committed rank saves as of one moment.

        Entries that are unchanged since the last reading are not parsed again, as most readings find nothing new.

        Args:
            only: Parse only this checkpoint's entries, since parsing is most of the cost; None: parse all.
            known: Entries of other servers, to which this index adds its own: all copies of a save have the same entry.
            most_entries: Limit for the administrator, who reads for all jobs; None: no limit.

        Raises:
            OutOfBounds: The index is larger than `most_entries` allows; it is not transferred then.
        """
        name_prefix = f"{only.generation}:{only.step}:".encode() if only is not None else b""
        script, limits = (
            (scripts.READ, []) if max_entries is None else (scripts.READ_BOUNDED, script_limits(max_entries))
        )
        result = yield from self._run_script(script, 0, [scripts.watermark_key(self._job)], limits)
        self._expect_ok(result, "reading the index")
        # an unchanged reply, compared as bytes, needs no parsing at all
        if only is None and self._last_reading is not None and self._last_reading[0] == result:
            return self._last_reading[1]
        with translate_parse_errors(str(self), "reading the index"):
            _, fence, watermark, entries = result
            manifests, damaged, refused = [], [], []
            known_entries, parsed = self._known_entries if known is None else known, Entries()
            for name, text in zip(entries[::2], entries[1::2], strict=True):
                if not name.startswith(name_prefix):
                    continue
                parsed_entry = known_entries.get(name)
                if parsed_entry is None or parsed_entry[0] != text:
                    parsed_entry = (text, _parse_entry(name, text))
                    # an empty request lets the event loop serve other jobs in between
                    if len(parsed) % _ENTRIES_PER_PAUSE == _ENTRIES_PER_PAUSE - 1:
                        yield []
                parsed[name] = parsed_entry
                if isinstance(parsed_entry[1], RankManifest):
                    manifests.append(parsed_entry[1])
                    continue
                entry = f"{self}: index entry {name.decode(errors='replace')[: bounds.MAX_SERVER_VALUE_BYTES]}"
                damaged.append(entry)
                if isinstance(parsed_entry[1], OutOfBounds):
                    refused.append(f"{entry}: {parsed_entry[1]}")
            watermark_checkpoint = _parse_watermark(watermark)
            if watermark and watermark_checkpoint is None:
                damaged.append(f"{self}: watermark")  # harmless: the GC owner will write it again
            index = MemoryServerIndex(
                fence=int(fence or -1),
                watermark=watermark_checkpoint,
                manifests=tuple(sorted(manifests, key=lambda m: m.save)),
                damaged_entries=tuple(damaged),
                out_of_bounds=tuple(refused),
            )
        # shared only after the whole index was parsed, so that an error leaves nothing half known
        if known is not None:
            known.update(parsed)
        if only is None:
            self._last_reading, self._known_entries = (result, index), parsed
        return index

    def read_layout(self, digest: str) -> Dialogue[str]:
        """Reads a layout record, whose digest the caller checks.

        Raises:
            ChunkMissing: The server does not have it.
            OutOfBounds: It is longer than any layout record; no more than the limit is transferred.
        """
        with translate_redis_errors(str(self), f"reading the layout {digest}"):
            reply = yield ("GETRANGE", scripts.layout_key(self._job, digest), 0, bounds.MAX_LAYOUT_BYTES)
        record = require_string_reply(reply, str(self), f"layout {digest}")
        if not record:
            raise ChunkMissing(f"{self} does not have the layout {digest}")
        name = f"{self}: layout {digest}"
        bounds.require_json_in_bounds(name, record, bounds.MAX_LAYOUT_BYTES, bounds.MAX_LAYOUT_VALUES)
        return record.decode(errors="replace")

    def _run_script(
        self, script: scripts.Script, epoch: int, more_keys: list[str], arguments: list[Any]
    ) -> Dialogue[Any]:
        """Runs a script with the keys and arguments that all scripts share; returns its outcome and results."""
        job = self._job
        keys = [
            scripts.fence_key(job),
            scripts.instance_key(job),
            scripts.absent_key(job),
            scripts.index_key(job),
            *more_keys,
        ]
        call = [script.sha, len(keys), *keys, epoch, self._endpoint.instance.run_id, *arguments]
        with translate_redis_errors(str(self), f"running {script.name}"):
            result = yield ("EVALSHA", *call)
        with translate_parse_errors(str(self), f"running {script.name}"):
            return [result[0].decode(), *result[1:]]

    def _expect_ok(self, result: Any, doing: str) -> None:
        """Raises the error of a script's outcome other than `ok`."""
        if result[0] != "ok":
            self._raise_for_outcome(result, doing)

    def _raise_for_outcome(self, result: Any, doing: str) -> NoReturn:
        """Raises the error of a script's outcome."""
        with translate_parse_errors(str(self), doing):
            self._raise_known_outcome(result, doing)
        raise TierError(
            f"{self} replied {result[0][:60]!r} while {doing}: its scripts are of another version of surefoot"
        )

    def _raise_known_outcome(self, result: Any, doing: str) -> None:
        """Raises the error of a known outcome; returns if the outcome is unknown."""
        match result[0]:
            case "damaged":
                raise InvalidServerReply(
                    f"{self} rejected {doing}: {result[1].decode(errors='replace')} is not a number, it was overwritten or"
                    " damaged; restart that Redis, the other copies are not affected"
                )
            case "large":
                field, size, limit = (part.decode(errors="replace") for part in result[1:4])
                raise OutOfBounds(f"{self} of job {self._job}", field, size, f"0 to {limit}")
            case "fenced":
                raise Fenced(
                    f"{self} rejected {doing}: generation {result[1].decode()} of this job has replaced this one"
                )
            case "replaced":
                raise TierUnavailable(
                    f"{self} no longer exists, found while {doing}: its Redis restarted and lost all its data"
                )
            case "missing":
                key, length = result[1].decode(), result[2].decode()
                raise ChunkMissing(
                    f"{self} rejected {doing}: {key} has {length} bytes, not as many as the manifest states"
                )
            case "conflict":
                raise TierError(f"{self} rejected {doing}: another save with this name but other bytes is committed")

    def _is_entry_damaged(self, entry: bytes, manifest: RankManifest) -> bool:
        """Returns whether the present entry is damaged; raises TierError if it is intact and describes other bytes."""
        with translate_parse_errors(str(self), f"committing {manifest.save}"):
            present = _parse_entry(scripts.index_field(manifest.save).encode(), entry)
        if isinstance(present, RankManifest) and not present.has_same_bytes_as(manifest):
            self._raise_for_outcome(["conflict"], f"committing {manifest.save}")
        return not isinstance(present, RankManifest)


def script_limits(most_entries: int) -> list[int]:
    """Returns the ARGV of the scripts that limit their reading, see `scripts.LOOK`."""
    return [bounds.MAX_SERVER_VALUE_BYTES, min(most_entries, bounds.MAX_INDEX_ENTRIES), bounds.MAX_INDEX_BYTES]


def require_string_reply(reply: Any, where: str, what: str) -> bytes:
    """Returns a string reply; raises InvalidServerReply for any other."""
    if not isinstance(reply, bytes):
        raise InvalidServerReply(
            f"{where} replied with {type(reply).__name__} to a request for the {what}: it is not a memory server of surefoot"
        )
    return reply


def _parse_watermark(text: bytes) -> Checkpoint | None:
    """Parses a watermark; None if there is none or it is malformed."""
    generation_text, _, step_text = text.decode(errors="replace").partition(":")
    try:
        checkpoint = Checkpoint(int(generation_text), int(step_text))
    except ValueError:
        return None
    # no generation is 0 and no step negative: such a watermark is damaged, and deletes nothing
    return checkpoint if checkpoint.generation != 0 and checkpoint.step >= 0 else None


def _parse_entry(name: bytes, text: bytes) -> RankManifest | ProtocolError:
    """Parses an index entry; returns the error if it is damaged or describes another save than its name."""
    try:
        manifest = RankManifest.from_json(text)
    except ProtocolError as error:
        return error.with_traceback(None)  # the traceback would keep the text in memory as long as the entry
    return (
        manifest if scripts.index_field(manifest.save).encode() == name else ProtocolError("it describes another save")
    )


# ---- client ----------------------------------------------------------------------------------------------------------

MAX_VALUE_BYTES = 64 * 1024 * 1024
"""Longest value that a server accepts: `proto-max-bulk-len` in server.conf."""


class MemoryServerClient:
    """Accesses one job's data on one memory server; connects at the first call."""

    def __init__(
        self, endpoint: MemoryServerEndpoint, job: str, credentials: Credentials, call_seconds: float = 1.0
    ) -> None:
        self.endpoint = endpoint
        self.calls = FencedCalls(endpoint, job)
        self._job = job
        socket_path = credentials.socket_path_to(endpoint.server_id)
        self._damaged: tuple[str, ...] = ()
        self._connection = RespConnection(
            endpoint.host, endpoint.port, credentials, call_seconds, endpoint.tls, socket_path
        )

    def __str__(self) -> str:
        return str(self.endpoint.instance)

    @property
    def name(self) -> str:
        """Name of the tier in messages and reports."""
        return f"memory:{self.endpoint.server_id}"

    # ---- decisions of the server ------------------------------------------------------------------------------------

    def fence(self, generation: int) -> None:
        """Makes the server reject writers of generations older than `epoch`.

        Raises:
            Fenced: The server is already fenced for a newer generation.
        """
        self._connection.run_dialogue(self.calls.fence(generation))

    def commit(self, manifest: RankManifest, writer_generation: int, chunk_lengths: tuple[int, ...]) -> None:
        """Adds the rank save to the index if all its parts are stored completely; see `Tier.commit`."""
        self._connection.run_dialogue(self.calls.commit(manifest, writer_generation, chunk_lengths))

    def delete_save(self, save: RankSave, writer_generation: int, chunks: int) -> None:
        """Removes the index entry of a save, and then its data; a missing save is no error."""
        self._connection.run_dialogue(self.calls.delete_save(save, writer_generation, chunks))

    def delete_uncommitted(self, save: RankSave, writer_generation: int, names: Sequence[str]) -> bool:
        """Removes data keys of a save that is not committed; returns False if it has an index entry."""
        return self._connection.run_dialogue(self.calls.delete_uncommitted(save, writer_generation, names))

    def set_watermark(self, checkpoint: Checkpoint, writer_generation: int) -> None:
        """Stores the newest checkpoint that is on enough memory servers, for later readers."""
        self._connection.run_dialogue(self.calls.set_watermark(checkpoint, writer_generation))

    def read_index(self, only: Checkpoint | None = None) -> MemoryServerIndex:
        """Reads fence, watermark and all committed rank saves as of one moment; with `only`, those of one checkpoint."""
        return self._connection.run_dialogue(self.calls.read_index(only))

    def manifests(self) -> tuple[RankManifest, ...]:
        """Returns the manifests of all committed rank saves; afterwards `damaged` names the unreadable entries."""
        index = self.read_index()
        self._damaged = index.damaged_entries
        return index.manifests

    def manifests_of(self, checkpoint: Checkpoint) -> tuple[RankManifest, ...]:
        """Returns the manifests of one checkpoint; afterwards `damaged` names its unreadable entries."""
        index = self.read_index(checkpoint)
        self._damaged = index.damaged_entries
        return index.manifests

    def damaged(self) -> tuple[str, ...]:
        """Returns the names of the unreadable entries of the last listing."""
        return self._damaged

    # ---- bytes ------------------------------------------------------------------------------------------------------

    def put_layout(self, digest: str, text: str) -> None:
        """Stores a layout record under its digest."""
        self._store_value(scripts.layout_key(self._job, digest), text.encode(), "writing a layout")

    def put_chunk(self, save: RankSave, index: int, data: bytes | memoryview) -> None:
        """Stores one chunk of a save and waits for the reply."""
        self._store_value(scripts.chunk_key(self._job, save, index), data, f"writing chunk {index} of {save}")

    def send_chunk(self, save: RankSave, index: int, data: bytes | memoryview) -> None:
        """Sends a chunk and waits for the reply to the one before, so that one is stored while the next is sent.

        `wait_stored` waits for the last one. Raises as `put_chunk` does.
        """
        flat = data.cast("B") if isinstance(data, memoryview) else data
        with translate_redis_errors(str(self), f"writing chunk {index} of {save}"):
            self._connection.send("SET", scripts.chunk_key(self._job, save, index), flat)
            if self._connection.outstanding_count > 1:
                self._connection.receive()

    def copy_chunk(self, source: RankSave, save: RankSave, index: int) -> bool:
        """Makes the server copy a chunk of another save, without transferring it; returns False if that is missing."""
        self.wait_stored()
        keys = scripts.chunk_key(self._job, source, index), scripts.chunk_key(self._job, save, index)
        try:
            with translate_redis_errors(str(self), f"copying chunk {index} of {source} for {save}"):
                return bool(self._connection.call("COPY", *keys, "REPLACE"))
        except TierError as error:
            # the account may lack the right, or a server compatible with Redis the command: the caller sends the chunk
            if isinstance(error, AccessDenied) or type(error) is TierError:
                raise CopyUnsupported(str(error)) from error
            raise

    def wait_stored(self) -> None:
        """Waits until all sent chunks are stored; raises as `put_chunk` does."""
        with translate_redis_errors(str(self), "writing chunks"):
            while self._connection.outstanding_count:
                self._connection.receive()

    def put_digests(self, save: RankSave, data: bytes | memoryview) -> None:
        """Stores the digest table of a save."""
        self._store_value(scripts.digests_key(self._job, save), data, f"writing the digests of {save}")

    def put_values(self, save: RankSave, data: bytes | memoryview) -> None:
        """Stores the plain values of a save."""
        self._store_value(scripts.values_key(self._job, save), data, f"writing the values of {save}")

    def read_layout(self, digest: str) -> str:
        """Reads a layout record, whose digest the caller checks."""
        return self._connection.run_dialogue(self.calls.read_layout(digest))

    def read_values(self, save: RankSave) -> bytes:
        """Reads the plain values of a save."""
        return self._read_value(scripts.values_key(self._job, save), f"values of {save}")

    def read_digests(self, save: RankSave, offset: int, length: int) -> bytes:
        """Reads a part of a save's digest table; offset and length in bytes."""
        return self._read_range(scripts.digests_key(self._job, save), offset, length, f"digests of {save}")

    def read_chunk(self, save: RankSave, index: int, offset: int, length: int) -> memoryview:
        """Reads a part of a chunk; offset and length in bytes."""
        chunk = memoryview(bytearray(length))
        if length:
            self._connection.close_if_pending()
            self.request_chunk(save, index, offset, length)
            self.receive_chunk(save, index, chunk)
        return chunk

    def request_chunk(self, save: RankSave, index: int, offset: int, length: int) -> None:
        """Requests a part of a chunk; `receive_chunk` reads the replies in the order of the requests."""
        with translate_redis_errors(str(self), f"asking for chunk {index} of {save}"):
            key = scripts.chunk_key(self._job, save, index)
            self._connection.send("GETRANGE", key, offset, offset + length - 1)

    def receive_chunk(self, save: RankSave, index: int, into: memoryview) -> None:
        """Reads the reply to the oldest request into `into`."""
        with translate_redis_errors(str(self), f"reading chunk {index} of {save}"):
            length = self._connection.receive_into(into)
        if length != len(into):
            raise ChunkMissing(f"{self} has {length} of {len(into)} bytes of chunk {index} of {save}")

    def close(self) -> None:
        """Closes the connection; a later call opens another."""
        self._connection.close()

    # ---- single values ----------------------------------------------------------------------------------------------

    def _store_value(self, key: str, data: bytes | memoryview, doing: str) -> None:
        """Stores a value; raises TierError if it is longer than a server accepts."""
        flat = data.cast("B") if isinstance(data, memoryview) else data
        if len(flat) > MAX_VALUE_BYTES:  # the server would close the connection without a reason
            raise TierError(
                f"{doing}: the value has {len(flat)} bytes, and a memory server accepts at most {MAX_VALUE_BYTES}: keep"
                " large data in tensors, which are saved in chunks"
            )
        with translate_redis_errors(str(self), doing):
            self._connection.call("SET", key, flat)

    def _read_value(self, key: str, what: str) -> bytes:
        """Reads a value; raises ChunkMissing if there is none."""
        with translate_redis_errors(str(self), f"reading the {what}"):
            reply = self._connection.call("GET", key)
        if reply is None:
            raise ChunkMissing(f"{self} does not have the {what}")
        return require_string_reply(reply, str(self), what)

    def _read_range(self, key: str, offset: int, length: int, what: str) -> bytes:
        """Reads a part of a value in pieces; the server would disconnect a reader that takes too long for a large reply."""
        pieces = []
        for start in range(offset, offset + length, MAX_CHUNK_BYTES):
            last_byte = min(start + MAX_CHUNK_BYTES, offset + length) - 1
            with translate_redis_errors(str(self), f"reading the {what}"):
                reply = self._connection.call("GETRANGE", key, start, last_byte)
            piece = require_string_reply(reply, str(self), what)
            if len(piece) != last_byte - start + 1:
                raise ChunkMissing(
                    f"{self} has {len(piece)} of {last_byte - start + 1} bytes from {start} of the {what}"
                )
            pieces.append(piece)
        return b"".join(pieces)
