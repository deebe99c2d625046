"""Reads and mends the layout records of an object store.

Made by `persistent`. All rank saves of one layout share a record, so that a lost one would take every checkpoint along:
each save keeps a copy of its own beside it, and from that the shared one is mended.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import xxhash

from surefoot import metrics
from surefoot.errors import Corrupt, TierError
from surefoot.protocol.identities import Checkpoint, RankSave
from surefoot.tiers.object_names import Names
from surefoot.tiers.object_store import ObjectStore
from surefoot.tiers.parallel_reads import second_look

_COPIES = 3
"""Rank saves whose own copy is looked at, where the shared one is not good."""

log = logging.getLogger(__name__)


class LayoutRecords:
    """Finds a good copy of each layout record."""

    def __init__(
        self, store: ObjectStore, names: Names, read_only: bool, seen: Callable[[], Sequence[Checkpoint]]
    ) -> None:
        self._store, self._names, self._read_only, self._seen = store, names, read_only, seen
        self.of: dict[RankSave, str] = {}
        """Digest of the layout of each save whose manifest was seen."""

    def read(self, digest: str) -> str:
        """Reads the record that all rank saves share.

        Where it is damaged or gone, the copy beside a rank save that has this layout; that mends the shared one.
        """
        text, problem = self._at(self._names.layout(digest), digest)
        if problem is None:
            return text
        for save in self._that_may_have(digest):
            other, trouble = self._at(self._names.named(save, "layout"), digest)
            if trouble is None:
                metrics.fallbacks.labels("layout_copy").inc()
                log.warning("%s; the copy beside %s is good, and is read", problem, save)
                self._put_again(digest, other)
                return other
        if isinstance(problem, TierError):
            raise problem
        return text  # whoever asked verifies it, and names it

    def _put_again(self, digest: str, text: str) -> None:
        if self._read_only:
            return
        try:
            self._store.put(self._names.layout(digest), text.encode())
        except TierError as problem:
            log.warning("layout %s could not be written again: %s; the next save does it", digest, problem)

    def _that_may_have(self, digest: str) -> list[RankSave]:
        """Rank saves beside which a copy of this layout may lie: those known to have it, then others of their ranks."""
        known = sorted((save for save, layout in self.of.copy().items() if layout == digest), reverse=True)
        others = [RankSave(c.epoch, c.step, save.rank) for c in reversed(self._seen()) for save in known[:1]]
        return list(dict.fromkeys([*known[:_COPIES], *others[:_COPIES]]))

    def _at(self, path: str, digest: str) -> tuple[str, TierError | Corrupt | None]:
        raw = b""

        def read() -> None:
            nonlocal raw
            raw = self._store.read(path)
            if xxhash.xxh3_64_hexdigest(raw) != digest:
                raise Corrupt(f"{path} in the persistent tier is damaged")

        try:
            second_look(read)
        except (TierError, Corrupt) as problem:
            return raw.decode(errors="replace"), problem
        return raw.decode(errors="replace"), None
