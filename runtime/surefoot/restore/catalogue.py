"""Lists checkpoints and their copies from the tiers' indexes.

Used by a restoring rank, by `Checkpointer.latest` and `list`, and by library mode to choose its restore point. A tier
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
from surefoot.protocol.checkpoints.completeness import (
    Covers,
    TierReading,
    describe_uncovered_tensor,
    is_complete,
    layout_sets_to_check,
)
from surefoot.protocol.checkpoints.records import Layout, RankManifest
from surefoot.protocol.identities import Checkpoint, MemoryServerEndpoint, MemoryServerInstance
from surefoot.settings import PersistentSettings
from surefoot.tiers import SupportsListingByCheckpoint, Tier
from surefoot.tiers.persistent import open_persistent
from surefoot.tiers.tier import read_stream

log = logging.getLogger(__name__)


# ---- memory server indexes -------------------------------------------------------------------------------------------
# Reads the indexes of many memory servers concurrently, on one event loop. With a thread per server, a rank that
# restores from hundreds of servers would spend more time switching threads than reading. A server that does not answer
# runs into its own timeout and delays no other.

MAX_CONCURRENT_INDEXES = 32
"""Servers read concurrently. A server's timeout runs while this process performs the TLS handshakes of all of them, and
hundreds of handshakes on a busy machine take longer than the timeout."""


@dataclass(frozen=True, slots=True)
class IndexedMemoryServer:
    """A job's index on a memory server, with the credentials to read it."""

    endpoint: MemoryServerEndpoint
    job: str
    account: Credentials
    call_seconds: float
    """Timeout of each call."""

    async def index(self, only: Checkpoint | None, entries: Entries) -> MemoryServerIndex:
        """Connects, reads the index and closes the connection; `only`: of this checkpoint. Raises a TierError."""
        endpoint = self.endpoint
        local_socket = self.account.socket_path_to(endpoint.server_id)
        connection = AsyncServerConnection(
            endpoint.host, endpoint.port, self.account, self.call_seconds, endpoint.tls, local_socket
        )
        try:
            with translate_redis_errors(str(endpoint.instance), "connecting"):
                await connection.open()
            return await connection.run_dialogue(FencedCalls(endpoint, self.job).read_index(only, entries))
        finally:
            connection.close()


def read_indexes(
    servers: Sequence[IndexedMemoryServer], only_checkpoint: Checkpoint | None
) -> list[MemoryServerIndex | None]:
    """Reads each memory server's index, in the order given; None for a server that does not answer.

    Blocks, so it must be called in a thread without an event loop. `only`: reads only this checkpoint's entries.
    """
    return asyncio.run(_read_all(servers, only_checkpoint)) if servers else []


async def _read_all(servers: Sequence[IndexedMemoryServer], only: Checkpoint | None) -> list[MemoryServerIndex | None]:
    semaphore, entries = asyncio.Semaphore(MAX_CONCURRENT_INDEXES), Entries()

    async def read(server: IndexedMemoryServer) -> MemoryServerIndex | None:
        async with semaphore:
            try:
                return await server.index(only, entries)
            except TierError as problem:
                log.warning("could not read the index of memory server %s: %s", server.endpoint.server_id, problem)
                return None

    return list(await asyncio.gather(*map(read, servers)))


# ---- catalogue -------------------------------------------------------------------------------------------------------

MAX_CONCURRENT_SOURCES = 32
"""Sources read concurrently, each in a thread, so that one without an answer delays no other until its timeout."""


@dataclass(frozen=True, slots=True)
class SaveSource:
    """A tier from which copies of saves can be read."""

    name: str
    kind: Literal["memory", "persistent"]
    open: Callable[[], Tier]
    """Opens a connection, for one thread."""
    is_local: bool = False
    """Whether it is the memory server of this node."""
    is_healed: bool = True
    """Whether damaged copies may be rewritten here; False for another job's checkpoints."""
    server: IndexedMemoryServer | None = None
    """The memory server, whose index is read on the shared event loop; None: the index is read with `open`."""


@dataclass(frozen=True, slots=True)
class SourceReading:
    """The index of a source."""

    manifests: tuple[RankManifest, ...]
    damaged_entries: tuple[str, ...] = ()
    """Names of the index entries that cannot be read."""


FurtherSources = Callable[[], Sequence[SaveSource] | None]
"""Asks the operator for sources that are not known yet; returns None if it does not answer now."""

_UNKNOWN_SERVER = "a memory server that is not known yet"


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The sources of a restore and their indexes."""

    sources: tuple[SaveSource, ...]
    readings: tuple[SourceReading | None, ...]
    """Index of each source, in the same order; None: the source did not answer."""
    only_checkpoint: Checkpoint | None = None
    """The checkpoint to which the readings are limited; None: all checkpoints."""
    further_sources: FurtherSources | None = None
    """Returns more sources, where these do not suffice; None: there are no others."""

    @property
    def unanswered_sources(self) -> tuple[str, ...]:
        """Names of the sources that have not answered and may have further copies."""
        names = tuple(s.name for s, r in zip(self.sources, self.readings, strict=True) if r is None)
        return names if self.further_sources is None else (*names, _UNKNOWN_SERVER)

    def copies_by_rank(self, checkpoint: Checkpoint) -> dict[int, list[tuple[int, RankManifest]]]:
        """Maps each rank to (index of the source, manifest) of every copy of its save."""
        copies_by_rank: dict[int, list[tuple[int, RankManifest]]] = defaultdict(list)
        for source_index, reading in enumerate(self.readings):
            for manifest in reading.manifests if reading is not None else ():
                if manifest.save.checkpoint == checkpoint:
                    copies_by_rank[manifest.save.rank].append((source_index, manifest))
        return dict(copies_by_rank)

    def complete_checkpoints(self) -> list[Checkpoint]:
        """Lists the complete checkpoints, oldest first. It reads layout records, which can take seconds."""
        by_source = [r.manifests if r is not None else () for r in self.readings]
        by_name = zip((s.name for s in self.sources), by_source, strict=True)
        reading = TierReading({MemoryServerInstance(name, ""): manifests for name, manifests in by_name}, None)
        covers = self.judge_coverage(reading)
        complete = [
            checkpoint for checkpoint, ranks in reading.manifests_by_rank().items() if is_complete(ranks, covers)
        ]
        return sorted(complete, key=lambda checkpoint: (checkpoint.step, checkpoint.generation))

    def judge_coverage(self, reading: TierReading) -> Covers:
        """Decides for each candidate's set of layouts whether it covers every tensor exactly once."""
        manifests = {m.layout: m for r in self.readings if r is not None for m in r.manifests}
        layouts: dict[str, Layout] = {}
        answers: dict[frozenset[str], bool] = {}
        for digests in layout_sets_to_check(reading):
            for digest in digests - layouts.keys():
                layout = self._read_layout(manifests[digest])
                if layout is not None:
                    layouts[digest] = layout
            read_layouts = [layouts[d] for d in digests if d in layouts]
            answers[digests] = len(read_layouts) == len(digests) and describe_uncovered_tensor(read_layouts) is None
        return answers

    def _read_layout(self, manifest: RankManifest) -> Layout | None:
        """Reads a layout record from the first source with an intact copy; None: no source has one."""
        for source in self.sources:
            tier: Tier | None = None
            try:
                tier = source.open()
                return read_stream(tier, manifest).layout
            except SurefootError as problem:
                log.info("could not read layout %s from %s: %s", manifest.layout, source.name, problem)
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
    """Returns the memory tier's sources; memory servers on `node` are marked local."""
    return [
        SaveSource(
            f"memory:{e.server_id}",
            "memory",
            lambda e=e: MemoryServerClient(e, job, account, call_seconds),  # type: ignore[misc]  # e is bound on purpose
            is_local=e.instance.node == node,
            server=IndexedMemoryServer(e, job, account, call_seconds),
        )
        for e in endpoints
    ]


def persistent_source(settings: PersistentSettings, job: str) -> SaveSource:
    """Returns the persistent tier of `job` as a source."""
    return SaveSource("persistent", "persistent", lambda: open_persistent(settings, job))


def source_job_source(settings: PersistentSettings, job: str) -> SaveSource:
    """Returns the persistent tier of the source job (`restoreFrom`), which is never written to."""
    return SaveSource(
        "source job", "persistent", lambda: open_persistent(settings, job, read_only=True), is_healed=False
    )


def read_catalogue(
    sources: Sequence[SaveSource], only: Checkpoint | None = None, further_sources: FurtherSources | None = None
) -> Catalogue:
    """Reads every source's index once, concurrently, so that servers without an answer cost one timeout together.

    Args:
        sources: The known sources.
        only: Reads only this checkpoint's entries; None: all checkpoints.
        further: Returns more sources if these do not suffice, as one rank of many needs only a few.
    """
    catalogue = Catalogue(tuple(sources), _read_sources(sources, only), only, further_sources)
    return catalogue if only is not None or further_sources is None else reread_missing_indexes(catalogue)


def reread_missing_indexes(catalogue: Catalogue) -> Catalogue:
    """Reads again from the sources that did not answer, and from those that were not known before."""
    new_sources = catalogue.further_sources() if catalogue.further_sources is not None else ()
    if new_sources is None:
        log.warning("the operator has not listed all memory servers of this job yet; asking it again")
    elif catalogue.further_sources is not None:
        sources = (*catalogue.sources, *new_sources)
        readings = (*catalogue.readings, *(None for _ in new_sources))
        catalogue = replace(catalogue, sources=sources, readings=readings, further_sources=None)
    unread_sources = [s for s, reading in zip(catalogue.sources, catalogue.readings, strict=True) if reading is None]
    new_readings = iter(_read_sources(unread_sources, catalogue.only_checkpoint))
    all_readings = [reading if reading is not None else next(new_readings) for reading in catalogue.readings]
    return replace(catalogue, readings=tuple(all_readings))


def _read_sources(sources: Sequence[SaveSource], only: Checkpoint | None) -> tuple[SourceReading | None, ...]:
    """Reads the sources' indexes: memory servers on one event loop, every other source in a thread of its own."""
    other_sources = [source for source in sources if source.server is None]
    threads = 1 + min(len(other_sources), MAX_CONCURRENT_SOURCES)
    with ThreadPoolExecutor(threads, thread_name_prefix="surefoot-catalogue") as pool:
        # In a thread, because the program may run an event loop of its own in the current one.
        server_indexes = pool.submit(read_indexes, [s.server for s in sources if s.server is not None], only)
        other_readings = pool.map(read_index, other_sources, repeat(only))
        indexes = iter(server_indexes.result())
        return tuple(
            next(other_readings) if source.server is None else _source_reading(next(indexes)) for source in sources
        )


def _source_reading(index: MemoryServerIndex | None) -> SourceReading | None:
    return None if index is None else SourceReading(index.manifests, index.damaged_entries)


def read_index(source: SaveSource, only: Checkpoint | None = None) -> SourceReading | None:
    """Reads one source's index; None if it does not answer."""
    tier: Tier | None = None
    try:
        tier = source.open()
        manifests = (
            tier.manifests_of(only)
            if only is not None and isinstance(tier, SupportsListingByCheckpoint)
            else tier.manifests()
        )
        return SourceReading(manifests, tier.damaged())
    except TierError as problem:
        log.warning("could not read the index of %s: %s", source.name, problem)
        return None
    finally:
        if tier is not None:
            tier.close()
