"""Modelled trainers: ranks that restore exactly the parent, step together, save when due, and hold when asked.

A step of an epoch is finished only if every rank of its world takes part; each rank hears of it in its own time, so
some may have finished a step that others never will. What a rank's state is after a step depends on the whole history
that led to it, so restoring anything else than the parent shows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from simulator.engine import Process, Refusal, Unavailable
from simulator.tiers import CHUNKS
from surefoot.agent import agent_state as on
from surefoot.agent.coordinator_requests import knows_all_servers
from surefoot.ipc.trainer_messages import (
    AllServers,
    Attach,
    Detach,
    FromTrainer,
    RequestAllServers,
    RestoreDone,
    RestoreFailed,
    StepReport,
)
from surefoot.protocol.checkpoints.save_state import ClosedSteps
from surefoot.protocol.identities import Checkpoint, MemoryServerEndpoint, RankSave
from surefoot.protocol.messages import Assign, Barrier, BarrierReached, BarrierReply, IntervalExponent
from surefoot.protocol.progress import AnomalyRun, Progress, RankActivity

if TYPE_CHECKING:
    from simulator.agents import Agent
    from simulator.world import Simulation


HOLD_SLOT_SECONDS = 30.0
"""How long a program that ends waits for a slot for its last step, as `checkpointer.saving` has it."""


def advance(state: int, epoch: int, step: int) -> int:
    """The state after one more step: a pure function of the history."""
    return hash((state, epoch, step)) & (2**62 - 1)


def content_of(state: int, world: int, rank: int) -> int:
    """What one rank saves of it."""
    return hash((state, world, rank)) & (2**62 - 1)


class Gathering:
    """The collectives of one epoch's world under one store: a step is released once all ranks arrived."""

    def __init__(self, simulation: Simulation, assign: Assign) -> None:
        self.simulation = simulation
        self.epoch, self.world = assign.generation, assign.world_size
        self.ranks: dict[int, Trainer] = {}
        self._arrived: dict[int, set[int]] = {}

    def arrive(self, rank: Trainer, step: int) -> None:
        waiting = self._arrived.setdefault(step, set())
        waiting.add(rank.rank)
        self._release(step)

    def _release(self, step: int) -> None:
        """All must be there, alive, and able to talk to each other: else they wait, perhaps for ever."""
        if len(self._arrived[step]) < self.world:
            return
        network, engine = self.simulation.network, self.simulation.engine
        trainers = [self.ranks[r] for r in sorted(self._arrived[step])]
        if any(not t.process.alive for t in trainers):
            return
        sites = sorted({t.process.site for t in trainers})
        if any(not network.reaches(a, b) for i, a in enumerate(sites) for b in sites[i + 1 :]):
            engine.after(0.25, engine.environment, self._release, step)
            return
        del self._arrived[step]
        for trainer in trainers:
            engine.after(engine.rng.uniform(0.0, 0.004) + self._behind(), trainer.process, trainer.finish, step)

    def _behind(self) -> float:
        """Behind the last collective each rank has something to do of its own, now and then for long."""
        rng = self.simulation.engine.rng
        return rng.uniform(0.0, self.simulation.settings.step_seconds) if rng.random() < 0.03 else 0.0

    def died(self, gone: Trainer) -> None:
        """The others' collectives break at once, unless their machines cannot hear of it."""
        for trainer in self.ranks.values():
            silent = gone.process.silent or not self.simulation.network.reaches(gone.process.site, trainer.process.site)
            if trainer.process.alive and not silent:
                delay = self.simulation.engine.rng.uniform(0.01, 0.03)
                self.simulation.engine.after(delay, trainer.process, trainer.exit, 1, "peer", True)


class Trainer:
    """One rank of one epoch."""

    def __init__(self, agent: Agent, assign: Assign, store: str, local: int) -> None:
        self.agent, self.simulation = agent, agent.simulation
        self.engine, self.network = agent.engine, agent.network
        self.known, self.partial = assign.servers, not knows_all_servers(assign)
        """Holders that it may read, and whether there are more."""
        self._unfound: Callable[[], None] | None = None
        """What goes on once it was told of them all."""
        self.assign, self.local, self.rank = assign, local, assign.first_rank + local
        self.process = Process(f"trainer e{assign.generation} r{self.rank}", agent.process.site)
        self.step, self.state, self.level = 0, 0, 0
        self._staged_step = 0
        self.asked = agent.life.interval_exponent
        """The operator's level, as of when this rank was told."""
        self.restored, self.done = False, False
        self.arrived = 0
        """The newest step whose collective it waits in, or has left."""
        self.sick = False
        """Whether its model is no number."""
        self.ahead = 0
        """Steps whose data was left out so far, along its history."""
        self.odd = AnomalyRun()
        self.hold: int | None = None
        self._pace, self._worked, self._left_at = RankActivity(self.rank, 1, 0, 0, 0), 0.0, -1.0
        """Looks at it, what it needs for the step under way, and when it left the last one."""
        self._settings = self.simulation.settings
        self._base = self.simulation.job.spec.checkpoint.memory.base_steps
        self.gathering = self.simulation.gathering(assign, store)
        self.gathering.ranks[self.rank] = self

    # ---- restore ----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        self._send(Attach(self.rank, self.assign.generation, 0))
        parent = self.assign.parent
        if parent is None:
            self._restored(0, "none")
            return
        entry = next((e for e in self.assign.lineage if e[0] == parent.generation), None)
        size = entry[2] if entry else 0
        self._fetch(parent, size, 0, {}, 0.05)

    def _fetch(self, parent: Checkpoint, size: int, rank: int, found: dict[int, int], backoff: float) -> None:
        """Every rank save of the parent, each from the first copy that is good; never of another checkpoint."""
        if rank == size:
            self.simulation.oracle.training.restoring(self, parent, found)
            self._restored(parent.step, "memory")
            return
        save = RankSave(parent.generation, parent.step, rank)
        sources = [h for e in self.known if (h := self.agent.holder(e.instance)) is not None]
        good = [h for h in sources if h.process.alive and h.holds(save)]

        def tried(content: Any) -> None:
            if content in ("bad", "absent"):
                still_good = [h for h in good if h.process.alive and h.holds(save)]
                self.simulation.oracle.training.unreadable(self, save, still_good)
            self._got(parent, size, found, backoff, save, content)

        self._try(save, [*sources], {"silent": 0, "bad": 0}, tried)

    def _got(
        self, parent: Checkpoint, size: int, found: dict[int, int], backoff: float, save: RankSave, content: Any
    ) -> None:
        if isinstance(content, int):
            found[save.rank] = content
            self._fetch(parent, size, save.rank + 1, found, backoff)
        elif self.partial:
            self._unfound = lambda: self._fetch(parent, size, save.rank, found, backoff)
            self._seek()
        elif content == "silent":
            self.engine.after(backoff, self.process, self._fetch, parent, size, save.rank, found, min(2.0, backoff * 2))
        else:
            self.engine.say("rank {} of epoch {} cannot read {}: {}", self.rank, self.assign.generation, save, content)
            absent = content == "absent"
            self._send(RestoreFailed(parent, absent, str(content)))

    def _seek(self) -> None:
        """What is not found on the holders that it knows may be on others: asks, until it was told of all."""
        if self.partial:
            self._send(RequestAllServers())
            self.engine.after(5.0, self.process, self._seek)

    def told_holders(self, holders: tuple[MemoryServerEndpoint, ...]) -> None:
        again, self._unfound = self._unfound, None
        self.known, self.partial = holders, False
        if again is not None:
            again()

    def _try(self, save: RankSave, sources: list[Any], seen: dict[str, int], done: Callable[[Any], None]) -> None:
        if not sources:
            self._try_persistent(save, seen, done)
            return
        holder, rest = sources[0], sources[1:]

        def answered(answer: Any) -> None:
            self._judge(answer, seen, lambda: self._try(save, rest, seen, done), done)

        self.network.call(self.process, holder.process, lambda: holder.get(save), answered)

    def _try_persistent(self, save: RankSave, seen: dict[str, int], done: Callable[[Any], None]) -> None:
        def give_up() -> None:
            done("silent" if seen["silent"] else "bad" if seen["bad"] else "absent")

        tier = self.simulation.persistent
        if tier is None:
            give_up()
            return
        self.network.call(
            self.process, tier.process, lambda: tier.get(save), lambda answer: self._judge(answer, seen, give_up, done)
        )

    @staticmethod
    def _judge(answer: Any, seen: dict[str, int], onwards: Callable[[], None], done: Callable[[Any], None]) -> None:
        if isinstance(answer, Unavailable | Refusal):
            gone = str(answer) == "refused"  # its port is closed: it answered that it is no more
            seen["silent"] += 0 if gone else 1
            onwards()
        elif answer is None:
            onwards()
        elif len(answer) < CHUNKS or any(p.damaged for p in answer) or len({p.content for p in answer}) > 1:
            seen["bad"] += 1
            onwards()
        else:
            done(answer[0].content)

    def _restored(self, step: int, source: str) -> None:
        parent = self.assign.parent
        self.step = self._staged_step = step
        self.state = self.simulation.oracle.state_at(parent) if parent else 0
        numerics = self.simulation.oracle.numerics
        self.sick = numerics.is_sick(parent)
        if parent is not None:
            of_rank = RankSave(parent.generation, parent.step, self._restored_rank(parent))
            self.odd = AnomalyRun.from_stored_values(self.simulation.odd_saved[of_rank])
        self.ahead = numerics.place_behind(parent) - step + self.assign.skip_steps
        self.restored = True
        self._send(RestoreDone(step, source, 0, 0.0, self.odd))
        self._next()

    def _restored_rank(self, parent: Checkpoint) -> int:
        """Whose plain values a rank restores: its own in a world of the same size, else the first one's."""
        return self.rank if self.simulation.oracle.sizes[parent.generation] == self.assign.world_size else 0

    # ---- stepping ---------------------------------------------------------------------------------------------------

    def _next(self) -> None:
        if self.step >= self._settings.steps:
            self._finish_program()
            return
        seconds = self._settings.step_seconds * self.engine.rng.uniform(0.8, 1.2)
        seconds *= self.simulation.pace_watch.factor(self)
        self._worked, self._left_at = seconds, self.engine.now
        self.engine.after(seconds, self.process, self._arrive, self.step + 1)

    def _arrive(self, step: int) -> None:
        if self.simulation.hang_watch.is_hung(self):
            return
        self.arrived = step
        self.gathering.arrive(self, step)

    def finish(self, step: int) -> None:
        self.step = step
        self.state = advance(self.state, self.assign.generation, step)
        self.simulation.oracle.training.stepped(self)
        kind = self.simulation.oracle.numerics.stepped(self, step + self.ahead, self.sick)
        self.sick = kind == "not-finite"
        self.odd = self.odd.with_step(step, kind, f"step {step} is odd")
        progress = Progress(
            step,
            step_seconds=self._settings.step_seconds,
            interval_exponent=max(self.level, self.asked),
            closed_steps=ClosedSteps(step - 1),
            loss_is_finite=not self.sick,
            activities=self._looked(),
            **self.odd.progress_fields,
        )
        self._send(StepReport(progress, None, False))
        holding = self.hold == step
        if holding:
            self._stage_or_wait(step)
        elif self._due(step):
            self._stage(step)
        if not holding:
            self._next()

    def _looked(self) -> tuple[RankActivity, ...]:
        """What looks during the step that ends now have found."""
        if not self._settings.paced:
            return ()
        passed = self.engine.now - self._left_at
        self._pace = self.simulation.pace_watch.looked(self._pace, self._worked, passed)
        return (self._pace,)

    def _due(self, step: int) -> bool:
        level = max(self.level, self.asked)
        return step % (self._base << level) == 0 or step == self._settings.steps

    def _stage(self, step: int) -> bool:
        if self._fails():
            return False  # no reason to save less often
        staged = self._seal(step)
        self.level = max(0, self.level - 1) if staged else min(max(3, self.asked), max(self.level, self.asked) + 1)
        return staged

    def _fails(self) -> bool:
        """Whether a save fails, whatever slots there are."""
        return bool(self._settings.refused) and self.engine.rng.random() < self._settings.refused

    def _seal(self, step: int) -> bool:
        """Seals a slot with what this rank holds; False where none is free."""
        save = RankSave(self.assign.generation, step, self.rank)
        content = content_of(self.state, self.assign.world_size, self.rank)
        staged = self.agent.stage(self, save, content)
        if staged:
            self.simulation.odd_saved[save] = self.odd.stored_values
            self.simulation.oracle.numerics.saved(save, self.odd.kind if self.odd.last_step == step else "")
            self.simulation.oracle.saved(save, self.agent.incarnation, content, self.state)
            self._staged_step = step
        return staged

    def _stage_or_wait(self, step: int) -> None:
        """Held: the save of exactly this step must be staged before anyone is told."""
        if self.hold != step:
            return
        if not self._stage(step):
            self.engine.after(0.05, self.process, self._stage_or_wait, step)
            return
        self._send(BarrierReached(self.assign.generation, step))

    def _finish_program(self) -> None:
        self._close(self.engine.now + HOLD_SLOT_SECONDS)

    def _close(self, until_seconds: float) -> None:
        """A program that ends without its last step staged waits for a slot once more, as `Checkpointer.close` does."""
        waits = self._staged_step != self.step and not self._fails() and not self._seal(self.step)
        if waits and self.engine.now < until_seconds:
            self.engine.after(0.05, self.process, self._close, until_seconds)
            return
        self.done = True
        self._send(Detach(self.step, save_requested=True))
        self.engine.after(0.01, self.process, self.exit, 0, "", False)

    # ---- what the agent asks ----------------------------------------------------------------------------------------

    def proposed(self, step: int) -> bool:
        if self.step >= step or step > self._settings.steps:
            return False
        if self._settings.unwilling and self.engine.rng.random() < self._settings.unwilling:
            return False
        held = self.step == self.hold  # by an operator that is past: whoever waits for another step does not wait here
        self.hold = step
        self.simulation.oracle.eyes.accepts(self, step)
        if held:
            self._next()
        return True

    def receive(self, message: Barrier | IntervalExponent | AllServers) -> None:
        """A message of the real agent; a proposed barrier is answered, atomically with stepping."""
        match message:
            case Barrier(generation, step, "proposed"):
                self._send(BarrierReply(generation, step, self.proposed(step)))
            case Barrier(step=step, phase="bound"):
                self.simulation.oracle.eyes.bound(self, step)
            case Barrier():
                if self.hold is not None:
                    waiting, self.hold = self.step == self.hold, None
                    if waiting:
                        self._next()
            case IntervalExponent(exponent=level):
                self.follow(level)
            case AllServers(holders):
                self.told_holders(holders)

    def _send(self, message: FromTrainer) -> None:
        self.agent.tell_trainer(on.TrainerMessage(self.assign.generation, self.local, message, self.engine.now))  # type: ignore[arg-type]

    def follow(self, level: int) -> None:
        """Ranks hear of a level at different moments, also of an older one later."""
        self.asked = level
        self.engine.say("rank {} of epoch {} saves at level {}", self.rank, self.assign.generation, level)

    def exit(self, code: int, cause: str, secondary: bool) -> None:
        if not self.process.alive:
            return
        if secondary:
            self.interrupted()
        self.engine.kill(self.process)
        if code:
            self.gathering.died(self)
        self.agent.exited(self, code, cause, secondary)

    def interrupted(self) -> None:
        """In the middle of a step, by the error of a broken collective: what is then is the state of no step, so nothing
        is saved, whatever exit handlers there are."""

    def kill(self, silent: bool = False) -> None:
        """SIGKILL by the agent, a fault, or the end of the machine."""
        if self.process.alive:
            self.engine.kill(self.process, silent)
            self.gathering.died(self)
            if self.agent.process.alive:
                self.engine.after(0.02, self.agent.process, self.agent.exited, self, -9, "killed", False)
