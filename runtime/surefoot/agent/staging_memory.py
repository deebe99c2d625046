"""Owns the worker's staging memory: one arena and one flusher per local rank.

They outlive trainers and generations: a dead trainer's staged saves are still flushed, and the next trainer gets its
memory. Flushers call back from their threads; everything here runs on the agent's loop.
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
from surefoot.memory_server.connection import worker_credentials
from surefoot.protocol.checkpoints.save_state import ClosedSteps
from surefoot.protocol.identities import Checkpoint, MemoryServerInstance, RankSave
from surefoot.protocol.messages import MemoryServers
from surefoot.protocol.text import format_bytes
from surefoot.settings import JobSettings
from surefoot.tiers import Tier

_log = logging.getLogger(__name__)


# ---- memory that ranks need ------------------------------------------------------------------------------------------
# Tracks how much staging memory each local rank needs, or why it got none. Pure. Covers the running generation only: with
# another world size the ranks' shares differ. The heartbeat reports both, so that the operator knows whether checkpoints
# fit before a memory server is full.


@dataclass(frozen=True, slots=True)
class StagingDemandByRank:
    """Records the staging memory that each local rank needs; keys of the mappings are local ranks."""

    ranks: int = 0
    """Number of local ranks of the generation; 0: none has requested memory yet."""
    requested_slot_bytes: Mapping[int, int] = field(default_factory=dict)
    """Requested bytes per slot: the rank's save, and some space for it to grow."""
    newest_save_bytes: Mapping[int, int] = field(default_factory=dict)
    """Bytes of each local rank's newest save."""
    rejection_reasons: Mapping[int, str] = field(default_factory=dict)
    """Reasons why local ranks got no memory."""

    @property
    def save_bytes(self) -> int:
        """Bytes of one save of all local ranks; 0 until all have requested memory."""
        if not self.ranks or len(self.requested_slot_bytes) < self.ranks:
            return 0
        return sum(
            self.newest_save_bytes.get(local, slot_bytes) for local, slot_bytes in self.requested_slot_bytes.items()
        )

    @property
    def rejection_reason(self) -> str:
        """Why a local rank has no staging memory; empty: each has."""
        return next((self.rejection_reasons[local] for local in sorted(self.rejection_reasons)), "")


def with_request(needs: StagingDemandByRank, local: int, slot_bytes: int, ranks: int) -> StagingDemandByRank:
    return replace(needs, ranks=ranks, requested_slot_bytes={**needs.requested_slot_bytes, local: slot_bytes})


def with_staged(needs: StagingDemandByRank, local: int, save_bytes: int) -> StagingDemandByRank:
    return replace(needs, newest_save_bytes={**needs.newest_save_bytes, local: save_bytes})


def with_grant(needs: StagingDemandByRank, local: int) -> StagingDemandByRank:
    return replace(needs, rejection_reasons={n: reason for n, reason in needs.rejection_reasons.items() if n != local})


def with_denial(needs: StagingDemandByRank, local: int, reason: str) -> StagingDemandByRank:
    return replace(needs, rejection_reasons={**needs.rejection_reasons, local: reason})


def missing_bytes(needs: StagingDemandByRank, slot_bytes_by_rank: Mapping[int, int]) -> dict[int, int]:
    """Returns the bytes per slot that each local rank still needs.

    A rank that has not requested memory yet will need as much as the largest request.
    """
    largest_request = max(needs.requested_slot_bytes.values(), default=0)
    needed_by_rank = {local: needs.requested_slot_bytes.get(local, largest_request) for local in range(needs.ranks)}
    return {local: needed for local, needed in needed_by_rank.items() if slot_bytes_by_rank.get(local, 0) < needed}


# ---- memory that is free ---------------------------------------------------------------------------------------------
# Measures how much memory this container may still allocate. The kernel does not reject memory that is touched beyond the
# limit, it kills a process of the container. So a request that does not fit is rejected here, with the numbers. It counts
# all local ranks at once, since a checkpoint without one of them is useless. Reads /proc and /sys only.

_CGROUP_FILES = (
    # files of cgroup version 2 as a container sees its own group, then version 1
    ("memory.max", "memory.current", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
)
_NO_LIMIT = 1 << 60


@dataclass(frozen=True, slots=True)
class MemoryHeadroom:
    """Memory that this container may use, in bytes."""

    free_bytes: int
    """Bytes that can still be allocated, by the container's limit and the machine's available memory."""
    limit_bytes: int | None
    """The container's memory limit; None: none is set."""
    used_bytes: int
    """Memory of the container in use, without reclaimable cache; 0 without a limit."""


def read_headroom(
    groups: Path = Path("/sys/fs/cgroup"), machine: Path = Path("/proc/meminfo")
) -> MemoryHeadroom | None:
    """Reads the memory left below the container's limit and on the machine; None if neither can be read."""
    available = _read_available_bytes(machine)
    for limit_file, used_file, reclaimable in _CGROUP_FILES:
        limit, used = _read_number(groups / limit_file), _read_number(groups / used_file)
        if limit is None or used is None or limit >= _NO_LIMIT:
            continue
        used -= min(used, _read_stat((groups / used_file).parent / "memory.stat", reclaimable))
        limit_bytes_left = max(0, limit - used)
        return MemoryHeadroom(limit_bytes_left if available is None else min(limit_bytes_left, available), limit, used)
    return None if available is None else MemoryHeadroom(available, None, 0)


@dataclass(frozen=True, slots=True)
class StagingDemand:
    """Memory still to be allocated for the ranks without enough."""

    slots: int
    """Number of slots for each of these ranks."""
    slot_bytes: tuple[int, ...]
    """Bytes per slot, one entry for each of these ranks."""

    @property
    def size(self) -> int:
        return self.slots * sum(self.slot_bytes)

    def __str__(self) -> str:
        ranks, even = len(self.slot_bytes), len(set(self.slot_bytes)) <= 1
        each = f"{'' if even else 'up to '}{format_bytes(max(self.slot_bytes, default=0))}"
        return f"{self.slots} slots of {each} for {ranks} rank{'s' * (ranks != 1)}, {format_bytes(self.size)} of staging memory,"


def require_headroom(demand: StagingDemand, headroom: MemoryHeadroom | None) -> None:
    """Raises OSError (ENOMEM) with the numbers if the demand does not fit; passes if the headroom is unknown."""
    if headroom is None or demand.size <= headroom.free_bytes:
        return
    if headroom.limit_bytes is not None and headroom.limit_bytes - headroom.used_bytes < demand.size:
        text = (
            f"{demand} do not fit: the container's memory limit is {format_bytes(headroom.limit_bytes)} and {format_bytes(headroom.used_bytes)} are "
            f"in use; raise resources.limits.memory of the trainer by {format_bytes(demand.size - headroom.free_bytes)} or more"
        )
    else:
        text = f"{demand} do not fit: the node has {format_bytes(headroom.free_bytes)} of memory left"
    raise OSError(errno.ENOMEM, text)


def with_released(headroom: MemoryHeadroom | None, size: int) -> MemoryHeadroom | None:
    """Returns the headroom after releasing `size` bytes of staging memory."""
    return (
        None
        if headroom is None
        else replace(headroom, free_bytes=headroom.free_bytes + size, used_bytes=max(0, headroom.used_bytes - size))
    )


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, or "max"
        return None


def _read_stat(path: Path, name: str) -> int:
    try:
        rows = dict(line.split() for line in path.read_text().splitlines())
        return int(rows.get(name, 0))
    except (OSError, ValueError):
        return 0


def _read_available_bytes(path: Path) -> int | None:
    try:
        row = next(line for line in path.read_text().splitlines() if line.startswith("MemAvailable:"))
        return int(row.split()[1]) * 1024
    except (OSError, ValueError, StopIteration):
        return None


# ---- progress of saves -----------------------------------------------------------------------------------------------
# Tracks which of this worker's saves are pending, committed or lost, for the heartbeat. Pure. A worker's save of a step is
# pending from the first rank's staging until every local rank's copies are on all their memory servers or abandoned; it
# is `saved` once every local rank's save is committed on at least one server.

_MAX_CHECKPOINTS = 8
"""Number of newest checkpoints whose copies are tracked; older ones are superseded anyway."""

_MAX_HANDED_STEPS = 32
"""Number of newest steps whose staging is remembered; the operator asks for no older ones."""


@dataclass(frozen=True, slots=True)
class SaveTracker:
    """Records which rank saves are being flushed, committed, or staged and not lost."""

    staged: tuple[RankSave, ...] = ()
    """Staged saves whose flush has not ended."""
    copies_by_save: dict[RankSave, int] = field(default_factory=dict)
    """Number of memory servers with a complete copy of each of the newest rank saves."""
    staged_not_lost: tuple[RankSave, ...] = ()
    """Saves of the newest generation's newest steps that were staged and are not known to be lost."""
    newest_forgotten: Checkpoint | None = None
    """Newest checkpoint that was dropped from these to limit their number; None: none was."""

    def pending(self) -> tuple[Checkpoint, ...]:
        """Returns the checkpoints that are still being flushed here, oldest first."""
        return tuple(sorted({save.checkpoint for save in self.staged}))

    def saved(self, generation: int, local_ranks: int) -> tuple[Checkpoint | None, int]:
        """Returns the newest checkpoint of `generation` that all local ranks committed, and its fewest copies of a save.

        (None, 0) if there is none.
        """
        copies_by_step: dict[int, list[int]] = {}
        for save, count in self.copies_by_save.items():
            if save.generation == generation and count > 0:
                copies_by_step.setdefault(save.step, []).append(count)
        complete_steps = [step for step, counts in copies_by_step.items() if len(counts) >= local_ranks]
        if not complete_steps:
            return None, 0
        return Checkpoint(generation, max(complete_steps)), min(copies_by_step[max(complete_steps)])

    def closed_steps(self, generation: int, local_ranks: int, last_step: int) -> ClosedSteps:
        """Returns the steps of `generation` up to `last_step` at which this worker makes no more saves."""
        rank_count_by_step: dict[int, int] = {}
        for save in self.staged_not_lost:
            if save.generation == generation:
                rank_count_by_step[save.step] = rank_count_by_step.get(save.step, 0) + 1
        complete_steps = tuple(sorted(step for step, count in rank_count_by_step.items() if count >= local_ranks))
        forgotten = (
            self.newest_forgotten.step
            if self.newest_forgotten is not None and self.newest_forgotten.generation == generation
            else 0
        )
        return ClosedSteps(last_step, complete_steps, forgotten)


def track_staged(tracker: SaveTracker, save: RankSave) -> SaveTracker:
    """Records a save that a trainer has staged."""
    handed = (*(s for s in tracker.staged_not_lost if s.generation == save.generation and s != save), save)
    steps = sorted({s.step for s in handed})
    forgotten = tracker.newest_forgotten
    if len(steps) > _MAX_HANDED_STEPS:
        forgotten = Checkpoint(save.generation, steps[-_MAX_HANDED_STEPS - 1])
        handed = tuple(s for s in handed if s.step > forgotten.step)
    staged = (*(s for s in tracker.staged if s != save), save)
    return replace(tracker, staged=staged, staged_not_lost=handed, newest_forgotten=forgotten)


def track_written(tracker: SaveTracker, save: RankSave, copies: int) -> SaveTracker:
    """Records the number of memory servers that now have a complete copy of the save."""
    committed = {**tracker.copies_by_save, save: copies}
    newest = sorted({s.checkpoint for s in committed})[-_MAX_CHECKPOINTS:]
    return replace(tracker, copies_by_save={s: n for s, n in committed.items() if s.checkpoint in newest})


def track_freed(tracker: SaveTracker, save: RankSave) -> SaveTracker:
    """Ends the tracking of a flushed save: its copies are final."""
    return replace(tracker, staged=tuple(s for s in tracker.staged if s != save))


def track_lost(tracker: SaveTracker, save: RankSave) -> SaveTracker:
    """Forgets a save that no memory server was asked to commit."""
    return replace(tracker, staged_not_lost=tuple(s for s in tracker.staged_not_lost if s != save))


# ---- staging memory --------------------------------------------------------------------------------------------------

_REPLACE_SECONDS = 5.0
"""How long saves in an arena that has become too small may still be flushed before they are abandoned."""


@dataclass(frozen=True, slots=True)
class StagingWatcher:
    """Receives the staging memory's events, on the loop."""

    on_freed: Callable[[int, int, int, bool], None]
    """Called when a slot is free, with local rank, slot, step, and whether the save was committed."""
    on_progress: Callable[[], None]
    """Called when something that the heartbeat reports has changed."""
    on_notice: Callable[[str, str], None]
    """Called with the reason and text of a notice for the job's events."""


@dataclass(frozen=True, slots=True)
class ArenaGrant:
    """Grants staging memory to one trainer."""

    file: MemoryFile
    busy: tuple[int, ...]
    """Slots from which older saves are still being flushed."""
    seconds: float
    """Time that allocating the memory took; 0: it existed."""


@dataclass(slots=True)
class _RankArena:
    """Staging memory of one local rank."""

    file: MemoryFile
    flush: Flusher
    flushing_by_slot: dict[int, RankSave]
    """Save that is being flushed from each slot."""
    last_staged: dict[int, tuple[RankSave, Staged]]
    """Save that was last staged in each slot; it can be read until the slot is written again."""


class StagingMemory:
    """Owns the local ranks' arenas and flushers, and the addresses of the memory servers."""

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
        """Lists the known memory servers of this generation, the targets of this worker's saves first."""
        if self._servers is None:
            return ()
        all_instances = dict.fromkeys(endpoint.instance for endpoint in self._servers.servers)
        target_instances = chain(self._servers.targets, *self._servers.rank_targets)
        return tuple(dict.fromkeys([*(t for t in target_instances if t in all_instances), *all_instances]))

    def partial_generation(self) -> int:
        """Returns the generation if it has more memory servers than are known here, else 0."""
        return self._servers.generation if self._servers is not None and self._servers.is_partial else 0

    def open_tier(self, server: MemoryServerInstance) -> Tier:
        """Opens a connection to a memory server, for use by one thread.

        Raises:
            TierUnavailable: The server is not known in this generation.
        """
        endpoints = self._servers.servers if self._servers is not None else ()
        for endpoint in endpoints:
            if endpoint.instance == server:
                job = self._job
                return MemoryServerClient(endpoint, job.job, worker_credentials(job), job.memory_call_timeout_seconds)
        raise TierUnavailable(f"{server} is not among this generation's memory servers, so its address is unknown")

    async def grant_arena(self, local: int, slot_bytes: int, ranks: int = 1) -> ArenaGrant:
        """Grants a local rank its old arena if that is large enough, else a new, prefaulted one.

        Raises:
            OSError: It does not fit together with the memory that the other ones of `ranks` local ranks need. A notice
                is sent, too.
        """
        async with self._allocating:
            self._needs = with_request(self._needs, local, slot_bytes, ranks)
            try:
                grant = await self._allocate(local, slot_bytes)
            except OSError as error:
                self._reject(local, error.strerror or str(error))
                raise
            self._needs = with_grant(self._needs, local)
            self._watcher.on_progress()
            return grant

    @property
    def needs(self) -> StagingDemandByRank:
        """The local ranks' demand of staging memory, and the reasons of rejected requests."""
        return self._needs

    def reusable_saves(self, local: int, checkpoint: Checkpoint) -> list[tuple[StagedSaves, int | None]]:
        """Finds staged saves of `checkpoint` that a restore can read here: the rank's own first, then other ranks'.

        Each reply comes with the arena's file descriptor; None: that arena has none of these saves.
        """
        other_replies = [
            _reusable_saves_in(arena, checkpoint) for number, arena in sorted(self._arenas.items()) if number != local
        ]
        nonempty_replies = [(saves, fd) for saves, fd in other_replies if fd is not None]
        own_saves, fd = (
            _reusable_saves_in(self._arenas[local], checkpoint) if local in self._arenas else (StagedSaves(0), None)
        )
        return [(replace(own_saves, replies_to_follow=len(nonempty_replies)), fd), *nonempty_replies]

    async def _allocate(self, local: int, slot_bytes: int) -> ArenaGrant:
        arena = self._arenas.get(local)
        if arena is not None and arena.file.slot_bytes >= slot_bytes:
            return ArenaGrant(arena.file, tuple(sorted(arena.flushing_by_slot)), 0.0)
        start_seconds = time.monotonic()
        slot_bytes_by_rank = {number: allocated.file.slot_bytes for number, allocated in self._arenas.items()}
        missing = missing_bytes(self._needs, slot_bytes_by_rank)
        released_bytes = sum(
            len(allocated.file.memory) for number, allocated in self._arenas.items() if number in missing
        )
        require_headroom(StagingDemand(SLOTS, tuple(missing.values())), with_released(read_headroom(), released_bytes))
        if arena is not None:
            del self._arenas[local]  # removed first, since allocating the larger one may fail
            await asyncio.to_thread(self._release_arena, arena)
        file = MemoryFile(f"rank-{local}", slot_bytes)
        await asyncio.to_thread(file.prefault)
        self._arenas[local] = self._new_arena(local, file)
        return ArenaGrant(file, (), time.monotonic() - start_seconds)

    def _reject(self, local: int, reason: str) -> None:
        """Records a rejected request: a notice is sent for the first one, and heartbeats report it while it lasts."""
        is_first = not self._needs.rejection_reasons
        self._needs = with_denial(self._needs, local, reason)
        if is_first:
            self._watcher.on_notice("StagingMemoryUnavailable", reason)
        self._watcher.on_progress()

    def stage(self, local: int, save: RankSave, world_size: int, message: Staged) -> None:
        """Passes a staged slot to the flusher, which owns it until it is freed."""
        arena = self._arenas.get(local)
        if arena is None:
            _log.error("local rank %d staged %s, but has no staging memory: the save is ignored", local, save)
            return
        arena.flushing_by_slot[message.slot] = save
        arena.last_staged[message.slot] = (save, message)
        self.tracker = track_staged(self.tracker, save)
        self._needs = with_staged(self._needs, local, message.stream_bytes + message.values_bytes)
        staged_save = StagedSave(
            save, world_size, self._incarnation, message.layout, message.stream_bytes, message.values_bytes
        )
        arena.flush.add_staged(message.slot, staged_save, message.layout_json)
        self._watcher.on_progress()

    def retarget(self, servers: MemoryServers) -> None:
        """Replaces the memory servers to which saves are flushed."""
        if self._servers is None or servers.generation != self._servers.generation:
            self._needs = StagingDemandByRank()  # with another membership the ranks' shares differ
        self._servers = servers
        for local, arena in self._arenas.items():
            self._set_targets(arena.flush, local)

    def drop_older_generations(self, generation: int) -> None:
        """Abandons the staged saves of older generations, before trainers of `generation` start."""
        for arena in self._arenas.values():
            arena.flush.drop_older_generations(generation)

    async def flush(self, timeout_seconds: float) -> bool:
        """Waits until all staged saves are flushed or abandoned; returns whether that came within the timeout."""
        flushers = [arena.flush for arena in self._arenas.values()]
        return all(
            await asyncio.gather(*(asyncio.to_thread(flusher.wait_until_idle, timeout_seconds) for flusher in flushers))
        )

    async def close(self) -> None:
        """Abandons unflushed saves, joins the flushers' threads, unmaps the memory."""
        for arena in self._arenas.values():
            await asyncio.to_thread(arena.flush.close)
            arena.file.close()
        self._arenas.clear()

    def _new_arena(self, local: int, file: MemoryFile) -> _RankArena:
        def on_loop(call: Callable[..., None]) -> Callable[..., None]:
            return lambda *values: self._call_on_loop(functools.partial(call, *values))

        watcher = FlushListener(
            on_slot_freed=on_loop(functools.partial(self._on_freed, local)),
            on_copied=on_loop(self._on_saved),
            on_notice=on_loop(self._watcher.on_notice),
            on_save_lost=on_loop(self._on_lost),
        )
        arena = FlushArena(file.memory, SLOTS, file.slot_bytes)
        flusher = Flusher(arena, self._incarnation, self.open_tier, watcher, self._options)
        self._set_targets(flusher, local)
        return _RankArena(file, flusher, {}, {})

    def _call_on_loop(self, call: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:
            pass  # the agent has ended

    def _set_targets(self, flusher: Flusher, local: int) -> None:
        if self._servers is not None:
            all_instances = frozenset(endpoint.instance for endpoint in self._servers.servers)
            flusher.set_targets(self._servers.targets_of_rank(local), all_instances, self._servers.replicas)

    def _on_saved(self, save: RankSave, copies: int) -> None:
        self.tracker = track_written(self.tracker, save, copies)

    def _on_lost(self, save: RankSave) -> None:
        self.tracker = track_lost(self.tracker, save)
        self._watcher.on_progress()

    def _on_freed(self, local: int, slot: int, step: int, was_saved: bool) -> None:
        arena = self._arenas.get(local)
        save = arena.flushing_by_slot.pop(slot, None) if arena is not None else None
        if save is not None:
            self.tracker = track_freed(self.tracker, save)
        self._watcher.on_freed(local, slot, step, was_saved)
        self._watcher.on_progress()

    def _release_arena(self, arena: _RankArena) -> None:
        if not arena.flush.wait_until_idle(_REPLACE_SECONDS):
            _log.warning("abandoned staged saves in an arena that is too small now: their memory servers do not answer")
        arena.flush.close()
        arena.file.close()


def _reusable_saves_in(arena: _RankArena, checkpoint: Checkpoint) -> tuple[StagedSaves, int | None]:
    matching = [(save, message) for save, message in arena.last_staged.values() if save.checkpoint == checkpoint]
    saves = tuple((save.rank, message.slot, message.stream_bytes, message.layout) for save, message in matching)
    return StagedSaves(arena.file.slot_bytes, saves), arena.file.fd if saves else None
