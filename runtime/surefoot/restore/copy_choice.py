"""Orders the copies of each rank save and remembers damaged ones.

Shared by the reading threads of `reader`. Whatever is asked of a rank save goes through `first_good`: the preferred
copy, then the others, the persistent tier last; a silent source is asked again, with backoff, until it answers or
patience ends, and one object that its tier refuses while it answers for others counts as damaged after a while; only when every copy answered and failed is the part Unreadable.
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
from surefoot.restore.catalogue import Catalogue, SaveSource, reread
from surefoot.restore.read_plan import preference, spread
from surefoot.tiers import SupportsListingByCheckpoint, Tier
from surefoot.tiers.object_store import LOOK_WAITS, LOOKS
from surefoot.tiers.tier import is_listed

log = logging.getLogger(__name__)


# ---- limit of reads under way ----------------------------------------------------------------------------------------
# Limits the reads that one rank has under way at a source; fewer once the source cut it off. A server holds every reply
# until it is read, and cuts off whoever has most once all of them are more than it may hold. Who comes back with as
# much is cut off again. Thread-safe; used below by the choice of a copy, whose windows the reading threads enter too.

UNLIMITED = 1 << 30
"""Before the first cut: the threads' own buffers are the limit."""

_LOOK_SECONDS = 0.1
"""How often a thread that waits for its turn asks whether the restore was called off."""


class ReadWindows:
    """Counts reads by source. A thread that waits for its turn must have none under way."""

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop
        self._limits: dict[int, int] = defaultdict(lambda: UNLIMITED)
        self._under_way: dict[int, int] = defaultdict(int)
        self._cuts: dict[int, int] = defaultdict(int)
        self._changed = threading.Condition()

    def has_room(self, source: int) -> bool:
        with self._changed:
            return self._under_way[source] < self._limits[source]

    def try_enter(self, source: int) -> bool:
        """Counts a read if there is room for it."""
        with self._changed:
            if self._under_way[source] >= self._limits[source]:
                return False
            self._under_way[source] += 1
            return True

    def leave(self, source: int) -> None:
        with self._changed:
            self._under_way[source] -= 1
            self._changed.notify_all()

    @contextmanager
    def entered(self, source: int) -> Iterator[None]:
        """Waits for room, and counts the read that is made inside. Raises TierUnavailable if it is called off."""
        while not self.try_enter(source):
            with self._changed:
                self._changed.wait(_LOOK_SECONDS)
            if self._stop.is_set():
                raise TierUnavailable("the restore was called off")
        try:
            yield
        finally:
            self.leave(source)

    def shrink(self, source: int) -> int:
        """After a cut: two reads at a time, then one. Returns the number of cuts since the last answer."""
        with self._changed:
            self._limits[source] = 2 if self._limits[source] > 2 else 1
            self._cuts[source] += 1
            return self._cuts[source]

    def record_answer(self, source: int) -> int:
        """Forgets the cuts before an answer; returns how many there were."""
        with self._changed:
            return self._cuts.pop(source, 0)

    def limit_of(self, source: int) -> int:
        with self._changed:
            return self._limits[source]


# ---- refused objects -------------------------------------------------------------------------------------------------
# Decides when one object that its tier refuses counts as damaged. Whoever is silent is waited for, and nothing is
# called bad meanwhile. A tier that answers for its other objects is not silent: an object that it refuses again and
# again is a bad sector, a wrong mode or a denied key, and no waiting helps. Without an end to it, one such object would
# keep a job from every older checkpoint.

PATIENCE_SECONDS = 15.0
"""How long a tier that answers for others may refuse an object until that is called bad."""


class RefusedObjects:
    """Remembers since when each object is refused; thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: dict[Hashable, float] = {}
        self._lock = threading.Lock()

    def verdict(self, key: Hashable, problem: TierError, ask_neighbour: Callable[[], object]) -> SurefootError:
        """Returns the problem as it is, or as damage once the object was refused for too long.

        Args:
            key: Names the object.
            problem: How the last read of it ended.
            ask_neighbour: Reads something else of the same tier. Time counts only while that succeeds.
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
        if seconds < PATIENCE_SECONDS:
            return problem
        metrics.fallbacks.labels("object_refused").inc()
        return Corrupt(f"{problem}; the tier returns other objects and has refused this one for {seconds:.0f} s")

    def record_answer(self, key: Hashable) -> None:
        """Forgets the refusals before an answer: the next one is a first one again."""
        if self._since:
            with self._lock:
                self._since.pop(key, None)


# ---- copy choice -----------------------------------------------------------------------------------------------------

T = TypeVar("T")

WAITS = Backoff(0.05, 1.0)
_CUT_WAITS = Backoff(0.02, 1.0)


@dataclass(frozen=True, slots=True, order=True)
class Damage:
    """Names one damaged or missing part of one copy.

    `part`: chunk N, digest table, values, layout, index entry.
    """

    save: RankSave
    part: str
    source: int


class Connections:
    """A connection a thread and source, opened when first needed."""

    def __init__(self, sources: tuple[SaveSource, ...]) -> None:
        self._sources = sources
        self._local = threading.local()
        self._all: list[Tier] = []
        self._lock = threading.Lock()

    def connection_to(self, number: int) -> Tier:
        mine: dict[int, Tier] = self._local.__dict__.setdefault("tiers", {})
        if number not in mine:
            tier = self._sources[number].open()
            mine[number] = tier
            with self._lock:
                self._all.append(tier)
        return mine[number]

    def learn(self, sources: tuple[SaveSource, ...]) -> None:
        """Further sources are known, behind those that were."""
        self._sources = sources

    def drop(self, number: int) -> None:
        """The connection failed: the next use opens another."""
        mine: dict[int, Tier] = self._local.__dict__.setdefault("tiers", {})
        tier = mine.pop(number, None)
        if tier is not None:
            tier.close()

    def close(self) -> None:
        with self._lock:
            for tier in self._all:
                tier.close()
            self._all.clear()


class CopySelector:
    """Chooses the copies of a checkpoint's rank saves; thread-safe."""

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
        self._refused = RefusedObjects()
        self._stop = threading.Event()
        self.windows = ReadWindows(self._stop)
        self._logged_cuts: set[int] = set()
        self._learn(catalogue)

    @property
    def world_size(self) -> int:
        """Ranks of the checkpoint's world; waits while all sources are silent."""
        waits = count(1)
        while not self._manifests:
            self._wait_for_index(str(self.checkpoint), next(waits))
        worlds = [m.world_size for m in self._manifests.values()]
        return max(set(worlds), key=worlds.count)

    def manifest(self, rank: int) -> RankManifest:
        """The manifest of a rank's save, on which all counted copies agree."""
        waits = count(1)
        while rank not in self._manifests:
            self._wait_for_index(f"rank {rank} of {self.checkpoint}", next(waits))
        return self._manifests[rank]

    def spread(self, reads: Sequence[tuple[int, int]]) -> list[int]:
        """Assigns each read, given as (rank, bytes), the source to begin with.

        -1 where no copy is known. The copies within a tier share the bytes evenly.
        """
        sizes: dict[int, int] = defaultdict(int)
        for rank, size in reads:
            sizes[rank] += size
        with self._lock:
            self._order = self._preferred(sizes)
            orders = spread(reads, self._order, self._last())
        return [order[0] if order else -1 for order in orders]

    def first_good(
        self, rank: int, part: str, read: Callable[[Tier, RankManifest], T], begin: int = -1
    ) -> tuple[T, int]:
        """Reads a part from the first good copy; adds its source.

        `begin`: a source to try first. Raises Unreadable once every copy answered and failed, more than once: one answer
        that came spoiled is no verdict where there is no other copy.
        """
        looks, waits = count(1), 0
        while True:
            manifest = self.manifest(rank)
            problems: list[Exception] = []
            damages: dict[int, Exception] = {}
            for number in sorted(self._order.get(rank, ()), key=lambda source: source != begin):
                try:
                    with self.windows.entered(number):
                        part_read = read(self.connections.connection_to(number), manifest)
                    self.record_answer(number)
                    self._refused.record_answer(Damage(manifest.save, part, number))
                    self._note_all(manifest.save, part, damages)
                    return part_read, number
                except (Corrupt, ProtocolError, ChunkMissing) as problem:
                    damages[number] = problem
                    problems.append(problem)
                except TierError as problem:
                    verdict = self._verdict(Damage(manifest.save, part, number), problem)
                    if isinstance(verdict, Corrupt):
                        self.record_damage(Damage(manifest.save, part, number), verdict)
                        problems.append(verdict)
                        continue
                    if waits == 0:
                        log.warning("%s of %s: %s", part, manifest.save, problem)
                    metrics.restore_fallbacks.labels("unreachable").inc()
                    self.connections.drop(number)
                    self._shrink(number)
                    problems.append(problem)
            silent = [p for p in problems if isinstance(p, TierError) and not isinstance(p, ChunkMissing)]
            if not silent and not self._catalogue.silent:
                if damages and (look := next(looks)) < LOOKS:
                    for number in damages:
                        self.connections.drop(number)
                    self._stop.wait(LOOK_WAITS.seconds(look, random.random()))
                    continue
                self._note_all(manifest.save, part, damages)
                why = "; ".join(map(str, problems)) or "no index has it"
                absent = all(isinstance(p, ChunkMissing) for p in problems) and not self._is_listed(rank)
                raise Unreadable(f"{part} of {manifest.save} cannot be read from any copy: {why}", absent=absent)
            waits += 1
            self._wait_for_silent(f"{part} of {manifest.save}", waits, silent)

    def _verdict(self, damage: Damage, problem: TierError) -> SurefootError:
        """A silent copy, or a damaged one: whose tier answers, and refuses just this."""

        def ask_neighbour() -> None:
            self.connections.drop(damage.source)
            tier, checkpoint = self.connections.connection_to(damage.source), damage.save.checkpoint
            found = tier.manifests_of(checkpoint) if isinstance(tier, SupportsListingByCheckpoint) else tier.manifests()
            if not any(manifest.save == damage.save for manifest in found):
                raise ChunkMissing(f"{tier.name} does not list {damage.save}")

        return self._refused.verdict(damage, problem, ask_neighbour)

    def record_answer(self, number: int) -> None:
        """Begins patience anew; says once of a source that had cut this rank off that it did."""
        if self._patience_seconds is not None:
            self._deadline = time.monotonic() + self._patience_seconds
        cuts = self.windows.record_answer(number)
        if not cuts:
            return
        metrics.restore_fallbacks.labels("cut").inc(cuts)
        with self._lock:
            new = number not in self._logged_cuts
            self._logged_cuts.add(number)
        if new:
            log.warning(
                "%s closed this rank's connection and answers again: all its readers together requested more than"
                " it may buffer (memoryTier.clientMemory); this rank requests %d chunks at a time from now on",
                self.sources[number].name,
                self.windows.limit_of(number),
            )

    def pause_after_cut(self, number: int) -> None:
        """Waits a moment before a source that closed the connection is asked again, for less."""
        self._stop.wait(_CUT_WAITS.seconds(self._shrink(number), random.random()))

    def _shrink(self, number: int) -> int:
        """A bucket or folder holds no replies for its readers: it is asked as before."""
        return 1 if self.sources[number].kind == "persistent" else self.windows.shrink(number)

    def _is_listed(self, rank: int) -> bool:
        """Whether some source's index still names a rank's save, of which every copy lacks a part."""
        save = self.manifest(rank).save
        return any(is_listed(self.connections.connection_to(number), save) for number in self._order.get(rank, ()))

    def read_from_any(self, rank: int, read: Callable[[Tier, RankManifest], T]) -> T | None:
        """Reads a shared part (a layout record) from sources without this save."""
        manifest = self.manifest(rank)
        for number in sorted(set(range(len(self.sources))) - set(self._having.get(rank, ()))):
            try:
                return read(self.connections.connection_to(number), manifest)
            except (Corrupt, ProtocolError, TierError) as problem:
                log.info("%s has it not either: %s", self.sources[number].name, problem)
                self.connections.drop(number)
        return None

    def _note_all(self, save: RankSave, part: str, damages: Mapping[int, Exception]) -> None:
        for number, problem in damages.items():
            self.record_damage(Damage(save, part, number), problem)

    def record_damage(self, damage: Damage, problem: Exception) -> None:
        """Records a damaged copy, to be logged and healed once."""
        metrics.restore_fallbacks.labels("missing" if isinstance(problem, ChunkMissing) else "corrupt").inc()
        with self._lock:
            new = damage not in self._damages
            self._damages.add(damage)
        if new:
            log.warning("another copy is needed: %s", problem)

    def damages(self) -> list[Damage]:
        with self._lock:
            return sorted(self._damages)

    def damaged_entries(self) -> list[Damage]:
        """Lists saves missing from sources that have unreadable index entries.

        The unreadable entry may be that save's.
        """
        return sorted(
            Damage(manifest.save, "index entry", number)
            for number, reading in enumerate(self._catalogue.readings)
            if reading is not None and reading.damaged
            for rank, manifest in self._manifests.items()
            if number not in self._having[rank] and _names(reading.damaged, manifest.save)
        )

    def stop(self) -> None:
        """Ends all waiting, and closes connections once the threads are gone."""
        self._stop.set()

    def _wait_for_index(self, what: str, time_number: int) -> None:
        if not self._catalogue.silent:
            raise Unreadable(f"{what} is in no index, and every tier answered", absent=True)
        self._wait_for_silent(what, time_number)

    def _wait_for_silent(self, what: str, time_number: int, problems: Sequence[Exception] = ()) -> None:
        """Waits for the `time_number`-th time, asks the silent sources again. Raises when patience ends."""
        if self._deadline is not None and time.monotonic() >= self._deadline:
            silent = ", ".join(self._catalogue.silent) or "a source"
            why = f" ({'; '.join(map(str, problems))})" if problems else ""
            raise TierUnavailable(f"{what} cannot be read: {silent} does not answer, and no other copy is good{why}")
        if self._stop.wait(WAITS.seconds(time_number, random.random())):
            raise TierUnavailable(f"reading {what} was called off")
        with self._lock:
            if self._catalogue.silent:
                self._learn(reread(self._catalogue))

    def _learn(self, catalogue: Catalogue) -> None:
        """Selects the manifests that count: of copies that describe different bytes, those that most sources agree
        on."""
        self._catalogue = catalogue
        self.connections.learn(catalogue.sources)
        self.sources = catalogue.sources
        manifests: dict[int, RankManifest] = {}
        having: dict[int, list[int]] = {}
        for rank, copies in catalogue.copies(self.checkpoint).items():
            agreed = max((m for _, m in copies), key=lambda m: sum(m.same_bytes_as(other) for _, other in copies))
            manifests[rank] = agreed
            having[rank] = [number for number, m in copies if m.same_bytes_as(agreed)]
            for number, m in copies:
                if not m.same_bytes_as(agreed):
                    metrics.restore_fallbacks.labels("disagreement").inc()
                    log.warning(
                        "%s describes %s otherwise than the others: not read", self.sources[number].name, m.save
                    )
        self._manifests = manifests
        self._having = having
        self._order = self._preferred({rank: m.stream_bytes for rank, m in manifests.items()})

    def _preferred(self, sizes: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
        local = frozenset(n for n, s in enumerate(self.sources) if s.local)
        return preference(self._having, local, self._last(), sizes, self._seed)

    def _last(self) -> frozenset[int]:
        return frozenset(n for n, s in enumerate(self.sources) if s.kind == "persistent")


def _names(damaged: Iterable[str], save: RankSave) -> bool:
    """Whether one of these names is that of the save's index entry, in either tier's spelling."""
    spellings = (
        f" {save.generation}:{save.step}:{save.rank}",
        f"/{save.step}-{save.generation}/rank-{save.rank}/",
        str(save),
    )
    return any(name.endswith(spellings[0]) or spellings[1] in name or spellings[2] in name for name in damaged)
