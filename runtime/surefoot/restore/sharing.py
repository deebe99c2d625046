"""Decides which rank of a group reads each shared segment.

Pure. Every member of a group works this out alone and must come to the same: the groups from the program's own
replicas, the division from the plan over the same manifests and from the cards in which members say what lies in their
staging memory. Cards that do not fit together are a doubt, and a doubt means that everybody reads directly. Used by
`exchange` and by `checkpointer.restoring`.
"""

from __future__ import annotations

import json
from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from surefoot.format.digests import digest
from surefoot.geometry.grids import Grid
from surefoot.protocol.records import RankManifest
from surefoot.restore.read_plan import RangeRead, Wanted

MOST_MEMBERS = 16
"""More replicas share in parts of at most so many: each member has a buffer for each other, and waits for the slowest."""


@dataclass(frozen=True, slots=True)
class Replicated:
    """Destinations of this rank, by number, that all of `members` (ranks, this one among them) have in this order."""

    members: tuple[int, ...]
    numbers: tuple[int, ...]
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Card:
    """What a member tells the others first: which reads it is about to make, and whose saves lie in its staging memory."""

    plan: str
    staged: tuple[int, ...] = ()

    def to_text(self) -> str:
        return json.dumps({"plan": self.plan, "staged": list(self.staged)})

    @classmethod
    def from_text(cls, text: str) -> Card | None:
        """None where it is no card: somebody who withdrew, or nonsense."""
        try:
            body = json.loads(text)
            return cls(str(body["plan"]), tuple(int(rank) for rank in body["staged"]))
        except (ValueError, KeyError, TypeError):
            return None


@dataclass(frozen=True, slots=True)
class Agreement:
    """The member that makes each read; None where everybody reads alone. `doubt`: they should have come to one."""

    owners: tuple[int, ...] | None
    reason: str
    doubt: bool = False


def replicated(
    wanted: Sequence[Wanted], same: Sequence[Grid | None], rank: int, least_bytes: int
) -> tuple[Replicated, ...]:
    """Groups of destinations that other ranks have too, at least `least_bytes` each.

    `same` are the ranks that hold what each is. All ranks take their groups in one order of them all, so that nobody
    waits in one group for somebody who waits in another.
    """
    parts: dict[Grid, tuple[int, ...]] = {}
    together: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for number, grid in enumerate(same):
        if grid is None or grid.count < 2 or grid.number(rank) is None or wanted[number].box.volume == 0:
            continue
        if grid not in parts:
            parts[grid] = part_of(sorted(grid.ranks()), rank)
        if len(parts[grid]) > 1:
            together[parts[grid]].append(number)
    found = []
    for members, numbers in sorted(together.items()):
        size = sum(wanted[n].box.volume * wanted[n].itemsize for n in numbers)
        if size >= least_bytes:
            numbers.sort(key=lambda n: (wanted[n].name, wanted[n].box.offsets))
            found.append(Replicated(members, tuple(numbers), size))
    return tuple(found)


def part_of(ranks: Sequence[int], rank: int, most: int = MOST_MEMBERS) -> tuple[int, ...]:
    """Those of `ranks` that `rank` shares with, itself among them: parts of nearly equal size, at most `most`."""
    if rank not in ranks:
        raise ValueError(f"rank {rank} is not one of {list(ranks)}, which are said to hold what it holds")
    parts = -(-len(ranks) // most)
    mine = ranks.index(rank) * parts // len(ranks)
    return tuple(r for i, r in enumerate(ranks) if i * parts // len(ranks) == mine)


def plan_name(
    checkpoint: str, wanted: Sequence[Wanted], manifests: Mapping[int, RankManifest], ranges: Sequence[RangeRead]
) -> str:
    """A digest of all that a division is made from: members of the same name make the same reads of the same bytes."""
    told = [checkpoint, *(f"{w.name} {w.dtype} {w.shape} {w.box}" for w in wanted)]
    told += [f"{rank} {m.layout} {m.digests_digest}" for rank, m in sorted(manifests.items())]
    numbers = array("Q")
    for r in ranges:
        numbers.extend((r.rank, r.chunk, r.offset, r.length, len(r.segments)))
    return digest("\n".join(told).encode() + b"\0" + numbers.tobytes())


def agreed(cards: Sequence[Card | None], reads: Sequence[tuple[int, int]]) -> Agreement:
    """What the members' cards come to; `reads` as (saved rank, bytes)."""
    told = [card for card in cards if card is not None]
    if len(told) < len(cards):
        return Agreement(None, f"{len(cards) - len(told)} of {len(cards)} members read alone", doubt=True)
    if len({card.plan for card in told}) > 1:
        return Agreement(None, "members plan different reads", doubt=True)
    staged = [frozenset(card.staged) for card in told]
    if all(rank in mine for mine in staged for rank in {rank for rank, _ in reads}):
        return Agreement(None, "every member has all of it in its own staging memory")
    return Agreement(division(reads, staged), f"{len(reads)} reads are divided among {len(cards)} members")


def division(reads: Sequence[tuple[int, int]], staged: Sequence[frozenset[int]]) -> tuple[int, ...]:
    """For each read, given as (saved rank, bytes): which member makes it. `staged`: the saves that each has at hand.

    What lies in a member's staging memory is its own; the rest goes to whoever has the fewest bytes so far, so that no
    two members differ by more than one read, as far as staging memory leaves it to be chosen.
    """
    load = [0] * len(staged)
    owners = [-1] * len(reads)
    having = {rank: [m for m, mine in enumerate(staged) if rank in mine] for rank, _ in reads}
    everybody = list(range(len(staged)))
    for number in sorted(range(len(reads)), key=lambda n: not having[reads[n][0]]):
        rank, size = reads[number]
        owner = min(having[rank] or everybody, key=lambda m: load[m])
        owners[number] = owner
        load[owner] += size
    return tuple(owners)
