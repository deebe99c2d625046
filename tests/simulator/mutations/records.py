"""Rules by which what cannot be read is not taken for absent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from simulator import damage
from simulator.mutations.mutation import ROUGH, Mutation, constant
from simulator.tiers import Holder
from simulator.trainers import Trainer
from surefoot_operator.job_snapshot import PersistentListing
from surefoot_operator.policy.planning import plan

DAMAGED = replace(ROUGH, steps=60, faults=14, fault_span_seconds=14.0, persistent_interval=1, interval=1,
                  kinds=(*damage.KINDS, "trainer dies", "trainer dies"))  # fmt: skip
LONELY = replace(DAMAGED, replicas=1, kinds=(*damage.KINDS, "holder restarts", "operator dies", "node dies"))
WORN = replace(LONELY, kinds=("record is damaged", "layout in the tier is damaged", "operator dies"), faults=20)
ENDING = replace(LONELY, steps=24, kinds=("chunk is damaged", "chunk is gone"), faults=24, persistent_interval=6)

_try, _has = Trainer._try, Holder.read


def _first_copy_alone(trainer: Trainer, save: Any, sources: list[Any], seen: Any, done: Any) -> None:
    """A copy that is damaged is the only one that is asked for."""
    _try(trainer, save, [], {"silent": 0, "bad": 1}, done) if seen["bad"] else _try(trainer, save, sources, seen, done)


def _unread(holder: Holder) -> Any:
    """A holder with one entry that cannot be read gives none."""
    return () if holder.damaged else _has(holder)


RECORDS = (
    Mutation("what a listing could not read counts as absent", patches=((PersistentListing, "unreadable_checkpoints", constant(frozenset())),), settings=WORN),
    Mutation("what an upload finds to be damaged is uploaded for ever", patches=((plan, "unreadable_by_upload", constant(())),), settings=ENDING),
    Mutation("one damaged entry hides all that a holder has", patches=((Holder, "read", _unread),), settings=DAMAGED),
    Mutation("where one copy is damaged no other is tried", patches=((Trainer, "_try", _first_copy_alone),),
             settings=replace(DAMAGED, persistent_interval=None, kinds=("chunk is damaged", "chunk is damaged", "trainer dies"))),
)  # fmt: skip
