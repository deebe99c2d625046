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
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.restore.read_plan import Wanted
from surefoot.restore.segments import RangeRead

MOST_MEMBERS = 16
"""More replicas share in parts of at most so many: each member has a buffer for each other, and waits for the slowest."""


@dataclass(frozen=True, slots=True)
class Replicated:
    """Lists this rank's destinations that all `members` have in this order."""

    members: tuple[int, ...]
    numbers: tuple[int, ...]
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Card:
    """States a member's planned reads and the saves in its staging memory."""

    plan: str
    staged: tuple[int, ...] = ()

    def to_text(self) -> str:
        return json.dumps({"plan": self.plan, "staged": list(self.staged)})

    @classmethod
    def from_text(cls, text: str) -> Card | None:
        """Parses a card; None for one that was withdrawn or is malformed."""
        try:
            body = json.loads(text)
            return cls(str(body["plan"]), tuple(int(rank) for rank in body["staged"]))
        except (ValueError, KeyError, TypeError):
            return None


@dataclass(frozen=True, slots=True)
class Agreement:
    """Assigns each read a member; None: everybody reads alone.

    `doubt`: the members should have agreed and did not.
    """

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
    """The ranks that `rank` shares with: nearly equal parts, at most `most`.

    Raises ValueError for a rank that is not among `ranks`.
    """
    if rank not in ranks:
        raise ValueError(f"rank {rank} is not one of {list(ranks)}, which are said to hold what it holds")
    parts = -(-len(ranks) // most)
    mine = ranks.index(rank) * parts // len(ranks)
    return tuple(r for i, r in enumerate(ranks) if i * parts // len(ranks) == mine)


def plan_name(
    checkpoint: str, wanted: Sequence[Wanted], manifests: Mapping[int, RankManifest], ranges: Sequence[RangeRead]
) -> str:
    """Digests all inputs of a division.

    Members with the same digest make the same reads of the same bytes.
    """
    told = [checkpoint, *(f"{w.name} {w.dtype} {w.shape} {w.box}" for w in wanted)]
    told += [f"{rank} {m.layout} {m.digests_digest}" for rank, m in sorted(manifests.items())]
    numbers = array("Q")
    for r in ranges:
        numbers.extend((r.rank, r.chunk, r.offset, r.length, len(r.segments)))
    return digest("\n".join(told).encode() + b"\0" + numbers.tobytes())


def agreed(cards: Sequence[Card | None], reads: Sequence[tuple[int, int]]) -> Agreement:
    """Derives the agreement from all cards; `reads` as (saved rank, bytes)."""
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
    """Assigns each read, given as (saved rank, bytes), to a member.

    `staged` are the saves that each member has in staging memory: those it reads itself. The rest goes to the member
    with the fewest bytes so far (greedy load balancing): as far as staging memory leaves a choice, no two members
    differ by more than one read.
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
