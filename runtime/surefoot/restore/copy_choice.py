"""Chooses the copy from which each part of a rank save is read, and remembers damaged ones.

Shared by the reading threads of `reader`. Every part is read with `read_first_intact`: from the preferred copy, then
from the others, the persistent tier last. A source that does not answer is retried with backoff until it answers or the
patience ends. An object that its tier rejects while it returns others counts as damaged after a while. A part is
Unreadable only when every copy answered and failed.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import TypeVar

from surefoot import metrics
from surefoot.errors import (
    ChunkMissing,
    Corrupt,
    ObjectRefused,
    ProtocolError,
    SurefootError,
    TierError,
    TierUnavailable,
    Unreadable,
)
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.identities import Checkpoint, RankSave
from surefoot.protocol.timeouts import Backoff
from surefoot.restore.catalogue import Catalogue, SaveSource, reread_missing_indexes
from surefoot.restore.read_plan import balance_reads, order_copies
from surefoot.tiers import SupportsListingByCheckpoint, Tier
from surefoot.tiers.object_store import MAX_READ_ATTEMPTS, READ_BACKOFF
from surefoot.tiers.tier import is_listed

log = logging.getLogger(__name__)


# ---- limit of concurrent reads ---------------------------------------------------------------------------------------
# Limits the reads that one rank has outstanding at a source, and lowers the limit after the source closed the
# connection. A server buffers every reply until it is read; when all replies exceed its limit
# (memoryTier.clientMemory), it disconnects the client with the most. A client that returns with as many reads is
# disconnected again. Thread-safe.

UNLIMITED = 1 << 30
"""Limit before the first disconnection; the threads' own buffers limit the reads until then."""

_STOP_CHECK_SECONDS = 0.1
"""How often a thread that waits for room checks whether the restore was cancelled."""


class ReadWindows:
    """Counts and limits outstanding reads by source. A thread that waits for room must have none outstanding."""

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop
        self._limits: dict[int, int] = defaultdict(lambda: UNLIMITED)
        self._outstanding: dict[int, int] = defaultdict(int)
        self._cuts: dict[int, int] = defaultdict(int)
        self._changed = threading.Condition()

    def has_room(self, source: int) -> bool:
        with self._changed:
            return self._outstanding[source] < self._limits[source]

    def try_start_read(self, source: int) -> bool:
        """Counts a read if there is room for it; returns whether there was."""
        with self._changed:
            if self._outstanding[source] >= self._limits[source]:
                return False
            self._outstanding[source] += 1
            return True

    def finish_read(self, source: int) -> None:
        with self._changed:
            self._outstanding[source] -= 1
            self._changed.notify_all()

    @contextmanager
    def wait_for_room(self, source: int) -> Iterator[None]:
        """Waits for room and counts the read made in the block; raises TierUnavailable if the restore is cancelled."""
        while not self.try_start_read(source):
            with self._changed:
                self._changed.wait(_STOP_CHECK_SECONDS)
            if self._stop.is_set():
                raise TierUnavailable("the restore was cancelled")
        try:
            yield
        finally:
            self.finish_read(source)

    def lower_limit(self, source: int) -> int:
        """Lowers the limit to two reads, then one; returns the number of disconnections since the last answer."""
        with self._changed:
            self._limits[source] = 2 if self._limits[source] > 2 else 1
            self._cuts[source] += 1
            return self._cuts[source]

    def record_answer(self, source: int) -> int:
        """Resets the count of disconnections, and returns it."""
        with self._changed:
            return self._cuts.pop(source, 0)

    def limit_of(self, source: int) -> int:
        with self._changed:
            return self._limits[source]


# ---- rejected objects ------------------------------------------------------------------------------------------------
# Decides when an object that its tier rejects counts as damaged. While a tier does not answer at all, nothing in it
# counts as damaged. A tier that returns its other objects does answer: an object that it rejects again and again is a
# bad sector, a wrong file mode or a denied key, and waiting does not help. Without a limit, one such object would keep
# a job from every older checkpoint.

REJECTION_TIMEOUT_SECONDS = 15.0
"""How long a tier that returns other objects may reject one until that one counts as damaged."""


class RejectedObjects:
    """Remembers since when each object has been rejected; thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: dict[Hashable, float] = {}
        self._lock = threading.Lock()

    def judge_rejection(self, key: Hashable, problem: TierError, ask_neighbour: Callable[[], object]) -> SurefootError:
        """Returns the problem unchanged, or a Corrupt error once the object was rejected for too long.

        Args:
            key: Identifies the object.
            problem: The error of the last read.
            ask_neighbour: Reads another object of the same tier. Time counts only while that succeeds.
        """
        if not isinstance(problem, ObjectRefused):
            return problem
        try:
            ask_neighbour()
        except SurefootError:
            with self._lock:
                self._since.pop(key, None)
            return problem
        now = self._clock()
        with self._lock:
            seconds = now - self._since.setdefault(key, now)
        if seconds < REJECTION_TIMEOUT_SECONDS:
            return problem
        metrics.fallbacks.labels("object_refused").inc()
        return Corrupt(f"{problem}; the tier returns other objects and has rejected this one for {seconds:.0f} s")

    def record_answer(self, key: Hashable) -> None:
        """Forgets earlier rejections of an object, because it was read."""
        if self._since:
            with self._lock:
                self._since.pop(key, None)


# ---- copy choice -----------------------------------------------------------------------------------------------------

T = TypeVar("T")

UNANSWERED_BACKOFF = Backoff(0.05, 1.0)
_DISCONNECT_BACKOFF = Backoff(0.02, 1.0)


@dataclass(frozen=True, slots=True, order=True)
class Damage:
    """A damaged or missing part of one copy."""

    save: RankSave
    part: str
    """Its name: chunk N, digest table, values, layout or index entry."""
    source: int
    """Index of the source that has the copy."""


class Connections:
    """Connections per thread and source, opened when it is first needed."""

    def __init__(self, sources: tuple[SaveSource, ...]) -> None:
        self._sources = sources
        self._local = threading.local()
        self._all: list[Tier] = []
        self._lock = threading.Lock()

    def connection_to(self, source: int) -> Tier:
        """Returns this thread's connection to a source, and opens it if needed."""
        thread_tiers: dict[int, Tier] = self._local.__dict__.setdefault("tiers", {})
        if source not in thread_tiers:
            tier = self._sources[source].open()
            thread_tiers[source] = tier
            with self._lock:
                self._all.append(tier)
        return thread_tiers[source]

    def set_sources(self, sources: tuple[SaveSource, ...]) -> None:
        """Sets the sources; known ones keep their index, and further ones follow them."""
        self._sources = sources

    def close_connection(self, source: int) -> None:
        """Closes this thread's connection to a source after a failure; the next use opens another."""
        thread_tiers: dict[int, Tier] = self._local.__dict__.setdefault("tiers", {})
        tier = thread_tiers.pop(source, None)
        if tier is not None:
            tier.close()

    def close(self) -> None:
        with self._lock:
            for tier in self._all:
                tier.close()
            self._all.clear()


class CopySelector:
    """Reads the parts of a checkpoint's rank saves from the best copies; thread-safe."""

    def __init__(self, checkpoint: Checkpoint, catalogue: Catalogue, seed: int, patience_seconds: float | None) -> None:
        self.checkpoint = checkpoint
        self.connections = Connections(catalogue.sources)
        self.sources = catalogue.sources
        self._catalogue = catalogue
        self._seed = seed
        self._patience_seconds = patience_seconds
        self._deadline = None if patience_seconds is None else time.monotonic() + patience_seconds
        self._lock = threading.Lock()
        self._damages: set[Damage] = set()
        self._refused = RejectedObjects()
        self._stop = threading.Event()
        self.windows = ReadWindows(self._stop)
        self._logged_cuts: set[int] = set()
        self._set_catalogue(catalogue)

    @property
    def world_size(self) -> int:
        """World size of the checkpoint; waits while no source answers."""
        attempts = count(1)
        while not self._manifests:
            self._wait_for_index(str(self.checkpoint), next(attempts))
        world_sizes = [m.world_size for m in self._manifests.values()]
        return max(set(world_sizes), key=world_sizes.count)

    def manifest_of(self, rank: int) -> RankManifest:
        """Returns the manifest of a rank's save, on which all usable copies agree; waits while it is in no index."""
        attempts = count(1)
        while rank not in self._manifests:
            self._wait_for_index(f"rank {rank} of {self.checkpoint}", next(attempts))
        return self._manifests[rank]

    def assign_sources(self, reads: Sequence[tuple[int, int]]) -> list[int]:
        """Assigns each read, passed as (rank, bytes), the source to start with; -1 if no copy is known.

        The copies within a tier share the bytes evenly.
        """
        sizes: dict[int, int] = defaultdict(int)
        for rank, size in reads:
            sizes[rank] += size
        with self._lock:
            self._order = self._order_sources(sizes)
            orders = balance_reads(reads, self._order, self._persistent_sources())
        return [order[0] if order else -1 for order in orders]

    def read_first_intact(
        self, rank: int, part: str, read: Callable[[Tier, RankManifest], T], begin: int = -1
    ) -> tuple[T, int]:
        """Reads a part from the first intact copy.

        Args:
            rank: The rank whose save is read.
            part: Name of the part, as in `Damage`.
            read: Reads and verifies the part.
            begin: Index of a source to try first; -1: none.

        Returns:
            The part, and the index of the source it came from.

        Raises:
            Unreadable: Every copy answered and failed, several times: a single damaged answer proves nothing if there is
                no other copy.
            TierUnavailable: The patience ended, or the restore was cancelled.
        """
        attempts, waits = count(1), 0
        while True:
            # Try every known copy once.
            manifest = self.manifest_of(rank)
            problems: list[Exception] = []
            damages: dict[int, Exception] = {}
            for source in sorted(self._order.get(rank, ()), key=lambda source: source != begin):
                try:
                    with self.windows.wait_for_room(source):
                        part_read = read(self.connections.connection_to(source), manifest)
                    self.record_answer(source)
                    self._refused.record_answer(Damage(manifest.save, part, source))
                    self._record_damages(manifest.save, part, damages)
                    return part_read, source
                except (Corrupt, ProtocolError, ChunkMissing) as problem:
                    damages[source] = problem
                    problems.append(problem)
                except TierError as problem:
                    verdict = self._verdict(Damage(manifest.save, part, source), problem)
                    if isinstance(verdict, Corrupt):
                        self.record_damage(Damage(manifest.save, part, source), verdict)
                        problems.append(verdict)
                        continue
                    if waits == 0:
                        log.warning("could not read %s of %s; trying other copies: %s", part, manifest.save, problem)
                    metrics.restore_fallbacks.labels("unreachable").inc()
                    self.connections.close_connection(source)
                    self._shrink(source)
                    problems.append(problem)
            unanswered = [p for p in problems if isinstance(p, TierError) and not isinstance(p, ChunkMissing)]
            # Every copy answered: read a few times over new connections, then the part is unreadable.
            if not unanswered and not self._catalogue.unanswered_sources:
                if damages and (attempt := next(attempts)) < MAX_READ_ATTEMPTS:
                    for source in damages:
                        self.connections.close_connection(source)
                    self._stop.wait(READ_BACKOFF.wait_seconds(attempt, random.random()))
                    continue
                self._record_damages(manifest.save, part, damages)
                reasons = "; ".join(map(str, problems)) or "no index has it"
                absent = all(isinstance(p, ChunkMissing) for p in problems) and not self._is_listed(rank)
                raise Unreadable(f"{part} of {manifest.save} cannot be read from any copy: {reasons}", absent=absent)
            # A copy may still come from a source that did not answer.
            waits += 1
            self._wait_for_silent(f"{part} of {manifest.save}", waits, unanswered)

    def _verdict(self, damage: Damage, problem: TierError) -> SurefootError:
        """Returns the problem, or a Corrupt error if the copy's tier answers and rejects only this object."""

        def ask_neighbour() -> None:
            self.connections.close_connection(damage.source)
            tier, checkpoint = self.connections.connection_to(damage.source), damage.save.checkpoint
            if isinstance(tier, SupportsListingByCheckpoint):
                manifests = tier.manifests_of(checkpoint)
            else:
                manifests = tier.manifests()
            if not any(manifest.save == damage.save for manifest in manifests):
                raise ChunkMissing(f"{tier.name} does not list {damage.save}")

        return self._refused.judge_rejection(damage, problem, ask_neighbour)

    def record_answer(self, source: int) -> None:
        """Restarts the patience, and logs once per source that it had closed this rank's connection."""
        if self._patience_seconds is not None:
            self._deadline = time.monotonic() + self._patience_seconds
        cuts = self.windows.record_answer(source)
        if not cuts:
            return
        metrics.restore_fallbacks.labels("cut").inc(cuts)
        with self._lock:
            is_first = source not in self._logged_cuts
            self._logged_cuts.add(source)
        if is_first:
            log.warning(
                "%s closed this rank's connection and answers again: all its readers together requested more than"
                " it may buffer (memoryTier.clientMemory); this rank requests %d chunks at a time from now on",
                self.sources[source].name,
                self.windows.limit_of(source),
            )

    def pause_after_cut(self, source: int) -> None:
        """Lowers the limit of a source that closed the connection, and waits before the next read from it."""
        self._stop.wait(_DISCONNECT_BACKOFF.wait_seconds(self._shrink(source), random.random()))

    def _shrink(self, source: int) -> int:
        """Lowers the limit of reads; not of the persistent tier, which buffers no replies for its readers."""
        return 1 if self.sources[source].kind == "persistent" else self.windows.lower_limit(source)

    def _is_listed(self, rank: int) -> bool:
        """Whether a source's index still lists the save of a rank, of which every copy lacks a part."""
        save = self.manifest_of(rank).save
        return any(is_listed(self.connections.connection_to(source), save) for source in self._order.get(rank, ()))

    def read_from_any(self, rank: int, read: Callable[[Tier, RankManifest], T]) -> T | None:
        """Reads a part that saves share (a layout record) from sources without this save; None: none has it."""
        manifest = self.manifest_of(rank)
        for source in sorted(set(range(len(self.sources))) - set(self._sources_by_rank.get(rank, ()))):
            try:
                return read(self.connections.connection_to(source), manifest)
            except (Corrupt, ProtocolError, TierError) as problem:
                log.info("%s has no intact copy either: %s", self.sources[source].name, problem)
                self.connections.close_connection(source)
        return None

    def _record_damages(self, save: RankSave, part: str, damages: Mapping[int, Exception]) -> None:
        for source, problem in damages.items():
            self.record_damage(Damage(save, part, source), problem)

    def record_damage(self, damage: Damage, problem: Exception) -> None:
        """Records a damaged copy, which is logged once, and healed after the restore."""
        metrics.restore_fallbacks.labels("missing" if isinstance(problem, ChunkMissing) else "corrupt").inc()
        with self._lock:
            is_first = damage not in self._damages
            self._damages.add(damage)
        if is_first:
            log.warning("reading another copy, because this one is damaged or incomplete: %s", problem)

    def list_damages(self) -> list[Damage]:
        with self._lock:
            return sorted(self._damages)

    def find_damaged_entries(self) -> list[Damage]:
        """Lists saves that sources lack whose unreadable index entry may be that save's."""
        return sorted(
            Damage(manifest.save, "index entry", source)
            for source, reading in enumerate(self._catalogue.readings)
            if reading is not None and reading.damaged_entries
            for rank, manifest in self._manifests.items()
            if source not in self._sources_by_rank[rank] and _names_save(reading.damaged_entries, manifest.save)
        )

    def stop(self) -> None:
        """Ends all waits; the waiting reads raise TierUnavailable."""
        self._stop.set()

    def _wait_for_index(self, what: str, attempt: int) -> None:
        if not self._catalogue.unanswered_sources:
            raise Unreadable(f"{what} is in no tier's index, and every tier answered", absent=True)
        self._wait_for_silent(what, attempt)

    def _wait_for_silent(self, what: str, attempt: int, problems: Sequence[Exception] = ()) -> None:
        """Waits with backoff, then reads the missing indexes again; raises TierUnavailable when the patience ends."""
        if self._deadline is not None and time.monotonic() >= self._deadline:
            names = ", ".join(self._catalogue.unanswered_sources) or "a source"
            reasons = f" ({'; '.join(map(str, problems))})" if problems else ""
            raise TierUnavailable(
                f"{what} cannot be read: {names} does not answer, and no other copy is intact{reasons}"
            )
        if self._stop.wait(UNANSWERED_BACKOFF.wait_seconds(attempt, random.random())):
            raise TierUnavailable(f"reading {what} was cancelled")
        with self._lock:
            if self._catalogue.unanswered_sources:
                self._set_catalogue(reread_missing_indexes(self._catalogue))

    def _set_catalogue(self, catalogue: Catalogue) -> None:
        """Selects each rank's manifest: if copies describe different bytes, the one on which most sources agree."""
        self._catalogue = catalogue
        self.connections.set_sources(catalogue.sources)
        self.sources = catalogue.sources
        manifests: dict[int, RankManifest] = {}
        source_ids: dict[int, list[int]] = {}
        for rank, copies in catalogue.copies_by_rank(self.checkpoint).items():
            majority = max((m for _, m in copies), key=lambda m: sum(m.has_same_bytes_as(other) for _, other in copies))
            manifests[rank] = majority
            source_ids[rank] = [source for source, m in copies if m.has_same_bytes_as(majority)]
            for source, m in copies:
                if not m.has_same_bytes_as(majority):
                    metrics.restore_fallbacks.labels("disagreement").inc()
                    log.warning(
                        "%s describes other bytes for %s than most sources; its copy is not read",
                        self.sources[source].name,
                        m.save,
                    )
        self._manifests = manifests
        self._sources_by_rank = source_ids
        self._order = self._order_sources({rank: m.stream_bytes for rank, m in manifests.items()})

    def _order_sources(self, sizes: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
        local = frozenset(n for n, s in enumerate(self.sources) if s.is_local)
        return order_copies(self._sources_by_rank, local, self._persistent_sources(), sizes, self._seed)

    def _persistent_sources(self) -> frozenset[int]:
        return frozenset(n for n, s in enumerate(self.sources) if s.kind == "persistent")


def _names_save(damaged: Iterable[str], save: RankSave) -> bool:
    """Whether one of the damaged entries is the save's, in the spelling of either tier."""
    spellings = (
        f" {save.generation}:{save.step}:{save.rank}",
        f"/{save.step}-{save.generation}/rank-{save.rank}/",
        str(save),
    )
    return any(name.endswith(spellings[0]) or spellings[1] in name or spellings[2] in name for name in damaged)
