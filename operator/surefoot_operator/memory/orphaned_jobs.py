"""Removes from holders the data of jobs that no longer exist.

The fallback for a deletion that no leader saw, or during which a holder was away. `absences` decides and is pure;
`OrphanSweep` asks the holders and removes. Owned by the leader's `memory_tier_maintenance`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from surefoot.errors import SurefootError
from surefoot.memory_server.provisioning import MemoryServerAdmin
from surefoot_operator import metrics
from surefoot_operator.memory.connection_pool import MemoryServerAddress

log = logging.getLogger(__name__)

PATIENCE_SECONDS = 600.0
"""A job that was missing from every list for so long is gone, and not hidden by an API server that was restored."""
MAX_GAP_SECONDS = 180.0
"""Further apart than this, two lists say nothing about the time between them: counting begins anew."""


@dataclass(frozen=True, slots=True)
class MissingJobs:
    """When each job that holders still know was first missing.

    `listed`: the newest list's time.
    """

    since: Mapping[str, float] = field(default_factory=dict)
    listed: float | None = None


def absences(before: MissingJobs, live: Collection[str], found: Collection[str], now: float) -> MissingJobs:
    """Updates absences with a new list of jobs.

    `live`: every job of a list read through a quorum. `found`: jobs that some holder has keys of.
    """
    known = before.since
    if before.listed is None or now - before.listed > MAX_GAP_SECONDS or now < before.listed:
        known = {}
    return MissingJobs({job: known.get(job, now) for job in sorted(set(found) - set(live))}, now)


def orphaned_jobs(absent: MissingJobs) -> tuple[str, ...]:
    """Lists jobs that were missing long enough to be removed."""
    now = absent.listed
    return tuple(job for job, since in absent.since.items() if now is not None and now - since >= PATIENCE_SECONDS)


class OrphanSweep:
    """Removes orphaned jobs; `user` names a job's account."""

    def __init__(self, user: Callable[[str], str], call_seconds: float, threads: int = 4) -> None:
        self._user, self._call_seconds = user, call_seconds
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="orphans")
        self._absent = MissingJobs()

    async def observe(self, live: Collection[str], places: Sequence[MemoryServerAddress], now: float) -> None:
        """Takes a list of all jobs and removes what is orphaned.

        `live`: uids of every job, listed after the last call. A holder that does not answer is asked again the next
        time.
        """
        running = [place for place in places if place.running]
        found = await asyncio.gather(*(self._on(place, self._jobs) for place in running))
        by_place = dict(zip(running, found, strict=True))
        everywhere = {job for jobs in found for job in jobs}
        self._absent = absences(self._absent, live, everywhere, now)
        gone = set(orphaned_jobs(self._absent))
        metrics.orphans.set(len(self._absent.since))
        for place, jobs in by_place.items():
            for job in sorted(gone.intersection(jobs)):
                if await self._on(place, self._remove, job):
                    log.info("job %s no longer exists: removing its keys on %s", job, place.server_id)

    async def close(self) -> None:
        await asyncio.to_thread(self._pool.shutdown, True)

    async def _on(
        self, place: MemoryServerAddress, work: Callable[..., frozenset[str]], *arguments: str
    ) -> frozenset[str]:
        """Runs `work` with a connection of its own, in a thread; nothing where the holder does not answer."""

        def call() -> frozenset[str]:
            admin = MemoryServerAdmin(place.host, place.port, place.admin_password, self._call_seconds, place.tls_ca)
            try:
                return work(admin, *arguments)
            except SurefootError as error:
                metrics.memory_call_failures.labels("orphans").inc()
                log.info("cannot look for orphaned jobs: %s", error)
                return frozenset()
            finally:
                admin.close()

        return await asyncio.get_running_loop().run_in_executor(self._pool, call)

    @staticmethod
    def _jobs(admin: MemoryServerAdmin) -> frozenset[str]:
        return admin.jobs()

    def _remove(self, admin: MemoryServerAdmin, job: str) -> frozenset[str]:
        admin.remove_job(job, self._user(job))
        return frozenset((job,))
