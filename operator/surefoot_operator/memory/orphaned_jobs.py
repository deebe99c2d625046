"""Removes the data of jobs that no longer exist from memory servers.

This is the fallback for a deletion that no leader observed, or during which a server was unreachable. `absences`
decides and is pure. `OrphanSweep` calls the servers. Owned by the leader's `memory_tier_maintenance`.
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

MISSING_SECONDS_UNTIL_REMOVAL = 600.0
"""A job missing from every list for this long no longer exists, and is not hidden by a restored API server."""
MAX_GAP_SECONDS = 180.0
"""Maximum time between two lists. After a longer gap the time between them is unknown, and counting starts over."""


@dataclass(frozen=True, slots=True)
class MissingJobs:
    """Jobs with keys on memory servers that are missing from the list of all jobs."""

    missing_since_seconds: Mapping[str, float] = field(default_factory=dict)
    """By uid: when the job was first missing, in seconds of the caller's clock."""
    list_seconds: float | None = None
    """Time of the newest list; None: no list yet."""


def update_missing_jobs(
    previous: MissingJobs, live: Collection[str], job_uids: Collection[str], now: float
) -> MissingJobs:
    """Updates the missing jobs with a new list.

    Args:
        previous: The missing jobs as of the last list.
        live: Uids of all jobs, from a list read through a quorum.
        job_uids: Uids of the jobs that some memory server has keys of.
        now: Time of the list, in seconds.
    """
    since_seconds = previous.missing_since_seconds
    if previous.list_seconds is None or now - previous.list_seconds > MAX_GAP_SECONDS or now < previous.list_seconds:
        since_seconds = {}
    return MissingJobs({job: since_seconds.get(job, now) for job in sorted(set(job_uids) - set(live))}, now)


def orphaned_jobs(missing_jobs: MissingJobs) -> tuple[str, ...]:
    """Returns the jobs that have been missing for long enough to be removed."""
    now = missing_jobs.list_seconds
    return tuple(
        job
        for job, since_seconds in missing_jobs.missing_since_seconds.items()
        if now is not None and now - since_seconds >= MISSING_SECONDS_UNTIL_REMOVAL
    )


class OrphanSweep:
    """Removes orphaned jobs from memory servers; `user` returns the name of a job's account."""

    def __init__(self, user: Callable[[str], str], call_seconds: float, threads: int = 4) -> None:
        self._user, self._call_seconds = user, call_seconds
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="orphans")
        self._missing_jobs = MissingJobs()

    async def remove_orphans(self, live: Collection[str], addresses: Sequence[MemoryServerAddress], now: float) -> None:
        """Takes a list of all jobs and removes the orphaned ones.

        Servers that do not answer are retried the next time.

        Args:
            live: Uids of all jobs, from a list that started after the last call.
            addresses: Addresses of all memory servers.
            now: Time of the list, in seconds.
        """
        running = [address for address in addresses if address.running]
        jobs_by_server = await asyncio.gather(*(self._call_server(address, self._list_jobs) for address in running))
        jobs_by_address = dict(zip(running, jobs_by_server, strict=True))
        all_job_uids = {job for jobs in jobs_by_server for job in jobs}
        self._missing_jobs = update_missing_jobs(self._missing_jobs, live, all_job_uids, now)
        orphans = set(orphaned_jobs(self._missing_jobs))
        metrics.orphans.set(len(self._missing_jobs.missing_since_seconds))
        for address, jobs in jobs_by_address.items():
            for job in sorted(orphans.intersection(jobs)):
                if await self._call_server(address, self._remove_job, job):
                    log.info("job %s no longer exists: removed its keys on %s", job, address.server_id)

    async def close(self) -> None:
        """Waits for the calls in progress and ends the threads."""
        await asyncio.to_thread(self._pool.shutdown, True)

    async def _call_server(
        self, address: MemoryServerAddress, work: Callable[..., frozenset[str]], *arguments: str
    ) -> frozenset[str]:
        """Runs `work` with its own connection, in a thread; returns nothing if the server does not answer."""

        def call() -> frozenset[str]:
            admin = MemoryServerAdmin(
                address.host, address.port, address.admin_password, self._call_seconds, address.tls_ca
            )
            try:
                return work(admin, *arguments)
            except SurefootError as error:
                metrics.memory_call_failures.labels("orphans").inc()
                log.info("cannot check this memory server for orphaned jobs, retrying later: %s", error)
                return frozenset()
            finally:
                admin.close()

        return await asyncio.get_running_loop().run_in_executor(self._pool, call)

    @staticmethod
    def _list_jobs(admin: MemoryServerAdmin) -> frozenset[str]:
        return admin.list_jobs()

    def _remove_job(self, admin: MemoryServerAdmin, job: str) -> frozenset[str]:
        admin.remove_job(job, self._user(job))
        return frozenset((job,))
