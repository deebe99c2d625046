"""Decides whether a TrainingJob may be stored.

Asks the API server whether it would take the job's pods; called through `admission_webhooks`. The schema and its CEL rules hold
what they can say; this refuses the rest with the sentence that the job's condition would show later, before a job waits
in a queue to be told.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from surefoot_operator.api.parse import parse_job
from surefoot_operator.api.spec import MANAGER, TrainingJob
from surefoot_operator.controller.admission_review import ALLOWED, Review, Verdict, invalid
from surefoot_operator.errors import FabricError, SpecError
from surefoot_operator.platforms.interface import WorkerEnvironment
from surefoot_operator.platforms.kubernetes import pods
from surefoot_operator.platforms.kubernetes.api_client import Api
from surefoot_operator.platforms.kubernetes.template_dry_run import TemplateDryRun
from surefoot_operator.policy.core.actions import CreateWorker

log = logging.getLogger(__name__)

POD_SECONDS = 1.5
"""How long the API server may take to try a pod: kubectl waits for it, and the job's first plan tries again."""


class JobReviews:
    """Answers for jobs that are created or changed.

    `settings` are those of the workers' pods.
    """

    def __init__(self, api: Api, settings: pods.PodSettings) -> None:
        self._api, self._settings = api, settings

    async def verdict(self, review: Review) -> Verdict:
        """Decides on one job."""
        judged = judged_job(review)
        if not isinstance(judged, TrainingJob):
            return judged
        refusal = await self._refusal(judged)
        return (
            invalid(f"its pods would be refused: {refusal}") if refusal else Verdict(True, warnings=_warnings(judged))
        )

    async def _refusal(self, job: TrainingJob) -> str:
        """What the API server has against a worker's pod; empty: nothing, or it does not say so in time."""
        worker, environment = CreateWorker(0, 1), WorkerEnvironment({}, {})
        try:
            async with asyncio.timeout(POD_SECONDS):
                pod = pods.pod(job, worker, environment, self._settings)
                await TemplateDryRun(self._api).give(job.namespace, pod, job.generation)
        except FabricError as error:
            return str(error) if error.lasting else ""
        except TimeoutError:
            log.info(
                "the pods of job %s/%s were not tried in time; its first plan tries again", job.namespace, job.name
            )
        return ""


def judged_job(review: Review) -> Verdict | TrainingJob:
    """Reads the job, where there is something to judge; else the verdict.

    What leaves the spec as it is passes always: a finalizer, a label or a deletion must not fail for a job that another
    version let in.
    """
    spec: Any = review.body.get("spec")
    metadata = review.body.get("metadata") or {}
    unchanged = review.operation == "UPDATE" and spec == review.old.get("spec")
    if review.operation not in ("CREATE", "UPDATE") or unchanged or metadata.get("deletionTimestamp"):
        return ALLOWED
    if isinstance(spec, dict) and spec.get("managedBy", MANAGER) != MANAGER:
        return ALLOWED
    try:
        return parse_job(_named(review))
    except SpecError as error:
        return invalid(f"the job cannot be run as it is written: {error}")


def _named(review: Review) -> dict[str, Any]:
    """The job under the name that it will have, or one like it."""
    metadata = {"namespace": review.namespace, **(review.body.get("metadata") or {})}
    if not metadata.get("name"):
        metadata["name"] = review.name or f"{metadata.get('generateName', '')}00000"
    return {**review.body, "metadata": metadata}


def _warnings(job: TrainingJob) -> tuple[str, ...]:
    """What is allowed, and costs more than its writer may think."""
    checkpoint = job.spec.checkpoint
    if checkpoint.memory.replicas < 2 and checkpoint.persistent is None:
        return (
            "spec.checkpoint: with one copy in memory and no persistent tier the loss of a node loses every checkpoint; "
            "set memory.replicas to 2, or give it a persistent tier",
        )
    return ()
