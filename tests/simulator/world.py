"""One simulated job from its first plan to its end: everything modelled, put together, under one seed.

`simulate(seed)` is what tests, the command line and the mutation tests call. The decisions come in by `Decisions`, so
that a test can break exactly one of them.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from simulator import faults
from simulator.agents import Agent
from simulator.engine import Engine, Network, Process
from simulator.fabric import Fabric
from simulator.failing import FailingWatch
from simulator.hang_watch import HangWatch
from simulator.join_trials import JoinWatch
from simulator.operators import Operator
from simulator.oracle import Oracle, Violation
from simulator.pace_watch import PaceWatch
from simulator.rules import ALL, Rules
from simulator.settings import Settings, draw, incidents, job
from simulator.sickness import SickWatch
from simulator.spare_watch import SpareWatch
from simulator.tiers import Holder, Persistent
from simulator.trainers import Gathering, Trainer
from surefoot.protocol.identities import Checkpoint, MemoryServerInstance, RankSave
from surefoot.protocol.messages import Assign
from surefoot_operator.api.status import JobStatus
from surefoot_operator.job_snapshot import JobSnapshot
from surefoot_operator.policy.core.actions import Plan
from surefoot_operator.policy.maintenance.maintenance_plan import MaintenancePlan, plan_maintenance
from surefoot_operator.policy.membership.restore_decisions import DropsInProgress
from surefoot_operator.policy.planning.plan import plan


@dataclass(frozen=True, slots=True)
class Decisions:
    """The project's decisions, or broken ones."""

    plan: Callable[[JobSnapshot], Plan] = plan
    maintain: Callable[[JobSnapshot, Checkpoint | None, DropsInProgress], MaintenancePlan] = plan_maintenance


REAL = Decisions()


class Store:
    """status, as the API keeps it: a write tests that the stored one is still the one it was planned from."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.status = JobStatus(incidents=incidents(simulation.settings))
        self.away = self.losing = False
        """Nothing is written or read; or what is written is never answered."""
        self.lag_seconds = 0.0
        """How old what is read may be."""
        self._written: deque[tuple[float, JobStatus]] = deque([(0.0, self.status)])

    @property
    def unkind(self) -> bool:
        """Whether something is wrong with it."""
        return self.away or self.losing or bool(self.lag_seconds)

    def read(self, known: JobStatus) -> JobStatus:
        """What a leader finds that last knew `known`."""
        if self.away:
            return known
        before = self.simulation.engine.now - self.lag_seconds
        while len(self._written) > 1 and self._written[1][0] <= before:
            self._written.popleft()
        return self._written[0][1] if self.lag_seconds else self.status

    def patch(self, writer: Operator, new: JobStatus, read: JobStatus) -> bool:
        if self.away or writer.outdated:
            return False
        stored, tested = self.status.membership, read.membership
        same = (stored and (stored.generation, stored.state)) == (tested and (tested.generation, tested.state))
        if (not same and self.simulation.rules.compare_world) or (
            self.status != read and self.simulation.rules.compare_status
        ):
            return False
        old, self.status = self.status, new
        self._written.append((self.simulation.engine.now, new))
        self.simulation.oracle.written(old, new)
        self.simulation.spare_watch.written(old.membership, new.membership)
        self.simulation.sick_watch.written(new)
        self.simulation.hang_watch.written(old, new)
        self.simulation.pace_watch.written(old, new)
        self.simulation.failing_watch.written(new)
        if old.membership != new.membership and new.membership is not None:
            world = new.membership
            self.simulation.engine.say(
                "STATUS epoch {} {} parent {} members {}", world.generation, world.state, world.parent,
                [f"{m.index}:{m.incarnation}@{m.node}" for m in world.members],
            )  # fmt: skip
        return not self.losing


class Simulation:
    def __init__(
        self, seed: int, settings: Settings | None, rules: Rules, decisions: Decisions, tracing: bool = False
    ) -> None:
        self.engine = Engine(seed, tracing)
        self.troubles: Counter[str] = Counter()
        """Faults that act on each node at this moment."""
        self.settings = settings if settings is not None else draw(self.engine.rng)
        self.rules, self.decisions = rules, decisions
        self.job = job(self.settings)
        self.network = Network(self.engine)
        self.store = Store(self)
        self.oracle = Oracle(self)
        self.spare_watch = SpareWatch(self)
        self.sick_watch = SickWatch(self)
        self.hang_watch = HangWatch(self, seed)
        self.join_watch = JoinWatch(self, seed)
        self.pace_watch = PaceWatch(self)
        self.failing_watch = FailingWatch(self, seed)
        self.holders: dict[MemoryServerInstance, Holder] = {}
        self.persistent: Persistent | None = None
        if self.settings.persistent_interval is not None:
            self.persistent = Persistent(Process("persistent tier", "persistent"), rules, self.oracle)
        self._number = 0
        self._gatherings: dict[tuple[int, str], Gathering] = {}
        self.operators: list[Operator] = []
        self.odd_saved: dict[RankSave, Mapping[str, Any]] = {}
        """What each save says of the odd steps before it."""
        self.cleaned = False
        self.suspended_until = -1.0
        self.faults_until = 0.0
        self.struck: Counter[str] = Counter()
        self.skew_seconds = 0.0
        """Of the clock of whoever comes to lead next."""
        self.drift = 0.0
        """How much faster than time the clocks of leaders go."""
        self.message_seconds, self.plan_seconds = 0.0001, 0.001
        """CPU that an operator spends."""
        self.listings_slow_until = 0.0
        self.kept_alone = 0
        """Rounds that agents made without a leader."""
        self.persistent_unkind = False
        """Whether anything ever happened to the persistent tier."""
        self.machines_struck = False
        """Whether anything but a trainer was ever struck."""
        self.fabric = Fabric(self, [f"n{i}" for i in range(self.settings.nodes)])
        self.join_watch.draw()
        self.start_operator()
        faults.schedule(self)
        self.oracle.liveness.watch_liveness()

    def next_number(self) -> int:
        self._number += 1
        return self._number

    # ---- who is there -----------------------------------------------------------------------------------------------

    def start_operator(self) -> None:
        self.operators.append(Operator(self, len(self.operators) + 1))
        self.engine.say("{} starts", self.operators[-1].process.name)

    def listening(self, lagging: bool = False) -> Operator | None:
        """Who answers at the operator's address: for a while still a former leader, if it believes to lead."""
        newest = self.operators[-1]
        former = [o for o in self.operators[:-1] if o.process.running] if lagging else []
        if former and self.engine.rng.random() < 0.3:
            return former[-1]
        return newest if newest.process.alive else None

    def changed(self) -> None:
        """The API changed: whoever watches it plans again."""
        for operator in self.operators:
            if operator.process.alive:
                self.engine.after(0.005, operator.process, operator.poke)

    def gathering(self, assign: Assign, store: str) -> Gathering:
        key = (assign.generation, store)
        if key not in self._gatherings:
            self._gatherings[key] = Gathering(self, assign)
        return self._gatherings[key]

    def trainers_of(self, agent: Agent) -> list[Trainer]:
        return agent.trainers

    def ranks_of(self, epoch: int) -> list[Trainer]:
        """Whoever began to train in that epoch."""
        return [t for (known, _), g in self._gatherings.items() if known == epoch for t in g.ranks.values()]

    # ---- decisions --------------------------------------------------------------------------------------------------

    def decide(self, by: Operator, observed: JobSnapshot) -> Plan:
        made = self.decisions.plan(observed)
        self.oracle.deciding(by, observed, made.status)
        self.oracle.eyes.ending(observed, made)
        self.spare_watch.deciding(observed, made)
        self.join_watch.deciding(observed, made)
        return made

    def upkeep(self, by: Operator, observed: JobSnapshot) -> MaintenancePlan:
        kept = self.decisions.maintain(observed, by.pinned, by.going)
        self.oracle.eyes.judged(by, kept)
        self.oracle.watermarks.certify(observed, kept.watermark)
        self.oracle.eyes.keeping(observed, kept)
        self.oracle.despair(h.checkpoint for h in kept.unrecoverable)
        return kept

    @property
    def trains(self) -> bool:
        """Whether there is a world, by what is written."""
        world = self.store.status.membership
        return world is not None and world.state == "Committed" and bool(world.members)

    @property
    def over(self) -> bool:
        return self.store.status.phase in ("Complete", "Failed")

    def run(self) -> None:
        self.engine.run(self.settings.deadline_seconds, lambda: self.over)
        status = self.store.status
        if status.phase == "Complete":
            self.oracle.finished()
            if self.persistent is not None:
                self.oracle.kept(self.persistent)
        elif status.phase == "Failed" and self.settings.active_deadline_seconds is not None:
            self.oracle.ended_early(status)
        elif status.phase == "Failed":
            newest = self.oracle.liveness.readable() or self.oracle.liveness.in_sight()
            # a manifest that a fault has damaged is something to lose, whether its leader could still note it down or not
            known = (
                status.had_checkpoint or self._trained_unsaved() or bool(self.persistent and self.persistent.damaged)
            )
            if newest is not None or not known:
                self.oracle.fail(f"the job failed ({status.message}) although {newest} can be read")
        else:
            world = status.membership
            self.oracle.fail(
                f"the job does not end: phase {status.phase}, epoch {world and world.generation} {world and world.state}, "
                f"faults ended at {self.faults_until:.1f}; {status.message}"
            )

    def _trained_unsaved(self) -> bool:
        """Whether the last step was made and no checkpoint was ever whole: memory was full. Such a job fails, and says so."""
        whole = any(all(save in self.oracle.once for save in self.oracle.saves_of(c)) for c in self.oracle.states)
        return not whole and max((step for _, step in self.oracle.training.ledger), default=0) == self.settings.steps


@dataclass(frozen=True, slots=True)
class Outcome:
    seed: int
    violation: str | None
    phase: str
    events: int
    epochs: int
    drops: int
    deletes: int
    seconds: float
    """Virtual ones."""
    most_kept: int
    """Checkpoints that one holder had parts of at once."""
    check: str = ""
    """Which check found the violation."""
    faults: Mapping[str, int] = field(default_factory=dict)
    """How often each kind struck."""
    lossless: Mapping[str, int] = field(default_factory=dict)
    """How often a change of the world that nothing but announcements led to was judged, by what was announced to whom."""
    named: Mapping[str, int] = field(default_factory=dict)
    """What became of hangs, sick nodes and stragglers: whether who was at fault was named."""
    named_seconds: tuple[float, ...] = ()
    """From the begin of each slowness to its name."""
    spares_taken: int = 0
    """Commits by which a spare got a rank."""
    kept_out: int = 0
    """Commits beside which a worker on a node that failed its trial was ready."""
    trace: tuple[str, ...] = ()


def simulate(
    seed: int,
    settings: Settings | None = None,
    rules: Rules = ALL,
    decisions: Decisions = REAL,
    tracing: bool = False,
) -> Outcome:
    """Runs one seed to its end. A violation is in the outcome, with everything needed to replay it."""
    simulation = Simulation(seed, settings, rules, decisions, tracing)
    violation: str | None = None
    check = ""
    if tracing:
        text = ", ".join(f"{f.name}={getattr(simulation.settings, f.name)}" for f in dataclasses.fields(Settings))
        simulation.engine.lines.append(text)
    try:
        simulation.run()
    except Violation as found:
        violation, check = str(found), found.check
    engine, oracle = simulation.engine, simulation.oracle
    return Outcome(
        seed, violation, simulation.store.status.phase, engine.events, oracle.commits, oracle.drops, oracle.deletes,
        engine.now, oracle.most_kept, check, dict(simulation.struck), dict(oracle.lossless.judged),
        {**simulation.hang_watch.found, **simulation.sick_watch.judged(), **simulation.pace_watch.judged(),
         **simulation.failing_watch.judged()},
        tuple(simulation.pace_watch.seconds), simulation.spare_watch.taken, simulation.join_watch.kept_out,
        tuple(engine.lines),
    )  # fmt: skip
