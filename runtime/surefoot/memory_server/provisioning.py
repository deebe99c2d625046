"""Creates and removes a job's account and keys on a memory server.

The operator does this with the administrator's account. All calls are idempotent, since scripts and accounts vanish with
a restart and every new leader provisions again. The account is created last, so that a client that can log in finds
fence and scripts in place.
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
from surefoot.memory_server.client import script_limits
from surefoot.memory_server.connection import (
    Credentials,
    Dialogue,
    RespConnection,
    parse_info_section,
    translate_parse_errors,
    translate_redis_errors,
)
from surefoot.protocol.bounds import MAX_INDEX_BYTES, MAX_INDEX_ENTRIES, MAX_LEFTOVER_KEYS
from surefoot.protocol.checkpoints.records import MAX_CHUNK_BYTES, RankManifest
from surefoot.protocol.identities import RankSave

# ---- quota of a job --------------------------------------------------------------------------------------------------
# The administrator's calls that enforce a quota: they measure a job's data on a server, and close its account for
# writing. A closed account can still read, delete and fence: restores work, and saves are rejected with the reason.

WRITE_COMMANDS = ("set", "copy", "hset")
"""The commands that a closed account lacks; without them no script can commit, either."""

_SCAN_BATCH = 500
"""Keys per call while all keys of a job are scanned."""


class JobUsage:
    """Measures and limits the data of one job on one server, in dialogues of the administrator."""

    def __init__(self, where: str, job: str) -> None:
        self._where, self._job = where, job

    def measure_bytes(self) -> Dialogue[int]:
        """Returns the bytes of all keys of the job, whatever their type."""
        doing = f"measuring job {self._job}"
        with translate_parse_errors(self._where, doing), translate_redis_errors(self._where, doing):
            total, cursor = 0, 0
            while True:
                cursor, names = yield from scan_keys(scripts.job_prefix(self._job), cursor)
                total += yield from _measure_keys(names)
                if cursor == 0:
                    return total

    def count_accounts(self) -> Dialogue[int]:
        """Returns the number of jobs with an account on this server."""
        doing = "counting accounts"
        with translate_parse_errors(self._where, doing), translate_redis_errors(self._where, doing):
            return sum(name != b"default" for name in (yield ("ACL USERS",)))

    def close_account(self, account: Credentials) -> Dialogue[int]:
        """Revokes the account's write commands, also on open connections, and then removes keys without index entry.

        Returns:
            The number of removed keys.
        """
        doing = f"closing the account of job {self._job}"
        with translate_parse_errors(self._where, doing), translate_redis_errors(self._where, doing):
            yield ("ACL SETUSER", account.user, *(f"-{name}" for name in WRITE_COMMANDS))
            # nothing can be committed from here on, so data without an entry will never get one
            needed = yield from self._needed_keys()
            removed_count, cursor = 0, 0
            while True:
                cursor, names = yield from scan_keys(scripts.job_prefix(self._job), cursor)
                unneeded = [name for name in names if not needed(name.decode(errors="replace"))]
                for start in range(0, len(unneeded), _SCAN_BATCH):
                    removed_count += int((yield ("UNLINK", *unneeded[start : start + _SCAN_BATCH])))
                if cursor == 0:
                    return removed_count

    def reopen_account(self, account: Credentials) -> Dialogue[None]:
        """Gives the account its write commands back."""
        doing = f"opening the account of job {self._job}"
        with translate_parse_errors(self._where, doing), translate_redis_errors(self._where, doing):
            yield ("ACL SETUSER", account.user, *(f"+{name}" for name in WRITE_COMMANDS))

    def _needed_keys(self) -> Dialogue[Callable[[str], bool]]:
        """Returns a function that decides whether the index, or the job itself, needs a key of this name.

        An index larger than the limits is not read, and all keys count as needed, since the index may be repaired.
        """
        job, index = self._job, scripts.index_key(self._job)
        if (yield ("HLEN", index)) > MAX_INDEX_ENTRIES:
            return lambda name: True
        if ((yield ("MEMORY USAGE", index, "SAMPLES", 0)) or 0) > MAX_INDEX_BYTES:
            return lambda name: True
        needed_names = {scripts.fence_key(job), scripts.instance_key(job), index, scripts.watermark_key(job)}
        chunks: dict[str, int] = {}
        for number, (field, text) in enumerate(_pairs((yield ("HGETALL", index)))):
            if number % _SCAN_BATCH == _SCAN_BATCH - 1:
                yield []
            try:
                manifest = RankManifest.from_json(text)
            except ProtocolError:
                needed_names.add(f"{scripts.job_prefix(job)}{field.decode(errors='replace')}")
                continue
            needed_names.add(scripts.layout_key(job, manifest.layout))
            chunks[scripts.index_field(manifest.save)] = manifest.chunks

        def is_needed(name: str) -> bool:
            save, _, part = name.removeprefix(scripts.job_prefix(job)).rpartition(":")
            return name in needed_names or (save in chunks and scripts.is_data_key_part(part, chunks[save]))

        return is_needed


def _measure_keys(names: list[bytes]) -> Dialogue[int]:
    """Sums the bytes of these keys."""
    lengths = (yield [("STRLEN", name) for name in names]) if names else []
    # STRLEN fails for keys that are no strings: these are measured below
    total = sum(int(length) for length in lengths if not isinstance(length, Exception))
    for name, length in zip(names, lengths, strict=True):
        if isinstance(length, Exception):
            total += int((yield ("MEMORY USAGE", name)) or 0)
    return total


def scan_keys(prefix: str, cursor: int) -> Dialogue[tuple[int, list[bytes]]]:
    """Reads some names of keys with this prefix, and the next cursor; a scan starts and ends with cursor 0.

    Raises:
        ValueError: The server returned the same cursor again, so the scan would never end.
    """
    reply = yield ("SCAN", cursor, "MATCH", f"{scripts.escape_pattern(prefix)}*", "COUNT", _SCAN_BATCH)
    previous_cursor, cursor = cursor, int(reply[0])
    if cursor and cursor == previous_cursor:
        raise ValueError(f"a scan from cursor {cursor} returned the same cursor {cursor}: it would never end")
    return cursor, reply[1]


def _pairs(flat: list[bytes]) -> Iterable[tuple[bytes, bytes]]:
    """Pairs the alternating names and values of a hash."""
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
"""Commands of a job's account, also within scripts. None of them lists keys: SCAN ignores an account's key patterns."""


INSTANCE_DIGITS = 12
"""Digits of a run id (of 40) that are stored: enough to distinguish runs, and short in a status with 2,000 servers."""


@dataclass(frozen=True, slots=True)
class ServerMemory:
    """The memory of a server."""

    used_bytes: int
    """Bytes in use."""
    limit_bytes: int
    """Limit in bytes (`maxmemory`); 0: none is set."""


class AdminCalls:
    """Describes the administrator's calls to one server, as dialogues."""

    def __init__(self, host: str, port: int) -> None:
        self.where = f"the memory server at {host}:{port}"

    def read_instance(self) -> Dialogue[str]:
        """Returns the first digits of the server's run id, which is new after each start."""
        with translate_parse_errors(self.where, "naming its run"):
            return (yield from self._read_info("server"))["run_id"][:INSTANCE_DIGITS]

    def read_instance_and_pid(self) -> Dialogue[tuple[str, int]]:
        """Returns instance and process id of the server that replies at this address."""
        with translate_parse_errors(self.where, "naming its process"):
            info = yield from self._read_info("server")
            return info["run_id"][:INSTANCE_DIGITS], int(info["process_id"])

    def provision(self, job: str, account: Credentials, generation: int) -> Dialogue[str]:
        """Makes this server a memory server of the job; returns its instance.

        Args:
            job: Uid of the job.
            account: The job's account; without a user name none is created (servers without accounts, on loopback).
            epoch: The least fence of the job.

        Raises:
            Fenced: The server is fenced for a newer generation, so the caller is no longer the leader.
        """
        instance = yield from self.read_instance()
        keys = [scripts.fence_key(job), scripts.instance_key(job), scripts.absent_key(job)]
        doing = f"provisioning job {job}"
        with translate_parse_errors(self.where, doing), translate_redis_errors(self.where, doing):
            # scripts are lost with a restart, and loading them again is harmless
            loaded = yield [("SCRIPT LOAD", script.source) for script in scripts.ALL]
            for script, digest in zip(scripts.ALL, loaded, strict=True):
                if isinstance(digest, Exception):
                    raise digest
                if digest.decode() != script.sha:
                    raise TierError(f"{self.where} computed another digest for script {script.name}: it is not a Redis")
            result = yield ("EVALSHA", scripts.PROVISION.sha, len(keys), *keys, generation, instance)
            if result[0] == b"fenced":
                raise Fenced(
                    f"{self.where} is fenced for generation {result[1].decode()} of job {job}, which is newer than {generation}"
                )
            if result[0] == b"damaged":
                raise InvalidServerReply(
                    f"{self.where}: {result[1].decode(errors='replace')} is not a number, it was overwritten or damaged;"
                    " restart that Redis, the other copies are not affected"
                )
            # last, so that no client can log in before fence and scripts are in place
            if account.user:
                yield ("ACL SETUSER", account.user, *_account_rules(job, account.password))
        return instance

    def is_prefaulting(self) -> Dialogue[bool]:
        """Returns whether the server is prefaulting its memory. It will be faster after these seconds."""
        with translate_redis_errors(self.where, "checking whether it prefaults its memory"):
            return bool((yield ("EXISTS", scripts.PREFAULTING_KEY)))

    def remove_job(self, job: str, user: str) -> Dialogue[None]:
        """Removes the job's account and then all its keys; a missing account or key is no error."""
        doing = f"removing job {job}"
        with translate_parse_errors(self.where, doing), translate_redis_errors(self.where, doing):
            # the account first: a worker that is still connected cannot write new keys after the scan
            if user:
                yield ("ACL DELUSER", user)
            cursor = 0
            while True:
                cursor, names = yield from scan_keys(scripts.job_prefix(job), cursor)
                if names:
                    yield ("UNLINK", *names)
                if cursor == 0:
                    return

    def list_jobs(self) -> Dialogue[frozenset[str]]:
        """Returns the uids of all jobs that have keys here."""
        with translate_parse_errors(self.where, "listing jobs"), translate_redis_errors(self.where, "listing jobs"):
            uids, cursor = set[str](), 0
            while True:
                cursor, names = yield from scan_keys(scripts.KEY_PREFIX, cursor)
                uids |= scripts.job_uids_of(map(_decode_name, names))
                if cursor == 0:
                    return frozenset(uids)

    def list_unindexed(self, job: str) -> Dialogue[dict[RankSave, tuple[str, ...]]]:
        """Lists data keys without index entry, by rank save.

        They belong to a save in progress, or to one whose writer died. A save that is committed after the index was
        read may be listed, too, and `SWEEP` will not delete it. Stops after a limit of keys; a later call lists others.
        """
        doing = f"looking for leftovers of job {job}"
        leftovers: defaultdict[RankSave, list[str]] = defaultdict(list)
        with translate_parse_errors(self.where, doing), translate_redis_errors(self.where, doing):
            # the index before the keys: a save that is committed in between is listed, and SWEEP spares it
            indexed = {_decode_name(name) for name in (yield from self._index_fields(job))}
            cursor, listed_count = 0, 0
            while True:
                cursor, names = yield from scan_keys(scripts.job_prefix(job), cursor)
                for name in map(_decode_name, names):
                    field = name.removeprefix(scripts.job_prefix(job)).rpartition(":")[0]
                    if field not in indexed and (save := scripts.parse_index_field(field)) is not None:
                        leftovers[save].append(name)
                        listed_count += 1
                if cursor == 0 or listed_count >= MAX_LEFTOVER_KEYS:
                    return {save: tuple(sorted(leftovers[save])) for save in sorted(leftovers)}

    def _index_fields(self, job: str) -> Dialogue[list[bytes]]:
        """Returns the names of the job's index entries; raises OutOfBounds if the index is larger than the limits."""
        keys = [
            scripts.fence_key(job),
            scripts.instance_key(job),
            scripts.absent_key(job),
            scripts.index_key(job),
            scripts.watermark_key(job),
        ]
        result = yield ("EVALSHA", scripts.READ_FIELDS.sha, len(keys), *keys, 0, "", *script_limits(MAX_INDEX_ENTRIES))
        if result[0] == b"large":
            field, size, limit = (part.decode(errors="replace") for part in result[1:4])
            raise OutOfBounds(f"{self.where} of job {job}", field, size, f"0 to {limit}")
        return list(result[1])

    def measure_memory(self) -> Dialogue[ServerMemory]:
        """Returns the memory of the whole server."""
        with translate_parse_errors(self.where, "measuring its memory"):
            info = yield from self._read_info("memory")
            return ServerMemory(int(info["used_memory"]), int(info["maxmemory"]))

    def job_usage(self, job: str) -> JobUsage:
        """Returns the calls that measure and limit the job's data here."""
        return JobUsage(self.where, job)

    def _read_info(self, section: str) -> Dialogue[dict[str, str]]:
        """Reads one section of INFO."""
        doing = f"reading {section} information"
        with translate_parse_errors(self.where, doing), translate_redis_errors(self.where, doing):
            return parse_info_section((yield ("INFO", section)))


class MemoryServerAdmin:
    """Runs the calls of `AdminCalls` on a connection of its own; for one thread, and cheap to make.

    Args:
        host: Address of the server.
        port: Port of the server.
        password: The administrator's password.
        call_seconds: Time limit for each call.
        tls_ca: PEM of the certificate authority of a server with TLS; None: it has no TLS.
    """

    def __init__(
        self, host: str, port: int, password: str, call_seconds: float = 1.0, tls_ca: str | None = None
    ) -> None:
        self._calls = AdminCalls(host, port)
        account = Credentials("", password, tls_ca or "")
        self._connection = RespConnection(host, port, account, call_seconds, tls_ca is not None)

    def read_instance(self) -> str:
        """Returns the first digits of the server's run id, which is new after each start."""
        return self._connection.run_dialogue(self._calls.read_instance())

    def read_instance_and_pid(self) -> tuple[str, int]:
        """Returns instance and process id of the server that replies here, which may not be the one just started."""
        return self._connection.run_dialogue(self._calls.read_instance_and_pid())

    def provision(self, job: str, account: Credentials, generation: int) -> str:
        """Makes this server a memory server of the job; see `AdminCalls.provision`."""
        return self._connection.run_dialogue(self._calls.provision(job, account, generation))

    def is_prefaulting(self) -> bool:
        """Returns whether the server is prefaulting its memory."""
        return self._connection.run_dialogue(self._calls.is_prefaulting())

    def remove_job(self, job: str, user: str) -> None:
        """Removes the job's account and then all its keys; a missing account or key is no error."""
        self._connection.run_dialogue(self._calls.remove_job(job, user))

    def list_jobs(self) -> frozenset[str]:
        """Returns the uids of all jobs that have keys here."""
        return self._connection.run_dialogue(self._calls.list_jobs())

    def list_unindexed(self, job: str) -> dict[RankSave, tuple[str, ...]]:
        """Lists data keys without index entry, by rank save; see `AdminCalls.unindexed`."""
        return self._connection.run_dialogue(self._calls.list_unindexed(job))

    def measure_memory(self) -> ServerMemory:
        """Returns the memory of the whole server."""
        return self._connection.run_dialogue(self._calls.measure_memory())

    def close(self) -> None:
        """Closes the connection."""
        self._connection.close()


def _account_rules(job: str, password: str) -> list[str]:
    """Returns the rules that define a job's account completely, whatever rules it had before."""
    digest = sha256(password.encode()).hexdigest()
    return [
        "reset",
        "on",
        f"#{digest}",
        f"~{scripts.escape_pattern(scripts.job_prefix(job))}*",
        *(f"+{name}" for name in JOB_COMMANDS),
    ]


def _decode_name(key: bytes) -> str:
    """Decodes a key's name; a foreign key that is not text becomes a name that matches nothing."""
    return key.decode(errors="replace")


# ---- prefaulting of memory -------------------------------------------------------------------------------------------
# Prefaults a new Redis' memory by writing and deleting values of a chunk's size, so that no save is slowed down by page
# faults. Freed pages stay with the server (see MALLOC_ENVIRONMENT in `server_process`). Called by the starter of a
# server and by the sidecar.

VALUE_BYTES = MAX_CHUNK_BYTES + 64
"""Memory that one value takes: exactly one size class of the allocator."""
_FILL_BATCH = 16
"""Values between two checks, and per deletion."""


def prefault_memory(
    wire: RespConnection, size_bytes: int, may_continue: Callable[[int], bool] = lambda written: True
) -> int:
    """Prefaults up to `size` free bytes; returns the number of bytes.

    Args:
        wire: Connection to the server.
        size: Bytes to prefault.
        go_on: Called regularly with the number of values written; false ends the prefaulting.
    """
    payload = memoryview(bytes(MAX_CHUNK_BYTES))
    written = 0
    try:
        while (written + 1) * VALUE_BYTES <= size_bytes:
            if written % _FILL_BATCH == 0 and not may_continue(written):
                break
            try:
                wire.call("SET", f"{scripts.PREFAULT_PREFIX}{written}", payload)
            except redis.exceptions.OutOfMemoryError:
                break  # the server's limit is reached, so all of its memory is prefaulted
            written += 1
    finally:
        _remove_values(wire, written)
    return written * VALUE_BYTES


def _remove_values(wire: RespConnection, written: int) -> None:
    """Deletes the first `written` values."""
    for start in range(0, written, _FILL_BATCH):
        # DEL, not UNLINK: the memory must be free when this returns
        wire.call("DEL", *(f"{scripts.PREFAULT_PREFIX}{i}" for i in range(start, min(start + _FILL_BATCH, written))))


def remove_prefault_leftovers(wire: RespConnection) -> int:
    """Deletes the values of an earlier prefaulting that was killed; returns the number of values checked."""
    for first_index in count(step=_FILL_BATCH):
        if not wire.call(
            "DEL", *(f"{scripts.PREFAULT_PREFIX}{i}" for i in range(first_index, first_index + _FILL_BATCH))
        ):
            return first_index
    raise AssertionError("count() has no end")
