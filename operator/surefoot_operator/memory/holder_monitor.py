"""Monitors one holder for one job.

Keeps what is due there, and its state. Has no task and no connection: `memory.connection_pool` visits, and asks what is due. Owned by `memory.job_servers`. Calls
`changed` only for what a plan could read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

from surefoot.errors import AccessRefused, BeingFilled, Fenced, SurefootError, TierUnavailable
from surefoot.holder.provisioning import Memory
from surefoot_operator import metrics
from surefoot_operator.api.status import World
from surefoot_operator.memory.connection_pool import SharedHolder
from surefoot_operator.memory.holder_place import HolderPlace
from surefoot_operator.memory.server_probe import HolderProbe, ProbeRequest, ProbeResult
from surefoot_operator.observed_tiers import HolderSeen

log = logging.getLogger(__name__)
_GRAINS = 100
Changed = Callable[[bool], None]
"""Called after each change; True if a plan should be made at once, False if newer saves alone were read."""
T = TypeVar("T")


class HolderMonitor:
    """Monitors one place for one job, until another process is there."""

    def __init__(
        self,
        place: HolderPlace,
        shared: SharedHolder,
        probe: HolderProbe,
        clock: Callable[[], float],
        changed: Changed,
    ) -> None:
        self.place, self.probe = place, probe
        self.seen: HolderSeen | None = None
        """None until it answered once: then nothing is known of it, not even its name."""
        self.trouble = ""
        """How the last visit failed; empty: it did not."""
        self.refusing = False
        """Whether something answers here that refuses the operator."""
        self.replaced: list[HolderSeen] = []
        """Instances that were here before the present one."""
        self._shared, self._settings = shared, shared.settings
        self._clock, self._changed = clock, changed
        self._world: World | None = None
        self._resting = False
        self._sealing: int | None = None
        self._read_due = 0.0
        self._settles_until = clock() + self._settings.settle_seconds
        self._turn = asyncio.Lock()
        shared.attend(self)

    def settle(self, settling: bool) -> None:
        """Sets whether its pod is not Ready, which delays it briefly."""
        if self.probe.settling and not settling:
            self._shared.wake()
        self.probe.settling = settling and self._clock() < self._settles_until

    def renew(self, place: HolderPlace) -> None:
        """Takes note of another password or authority of the same server."""
        log.info("reconnecting to the holder on %s with new credentials", place.server_id)
        self.place = place

    def follow(self, world: World | None, resting: bool = False) -> None:
        """Takes the stored world; a new one ends the pause between visits."""
        if world != self._world or (self._resting and not resting):
            self._world = world
            self._shared.wake()
        self._resting = resting

    def seal(self, epoch: int) -> bool:
        """Seals at this claimed epoch, then reads, in the next visit.

        Returns whether that is still to come.
        """
        if self.seen is not None and self.seen.read_epoch == epoch:
            return False
        if self._sealing != epoch:
            self._sealing = epoch
            self._shared.wake()
        return True

    def look(self) -> None:
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
        if self._world is None:
            return None  # nothing was ever begun: nothing is to be known here
        return self._settings.rest_seconds if self._resting else self._settings.probe_seconds

    def is_due(self) -> bool:
        """Whether a visit has more to do here than a ping."""
        request = self._request()
        if request is None or self._turn.locked():
            return False
        well = self.seen is not None and self.seen.state == "Ready" and self.probe.is_provisioned
        return request.seal or request.read or not well

    def leave(self) -> None:
        """Ends its part in visits."""
        self._shared.leave(self)

    async def close(self) -> None:
        """Ends its part in visits, and waits for the call under way."""
        self._shared.leave(self)
        async with self._turn:
            pass

    async def visit(self) -> None:
        """Carries out what is due, and takes note of how it went."""
        request = self._request()
        if request is not None:
            await self._once(request)

    def failed(self, error: SurefootError) -> None:
        """The holder does not answer anybody."""
        if self._world is not None:
            self._unwell("refused" if not isinstance(error, TierUnavailable) else "away", error)

    def _request(self) -> ProbeRequest | None:
        world = self._world
        if world is None:
            return None
        claimed = world.state == "Claimed"
        returning = self.seen is None or self.seen.state != "Ready"
        due = self._clock() >= self._read_due or self.seen is None or self.seen.read_epoch != world.epoch or returning
        # while Claimed an index is read only as ordered: a later reading would void the listing
        return ProbeRequest(world.epoch, claimed, claimed and self._sealing == world.epoch, not claimed and due)

    async def _once(self, request: ProbeRequest) -> None:
        try:
            report = await self.call(self.probe.run(request))
        except Fenced as error:
            # a newer leader's epoch rules there: our next write of status will fail, and says so
            self._unwell("fenced", error)
        except BeingFilled as error:
            self._replaced_by(error.instance)
        except TierUnavailable as error:
            self._unwell("away", error)
        except SurefootError as error:
            self._unwell("refused", error)
        except Exception as error:
            log.exception("probing the holder on %s failed", self.place.server_id)
            self._unwell("bug", error)
        else:
            self._well(request, report)

    def _well(self, request: ProbeRequest, report: ProbeResult) -> None:
        self._replaced_by(report.endpoint.holder.instance)
        now, old = self._clock(), self.seen
        self.trouble, self.refusing = "", False
        if old is None or old.state != "Ready":
            log.info("%s answers: fence %d", report.endpoint.holder, report.fence)
        since = old.since_seconds if old is not None and old.state == "Ready" else now
        fresh = HolderSeen(report.endpoint, "Ready", since, fence=report.fence)
        if report.index is not None and report.fence >= request.epoch:
            fresh = replace(fresh, read_epoch=request.epoch, entries=report.index.manifests)
            used, limit = _rounded(report.memory)
            fresh = replace(fresh, used_bytes=used, limit_bytes=limit, closed=report.closed)
            self._read_due = now + self._settings.read_seconds
        elif old is not None:
            fresh = replace(old, endpoint=fresh.endpoint, state="Ready", since_seconds=since, fence=report.fence)
            fresh = replace(fresh, trouble="", refusing=False)
        if request.seal:
            self._sealing = None
        if fresh != self.seen:
            urgent = self.seen is None or fresh != replace(
                self.seen, entries=fresh.entries, used_bytes=fresh.used_bytes, limit_bytes=fresh.limit_bytes
            )
            self.seen = fresh
            self._changed(urgent)

    def _replaced_by(self, instance: str) -> None:
        """Another instance answers here than the one of before: that one is gone, and what it held."""
        if self.seen is not None and self.seen.endpoint.holder.instance != instance:
            self.replaced.append(replace(self.seen, state="Gone", since_seconds=self._clock()))
            self.seen = None
            self._changed(True)

    def _unwell(self, kind: str, error: Exception) -> None:
        metrics.holder_failures.labels(kind).inc()
        refusing = isinstance(error, AccessRefused)
        if refusing and not self.refusing:
            log.warning("the holder on %s refuses the operator: %s", self.place.server_id, error)
        news = refusing != self.refusing
        self.trouble, self.refusing = str(error) or type(error).__name__, refusing
        if self.seen is None:
            if news:
                self._changed(True)
            return
        if self.seen.state == "Ready":
            log.info("%s does not answer: %s", self.seen.endpoint.holder, error)  # the pool warns, once for all jobs
            self.seen = replace(self.seen, state="Silent", since_seconds=self._clock())
            news = True
        self.seen = replace(self.seen, trouble=self.trouble, refusing=refusing)
        if news:
            self._changed(True)


def _rounded(memory: Memory | None) -> tuple[int | None, int | None]:
    """Used and limit; rounded, so that not every byte more is news. A server without a limit has room for anything."""
    if memory is None or not memory.limit_bytes:
        return None, None
    grain = max(1, memory.limit_bytes // _GRAINS)
    return -(-memory.used_bytes // grain) * grain, memory.limit_bytes
