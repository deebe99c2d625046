"""What one incident asks of the operator of a job of thousands of workers: rounds of the real policy, and messages.

Time does not pass as in `world`: everybody answers at once, so that what is counted is work, and no wait. Called by `week`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from support.builders import job, manifest
from support.fakes.fake_world import FakeWorld
from surefoot.protocol.identities import Checkpoint

SAVED_STEP = 10
MOST_ROUNDS = 200
TICK_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class IncidentWork:
    """From the first sign of a failure until the next world is committed."""

    rounds: int
    messages: int
    """Stop and Stopped of each worker that is left, Assign of each member."""

    def seconds(self, round_seconds: float, message_seconds: float, seal_seconds: float) -> float:
        """What it takes; holders are sealed beside each other."""
        return self.rounds * round_seconds + self.messages * message_seconds + seal_seconds


def trainer_fails(world: FakeWorld) -> None:
    world.kill_trainer(0)


def node_is_lost(world: FakeWorld) -> None:
    world.kill_node(next(w.seen.node for w in world.workers.values() if w.seen.node is not None))


def work_of(workers: int, strike: Callable[[FakeWorld], None]) -> IncidentWork:
    """Lets a job of so many workers, each on a node with a holder, train, strikes it, and counts until it trains again."""
    world = _training(workers)
    before = world.status.membership
    assert before is not None
    strike(world)
    live = sum(w.seen.phase == "Running" for w in world.workers.values())
    for rounds in range(1, MOST_ROUNDS):
        world.now += TICK_SECONDS
        world.reconcile()
        now = world.status.membership
        if now is not None and now.generation > before.generation and now.state == "Committed":
            assert now.parent == Checkpoint(before.generation, SAVED_STEP), "it goes on from what was saved"
            return IncidentWork(rounds, 2 * live + len(now.members))
    raise AssertionError(f"no world after {MOST_ROUNDS} rounds: {world.status.message}")


def _training(workers: int) -> FakeWorld:
    """A world that made steps, with two copies of the last save: put on the holders as `FakeWorld` would, in less time."""
    world = FakeWorld(job(replicas=workers, least=1), node_count=workers + 1)
    while world.status.membership is None or world.status.membership.state != "Committed":
        world.now += 0.5
        world.settle()
    present = world.status.membership
    nodes = [member.node for member in present.members]
    for rank, node in enumerate(nodes):
        mine = manifest(present.generation, SAVED_STEP, rank, present.world_size)
        for place in (node, nodes[(rank + 1) % len(nodes)]):
            holder = world.nodes[place].holder
            assert holder is not None, "each node has one"
            world.nodes[place].holder = replace(holder, entries=(*holder.entries, mine))
    for worker in world.workers.values():
        if worker.agent is not None and worker.agent.seen.generation == present.generation:
            progress = replace(worker.agent.seen.progress, step=SAVED_STEP)
            saved = Checkpoint(present.generation, SAVED_STEP)
            worker.agent.seen = replace(worker.agent.seen, progress=progress, saved=saved, step_at_seconds=world.now)
    return world
