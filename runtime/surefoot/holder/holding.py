"""Measures what a job holds on a server, and closes its account.

The administrator's calls, under a quota.

A closed account reads, drops and seals as before and writes nothing: restores go on, saves are refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import redis.exceptions

from surefoot.errors import ProtocolError
from surefoot.holder import keys
from surefoot.holder.connection import Credentials, Wire, explained, understood
from surefoot.protocol.records import RankManifest

WRITING = ("set", "copy", "hset")
"""The commands that a closed account lacks; without them no script of ours commits either."""

_BATCH = 500


class JobHolding:
    """Measures and closes one job's holdings with administrator rights; for one thread."""

    def __init__(self, wire: Wire, where: str, job: str) -> None:
        self._wire, self._where, self._job = wire, where, job

    def held_bytes(self) -> int:
        """Sums the bytes of all the job's keys, whatever their type."""
        doing = f"measuring job {self._job}"
        with understood(self._where, doing), explained(self._where, doing):
            return sum(self._bytes_of(batch) for batch in key_batches(self._wire, keys.of_job(self._job)))

    def accounts(self) -> int:
        """Number of jobs with an account on this server."""
        doing = "counting accounts"
        with understood(self._where, doing), explained(self._where, doing):
            return sum(name != b"default" for name in self._wire.call("ACL USERS"))

    def close(self, account: Credentials) -> int:
        """Revokes the account's write commands, then removes keys without index entry.

        Open connections lose them at once.

        Returns:
            How many keys were removed.
        """
        doing = f"closing the account of job {self._job}"
        with understood(self._where, doing), explained(self._where, doing):
            self._wire.call("ACL SETUSER", account.user, *(f"-{name}" for name in WRITING))
            # nothing is committed any more, so what has no entry now never gets one
            needed = self._needed()
            gone = 0
            for batch in key_batches(self._wire, keys.of_job(self._job)):
                left = [name for name in batch if name not in needed]
                for start in range(0, len(left), _BATCH):
                    gone += int(self._wire.call("UNLINK", *left[start : start + _BATCH]))
            return gone

    def open(self, account: Credentials) -> None:
        """It writes again."""
        doing = f"opening the account of job {self._job}"
        with understood(self._where, doing), explained(self._where, doing):
            self._wire.call("ACL SETUSER", account.user, *(f"+{name}" for name in WRITING))

    def _needed(self) -> set[bytes]:
        job = self._job
        named = [keys.fence(job), keys.instance(job), keys.index(job), keys.watermark(job)]
        for field, text in _pairs(self._wire.call("HGETALL", keys.index(job))):
            try:
                manifest = RankManifest.from_json(text.decode())
            except (ProtocolError, UnicodeDecodeError):
                named.append(f"{keys.of_job(job)}{field.decode(errors='replace')}")
                continue
            named += [keys.layout(job, manifest.layout), *keys.data_of(job, manifest.save, manifest.chunks)]
        return {name.encode() for name in named}

    def _bytes_of(self, names: list[bytes]) -> int:
        for name in names:
            self._wire.ask("STRLEN", name)
        total, others = 0, []
        for name in names:
            try:
                total += int(self._wire.answer())
            except redis.exceptions.ResponseError:
                others.append(name)  # no string
        return total + sum(int(self._wire.call("MEMORY USAGE", name) or 0) for name in others)


def key_batches(wire: Wire, prefix: str) -> Iterator[list[bytes]]:
    """Names of all keys that begin with `prefix`, some at a time.

    Raises:
        ValueError: the server's scan goes round in place.
    """
    pattern, cursor = f"{keys.literal(prefix)}*", 0
    while True:
        answer = wire.call("SCAN", cursor, "MATCH", pattern, "COUNT", _BATCH)
        asked, cursor = cursor, int(answer[0])
        if cursor and cursor == asked:
            raise ValueError(f"a scan that was asked on from {cursor} answers with {cursor}: it would never end")
        if answer[1]:
            yield answer[1]
        if cursor == 0:
            return


def _pairs(flat: list[bytes]) -> Iterable[tuple[bytes, bytes]]:
    return zip(flat[::2], flat[1::2], strict=True)
