"""Measures what a job holds on a server, and closes its account.

The administrator's calls, under a quota.

A closed account reads, drops and seals as before and writes nothing: restores go on, saves are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from surefoot.errors import ProtocolError
from surefoot.memory_server import keys
from surefoot.memory_server.connection import Credentials, explained, understood
from surefoot.memory_server.dialogue import Dialogue
from surefoot.protocol.bounds import MAX_INDEX_BYTES, MAX_INDEX_ENTRIES
from surefoot.protocol.checkpoints.records import RankManifest

WRITING = ("set", "copy", "hset")
"""The commands that a closed account lacks; without them no script of ours commits either."""

_BATCH = 500


class JobHolding:
    """Measures and closes one job's holdings, in dialogues of an administrator."""

    def __init__(self, where: str, job: str) -> None:
        self._where, self._job = where, job

    def held_bytes(self) -> Dialogue[int]:
        """Sums the bytes of all the job's keys, whatever their type."""
        doing = f"measuring job {self._job}"
        with understood(self._where, doing), explained(self._where, doing):
            total, cursor = 0, 0
            while True:
                cursor, names = yield from scan_step(keys.of_job(self._job), cursor)
                total += yield from _bytes_of(names)
                if cursor == 0:
                    return total

    def accounts(self) -> Dialogue[int]:
        """Number of jobs with an account on this server."""
        doing = "counting accounts"
        with understood(self._where, doing), explained(self._where, doing):
            return sum(name != b"default" for name in (yield ("ACL USERS",)))

    def close(self, account: Credentials) -> Dialogue[int]:
        """Revokes the account's write commands, then removes keys without index entry.

        Open connections lose them at once.

        Returns:
            How many keys were removed.
        """
        doing = f"closing the account of job {self._job}"
        with understood(self._where, doing), explained(self._where, doing):
            yield ("ACL SETUSER", account.user, *(f"-{name}" for name in WRITING))
            # nothing is committed any more, so what has no entry now never gets one
            needed = yield from self._needed()
            gone, cursor = 0, 0
            while True:
                cursor, names = yield from scan_step(keys.of_job(self._job), cursor)
                left = [name for name in names if not needed(name.decode(errors="replace"))]
                for start in range(0, len(left), _BATCH):
                    gone += int((yield ("UNLINK", *left[start : start + _BATCH])))
                if cursor == 0:
                    return gone

    def open(self, account: Credentials) -> Dialogue[None]:
        """It writes again."""
        doing = f"opening the account of job {self._job}"
        with understood(self._where, doing), explained(self._where, doing):
            yield ("ACL SETUSER", account.user, *(f"+{name}" for name in WRITING))

    def _needed(self) -> Dialogue[Callable[[str], bool]]:
        """Judges names of keys: whether the index, or the job itself, needs them.

        Of an index that is larger than any nothing is read, and all is needed: it may be repaired.
        """
        job, index = self._job, keys.index(self._job)
        if (yield ("HLEN", index)) > MAX_INDEX_ENTRIES:
            return lambda name: True
        if ((yield ("MEMORY USAGE", index, "SAMPLES", 0)) or 0) > MAX_INDEX_BYTES:
            return lambda name: True
        own = {keys.fence(job), keys.instance(job), index, keys.watermark(job)}
        chunks: dict[str, int] = {}
        for number, (field, text) in enumerate(_pairs((yield ("HGETALL", index)))):
            if number % _BATCH == _BATCH - 1:
                yield []
            try:
                manifest = RankManifest.from_json(text)
            except ProtocolError:
                own.add(f"{keys.of_job(job)}{field.decode(errors='replace')}")
                continue
            own.add(keys.layout(job, manifest.layout))
            chunks[keys.field(manifest.save)] = manifest.chunks

        def is_needed(name: str) -> bool:
            save, _, part = name.removeprefix(keys.of_job(job)).rpartition(":")
            return name in own or (save in chunks and keys.is_data_of(part, chunks[save]))

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
    answer = yield ("SCAN", cursor, "MATCH", f"{keys.literal(prefix)}*", "COUNT", _BATCH)
    asked, cursor = cursor, int(answer[0])
    if cursor and cursor == asked:
        raise ValueError(f"a scan that was asked on from {cursor} answers with {cursor}: it would never end")
    return cursor, answer[1]


def _pairs(flat: list[bytes]) -> Iterable[tuple[bytes, bytes]]:
    return zip(flat[::2], flat[1::2], strict=True)
