"""Claims epochs in the persistent tier and keeps their lineage records.

An epoch is claimed by creating its file, which no second program can; a coordinator has an agent claim what it claimed in
status, because a status that was restored from a backup knows less than the tier. Without a coordinator the lineage record of
an epoch is written twice: a record that is damaged would otherwise take every checkpoint of its epoch off the lineage. A third
file shows that an epoch's program is at work. Used by `persistent`.
"""

from __future__ import annotations

from surefoot.errors import ChunkMissing, TierError, TierUnavailable
from surefoot.tiers.object_store import ObjectStore
from surefoot.tiers.parallel_reads import read_together

_CLAIM_TRIES = 50
_FOLDERS = ("epochs", "lineage")


class EpochRecords:
    """Of one job in a store."""

    def __init__(self, store: ObjectStore, job: str) -> None:
        self._store, self._job = store, job

    def claim(self, newest: int) -> int:
        """Takes an epoch beyond `newest` and beyond every claim.

        Nobody else gets the same.

        Raises:
            TierUnavailable: others took each one that was tried.
        """
        first = max((newest, *self.claimed()))
        for epoch in range(first + 1, first + 1 + _CLAIM_TRIES):
            if self._store.create(f"{self._job}/epochs/{epoch}", b"claimed\n"):
                return epoch
        raise TierUnavailable(
            f"epochs {first + 1} to {first + _CLAIM_TRIES} of job {self._job} were all taken meanwhile"
        )

    def claim_as(self, epoch: int, ticket: str) -> bool:
        """Claims an epoch for who bears this ticket; returns whether the claim is theirs."""
        path, text = f"{self._job}/epochs/{epoch}", ticket.encode()
        return self._store.create(path, text) or self._store.read(path) == text

    def may_bear(self, epoch: int, ticket: str) -> bool:
        """Whether no other ticket than this one claimed the epoch; writes nothing."""
        try:
            return self._store.read(f"{self._job}/epochs/{epoch}") == ticket.encode()
        except ChunkMissing:
            return True

    def claimed(self) -> set[int]:
        """Every epoch that has a claim or a record."""
        names = [name for folder in _FOLDERS for name in self._store.sizes(f"{self._job}/{folder}")]
        return {int(n.removesuffix(".json")) for n in names if n.removesuffix(".json").isdecimal()}

    def record(self, epoch: int, text: str) -> None:
        """Records the checkpoint that a claimed epoch stands on.

        In two places. Only whoever claimed the epoch writes this, and it may change as long as the epoch has saved
        nothing.
        """
        for folder in _FOLDERS:
            self._store.put(f"{self._job}/{folder}/{epoch}.json", text.encode())
            self._store.make_durable(f"{self._job}/{folder}")

    def recorded(self) -> dict[int, tuple[str | TierError, ...]]:
        """Reads every copy of each record, by epoch; an error stands for one that the store did not give.

        An epoch that was claimed and never recorded is left out.
        """
        paths = [
            (int(name.removesuffix(".json")), f"{self._job}/{folder}/{name}")
            for folder in _FOLDERS
            for name in self._store.sizes(f"{self._job}/{folder}")
            if name.endswith(".json") and name.removesuffix(".json").isdecimal()
        ]
        found: dict[int, tuple[str | TierError, ...]] = {}
        for (epoch, _), text in zip(paths, read_together(self._text, [path for _, path in paths]), strict=True):
            found[epoch] = (*found.get(epoch, ()), text)
        return dict(sorted(found.items()))

    def is_overtaken(self, epoch: int) -> bool:
        """Whether another program claimed the next epoch: one small read, as claims are consecutive."""
        try:
            self._store.read(f"{self._job}/epochs/{epoch + 1}", 0, 1)
        except ChunkMissing:
            return False
        return True

    def beat(self, epoch: int, text: str) -> None:
        """Shows that the program of this epoch is at work; its text differs each time."""
        self._store.put(self._alive(epoch), text.encode())

    def marked(self) -> list[int]:
        """Lists epochs whose program has not ended in order, oldest first."""
        names = [n.removesuffix(".alive") for n in self._store.sizes(f"{self._job}/epochs") if n.endswith(".alive")]
        return sorted(int(name) for name in names if name.isdecimal())

    def last_beat(self, epoch: int) -> str | None:
        """What that program wrote last; None where it ended in order."""
        try:
            return self._store.read(self._alive(epoch)).decode(errors="replace")
        except ChunkMissing:
            return None

    def end_beats(self, epoch: int) -> None:
        """Notes that the program of this epoch writes nothing more."""
        self._store.remove(self._alive(epoch))

    def _alive(self, epoch: int) -> str:
        return f"{self._job}/epochs/{epoch}.alive"

    def _text(self, path: str) -> str | TierError:
        """Empty where it has gone since it was listed."""
        try:
            return self._store.read(path).decode(errors="replace")
        except ChunkMissing:
            return ""
        except TierError as silent:
            return silent
