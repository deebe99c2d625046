"""Manages one job's memory servers: one monitor each, their layout records and orphaned keys.

Called by `reconcile`: `follow` the fabric and status, `seen` for the snapshot, then seals, drops and the like as
planned. Never blocks the loop; a holder that does not answer delays no other.
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
from surefoot.protocol.checkpoints.completeness import Covers, TierReading, layouts_to_check, uncovered
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
from surefoot.task_set import TaskSet, logged
from surefoot_operator import metrics
from surefoot_operator.api.status import JobStatus, Membership
from surefoot_operator.job_snapshot import ObservedMemoryServer
from surefoot_operator.memory.connection_pool import MemoryServerAddress, MemoryServerPool, SharedMemoryServer
from surefoot_operator.memory.server_probe import LayoutShelf, MemoryServerProbe, ProbeRequest, ProbeResult
from surefoot_operator.policy.failure.memory_server_liveness import UsableMemoryServers, usable_servers
from surefoot_operator.policy.maintenance.memory_budget import part_of

log = logging.getLogger(__name__)


# ---- keys without an owner -------------------------------------------------------------------------------------------
# Selects unindexed keys on a holder that can be removed. Pure. A save under way has data and no index entry yet: only
# keys found twice, some time apart, are removed, and only where nobody could still commit them.


def orphaned_keys(
    now: Mapping[RankSave, tuple[str, ...]],
    before: Mapping[RankSave, tuple[str, ...]],
    epoch: int,
    watermark: Checkpoint | None,
    busy: frozenset[RankSave],
    settled: Collection[ClosedSteps] = (),
) -> dict[RankSave, tuple[str, ...]]:
    """Selects keys to remove from a holder sealed at committed `epoch`.

    Saves of older epochs can be committed by nobody but a repair (`busy`); saves of this epoch below the watermark were
    given up by their agents, and their steps come no more; steps that some worker of the epoch misses (`settled`) never
    become a checkpoint.
    """
    gone: dict[RankSave, tuple[str, ...]] = {}
    for save, names in now.items():
        passed = save.generation == epoch and watermark is not None and save.step < watermark.step
        missed = save.generation == epoch and any(said.is_missing(save.step) for said in settled)
        if save in before and save not in busy and (save.generation < epoch or passed or missed):
            both = tuple(name for name in names if name in before[save])
            if both:
                gone[save] = both
    return gone


# ---- monitor of one server -------------------------------------------------------------------------------------------
# Monitors one holder for one job. Keeps what is due there, and its state. Has no task and no connection:
# `memory.connection_pool` visits, and asks what is due. Calls `changed` only for what a plan could read.

_GRAINS = 100
Changed = Callable[[bool], None]
"""Called after each change; True if a plan should be made at once, False if newer saves alone were read."""
T = TypeVar("T")


class MemoryServerMonitor:
    """Monitors one place for one job, until another process is there."""

    def __init__(
        self,
        place: MemoryServerAddress,
        shared: SharedMemoryServer,
        probe: MemoryServerProbe,
        clock: Callable[[], float],
        changed: Changed,
    ) -> None:
        self.address, self.probe = place, probe
        self.observed: ObservedMemoryServer | None = None
        """None until it answered once: then nothing is known of it, not even its name."""
        self.last_error = ""
        """How the last visit failed; empty: it did not."""
        self.rejects_operator = False
        """Whether something answers here that refuses the operator."""
        self.replaced: list[ObservedMemoryServer] = []
        """Instances that were here before the present one."""
        self._shared, self._settings = shared, shared.settings
        self._clock, self._changed = clock, changed
        self._membership: Membership | None = None
        self._backing_off = False
        self._fencing: int | None = None
        self._read_due = 0.0
        self._pod_grace_until = clock() + self._settings.prefault_wait_seconds
        self._turn = asyncio.Lock()
        shared.attach(self)

    def set_pod_ready(self, settling: bool) -> None:
        """Sets whether its pod is not Ready, which delays it briefly."""
        if self.probe.settling and not settling:
            self._shared.wake()
        self.probe.settling = settling and self._clock() < self._pod_grace_until

    def renew(self, place: MemoryServerAddress) -> None:
        """Takes note of another password or authority of the same server."""
        log.info("reconnecting to the holder on %s with new credentials", place.server_id)
        self.address = place

    def set_membership(self, world: Membership | None, resting: bool = False) -> None:
        """Takes the stored world; a new one ends the pause between visits."""
        if world != self._membership or (self._backing_off and not resting):
            self._membership = world
            self._shared.wake()
        self._backing_off = resting

    def request_fence(self, epoch: int) -> bool:
        """Seals at this claimed epoch, then reads, in the next visit.

        Returns whether that is still to come.
        """
        if self.observed is not None and self.observed.read_generation == epoch:
            return False
        if self._fencing != epoch:
            self._fencing = epoch
            self._shared.wake()
        return True

    def request_read(self) -> None:
        """Reads the index again soon, as it was just changed."""
        self._read_due = 0.0
        self._shared.wake()

    async def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs one of the probe's calls between visits."""
        try:
            async with self._turn:
                return await work
        finally:
            work.close()  # of one that never came to its turn

    def pause_seconds(self) -> float | None:
        """Longest wait for the next visit; None: it wants none."""
        if self._membership is None:
            return None  # nothing was ever begun: nothing is to be known here
        return self._settings.rest_seconds if self._backing_off else self._settings.probe_seconds

    def is_due(self) -> bool:
        """Whether a visit has more to do here than a ping."""
        request = self._request()
        if request is None or self._turn.locked():
            return False
        well = self.observed is not None and self.observed.state == "Ready" and self.probe.is_provisioned
        return request.fence or request.read or not well

    def detach(self) -> None:
        """Ends its part in visits."""
        self._shared.detach(self)

    async def close(self) -> None:
        """Ends its part in visits, and waits for the call under way."""
        self._shared.detach(self)
        async with self._turn:
            pass

    async def visit(self) -> None:
        """Carries out what is due, and takes note of how it went."""
        request = self._request()
        if request is not None:
            await self._once(request)

    def failed(self, error: SurefootError) -> None:
        """The holder does not answer anybody."""
        if self._membership is not None:
            self._unwell("refused" if not isinstance(error, TierUnavailable) else "away", error)

    def _request(self) -> ProbeRequest | None:
        world = self._membership
        if world is None:
            return None
        claimed = world.state == "Claimed"
        returning = self.observed is None or self.observed.state != "Ready"
        due = (
            self._clock() >= self._read_due
            or self.observed is None
            or self.observed.read_generation != world.generation
            or returning
        )
        # while Claimed an index is read only as ordered: a later reading would void the listing
        return ProbeRequest(
            world.generation, claimed, claimed and self._fencing == world.generation, not claimed and due
        )

    async def _once(self, request: ProbeRequest) -> None:
        try:
            report = await self.call(self.probe.run(request))
        except Fenced as error:
            # a newer leader's epoch rules there: our next write of status will fail, and says so
            self._unwell("fenced", error)
        except ServerPrefaulting as error:
            self._replaced_by(error.instance)
        except TierUnavailable as error:
            self._unwell("away", error)
        except SurefootError as error:
            self._unwell("refused", error)
        except Exception as error:
            log.exception("probing the holder on %s failed", self.address.server_id)
            self._unwell("bug", error)
        else:
            self._well(request, report)

    def _well(self, request: ProbeRequest, report: ProbeResult) -> None:
        self._replaced_by(report.endpoint.instance.run_id)
        now, old = self._clock(), self.observed
        self.last_error, self.rejects_operator = "", False
        if old is None or old.state != "Ready":
            log.info("%s answers: fence %d", report.endpoint.instance, report.fence)
        since = old.since_seconds if old is not None and old.state == "Ready" else now
        fresh = ObservedMemoryServer(report.endpoint, "Ready", since, fence=report.fence)
        if report.index is not None and report.fence >= request.generation:
            fresh = replace(fresh, read_generation=request.generation, entries=report.index.manifests)
            used, limit = _rounded(report.memory)
            fresh = replace(fresh, used_bytes=used, limit_bytes=limit, quota_violation=report.closed)
            self._read_due = now + self._settings.read_seconds
        elif old is not None:
            fresh = replace(old, endpoint=fresh.endpoint, state="Ready", since_seconds=since, fence=report.fence)
            fresh = replace(fresh, last_error="", rejects_operator=False)
        if request.fence:
            self._fencing = None
        if fresh != self.observed:
            urgent = self.observed is None or fresh != replace(
                self.observed, entries=fresh.entries, used_bytes=fresh.used_bytes, limit_bytes=fresh.limit_bytes
            )
            self.observed = fresh
            self._changed(urgent)

    def _replaced_by(self, instance: str) -> None:
        """Another instance answers here than the one of before: that one is gone, and what it held."""
        if self.observed is not None and self.observed.endpoint.instance.run_id != instance:
            self.replaced.append(replace(self.observed, state="Gone", since_seconds=self._clock()))
            self.observed = None
            self._changed(True)

    def _unwell(self, kind: str, error: Exception) -> None:
        metrics.memory_call_failures.labels(kind).inc()
        refusing = isinstance(error, AccessDenied)
        if refusing and not self.rejects_operator:
            log.warning("the holder on %s refuses the operator: %s", self.address.server_id, error)
        news = refusing != self.rejects_operator
        self.last_error, self.rejects_operator = str(error) or type(error).__name__, refusing
        if self.observed is None:
            if news:
                self._changed(True)
            return
        if self.observed.state == "Ready":
            log.info(
                "%s does not answer: %s", self.observed.endpoint.instance, error
            )  # the pool warns, once for all jobs
            self.observed = replace(self.observed, state="Unreachable", since_seconds=self._clock())
            news = True
        self.observed = replace(self.observed, last_error=self.last_error, rejects_operator=refusing)
        if news:
            self._changed(True)


def _rounded(memory: ServerMemory | None) -> tuple[int | None, int | None]:
    """Used and limit; rounded, so that not every byte more is news. A server without a limit has room for anything."""
    if memory is None or not memory.limit_bytes:
        return None, None
    grain = max(1, memory.limit_bytes // _GRAINS)
    return -(-memory.used_bytes // grain) * grain, memory.limit_bytes


# ---- job servers -----------------------------------------------------------------------------------------------------

MOST_REFUSED = 8
"""Sentences on records that broke a bound; whoever removes them finds the others."""
MOST_COVERS = 256
"""Sets of layouts whose answer is kept though nothing asks for it now."""
_Found = Mapping[RankSave, tuple[str, ...]]
"""Keys without an index entry, by the save that they are of."""


class JobMemoryServers:
    """Monitors one job's holders, in one event loop."""

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
        self._closing = TaskSet(logged(log))
        self._gone_instances: dict[MemoryServerInstance, ObservedMemoryServer] = {}
        self._status = JobStatus()
        self._addresses: Mapping[MemoryServerId, MemoryServerAddress] = {}
        self._max_records = bounds.max_records(0)
        self._servers = 0
        """The most that a node ran so far."""
        self._resting = False
        self._size_limit_bytes: int | None = None
        self._covers: dict[frozenset[str], bool] = {}
        self._needed_layouts: tuple[tuple[object, ...], frozenset[frozenset[str]]] = ((), frozenset())
        self._layouts = LayoutShelf()
        self._named: set[str] = set()
        """Layouts that an index or a listing named when they were looked at last."""
        self._refused_listed: dict[str, str] = {}
        """Layouts of listings that broke a bound, and how."""
        self._found: dict[MemoryServerInstance, _Found] = {}
        self._cleaned = False

    @property
    def cleaned(self) -> bool:
        """Whether `clean` was called; then no holder is monitored any more."""
        return self._cleaned

    def pause(self, status: JobStatus) -> None:
        """Stops monitoring until `follow` names holders again."""
        self._status = status
        for kept in tuple(self._monitors.values()):
            del self._monitors[kept.address.server_id]
            self._start_closing(kept)
        self._gone_instances.clear()

    def update(
        self,
        places: Sequence[MemoryServerAddress],
        status: JobStatus,
        resting: bool = False,
        size_limit_bytes: int | None = None,
        ranks: int = 0,
    ) -> None:
        """Takes the fabric's places, the status and the spec.

        A place whose process changed has lost its data. `resting`: nobody reads or writes, so holders are asked seldom.
        `size_limit_bytes`: what the job may store on each node. `ranks`: how many it may run, by which its records are
        bounded.
        """
        self._max_records = bounds.max_records(ranks)
        self._layouts.max_values = bounds.max_layout_values(ranks)
        self._status, self._resting, self._size_limit_bytes = status, resting, size_limit_bytes
        self._pool.set_addresses(places)
        self._addresses = {place.server_id: place for place in places}
        self._servers = max([self._servers, *(place.server + 1 for place in places)])
        for kept in tuple(self._monitors.values()):
            place = self._addresses.get(kept.address.server_id)
            replaced = place is not None and not kept.address.same_server(place)
            if replaced or self._is_removed(kept.address.server_id):
                self._retire(kept)
        self._sync_monitors()
        self._remember()

    def _sync_monitors(self) -> None:
        """Monitors every place, and brings every monitor up to the status."""
        for server, place in self._addresses.items():
            kept = self._monitors.get(server)
            if kept is None and place.running and not self._cleaned and self._status.membership is not None:
                shared = self._pool.server_at(place)
                probe = MemoryServerProbe(place, shared, self._job, self._account, self._layouts)
                kept = self._monitors[server] = MemoryServerMonitor(place, shared, probe, self._clock, self._changed)
            if kept is not None:
                if not kept.address.same_access(place):
                    kept.renew(place)
                kept.set_pod_ready(place.settling)
        held = {server: len(k.observed.entries) for server, k in self._monitors.items() if k.observed is not None}
        room = self._max_records - sum(held.values())
        for server, kept in self._monitors.items():
            kept.probe.most_entries = max(0, room + held.get(server, 0))
            kept.probe.size_limit_bytes = part_of(self._size_limit_bytes, kept.address.servers)
            kept.set_membership(self._status.membership, self._resting)

    def observed_servers(self) -> tuple[ObservedMemoryServer, ...]:
        """Lists every holder that answered or that status names."""
        kept = self._monitors.values()
        gone = (*self._gone_instances.values(), *(old for k in kept for old in k.replaced))
        known = {h.endpoint.instance: h for h in (*gone, *(k.observed for k in kept if k.observed is not None))}
        for endpoint in self._status.assigned_servers:
            if endpoint.instance not in known:
                known[endpoint.instance] = self._assigned_but_unseen(endpoint)
        return tuple(known[holder] for holder in sorted(known, key=INSTANCE_ORDER))

    def usable_servers(self, epoch: int) -> UsableMemoryServers:
        """Lists holders that agents of `epoch` may save to, or read."""
        return usable_servers(self.observed_servers(), self._status.assigned_servers, epoch)

    def fence(self, holder: MemoryServerInstance, epoch: int) -> bool:
        """Starts to seal this holder and read its index.

        `changed` is called once it is done or failed. Returns whether it is still to be done.
        """
        kept = self._monitor_of(holder)
        return kept is not None and kept.request_fence(epoch)

    @property
    def layouts_known(self) -> frozenset[str]:
        """Digests of all layout records known here."""
        return self._layouts.digests

    @property
    def refused(self) -> tuple[str, ...]:
        """Records that broke a bound when they were read last, a sentence each."""
        sentences = (sentence for kept in self._monitors.values() for sentence in kept.probe.refused)
        return (*islice(sentences, MOST_REFUSED), *islice(self._refused_listed.values(), MOST_REFUSED))

    async def covers(
        self,
        persistent: Sequence[RankManifest],
        layouts: Mapping[str, str],
        holders: Sequence[ObservedMemoryServer],
    ) -> Covers:
        """Whether each needed set of layouts covers every tensor once.

        Sets that are not known yet are left out. `holders`: as the plan sees them.
        """
        # summarised once for the same indexes and listing: a round in which an agent spoke looks at none of them
        read = [h for h in holders if h.state == "Ready"]
        key = (persistent, *((h.endpoint.instance, h.entries) for h in read))
        if not _is_same(key, self._needed_layouts[0]):
            self._named = {m.layout for entries in (persistent, *(h.entries for h in holders)) for m in entries}
            self._layouts.keep(self._named)
            self._refused_listed = {d: why for d, why in self._refused_listed.items() if d in self._named}
            entries = {h.endpoint.instance: h.entries for h in read}
            self._needed_layouts = (key, frozenset(layouts_to_check(TierReading(entries, tuple(persistent)))))
            if len(self._covers) > MOST_COVERS:
                self._covers = {
                    digests: answer for digests, answer in self._covers.items() if digests in self._needed_layouts[1]
                }
        await self._add_layouts({d: text for d, text in layouts.items() if d in self._named and d not in self._layouts})
        wanted = self._needed_layouts[1]
        for digests in wanted - set(self._covers):
            found = [self._layouts[d] for d in sorted(digests) if d in self._layouts]
            if len(found) == len(digests):
                problem = await asyncio.to_thread(uncovered, found)
                self._covers[digests] = problem is None
                if problem is not None:
                    log.warning("a checkpoint is unusable: %s", problem)
        return dict(self._covers)

    async def drop(self, drops: Mapping[MemoryServerInstance, Sequence[RankSave]], epoch: int, seconds: float) -> None:
        """Drops saves from exactly these instances, within `seconds`.

        What fails is planned again. It ends once the world changes: nothing is dropped while one is Claimed.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds

        def due() -> bool:
            world = self._status.membership
            still = world is not None and (world.generation, world.state) == (epoch, "Committed")
            return still and loop.time() < until

        calls = []
        for holder, saves in drops.items():
            kept = self._monitor_of(holder)
            if kept is None or kept.observed is None:
                continue
            chunks = {m.save: m.chunks for m in kept.observed.entries}
            todo = [(save, chunks[save]) for save in saves if save in chunks]
            calls.append(
                self._run_call(kept.address.server_id, "drop", kept.call(kept.probe.drop(holder, todo, epoch, due)))
            )
        await asyncio.gather(*calls)
        for holder in drops:
            kept = self._monitor_of(holder)
            if kept is not None:
                kept.request_read()

    async def set_watermark(self, checkpoint: Checkpoint, epoch: int) -> None:
        """Writes the watermark to every holder that is sealed at `epoch`."""
        calls = []
        for seen in self.observed_servers():
            kept = self._monitor_of(seen.endpoint.instance)
            if kept is not None and seen.state == "Ready" and (seen.fence or 0) >= epoch:
                work = kept.call(kept.probe.set_watermark(seen.endpoint.instance, checkpoint, epoch))
                calls.append(self._run_call(kept.address.server_id, "mark", work))
        await asyncio.gather(*calls)

    async def delete_uncommitted(
        self, watermark: Checkpoint | None, busy: frozenset[RankSave], settled: Collection[ClosedSteps] = ()
    ) -> None:
        """Removes data without an index entry that the last sweep found too."""
        world = self._status.membership
        if world is None or world.state != "Committed":
            self._found = {}
            return
        superfluous = partial(orphaned_keys, epoch=world.generation, watermark=watermark, busy=busy, settled=settled)
        calls = [
            self._run_call(kept.address.server_id, "sweep", self._sweep(kept, world, superfluous))
            for kept in self._monitors.values()
            if kept.observed is not None
            and kept.observed.state == "Ready"
            and (kept.observed.fence or 0) >= world.generation
        ]
        await asyncio.gather(*calls)

    async def delete_job(self) -> None:
        """Removes the job from every answering holder and stops monitoring."""
        kept = tuple(self._monitors.values())
        for one in kept:
            one.detach()
        await asyncio.gather(
            *(self._run_call(one.address.server_id, "clean", one.call(one.probe.delete_job())) for one in kept)
        )
        self._monitors.clear()
        self._gone_instances.clear()
        self._cleaned = True
        self._changed(True)

    async def close(self) -> None:
        """Ends every task; holders stay as they are.

        It waits for calls under way, within their time limits.
        """
        for kept in self._monitors.values():
            await kept.close()
        await self._closing.join()
        self._monitors.clear()

    async def _sweep(
        self, kept: MemoryServerMonitor, world: Membership, superfluous: Callable[[_Found, _Found], _Found]
    ) -> None:
        assert kept.observed is not None, "only holders that answered are swept"
        holder = kept.observed.endpoint.instance
        found = await kept.call(kept.probe.unindexed())
        left = superfluous(found, self._found.get(holder, {}))
        self._found[holder] = found
        if left and self._status.membership == world:
            gone = await kept.call(kept.probe.delete_uncommitted(holder, left, world.generation))
            log.info("%s: %d keys without an index entry were removed", holder, gone)

    async def _run_call(self, server: MemoryServerId, what: str, work: Awaitable[object]) -> None:
        """Carries one call out; a failure is counted and logged, for the next plan asks again."""
        try:
            await work
        except SurefootError as error:
            metrics.memory_call_failures.labels(what).inc()
            log.warning("%s on %s failed: %s", what, server, error)

    def _monitor_of(self, holder: MemoryServerInstance) -> MemoryServerMonitor | None:
        """The monitor that saw this very instance last: of its node's few servers one."""
        for number in range(self._servers):
            kept = self._monitors.get(MemoryServerId(holder.node, number))
            if kept is not None and kept.observed is not None and kept.observed.endpoint.instance == holder:
                return kept
        return None

    def _retire(self, kept: MemoryServerMonitor) -> None:
        """The process there ended or was replaced: what it held is gone for good."""
        del self._monitors[kept.address.server_id]
        if kept.observed is not None:
            self._gone_instances[kept.observed.endpoint.instance] = replace(
                kept.observed, state="Gone", since_seconds=self._clock()
            )
        self._collect(kept)
        self._start_closing(kept)

    def _start_closing(self, kept: MemoryServerMonitor) -> None:
        kept.detach()
        self._closing.start(kept.close(), f"leaving the holder on {kept.address.server_id}")

    def _collect(self, kept: MemoryServerMonitor) -> None:
        while kept.replaced:
            gone = kept.replaced.pop()
            self._gone_instances[gone.endpoint.instance] = gone

    def _remember(self) -> None:
        """Gone is known of those that status names; of others nobody asks."""
        for one in self._monitors.values():
            self._collect(one)
        named = {endpoint.instance: endpoint for endpoint in self._status.assigned_servers}
        for holder, endpoint in named.items():
            place, kept = self._addresses.get(endpoint.server_id), self._monitors.get(endpoint.server_id)
            other = kept is not None and kept.observed is not None and kept.observed.endpoint.instance != holder
            dead = (place is not None and not place.running) or self._is_removed(endpoint.server_id)
            if (other or dead) and holder not in self._gone_instances:
                self._gone_instances[holder] = ObservedMemoryServer(endpoint, "Gone", self._clock())
        self._gone_instances = {holder: seen for holder, seen in self._gone_instances.items() if holder in named}

    def _is_removed(self, server: MemoryServerId) -> bool:
        """Whether its node runs fewer servers by now."""
        first = self._addresses.get(MemoryServerId(server.node, 0))
        return first is not None and first.running and server.server_index >= first.servers

    async def _add_layouts(self, layouts: Mapping[str, str]) -> None:
        """Layout records that a listing brought; one that is damaged is left out."""
        for digest, text in layouts.items():
            if digest in self._refused_listed:
                continue
            try:
                await asyncio.to_thread(self._layouts.add_verified, digest, text)
            except ProtocolError as error:
                if isinstance(error, OutOfBounds):
                    self._refused_listed[digest] = str(error)
                metrics.memory_corrupt_entries.inc()
                log.warning("layout %s of the persistent tier is damaged: %s", digest, error)

    def _assigned_but_unseen(self, endpoint: MemoryServerEndpoint) -> ObservedMemoryServer:
        """Named in status, and not seen in this term."""
        kept = self._monitors.get(endpoint.server_id)
        silent = ObservedMemoryServer(endpoint, "Unreachable", self._membership_changed_seconds())
        return (
            silent
            if kept is None
            else replace(silent, last_error=kept.last_error, rejects_operator=kept.rejects_operator)
        )

    def _membership_changed_seconds(self) -> float:
        world = self._status.membership
        now = self._clock()
        return min(world.changed_seconds, now) if world is not None else now  # another leader's clock may be ahead


def _is_same(one: tuple[object, ...], other: tuple[object, ...]) -> bool:
    """Whether these are equal; of equal tuples that are one object nothing is compared."""
    return len(one) == len(other) and all(a is b or a == b for a, b in zip(one, other, strict=True))
