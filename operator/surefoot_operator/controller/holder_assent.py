"""Notes on a shard's lease whether its jobs can spare a holder.

Run while a replica leads a shard other than 0. Whoever rolls out the memory tier leads shard 0 and knows its own jobs
alone; without this it would restart the holder that another shard's job cannot lose. Only names of the pods that were
judged are noted, so that no assent outlives them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from surefoot_operator import metrics
from surefoot_operator.api.spec import GROUP
from surefoot_operator.controller.job_runner import Shared
from surefoot_operator.controller.tier_pods import tier_pods
from surefoot_operator.errors import FabricError
from surefoot_operator.policy.maintenance.memory_tier_rollout import JobSafety, ready_holders, why_unsafe

log = logging.getLogger(__name__)

ASSENTS = f"{GROUP}/holders-assent"
"""Digest of the holders of which the shard's jobs can spare any."""
OBJECTS = f"{GROUP}/holders-needed"
"""Why they cannot."""
ROUND_SECONDS = 3.0
LASTING_SECONDS = 10.0
"""What was noted so long ago is noted no more."""
_LONGEST = 200


class HolderAssent:
    """Judges the memory tier for the jobs of one shard, until cancelled."""

    def __init__(
        self, shared: Shared, namespace: str, daemon_set: str, safeties: Callable[[], tuple[JobSafety, ...]]
    ) -> None:
        self._shared, self._namespace, self._daemon_set = shared, namespace, daemon_set
        self._safeties = safeties
        self._noted: tuple[float, dict[str, str]] = (float("-inf"), {})

    def notes(self) -> Mapping[str, str]:
        """The last judgement, while it counts."""
        at, notes = self._noted
        return notes if time.monotonic() - at < LASTING_SECONDS else {}

    async def run(self) -> None:
        while True:
            try:
                await self.once()
            except FabricError as error:
                metrics.reconcile_failures.labels("rollout").inc()
                log.info("cannot judge whether jobs can spare a holder: %s", error)
            await asyncio.sleep(ROUND_SECONDS)

    async def once(self) -> None:
        """Judges the holders that are there now. Raises FabricError."""
        jobs = self._safeties()
        tier = await tier_pods(self._shared.cache, self._namespace, self._daemon_set)
        if tier is None:
            self._noted = (time.monotonic(), {})
            return
        why = why_unsafe(tier.pods, jobs, self._shared.clock())
        notes = {OBJECTS: why[:_LONGEST]} if why else {ASSENTS: ready_holders(tier.pods)}
        self._noted = (time.monotonic(), notes)


def objection(shard: int, holder: str, notes: Mapping[str, str], ready: str) -> str:
    """Says why a shard's leader lets no holder be restarted.

    Empty: it lets one be. `ready`: digest of the holders that are there now.
    """
    if not holder:
        return f"nobody leads shard {shard}, whose jobs may need every holder"
    if OBJECTS in notes:
        return notes[OBJECTS]
    if notes.get(ASSENTS) != ready:
        return f"{holder} has not said yet whether the jobs of shard {shard} can spare a holder"
    return ""
