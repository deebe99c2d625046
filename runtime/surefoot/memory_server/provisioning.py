"""Creates and removes a job's account and keys on a holder.

The operator does so, with the administrator's account. All of it is idempotent, since scripts and accounts vanish with
a restart and a new leader provisions again. The account comes last: whoever can log in finds fence and scripts in
place.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import sha256
from itertools import count

import redis

from surefoot.errors import Fenced, InvalidServerReply, OutOfBounds, ProtocolError, TierError
from surefoot.memory_server import scripts
from surefoot.memory_server.client import limits_of
from surefoot.memory_server.connection import (
    Credentials,
    Dialogue,
    RespConnection,
    section_of,
    translate_parse_errors,
    translate_redis_errors,
)
from surefoot.protocol.bounds import MAX_INDEX_BYTES, MAX_INDEX_ENTRIES, MAX_LEFTOVER_KEYS
from surefoot.protocol.checkpoints.records import CHUNK_BYTES, RankManifest
from surefoot.protocol.identities import RankSave

# ---- servers of a job ------------------------------------------------------------------------------------------------
# Measures what a job holds on a server, and closes its account. The administrator's calls, under a quota. A closed
# account reads, drops and seals as before and writes nothing: restores go on, saves are refused by name.

WRITING = ("set", "copy", "hset")
"""The commands that a closed account lacks; without them no script of ours commits either."""

_SCAN_BATCH = 500


class JobUsage:
    """Measures and closes one job's holdings, in dialogues of an administrator."""

    def __init__(self, where: str, job: str) -> None:
        self._where, self._job = where, job

    def used_bytes(self) -> Dialogue[int]:
        """Sums the bytes of all the job's keys, whatever their type."""
        doing = f"measuring job {self._job}"
        with translate_parse_errors(self._where, doing), translate_redis_errors(self._where, doing):
            total, cursor = 0, 0
            while True:
                cursor, names = yield from scan_step(scripts.of_job(self._job), cursor)
                total += yield from _bytes_of(names)
                if cursor == 0:
                    return total

    def accounts(self) -> Dialogue[int]:
        """Number of jobs with an account on this server."""
        doing = "counting accounts"
        with translate_parse_errors(self._where, doing), translate_redis_errors(self._where, doing):
            return sum(name != b"default" for name in (yield ("ACL USERS",)))

    def close(self, account: Credentials) -> Dialogue[int]:
        """Revokes the account's write commands, then removes keys without index entry.

        Open connections lose them at once.

        Returns:
            How many keys were removed.
        """
        doing = f"closing the account of job {self._job}"
        with translate_parse_errors(self._where, doing), translate_redis_errors(self._where, doing):
            yield ("ACL SETUSER", account.user, *(f"-{name}" for name in WRITING))
            # nothing is committed any more, so what has no entry now never gets one
            needed = yield from self._needed()
            gone, cursor = 0, 0
            while True:
                cursor, names = yield from scan_step(scripts.of_job(self._job), cursor)
                left = [name for name in names if not needed(name.decode(errors="replace"))]
                for start in range(0, len(left), _SCAN_BATCH):
                    gone += int((yield ("UNLINK", *left[start : start + _SCAN_BATCH])))
                if cursor == 0:
                    return gone

    def open(self, account: Credentials) -> Dialogue[None]:
        """It writes again."""
        doing = f"opening the account of job {self._job}"
        with translate_parse_errors(self._where, doing), translate_redis_errors(self._where, doing):
            yield ("ACL SETUSER", account.user, *(f"+{name}" for name in WRITING))

    def _needed(self) -> Dialogue[Callable[[str], bool]]:
        """Judges names of keys: whether the index, or the job itself, needs them.

        Of an index that is larger than any nothing is read, and all is needed: it may be repaired.
        """
        job, index = self._job, scripts.index_key(self._job)
        if (yield ("HLEN", index)) > MAX_INDEX_ENTRIES:
            return lambda name: True
        if ((yield ("MEMORY USAGE", index, "SAMPLES", 0)) or 0) > MAX_INDEX_BYTES:
            return lambda name: True
        own = {scripts.fence_key(job), scripts.instance_key(job), index, scripts.watermark_key(job)}
        chunks: dict[str, int] = {}
        for number, (field, text) in enumerate(_pairs((yield ("HGETALL", index)))):
            if number % _SCAN_BATCH == _SCAN_BATCH - 1:
                yield []
            try:
                manifest = RankManifest.from_json(text)
            except ProtocolError:
                own.add(f"{scripts.of_job(job)}{field.decode(errors='replace')}")
                continue
            own.add(scripts.layout_key(job, manifest.layout))
            chunks[scripts.index_field(manifest.save)] = manifest.chunks

        def is_needed(name: str) -> bool:
            save, _, part = name.removeprefix(scripts.of_job(job)).rpartition(":")
            return name in own or (save in chunks and scripts.is_data_of(part, chunks[save]))

        return is_needed


def _bytes_of(names: list[bytes]) -> Dialogue[int]:
    lengths = (yield [("STRLEN", name) for name in names]) if names else []
    # an error: no string
    total = sum(int(length) for length in lengths if not isinstance(length, Exception))
    for name, length in zip(names, lengths, strict=True):
        if isinstance(length, Exception):
            total += int((yield ("MEMORY USAGE", name)) or 0)
    return total


def scan_step(prefix: str, cursor: int) -> Dialogue[tuple[int, list[bytes]]]:
    """Reads some names of keys below `prefix`, with the next cursor.

    Begins at cursor 0, and is over where 0 comes back.

    Raises:
        ValueError: the server's scan goes round in place.
    """
    answer = yield ("SCAN", cursor, "MATCH", f"{scripts.escape_pattern(prefix)}*", "COUNT", _SCAN_BATCH)
    asked, cursor = cursor, int(answer[0])
    if cursor and cursor == asked:
        raise ValueError(f"a scan that was asked on from {cursor} answers with {cursor}: it would never end")
    return cursor, answer[1]


def _pairs(flat: list[bytes]) -> Iterable[tuple[bytes, bytes]]:
    return zip(flat[::2], flat[1::2], strict=True)


# ---- provisioning ----------------------------------------------------------------------------------------------------

JOB_COMMANDS = (
    "get",
    "set",
    "copy",
    "getrange",
    "strlen",
    "hget",
    "hset",
    "hdel",
    "hgetall",
    "unlink",
    "evalsha",
    "ping",
)
"""All that a job's account may run, in scripts too. Nothing that lists keys: SCAN ignores an account's key patterns."""


INSTANCE_DIGITS = 12
"""Of a run id's 40: enough to tell the runs of one server apart, and a status of two thousand of them stays small."""


@dataclass(frozen=True, slots=True)
class ServerMemory:
    """A server's memory in bytes; `limit_bytes` 0 means none is set."""

    used_bytes: int
    limit_bytes: int


class AdminCalls:
    """Describes the administrator's calls to one server, as dialogues."""

    def __init__(self, host: str, port: int) -> None:
        self.where = f"the holder at {host}:{port}"

    def instance(self) -> Dialogue[str]:
        """The first digits of the run id, new with each start.

        It tells an empty holder from the one before it.
        """
        with translate_parse_errors(self.where, "naming its run"):
            return (yield from self._info("server"))["run_id"][:INSTANCE_DIGITS]

    def process(self) -> Dialogue[tuple[str, int]]:
        """Instance and process id of the server that answers here."""
        with translate_parse_errors(self.where, "naming its process"):
            info = yield from self._info("server")
            return info["run_id"][:INSTANCE_DIGITS], int(info["process_id"])

    def provision(self, job: str, account: Credentials, epoch: int) -> Dialogue[str]:
        """Makes this server a holder of `job`; returns its instance.

        The fence is `epoch` at least. Raises Fenced where a newer epoch rules: whoever asks is no longer the leader. An
        account without a user name is left out; that is for servers on loopback without accounts.
        """
        instance = yield from self.instance()
        named = [scripts.fence_key(job), scripts.instance_key(job), scripts.absent_key(job)]
        doing = f"provisioning job {job}"
        with translate_parse_errors(self.where, doing), translate_redis_errors(self.where, doing):
            loaded = yield [("SCRIPT LOAD", script.source) for script in scripts.ALL]
            for script, digest in zip(scripts.ALL, loaded, strict=True):
                if isinstance(digest, Exception):
                    raise digest
                if digest.decode() != script.sha:
                    raise TierError(f"{self.where} gave script {script.name} another digest: it is no Redis")
            result = yield ("EVALSHA", scripts.PROVISION.sha, len(named), *named, epoch, instance)
            if result[0] == b"fenced":
                raise Fenced(f"{self.where} is ruled by epoch {result[1].decode()} of job {job}, newer than {epoch}")
            if result[0] == b"damaged":
                raise InvalidServerReply(
                    f"{self.where}: {result[1].decode(errors='replace')} is no number, it was overwritten or damaged;"
                    " restart that Redis, the other copies stay"
                )
            if account.user:
                yield ("ACL SETUSER", account.user, *_rules(job, account.password))
        return instance

    def is_being_filled(self) -> Dialogue[bool]:
        """Returns whether this server's memory is being touched now.

        Waiting some seconds gives a faster holder.
        """
        with translate_redis_errors(self.where, "asking whether it is being filled"):
            return bool((yield ("EXISTS", scripts.FILLING_KEY)))

    def remove_job(self, job: str, user: str) -> Dialogue[None]:
        """Ends the job's account, then removes all its keys. Absent is success."""
        doing = f"removing job {job}"
        with translate_parse_errors(self.where, doing), translate_redis_errors(self.where, doing):
            if user:
                yield ("ACL DELUSER", user)
            cursor = 0
            while True:
                cursor, names = yield from scan_step(scripts.of_job(job), cursor)
                if names:
                    yield ("UNLINK", *names)
                if cursor == 0:
                    return

    def jobs(self) -> Dialogue[frozenset[str]]:
        """Uids of all jobs that have keys here."""
        with translate_parse_errors(self.where, "listing jobs"), translate_redis_errors(self.where, "listing jobs"):
            uids, cursor = set[str](), 0
            while True:
                cursor, names = yield from scan_step(scripts.KEY_PREFIX, cursor)
                uids |= scripts.jobs_of(map(_name, names))
                if cursor == 0:
                    return frozenset(uids)

    def unindexed(self, job: str) -> Dialogue[dict[RankSave, tuple[str, ...]]]:
        """Lists data keys without index entry, by rank save.

        They are of a save under way, or of one whose writer died. What is committed after the index was read is listed
        too: `sweep` refuses it. Of very many keys the first that a scan finds are listed, and the others next time.
        """
        doing = f"looking for leftovers of job {job}"
        leftovers: defaultdict[RankSave, list[str]] = defaultdict(list)
        with translate_parse_errors(self.where, doing), translate_redis_errors(self.where, doing):
            indexed = {_name(name) for name in (yield from self._fields(job))}
            cursor, listed = 0, 0
            while True:
                cursor, names = yield from scan_step(scripts.of_job(job), cursor)
                for name in map(_name, names):
                    field = name.removeprefix(scripts.of_job(job)).rpartition(":")[0]
                    if field not in indexed and (save := scripts.save_of(field)) is not None:
                        leftovers[save].append(name)
                        listed += 1
                if cursor == 0 or listed >= MAX_LEFTOVER_KEYS:
                    return {save: tuple(sorted(leftovers[save])) for save in sorted(leftovers)}

    def _fields(self, job: str) -> Dialogue[list[bytes]]:
        """The names of the job's index entries. Raises OutOfBounds for an index that is larger than any."""
        named = [
            scripts.fence_key(job),
            scripts.instance_key(job),
            scripts.absent_key(job),
            scripts.index_key(job),
            scripts.watermark_key(job),
        ]
        result = yield ("EVALSHA", scripts.FIELDS.sha, len(named), *named, 0, "", *limits_of(MAX_INDEX_ENTRIES))
        if result[0] == b"large":
            what, size, most = (part.decode(errors="replace") for part in result[1:4])
            raise OutOfBounds(f"{self.where} of job {job}", what, size, f"0 to {most}")
        return list(result[1])

    def memory(self) -> Dialogue[ServerMemory]:
        """Measures the whole server."""
        with translate_parse_errors(self.where, "measuring its memory"):
            info = yield from self._info("memory")
            return ServerMemory(int(info["used_memory"]), int(info["maxmemory"]))

    def job_usage(self, job: str) -> JobUsage:
        """The job's holdings here."""
        return JobUsage(self.where, job)

    def _info(self, section: str) -> Dialogue[dict[str, str]]:
        doing = f"reading {section} information"
        with translate_parse_errors(self.where, doing), translate_redis_errors(self.where, doing):
            return section_of((yield ("INFO", section)))


class MemoryServerAdmin:
    """Connects to one server as administrator; for one thread.

    Cheap to make. `tls_ca`: the authority of a server that speaks TLS; None: it does not. Its calls are those of
    `AdminCalls`, carried out.
    """

    def __init__(
        self, host: str, port: int, password: str, call_seconds: float = 1.0, tls_ca: str | None = None
    ) -> None:
        self._calls = AdminCalls(host, port)
        account = Credentials("", password, tls_ca or "")
        self._connection = RespConnection(host, port, account, call_seconds, tls_ca is not None)

    def instance(self) -> str:
        return self._connection.run_exchange(self._calls.instance())

    def process(self) -> tuple[str, int]:
        """Instance and process id of the server that answers here.

        It may not be the process that was just started.
        """
        return self._connection.run_exchange(self._calls.process())

    def provision(self, job: str, account: Credentials, epoch: int) -> str:
        """Makes this server a holder of `job`; see `AdminCalls.provision`."""
        return self._connection.run_exchange(self._calls.provision(job, account, epoch))

    def is_being_filled(self) -> bool:
        return self._connection.run_exchange(self._calls.is_being_filled())

    def remove_job(self, job: str, user: str) -> None:
        """Ends the job's account, then removes all its keys. Absent is success."""
        self._connection.run_exchange(self._calls.remove_job(job, user))

    def jobs(self) -> frozenset[str]:
        """Uids of all jobs that have keys here."""
        return self._connection.run_exchange(self._calls.jobs())

    def unindexed(self, job: str) -> dict[RankSave, tuple[str, ...]]:
        return self._connection.run_exchange(self._calls.unindexed(job))

    def memory(self) -> ServerMemory:
        return self._connection.run_exchange(self._calls.memory())

    def close(self) -> None:
        self._connection.close()


def _rules(job: str, password: str) -> list[str]:
    """The whole account, from nothing: replaces whatever was there under that name."""
    digest = sha256(password.encode()).hexdigest()
    return [
        "reset",
        "on",
        f"#{digest}",
        f"~{scripts.escape_pattern(scripts.of_job(job))}*",
        *(f"+{name}" for name in JOB_COMMANDS),
    ]


def _name(key: bytes) -> str:
    """A key's name; one that others wrote here and that is no text is none of ours, and matches nothing."""
    return key.decode(errors="replace")


# ---- prefaulting of memory -------------------------------------------------------------------------------------------
# Pre-touches a new Redis' memory by writing and removing chunk-sized values. No save pays for the pages then. Freed
# pages stay with the server (see MALLOC_ENVIRONMENT in `server`). Called where a server is started, and by the
# companion; `go_on` is asked between values.

VALUE_BYTES = CHUNK_BYTES + 64
"""What one value occupies: a whole class of the allocator."""
_FILL_BATCH = 16


def fill_memory(wire: RespConnection, size: int, go_on: Callable[[int], bool] = lambda written: True) -> int:
    """Touches up to `size` free bytes; returns how many.

    `go_on(values written)` may end it early.
    """
    payload = memoryview(bytes(CHUNK_BYTES))
    written = 0
    try:
        while (written + 1) * VALUE_BYTES <= size:
            if written % _FILL_BATCH == 0 and not go_on(written):
                break
            try:
                wire.call("SET", f"{scripts.FILL_PREFIX}{written}", payload)
            except redis.exceptions.OutOfMemoryError:
                break  # everything that there is has been touched
            written += 1
    finally:
        _remove(wire, written)
    return written * VALUE_BYTES


def _remove(wire: RespConnection, written: int) -> None:
    for start in range(0, written, _FILL_BATCH):
        # not UNLINK: the room is free again when this returns
        wire.call("DEL", *(f"{scripts.FILL_PREFIX}{i}" for i in range(start, min(start + _FILL_BATCH, written))))


def remove_filled_leftovers(wire: RespConnection) -> int:
    """Removes what an earlier fill left that was killed; how many values."""
    for first in count(step=_FILL_BATCH):
        if not wire.call("DEL", *(f"{scripts.FILL_PREFIX}{i}" for i in range(first, first + _FILL_BATCH))):
            return first
    raise AssertionError("count() has no end")
