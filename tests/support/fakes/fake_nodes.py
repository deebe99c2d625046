"""What befalls the nodes of a `FakeWorld`: they freeze, or are drained and their workers told to end, who train on a while."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from support.fakes.fake_world import FakeWorld, Worker


def drain(world: FakeWorld, name: str, seconds: float = 15.0) -> None:
    """As kubectl does."""
    world.nodes[name].cordoned = True
    for worker in world.workers.values():
        if worker.seen.node == name and worker.seen.phase == "Running" and not worker.seen.deleting:
            worker.seen = replace(worker.seen, deleting=True, message="EvictionByEvictionAPI: evicting")
            worker.parts = world.now + seconds


def uncordon(world: FakeWorld, name: str) -> None:
    world.nodes[name].cordoned = False


def freeze(world: FakeWorld, name: str) -> None:
    node = world.nodes[name]
    if node.alive and not node.frozen:
        node.frozen = True
        if node.holder is not None:
            node.holder = replace(node.holder, state="Unreachable", since_seconds=world.now)


def thaw(world: FakeWorld, name: str) -> None:
    node = world.nodes[name]
    if node.frozen:
        node.frozen = False
        if node.holder is not None:
            node.holder = replace(node.holder, state="Ready", read_generation=None)


def ends(worker: Worker) -> bool:
    """Deleted, with no time to part."""
    return worker.seen.deleting and worker.parts is None


def end_who_parted(world: FakeWorld) -> None:
    """Workers that are deleted go, once nothing keeps them."""
    for name, worker in list(world.workers.items()):
        if worker.seen.deleting and not world.frozen(worker) and _parted(world, worker):
            del world.workers[name]


def _parted(world: FakeWorld, worker: Worker) -> bool:
    """Whether nothing keeps a worker that is to end: its trainers were stopped, or its time is up."""
    present, agent = world.status.membership, worker.agent
    stopped = (
        present is not None and agent is not None and agent.seen.stopped >= present.generation > agent.seen.generation
    )
    return worker.parts is None or world.now >= worker.parts or stopped
