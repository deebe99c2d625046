"""Ties a world to the size that its checkpoint was saved at.

Pure. A job with state that is each rank's own waits for a replacement, as one of fixed size does. Shrunk or grown,
every rank of the new world would refuse the checkpoint until the budget for restarts is used up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.checkpoints.ties import tied_objects
from surefoot.protocol.identities import Checkpoint
from surefoot_operator import reasons
from surefoot_operator.api.spec import TrainingJobSpec
from surefoot_operator.api.spec_limits import allowed_sizes
from surefoot_operator.api.status import JobStatus, condition_of
from surefoot_operator.policy.core.facts import Facts, derived_once, reading_at


@dataclass(frozen=True, slots=True)
class Tie:
    """The size that the state requires; `text` names objects and remedies."""

    text: str
    ranks: int

    def workers(self, spec: TrainingJobSpec) -> int:
        """The required number of workers; 0: none gives those ranks."""
        workers, rest = divmod(self.ranks, spec.nproc_per_node)
        return 0 if rest else workers


def tie_of(facts: Facts, parent: Checkpoint | None) -> Tie | None:
    """Returns what ties the world about to be committed; None: nothing."""
    if parent is None:
        return None
    older = facts.seen.older.entries or ()
    return _tie(m for m in chain(_entries(facts), older) if m.save.checkpoint == parent)


@derived_once
def present_tie(facts: Facts) -> Tie | None:
    """Returns what ties the committed world; None: nothing."""
    world = facts.world
    read = reading_at(facts, world.epoch).manifests()
    found = {c: ranks for c, ranks in read.items() if c.epoch == world.epoch or c == world.parent}
    # of some ranks alone nobody could tell that values differ
    whole = [c for c, ranks in found.items() if len(ranks) == next(iter(ranks.values()))[-1].world]
    if whole:
        return _tie(copies[-1] for copies in found[max(whole, key=lambda c: c.step)].values())
    known = condition_of(facts.status, reasons.WORLD_SIZE_TIED)
    return Tie(known.message, world.size) if known is not None and world.size else None


def tie_to_tell(facts: Facts, status: JobStatus) -> str | None:
    """Returns the condition's message; None: no other size was asked for."""
    world, known = status.world, condition_of(facts.status, reasons.WORLD_SIZE_TIED)
    if world is None or status.phase in ("Complete", "Failed"):
        return None
    if world.state == "Claimed" or not world.members:
        return known.message if known is not None else None
    tie = tie_of(facts, world.parent) if world != facts.status.world else present_tie(facts)
    if tie is None or allowed_sizes(facts.spec) == (tie.workers(facts.spec),):
        return None
    return tie.text


def _tie(manifests: Iterable[RankManifest]) -> Tie | None:
    of_rank = {m.save.rank: m for m in manifests}
    tied = tied_objects(of_rank.values())
    if not tied:
        return None
    ranks = next(iter(of_rank.values())).world
    text = (
        f"{', '.join(tied)}: each rank's own state, which only {ranks} ranks can restore, so the world keeps that"
        f" size and waits for a replacement where it lost a worker. For other sizes use surefoot.ElasticLoader, give the"
        f" object load_state_dicts, or name it in Checkpointer(anew=…)"
    )
    return Tie(text, ranks)


def _entries(facts: Facts) -> Iterator[RankManifest]:
    reading = reading_at(facts, facts.world.epoch)
    return chain(*reading.holders.values(), reading.persistent or ())
