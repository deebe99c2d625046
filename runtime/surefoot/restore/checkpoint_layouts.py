"""Loads the layouts of one checkpoint's ranks, as few as needed.

One record tells most or all of the others (`format.families`); where it does not, records are read, in the end all of
them. Used by `reader`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from surefoot.errors import ProtocolError, StateMismatch, Unreadable
from surefoot.format.families import Family
from surefoot.format.layouts import Stream
from surefoot.protocol.checkpoints.records import TensorLayout
from surefoot.restore.copy_choice import Copies
from surefoot.restore.read_plan import ReadPlan, Wanted, plan
from surefoot.tiers import verified


class Layouts:
    """Reads and derives layouts, and caches them; for one thread."""

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._families: list[Family] = []
        self._streams: dict[int, Stream] = {}
        self._by_digest: dict[str, Stream] = {}
        self._told_all = False
        self.records_read = 0
        """How many layout records this took."""

    def stream(self, rank: int) -> Stream:
        """One rank's stream, derived from a known family, else read."""
        if rank not in self._streams:
            self._streams[rank] = self._told(rank) or self._read(rank)
        return self._streams[rank]

    def all(self) -> Mapping[int, Stream]:
        """Every rank's stream, each from its record."""
        for rank in range(self._copies.world):
            if rank not in self._streams:
                self._streams[rank] = self._read(rank)
        return self._streams

    def tensors(self, own: int, every: bool = False) -> dict[str, TensorLayout]:
        """Lists the checkpoint's tensors by name, with those local to rank `own`.

        Families are enough for most; `every` reads all records.
        """
        found: dict[str, TensorLayout] = {}
        while self._next_family():
            pass
        if own < self._copies.world:
            found |= {t.name: t for t in self.stream(own).layout.tensors}
        streams = [f.layout for f in self._families if not every] or [s.layout for s in self.all().values()]
        for layout in streams:
            for tensor in layout.tensors:
                found.setdefault(tensor.name, tensor)
        return found

    def plan(self, wanted: Sequence[Wanted]) -> ReadPlan:
        """Plans the reads from the layouts of the ranks that families name.

        If those do not suffice, from all. Raises StateMismatch where the checkpoint lacks what is wanted.
        """
        try:
            ranks = self._ranks(wanted)
            if ranks is not None:
                return plan(wanted, {rank: self.stream(rank) for rank in sorted(ranks)})
        except StateMismatch:
            pass  # said again, of the whole checkpoint, if it is true
        return plan(wanted, self.all())

    def _ranks(self, wanted: Sequence[Wanted]) -> set[int] | None:
        """Ranks that saved part of what is wanted; None where no family covers some tensor."""
        found: set[int] = set()
        for want in wanted:
            family = self._family_of(want.name)
            if family is None:
                owner = _owner(want.name)
                if owner is None or owner >= self._copies.world:
                    return None
                found.add(owner)
                continue
            found |= family.savers(want.name, want.box) or {family.of}
        return found

    def _family_of(self, name: str) -> Family | None:
        if _owner(name) is not None:
            return None
        while True:
            for family in self._families:
                if name in family:
                    return family
            if not self._next_family():
                return None

    def _next_family(self) -> bool:
        """Reads the layout of the first rank that no known family describes; False if none helps."""
        if self._told_all:
            return False
        world = self._copies.world
        known = any(family.everywhere(world) for family in self._families)
        rank = None if known else next((r for r in range(world) if not any(f.has(r) for f in self._families)), None)
        if rank is not None:
            stream = self._streams[rank] = self._read(rank)
            if stream.layout.spread is not None:
                self._families.append(Family(stream.layout, rank))
                return True
            self._families.clear()  # one rank's tensors follow no rule: all records are read
        self._told_all = True
        return False

    def _told(self, rank: int) -> Stream | None:
        name = self._copies.manifest(rank).layout
        if name in self._by_digest:
            return self._by_digest[name]
        for family in self._families:
            if family.has(rank):
                try:
                    stream = family.stream(rank)
                except (ValueError, ProtocolError, StateMismatch):
                    continue  # a record that says nonsense is no reason not to read the right one
                if stream.digest == name:
                    self._by_digest[name] = stream
                    return stream
        return None

    def _read(self, rank: int) -> Stream:
        name = self._copies.manifest(rank).layout
        if name not in self._by_digest:
            try:
                self._by_digest[name], _ = self._copies.first_good(rank, "layout", verified.stream_from)
            except Unreadable:
                found = self._copies.anywhere(rank, verified.stream_from)
                if found is None:
                    raise
                self._by_digest[name] = found
            self.records_read += 1
        return self._by_digest[name]


def _owner(name: str) -> int | None:
    """The rank that keeps this tensor to itself."""
    first, _, rest = name.partition("/")
    number = rest.partition("/")[0]
    return int(number) if first == "local" and number.isdecimal() else None
