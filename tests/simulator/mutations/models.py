"""Rules that scripts, stores and shells keep, each broken at the boundary of its model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from simulator.drains import DrainRunner
from simulator.mutations.mutation import (
    CHURNED,
    ENDING,
    LAST,
    PARTED,
    PROMOTING,
    RIVALS,
    SELDOM,
    WITHOUT_PODS,
    Mutation,
)
from simulator.rules import ALL
from simulator.scopes import Scope
from simulator.trainers import Trainer, advance, content_of
from surefoot.flush import state_machine
from surefoot.flush.state_machine import Flushing, FlushState, StagedSave, Transfer
from surefoot.protocol.identities import RankSave
from surefoot_operator.policy.membership import claim


def _saved_at_exit(trainer: Trainer) -> None:
    """A rank whose peer has died saves its last step, with a state that is in the middle of the next."""
    epoch, step, oracle = trainer.assign.generation, trainer.step, trainer.simulation.oracle
    save = RankSave(epoch, step, trainer.rank)
    if (epoch, step) not in oracle.training.ledger or save in oracle.contents:
        return  # it has made no step yet, or has saved this one in time
    content = content_of(advance(trainer.state, epoch, step + 1), trainer.assign.world_size, trainer.rank)
    oracle.states.setdefault(save.checkpoint, trainer.state)
    oracle.contents[save] = (trainer.agent.incarnation, content)
    trainer.agent.stage(trainer, save, content)


def _newest_heard(runner: DrainRunner, sealed: StagedSave) -> int:
    """A drain writes as whoever its agent belongs to now."""
    return max(sealed.save.generation, runner.agent.life.claimed_generation)


def _given_up(_: FlushState, slot: Flushing, *__: Any) -> tuple[Transfer, ...]:
    """A drain frees the slot of a save that its targets did not take, however little the slot is needed."""
    return slot.transfers


def _none_stored(_: Any) -> int:
    """A leader that does not ask the persistent tier which epochs there were."""
    return 0


def _accepts_all(trainer: Trainer, step: int) -> Any:
    """A rank says yes to a halt at a step that it is past."""
    trainer.hold = step
    return True


MODELS = (
    Mutation("holders are not sealed", replace(ALL, seal=False)),
    Mutation("the fence is not checked by commit", replace(ALL, fence_in_commit=False), settings=PARTED),
    Mutation("the fence is not checked by drop", replace(ALL, fence_in_drop=False),
             scope=Scope("no fence in drop", 1, 2, 2, 2, off=frozenset({"fence in drop"}))),
    Mutation("commit does not look for the chunks", replace(ALL, whole_commit=False)),
    Mutation("drop leaves the index entry", replace(ALL, drop_index_first=False)),
    Mutation("a drain writes as the newest epoch that its agent heard of", patches=((DrainRunner, "writer", _newest_heard),)),
    Mutation("a save that no target took is given up at once", patches=((state_machine, "_update_retries", _given_up),), settings=LAST),
    Mutation("status is written without testing anything", replace(ALL, compare_world=False, compare_status=False), settings=RIVALS),
    Mutation("status is written testing the world alone", replace(ALL, compare_status=False), settings=RIVALS),
    Mutation("trainers are not reaped", replace(ALL, reap=False)),
    Mutation("a listing counts that is older than the last index", replace(ALL, list_after_read=False), settings=PROMOTING),
    Mutation("a manifest in the persistent tier is overwritten", replace(ALL, agree_manifests=False), settings=ENDING,
             redundant="one (epoch, step, rank) is executed by one incarnation, so all who upload it have the same bytes;"
                       " the condition protects from bugs there, which have checks of their own"),
    Mutation("an upload writes before it compares", replace(ALL, compare_first=False),
             settings=replace(ENDING, persistent_interval=1, steps=40, kinds=("another save is uploaded",))),
    Mutation("an epoch that the tier names is claimed again", patches=((claim, "newest_stored_generation", _none_stored),),
             settings=replace(ENDING, persistent_interval=1, steps=40, kinds=("status is of a backup", "trainer dies"))),
    Mutation("what is refused ends its plan", replace(ALL, workers_alone=False), settings=WITHOUT_PODS),
    Mutation("an interrupted step is saved", patches=((Trainer, "interrupted", _saved_at_exit),), settings=SELDOM),
    Mutation("a rank accepts a halt that it is past", patches=((Trainer, "proposed", _accepts_all),),
             settings=replace(CHURNED, persistent_interval=None, kinds=("node is to be left", "pod is deleted"))),
)  # fmt: skip
