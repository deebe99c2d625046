"""Records that can be read no more, or are gone: each copy by itself, in one holder's memory or in the persistent tier.

What is unreadable is never absent: another copy serves, or the next older checkpoint, or a standstill that says why.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from simulator.engine import Refusal
from simulator.hindrances import unkind
from simulator.striking import calm, disturb, later, some_holder
from simulator.tiers import CHUNKS, Holder, Piece, manifest
from surefoot.protocol.identities import RankSave

if TYPE_CHECKING:
    from simulator.world import Simulation


def _before_the_end(simulation: Simulation, holder: Holder | None) -> list[RankSave]:
    """What it has, but for the last step: a job that has ended saves no more."""
    steps = simulation.settings.steps
    return sorted(save for save in holder.index if save.step < steps) if holder is not None else []


def _corrupt(simulation: Simulation, duration: float) -> None:
    """One stored chunk loses a bit."""
    holder = some_holder(simulation)
    if holder is None or not holder.chunks:
        return
    key = simulation.engine.rng.choice(sorted(holder.chunks))
    piece = holder.chunks[key]
    simulation.engine.say("FAULT {} damages {} part {}", holder.id, *key)
    holder.chunks[key] = type(piece)(piece.content, piece.part, damaged=True)


def _lose_chunk(simulation: Simulation, duration: float) -> None:
    """One stored chunk is gone from under its index entry: a hole, which no reading anew fills."""
    holder = some_holder(simulation)
    if holder is None:
        return
    indexed = sorted(key for key in holder.chunks if key[0] in holder.index)
    if indexed:
        key = simulation.engine.rng.choice(indexed)
        simulation.engine.say("FAULT {} loses {} part {}", holder.id, *key)
        del holder.chunks[key]
        holder.holes.add(key)


def _damage_entry(simulation: Simulation, duration: float) -> None:
    """An index entry of one holder."""
    holder = some_holder(simulation)
    found = _before_the_end(simulation, holder)
    if holder is not None and found:
        victim = simulation.engine.rng.choice(found)
        simulation.engine.say("FAULT the index entry of {} on {} is damaged", victim, holder.id)
        holder.damaged.add(victim)


def _damage_layout(simulation: Simulation, duration: float) -> None:
    """A layout record of one holder: every save there that has it is one copy less."""
    holder = some_holder(simulation)
    found = _before_the_end(simulation, holder)
    if holder is not None and found and len(found) == len(holder.index):
        victim = simulation.engine.rng.choice(sorted(holder.layouts))
        simulation.engine.say("FAULT layout {} on {} is damaged", victim, holder.id)
        holder.layouts[victim] = False


def _some_record(simulation: Simulation) -> RankSave | None:
    """A manifest of the persistent tier. The last step's stay: a job that has ended looks no more."""
    tier, steps = simulation.persistent, simulation.settings.steps
    found = [save for save in sorted(tier.manifests) if save.step < steps] if tier is not None else []
    return simulation.engine.rng.choice(found) if found else None


def _damage_record(simulation: Simulation, duration: float) -> None:
    """A manifest loses a bit."""
    tier, victim = simulation.persistent, _some_record(simulation)
    if tier is None or victim is None:
        return
    simulation.engine.say("FAULT the manifest of {} in the persistent tier is damaged", victim)
    unkind(simulation, 0.0)
    tier.damaged[victim] = simulation.engine.now


def _lose_record(simulation: Simulation, duration: float) -> None:
    """A manifest's file is removed."""
    tier, victim = simulation.persistent, _some_record(simulation)
    if tier is None or victim is None:
        return
    simulation.engine.say("FAULT the manifest of {} in the persistent tier is gone", victim)
    unkind(simulation, 0.0)
    del tier.manifests[victim]
    tier.gone.add(victim)


def _wear_layout(simulation: Simulation, duration: float) -> None:
    """The shared layout record of the persistent tier; now and then also those beside every save that there is."""
    tier, rng = simulation.persistent, simulation.engine.rng
    if tier is None or not tier.layouts:
        return
    victim, all_of_them = rng.choice(sorted(tier.layouts)), rng.random() < 0.5
    simulation.engine.say("FAULT layout {} in the persistent tier is damaged, all of it: {}", victim, all_of_them)
    unkind(simulation, 0.0)
    tier.layouts[victim] = False
    if all_of_them:
        tier.worn |= {save for save, entry in tier.manifests.items() if entry.layout == victim}
        tier.lost_layouts[victim] = simulation.engine.now


def _upload_anew(simulation: Simulation, duration: float) -> None:
    """A run that began from a backup of the status uploads another save under a name that is committed."""
    tier, victim = simulation.persistent, _some_record(simulation)
    if tier is None or victim is None:
        return
    entry = tier.manifests[victim]
    content = simulation.engine.rng.getrandbits(62)
    other = manifest(victim, entry.world_size, entry.incarnation, content, entry.saved_at, entry.objects)
    simulation.engine.say("FAULT another save is uploaded as {}", victim)
    with suppress(Refusal):
        tier.put(other, tuple(Piece(content, part) for part in range(CHUNKS)))
        tier.commit(other)


def _live_on(simulation: Simulation, duration: float) -> None:
    """A run that this status was a backup of had gone on: its next epochs are in the tier, and memory is empty."""
    tier, world = simulation.persistent, simulation.store.status.membership
    if tier is None or world is None:
        return
    taken = range(world.generation + 1, world.generation + 2 + simulation.engine.rng.randrange(3))
    simulation.engine.say("FAULT epochs {} to {} were claimed before status was restored", taken.start, taken.stop - 1)
    tier.claims |= dict.fromkeys(taken, "of another history")
    simulation.oracle.taken_before |= dict.fromkeys(taken, simulation.engine.now)
    for holder in list(simulation.holders.values()):
        if holder.process.alive:
            disturb(simulation, holder.id.node)
            simulation.fabric.kill_holder(holder)
            later(simulation, duration, simulation.fabric.return_holder, holder)
            later(simulation, duration, calm, simulation, holder.id.node)


KINDS: dict[str, tuple[float, Callable[[Simulation, float], None]]] = {
    "chunk is damaged": (1, _corrupt),
    "chunk is gone": (0.5, _lose_chunk),
    "index entry is damaged": (1, _damage_entry),
    "layout is damaged": (1, _damage_layout),
    "record is damaged": (1, _damage_record),
    "record is gone": (0.5, _lose_record),
    "layout in the tier is damaged": (0.5, _wear_layout),
    "another save is uploaded": (0, _upload_anew),
    "status is of a backup": (0, _live_on),
}
