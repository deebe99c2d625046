"""Probes one holder for one job: provisions, seals and reads its index.

Called by `memory.job_servers`, one call at a time. Every call has its own time limit. TierUnavailable: the holder's
state is unknown for now; Fenced: a newer epoch owns it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import xxhash

from surefoot.errors import BeingFilled, ChunkMissing, Fenced, OutOfBounds, ProtocolError, TierError, TierUnavailable
from surefoot.memory_server import Credentials, HolderIndex
from surefoot.memory_server.client import FencedCalls
from surefoot.memory_server.provisioning import AdminCalls, Memory
from surefoot.protocol import bounds
from surefoot.protocol.checkpoints.records import Layout, RankManifest
from surefoot.protocol.identities import Checkpoint, HolderEndpoint, HolderId, RankSave
from surefoot.protocol.text import amount
from surefoot_operator import metrics
from surefoot_operator.memory.connection_pool import HolderPlace, SharedHolder

log = logging.getLogger(__name__)


# ---- quota -----------------------------------------------------------------------------------------------------------
# Limits how much of one holder a job may use. Pure. Without it one job, wrong or hostile, fills a holder, and every
# other job's saves are refused. A job alone on a holder may use all of it, and so may each while there is enough for
# all.

CROWDED = 0.85
"""Share of its limit from which a holder counts as too small for all."""

ROOMY = 0.75
"""And below which it does not any more: what was closed is opened."""

TOLERANCE = 64
"""A job may exceed its `sizeLimit` by one such part of it: digests, and what a server needs for each value."""


@dataclass(frozen=True, slots=True)
class Terms:
    """The figures that determine a job's part of one holder."""

    jobs: int
    """That have an account there, this one too."""
    size_limit_bytes: int | None = None
    """`checkpoint.memory.sizeLimit`."""


def is_worth_measuring(memory: Memory, size_limit_bytes: int | None) -> bool:
    """Whether the server's own figures allow that a job exceeds its part.

    A measurement costs.
    """
    if size_limit_bytes is not None and memory.used_bytes > size_limit_bytes:
        return True
    return 0 < memory.limit_bytes * ROOMY <= memory.used_bytes


def overdraft(held_bytes: int, memory: Memory, terms: Terms, closed: bool) -> str:
    """Says why the job's account is closed here; empty: it is open.

    Args:
        held_bytes: Size of all keys of the job there.
        memory: Of the whole server.
        terms: The job's share and limit.
        closed: Whether it is closed now; then it stays so until there is room again.
    """
    limit = terms.size_limit_bytes
    if limit is not None and held_bytes > limit + limit // TOLERANCE:
        return (
            f"it holds {amount(held_bytes)} there, more than its sizeLimit of {amount(limit)}: raise"
            " checkpoint.memory.sizeLimit, keep fewer checkpoints or train with more workers"
        )
    part = memory.limit_bytes // max(1, terms.jobs)
    crowded = memory.used_bytes >= memory.limit_bytes * (ROOMY if closed else CROWDED)
    if terms.jobs > 1 and memory.limit_bytes and crowded and held_bytes > part:
        return (
            f"it holds {amount(held_bytes)} of the {amount(memory.limit_bytes)} that {terms.jobs} jobs share there, more"
            f" than its part of {amount(part)}, and there is not enough for all: raise the memory tier's maxMemory, keep"
            " fewer checkpoints, use fewer replicas or train with more workers"
        )
    return ""


# ---- layout records --------------------------------------------------------------------------------------------------
# Keeps the layout records that one job's indexes and listings name. Owned by `memory.job_servers`, lent to its probes.
# Bounded by what the job runs: records that nothing names any more are let go, and one that would take more than the
# job's bound is refused by name.

UNNAMED_SECONDS = 60.0
"""A record may be read before the index that names it is known: longer than any visit of a holder takes."""


class LayoutShelf:
    """Layout records by digest; `add_verified` may be called in threads."""

    def __init__(self) -> None:
        self.max_values = bounds.max_layout_values(0)
        """How many numbers, texts and lists all of them may have."""
        self._layouts: dict[str, tuple[Layout, int, float]] = {}
        """With the number of its values, and when it was read."""
        self._values = 0
        """Of all of them: added up anew for each record, ten thousand ranks' would take fifty million additions."""
        self._reading, self._changing = threading.Lock(), threading.Lock()

    @property
    def digests(self) -> frozenset[str]:
        return frozenset(self._layouts)

    def __contains__(self, digest: str) -> bool:
        return digest in self._layouts

    def __getitem__(self, digest: str) -> Layout:
        return self._layouts[digest][0]

    def add_verified(self, digest: str, text: str) -> None:
        """Adds a record as it was received. Raises ProtocolError, too, if its bytes do not match its digest."""
        if xxhash.xxh3_64_hexdigest(text.encode()) != digest:
            raise ProtocolError("its bytes do not match its digest")
        self.add(digest, text)

    def add(self, digest: str, text: str) -> None:
        """Reads a record whose digest was compared.

        One at a time: each may take a hundred megabytes for a moment.

        Raises:
            ProtocolError: it cannot be read; OutOfBounds: or takes more than the job may.
        """
        with self._reading:
            values = bounds.values_of(text)
            total = self._values - self._values_of(digest) + values
            if total > self.max_values:
                bound = f"0 to {self.max_values} for a job of its size"
                raise OutOfBounds(f"layout {digest}", "the number of values of all layouts", str(total), bound)
            layout = Layout.from_json(text)
            with self._changing:
                self._values += values - self._values_of(digest)
                self._layouts[digest] = (layout, values, time.monotonic())

    def keep(self, named: Collection[str]) -> None:
        """Lets records go that nothing names any more; what was just read is named in a moment."""
        old = time.monotonic() - UNNAMED_SECONDS
        for digest in self.digests - set(named):
            if self._layouts[digest][2] < old:
                with self._changing:
                    self._values -= self._values_of(digest)
                    del self._layouts[digest]

    def _values_of(self, digest: str) -> int:
        known = self._layouts.get(digest)
        return known[1] if known is not None else 0


# ---- server probe ----------------------------------------------------------------------------------------------------

MEASURED_SECONDS = 0.5
"""A job's keys on a crowded holder are measured at most so often."""


@dataclass(frozen=True, slots=True)
class ProbeRequest:
    """The purpose of a visit; `epoch` is that of status.world."""

    epoch: int
    claimed: bool
    seal: bool
    """Seal at `epoch` before reading: the order of a claim, or what a returning holder needs first."""
    read: bool


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The result of a visit; `index` None: it was not read."""

    endpoint: HolderEndpoint
    fence: int
    index: HolderIndex | None
    memory: Memory | None = None
    """As of the index."""
    closed: str = ""
    """Why the job may not write there; empty: it may."""


class HolderProbe:
    """Makes one job's calls to one holder, over the shared connection."""

    def __init__(
        self, place: HolderPlace, shared: SharedHolder, job: str, account: Credentials, layouts: LayoutShelf
    ) -> None:
        self._place, self._shared, self._job, self._account = place, shared, job, account
        self._closures = shared.settings.closures
        self._admin = AdminCalls(place.host, place.port)
        self._calls: FencedCalls | None = None
        self._endpoint: HolderEndpoint | None = None
        self._run = ""
        self._fence = -1
        self._layouts = layouts
        """Every layout record that the job read so far, by digest; shared by all its probes."""
        self._told: set[str] = set()
        self.most_entries = bounds.MAX_INDEX_ENTRIES
        """Of the index: what the job's other holders leave of its bound."""
        self.refused: tuple[str, ...] = ()
        """Records that broke a bound when they were read last, a sentence each."""
        self._closed, self._measured_at, self._closed_until = "", 0.0, 0.0
        self._closings = 0
        self._limits: tuple[int | None, int] = (None, 0)
        """The job's own and the server's, as the account was judged by last."""
        self.size_limit_bytes: int | None = None
        """Its part of `checkpoint.memory.sizeLimit`."""
        self.settling = False
        """Whether a server that is nobody's yet is left to its companion."""

    @property
    def is_provisioned(self) -> bool:
        """Whether the server that is connected to now was made this job's."""
        return self._calls is not None and self._run == self._shared.run

    async def run(self, request: ProbeRequest) -> ProbeResult:
        """Provisions a new instance, then carries out the request.

        After an answer that it did not expect the next visit looks everything up again.
        """
        try:
            if self._calls is None or self._run != self._shared.run:
                await self._provision(request)
            return await self._carry_out(request)
        except TierUnavailable:
            if self._shared.is_open:
                self.forget()  # it answered, and is not as it was left; a line that broke says nothing of the server
            raise

    async def _carry_out(self, request: ProbeRequest) -> ProbeResult:
        assert self._calls is not None, "provisioned just before"
        assert self._endpoint is not None, "as the calls"
        calls, endpoint = self._calls, self._endpoint
        seal = request.seal or (not request.claimed and self._fence < request.epoch)
        if seal and self._fence < request.epoch:
            try:
                await self._shared.converse(calls.seal(request.epoch))
                self._fence = request.epoch
            except Fenced:
                # the plan must learn which epoch rules
                self._fence = (await self._read_index(calls)).fence
        index = memory = None
        if seal or request.read:
            index, memory = await self._read_index(calls), await self._shared.memory()
            self._fence = max(self._fence, index.fence)
            self._note_damage(index.damaged)
            self.refused = index.refused
            await self._read_layouts(calls, index.manifests)
            await self._hold_to_its_part(memory)
        return ProbeResult(endpoint, self._fence, index, memory, self._closed)

    async def _read_index(self, calls: FencedCalls) -> HolderIndex:
        """Reads the index if it is within its bounds, else raises OutOfBounds and names it in `refused`."""
        try:
            return await self._shared.converse(calls.index(most_entries=self.most_entries))
        except OutOfBounds as error:
            self.refused = (str(error),)
            raise

    async def _hold_to_its_part(self, memory: Memory) -> None:
        """Closes the job's account here while it holds more than its part, and opens it again."""
        now, limits = time.monotonic(), (self.size_limit_bytes, memory.limit_bytes)
        if limits != self._limits:
            # somebody gave it more, or less: what it did under other limits is no reason to wait
            self._limits, self._closings, self._closed_until, self._measured_at = limits, 0, now, 0.0
        if not self._account.user or now < max(self._closed_until, self._measured_at + MEASURED_SECONDS):
            return
        if not self._closed and not is_worth_measuring(memory, limits[0]):
            return
        self._measured_at = now
        holding = self._admin.holding(self._job)
        terms = Terms(await self._shared.converse(holding.accounts()), limits[0])
        held = await self._shared.converse(holding.held_bytes())
        why = overdraft(held, memory, terms, bool(self._closed))
        if why and not self._closed:
            gone = await self._shared.converse(holding.close(self._account))
            self._closings += 1
            self._closed_until = now + self._closures.seconds(self._closings)
            metrics.holder_accounts_closed.inc()
            log.warning(
                "%s: closed the account of job %s: %s; removed %d keys", self._place.server_id, self._job, why, gone
            )
        elif self._closed and not why:
            await self._shared.converse(holding.open(self._account))
            log.info("%s: opened the account of job %s again", self._place.server_id, self._job)
        self._closed = why

    def forget(self) -> None:
        """Provisions anew at the next visit."""
        self._calls, self._endpoint, self._fence, self._closed = None, None, -1, ""

    async def drop(
        self, holder: HolderId, saves: Iterable[tuple[RankSave, int]], epoch: int, due: Callable[[], bool]
    ) -> int:
        """Drops (save, chunks) from exactly this instance; returns how many.

        It stops once `due` says no.
        """
        calls, gone = self._of(holder), 0
        for save, chunks in saves:
            if not due():
                break
            await self._shared.converse(calls.drop(save, epoch, chunks))
            gone += 1
        return gone

    async def mark(self, holder: HolderId, checkpoint: Checkpoint, epoch: int) -> None:
        """Writes the watermark to exactly this instance."""
        await self._shared.converse(self._of(holder).set_watermark(checkpoint, epoch))

    async def unindexed(self) -> dict[RankSave, tuple[str, ...]]:
        return await self._shared.converse(self._admin.unindexed(self._job))

    async def sweep(self, holder: HolderId, found: Mapping[RankSave, Sequence[str]], epoch: int) -> int:
        """Removes leftover keys of uncommitted saves; returns how many.

        From exactly this instance.
        """
        calls, gone = self._of(holder), 0
        for save, names in found.items():
            if await self._shared.converse(calls.sweep(save, epoch, names)):
                gone += len(names)
        return gone

    async def clean(self) -> None:
        """Removes the job from this holder: account first, then every key."""
        await self._shared.converse(self._admin.remove_job(self._job, self._account.user))
        self.forget()

    def _of(self, holder: HolderId) -> FencedCalls:
        where = f"{self._place.host}:{self._place.port}"
        if self._calls is None or self._endpoint is None:
            raise TierUnavailable(f"{holder} does not answer at {where}")
        if self._endpoint.holder != holder:
            raise TierUnavailable(f"{holder} is gone: {self._endpoint.holder} answers at {where}")
        return self._calls

    async def _provision(self, request: ProbeRequest) -> None:
        """Makes this instance the job's. One that a former leader provisioned keeps its fence while a claim waits for
        drains: sealing it here, before its time, would refuse saves that may still arrive."""
        self.forget()
        place, run = self._place, self._shared.run
        instance = await self._shared.converse(self._admin.instance())
        tls = place.tls_ca is not None
        holder = HolderId(place.node, instance)
        endpoint = HolderEndpoint(holder, place.host, place.port, place.domain, tls, place.server)
        calls = FencedCalls(endpoint, self._job)
        known = -1
        with contextlib.suppress(TierUnavailable):  # not this job's yet; a dead one is found by the next call
            known = (await self._read_index(calls)).fence
        if known < 0 and (self.settling or await self._shared.converse(self._admin.is_being_filled())):
            raise BeingFilled(
                f"the memory of the holder on {place.server_id} is still being initialised; trying again", instance
            )
        fence = known if request.claimed and known >= 0 else max(known, request.epoch)
        await self._shared.converse(self._admin.provision(self._job, self._account, fence))
        self._calls, self._endpoint, self._run, self._fence = calls, endpoint, run, fence

    async def _read_layouts(self, calls: FencedCalls, manifests: Iterable[RankManifest]) -> None:
        """Fetches each layout once. One that is damaged here may be good elsewhere: named, counted, left out."""
        for digest in sorted({m.layout for m in manifests} - self._layouts.digests):
            try:
                text = await self._shared.converse(calls.read_layout(digest))
                await asyncio.to_thread(self._layouts.add_verified, digest, text)
            except TierUnavailable:
                raise
            except (ChunkMissing, ProtocolError, TierError) as error:
                self._note_damage((f"{calls}: layout {digest}: {error}",))
                if isinstance(error, OutOfBounds):
                    self.refused = (*self.refused, str(error))

    def _note_damage(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self._told:
                self._told.add(name)
                metrics.holder_damaged.inc()
                log.warning("damaged: %s; another copy is needed", name)
