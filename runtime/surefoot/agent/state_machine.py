"""What an agent decides. PURE: `advance(life, event) -> (life, commands)`; the shell carries the commands out.

Held here: trainers start at most once per epoch; only a newer epoch (or leaving) stops them; `stopped` is said only
when every older trainer is reaped; facts of the epoch are said again to whichever coordinator answers next.
"""

from __future__ import annotations

from dataclasses import replace

from surefoot.agent import events as on
from surefoot.agent.events import Command, Event
from surefoot.agent.state import Life as Life
from surefoot.agent.state import Rank as Rank
from surefoot.ipc.messages import HoldAt
from surefoot.protocol.messages import (
    Assign,
    Exited,
    Finished,
    FromAgent,
    Held,
    HoldAnswer,
    Holders,
    Notice,
    Stopped,
    StoreReady,
    UnreadableSave,
)

Step = tuple[Life, tuple[Command, ...]]


def advance(life: Life, event: Event) -> Step:
    """The next state, and what to do now, in this order."""
    if life.gone:
        return life, ()
    after, said = _take(life, event)
    commands = list(said)
    # one decision can open the way to the next (reaped → stopped → started): a handful of rounds at most
    while True:
        after, more = _proceed(after)
        if not more:
            return after, tuple(commands)
        commands.extend(more)


def _take(life: Life, event: Event) -> Step:
    match event:
        case on.WarmChanged(warm):
            return replace(life, warm=warm), (on.Beat(),)
        case on.Welcomed():
            return life, (*(on.Send(fact) for fact in life.facts), on.Beat())
        case on.Assigned(assign):
            return _assigned(life, assign)
        case on.StopAsked(epoch):
            if epoch > life.claimed:
                return _claim(life, epoch), ()
            # heard again: a coordinator that returned asks anew, and is told anew
            return life, (on.Send(Stopped(life.stopped)),) if life.stopped >= epoch else ()
        case on.LeaveAsked(code):
            return replace(_leave(life, code), parting=None), ()
        case on.PartAsked(code, parting):
            if life.leaving is not None:
                return life, ()
            return replace(_leave(life, code), parting=parting), (on.Beat(),)
        case on.Flushed(epoch):
            return (replace(life, flushing=False, flushed=True) if epoch == life.started else life), ()
        case on.StacksTaken(epoch, detail):
            return _told_where(life, detail) if epoch == life.started else (life, ())
        case on.StoreUp(epoch, address):
            if epoch != life.claimed:
                return life, ()
            return _fact(replace(life, store=address), StoreReady(epoch, address))
        case on.StoreLost(epoch, detail):
            return _store_lost(life, epoch, detail)
        case on.Ticked(at):
            return _tick(life, at)
        case on.HoldAsked() | on.HoldersChanged() | on.LevelAsked():
            return _asked(life, event)
        case _:
            return _from_trainer(life, event) if event.epoch == life.started else (life, ())


def _proceed(life: Life) -> Step:
    """The next thing that the state calls for, or nothing."""
    if life.gone:
        return life, ()
    if life.alive:
        overtaken = life.claimed > life.started or (life.leaving is not None and life.parting is None)
        if overtaken and not life.killing:
            text = "no step for long when a newer epoch came"
            return _end(life, Exited(life.started, -1, -9, text, True, life.step, "hang") if life.stands else None)
        return life, ()
    if life.stopped < life.claimed:
        return replace(life, stopped=life.claimed), (on.StopStore(life.claimed), on.Send(Stopped(life.claimed)))
    finished = _finished(life)
    if (finished or life.leaving is not None) and not life.flushed:
        return (life, ()) if life.flushing else (replace(life, flushing=True), (on.Flush(life.started),))
    if finished and not any(isinstance(fact, Finished) for fact in life.facts):
        return _fact(life, Finished(life.started, 0, life.step))
    if life.leaving is not None:
        return replace(life, gone=True), (on.Exit(_exit_code(life.leaving, life)),)
    return _start(life)


def _leave(life: Life, code: int) -> Life:
    """This worker is to end. The code is that of the first who asked."""
    return life if life.leaving is not None else replace(life, leaving=code, flushed=False)


def _exit_code(asked: int, life: Life) -> int:
    """A trainer that failed by itself gives the worker its own code, so that a container says what went wrong."""
    own = next((r.code for r in life.ranks if r.code is not None and r.code > 0), None)
    return own if asked and own is not None else asked


def _start(life: Life) -> Step:
    assign = life.assign
    if assign is None or assign.epoch <= life.started or not life.warm:
        return life, ()
    if assign.hosts_store and life.store_epoch < assign.epoch:
        return replace(life, store_epoch=assign.epoch), (on.StartStore(assign.epoch),)
    store = life.store or assign.store
    if store is None:
        return life, ()
    ranks = tuple(Rank(local=i, rank=assign.first_rank + i) for i in range(assign.local_ranks))
    fresh = replace(
        life,
        started=assign.epoch,
        ranks=ranks,
        killing=False,
        flushing=False,
        flushed=False,
        hold=None,
        loss=None,
        step_seconds=None,
        stall_seconds=None,
        reported_level=0,
        progress_at=None,
        begun_at=None,
        last_word=None,
    )
    return fresh, (on.StartTrainers(assign, store), on.Beat())


def _finished(life: Life) -> bool:
    done = bool(life.ranks) and all(r.code == 0 for r in life.ranks)
    return done and life.started == life.claimed


def _claim(life: Life, epoch: int) -> Life:
    """A newer epoch is known: nothing of an older one counts any more."""
    return replace(life, claimed=epoch, assign=None, store=None, facts=(), hold=None, level=0)


def _assigned(life: Life, assign: Assign) -> Step:
    if assign.epoch < life.claimed:
        return life, ()
    if assign.epoch > life.claimed:
        life = _claim(life, assign.epoch)
    life = replace(life, assign=assign)
    holders = Holders(assign.epoch, assign.holders, assign.targets, assign.replicas)
    return life, (on.Retarget(holders),)


def _asked(life: Life, event: on.HoldAsked | on.HoldersChanged | on.LevelAsked) -> Step:
    match event:
        case on.HoldersChanged(holders):
            if life.assign is None or holders.epoch != life.assign.epoch:
                return life, ()
            changed = replace(life.assign, holders=holders.holders, targets=holders.targets, replicas=holders.replicas)
            return replace(life, assign=changed), (on.Retarget(holders),)
        case on.LevelAsked(epoch, level):
            if epoch != life.claimed or level == life.level:
                return life, ()
            return replace(life, level=level), (on.TellLevel(level),)
        case on.HoldAsked(hold):
            return _hold(life, hold.epoch, HoldAt(hold.step, hold.verb))


def _hold(life: Life, epoch: int, hold: HoldAt) -> Step:
    here = epoch == life.started == life.claimed and life.alive and not life.killing
    if here and life.parting is not None and hold.verb != "cancel":
        life = replace(life, parting=replace(life.parting, word_by=life.parting.part_by))
    if hold.verb == "propose":
        if not here or not all(r.attached and r.alive and not r.closed for r in life.ranks):
            return life, (on.Send(HoldAnswer(epoch, hold.step, accepted=False)),)
        if life.hold is not None and life.hold.step == hold.step and all(r.accepted for r in life.ranks):
            return life, (on.Send(HoldAnswer(epoch, hold.step, accepted=True)),)
        ranks = tuple(replace(r, accepted=None) for r in life.ranks)
        return replace(life, hold=hold, ranks=ranks), (on.TellHold(hold),)
    if not here:
        return life, ()
    if hold.verb == "bind":
        return replace(life, hold=hold), (on.TellHold(hold),)
    ranks = tuple(replace(r, accepted=None, held=None) for r in life.ranks)
    facts = tuple(fact for fact in life.facts if not isinstance(fact, Held))
    return replace(life, hold=None, ranks=ranks, facts=facts), (on.TellHold(hold),)


def _store_lost(life: Life, epoch: int, detail: str) -> Step:
    if epoch != life.claimed:
        return life, ()
    if life.started == epoch:
        return life, (on.Send(Notice("StoreLost", f"the store of epoch {epoch} ended while trainers ran: {detail}")),)
    assign = life.assign
    first = assign.first_rank if assign is not None else 0
    # the epoch cannot start; `started` moves on so that it is not tried a second time
    return _fact(
        replace(life, started=epoch, ranks=()),
        Exited(epoch, first, 1, f"the epoch's store could not be hosted: {detail}", secondary=False, step=0),
    )


def _tick(life: Life, at: float) -> Step:
    life = replace(life, ticked_at=at, begun_at=at if life.alive and life.begun_at is None else life.begun_at)
    if life.parting is not None and at >= life.parting.word_by:
        life = replace(life, parting=None)
    if life.progress_at is None or not life.alive or life.killing:
        return life, ()
    waiting = any(r.held is not None or r.closed or not r.alive for r in life.ranks)
    if waiting or at - life.progress_at <= life.step_timeout_seconds:
        return life, ()
    cause = f"hang: no step for {life.step_timeout_seconds:g} s after step {life.step}"
    return _end(life, Exited(life.started, _behind(life), -9, cause, secondary=False, step=life.step, kind="hang"))


def _end(life: Life, word: Exited | None) -> Step:
    """Kills the trainers that are left; if they stand still, asks first where, since nobody can afterwards."""
    if life.stands:
        return replace(life, killing=True, last_word=word), (on.TakeStacks(life.started),)
    after, said = (life, ()) if word is None else _fact(life, word)
    # survivors first: every millisecond they live is a millisecond in which they block on a dead peer
    return replace(after, killing=True), ((on.KillTrainers(life.started), *said) if life.alive else said)


def _told_where(life: Life, detail: str) -> Step:
    word, life = life.last_word, replace(life, last_word=None)
    kill = (on.KillTrainers(life.started),) if life.alive else ()
    if word is None:
        return life, kill
    word = replace(word, detail=detail)
    after, said = _fact(life, word) if life.started == life.claimed else (life, (on.Send(word),))
    return after, (*said, *kill)


def _behind(life: Life) -> int:
    """The one local rank that stands at an earlier step than all others here; −1 where none does: a tie tells nothing."""
    slow = [r.rank for r in life.ranks if r.step == life.step]
    return slow[0] if len(slow) == 1 < len(life.ranks) else -1


TrainerEvent = (
    on.TrainerExited
    | on.Attached
    | on.StepDone
    | on.HoldAnswered
    | on.HoldReached
    | on.Restored
    | on.RestoreImpossible
    | on.Closed
)


def _from_trainer(life: Life, event: TrainerEvent) -> Step:
    mine = next((r for r in life.ranks if r.local == event.local), None)
    if mine is None:
        return life, ()
    match event:
        case on.TrainerExited():
            return _exited(life, mine, event)
        case on.StepDone():
            return _stepped(life, mine, event)
        case on.Attached():
            return _with(life, mine, attached=True), ()
        case on.Closed():
            return _with(life, mine, closed=True), ()
        case on.HoldAnswered():
            return _hold_answered(life, mine, event)
        case on.HoldReached(step=step):
            after = _with(life, mine, held=step)
            together = all(r.held == step for r in after.ranks)
            return _fact(after, Held(life.started, step)) if together else (after, ())
        case on.Restored(source=source):
            after = _with(life, mine, source=source)
            return after, (on.Beat(),) if after.restored else ()
        case on.RestoreImpossible(checkpoint=checkpoint, absent=absent, detail=detail):
            return _fact(life, UnreadableSave(life.started, checkpoint, mine.rank, absent, detail))


def _exited(life: Life, mine: Rank, event: on.TrainerExited) -> Step:
    after = _with(life, mine, alive=False, code=event.code)
    if event.code == 0 or life.killing:
        return after, (on.Beat(),) if event.code == 0 or not after.alive else ()
    blamed = next((r for r in life.ranks if r.local == event.cause_local), mine)
    fact = Exited(life.started, blamed.rank, event.code, event.cause, event.secondary, life.step)
    return _end(after, fact)


def _stepped(life: Life, mine: Rank, event: on.StepDone) -> Step:
    first = life.step == 0
    after = replace(
        _with(life, mine, step=event.step, settled=event.settled), progress_at=event.at, reported_level=event.level
    )
    if mine.local == 0:
        after = replace(after, loss=event.loss, step_seconds=event.seconds)
        if event.stall_seconds is not None:
            after = replace(after, stall_seconds=event.stall_seconds)
    return after, (on.Beat(),) if first and after.step > 0 else ()


def _hold_answered(life: Life, mine: Rank, event: on.HoldAnswered) -> Step:
    if life.hold is None or life.hold.step != event.step or mine.accepted is not None:
        return life, ()
    refused_before = any(r.accepted is False for r in life.ranks)
    after = _with(life, mine, accepted=event.accepted)
    answers = [r.accepted for r in after.ranks]
    if not event.accepted and not refused_before:
        return after, (on.Send(HoldAnswer(life.started, event.step, accepted=False)),)
    if all(answers):
        return after, (on.Send(HoldAnswer(life.started, event.step, accepted=True)),)
    return after, ()


def _with(life: Life, rank: Rank, **changes: object) -> Life:
    """`life` with one rank changed."""
    changed = replace(rank, **changes)  # type: ignore[arg-type]  # field names are checked by replace itself
    return replace(life, ranks=tuple(changed if r.local == rank.local else r for r in life.ranks))


def _fact(life: Life, fact: FromAgent) -> Step:
    """Something that stays true for this epoch: said now, and again on every Welcome."""
    return replace(life, facts=(*life.facts, fact)), (on.Send(fact),)
