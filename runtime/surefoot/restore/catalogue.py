"""Lists checkpoints and their copies from the tiers' indexes.

Read by a restoring rank, by `Checkpointer.latest` and `list`, and by library mode to choose its restore point. A tier
that does not answer is unknown, never empty: its reading is None.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Literal

from surefoot.errors import SurefootError, TierError
from surefoot.memory_server.async_connection import AsyncServerConnection
from surefoot.memory_server.client import Entries, FencedCalls, MemoryServerClient, MemoryServerIndex
from surefoot.memory_server.connection import Credentials, translate_redis_errors
from surefoot.protocol.checkpoints.completeness import Covers, TierReading, is_complete, layouts_to_check, uncovered
from surefoot.protocol.checkpoints.records import Layout, RankManifest
from surefoot.protocol.identities import Checkpoint, MemoryServerEndpoint, MemoryServerInstance
from surefoot.settings import PersistentSettings
from surefoot.tiers import SupportsListingByCheckpoint, Tier
from surefoot.tiers.persistent import open_persistent
from surefoot.tiers.tier import stream_from

log = logging.getLogger(__name__)


# ---- holder indexes --------------------------------------------------------------------------------------------------
# Reads the indexes of many holders at once, on one event loop. A thread for each holder spends more on taking turns
# than on reading, and a rank that restores from hundreds of holders stands meanwhile. A holder that is silent takes its
# own time limit, and delays no other.

INDEXES_AT_ONCE = 32
"""Holders that are asked at a time: each one's time limit runs while this process shakes hands with all of them, and
hundreds of TLS handshakes on a busy machine take longer than that."""


@dataclass(frozen=True, slots=True)
class IndexedMemoryServer:
    """Names one job's index on one holder, and the reader's account."""

    endpoint: MemoryServerEndpoint
    job: str
    account: Credentials
    call_seconds: float

    async def index(self, only: Checkpoint | None, known: Entries) -> MemoryServerIndex:
        """Connects, reads and closes; raises a TierError."""
        endpoint = self.endpoint
        near = self.account.socket_to(endpoint.server_id)
        line = AsyncServerConnection(endpoint.host, endpoint.port, self.account, self.call_seconds, endpoint.tls, near)
        try:
            with translate_redis_errors(str(endpoint.instance), "connecting"):
                await line.open()
            return await line.run_exchange(FencedCalls(endpoint, self.job).index(only, known))
        finally:
            line.close()


def read_indexes(holders: Sequence[IndexedMemoryServer], only: Checkpoint | None) -> list[MemoryServerIndex | None]:
    """Reads each holder's index; None where one is silent.

    Blocks; for a thread that runs no event loop. `only`: reads this checkpoint alone.
    """
    return asyncio.run(_read_all(holders, only)) if holders else []


async def _read_all(holders: Sequence[IndexedMemoryServer], only: Checkpoint | None) -> list[MemoryServerIndex | None]:
    turns, known = asyncio.Semaphore(INDEXES_AT_ONCE), Entries()

    async def read(holder: IndexedMemoryServer) -> MemoryServerIndex | None:
        async with turns:
            try:
                return await holder.index(only, known)
            except TierError as silent:
                log.warning("memory:%s is silent: %s", holder.endpoint.server_id, silent)
                return None

    return list(await asyncio.gather(*map(read, holders)))


# ---- catalogue -------------------------------------------------------------------------------------------------------

AT_ONCE = 32
"""Sources that are asked at a time: a silent one takes its time limit, and holds up no more than its thread."""


@dataclass(frozen=True, slots=True)
class SaveSource:
    """Names one source of copies; `open` gives a thread its connection."""

    name: str
    kind: Literal["memory", "persistent"]
    open: Callable[[], Tier]
    local: bool = False
    heals: bool = True
    """Whether damaged copies here may be rewritten; not in another job's checkpoints."""
    server: IndexedMemoryServer | None = None
    """Whose index is read together with all others'; None: `open` gives what reads it."""


@dataclass(frozen=True, slots=True)
class SourceReading:
    """Holds one source's answer; `damaged` names index entries that cannot be read."""

    manifests: tuple[RankManifest, ...]
    damaged: tuple[str, ...] = ()


Further = Callable[[], Sequence[SaveSource] | None]
"""Asks for the sources that nobody named yet; None: nobody answers now."""

_UNNAMED = "a holder that nobody named yet"


@dataclass(frozen=True, slots=True)
class Catalogue:
    """Pairs sources with their readings; None where a source is silent."""

    sources: tuple[SaveSource, ...]
    readings: tuple[SourceReading | None, ...]
    only: Checkpoint | None = None
    """What was asked about; None: everything."""
    further: Further | None = None
    """There are more sources than these; None: these are all."""

    @property
    def silent(self) -> tuple[str, ...]:
        """Sources that may have more, known or not known yet."""
        known = tuple(s.name for s, r in zip(self.sources, self.readings, strict=True) if r is None)
        return known if self.further is None else (*known, _UNNAMED)

    def copies(self, checkpoint: Checkpoint) -> dict[int, list[tuple[int, RankManifest]]]:
        """rank → (number of the source, its manifest) of every copy of that rank's save."""
        found: dict[int, list[tuple[int, RankManifest]]] = defaultdict(list)
        for number, reading in enumerate(self.readings):
            for manifest in reading.manifests if reading is not None else ():
                if manifest.save.checkpoint == checkpoint:
                    found[manifest.save.rank].append((number, manifest))
        return dict(found)

    def complete(self) -> list[Checkpoint]:
        """Lists the complete checkpoints, oldest first; reads layouts to tell."""
        by_source = [r.manifests if r is not None else () for r in self.readings]
        named = zip((s.name for s in self.sources), by_source, strict=True)
        reading = TierReading({MemoryServerInstance(name, ""): manifests for name, manifests in named}, None)
        covers = self.covers(reading)
        found = [checkpoint for checkpoint, ranks in reading.manifests().items() if is_complete(ranks, covers)]
        return sorted(found, key=lambda checkpoint: (checkpoint.step, checkpoint.generation))

    def covers(self, reading: TierReading) -> Covers:
        """Whether the layouts of each candidate cover every tensor once."""
        manifests = {m.layout: m for r in self.readings if r is not None for m in r.manifests}
        layouts: dict[str, Layout] = {}
        answers: dict[frozenset[str], bool] = {}
        for digests in layouts_to_check(reading):
            for digest in digests - layouts.keys():
                layout = self._layout(manifests[digest])
                if layout is not None:
                    layouts[digest] = layout
            known = [layouts[d] for d in digests if d in layouts]
            answers[digests] = len(known) == len(digests) and uncovered(known) is None
        return answers

    def _layout(self, manifest: RankManifest) -> Layout | None:
        """The layout record from whichever source has a good copy."""
        for source in self.sources:
            tier: Tier | None = None
            try:
                tier = source.open()
                return stream_from(tier, manifest).layout
            except SurefootError as problem:
                log.info("no layout %s from %s: %s", manifest.layout, source.name, problem)
            finally:
                if tier is not None:
                    tier.close()
        return None


def server_sources(
    endpoints: Iterable[MemoryServerEndpoint],
    job: str,
    account: Credentials,
    node: str | None,
    call_seconds: float = 1.0,
) -> list[SaveSource]:
    """The memory tier; holders of `node` are the local ones."""
    return [
        SaveSource(
            f"memory:{e.server_id}",
            "memory",
            lambda e=e: MemoryServerClient(e, job, account, call_seconds),  # type: ignore[misc]  # e is bound on purpose
            local=e.instance.node == node,
            server=IndexedMemoryServer(e, job, account, call_seconds),
        )
        for e in endpoints
    ]


def persistent_source(settings: PersistentSettings, job: str) -> SaveSource:
    """The persistent tier of `job`."""
    return SaveSource("persistent", "persistent", lambda: open_persistent(settings, job))


def source_job_source(settings: PersistentSettings, job: str) -> SaveSource:
    """An older job's persistent tier to begin from, read-only, never healed."""
    return SaveSource("older job", "persistent", lambda: open_persistent(settings, job, read_only=True), heals=False)


def read_catalogue(
    sources: Sequence[SaveSource], only: Checkpoint | None = None, further: Further | None = None
) -> Catalogue:
    """Reads every source's index once, all at once.

    One after the other, each silent holder delayed a rank by its time limit.

    `only`: asks about this checkpoint alone. `further`: there are more sources, which are asked for where these do not
    suffice: a rank of a large world needs few.
    """
    catalogue = Catalogue(tuple(sources), _readings(sources, only), only, further)
    return catalogue if only is not None or further is None else reread(catalogue)


def reread(catalogue: Catalogue) -> Catalogue:
    """Asks silent sources once more, and those not known before."""
    more = catalogue.further() if catalogue.further is not None else ()
    if more is None:
        log.warning("%s is silent: the operator has not said yet which there are", _UNNAMED)
    elif catalogue.further is not None:
        sources, readings = (*catalogue.sources, *more), (*catalogue.readings, *(None for _ in more))
        catalogue = replace(catalogue, sources=sources, readings=readings, further=None)
    silent = [s for s, reading in zip(catalogue.sources, catalogue.readings, strict=True) if reading is None]
    again = iter(_readings(silent, catalogue.only))
    answered = [reading if reading is not None else next(again) for reading in catalogue.readings]
    return replace(catalogue, readings=tuple(answered))


def _readings(sources: Sequence[SaveSource], only: Checkpoint | None) -> tuple[SourceReading | None, ...]:
    others = [source for source in sources if source.server is None]
    threads = 1 + min(len(others), AT_ONCE)
    with ThreadPoolExecutor(threads, thread_name_prefix="surefoot-catalogue") as pool:
        # in a thread: the program may run an event loop of its own in this one
        asked = pool.submit(read_indexes, [s.server for s in sources if s.server is not None], only)
        read = pool.map(read_index, others, repeat(only))
        indexes = iter(asked.result())
        return tuple(next(read) if source.server is None else _reading(next(indexes)) for source in sources)


def _reading(index: MemoryServerIndex | None) -> SourceReading | None:
    return None if index is None else SourceReading(index.manifests, index.damaged)


def read_index(source: SaveSource, only: Checkpoint | None = None) -> SourceReading | None:
    """Reads a source's index; None if it is silent."""
    tier: Tier | None = None
    try:
        tier = source.open()
        found = (
            tier.manifests_of(only)
            if only is not None and isinstance(tier, SupportsListingByCheckpoint)
            else tier.manifests()
        )
        return SourceReading(found, tier.damaged())
    except TierError as silent:
        log.warning("%s is silent: %s", source.name, silent)
        return None
    finally:
        if tier is not None:
            tier.close()
