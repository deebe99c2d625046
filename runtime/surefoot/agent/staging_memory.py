"""Owns the worker's staging memory: one arena and drain per local rank.

They outlive trainers and epochs: a dead trainer's sealed saves are drained, its memory is handed to the next one.
Drains call back from their threads; everything here happens on the agent's loop.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain

from surefoot.agent import demand as occupancy
from surefoot.agent import save_progress as saves
from surefoot.agent.demand import StagingNeeds
from surefoot.agent.headroom import StagingDemand, read_headroom, require, with_released
from surefoot.agent.save_progress import SaveTracker
from surefoot.errors import TierUnavailable
from surefoot.flush.engine import Drain, DrainArena, DrainOptions, DrainWatcher
from surefoot.flush.slots import SealedSave
from surefoot.ipc.memfd import SLOTS, MemoryFile
from surefoot.ipc.trainer_messages import Staged, StagedSaves
from surefoot.memory_server.client import HolderClient
from surefoot.memory_server.connection import account_of
from surefoot.protocol.identities import Checkpoint, HolderId, RankSave
from surefoot.protocol.messages import Holders
from surefoot.settings import JobSettings
from surefoot.tiers import Tier

_REPLACE_SECONDS = 5.0
"""How long a save in memory that has become too small may still drain before it is given up."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StagingWatcher:
    """Receives the staging memory's events, on the loop."""

    on_freed: Callable[[int, int, int, bool], None]
    """(local, slot, step, ok)."""
    on_progress: Callable[[], None]
    """Something that the heartbeat says has changed."""
    on_notice: Callable[[str, str], None]


@dataclass(frozen=True, slots=True)
class ArenaGrant:
    """Staging memory for one trainer; `busy` slots still drain older saves."""

    file: MemoryFile
    busy: tuple[int, ...]
    seconds: float


@dataclass(slots=True)
class _RankArena:
    """Staging memory of one local rank."""

    file: MemoryFile
    drain: Drain
    inside: dict[int, RankSave]
    """What drains from each slot."""
    sealed: dict[int, tuple[RankSave, Staged]]
    """What was last sealed in each slot; it lies there until the slot is written again."""


class StagingMemory:
    """Owns arenas and drains, and knows where the holders answer."""

    def __init__(
        self, incarnation: str, job: JobSettings, watcher: StagingWatcher, options: DrainOptions | None = None
    ) -> None:
        self._incarnation = incarnation
        self._job = job
        self._watcher = watcher
        self._options = options
        self._arenas: dict[int, _RankArena] = {}
        self._allocating = asyncio.Lock()
        self._holders: Holders | None = None
        self._loop = asyncio.get_running_loop()
        self._needs = StagingNeeds()
        self.tracker = SaveTracker()

    def holders(self) -> tuple[HolderId, ...]:
        """Holders of this epoch, the targets of this worker's saves first."""
        if self._holders is None:
            return ()
        every = dict.fromkeys(endpoint.holder for endpoint in self._holders.holders)
        ours = chain(self._holders.targets, *self._holders.rank_targets)
        return tuple(dict.fromkeys([*(t for t in ours if t in every), *every]))

    def partly_told(self) -> int:
        """The epoch that has more holders than these; 0: none has."""
        return self._holders.epoch if self._holders is not None and self._holders.partial else 0

    def open_tier(self, holder: HolderId) -> Tier:
        """Opens a connection to a holder, for one thread.

        Raises TierUnavailable for one that is not among this epoch's holders.
        """
        endpoints = self._holders.holders if self._holders is not None else ()
        for endpoint in endpoints:
            if endpoint.holder == holder:
                job = self._job
                return HolderClient(endpoint, job.job, account_of(job), job.holder_call_seconds)
        raise TierUnavailable(f"{holder} is not among the holders of this epoch: nobody says where it answers")

    async def give(self, local: int, slot_bytes: int, ranks: int = 1) -> ArenaGrant:
        """Gives a local rank its memory if large enough, else new memory.

        New memory is touched. OSError, and a notice, if it does not fit beside what the other ones of `ranks` local
        ranks need.
        """
        async with self._allocating:
            self._needs = occupancy.asked(self._needs, local, slot_bytes, ranks)
            try:
                given = await self._allocate(local, slot_bytes)
            except OSError as error:
                self._refuse(local, error.strerror or str(error))
                raise
            self._needs = occupancy.given(self._needs, local)
            self._watcher.on_progress()
            return given

    @property
    def needs(self) -> StagingNeeds:
        """What the ranks here need, and why one has no memory."""
        return self._needs

    def reusable_saves(self, local: int, checkpoint: Checkpoint) -> list[tuple[StagedSaves, int | None]]:
        """Finds `checkpoint`'s saves: the rank's own first, then other ranks' if any.

        Each with the memory's descriptor where there are any.
        """
        others = [_reusable(arena, checkpoint) for number, arena in sorted(self._arenas.items()) if number != local]
        further = [(here, fd) for here, fd in others if fd is not None]
        own, fd = _reusable(self._arenas[local], checkpoint) if local in self._arenas else (StagedSaves(0), None)
        return [(replace(own, further=len(further)), fd), *further]

    async def _allocate(self, local: int, slot_bytes: int) -> ArenaGrant:
        arena = self._arenas.get(local)
        if arena is not None and arena.file.slot_bytes >= slot_bytes:
            return ArenaGrant(arena.file, tuple(sorted(arena.inside)), 0.0)
        began = time.monotonic()
        has = {number: taken.file.slot_bytes for number, taken in self._arenas.items()}
        missing = occupancy.missing(self._needs, has)
        back = sum(len(taken.file.memory) for number, taken in self._arenas.items() if number in missing)
        require(StagingDemand(SLOTS, tuple(missing.values())), with_released(read_headroom(), back))
        if arena is not None:
            del self._arenas[local]  # the larger one may not be had
            await asyncio.to_thread(self._end, arena)
        file = MemoryFile(f"rank-{local}", slot_bytes)
        await asyncio.to_thread(file.touch)
        self._arenas[local] = self._new_arena(local, file)
        return ArenaGrant(file, (), time.monotonic() - began)

    def _refuse(self, local: int, why: str) -> None:
        """Notifies people once; the heartbeat reports it for as long as it lasts."""
        news = not self._needs.refused
        self._needs = occupancy.refused(self._needs, local, why)
        if news:
            self._watcher.on_notice("NoStagingMemory", why)
        self._watcher.on_progress()

    def stage(self, local: int, save: RankSave, world: int, message: Staged) -> None:
        """Hands a sealed slot to the drain, which owns it until freed."""
        arena = self._arenas.get(local)
        if arena is None:
            _log.error("local rank %d staged %s into memory it was never given: ignored", local, save)
            return
        arena.inside[message.slot] = save
        arena.sealed[message.slot] = (save, message)
        self.tracker = saves.staged(self.tracker, save)
        self._needs = occupancy.staged(self._needs, local, message.stream_bytes + message.values_bytes)
        sealed = SealedSave(save, world, self._incarnation, message.layout, message.stream_bytes, message.values_bytes)
        arena.drain.stage(message.slot, sealed, message.layout_json)
        self._watcher.on_progress()

    def retarget(self, holders: Holders) -> None:
        """Replaces the holders that saves go to."""
        if self._holders is None or holders.epoch != self._holders.epoch:
            self._needs = StagingNeeds()  # another world, other shares
        self._holders = holders
        for local, arena in self._arenas.items():
            self._aim(arena.drain, local)

    def begin(self, epoch: int) -> None:
        """Gives up what older epochs staged, before trainers of `epoch` start."""
        for arena in self._arenas.values():
            arena.drain.begin(epoch)

    async def flush(self, seconds: float) -> bool:
        """Waits until everything staged is drained or given up; whether it was."""
        drains = [arena.drain for arena in self._arenas.values()]
        return all(await asyncio.gather(*(asyncio.to_thread(d.flush, seconds) for d in drains)))

    async def close(self) -> None:
        """Gives up what is left, joins the drains' threads, unmaps the memory."""
        for arena in self._arenas.values():
            await asyncio.to_thread(arena.drain.close)
            arena.file.close()
        self._arenas.clear()

    def _new_arena(self, local: int, file: MemoryFile) -> _RankArena:
        def on_loop(call: Callable[..., None]) -> Callable[..., None]:
            return lambda *values: self._call(functools.partial(call, *values))

        watcher = DrainWatcher(
            on_freed=on_loop(functools.partial(self._freed, local)),
            on_saved=on_loop(self._saved),
            on_notice=on_loop(self._watcher.on_notice),
            on_lost=on_loop(self._lost),
        )
        arena = DrainArena(file.memory, SLOTS, file.slot_bytes)
        drain = Drain(arena, self._incarnation, self.open_tier, watcher, self._options)
        self._aim(drain, local)
        return _RankArena(file, drain, {}, {})

    def _call(self, call: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:
            pass  # the loop has ended, and with it everyone who could want to know

    def _aim(self, drain: Drain, local: int) -> None:
        if self._holders is not None:
            every = frozenset(endpoint.holder for endpoint in self._holders.holders)
            drain.retarget(self._holders.targets_of(local), every, self._holders.replicas)

    def _saved(self, save: RankSave, copies: int) -> None:
        self.tracker = saves.written(self.tracker, save, copies)

    def _lost(self, save: RankSave) -> None:
        self.tracker = saves.lost(self.tracker, save)
        self._watcher.on_progress()

    def _freed(self, local: int, slot: int, step: int, ok: bool) -> None:
        arena = self._arenas.get(local)
        save = arena.inside.pop(slot, None) if arena is not None else None
        if save is not None:
            self.tracker = saves.freed(self.tracker, save)
        self._watcher.on_freed(local, slot, step, ok)
        self._watcher.on_progress()

    def _end(self, arena: _RankArena) -> None:
        if not arena.drain.flush(_REPLACE_SECONDS):
            _log.warning("saves in memory that became too small were given up: their holders do not answer")
        arena.drain.close()
        arena.file.close()


def _reusable(arena: _RankArena, checkpoint: Checkpoint) -> tuple[StagedSaves, int | None]:
    found = [(save, said) for save, said in arena.sealed.values() if save.checkpoint == checkpoint]
    saves = tuple((save.rank, said.slot, said.stream_bytes, said.layout) for save, said in found)
    return StagedSaves(arena.file.slot_bytes, saves), arena.file.fd if saves else None
