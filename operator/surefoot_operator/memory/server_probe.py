"""Probes one memory server for one job: provisions, fences and reads its index.

Called by `memory.job_servers`, one call at a time. Every call has its own time limit. TierUnavailable means that the
server's state is unknown for now. Fenced means that a newer generation owns the server.
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

from surefoot.errors import (
    ChunkMissing,
    Fenced,
    OutOfBounds,
    ProtocolError,
    ServerPrefaulting,
    TierError,
    TierUnavailable,
)
from surefoot.memory_server import Credentials, MemoryServerIndex
from surefoot.memory_server.client import FencedCalls
from surefoot.memory_server.provisioning import AdminCalls, ServerMemory
from surefoot.protocol import bounds
from surefoot.protocol.checkpoints.records import Layout, RankManifest
from surefoot.protocol.identities import Checkpoint, MemoryServerEndpoint, MemoryServerInstance, RankSave
from surefoot.protocol.text import format_bytes
from surefoot_operator import metrics
from surefoot_operator.memory.connection_pool import MemoryServerAddress, SharedMemoryServer

log = logging.getLogger(__name__)


# ---- quota -----------------------------------------------------------------------------------------------------------
# Limits how much of one memory server a job may use. Pure. Without a limit one faulty or hostile job would fill a
# server, and it would reject the saves of all other jobs. A job alone on a server may use all of it, and so may each of
# several while there is enough for all.

CROWDED_RATIO = 0.85
"""Used share of its limit from which a server counts as too small for all its jobs."""

ROOMY_RATIO = 0.75
"""Used share of its limit below which the server has room again, so that closed accounts are opened."""

SIZE_LIMIT_TOLERANCE_DIVISOR = 64
"""A job may exceed its `sizeLimit` by 1/64, for digests and the server's overhead for each value."""


@dataclass(frozen=True, slots=True)
class QuotaInputs:
    """Values that determine a job's share of one memory server."""

    job_count: int
    """Number of jobs with an account there, including this one."""
    size_limit_bytes: int | None = None
    """The job's `checkpoint.memory.sizeLimit` for this server; None: no limit."""


def may_exceed_quota(memory: ServerMemory, size_limit_bytes: int | None) -> bool:
    """Returns whether the server's own figures leave it possible that a job exceeds its share.

    A cheap check before the job's keys are measured, which costs the server time.
    """
    if size_limit_bytes is not None and memory.used_bytes > size_limit_bytes:
        return True
    return 0 < memory.limit_bytes * ROOMY_RATIO <= memory.used_bytes


def quota_violation(used_bytes: int, memory: ServerMemory, quota: QuotaInputs, closed: bool) -> str:
    """Describes why the job's account must be closed on this server; empty: it may be open.

    Args:
        used_bytes: Size of all keys of the job there.
        memory: Memory usage of the whole server.
        quota: The job's limit, and the number of jobs that share the server.
        closed: Whether the account is closed now. It then stays closed until the server has room again (`ROOMY`).
    """
    size_limit_bytes = quota.size_limit_bytes
    if (
        size_limit_bytes is not None
        and used_bytes > size_limit_bytes + size_limit_bytes // SIZE_LIMIT_TOLERANCE_DIVISOR
    ):
        return (
            f"it uses {format_bytes(used_bytes)} there, more than its sizeLimit of {format_bytes(size_limit_bytes)}: raise"
            " checkpoint.memory.sizeLimit, keep fewer checkpoints or train with more workers"
        )
    share_bytes = memory.limit_bytes // max(1, quota.job_count)
    crowded = memory.used_bytes >= memory.limit_bytes * (ROOMY_RATIO if closed else CROWDED_RATIO)
    if quota.job_count > 1 and memory.limit_bytes and crowded and used_bytes > share_bytes:
        return (
            f"it uses {format_bytes(used_bytes)} of the {format_bytes(memory.limit_bytes)} that {quota.job_count} jobs share"
            f" there, more than its share of {format_bytes(share_bytes)}, and there is not enough for all: raise the memory"
            " tier's maxMemory, keep fewer checkpoints, use fewer replicas or train with more workers"
        )
    return ""


# ---- layout records --------------------------------------------------------------------------------------------------
# Caches the layout records that one job's indexes and listings refer to. Owned by `memory.job_servers`, lent to its
# probes. The job's size bounds the cache: records that nothing refers to are removed, and a record that would exceed
# the bound is rejected with its digest in the error.

UNREFERENCED_SECONDS = 60.0
"""How long to keep a record that nothing refers to. It may be read before the index that refers to it; no visit of a
memory server takes longer."""


class LayoutCache:
    """Caches layout records by digest; `add` may be called in threads."""

    def __init__(self) -> None:
        self.max_value_count = bounds.max_retained_layout_values(0)
        """Maximum number of values (numbers, texts and lists) in all records together."""
        self._layouts: dict[str, tuple[Layout, int, float]] = {}
        """By digest: the record, the number of its values, and when it was read (monotonic clock)."""
        self._value_count = 0
        """Number of values in all records. A running total: adding up ten thousand records for each new one would take
        fifty million additions."""
        self._parse_lock, self._change_lock = threading.Lock(), threading.Lock()

    @property
    def digests(self) -> frozenset[str]:
        """Digests of all cached records."""
        return frozenset(self._layouts)

    def __contains__(self, digest: str) -> bool:
        return digest in self._layouts

    def __getitem__(self, digest: str) -> Layout:
        return self._layouts[digest][0]

    def add_verified(self, digest: str, text: str) -> None:
        """Adds a record as it was received; also raises ProtocolError if its bytes do not match its digest."""
        if xxhash.xxh3_64_hexdigest(text.encode()) != digest:
            raise ProtocolError("its bytes do not match its digest")
        self.add(digest, text)

    def add(self, digest: str, text: str) -> None:
        """Parses and adds a record whose digest was verified.

        Runs one at a time, because parsing may need a hundred megabytes for a moment.

        Raises:
            ProtocolError: The record cannot be read.
            OutOfBounds: The job's records would together exceed `max_values`.
        """
        with self._parse_lock:
            # Check the bound before parsing: a hostile record must not fill the memory first.
            value_count = bounds.count_json_values(text)
            total_count = self._value_count - self._value_count_of(digest) + value_count
            if total_count > self.max_value_count:
                bound = f"0 to {self.max_value_count} for a job of its size"
                raise OutOfBounds(f"layout {digest}", "the number of values of all layouts", str(total_count), bound)
            layout = Layout.from_json(text)
            with self._change_lock:
                self._value_count += value_count - self._value_count_of(digest)
                self._layouts[digest] = (layout, value_count, time.monotonic())

    def remove_unreferenced(self, named_digests: Collection[str]) -> None:
        """Removes records that nothing refers to, except those read within the last minute."""
        oldest_seconds = time.monotonic() - UNREFERENCED_SECONDS
        for digest in self.digests - set(named_digests):
            if self._layouts[digest][2] < oldest_seconds:
                with self._change_lock:
                    self._value_count -= self._value_count_of(digest)
                    del self._layouts[digest]

    def _value_count_of(self, digest: str) -> int:
        cached = self._layouts.get(digest)
        return cached[1] if cached is not None else 0


# ---- server probe ----------------------------------------------------------------------------------------------------

QUOTA_CHECK_INTERVAL_SECONDS = 0.5
"""Minimum time between two measurements of a job's keys on a crowded server."""


@dataclass(frozen=True, slots=True)
class ProbeRequest:
    """Requests the steps of one visit."""

    generation: int
    """Generation of `status.membership`."""
    is_claimed: bool
    """Whether the membership is only claimed, not committed."""
    must_fence: bool
    """Fence at `generation` before reading, as a claim requires."""
    must_read: bool
    """Read the index."""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The result of a visit."""

    endpoint: MemoryServerEndpoint
    """Instance that answered, and its address."""
    fence: int
    """Generation that the server is fenced at; writers of older generations are rejected."""
    index: MemoryServerIndex | None
    """None: it was not read."""
    memory: ServerMemory | None = None
    """Memory usage of the server when the index was read; None with it."""
    quota_violation: str = ""
    """Why the job may not write there; empty: it may."""


class MemoryServerProbe:
    """Makes one job's calls to one memory server, over the shared connection."""

    def __init__(
        self,
        address: MemoryServerAddress,
        shared: SharedMemoryServer,
        job: str,
        account: Credentials,
        layouts: LayoutCache,
    ) -> None:
        self._address, self._shared, self._job, self._account = address, shared, job, account
        self._closures = shared.settings.quota_backoff
        self._admin = AdminCalls(address.host, address.port)
        self._calls: FencedCalls | None = None
        self._endpoint: MemoryServerEndpoint | None = None
        self._provisioned_run_id = ""
        self._fence = -1
        self._layouts = layouts
        """All layout records that the job has read, shared by its probes."""
        self._reported_damage: set[str] = set()
        self.max_entries = bounds.MAX_INDEX_ENTRIES
        """Maximum index entries to read: the job's bound, less the entries on its other servers."""
        self.out_of_bounds_records: tuple[str, ...] = ()
        """Descriptions of records that exceeded a bound in the last read."""
        self._quota_violation, self._measured_seconds, self._closed_until_seconds = "", 0.0, 0.0
        self._closure_count = 0
        self._checked_limits: tuple[int | None, int] = (None, 0)
        """The job's size limit and the server's limit, as of the last check of the quota."""
        self.size_limit_bytes: int | None = None
        """The part of `checkpoint.memory.sizeLimit` that applies to this server; None: no limit."""
        self.may_be_prefaulting = False
        """Whether to leave an unused server to its sidecar, which may be prefaulting its memory."""

    @property
    def is_provisioned(self) -> bool:
        """Returns whether the job was set up on the server that the connection reaches now."""
        return self._calls is not None and self._provisioned_run_id == self._shared.run_id

    async def run(self, request: ProbeRequest) -> ProbeResult:
        """Provisions a new instance, then carries out the request.

        After an unexpected answer, the next visit provisions again.

        Raises:
            TierUnavailable: The server does not answer.
            Fenced: A newer generation owns the server.
            ServerPrefaulting: No job may use the server yet.
        """
        try:
            if self._calls is None or self._provisioned_run_id != self._shared.run_id:
                await self._provision(request)
            return await self._fence_and_read(request)
        except TierUnavailable:
            if self._shared.is_open:
                self.reset_provisioning()  # it answered, so its state changed; a broken connection would be no evidence of that
            raise

    async def _fence_and_read(self, request: ProbeRequest) -> ProbeResult:
        assert self._calls is not None, "provisioned just before"
        assert self._endpoint is not None, "set together with the calls"
        calls, endpoint = self._calls, self._endpoint
        # Fence if it was requested, or if a server returns with an older fence after the commit.
        must_fence = request.must_fence or (not request.is_claimed and self._fence < request.generation)
        if must_fence and self._fence < request.generation:
            try:
                await self._shared.run_exchange(calls.fence(request.generation))
                self._fence = request.generation
            except Fenced:
                # A newer generation owns the server: report its number to the plan.
                self._fence = (await self._read_index(calls)).fence
        index = memory = None
        if must_fence or request.must_read:
            # Read the index, then verify all that it refers to, and check the quota with the usage of the same moment.
            index, memory = await self._read_index(calls), await self._shared.read_memory_usage()
            self._fence = max(self._fence, index.fence)
            self._report_corrupt(index.damaged_entries)
            self.out_of_bounds_records = index.out_of_bounds
            await self._read_layouts(calls, index.manifests)
            await self._enforce_quota(memory)
        return ProbeResult(endpoint, self._fence, index, memory, self._quota_violation)

    async def _read_index(self, calls: FencedCalls) -> MemoryServerIndex:
        """Reads the index; if it exceeds its bound, describes that in `refused` and raises OutOfBounds."""
        try:
            return await self._shared.run_exchange(calls.read_index(max_entries=self.max_entries))
        except OutOfBounds as error:
            self.out_of_bounds_records = (str(error),)
            raise

    async def _enforce_quota(self, memory: ServerMemory) -> None:
        """Closes the job's account here while it exceeds its quota, and opens it again afterwards."""
        now, limits = time.monotonic(), (self.size_limit_bytes, memory.limit_bytes)
        if limits != self._checked_limits:
            # A limit was changed, so closures under the former limits no longer justify a wait.
            self._checked_limits, self._closure_count, self._closed_until_seconds, self._measured_seconds = (
                limits,
                0,
                now,
                0.0,
            )
        if not self._account.user or now < max(
            self._closed_until_seconds, self._measured_seconds + QUOTA_CHECK_INTERVAL_SECONDS
        ):
            return
        if not self._quota_violation and not may_exceed_quota(memory, limits[0]):
            return
        # Measuring the keys costs the server time, so it comes last and at most every half second.
        self._measured_seconds = now
        usage_calls = self._admin.job_usage(self._job)
        quota = QuotaInputs(await self._shared.run_exchange(usage_calls.count_accounts()), limits[0])
        used_bytes = await self._shared.run_exchange(usage_calls.measure_bytes())
        reason = quota_violation(used_bytes, memory, quota, bool(self._quota_violation))
        if reason and not self._quota_violation:
            removed_count = await self._shared.run_exchange(usage_calls.close_account(self._account))
            self._closure_count += 1
            self._closed_until_seconds = now + self._closures.wait_seconds(self._closure_count)
            metrics.memory_quota_exceeded.inc()
            log.warning(
                "%s: closed the account of job %s until its memory is within the limits: %s; removed %d keys",
                self._address.server_id,
                self._job,
                reason,
                removed_count,
            )
        elif self._quota_violation and not reason:
            await self._shared.run_exchange(usage_calls.reopen_account(self._account))
            log.info(
                "%s: opened the account of job %s again, it is within the limits", self._address.server_id, self._job
            )
        self._quota_violation = reason

    def reset_provisioning(self) -> None:
        """Makes the next visit provision the job again."""
        self._calls, self._endpoint, self._fence, self._quota_violation = None, None, -1, ""

    async def drop(
        self,
        instance: MemoryServerInstance,
        saves: Iterable[tuple[RankSave, int]],
        generation: int,
        may_continue: Callable[[], bool],
    ) -> int:
        """Drops saves from exactly this instance, and returns how many it dropped.

        Args:
            instance: The instance; if another one answers, TierUnavailable is raised.
            saves: Each rank save with its number of chunks.
            generation: Generation that decided to drop them.
            may_continue: Checked before each save; dropping stops once it returns False.
        """
        calls, dropped_count = self._calls_for(instance), 0
        for save, chunks in saves:
            if not may_continue():
                break
            await self._shared.run_exchange(calls.delete_save(save, generation, chunks))
            dropped_count += 1
        return dropped_count

    async def set_watermark(self, instance: MemoryServerInstance, checkpoint: Checkpoint, generation: int) -> None:
        """Writes the watermark to exactly this instance; raises TierUnavailable if another one answers."""
        await self._shared.run_exchange(self._calls_for(instance).set_watermark(checkpoint, generation))

    async def list_unindexed_keys(self) -> dict[RankSave, tuple[str, ...]]:
        """Returns the keys that no index entry refers to, by save."""
        return await self._shared.run_exchange(self._admin.list_unindexed(self._job))

    async def delete_uncommitted(
        self, instance: MemoryServerInstance, keys_by_save: Mapping[RankSave, Sequence[str]], generation: int
    ) -> int:
        """Removes leftover keys of uncommitted saves from exactly this instance.

        Returns:
            The number of removed keys.
        """
        calls, removed_count = self._calls_for(instance), 0
        for save, names in keys_by_save.items():
            if await self._shared.run_exchange(calls.delete_uncommitted(save, generation, names)):
                removed_count += len(names)
        return removed_count

    async def delete_job(self) -> None:
        """Removes the job from this server: first its account, so that nothing is written, then every key."""
        await self._shared.run_exchange(self._admin.remove_job(self._job, self._account.user))
        self.reset_provisioning()

    def _calls_for(self, instance: MemoryServerInstance) -> FencedCalls:
        host_port = f"{self._address.host}:{self._address.port}"
        if self._calls is None or self._endpoint is None:
            raise TierUnavailable(f"{instance} does not answer at {host_port}")
        if self._endpoint.instance != instance:
            raise TierUnavailable(f"{instance} was replaced: {self._endpoint.instance} answers at {host_port}")
        return self._calls

    async def _provision(self, request: ProbeRequest) -> None:
        """Sets the job up on this instance: account and fence.

        An instance that a former leader provisioned keeps its fence while a claim waits for flushes. Fencing it here
        would be too early: the server would reject saves that may still arrive.
        """
        self.reset_provisioning()
        address, run_id = self._address, self._shared.run_id
        new_run_id = await self._shared.run_exchange(self._admin.read_instance())
        tls = address.tls_ca is not None
        instance = MemoryServerInstance(address.node, new_run_id)
        endpoint = MemoryServerEndpoint(instance, address.host, address.port, address.domain, tls, address.server_index)
        calls = FencedCalls(endpoint, self._job)
        stored_fence = -1
        # The job may be unknown here. A server that does not answer is found by the next call.
        with contextlib.suppress(TierUnavailable):
            stored_fence = (await self._read_index(calls)).fence
        if stored_fence < 0 and (
            self.may_be_prefaulting or await self._shared.run_exchange(self._admin.is_prefaulting())
        ):
            raise ServerPrefaulting(
                f"the memory server on {address.server_id} is still prefaulting its memory; it is probed again",
                new_run_id,
            )
        fence = stored_fence if request.is_claimed and stored_fence >= 0 else max(stored_fence, request.generation)
        await self._shared.run_exchange(self._admin.provision(self._job, self._account, fence))
        self._calls, self._endpoint, self._provisioned_run_id, self._fence = calls, endpoint, run_id, fence

    async def _read_layouts(self, calls: FencedCalls, manifests: Iterable[RankManifest]) -> None:
        """Reads each layout once. A damaged one is logged, counted and left out: other servers may have a good copy."""
        for digest in sorted({manifest.layout for manifest in manifests} - self._layouts.digests):
            try:
                text = await self._shared.run_exchange(calls.read_layout(digest))
                await asyncio.to_thread(self._layouts.add_verified, digest, text)
            except TierUnavailable:
                raise
            except (ChunkMissing, ProtocolError, TierError) as error:
                self._report_corrupt((f"{calls}: layout {digest}: {error}",))
                if isinstance(error, OutOfBounds):
                    self.out_of_bounds_records = (*self.out_of_bounds_records, str(error))

    def _report_corrupt(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self._reported_damage:
                self._reported_damage.add(name)
                metrics.memory_corrupt_entries.inc()
                log.warning("corrupt: %s; another copy is needed", name)
