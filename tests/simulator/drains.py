"""Carries out the real drain transitions against modelled holders: the simulator's stand-in for `flush.engine`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from simulator.engine import Refusal, Unavailable
from simulator.tiers import CHUNKS, Holder, Piece, manifest
from surefoot.flush import state_machine
from surefoot.protocol.checkpoints.save_state import OWN_STATE
from surefoot.protocol.identities import MemoryServerInstance, RankSave

if TYPE_CHECKING:
    from simulator.agents import Agent

Cause = Literal["unavailable", "full", "missing"]


class DrainRunner:
    """One rank's arena: two slots, as in the agent. `freed` hears of each slot that may be written again."""

    def __init__(self, agent: Agent, freed: Callable[[state_machine.FreeSlot], None]) -> None:
        self.agent = agent
        self.state = state_machine.FlushState(
            (state_machine.FreeSlotState(), state_machine.FreeSlotState()), agent.incarnation
        )
        self._freed = freed
        self._contents: dict[int, int] = {}
        self._committed: dict[RankSave, int] = {}
        self._tick_at: float | None = None

    def stage(self, save: RankSave, world: int, content: int) -> bool:
        """Seals a free slot with this save; False if there is none."""
        slot = next((i for i, s in enumerate(self.state.slots) if isinstance(s, state_machine.FreeSlotState)), None)
        if slot is None:
            return False
        self._contents[slot] = content
        sealed = state_machine.StagedSave(save, world, self.agent.incarnation, f"{world:016x}", 1000, 10)
        self.tell(state_machine.SlotStaged(slot, sealed, self.agent.engine.now))
        return True

    def tell(self, event: state_machine.Event) -> None:
        self.state, commands = state_machine.apply_event(self.state, event)
        for command in commands:
            self._carry_out(command)
        tick = self.state.next_tick()
        if tick is not None and (self._tick_at is None or tick < self._tick_at):
            self._tick_at = tick
            engine = self.agent.engine
            engine.after(max(0.0, tick - engine.now) + 1e-6, self.agent.process, self._tick)

    def _tick(self) -> None:
        self._tick_at = None
        self.tell(state_machine.Tick(self.agent.engine.now))

    def _carry_out(self, command: state_machine.Command) -> None:
        match command:
            case state_machine.WriteTo(slot, target):
                self._write(slot, target, 0)
            case state_machine.CommitOn(slot, target):
                self._commit(slot, target)
            case state_machine.StopTransfer(slot, target):
                self.agent.engine.after(
                    0.001, self.agent.process, self.tell, state_machine.TransferStopped(slot, target)
                )
            case state_machine.FreeSlot():
                self._freed(command)
            case _:
                pass

    def _sealed(self, slot: int) -> state_machine.StagedSave | None:
        held = self.state.slots[slot]
        return None if isinstance(held, state_machine.FreeSlotState) else held.staged

    def _write(self, slot: int, target: MemoryServerInstance, part: int) -> None:
        """Chunk after chunk; the next only once the one before is acknowledged."""
        sealed, holder = self._sealed(slot), self.agent.holder(target)
        if sealed is None:
            return
        if part == CHUNKS:
            self.tell(state_machine.SaveWritten(slot, target))
            return
        if holder is None:
            self._failed(slot, target, "unavailable")
            return
        save, piece = sealed.save, Piece(self._contents[slot], part)

        def done(answer: Any) -> None:
            if isinstance(answer, Unavailable | Refusal):
                self._failed(slot, target, "full" if str(answer) == "full" else "unavailable")
            elif self._still_writing(slot, target, save):
                self._write(slot, target, part + 1)

        self.agent.network.call(self.agent.process, holder.process, lambda: holder.put(save, piece), done)

    def _still_writing(self, slot: int, target: MemoryServerInstance, save: RankSave) -> bool:
        held = self.state.slots[slot]
        return (
            isinstance(held, state_machine.Flushing)
            and held.staged.save == save
            and any(leg.target == target and leg.phase == "writing" for leg in held.transfers)
        )

    def _commit(self, slot: int, target: MemoryServerInstance) -> None:
        sealed, holder = self._sealed(slot), self.agent.holder(target)
        if sealed is None:
            return
        if holder is None:
            self._failed(slot, target, "unavailable")
            return
        own = (("loader", OWN_STATE),) if self.agent.simulation.settings.tied else ()
        content, now = self._contents[slot], self.agent.engine.now
        entry = manifest(sealed.save, sealed.world_size, sealed.incarnation, content, now, own)
        entry = replace(entry, suspect=self.agent.simulation.oracle.numerics.is_suspect(sealed.save))

        def done(answer: Any) -> None:
            if self._sealed(slot) is not sealed:
                return
            if isinstance(answer, Refusal) and str(answer) == "fenced":
                self.tell(state_machine.TransferFenced(slot, target))
            elif isinstance(answer, Unavailable | Refusal):
                self._failed(slot, target, "missing" if str(answer) == "missing" else "unavailable")
            else:
                self.tell(state_machine.Acknowledged(slot, target))

        writer = self.writer(sealed)
        self.agent.network.call(self.agent.process, holder.process, lambda: _commit(holder, entry, writer), done)

    def writer(self, sealed: state_machine.StagedSave) -> int:
        """Whose word its commits carry: the slot's own epoch, whatever was heard of since."""
        return sealed.save.generation

    def _failed(self, slot: int, target: MemoryServerInstance, cause: Cause) -> None:
        now, drawn = self.agent.engine.now, self.agent.engine.rng.random()
        self.tell(state_machine.TargetFailed(slot, target, cause, now, drawn))


def _commit(holder: Holder, entry: Any, writer: int) -> None:
    holder.commit(entry, writer)
