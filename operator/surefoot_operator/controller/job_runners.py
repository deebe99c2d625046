"""Starts and stops a runner for each job in the cache.

Level-triggered; called by the composition root.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from surefoot.task_set import TaskSet, logged
from surefoot_operator import metrics
from surefoot_operator.api.spec import MANAGER
from surefoot_operator.controller.job_runner import JobKey, JobRunner, Shared
from surefoot_operator.policy.maintenance.memory_tier_rollout import JobSafety

log = logging.getLogger(__name__)

Object = Mapping[str, Any]
RESYNC_SECONDS = 30.0
GATHERING_SECONDS = 0.1


def every_job(uid: str) -> bool:
    """Takes any job: there is one shard."""
    return True


def looked_after(
    jobs: Iterable[Object], only_namespace: str = "", in_shard: Callable[[str], bool] = every_job
) -> frozenset[JobKey]:
    """Selects the jobs of a shard that name no other manager."""
    ours = (job for job in jobs if job.get("spec", {}).get("managedBy", MANAGER) == MANAGER)
    keys = (key for key in map(_key, ours) if only_namespace in ("", key.namespace))
    return frozenset(key for key in keys if in_shard(key.uid))


def _key(job: Object) -> JobKey:
    metadata = job["metadata"]
    return JobKey(metadata["namespace"], metadata["name"], metadata["uid"])


class JobRunners:
    """The runners of a shard's jobs while this replica leads it.

    `wake` may be called at any time, in one event loop.
    """

    def __init__(self, shared: Shared, only_namespace: str = "", in_shard: Callable[[str], bool] = every_job) -> None:
        self._shared, self._only_namespace, self._in_shard = shared, only_namespace, in_shard
        self._runners: dict[JobKey, JobRunner] = {}
        self._ending = TaskSet(logged(log))
        self._leading = False
        self._soon: asyncio.TimerHandle | None = None

    @property
    def running(self) -> frozenset[JobKey]:
        return frozenset(self._runners)

    def round_seconds(self) -> dict[str, float]:
        """Age of each job's reconcile under way; 0 between two."""
        return {str(key): runner.round_seconds for key, runner in self._runners.items()}

    def safeties(self) -> tuple[JobSafety, ...]:
        """What each job says about restarting a holder."""
        return tuple(runner.safety for runner in self._runners.values())

    def departure(self, node: str) -> str:
        """Says what some job loses with a node; empty: nothing."""
        said = ((key, runner.departure(node)) for key, runner in self._runners.items())
        return next((f"job {key}: {why}" for key, why in said if why), "")

    def start(self) -> None:
        """Begins to lead: starts a runner for every cached job."""
        self._leading = True
        self._shared.cache.listen("trainingjobs", self._heard)
        self.wake()

    def wake(self) -> None:
        """Starts missing runners and stops those whose job is gone."""
        if not self._leading:
            return
        wanted = looked_after(self._shared.cache.jobs.items.values(), self._only_namespace, self._in_shard)
        for key in self._runners.keys() - wanted:
            self._end(self._runners.pop(key))
        for key in sorted(wanted - self._runners.keys(), key=str):
            self._begin(key)

    def wake_soon(self) -> None:
        """Wakes once for many calls: every status write is one."""
        if self._leading and self._soon is None:
            self._soon = asyncio.get_running_loop().call_later(GATHERING_SECONDS, self._woken)

    def _woken(self) -> None:
        self._soon = None
        self.wake()

    async def resync(self) -> None:
        """Wakes every half minute until cancelled, in case events were missed."""
        while True:
            await asyncio.sleep(RESYNC_SECONDS * random.uniform(0.75, 1.0))
            self.wake()

    async def close(self) -> None:
        """Stops every runner and leaves the jobs as they are."""
        if self._leading:
            self._shared.cache.unlisten("trainingjobs", self._heard)
        self._leading = False
        if self._soon is not None:
            self._soon.cancel()
        await asyncio.gather(*(runner.stop(gone=False) for runner in self._runners.values()), return_exceptions=True)
        self._runners.clear()
        await self._ending.join()

    def _heard(self, old: Object | None, new: Object | None) -> None:
        if old is None or new is None or old["metadata"]["uid"] != new["metadata"]["uid"]:
            self.wake()

    def _begin(self, key: JobKey) -> None:
        try:
            runner = JobRunner(key, self._shared)
        except Exception:
            # one job must not keep the others from being looked after; it is tried again at the next wake
            metrics.reconcile_failures.labels("begin").inc()
            log.exception("could not start the runner of job %s", key)
            return
        self._runners[key] = runner
        runner.start()

    def _end(self, runner: JobRunner) -> None:
        self._ending.start(runner.stop(gone=True), f"end {runner.key}")
