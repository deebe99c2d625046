"""Whether spares answer losses: who is ready trains, ranks stay where they were, and what was taken is made again.

Judges each commit by the snapshot that it was decided from, in words of its own: a policy that overlooks a spare cannot
hide it from here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from simulator.readiness import fails, ready_at
from surefoot_operator.api.status import Membership
from surefoot_operator.job_snapshot import JobSnapshot
from surefoot_operator.policy.core.actions import Plan

if TYPE_CHECKING:
    from simulator.world import Simulation

REPLACED_SECONDS = 8.0
"""After so long a worker was asked for in the place of a spare that was taken."""


class SpareWatch:
    """Of one simulated job."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self.taken = 0
        """Commits by which a spare got a rank."""

    def deciding(self, seen: JobSnapshot, made: Plan) -> None:
        """A leader plans: does it commit a world?"""
        old, new = seen.status.membership, made.status.membership
        if old is None or new is None or new == old or new.state != "Committed" or not new.members:
            return
        ready = [s for s in seen.sessions if ready_at(seen, s, new.generation)]
        inside = {m.incarnation for m in new.members}
        settings = self._simulation.settings
        lacking = 1.0 - len(new.members) / settings.workers
        left = {one.name for one in made.status.unhealthy_nodes}
        # a smaller world is right where failures on that node cost more of its time than the worker that it lacks
        left |= {one.name for one in made.status.excluded_nodes if (one.lost_time_ratio or 0.0) >= lacking}
        waiting = [s.index for s in ready if s.incarnation not in inside and not fails(seen, s) and s.node not in left]
        if waiting and len(new.members) < settings.workers and not settings.tied:
            self._simulation.oracle.fail(f"workers {waiting} are ready beside a world of {len(new.members)}")
        self._judge_ranks(old, new)

    def written(self, old: Membership | None, new: Membership | None) -> None:
        """A commit is stored: what it took of the spares is made again."""
        if old is None or new is None or new.state != "Committed" or old.state == "Committed" or not old.members:
            return
        same = len(old.members) == len(new.members)
        if same and {m.index for m in new.members} - {m.index for m in old.members}:
            self.taken += 1
            engine = self._simulation.engine
            engine.after(
                REPLACED_SECONDS,
                engine.environment,
                self._judge_pods,
                new.generation,
                len(self._simulation.operators),
                {},
            )

    def _judge_ranks(self, old: Membership, new: Membership) -> None:
        if len(old.members) != len(new.members):
            return
        before = {m.incarnation: place for place, m in enumerate(old.members)}
        for place, member in enumerate(new.members):
            if before.get(member.incarnation, place) != place:
                self._simulation.oracle.fail(f"worker {member.index} changes its rank though the world keeps its size")

    def _judge_pods(self, epoch: int, operators: int, before: dict[int, int]) -> None:
        """`before`: attempts of the workers that were missing at the last look; one may have died a moment ago."""
        simulation = self._simulation
        engine, world, fabric = simulation.engine, simulation.store.status.membership, simulation.fabric
        if engine.now < fabric.unkind_until + REPLACED_SECONDS:  # what was refused is asked for again after a pause
            left = fabric.unkind_until + REPLACED_SECONDS - engine.now
            engine.after(left, engine.environment, self._judge_pods, epoch, operators, {})
            return
        moved = world is None or world.generation != epoch or operators != len(simulation.operators)
        quiet = fabric.answers == "at once" and not simulation.store.unkind and simulation.operators[-1].process.running
        if moved or simulation.over or simulation.job.spec.suspend or not quiet:
            return
        if any(rank.done for rank in simulation.ranks_of(epoch)):
            return  # a world that has finished needs no spare
        missing = self._missing()
        if missing.items() & before.items():
            wanted = simulation.settings.workers + simulation.settings.spares
            self._simulation.oracle.fail(
                f"{wanted - len(missing)} of {wanted} workers are there, {REPLACED_SECONDS:g} s after a spare was taken"
            )
        elif missing:
            engine.after(REPLACED_SECONDS, engine.environment, self._judge_pods, epoch, operators, missing)

    def _missing(self) -> dict[int, int]:
        """Workers without a pod, and the newest attempt that each had."""
        simulation = self._simulation
        newest: dict[int, int] = {}
        for pod in simulation.fabric.pods.values():
            newest[pod.index] = max(pod.attempt, newest.get(pod.index, 0))
        there = {pod.index for pod in simulation.fabric.pods.values() if not pod.over}
        wanted = range(simulation.settings.workers + simulation.settings.spares)
        return {index: newest.get(index, 0) for index in wanted if index not in there}
