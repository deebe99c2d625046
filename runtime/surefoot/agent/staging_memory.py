"""Owns the worker's staging memory: one arena and drain per local rank.

They outlive trainers and epochs: a dead trainer's sealed saves are drained, its memory is handed to the next one.
Drains call back from their threads; everything here happens on the agent's loop.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

from surefoot.errors import TierUnavailable
from surefoot.flush.engine import FlushArena, Flusher, FlushListener, FlushOptions
from surefoot.flush.state_machine import StagedSave
from surefoot.ipc.memfd import SLOTS, MemoryFile
from surefoot.ipc.trainer_messages import Staged, StagedSaves
from surefoot.memory_server.client import MemoryServerClient
from surefoot.memory_server.connection import account_of
from surefoot.protocol.checkpoints.save_state import ClosedSteps
from surefoot.protocol.identities import Checkpoint, MemoryServerInstance, RankSave
from surefoot.protocol.messages import MemoryServers
from surefoot.protocol.text import format_bytes
from surefoot.settings import JobSettings
from surefoot.tiers import Tier

_log = logging.getLogger(__name__)


# ---- memory that ranks need ------------------------------------------------------------------------------------------
# Tracks how much staging memory each local rank needs or was refused. Pure. Of the running epoch alone: another world
# has other shares. The heartbeat says both, so that the operator can tell whether checkpoints fit, before a holder is
# full.


@dataclass(frozen=True, slots=True)
class StagingDemandByRank:
    ranks: int = 0
    """Local ranks of the epoch; 0: none asked yet."""
    wanted: Mapping[int, int] = field(default_factory=dict)
    """Slot bytes that each local rank asked for: its save, and some room for it to grow."""
    sizes: Mapping[int, int] = field(default_factory=dict)
    """Bytes of each local rank's newest save."""
    rejected: Mapping[int, str] = field(default_factory=dict)
    """Why a local rank has no memory."""

    @property
    def save_bytes(self) -> int:
        """One save of all local ranks; 0 until all have asked."""
        if not self.ranks or len(self.wanted) < self.ranks:
            return 0
        return sum(self.sizes.get(local, wanted) for local, wanted in self.wanted.items())

    @property
    def unstaged(self) -> str:
        """Why a local rank has no staging memory; empty: each has."""
        return next((self.rejected[local] for local in sorted(self.rejected)), "")


def with_request(needs: StagingDemandByRank, local: int, slot_bytes: int, ranks: int) -> StagingDemandByRank:
    return replace(needs, ranks=ranks, wanted={**needs.wanted, local: slot_bytes})


def with_staged(needs: StagingDemandByRank, local: int, save_bytes: int) -> StagingDemandByRank:
    return replace(needs, sizes={**needs.sizes, local: save_bytes})


def with_grant(needs: StagingDemandByRank, local: int) -> StagingDemandByRank:
    return replace(needs, rejected={n: why for n, why in needs.rejected.items() if n != local})


def with_denial(needs: StagingDemandByRank, local: int, why: str) -> StagingDemandByRank:
    return replace(needs, rejected={**needs.rejected, local: why})


def missing_bytes(needs: StagingDemandByRank, has: Mapping[int, int]) -> dict[int, int]:
    """Bytes that local ranks need and do not have.

    One that did not ask yet will want what others do. `has`: slot bytes by local rank.
    """
    usual = max(needs.wanted.values(), default=0)
    wanted = {local: needs.wanted.get(local, usual) for local in range(needs.ranks)}
    return {local: needed for local, needed in wanted.items() if has.get(local, 0) < needed}


# ---- memory that is free ---------------------------------------------------------------------------------------------
# Measures how much memory this container may still allocate. Memory that is touched beyond the limit is not refused by
# the kernel: it kills a process of the container. So what does not fit is refused here, with the numbers: for all local
# ranks at once, since a checkpoint that lacks one of them is none. Reads /proc and /sys only.

_ROOTS = (
    # version 2 as a container sees its own group, then version 1
    ("memory.max", "memory.current", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
)
_NO_LIMIT = 1 << 60


@dataclass(frozen=True, slots=True)
class MemoryHeadroom:
    """Bytes; `limit` None: none is set, `free` is the machine's."""

    free: int
    limit: int | None
    used: int


def read_headroom(
    groups: Path = Path("/sys/fs/cgroup"), machine: Path = Path("/proc/meminfo")
) -> MemoryHeadroom | None:
    """Reads what is left below the container's limit and on the machine.

    None if neither can be read.
    """
    free = _available(machine)
    for limit_file, used_file, reclaimable in _ROOTS:
        limit, used = _number(groups / limit_file), _number(groups / used_file)
        if limit is None or used is None or limit >= _NO_LIMIT:
            continue
        used -= min(used, _stat((groups / used_file).parent / "memory.stat", reclaimable))
        left = max(0, limit - used)
        return MemoryHeadroom(left if free is None else min(left, free), limit, used)
    return None if free is None else MemoryHeadroom(free, None, 0)


@dataclass(frozen=True, slots=True)
class StagingDemand:
    """Memory still to be allocated: `slots` for each rank without enough."""

    slots: int
    slot_bytes: tuple[int, ...]
    """Of each such rank."""

    @property
    def size(self) -> int:
        return self.slots * sum(self.slot_bytes)

    def __str__(self) -> str:
        ranks, even = len(self.slot_bytes), len(set(self.slot_bytes)) <= 1
        each = f"{'' if even else 'up to '}{format_bytes(max(self.slot_bytes, default=0))}"
        return f"{self.slots} slots of {each} for {ranks} rank{'s' * (ranks != 1)}, {format_bytes(self.size)} of staging memory,"


def require_headroom(demand: StagingDemand, found: MemoryHeadroom | None) -> None:
    """Raises OSError with the numbers where it would not fit."""
    if found is None or demand.size <= found.free:
        return
    if found.limit is not None and found.limit - found.used < demand.size:
        text = (
            f"{demand} do not fit: the container's memory limit is {format_bytes(found.limit)} and {format_bytes(found.used)} are "
            f"in use; raise resources.limits.memory of the trainer by {format_bytes(demand.size - found.free)} or more"
        )
    else:
        text = f"{demand} do not fit: the machine has {format_bytes(found.free)} left"
    raise OSError(errno.ENOMEM, text)


def with_released(found: MemoryHeadroom | None, size: int) -> MemoryHeadroom | None:
    """The room there would be with `size` bytes of ours given back."""
    return None if found is None else replace(found, free=found.free + size, used=max(0, found.used - size))


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, or "max"
        return None


def _stat(path: Path, name: str) -> int:
    try:
        rows = dict(line.split() for line in path.read_text().splitlines())
        return int(rows.get(name, 0))
    except (OSError, ValueError):
        return 0


def _available(path: Path) -> int | None:
    try:
        row = next(line for line in path.read_text().splitlines() if line.startswith("MemAvailable:"))
        return int(row.split()[1]) * 1024
    except (OSError, ValueError, StopIteration):
        return None


# ---- progress of saves -----------------------------------------------------------------------------------------------
# Tracks which of this worker's saves are pending, committed or lost. Pure. The heartbeat reports it. A worker's save of
# a step is pending from the first rank's staging until every local rank's copy is on all its holders or was given up;
# it is `saved` once every local rank has committed it somewhere.

_REMEMBERED = 8
"""Checkpoints that stay in the book behind the newest: later ones overtake them anyway."""

_HANDED_STEPS = 32
"""Steps of which it is remembered that they were handed over; whoever asks knows of no older ones."""


@dataclass(frozen=True, slots=True)
class SaveTracker:
    """Records which staged saves are pending, committed, or handed over."""

    staged: tuple[RankSave, ...] = ()
    """Staged, not yet done."""
    committed: dict[RankSave, int] = field(default_factory=dict)
    """On how many holders each of the newest rank saves is."""
    handed: tuple[RankSave, ...] = ()
    """Of the newest epoch and its newest steps: staged, and not known to have been lost on the way."""
    forgotten: Checkpoint | None = None
    """Newest one that `handed` is too short for."""

    def pending(self) -> tuple[Checkpoint, ...]:
        """Checkpoints that still drain here, oldest first."""
        return tuple(sorted({save.checkpoint for save in self.staged}))

    def saved(self, epoch: int, local_ranks: int) -> tuple[Checkpoint | None, int]:
        """The newest checkpoint of `epoch` that all local ranks committed.

        With its fewest copies of a rank save; (None, 0) without one.
        """
        copies: dict[int, list[int]] = {}
        for save, count in self.committed.items():
            if save.generation == epoch and count > 0:
                copies.setdefault(save.step, []).append(count)
        whole = [step for step, counts in copies.items() if len(counts) >= local_ranks]
        if not whole:
            return None, 0
        return Checkpoint(epoch, max(whole)), min(copies[max(whole)])

    def closed_steps(self, epoch: int, local_ranks: int, upto: int) -> ClosedSteps:
        """This worker's closed steps of `epoch`, up to step `upto`."""
        ranks: dict[int, int] = {}
        for save in self.handed:
            if save.generation == epoch:
                ranks[save.step] = ranks.get(save.step, 0) + 1
        whole = tuple(sorted(step for step, count in ranks.items() if count >= local_ranks))
        forgotten = self.forgotten.step if self.forgotten is not None and self.forgotten.generation == epoch else 0
        return ClosedSteps(upto, whole, forgotten)


def track_staged(tracker: SaveTracker, save: RankSave) -> SaveTracker:
    """A trainer sealed a slot."""
    handed = (*(s for s in tracker.handed if s.generation == save.generation and s != save), save)
    steps = sorted({s.step for s in handed})
    forgotten = tracker.forgotten
    if len(steps) > _HANDED_STEPS:
        forgotten = Checkpoint(save.generation, steps[-_HANDED_STEPS - 1])
        handed = tuple(s for s in handed if s.step > forgotten.step)
    waiting = (*(s for s in tracker.staged if s != save), save)
    return replace(tracker, staged=waiting, handed=handed, forgotten=forgotten)


def track_written(tracker: SaveTracker, save: RankSave, copies: int) -> SaveTracker:
    """Counts one more holder with the complete rank save."""
    committed = {**tracker.committed, save: copies}
    newest = sorted({s.checkpoint for s in committed})[-_REMEMBERED:]
    return replace(tracker, committed={s: n for s, n in committed.items() if s.checkpoint in newest})


def track_freed(tracker: SaveTracker, save: RankSave) -> SaveTracker:
    """Ends the tracking of a drained save: its copies are final."""
    return replace(tracker, staged=tuple(s for s in tracker.staged if s != save))


def track_lost(tracker: SaveTracker, save: RankSave) -> SaveTracker:
    """Forgets a save that no holder was asked to commit."""
    return replace(tracker, handed=tuple(s for s in tracker.handed if s != save))


# ---- staging memory --------------------------------------------------------------------------------------------------

_REPLACE_SECONDS = 5.0
"""How long a save in memory that has become too small may still drain before it is given up."""


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
    flush: Flusher
    inside: dict[int, RankSave]
    """What drains from each slot."""
    fenced: dict[int, tuple[RankSave, Staged]]
    """What was last sealed in each slot; it lies there until the slot is written again."""


class StagingMemory:
    """Owns arenas and drains, and knows where the holders answer."""

    def __init__(
        self, incarnation: str, job: JobSettings, watcher: StagingWatcher, options: FlushOptions | None = None
    ) -> None:
        self._incarnation = incarnation
        self._job = job
        self._watcher = watcher
        self._options = options
        self._arenas: dict[int, _RankArena] = {}
        self._allocating = asyncio.Lock()
        self._servers: MemoryServers | None = None
        self._loop = asyncio.get_running_loop()
        self._needs = StagingDemandByRank()
        self.tracker = SaveTracker()

    def servers(self) -> tuple[MemoryServerInstance, ...]:
        """Holders of this epoch, the targets of this worker's saves first."""
        if self._servers is None:
            return ()
        every = dict.fromkeys(endpoint.instance for endpoint in self._servers.servers)
        ours = chain(self._servers.targets, *self._servers.rank_targets)
        return tuple(dict.fromkeys([*(t for t in ours if t in every), *every]))

    def partial_generation(self) -> int:
        """The epoch that has more holders than these; 0: none has."""
        return self._servers.generation if self._servers is not None and self._servers.is_partial else 0

    def open_tier(self, holder: MemoryServerInstance) -> Tier:
        """Opens a connection to a holder, for one thread.

        Raises TierUnavailable for one that is not among this epoch's holders.
        """
        endpoints = self._servers.servers if self._servers is not None else ()
        for endpoint in endpoints:
            if endpoint.instance == holder:
                job = self._job
                return MemoryServerClient(endpoint, job.job, account_of(job), job.memory_call_timeout_seconds)
        raise TierUnavailable(f"{holder} is not among the holders of this epoch: nobody says where it answers")

    async def grant_arena(self, local: int, slot_bytes: int, ranks: int = 1) -> ArenaGrant:
        """Gives a local rank its memory if large enough, else new memory.

        New memory is touched. OSError, and a notice, if it does not fit beside what the other ones of `ranks` local
        ranks need.
        """
        async with self._allocating:
            self._needs = with_request(self._needs, local, slot_bytes, ranks)
            try:
                given = await self._allocate(local, slot_bytes)
            except OSError as error:
                self._reject(local, error.strerror or str(error))
                raise
            self._needs = with_grant(self._needs, local)
            self._watcher.on_progress()
            return given

    @property
    def needs(self) -> StagingDemandByRank:
        """What the ranks here need, and why one has no memory."""
        return self._needs

    def reusable_saves(self, local: int, checkpoint: Checkpoint) -> list[tuple[StagedSaves, int | None]]:
        """Finds `checkpoint`'s saves: the rank's own first, then other ranks' if any.

        Each with the memory's descriptor where there are any.
        """
        others = [_reusable(arena, checkpoint) for number, arena in sorted(self._arenas.items()) if number != local]
        further = [(here, fd) for here, fd in others if fd is not None]
        own, fd = _reusable(self._arenas[local], checkpoint) if local in self._arenas else (StagedSaves(0), None)
        return [(replace(own, replies_to_follow=len(further)), fd), *further]

    async def _allocate(self, local: int, slot_bytes: int) -> ArenaGrant:
        arena = self._arenas.get(local)
        if arena is not None and arena.file.slot_bytes >= slot_bytes:
            return ArenaGrant(arena.file, tuple(sorted(arena.inside)), 0.0)
        began = time.monotonic()
        has = {number: taken.file.slot_bytes for number, taken in self._arenas.items()}
        missing = missing_bytes(self._needs, has)
        back = sum(len(taken.file.memory) for number, taken in self._arenas.items() if number in missing)
        require_headroom(StagingDemand(SLOTS, tuple(missing.values())), with_released(read_headroom(), back))
        if arena is not None:
            del self._arenas[local]  # the larger one may not be had
            await asyncio.to_thread(self._end, arena)
        file = MemoryFile(f"rank-{local}", slot_bytes)
        await asyncio.to_thread(file.touch)
        self._arenas[local] = self._new_arena(local, file)
        return ArenaGrant(file, (), time.monotonic() - began)

    def _reject(self, local: int, why: str) -> None:
        """Notifies people once; the heartbeat reports it for as long as it lasts."""
        news = not self._needs.rejected
        self._needs = with_denial(self._needs, local, why)
        if news:
            self._watcher.on_notice("StagingMemoryUnavailable", why)
        self._watcher.on_progress()

    def stage(self, local: int, save: RankSave, world: int, message: Staged) -> None:
        """Hands a sealed slot to the drain, which owns it until freed."""
        arena = self._arenas.get(local)
        if arena is None:
            _log.error("local rank %d staged %s into memory it was never given: ignored", local, save)
            return
        arena.inside[message.slot] = save
        arena.fenced[message.slot] = (save, message)
        self.tracker = track_staged(self.tracker, save)
        self._needs = with_staged(self._needs, local, message.stream_bytes + message.values_bytes)
        sealed = StagedSave(save, world, self._incarnation, message.layout, message.stream_bytes, message.values_bytes)
        arena.flush.add_staged(message.slot, sealed, message.layout_json)
        self._watcher.on_progress()

    def retarget(self, holders: MemoryServers) -> None:
        """Replaces the holders that saves go to."""
        if self._servers is None or holders.generation != self._servers.generation:
            self._needs = StagingDemandByRank()  # another world, other shares
        self._servers = holders
        for local, arena in self._arenas.items():
            self._aim(arena.flush, local)

    def drop_older_generations(self, epoch: int) -> None:
        """Gives up what older epochs staged, before trainers of `epoch` start."""
        for arena in self._arenas.values():
            arena.flush.drop_older_generations(epoch)

    async def flush(self, seconds: float) -> bool:
        """Waits until everything staged is drained or given up; whether it was."""
        drains = [arena.flush for arena in self._arenas.values()]
        return all(await asyncio.gather(*(asyncio.to_thread(d.flush, seconds) for d in drains)))

    async def close(self) -> None:
        """Gives up what is left, joins the drains' threads, unmaps the memory."""
        for arena in self._arenas.values():
            await asyncio.to_thread(arena.flush.close)
            arena.file.close()
        self._arenas.clear()

    def _new_arena(self, local: int, file: MemoryFile) -> _RankArena:
        def on_loop(call: Callable[..., None]) -> Callable[..., None]:
            return lambda *values: self._call(functools.partial(call, *values))

        watcher = FlushListener(
            on_freed=on_loop(functools.partial(self._freed, local)),
            on_saved=on_loop(self._saved),
            on_notice=on_loop(self._watcher.on_notice),
            on_lost=on_loop(self._lost),
        )
        arena = FlushArena(file.memory, SLOTS, file.slot_bytes)
        drain = Flusher(arena, self._incarnation, self.open_tier, watcher, self._options)
        self._aim(drain, local)
        return _RankArena(file, drain, {}, {})

    def _call(self, call: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:
            pass  # the loop has ended, and with it everyone who could want to know

    def _aim(self, drain: Flusher, local: int) -> None:
        if self._servers is not None:
            every = frozenset(endpoint.instance for endpoint in self._servers.servers)
            drain.set_targets(self._servers.targets_of(local), every, self._servers.replicas)

    def _saved(self, save: RankSave, copies: int) -> None:
        self.tracker = track_written(self.tracker, save, copies)

    def _lost(self, save: RankSave) -> None:
        self.tracker = track_lost(self.tracker, save)
        self._watcher.on_progress()

    def _freed(self, local: int, slot: int, step: int, ok: bool) -> None:
        arena = self._arenas.get(local)
        save = arena.inside.pop(slot, None) if arena is not None else None
        if save is not None:
            self.tracker = track_freed(self.tracker, save)
        self._watcher.on_freed(local, slot, step, ok)
        self._watcher.on_progress()

    def _end(self, arena: _RankArena) -> None:
        if not arena.flush.flush(_REPLACE_SECONDS):
            _log.warning("saves in memory that became too small were given up: their holders do not answer")
        arena.flush.close()
        arena.file.close()


def _reusable(arena: _RankArena, checkpoint: Checkpoint) -> tuple[StagedSaves, int | None]:
    found = [(save, said) for save, said in arena.fenced.values() if save.checkpoint == checkpoint]
    saves = tuple((save.rank, said.slot, said.stream_bytes, said.layout) for save, said in found)
    return StagedSaves(arena.file.slot_bytes, saves), arena.file.fd if saves else None
