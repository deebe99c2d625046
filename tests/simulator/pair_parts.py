"""Agents that make all-reduces in pairs before they join: networks that garble or hang, ways between two nodes that are blocked.

`PairWatch` holds the promises: who fails with others that pass gets no rank while others could train, nobody well is left, and
nobody gets a rank in the middle of a trial that is waited for.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import TYPE_CHECKING, Literal

from simulator.readiness import ready_at
from surefoot.agent.health.pre_join_checks import STILL_SECONDS
from surefoot.protocol.messages import PairResult, PairStore, PairTrial
from surefoot_operator.job_snapshot import Observed, SessionSeen
from surefoot_operator.policy.core.actions import Plan

if TYPE_CHECKING:
    from simulator.agents import Agent
    from simulator.world import Simulation

MEETING_SECONDS, CALL_SECONDS, HANGS_SECONDS = 6.0, 4.0, 12.0
WAITS_SECONDS = 40.0
"""No worker that passed alone waits longer for trials with others."""

Verdict = Literal["well", "fails", "unknown"]


class PairPart:
    """One agent's part in trials that it is asked for, one at a time."""

    def __init__(self, agent: Agent) -> None:
        self._agent, self._watch = agent, agent.simulation.join_watch.pairs
        self._trial: PairTrial | None = None
        self._asked_at = 0.0
        self._said: list[PairStore | PairResult] = []
        self.met = False

    def ask(self, trial: PairTrial) -> None:
        if self._trial is not None and trial.request == self._trial.request:
            for message in self._said:
                self._agent.say(message)
            return
        self._trial, self._said, self.met = trial, [], False
        engine = self._agent.engine
        self._asked_at = engine.now
        engine.after(engine.rng.uniform(0.02, 0.3), self._agent.process, self._begin, trial)

    def stop(self) -> None:
        """Its worker gets a rank."""
        if self._trial is not None:
            self._answer(self._trial, "unknown")

    def _begin(self, trial: PairTrial) -> None:
        engine, own = self._agent.engine, self._agent
        if not trial.store:
            self._watch.hosting[trial.request] = self
            self._tell(trial, PairStore(trial.request, f"{own.node}:1"))
            engine.after(MEETING_SECONDS, own.process, self._waited, trial)
            return
        host = self._watch.hosting.get(trial.request)
        lost = host is None or not host._agent.process.running or not own.network.reaches(own.node, host._agent.node)
        if host is None or host._trial is None or host._trial.request != trial.request or lost or host._said[1:]:
            engine.after(CALL_SECONDS, own.process, self._answer, trial, "fails")
            return
        host.met = self.met = True
        verdict, seconds = self._watch.outcome(own.node, host._agent.node)
        for one, other, asked in ((self, host, trial), (host, self, host._trial)):
            engine.after(seconds, one._agent.process, one._over, asked, other, verdict)

    def _waited(self, trial: PairTrial) -> None:
        if not self.met:
            self._answer(trial, "fails")

    def _over(self, trial: PairTrial, other: PairPart, verdict: Verdict) -> None:
        self._answer(trial, verdict if other._agent.process.running else "fails")

    def _answer(self, trial: PairTrial, verdict: Verdict) -> None:
        if self._agent.node != self._watch.mute and not any(isinstance(one, PairResult) for one in self._said):
            self._tell(trial, PairResult(trial.request, "unknown" if self._stood_still() else verdict, "of a test"))

    def _stood_still(self) -> bool:
        process = self._agent.process
        return process.thawed_at >= self._asked_at and process.thawed_at - process.frozen_at > STILL_SECONDS

    def _tell(self, trial: PairTrial, message: PairStore | PairResult) -> None:
        if self._trial is not None and trial.request == self._trial.request:
            self._said.append(message)
            self._agent.say(message)


class PairWatch:
    """Of one simulated job: whose network is sick, which ways are blocked, and what follows."""

    def __init__(self, simulation: Simulation, seed: int) -> None:
        self._simulation, self._rng = simulation, random.Random(f"pairs {seed}")
        self.flaws: dict[str, str] = {}
        """What a node's network does: garbles, hangs or blocks. Others' is well."""
        self.blocked: frozenset[str] = frozenset()
        """Two nodes that do not reach each other in a trial, though each does others."""
        self.mute = ""
        """A node that is well, and from which no agent ever answers."""
        self.hosting: dict[int, PairPart] = {}
        self.left: set[str] = set()
        self._known: set[str] = set()
        """Sick ones that failed with two that pass with others, which a leader saw."""
        self.cut: set[frozenset[str]] = set()
        """Ways that were cut for a time: two ends of each."""

    def is_isolated(self, node: str) -> bool:
        """Whether this node was cut off from several others for a time: to fail with two of them then is no wonder."""
        ways = {way for way in (*self.cut, self.blocked) if node in way}
        return len(ways) > 1

    def draw(self) -> bool:
        """Whether no node of this job fails alone."""
        nodes = sorted(self._simulation.fabric.nodes)
        kind = self._rng.random()
        if kind < 0.35:
            self.flaws = {self._rng.choice(nodes): self._rng.choice(("garbles", "hangs", "blocks"))}
        elif kind < 0.45:
            self.flaws = {name: self._rng.choice(("garbles", "blocks")) for name in self._rng.sample(nodes, 2)}
        elif kind < 0.6 and len(nodes) > 1:
            self.blocked = frozenset(self._rng.sample(nodes, 2))
        elif kind < 0.7:
            self.mute = self._rng.choice(nodes)
        return self._rng.random() < 0.5

    def outcome(self, one: str, other: str) -> tuple[Verdict, float]:
        """What both of them find, after how many seconds."""
        flaws = {self.flaws.get(one), self.flaws.get(other)}
        if "hangs" in flaws:
            return "fails", HANGS_SECONDS
        if "blocks" in flaws or {one, other} == self.blocked:
            return "fails", CALL_SECONDS
        return "fails" if "garbles" in flaws else "well", self._rng.uniform(0.1, 0.6)

    def deciding(self, seen: Observed, made: Plan) -> None:
        """A leader plans: does it commit a world with somebody who is still being tried?"""
        self._known |= self.flaws.keys() & _failed_with_two(seen, self.flaws)
        old, new = seen.status.world, made.status.world
        enforced = self._simulation.settings.pre_join_check == "Enforce"
        if old is None or new is None or new == old or new.state != "Committed" or not enforced:
            return
        before = {m.incarnation for m in old.members}
        fresh = {m.incarnation for m in new.members} - before
        for session in seen.sessions:
            waits = session.tried_seconds is not None and seen.now < session.tried_seconds + WAITS_SECONDS
            if session.incarnation in fresh and waits and not self._passed(seen, session):
                self._judge(seen, session, new.epoch)

    def judged(self) -> dict[str, int]:
        """How many of those that could be known were left, and how many were not."""
        left = self.left & self.flaws.keys()
        counts = {
            "left": len(left),
            "kept": len(self._known - left),
            "never seen": len(self.flaws.keys() - self._known - left),
        }
        return {f"node sick with others, {what}": count for what, count in counts.items() if self.flaws}

    def _judge(self, seen: Observed, session: SessionSeen, epoch: int) -> None:
        mine = [p for p in seen.pairs if session.incarnation in {side.incarnation for side in p.sides}]
        there = {s.incarnation for s in seen.sessions}
        for pair in mine:
            fails = all(side.verdict == "" and side.incarnation in there for side in pair.sides)
            if fails and seen.now < pair.asked_seconds + HANGS_SECONDS:
                self._simulation.oracle.fail(f"{session.node} gets a rank in the middle of a trial with others")
        met = {side.incarnation for pair in mine for side in pair.sides}
        others = [
            s for s in seen.sessions
            if s.tried_seconds is not None and s.node != session.node and s.incarnation not in met
            and ready_at(seen, s, epoch) and s.node not in self.flaws
        ]  # fmt: skip
        if others and not mine:
            self._simulation.oracle.fail(f"{session.node} gets a rank without a trial with {others[0].node}")

    @staticmethod
    def _passed(seen: Observed, session: SessionSeen) -> bool:
        return any(
            all(side.verdict == "well" for side in pair.sides)
            and session.incarnation in {side.incarnation for side in pair.sides}
            for pair in seen.pairs
        )


def _failed_with_two(seen: Observed, flaws: Collection[str]) -> set[str]:
    """Nodes whose trials failed with two that are well, each of which passed with somebody."""
    verdicts = [(pair, tuple(side.verdict for side in pair.sides)) for pair in seen.pairs]
    passed = {side.node for pair, said in verdicts if said == ("well", "well") for side in pair.sides} - set(flaws)
    failed: dict[str, set[str]] = {}
    for pair, said in verdicts:
        if set(said) <= {"well", "fails"} and "fails" in said:
            one, other = (side.node for side in pair.sides)
            failed.setdefault(one, set()).add(other)
            failed.setdefault(other, set()).add(one)
    return {node for node, others in failed.items() if len(others & passed) > 1}
