"""Writes, commits, reads and seals rank saves on one holder.

A `Tier`, used by drain and restore (under the job's account) and by the operator (under the administrator's). One
thread at a time per client; one is cheap (a connection, opened at the first call), so each stream or operator task
takes its own. Every call means the one instance that the endpoint names: a Redis that restarted since is another holder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from surefoot.errors import (
    AccessRefused,
    ChunkMissing,
    CopyRefused,
    Fenced,
    HolderDamaged,
    ProtocolError,
    TierError,
    TierUnavailable,
)
from surefoot.holder import keys, scripts
from surefoot.holder.connection import Credentials, Wire, explained, understood
from surefoot.protocol.identities import Checkpoint, HolderEndpoint, RankSave
from surefoot.protocol.records import RankManifest

_KEYS = 500
"""In one call: a script runs alone on its server."""


@dataclass(frozen=True, slots=True)
class HolderIndex:
    """Holds a holder's index; `damaged` names entries that cannot be read."""

    fence: int
    watermark: Checkpoint | None
    manifests: tuple[RankManifest, ...]
    damaged: tuple[str, ...]


class HolderClient:
    """Accesses one job's data on one holder; connects at the first call."""

    def __init__(self, endpoint: HolderEndpoint, job: str, credentials: Credentials, call_seconds: float = 1.0) -> None:
        self.endpoint = endpoint
        self._job = job
        local = credentials.local
        near = local.socket if local is not None and local.node == endpoint.holder.node else ""
        self._damaged: tuple[str, ...] = ()
        self._wire = Wire(endpoint.host, endpoint.port, credentials, call_seconds, endpoint.tls, near)

    def __str__(self) -> str:
        return str(self.endpoint.holder)

    @property
    def name(self) -> str:
        return f"memory:{self.endpoint.holder.node}"

    # ---- decisions of the holder ------------------------------------------------------------------------------------

    def seal(self, epoch: int) -> None:
        """Makes the holder refuse writers older than `epoch`.

        Raises Fenced if it already knows a newer one.
        """
        self._expect_ok(self._run(scripts.SEAL, epoch, [], []), f"sealing for epoch {epoch}")

    def commit(self, manifest: RankManifest, writer_epoch: int, chunk_lengths: tuple[int, ...]) -> None:
        """Makes the rank save visible if all parts are complete; see `Tier.commit`."""
        save, text = manifest.save, manifest.to_json()
        where = [keys.layout(self._job, manifest.layout), *keys.data_of(self._job, save, manifest.chunks)]
        lengths = [manifest.digests_bytes, manifest.values_bytes, *chunk_lengths]
        if len(chunk_lengths) != manifest.chunks:
            raise ValueError(f"{save} has {manifest.chunks} chunks; {len(chunk_lengths)} lengths were given")
        doing = f"committing {save}"
        result = self._run(scripts.COMMIT, writer_epoch, where, [keys.field(save), text, "", *lengths])
        if result[0] == "conflict" and len(result) < 2:
            self._refused(result, doing)
        if result[0] == "conflict" and self._differs(result[1], manifest):
            # the entry there is damaged: replace exactly what was seen, so that a racing commit is not lost
            result = self._run(scripts.COMMIT, writer_epoch, where, [keys.field(save), text, result[1], *lengths])
        elif result[0] == "conflict":
            # the same save, described at another time: repeat its own words, so that the fence is checked and raised
            result = self._run(scripts.COMMIT, writer_epoch, where, [keys.field(save), result[1], "", *lengths])
        self._expect_ok(result, doing)

    def drop(self, save: RankSave, writer_epoch: int, chunks: int) -> None:
        """Removes index entry and data in one step. Absent is success."""
        result = self._run(scripts.DROP, writer_epoch, keys.data_of(self._job, save, chunks), [keys.field(save)])
        self._expect_ok(result, f"dropping {save}")

    def sweep(self, save: RankSave, writer_epoch: int, names: Sequence[str]) -> bool:
        """Removes data keys of a save; False: it has an index entry.

        Keys that are gone already are no error.
        """
        doing = f"removing what is left of {save}"
        for start in range(0, len(names), _KEYS):
            more = list(names[start : start + _KEYS])
            result = self._run(scripts.SWEEP, writer_epoch, more, [keys.field(save)])
            if result[0] == "indexed":
                return False
            self._expect_ok(result, doing)
        return True

    def set_watermark(self, checkpoint: Checkpoint, writer_epoch: int) -> None:
        """Stores the newest checkpoint that is on enough holders, for later readers."""
        value = f"{checkpoint.epoch}:{checkpoint.step}"
        result = self._run(scripts.MARK, writer_epoch, [keys.watermark(self._job)], [value])
        self._expect_ok(result, f"marking {checkpoint}")

    def index(self) -> HolderIndex:
        """Fence, watermark and every visible rank save, as of one moment."""
        result = self._run(scripts.READ, 0, [keys.watermark(self._job)], [])
        self._expect_ok(result, "reading the index")
        with understood(str(self), "reading the index"):
            _, fence, watermark, entries = result
            found, damaged = [], []
            for name, text in zip(entries[::2], entries[1::2], strict=True):
                manifest = _manifest(name, text)
                if manifest is None:
                    damaged.append(f"{self}: index entry {name.decode(errors='replace')}")
                else:
                    found.append(manifest)
            marked = _watermark(watermark)
            if watermark and marked is None:
                damaged.append(f"{self}: watermark")  # a note, written again by whoever keeps house
            return HolderIndex(
                fence=int(fence or -1),
                watermark=marked,
                manifests=tuple(sorted(found, key=lambda m: m.save)),
                damaged=tuple(damaged),
            )

    def manifests(self) -> tuple[RankManifest, ...]:
        """Lists the manifests of visible rank saves.

        The names of entries that cannot be read are in `damaged` afterwards.
        """
        index = self.index()
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
        return self._get(keys.layout(self._job, digest), f"layout {digest}").decode(errors="replace")

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
        with explained(str(self), doing):
            self._wire.call("SET", key, flat)

    def _get(self, key: str, what: str) -> bytes:
        with explained(str(self), f"reading the {what}"):
            found = self._wire.call("GET", key)
        if found is None:
            raise ChunkMissing(f"{self} does not have the {what}")
        return self._bytes(found, what)

    def _range(self, key: str, offset: int, length: int, what: str) -> bytes:
        if length == 0:
            return b""
        with explained(str(self), f"reading the {what}"):
            reply = self._wire.call("GETRANGE", key, offset, offset + length - 1)
        found = self._bytes(reply, what)
        if len(found) != length:
            raise ChunkMissing(f"{self} has {len(found)} of {length} bytes from {offset} of the {what}")
        return found

    def _bytes(self, reply: Any, what: str) -> bytes:
        if not isinstance(reply, bytes):
            raise HolderDamaged(
                f"{self} answered {type(reply).__name__} where the {what} was asked for: it is no holder"
            )
        return reply

    def _run(self, script: scripts.Script, epoch: int, more_keys: list[str], arguments: list[Any]) -> Any:
        job = self._job
        named = [keys.fence(job), keys.instance(job), keys.absent(job), keys.index(job), *more_keys]
        call = [script.sha, len(named), *named, epoch, self.endpoint.holder.instance, *arguments]
        with explained(str(self), f"running {script.name}"):
            result = self._wire.call("EVALSHA", *call)
        with understood(str(self), f"running {script.name}"):
            return [result[0].decode(), *result[1:]]

    def _expect_ok(self, result: Any, doing: str) -> None:
        if result[0] != "ok":
            self._refused(result, doing)

    def _refused(self, result: Any, doing: str) -> NoReturn:
        with understood(str(self), doing):
            self._raise_refusal(result, doing)
        raise TierError(f"{self} answered {result[0][:60]!r} while {doing}: its scripts are of another version")

    def _raise_refusal(self, result: Any, doing: str) -> None:
        match result[0]:
            case "damaged":
                raise HolderDamaged(
                    f"{self} refused {doing}: {result[1].decode(errors='replace')} is no number, it was overwritten or"
                    " damaged; restart that Redis, the other copies stay"
                )
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
        with understood(str(self), f"committing {manifest.save}"):
            found = _manifest(keys.field(manifest.save).encode(), entry)
        if found is not None and not found.same_bytes_as(manifest):
            self._refused(["conflict"], f"committing {manifest.save}")
        return found is None


def _watermark(text: bytes) -> Checkpoint | None:
    """The watermark, or None if there is none or it cannot be read."""
    epoch, _, step = text.decode(errors="replace").partition(":")
    try:
        return Checkpoint(int(epoch), int(step)) if step else None
    except ValueError:
        return None


def _manifest(name: bytes, text: bytes) -> RankManifest | None:
    """The manifest in an index entry; None if it is damaged or not of that name."""
    try:
        manifest = RankManifest.from_json(text)
    except ProtocolError:
        return None
    return manifest if keys.field(manifest.save).encode() == name else None
