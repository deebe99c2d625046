"""Broken rules, one at a time, and how each is put into a run: what the tests of the oracle's eyes are made from.

Either a rule of a model is off (`Rules`), or one decision is wrapped (`Decisions`) or replaced where it stands, for the
time of a `with` block. Nothing here is imported by the simulator itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from simulator.faults import KINDS
from simulator.rules import ALL, Rules
from simulator.settings import Settings
from simulator.trainers import Trainer, advance, content_of
from simulator.world import REAL, Decisions
from surefoot.protocol import lineage, retention
from surefoot.protocol.identities import Checkpoint, RankSave
from surefoot.protocol.settled import Settled
from surefoot_operator.observed import Observed
from surefoot_operator.policy import last_checkpoint, plan, promotion, restore_point, upkeep
from surefoot_operator.policy.actions import Plan
from surefoot_operator.policy.losses import Loss


@dataclass(frozen=True, slots=True)
class Mutation:
    """One broken rule, and a violation that must be found by some seed (its beginning)."""

    name: str
    rules: Rules = ALL
    decisions: Decisions = REAL
    patches: tuple[tuple[Any, str, Any], ...] = ()
    settings: Settings = field(default_factory=lambda: ROUGH)


MACHINES = tuple(kind for kind, (weight, _) in KINDS.items() if weight and "pods" not in kind)
"""What hurts machines and lines: pods that the API refuses for minutes leave too little for an old world to do."""

ROUGH = Settings(nodes=3, workers=3, steps=24, interval=1, step_seconds=0.2, faults=8, fault_span_seconds=8.0, kinds=MACHINES,
                 persistent_interval=None, holder_return_seconds=2.0)  # fmt: skip
RIVALS = replace(
    ROUGH, kinds=("operator freezes, another leads", "node dies"), faults=12, fault_span_seconds=12.0, steps=60
)
TIED = replace(ROUGH, tied=True)
REFUSING = replace(ROUGH, refused=0.1)
SELDOM = replace(ROUGH, interval=2, refused=0.4)
PROMOTING = replace(ROUGH, persistent_interval=2)
WITHOUT_PODS = replace(ROUGH, kinds=("node dies", "pods are refused"), steps=60, nodes=4)
FRAGILE = replace(ROUGH, steps=12, persistent_interval=12, replicas=1, fault_span_seconds=6.0, faults=5,
                  kinds=("holder restarts", "agent dies", "persistent tier is away"))  # fmt: skip
ENDING = replace(ROUGH, steps=12, persistent_interval=8, fault_span_seconds=6.0, faults=10)


@contextmanager
def broken(mutation: Mutation) -> Iterator[None]:
    """The mutation's patches, in place until the block ends."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in mutation.patches]
    try:
        for owner, name, value in mutation.patches:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def _planning(change: Callable[[Observed], Observed]) -> Decisions:
    """The real plan, of a snapshot that was changed."""
    return Decisions(plan=lambda seen: plan.plan(change(seen)))


def _everything_superseded(entries: Any, standing: retention.Standing, keep: int) -> Any:
    """Retention that takes the newest checkpoint seen for safe, however few copies it has."""
    newest = lineage.newest(m.save.checkpoint for m in entries)
    return _drops(entries, replace(standing, watermark=newest), keep)


_drops = retention.memory_drops


def _forgetful(entries: Any, standing: retention.Standing, keep: int) -> Any:
    """Retention that lets the parent go at once."""
    gone = list(_drops(entries, standing, keep))
    return gone + [m.save for m in entries if m.save.checkpoint == standing.parent and m.save not in gone]


def _missed_already(said: Settled, step: int) -> bool:
    """What a rank has not handed over yet counts as something that it never will."""
    return step not in said.steps


def _missed_lately(said: Settled, step: int) -> bool:
    """What a rank has forgotten counts as something that it never had."""
    return step <= said.upto and step not in said.steps[-1:]


def _one_copy(replicas: int, live_domains: int) -> int:
    return 1


def _oldest(found: Any) -> Checkpoint | None:
    return min(found, key=lambda c: c.step, default=None)


def _unread(seen: Observed) -> Observed:
    """One holder less than there are: what it has is never read."""
    return replace(seen, holders=tuple(h for h in seen.holders if h.endpoint.holder.node != "n0"))


def _untied(facts: Any, parent: Checkpoint | None) -> None:
    """Nobody looks at whose state a checkpoint holds."""


def _impatient(facts: Any, *limits: float) -> None:
    """Silent holders are not waited for."""


def _never_given_up(facts: Any) -> list[Any]:
    return []


def _any_lineage(line: Any, checkpoint: Checkpoint, epoch: int) -> bool:
    """Whatever an epoch saved counts, also beyond where a later one branched off."""
    return True


def _unready(seen: Observed) -> Plan:
    """A world of every worker that is heard, allowed size or not."""
    made = plan.plan(seen)
    world = made.status.world
    if world is None or world.state != "Committed" or world == seen.status.world or len(world.members) < 2:
        return made
    fewer = replace(world, members=world.members[:1])
    return replace(made, status=replace(made.status, world=fewer))


def _hasty_floor(facts: Any) -> Checkpoint | None:
    """A checkpoint counts as complete in the persistent tier once any rank's save is there."""
    return lineage.newest(facts.seen.promoted) or facts.status.floor


def _nothing_outstanding(facts: Any) -> None:
    """The end is told as soon as every trainer has finished."""


def _steps_of_its_own(facts: Any) -> Checkpoint | None:
    """What a program ended with counts only where its last epoch made it."""
    found = _final(facts)
    return found if found is not None and found.epoch == facts.world.epoch else None


_final = last_checkpoint.final_checkpoint


def _never_lost(facts: Any) -> Any:
    """What cannot be uploaded any more is not missed."""
    found = _outstanding(facts)
    return None if isinstance(found, Loss) else found


_outstanding = last_checkpoint.outstanding


def _saved_at_exit(trainer: Trainer) -> None:
    """A rank whose peer has died saves its last step, with a state that is in the middle of the next."""
    epoch, step, oracle = trainer.assign.epoch, trainer.step, trainer.simulation.oracle
    save = RankSave(epoch, step, trainer.rank)
    if (epoch, step) not in oracle.ledger or save in oracle.contents:
        return  # it has made no step yet, or has saved this one in time
    content = content_of(advance(trainer.state, epoch, step + 1), trainer.assign.world, trainer.rank)
    oracle.states.setdefault(save.checkpoint, trainer.state)
    oracle.contents[save] = (trainer.agent.incarnation, content)
    trainer.agent.stage(trainer, save, content)


def _forgotten_status(seen: Observed) -> Plan:
    """A leader that writes status anew instead of on."""
    made = plan.plan(seen)
    return replace(made, status=replace(made.status, next_attempt=1, restarts=0)) if seen.now > 3 else made


MUTATIONS = (
    Mutation("holders are not sealed", replace(ALL, seal=False)),
    Mutation("the fence is not checked by commit", replace(ALL, fence_in_commit=False)),
    Mutation("commit does not look for the chunks", replace(ALL, whole_commit=False)),
    Mutation("status is written without testing anything", replace(ALL, compare_world=False, compare_status=False), settings=RIVALS),
    Mutation("status is written testing the world alone", replace(ALL, compare_status=False), settings=RIVALS),
    Mutation("a world that is tied to a size gets another", patches=((plan, "tie_of", _untied),), settings=TIED),
    Mutation("trainers are not reaped", replace(ALL, reap=False)),
    Mutation("one copy makes a watermark", patches=((upkeep, "effective_replicas", _one_copy),)),
    Mutation("the newest seen counts as safe", patches=((retention, "memory_drops", _everything_superseded),)),
    Mutation("the parent is dropped at once", patches=((retention, "memory_drops", _forgetful),)),
    Mutation("a save that may still come is not awaited", patches=((Settled, "misses", _missed_already),), settings=REFUSING),
    Mutation("a save that was handed over counts as missing", patches=((Settled, "misses", _missed_lately),), settings=REFUSING),
    Mutation("the oldest checkpoint is chosen", patches=((restore_point, "newest", _oldest),)),
    Mutation("a holder is not read", decisions=_planning(_unread)),
    Mutation("silent holders are neither awaited nor given up",
             patches=((restore_point, "_silence", _impatient), (restore_point, "silent_holders", _never_given_up))),
    Mutation("a world is cut after it was planned", decisions=Decisions(plan=_unready)),
    Mutation("the floor rises with the first rank", patches=((promotion, "_floor", _hasty_floor),), settings=PROMOTING),
    Mutation("a job that finished does not wait for its last checkpoint",
             patches=((last_checkpoint, "outstanding", _nothing_outstanding),), settings=ENDING),
    Mutation("an epoch without a step of its own has no last checkpoint",
             patches=((last_checkpoint, "final_checkpoint", _steps_of_its_own),), settings=ENDING),
    Mutation("a last checkpoint that went from memory is not made again",
             patches=((last_checkpoint, "outstanding", _never_lost),), settings=FRAGILE),
    Mutation("attempts and restarts are forgotten", decisions=Decisions(plan=_forgotten_status)),
    Mutation("what is refused ends its plan", replace(ALL, workers_alone=False), settings=WITHOUT_PODS),
    Mutation("an interrupted step is saved", patches=((Trainer, "interrupted", _saved_at_exit),), settings=SELDOM),
)  # fmt: skip
