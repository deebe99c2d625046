"""Manages one job's holders: a monitor for each, and layout records.

Called by `reconcile`: `follow` the fabric and status, `seen` for the snapshot, then seals, drops and the like as
planned. Never blocks the loop; a holder that does not answer delays no other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice

import xxhash

from surefoot.errors import OutOfBounds, ProtocolError, SurefootError
from surefoot.holder import Credentials
from surefoot.protocol import bounds
from surefoot.protocol.checkpoints.completeness import Covers, TierReading, layouts_to_check
from surefoot.protocol.checkpoints.coverage import uncovered
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.checkpoints.settled import Settled
from surefoot.protocol.identities import HOLDER_ORDER, Checkpoint, HolderEndpoint, HolderId, RankSave, ServerId
from surefoot.task_set import TaskSet, logged
from surefoot_operator import metrics
from surefoot_operator.api.status import JobStatus, World
from surefoot_operator.memory.connection_pool import HolderPool
from surefoot_operator.memory.holder_monitor import Changed, HolderMonitor
from surefoot_operator.memory.holder_place import HolderPlace
from surefoot_operator.memory.layout_shelf import LayoutShelf
from surefoot_operator.memory.orphaned_keys import orphaned_keys
from surefoot_operator.memory.server_probe import HolderProbe
from surefoot_operator.observed_tiers import HolderSeen, SightSeen
from surefoot_operator.policy.failure.memory_server_liveness import UsableHolders, usable_holders, with_proxied
from surefoot_operator.policy.maintenance.memory_budget import part_of

log = logging.getLogger(__name__)
MOST_REFUSED = 8
"""Sentences on records that broke a bound; whoever removes them finds the others."""
MOST_COVERS = 256
"""Sets of layouts whose answer is kept though nothing asks for it now."""
_Found = Mapping[RankSave, tuple[str, ...]]
"""Keys without an index entry, by the save that they are of."""


class JobHolders:
    """Monitors one job's holders, in one event loop."""

    def __init__(
        self,
        job: str,
        account: Credentials,
        pool: HolderPool,
        clock: Callable[[], float],
        changed: Changed,
    ) -> None:
        self._job, self._account, self._pool = job, account, pool
        self._clock, self._changed = clock, changed
        self._monitors: dict[ServerId, HolderMonitor] = {}
        self._leaving = TaskSet(logged(log))
        self._gone: dict[HolderId, HolderSeen] = {}
        self._status = JobStatus()
        self._places: Mapping[ServerId, HolderPlace] = {}
        self._max_records = bounds.max_records(0)
        self._servers = 0
        """The most that a node ran so far."""
        self._resting = False
        self._size_limit_bytes: int | None = None
        self._covers: dict[frozenset[str], bool] = {}
        self._wanted: tuple[tuple[object, ...], frozenset[frozenset[str]]] = ((), frozenset())
        self._layouts = LayoutShelf()
        self._named: set[str] = set()
        """Layouts that an index or a listing named when they were looked at last."""
        self._refused_listed: dict[str, str] = {}
        """Layouts of listings that broke a bound, and how."""
        self._found: dict[HolderId, _Found] = {}
        self._cleaned = False

    @property
    def cleaned(self) -> bool:
        """Whether `clean` was called; then no holder is monitored any more."""
        return self._cleaned

    def rest(self, status: JobStatus) -> None:
        """Stops monitoring until `follow` names holders again."""
        self._status = status
        for kept in tuple(self._monitors.values()):
            del self._monitors[kept.place.server_id]
            self._begin_letting_go(kept)
        self._gone.clear()

    def follow(
        self,
        places: Sequence[HolderPlace],
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
        self._pool.follow(places)
        self._places = {place.server_id: place for place in places}
        self._servers = max([self._servers, *(place.server + 1 for place in places)])
        for kept in tuple(self._monitors.values()):
            place = self._places.get(kept.place.server_id)
            replaced = place is not None and not kept.place.same_server(place)
            if replaced or self._is_removed(kept.place.server_id):
                self._retire(kept)
        self._attend()
        self._remember()

    def _attend(self) -> None:
        """Monitors every place, and brings every monitor up to the status."""
        for server, place in self._places.items():
            kept = self._monitors.get(server)
            if kept is None and place.running and not self._cleaned and self._status.world is not None:
                shared = self._pool.of(place)
                probe = HolderProbe(place, shared, self._job, self._account, self._layouts)
                kept = self._monitors[server] = HolderMonitor(place, shared, probe, self._clock, self._changed)
            if kept is not None:
                if not kept.place.same_access(place):
                    kept.renew(place)
                kept.settle(place.settling)
        held = {server: len(k.seen.entries) for server, k in self._monitors.items() if k.seen is not None}
        room = self._max_records - sum(held.values())
        for server, kept in self._monitors.items():
            kept.probe.most_entries = max(0, room + held.get(server, 0))
            kept.probe.size_limit_bytes = part_of(self._size_limit_bytes, kept.place.servers)
            kept.follow(self._status.world, self._resting)

    def seen(self) -> tuple[HolderSeen, ...]:
        """Lists every holder that answered or that status names."""
        kept = self._monitors.values()
        gone = (*self._gone.values(), *(old for k in kept for old in k.replaced))
        known = {h.endpoint.holder: h for h in (*gone, *(k.seen for k in kept if k.seen is not None))}
        for endpoint in self._status.named_holders:
            if endpoint.holder not in known:
                known[endpoint.holder] = self._unheard(endpoint)
        return tuple(known[holder] for holder in sorted(known, key=HOLDER_ORDER))

    def usable(self, epoch: int, sights: Mapping[HolderId, SightSeen]) -> UsableHolders:
        """Lists holders that agents of `epoch` may save to, or read.

        `sights`: what agents saw of those that are silent.
        """
        seen, named = self.seen(), self._status.named_holders
        return with_proxied(usable_holders(seen, named, epoch), seen, named, sights, epoch)

    def seal(self, holder: HolderId, epoch: int) -> bool:
        """Starts to seal this holder and read its index.

        `changed` is called once it is done or failed. Returns whether it is still to be done.
        """
        kept = self._keeper_of(holder)
        return kept is not None and kept.seal(epoch)

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
        holders: Sequence[HolderSeen],
    ) -> Covers:
        """Whether each needed set of layouts covers every tensor once.

        Sets that are not known yet are left out. `holders`: as the plan sees them.
        """
        # summarised once for the same indexes and listing: a round in which an agent spoke looks at none of them
        read = [h for h in holders if h.state in ("Ready", "Proxied")]
        key = (persistent, *((h.endpoint.holder, h.entries) for h in read))
        if not _is_same(key, self._wanted[0]):
            self._named = {m.layout for entries in (persistent, *(h.entries for h in holders)) for m in entries}
            self._layouts.keep(self._named)
            self._refused_listed = {d: why for d, why in self._refused_listed.items() if d in self._named}
            entries = {h.endpoint.holder: h.entries for h in read}
            self._wanted = (key, frozenset(layouts_to_check(TierReading(entries, tuple(persistent)))))
            if len(self._covers) > MOST_COVERS:
                self._covers = {
                    digests: answer for digests, answer in self._covers.items() if digests in self._wanted[1]
                }
        await self._learn({d: text for d, text in layouts.items() if d in self._named and d not in self._layouts})
        wanted = self._wanted[1]
        for digests in wanted - set(self._covers):
            found = [self._layouts[d] for d in sorted(digests) if d in self._layouts]
            if len(found) == len(digests):
                problem = await asyncio.to_thread(uncovered, found)
                self._covers[digests] = problem is None
                if problem is not None:
                    log.warning("a checkpoint is unusable: %s", problem)
        return dict(self._covers)

    async def drop(self, drops: Mapping[HolderId, Sequence[RankSave]], epoch: int, seconds: float) -> None:
        """Drops saves from exactly these instances, within `seconds`.

        What fails is planned again. It ends once the world changes: nothing is dropped while one is Claimed.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds

        def due() -> bool:
            world = self._status.world
            still = world is not None and (world.epoch, world.state) == (epoch, "Committed")
            return still and loop.time() < until

        calls = []
        for holder, saves in drops.items():
            kept = self._keeper_of(holder)
            if kept is None or kept.seen is None:
                continue
            chunks = {m.save: m.chunks for m in kept.seen.entries}
            todo = [(save, chunks[save]) for save in saves if save in chunks]
            calls.append(self._told(kept.place.server_id, "drop", kept.call(kept.probe.drop(holder, todo, epoch, due))))
        await asyncio.gather(*calls)
        for holder in drops:
            kept = self._keeper_of(holder)
            if kept is not None:
                kept.look()

    async def mark(self, checkpoint: Checkpoint, epoch: int) -> None:
        """Writes the watermark to every holder that is sealed at `epoch`."""
        calls = []
        for seen in self.seen():
            kept = self._keeper_of(seen.endpoint.holder)
            if kept is not None and seen.state == "Ready" and (seen.fence or 0) >= epoch:
                work = kept.call(kept.probe.mark(seen.endpoint.holder, checkpoint, epoch))
                calls.append(self._told(kept.place.server_id, "mark", work))
        await asyncio.gather(*calls)

    async def sweep(
        self, watermark: Checkpoint | None, busy: frozenset[RankSave], settled: Collection[Settled] = ()
    ) -> None:
        """Removes data without an index entry that the last sweep found too."""
        world = self._status.world
        if world is None or world.state != "Committed":
            self._found = {}
            return
        superfluous = partial(orphaned_keys, epoch=world.epoch, watermark=watermark, busy=busy, settled=settled)
        calls = [
            self._told(kept.place.server_id, "sweep", self._sweep(kept, world, superfluous))
            for kept in self._monitors.values()
            if kept.seen is not None and kept.seen.state == "Ready" and (kept.seen.fence or 0) >= world.epoch
        ]
        await asyncio.gather(*calls)

    async def clean(self) -> None:
        """Removes the job from every answering holder and stops monitoring."""
        kept = tuple(self._monitors.values())
        for one in kept:
            one.leave()
        await asyncio.gather(*(self._told(one.place.server_id, "clean", one.call(one.probe.clean())) for one in kept))
        self._monitors.clear()
        self._gone.clear()
        self._cleaned = True
        self._changed(True)

    async def close(self) -> None:
        """Ends every task; holders stay as they are.

        It waits for calls under way, within their time limits.
        """
        for kept in self._monitors.values():
            await kept.close()
        await self._leaving.join()
        self._monitors.clear()

    async def _sweep(self, kept: HolderMonitor, world: World, superfluous: Callable[[_Found, _Found], _Found]) -> None:
        assert kept.seen is not None, "only holders that answered are swept"
        holder = kept.seen.endpoint.holder
        found = await kept.call(kept.probe.unindexed())
        left = superfluous(found, self._found.get(holder, {}))
        self._found[holder] = found
        if left and self._status.world == world:
            gone = await kept.call(kept.probe.sweep(holder, left, world.epoch))
            log.info("%s: %d keys without an index entry were removed", holder, gone)

    async def _told(self, server: ServerId, what: str, work: Awaitable[object]) -> None:
        """Carries one call out; a failure is counted and logged, for the next plan asks again."""
        try:
            await work
        except SurefootError as error:
            metrics.holder_failures.labels(what).inc()
            log.warning("%s on %s failed: %s", what, server, error)

    def _keeper_of(self, holder: HolderId) -> HolderMonitor | None:
        """The monitor that saw this very instance last: of its node's few servers one."""
        for number in range(self._servers):
            kept = self._monitors.get(ServerId(holder.node, number))
            if kept is not None and kept.seen is not None and kept.seen.endpoint.holder == holder:
                return kept
        return None

    def _retire(self, kept: HolderMonitor) -> None:
        """The process there ended or was replaced: what it held is gone for good."""
        del self._monitors[kept.place.server_id]
        if kept.seen is not None:
            self._gone[kept.seen.endpoint.holder] = replace(kept.seen, state="Gone", since_seconds=self._clock())
        self._collect(kept)
        self._begin_letting_go(kept)

    def _begin_letting_go(self, kept: HolderMonitor) -> None:
        kept.leave()
        self._leaving.start(kept.close(), f"leaving the holder on {kept.place.server_id}")

    def _collect(self, kept: HolderMonitor) -> None:
        while kept.replaced:
            gone = kept.replaced.pop()
            self._gone[gone.endpoint.holder] = gone

    def _remember(self) -> None:
        """Gone is known of those that status names; of others nobody asks."""
        for one in self._monitors.values():
            self._collect(one)
        named = {endpoint.holder: endpoint for endpoint in self._status.named_holders}
        for holder, endpoint in named.items():
            place, kept = self._places.get(endpoint.server_id), self._monitors.get(endpoint.server_id)
            other = kept is not None and kept.seen is not None and kept.seen.endpoint.holder != holder
            dead = (place is not None and not place.running) or self._is_removed(endpoint.server_id)
            if (other or dead) and holder not in self._gone:
                self._gone[holder] = HolderSeen(endpoint, "Gone", self._clock())
        self._gone = {holder: seen for holder, seen in self._gone.items() if holder in named}

    def _is_removed(self, server: ServerId) -> bool:
        """Whether its node runs fewer servers by now."""
        first = self._places.get(ServerId(server.node, 0))
        return first is not None and first.running and server.number >= first.servers

    async def _learn(self, layouts: Mapping[str, str]) -> None:
        """Layout records that a listing brought; one that is damaged is left out."""
        for digest, text in layouts.items():
            if digest in self._refused_listed:
                continue
            try:
                if xxhash.xxh3_64_hexdigest(text.encode()) == digest:
                    await asyncio.to_thread(self._layouts.add, digest, text)
                    continue
                raise ProtocolError("its bytes do not match its digest")
            except ProtocolError as error:
                if isinstance(error, OutOfBounds):
                    self._refused_listed[digest] = str(error)
                metrics.holder_damaged.inc()
                log.warning("layout %s of the persistent tier is damaged: %s", digest, error)

    def _unheard(self, endpoint: HolderEndpoint) -> HolderSeen:
        """Named in status, and not seen in this term."""
        kept = self._monitors.get(endpoint.server_id)
        silent = HolderSeen(endpoint, "Silent", self._clock_of_world())
        return silent if kept is None else replace(silent, trouble=kept.trouble, refusing=kept.refusing)

    def _clock_of_world(self) -> float:
        world = self._status.world
        now = self._clock()
        return min(world.changed_seconds, now) if world is not None else now  # another leader's clock may be ahead


def _is_same(one: tuple[object, ...], other: tuple[object, ...]) -> bool:
    """Whether these are equal; of equal tuples that are one object nothing is compared."""
    return len(one) == len(other) and all(a is b or a == b for a, b in zip(one, other, strict=True))
