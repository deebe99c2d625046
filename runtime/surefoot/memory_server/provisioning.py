"""Creates and removes a job's account and keys on a holder.

The operator does so, with the administrator's account. All of it is idempotent, since scripts and accounts vanish with
a restart and a new leader provisions again. The account comes last: whoever can log in finds fence and scripts in
place.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from hashlib import sha256

from surefoot.errors import Fenced, HolderDamaged, OutOfBounds, TierError
from surefoot.memory_server import keys, scripts
from surefoot.memory_server.connection import Credentials, Wire, explained, understood
from surefoot.memory_server.dialogue import Dialogue, section_of
from surefoot.memory_server.fenced_calls import limits_of
from surefoot.memory_server.holding import JobHolding, scan_step
from surefoot.protocol.bounds import MAX_INDEX_ENTRIES, MAX_KEY_BYTES, MAX_LEFTOVER_KEYS
from surefoot.protocol.identities import RankSave

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
class Memory:
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
        with understood(self.where, "naming its run"):
            return (yield from self._info("server"))["run_id"][:INSTANCE_DIGITS]

    def instance_of(self, job: str) -> Dialogue[str]:
        """The instance that this run has for `job`.

        A former operator gave it the whole run id, and it keeps that: renamed it would be another holder, agents would
        be refused in the middle of a save, and its copies be lost.
        """
        doing = f"naming its run to job {job}"
        with understood(self.where, doing), explained(self.where, doing):
            run = (yield from self._info("server"))["run_id"]
            named = (yield ("GETRANGE", keys.instance(job), 0, MAX_KEY_BYTES)).decode()
        return named if len(named) > INSTANCE_DIGITS and run == named else run[:INSTANCE_DIGITS]

    def process(self) -> Dialogue[tuple[str, int]]:
        """Instance and process id of the server that answers here."""
        with understood(self.where, "naming its process"):
            info = yield from self._info("server")
            return info["run_id"][:INSTANCE_DIGITS], int(info["process_id"])

    def provision(self, job: str, account: Credentials, epoch: int) -> Dialogue[str]:
        """Makes this server a holder of `job`; returns its instance.

        The fence is `epoch` at least. Raises Fenced where a newer epoch rules: whoever asks is no longer the leader. An
        account without a user name is left out; that is for servers on loopback without accounts.
        """
        instance = yield from self.instance_of(job)
        named = [keys.fence(job), keys.instance(job), keys.absent(job)]
        doing = f"provisioning job {job}"
        with understood(self.where, doing), explained(self.where, doing):
            wanted = (*scripts.ALL, *scripts.FORMER)
            loaded = yield [("SCRIPT LOAD", script.source) for script in wanted]
            for script, digest in zip(wanted, loaded, strict=True):
                if isinstance(digest, Exception):
                    raise digest
                if digest.decode() != script.sha:
                    raise TierError(f"{self.where} gave script {script.name} another digest: it is no Redis")
            result = yield ("EVALSHA", scripts.PROVISION.sha, len(named), *named, epoch, instance)
            if result[0] == b"fenced":
                raise Fenced(f"{self.where} is ruled by epoch {result[1].decode()} of job {job}, newer than {epoch}")
            if result[0] == b"damaged":
                raise HolderDamaged(
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
        with explained(self.where, "asking whether it is being filled"):
            return bool((yield ("EXISTS", keys.FILLING)))

    def remove_job(self, job: str, user: str) -> Dialogue[None]:
        """Ends the job's account, then removes all its keys. Absent is success."""
        doing = f"removing job {job}"
        with understood(self.where, doing), explained(self.where, doing):
            if user:
                yield ("ACL DELUSER", user)
            cursor = 0
            while True:
                cursor, names = yield from scan_step(keys.of_job(job), cursor)
                if names:
                    yield ("UNLINK", *names)
                if cursor == 0:
                    return

    def jobs(self) -> Dialogue[frozenset[str]]:
        """Uids of all jobs that have keys here."""
        with understood(self.where, "listing jobs"), explained(self.where, "listing jobs"):
            uids, cursor = set[str](), 0
            while True:
                cursor, names = yield from scan_step(keys.PREFIX, cursor)
                uids |= keys.jobs_of(map(_name, names))
                if cursor == 0:
                    return frozenset(uids)

    def unindexed(self, job: str) -> Dialogue[dict[RankSave, tuple[str, ...]]]:
        """Lists data keys without index entry, by rank save.

        They are of a save under way, or of one whose writer died. What is committed after the index was read is listed
        too: `sweep` refuses it. Of very many keys the first that a scan finds are listed, and the others next time.
        """
        doing = f"looking for leftovers of job {job}"
        leftovers: defaultdict[RankSave, list[str]] = defaultdict(list)
        with understood(self.where, doing), explained(self.where, doing):
            indexed = {_name(name) for name in (yield from self._fields(job))}
            cursor, listed = 0, 0
            while True:
                cursor, names = yield from scan_step(keys.of_job(job), cursor)
                for name in map(_name, names):
                    field = name.removeprefix(keys.of_job(job)).rpartition(":")[0]
                    if field not in indexed and (save := keys.save_of(field)) is not None:
                        leftovers[save].append(name)
                        listed += 1
                if cursor == 0 or listed >= MAX_LEFTOVER_KEYS:
                    return {save: tuple(sorted(leftovers[save])) for save in sorted(leftovers)}

    def _fields(self, job: str) -> Dialogue[list[bytes]]:
        """The names of the job's index entries. Raises OutOfBounds for an index that is larger than any."""
        named = [keys.fence(job), keys.instance(job), keys.absent(job), keys.index(job), keys.watermark(job)]
        result = yield ("EVALSHA", scripts.FIELDS.sha, len(named), *named, 0, "", *limits_of(MAX_INDEX_ENTRIES))
        if result[0] == b"large":
            what, size, most = (part.decode(errors="replace") for part in result[1:4])
            raise OutOfBounds(f"{self.where} of job {job}", what, size, f"0 to {most}")
        return list(result[1])

    def memory(self) -> Dialogue[Memory]:
        """Measures the whole server."""
        with understood(self.where, "measuring its memory"):
            info = yield from self._info("memory")
            return Memory(int(info["used_memory"]), int(info["maxmemory"]))

    def holding(self, job: str) -> JobHolding:
        """The job's holdings here."""
        return JobHolding(self.where, job)

    def _info(self, section: str) -> Dialogue[dict[str, str]]:
        doing = f"reading {section} information"
        with understood(self.where, doing), explained(self.where, doing):
            return section_of((yield ("INFO", section)))


class HolderAdmin:
    """Connects to one server as administrator; for one thread.

    Cheap to make. `tls_ca`: the authority of a server that speaks TLS; None: it does not. Its calls are those of
    `AdminCalls`, carried out.
    """

    def __init__(
        self, host: str, port: int, password: str, call_seconds: float = 1.0, tls_ca: str | None = None
    ) -> None:
        self._calls = AdminCalls(host, port)
        account = Credentials("", password, tls_ca or "")
        self._wire = Wire(host, port, account, call_seconds, tls_ca is not None)

    def instance(self) -> str:
        return self._wire.converse(self._calls.instance())

    def instance_of(self, job: str) -> str:
        return self._wire.converse(self._calls.instance_of(job))

    def process(self) -> tuple[str, int]:
        """Instance and process id of the server that answers here.

        It may not be the process that was just started.
        """
        return self._wire.converse(self._calls.process())

    def provision(self, job: str, account: Credentials, epoch: int) -> str:
        """Makes this server a holder of `job`; see `AdminCalls.provision`."""
        return self._wire.converse(self._calls.provision(job, account, epoch))

    def is_being_filled(self) -> bool:
        return self._wire.converse(self._calls.is_being_filled())

    def remove_job(self, job: str, user: str) -> None:
        """Ends the job's account, then removes all its keys. Absent is success."""
        self._wire.converse(self._calls.remove_job(job, user))

    def jobs(self) -> frozenset[str]:
        """Uids of all jobs that have keys here."""
        return self._wire.converse(self._calls.jobs())

    def unindexed(self, job: str) -> dict[RankSave, tuple[str, ...]]:
        return self._wire.converse(self._calls.unindexed(job))

    def memory(self) -> Memory:
        return self._wire.converse(self._calls.memory())

    def close(self) -> None:
        self._wire.close()


def _rules(job: str, password: str) -> list[str]:
    """The whole account, from nothing: replaces whatever was there under that name."""
    digest = sha256(password.encode()).hexdigest()
    return ["reset", "on", f"#{digest}", f"~{keys.literal(keys.of_job(job))}*", *(f"+{name}" for name in JOB_COMMANDS)]


def _name(key: bytes) -> str:
    """A key's name; one that others wrote here and that is no text is none of ours, and matches nothing."""
    return key.decode(errors="replace")
