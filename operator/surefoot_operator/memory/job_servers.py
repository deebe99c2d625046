"""Manages one job's memory servers: a monitor for each, the job's layout records and leftover keys.

Called by `reconcile`: `update` with the platform's addresses and the status, `observed_servers` for the snapshot, then
`fence`, `drop` and the like as planned. Nothing blocks the loop. A server that does not answer delays no other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from surefoot.errors import (
    AccessDenied,
    Fenced,
    OutOfBounds,
    ProtocolError,
    ServerPrefaulting,
    SurefootError,
    TierUnavailable,
)
from surefoot.memory_server import Credentials
from surefoot.memory_server.provisioning import ServerMemory
from surefoot.protocol import bounds
from surefoot.protocol.checkpoints.completeness import (
    Covers,
    TierReading,
    describe_uncovered_tensor,
    layout_sets_to_check,
)
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.checkpoints.save_state import ClosedSteps
from surefoot.protocol.identities import (
    INSTANCE_ORDER,
    Checkpoint,
    MemoryServerEndpoint,
    MemoryServerId,
    MemoryServerInstance,
    RankSave,
)
from surefoot.task_set import TaskSet, log_failure_to
from surefoot_operator import metrics
from surefoot_operator.api.status import JobStatus, Membership
from surefoot_operator.job_snapshot import ObservedMemoryServer
from surefoot_operator.memory.connection_pool import MemoryServerAddress, MemoryServerPool, SharedMemoryServer
from surefoot_operator.memory.server_probe import LayoutCache, MemoryServerProbe, ProbeRequest, ProbeResult
from surefoot_operator.policy.failure.memory_server_liveness import UsableMemoryServers, usable_servers
from surefoot_operator.policy.maintenance.memory_budget import server_size_limit

log = logging.getLogger(__name__)


# ---- leftover keys ---------------------------------------------------------------------------------------------------
# Selects keys without an index entry that can be removed from a server. Pure. A save in progress has data but no index
# entry yet. So only keys found twice, some time apart, are removed, and only if no agent can still commit their save.


def select_removable_keys(
    current_keys: Mapping[RankSave, tuple[str, ...]],
    previous_keys: Mapping[RankSave, tuple[str, ...]],
    generation: int,
    watermark: Checkpoint | None,
    busy: frozenset[RankSave],
    settled: Collection[ClosedSteps] = (),
) -> dict[RankSave, tuple[str, ...]]:
    """Selects keys to remove from a server fenced at the committed generation.

    Three kinds of saves can no longer be committed: saves of older generations, except by a repair; saves of this
    generation below the watermark, which their agents have abandoned; and saves of steps that some worker of this
    generation missed, which never become a checkpoint.

    Args:
        current_keys: Keys without an index entry, by save.
        previous_keys: The same, as found last time.
        generation: The committed generation.
        watermark: Newest checkpoint with enough copies in memory; None: none yet.
        busy: Saves that agents are copying now.
        settled: For each worker, the steps that it has finished saving or missed.
    """
    removable_keys: dict[RankSave, tuple[str, ...]] = {}
    for save, names in current_keys.items():
        below_watermark = save.generation == generation and watermark is not None and save.step < watermark.step
        was_missed = save.generation == generation and any(
            closed_steps.is_missing(save.step) for closed_steps in settled
        )
        if (
            save in previous_keys
            and save not in busy
            and (save.generation < generation or below_watermark or was_missed)
        ):
            found_twice = tuple(name for name in names if name in previous_keys[save])
            if found_twice:
                removable_keys[save] = found_twice
    return removable_keys


# ---- monitor of one server -------------------------------------------------------------------------------------------
# Monitors one memory server for one job: its state, and the calls that are due. It has no task and no connection of its
# own: `memory.connection_pool` visits the server and asks for due calls. `changed` is called only for changes that plans
# use.

_USED_MEMORY_GRAINS = 100
"""Used memory is rounded up to 1/100 of the limit."""
Changed = Callable[[bool], None]
"""Called after each change. True: plan at once. False: only newer saves were read."""
T = TypeVar("T")


class MemoryServerMonitor:
    """Monitors one address for one job, until another process runs there."""

    def __init__(
        self,
        address: MemoryServerAddress,
        shared: SharedMemoryServer,
        probe: MemoryServerProbe,
        clock: Callable[[], float],
        changed: Changed,
    ) -> None:
        self.address, self.probe = address, probe
        self.observed: ObservedMemoryServer | None = None
        """The server as observed last; None: it has not answered yet, so not even its run id is known."""
        self.last_error = ""
        """Error of the last visit; empty: it succeeded."""
        self.rejects_operator = False
        """Whether the server denies the operator access."""
        self.replaced_instances: list[ObservedMemoryServer] = []
        """Instances that ran here before the current one."""
        self._shared, self._settings = shared, shared.settings
        self._clock, self._changed = clock, changed
        self._membership: Membership | None = None
        self._resting = False
        self._fence_generation: int | None = None
        self._next_read_seconds = 0.0
        self._pod_grace_until = clock() + self._settings.prefault_wait_seconds
        self._call_lock = asyncio.Lock()
        shared.attach(self)

    def set_may_be_prefaulting(self, settling: bool) -> None:
        """Sets whether the server's pod is not Ready; provisioning then waits, but for a limited time."""
        if self.probe.may_be_prefaulting and not settling:
            self._shared.wake()
        self.probe.may_be_prefaulting = settling and self._clock() < self._pod_grace_until

    def set_address(self, address: MemoryServerAddress) -> None:
        """Uses another password or CA certificate for the same server."""
        log.info("reconnecting to the memory server on %s with new credentials", address.server_id)
        self.address = address

    def set_membership(self, membership: Membership | None, resting: bool = False) -> None:
        """Sets the stored membership; a new one triggers a visit at once."""
        if membership != self._membership or (self._resting and not resting):
            self._membership = membership
            self._shared.wake()
        self._resting = resting

    def request_fence(self, generation: int) -> bool:
        """Requests that the next visit fences at this claimed generation and reads the index.

        Returns:
            Whether that is still to come; False if it was done already.
        """
        if self.observed is not None and self.observed.read_generation == generation:
            return False
        if self._fence_generation != generation:
            self._fence_generation = generation
            self._shared.wake()
        return True

    def request_read(self) -> None:
        """Makes the next visit read the index, which was just changed."""
        self._next_read_seconds = 0.0
        self._shared.wake()

    async def run_between_visits(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs one of the probe's calls between visits."""
        try:
            async with self._call_lock:
                return await work
        finally:
            work.close()  # of a call that was cancelled while it waited

    def visit_interval_seconds(self) -> float | None:
        """Returns the longest time until the next visit; None: no visit needed."""
        if self._membership is None:
            return None  # the job has never written here
        return self._settings.idle_interval_seconds if self._resting else self._settings.probe_interval_seconds

    def is_due(self) -> bool:
        """Returns whether a visit must do more here than a ping."""
        request = self._due_request()
        if request is None or self._call_lock.locked():
            return False
        is_healthy = self.observed is not None and self.observed.state == "Ready" and self.probe.is_provisioned
        return request.must_fence or request.must_read or not is_healthy

    def detach(self) -> None:
        """Ends the part in visits."""
        self._shared.detach(self)

    async def close(self) -> None:
        """Ends the part in visits, and waits for the call in progress."""
        self._shared.detach(self)
        async with self._call_lock:
            pass

    async def visit(self) -> None:
        """Makes the calls that are due and records their result."""
        request = self._due_request()
        if request is not None:
            await self._probe_once(request)

    def on_unreachable(self, error: SurefootError) -> None:
        """Records that the server does not answer any job."""
        if self._membership is not None:
            self._record_failure("refused" if not isinstance(error, TierUnavailable) else "away", error)

    def _due_request(self) -> ProbeRequest | None:
        membership = self._membership
        if membership is None:
            return None
        claimed = membership.state == "Claimed"
        returning = self.observed is None or self.observed.state != "Ready"
        read_due = (
            self._clock() >= self._next_read_seconds
            or self.observed is None
            or self.observed.read_generation != membership.generation
            or returning
        )
        # While the membership is claimed, read only as ordered: a later reading would make the listing void.
        return ProbeRequest(
            membership.generation,
            claimed,
            claimed and self._fence_generation == membership.generation,
            not claimed and read_due,
        )

    async def _probe_once(self, request: ProbeRequest) -> None:
        try:
            result = await self.run_between_visits(self.probe.run(request))
        except Fenced as error:
            # A newer leader's generation owns the server. Our next status write will fail, and that will be logged.
            self._record_failure("fenced", error)
        except ServerPrefaulting as error:
            self._record_instance(error.instance)
        except TierUnavailable as error:
            self._record_failure("away", error)
        except SurefootError as error:
            self._record_failure("refused", error)
        except Exception as error:
            log.exception("probing the memory server on %s failed", self.address.server_id)
            self._record_failure("bug", error)
        else:
            self._record_success(request, result)

    def _record_success(self, request: ProbeRequest, result: ProbeResult) -> None:
        self._record_instance(result.endpoint.instance.run_id)
        now, previous = self._clock(), self.observed
        self.last_error, self.rejects_operator = "", False
        if previous is None or previous.state != "Ready":
            log.info("%s answers, fenced at generation %d", result.endpoint.instance, result.fence)
        since_seconds = previous.since_seconds if previous is not None and previous.state == "Ready" else now
        current = ObservedMemoryServer(result.endpoint, "Ready", since_seconds, fence=result.fence)
        if result.index is not None and result.fence >= request.generation:
            current = replace(current, read_generation=request.generation, entries=result.index.manifests)
            used_bytes, limit_bytes = _round_memory_usage(result.memory)
            current = replace(
                current, used_bytes=used_bytes, limit_bytes=limit_bytes, quota_violation=result.quota_violation
            )
            self._next_read_seconds = now + self._settings.read_interval_seconds
        elif previous is not None:
            current = replace(
                previous, endpoint=current.endpoint, state="Ready", since_seconds=since_seconds, fence=result.fence
            )
            current = replace(current, last_error="", rejects_operator=False)
        if request.must_fence:
            self._fence_generation = None
        if current != self.observed:
            # A change of the entries or of the used memory alone can wait for the next regular plan.
            urgent = self.observed is None or current != replace(
                self.observed,
                entries=current.entries,
                used_bytes=current.used_bytes,
                limit_bytes=current.limit_bytes,
            )
            self.observed = current
            self._changed(urgent)

    def _record_instance(self, run_id: str) -> None:
        """Marks the former instance as gone, with its data, if another one answers now."""
        if self.observed is not None and self.observed.endpoint.instance.run_id != run_id:
            self.replaced_instances.append(replace(self.observed, state="Gone", since_seconds=self._clock()))
            self.observed = None
            self._changed(True)

    def _record_failure(self, kind: str, error: Exception) -> None:
        metrics.memory_call_failures.labels(kind).inc()
        access_denied = isinstance(error, AccessDenied)
        if access_denied and not self.rejects_operator:
            log.warning("the memory server on %s denies access to the operator: %s", self.address.server_id, error)
        is_news = access_denied != self.rejects_operator
        self.last_error, self.rejects_operator = str(error) or type(error).__name__, access_denied
        if self.observed is None:
            if is_news:
                self._changed(True)
            return
        if self.observed.state == "Ready":
            # For information only: the pool warns once for all jobs.
            log.info("%s does not answer: %s", self.observed.endpoint.instance, error)
            self.observed = replace(self.observed, state="Unreachable", since_seconds=self._clock())
            is_news = True
        self.observed = replace(self.observed, last_error=self.last_error, rejects_operator=access_denied)
        if is_news:
            self._changed(True)


def _round_memory_usage(memory: ServerMemory | None) -> tuple[int | None, int | None]:
    """Returns used and limit in bytes, rounded so that few changes cause a plan; None for a server without a limit."""
    if memory is None or not memory.limit_bytes:
        return None, None
    grain = max(1, memory.limit_bytes // _USED_MEMORY_GRAINS)
    return -(-memory.used_bytes // grain) * grain, memory.limit_bytes


# ---- job servers -----------------------------------------------------------------------------------------------------

MAX_REPORTED_RECORDS = 8
"""Maximum number of reported records that exceeded a bound, from servers and from listings each; once these are removed, others appear."""
MAX_CACHED_COVERS = 256
"""Maximum number of layout sets whose answer is cached although no snapshot needs it."""
_UnindexedKeys = Mapping[RankSave, tuple[str, ...]]
"""Keys without an index entry, by the save they belong to."""


class JobMemoryServers:
    """Monitors one job's memory servers, in one event loop."""

    def __init__(
        self,
        job: str,
        account: Credentials,
        pool: MemoryServerPool,
        clock: Callable[[], float],
        changed: Changed,
    ) -> None:
        self._job, self._account, self._pool = job, account, pool
        self._clock, self._changed = clock, changed
        self._monitors: dict[MemoryServerId, MemoryServerMonitor] = {}
        self._closing = TaskSet(log_failure_to(log))
        self._gone_instances: dict[MemoryServerInstance, ObservedMemoryServer] = {}
        self._status = JobStatus()
        self._addresses: Mapping[MemoryServerId, MemoryServerAddress] = {}
        self._max_records = bounds.max_manifests_per_tier(0)
        self._max_servers_per_node = 0
        """Highest number of servers that one node has run so far."""
        self._resting = False
        self._size_limit_bytes: int | None = None
        self._covers: dict[frozenset[str], bool] = {}
        self._needed_layouts: tuple[tuple[object, ...], frozenset[frozenset[str]]] = ((), frozenset())
        self._layouts = LayoutCache()
        self._referenced_layouts: set[str] = set()
        """Digests of the layouts that indexes and listings refer to."""
        self._rejected_layouts: dict[str, str] = {}
        """By digest: why a listing's layout record exceeded a bound."""
        self._unindexed_keys: dict[MemoryServerInstance, _UnindexedKeys] = {}
        self._is_deleted = False

    @property
    def is_deleted(self) -> bool:
        """Whether `delete_job` has removed the job; then no server is monitored."""
        return self._is_deleted

    def pause_monitoring(self, status: JobStatus) -> None:
        """Stops monitoring until `update` is called with addresses."""
        self._status = status
        for monitor in tuple(self._monitors.values()):
            del self._monitors[monitor.address.server_id]
            self._start_closing(monitor)
        self._gone_instances.clear()

    def update(
        self,
        addresses: Sequence[MemoryServerAddress],
        status: JobStatus,
        resting: bool = False,
        size_limit_bytes: int | None = None,
        ranks: int = 0,
    ) -> None:
        """Updates addresses, status and limits. A server whose process changed has lost its data.

        Args:
            addresses: Addresses of the servers that the platform lists.
            status: The stored status.
            resting: Whether no agent reads or writes saves, so that visits may be rare.
            size_limit_bytes: Maximum bytes that the job may store on each node; None: no limit.
            ranks: Number of ranks that the job may run, which bounds its records.
        """
        self._max_records = bounds.max_manifests_per_tier(ranks)
        self._layouts.max_value_count = bounds.max_retained_layout_values(ranks)
        self._status, self._resting, self._size_limit_bytes = status, resting, size_limit_bytes
        # Close connections to processes that no longer exist, unless another job still uses them.
        self._pool.set_addresses(addresses)
        self._addresses = {address.server_id: address for address in addresses}
        self._max_servers_per_node = max(
            [self._max_servers_per_node, *(address.server_index + 1 for address in addresses)]
        )
        # End the monitors of replaced processes and removed servers, so that their data counts as gone.
        for monitor in tuple(self._monitors.values()):
            address = self._addresses.get(monitor.address.server_id)
            replaced = address is not None and not monitor.address.is_same_process(address)
            if replaced or self._is_removed(monitor.address.server_id):
                self._stop_monitoring(monitor)
        self._sync_monitors()
        self._update_gone_instances()

    def _sync_monitors(self) -> None:
        """Monitors every running server, and updates every monitor to the status."""
        for server, address in self._addresses.items():
            monitor = self._monitors.get(server)
            if monitor is None and address.running and not self._is_deleted and self._status.membership is not None:
                shared = self._pool.server_at(address)
                probe = MemoryServerProbe(address, shared, self._job, self._account, self._layouts)
                monitor = self._monitors[server] = MemoryServerMonitor(
                    address, shared, probe, self._clock, self._changed
                )
            if monitor is not None:
                if not monitor.address.has_same_access(address):
                    monitor.set_address(address)
                monitor.set_may_be_prefaulting(address.may_be_prefaulting)
        # Each index may use the part of the job's bound that its other servers leave.
        entry_counts = {
            server: len(k.observed.entries) for server, k in self._monitors.items() if k.observed is not None
        }
        free_entries = self._max_records - sum(entry_counts.values())
        for server, monitor in self._monitors.items():
            monitor.probe.max_entries = max(0, free_entries + entry_counts.get(server, 0))
            monitor.probe.size_limit_bytes = server_size_limit(self._size_limit_bytes, monitor.address.servers_on_node)
            monitor.set_membership(self._status.membership, self._resting)

    def observed_servers(self) -> tuple[ObservedMemoryServer, ...]:
        """Returns every server that answered or that the status assigns, each instance once."""
        monitors = self._monitors.values()
        gone_servers = (*self._gone_instances.values(), *(old for k in monitors for old in k.replaced_instances))
        servers = {
            h.endpoint.instance: h for h in (*gone_servers, *(k.observed for k in monitors if k.observed is not None))
        }
        for endpoint in self._status.assigned_servers:
            if endpoint.instance not in servers:
                servers[endpoint.instance] = self._assigned_but_unseen(endpoint)
        return tuple(servers[instance] for instance in sorted(servers, key=INSTANCE_ORDER))

    def usable_servers(self, generation: int) -> UsableMemoryServers:
        """Returns the servers that agents of this generation may save to, or read."""
        return usable_servers(self.observed_servers(), self._status.assigned_servers, generation)

    def fence(self, instance: MemoryServerInstance, generation: int) -> bool:
        """Starts to fence this server and to read its index; `changed` is called once that succeeded or failed.

        Returns:
            Whether that is still to be done; False also if no monitor observed this instance last.
        """
        monitor = self._monitor_of(instance)
        return monitor is not None and monitor.request_fence(generation)

    @property
    def layout_digests(self) -> frozenset[str]:
        """Digests of all layout records that are cached here."""
        return self._layouts.digests

    @property
    def out_of_bounds_records(self) -> tuple[str, ...]:
        """Descriptions of records that exceeded a bound in the last read."""
        sentences = (
            sentence for monitor in self._monitors.values() for sentence in monitor.probe.out_of_bounds_records
        )
        return (
            *islice(sentences, MAX_REPORTED_RECORDS),
            *islice(self._rejected_layouts.values(), MAX_REPORTED_RECORDS),
        )

    async def check_coverage(
        self,
        persistent: Sequence[RankManifest],
        layouts: Mapping[str, str],
        servers: Sequence[ObservedMemoryServer],
    ) -> Covers:
        """Returns whether each needed set of layouts covers every tensor exactly once.

        Args:
            persistent: Manifests that the listing of the persistent tier contains.
            layouts: Layout records that listings contain, by digest.
            servers: The servers that the plan uses.

        Returns:
            The answer for each set of digests. Sets with a layout that is not known yet are left out.
        """
        # Collect the needed sets only if an index or the listing changed, not for each message of an agent.
        readable_servers = [h for h in servers if h.state == "Ready"]
        key = (persistent, *((h.endpoint.instance, h.entries) for h in readable_servers))
        if not _equal_elements(key, self._needed_layouts[0]):
            self._referenced_layouts = {
                m.layout for entries in (persistent, *(h.entries for h in servers)) for m in entries
            }
            self._layouts.remove_unreferenced(self._referenced_layouts)
            self._rejected_layouts = {
                d: reason for d, reason in self._rejected_layouts.items() if d in self._referenced_layouts
            }
            entries = {h.endpoint.instance: h.entries for h in readable_servers}
            self._needed_layouts = (key, frozenset(layout_sets_to_check(TierReading(entries, tuple(persistent)))))
            if len(self._covers) > MAX_CACHED_COVERS:
                self._covers = {
                    digests: answer for digests, answer in self._covers.items() if digests in self._needed_layouts[1]
                }
        await self._add_layouts(
            {d: text for d, text in layouts.items() if d in self._referenced_layouts and d not in self._layouts}
        )
        needed_sets = self._needed_layouts[1]
        # Check the sets that have no answer yet, in a thread: large jobs have many tensors.
        for digests in needed_sets - set(self._covers):
            set_layouts = [self._layouts[d] for d in sorted(digests) if d in self._layouts]
            if len(set_layouts) == len(digests):
                problem = await asyncio.to_thread(describe_uncovered_tensor, set_layouts)
                self._covers[digests] = problem is None
                if problem is not None:
                    log.warning("cannot use a checkpoint, its layouts do not cover every tensor once: %s", problem)
        return dict(self._covers)

    async def drop(
        self, drops: Mapping[MemoryServerInstance, Sequence[RankSave]], generation: int, seconds: float
    ) -> None:
        """Drops saves from exactly these instances, within `seconds`. Failed drops are planned again.

        It stops once the membership changes, because nothing may be dropped while one is claimed.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds

        def may_continue() -> bool:
            membership = self._status.membership
            is_current = membership is not None and (membership.generation, membership.state) == (
                generation,
                "Committed",
            )
            return is_current and loop.time() < deadline

        calls = []
        for instance, saves in drops.items():
            monitor = self._monitor_of(instance)
            if monitor is None or monitor.observed is None:
                continue
            chunks = {m.save: m.chunks for m in monitor.observed.entries}
            indexed_saves = [(save, chunks[save]) for save in saves if save in chunks]
            calls.append(
                self._run_call(
                    monitor.address.server_id,
                    "drop",
                    monitor.run_between_visits(monitor.probe.drop(instance, indexed_saves, generation, may_continue)),
                )
            )
        await asyncio.gather(*calls)
        for instance in drops:
            monitor = self._monitor_of(instance)
            if monitor is not None:
                monitor.request_read()

    async def set_watermark(self, checkpoint: Checkpoint, generation: int) -> None:
        """Writes the watermark to every server that is fenced at this generation."""
        calls = []
        for server in self.observed_servers():
            monitor = self._monitor_of(server.endpoint.instance)
            if monitor is not None and server.state == "Ready" and (server.fence or 0) >= generation:
                work = monitor.run_between_visits(
                    monitor.probe.set_watermark(server.endpoint.instance, checkpoint, generation)
                )
                calls.append(self._run_call(monitor.address.server_id, "mark", work))
        await asyncio.gather(*calls)

    async def delete_uncommitted(
        self, watermark: Checkpoint | None, busy: frozenset[RankSave], settled: Collection[ClosedSteps] = ()
    ) -> None:
        """Removes data without an index entry that was already found the last time.

        Args:
            watermark: Newest checkpoint with enough copies in memory; None: none yet.
            busy: Saves that agents are copying now.
            settled: For each worker, the steps that it has finished saving or missed.
        """
        membership = self._status.membership
        if membership is None or membership.state != "Committed":
            self._unindexed_keys = {}
            return
        select_keys = partial(
            select_removable_keys, generation=membership.generation, watermark=watermark, busy=busy, settled=settled
        )
        calls = [
            self._run_call(
                monitor.address.server_id, "sweep", self._delete_leftover_keys(monitor, membership, select_keys)
            )
            for monitor in self._monitors.values()
            if monitor.observed is not None
            and monitor.observed.state == "Ready"
            and (monitor.observed.fence or 0) >= membership.generation
        ]
        await asyncio.gather(*calls)

    async def delete_job(self) -> None:
        """Removes the job from every server that answers, and stops monitoring."""
        monitors = tuple(self._monitors.values())
        for monitor in monitors:
            monitor.detach()
        await asyncio.gather(
            *(
                self._run_call(
                    monitor.address.server_id, "clean", monitor.run_between_visits(monitor.probe.delete_job())
                )
                for monitor in monitors
            )
        )
        self._monitors.clear()
        self._gone_instances.clear()
        self._is_deleted = True
        self._changed(True)

    async def close(self) -> None:
        """Ends all tasks. The servers keep their data. Waits for the calls in progress, within their time limits."""
        for monitor in self._monitors.values():
            await monitor.close()
        await self._closing.join()
        self._monitors.clear()

    async def _delete_leftover_keys(
        self,
        monitor: MemoryServerMonitor,
        membership: Membership,
        select_keys: Callable[[_UnindexedKeys, _UnindexedKeys], _UnindexedKeys],
    ) -> None:
        assert monitor.observed is not None, "only servers that answered are swept"
        instance = monitor.observed.endpoint.instance
        unindexed_keys = await monitor.run_between_visits(monitor.probe.list_unindexed_keys())
        removable_keys = select_keys(unindexed_keys, self._unindexed_keys.get(instance, {}))
        self._unindexed_keys[instance] = unindexed_keys
        if removable_keys and self._status.membership == membership:
            removed_count = await monitor.run_between_visits(
                monitor.probe.delete_uncommitted(instance, removable_keys, membership.generation)
            )
            log.info("%s: removed %d leftover keys without an index entry", instance, removed_count)

    async def _run_call(self, server: MemoryServerId, action: str, work: Awaitable[object]) -> None:
        """Runs one call; a failure is counted and logged, and the next plan repeats the call."""
        try:
            await work
        except SurefootError as error:
            metrics.memory_call_failures.labels(action).inc()
            log.warning("`%s` on the memory server on %s failed, the next plan repeats it: %s", action, server, error)

    def _monitor_of(self, instance: MemoryServerInstance) -> MemoryServerMonitor | None:
        """Returns the monitor that observed exactly this instance last; None: no monitor did."""
        for server_index in range(self._max_servers_per_node):
            monitor = self._monitors.get(MemoryServerId(instance.node, server_index))
            if monitor is not None and monitor.observed is not None and monitor.observed.endpoint.instance == instance:
                return monitor
        return None

    def _stop_monitoring(self, monitor: MemoryServerMonitor) -> None:
        """Ends monitoring of a process that ended or was replaced; its data is gone for good."""
        del self._monitors[monitor.address.server_id]
        if monitor.observed is not None:
            self._gone_instances[monitor.observed.endpoint.instance] = replace(
                monitor.observed, state="Gone", since_seconds=self._clock()
            )
        self._collect_replaced(monitor)
        self._start_closing(monitor)

    def _start_closing(self, monitor: MemoryServerMonitor) -> None:
        monitor.detach()
        self._closing.start(monitor.close(), f"disconnecting from the memory server on {monitor.address.server_id}")

    def _collect_replaced(self, monitor: MemoryServerMonitor) -> None:
        while monitor.replaced_instances:
            server = monitor.replaced_instances.pop()
            self._gone_instances[server.endpoint.instance] = server

    def _update_gone_instances(self) -> None:
        """Remembers which assigned instances are gone; other instances do not matter to plans."""
        for monitor in self._monitors.values():
            self._collect_replaced(monitor)
        assigned_endpoints = {endpoint.instance: endpoint for endpoint in self._status.assigned_servers}
        for instance, endpoint in assigned_endpoints.items():
            address, current = self._addresses.get(endpoint.server_id), self._monitors.get(endpoint.server_id)
            is_replaced = (
                current is not None and current.observed is not None and current.observed.endpoint.instance != instance
            )
            has_ended = (address is not None and not address.running) or self._is_removed(endpoint.server_id)
            if (is_replaced or has_ended) and instance not in self._gone_instances:
                self._gone_instances[instance] = ObservedMemoryServer(endpoint, "Gone", self._clock())
        self._gone_instances = {
            instance: server for instance, server in self._gone_instances.items() if instance in assigned_endpoints
        }

    def _is_removed(self, server: MemoryServerId) -> bool:
        """Returns whether its node runs fewer servers by now, so that this one no longer exists."""
        first_server = self._addresses.get(MemoryServerId(server.node, 0))
        return first_server is not None and first_server.running and server.server_index >= first_server.servers_on_node

    async def _add_layouts(self, layouts: Mapping[str, str]) -> None:
        """Caches the layout records of a listing; corrupt ones are left out."""
        for digest, text in layouts.items():
            if digest in self._rejected_layouts:
                continue
            try:
                await asyncio.to_thread(self._layouts.add_verified, digest, text)
            except ProtocolError as error:
                if isinstance(error, OutOfBounds):
                    self._rejected_layouts[digest] = str(error)
                metrics.memory_corrupt_entries.inc()
                log.warning("layout %s of the persistent tier is corrupt: %s", digest, error)

    def _assigned_but_unseen(self, endpoint: MemoryServerEndpoint) -> ObservedMemoryServer:
        """Builds the entry of a server that the status assigns, but that did not answer in this term."""
        monitor = self._monitors.get(endpoint.server_id)
        unreachable = ObservedMemoryServer(endpoint, "Unreachable", self._membership_changed_seconds())
        return (
            unreachable
            if monitor is None
            else replace(unreachable, last_error=monitor.last_error, rejects_operator=monitor.rejects_operator)
        )

    def _membership_changed_seconds(self) -> float:
        membership = self._status.membership
        now = self._clock()
        # Another leader's clock may be ahead of this one.
        return min(membership.changed_seconds, now) if membership is not None else now


def _equal_elements(first: tuple[object, ...], second: tuple[object, ...]) -> bool:
    """Returns whether both are equal; compares identical elements by identity, which is cheap."""
    return len(first) == len(second) and all(a is b or a == b for a, b in zip(first, second, strict=True))
