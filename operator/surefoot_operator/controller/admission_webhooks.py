"""Assembles the admission side of one replica.

Made by the composition root where the chart enables it. Every replica answers for jobs; for evictions the one that leads
their shard, which the Service in front of it selects: the API server asks each shard's, and any of them may refuse.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import ssl
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from surefoot.task_set import repeat
from surefoot_operator.api.parse import parse_job
from surefoot_operator.api.spec import MANAGER, TrainingJob
from surefoot_operator.controller import process_metrics
from surefoot_operator.controller.cluster_settings import ClusterSettings
from surefoot_operator.controller.credentials.certificates import CoordinatorTls
from surefoot_operator.controller.health_endpoints import HttpListener
from surefoot_operator.controller.job_runner import SharedResources
from surefoot_operator.errors import OperatorError, PlatformError, SpecError
from surefoot_operator.platforms.interface import WorkerEnvironment
from surefoot_operator.platforms.kubernetes import api_objects, pods
from surefoot_operator.platforms.kubernetes.api_client import Api
from surefoot_operator.platforms.kubernetes.platform import TemplateDryRun
from surefoot_operator.platforms.kubernetes.views.observations import is_cordoned_or_evacuated, node_of
from surefoot_operator.policy.core.actions import CreateWorker

log = logging.getLogger(__name__)


# ---- webhook trust ---------------------------------------------------------------------------------------------------
# Keeps our authority in the webhooks' configuration. Touches the API server; run by the composition root while it
# leads. The chart makes the configuration and cannot know the authority, which the operator makes itself. Without it
# the API server trusts no answer, and lets everything in.

CONFIGURATIONS = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"
POLL_SECONDS = 60.0
"""A release that is upgraded may write the configuration anew, without the authority."""
RETRY_SECONDS = 2.0


def ca_bundle_patch(configuration: Mapping[str, Any], authority: str) -> list[dict[str, Any]]:
    """Makes the JSON patch that has webhooks trust `authority`.

    Empty: they do. It tests the version: a release that is upgraded meanwhile may number its webhooks otherwise.
    """
    wanted = base64.b64encode(authority.encode()).decode()
    version = configuration.get("metadata", {}).get("resourceVersion")
    bundles = [
        {"op": "add", "path": f"/webhooks/{index}/clientConfig/caBundle", "value": wanted}
        for index, webhook in enumerate(configuration.get("webhooks") or ())
        if webhook["clientConfig"].get("caBundle") != wanted
    ]
    return [{"op": "test", "path": "/metadata/resourceVersion", "value": version}, *bundles] if bundles else []


class CaBundleUpdater:
    """Keeps one configuration trusting `authority`.

    It is PEM; an empty one is left to whoever brought the certificate.
    """

    def __init__(self, api: Api, name: str, authority: Callable[[], str]) -> None:
        self._api, self._path, self._authority = api, f"{CONFIGURATIONS}/{name}", authority

    async def run(self) -> None:
        """Looks each minute, until cancelled. A failure is logged and retried."""
        await repeat(self._try_once)

    async def _try_once(self) -> float:
        try:
            await self.update_once()
        except PlatformError as error:
            log.warning("the admission webhooks do not trust this operator yet: %s", error)
            return RETRY_SECONDS
        return POLL_SECONDS

    async def update_once(self) -> None:
        """Patches the configuration where it needs that. Raises FabricError."""
        authority = self._authority()
        if not authority:
            return
        operations = ca_bundle_patch(await self._api.get(self._path), authority)
        if operations:
            await self._api.patch(self._path, operations)
            log.info("the admission webhooks %s trust this operator's authority", self._path.rsplit("/", 1)[1])


# ---- admission review ------------------------------------------------------------------------------------------------
# Reads an AdmissionReview and makes its answer. Pure; the format is `admission.k8s.io/v1`. What cannot be read is
# refused as a bad request, which the API server answers by the webhook's failure policy: nothing is let in or kept out
# by a guess.

API_VERSION = "admission.k8s.io/v1"
Object = Mapping[str, Any]


class InvalidAdmissionReview(OperatorError):
    """What was posted is no AdmissionReview that this version knows."""


@dataclass(frozen=True, slots=True)
class AdmissionRequest:
    """One question of the API server."""

    uid: str
    operation: str
    """CREATE, UPDATE, DELETE or CONNECT."""
    namespace: str
    name: str
    """Empty where the server will make one from `generateName`."""
    body: Object = field(default_factory=dict)
    """As it would be stored."""
    old: Object = field(default_factory=dict)
    """As it is stored; empty for what is created."""


@dataclass(frozen=True, slots=True)
class AdmissionResponse:
    """An answer, with the sentences that people get with it."""

    allowed: bool
    message: str = ""
    """Why it is not."""
    code: int = 200
    reason: str = ""
    """As Kubernetes names it, of a refusal."""
    warnings: tuple[str, ...] = ()
    """Shown by kubectl beside what is let in."""


ALLOWED = AdmissionResponse(True)


def reject(message: str) -> AdmissionResponse:
    """Refuses what is never right; nobody should send it again unchanged."""
    return AdmissionResponse(False, message, 422, "Invalid")


def reject_for_now(message: str) -> AdmissionResponse:
    """Refuses for now, as a PodDisruptionBudget does: drains and autoscalers ask again."""
    return AdmissionResponse(False, message, 429, "TooManyRequests")


def read_review(document: object) -> AdmissionRequest:
    """Reads what the API server posts. Raises BadReview."""
    request = document.get("request") if isinstance(document, Mapping) else None
    if not isinstance(request, Mapping) or document.get("apiVersion") != API_VERSION:  # type: ignore[attr-defined]
        raise InvalidAdmissionReview(f"an AdmissionReview of {API_VERSION} with a request is needed")
    texts = [request.get(name) or "" for name in ("uid", "operation", "namespace", "name")]
    bodies = [request.get(name) or {} for name in ("object", "oldObject")]
    if not all(isinstance(text, str) for text in texts) or not texts[0]:
        raise InvalidAdmissionReview(
            "uid, operation, namespace and name of the request are no texts, or the uid is empty"
        )
    if not all(isinstance(body, Mapping) for body in bodies):
        raise InvalidAdmissionReview("object and oldObject of the request are no objects")
    uid, operation, namespace, name = texts
    return AdmissionRequest(uid, operation, namespace, name, *bodies)


def build_response(review: AdmissionRequest, verdict: AdmissionResponse) -> dict[str, Any]:
    """Makes the AdmissionReview to answer with."""
    response: dict[str, Any] = {"uid": review.uid, "allowed": verdict.allowed}
    if verdict.warnings:
        response["warnings"] = list(verdict.warnings)
    if not verdict.allowed:
        response["status"] = {
            "status": "Failure",
            "message": verdict.message,
            "code": verdict.code,
            "reason": verdict.reason,
        }
    return {"apiVersion": API_VERSION, "kind": "AdmissionReview", "response": response}


# ---- admission server ------------------------------------------------------------------------------------------------
# Serves admission webhooks over HTTPS. Listens; run by the composition root. A verdict that cannot be made is answered
# with an error, and the webhook's failure policy lets the change in: this server being away or wrong keeps nobody from
# working.

MAX_BYTES = 8 * 1024 * 1024
"""Of a review: the old and the new object, of 1.5 MiB at most each in etcd, and more as JSON."""
Decide = Callable[[AdmissionRequest], Awaitable[AdmissionResponse]]


class AdmissionServer:
    """Answers each of `paths` by its function, until closed."""

    def __init__(self, port: int, context: ssl.SSLContext | None, paths: Mapping[str, Decide]) -> None:
        self._listener, self._paths = HttpListener(port, context), paths

    @property
    def port(self) -> int:
        return self._listener.port

    async def start(self) -> None:
        """Listens. Raises OSError if the port is taken."""
        app = web.Application(client_max_size=MAX_BYTES)
        for path in self._paths:
            app.router.add_post(path, self._answer)
        await self._listener.start(app)

    async def close(self) -> None:
        await self._listener.close()

    async def _answer(self, request: web.Request) -> web.Response:
        path = request.path
        try:
            review = read_review(await request.json())
            verdict = await self._paths[path](review)
        except (InvalidAdmissionReview, ValueError) as error:
            process_metrics.admission_reviews.labels(path, "unreadable").inc()
            return web.Response(status=400, text=f"{error}\n")
        except web.HTTPException:
            raise  # the body is too large
        except Exception:
            # whatever it was, the failure policy decides instead of a handler that broke
            process_metrics.admission_reviews.labels(path, "failed").inc()
            log.exception("a review of %s failed", path)
            return web.Response(status=500, text="the review failed; the operator's log says why\n")
        process_metrics.admission_reviews.labels(path, "allowed" if verdict.allowed else "rejected").inc()
        return web.json_response(build_response(review, verdict))


# ---- eviction review -------------------------------------------------------------------------------------------------
# Decides whether a worker's pod may be evicted now. Asks the API server for the pod's node; called by the webhook on
# the replica that leads. A node that is cordoned is switched off once its pods are gone. Until what only its holder
# keeps is elsewhere an eviction is refused as by a PodDisruptionBudget: `kubectl drain`, autoscalers and upgrades ask
# again.

NODE_SECONDS = 1.0
"""How long the API server may take to tell a node: the eviction waits for it."""
Key = tuple[str, str]


class EvictionReviewer:
    """Answers for the jobs that this replica leads.

    Of others it knows nothing, and lets them pass. `departure` says what is lost with a node; `pods` and `nodes` by namespace and name, as cached now.
    """

    def __init__(
        self, api: Api, pods: Mapping[Key, Any], nodes: Mapping[Key, Any], departure: Callable[[str], str]
    ) -> None:
        self._api, self._pods, self._nodes, self._data_lost_with_node = api, pods, nodes, departure

    async def review(self, review: AdmissionRequest) -> AdmissionResponse:
        """Decides on one eviction."""
        pod = self._pods.get((review.namespace, review.name))
        if pod is None or api_objects.controller_of(pod) is None or pod["metadata"].get("deletionTimestamp"):
            return ALLOWED
        node = node_of(pod)
        if node is None or not await self._is_being_evacuated(node):
            return ALLOWED
        why = self._data_lost_with_node(node)
        if not why:
            return ALLOWED
        process_metrics.evictions_refused.inc()
        log.info("the eviction of %s/%s from node %s waits: %s", review.namespace, review.name, node, why)
        return reject_for_now(
            f"node {node} may not be left yet: {why}; the eviction succeeds once that is over "
            f"(kubectl delete pod {review.name} does not wait, and may lose it)"
        )

    async def _is_being_evacuated(self, node: str) -> bool:
        """Asks the server itself: a drain evicts in the moment in which it cordons, before any watch has told."""
        try:
            async with asyncio.timeout(NODE_SECONDS):
                found: dict[str, Any] = await self._api.get(f"/api/v1/nodes/{node}")
        except (PlatformError, TimeoutError) as error:
            log.warning("cannot read node %s for an eviction, going by what is cached: %s", node, error or "time-out")
            found = self._nodes.get(("", node), {"metadata": {}, "spec": {}})
        return is_cordoned_or_evacuated(found)


# ---- job review ------------------------------------------------------------------------------------------------------
# Decides whether a TrainingJob may be stored. Asks the API server whether it would take the job's pods; called by the
# webhook. The schema and its CEL rules hold what they can say; this refuses the rest with the sentence that the job's
# condition would show later, before a job waits in a queue to be told.

POD_SECONDS = 1.5
"""How long the API server may take to try a pod: kubectl waits for it, and the job's first plan tries again."""


class JobReviewer:
    """Answers for jobs that are created or changed.

    `settings` are those of the workers' pods.
    """

    def __init__(self, api: Api, settings: pods.PodSettings) -> None:
        self._api, self._settings = api, settings

    async def review(self, review: AdmissionRequest) -> AdmissionResponse:
        """Decides on one job."""
        judged = judged_job(review)
        if not isinstance(judged, TrainingJob):
            return judged
        refusal = await self._rejection(judged)
        return (
            reject(f"its pods would be refused: {refusal}")
            if refusal
            else AdmissionResponse(True, warnings=_warnings(judged))
        )

    async def _rejection(self, job: TrainingJob) -> str:
        """What the API server has against a worker's pod; empty: nothing, or it does not say so in time."""
        worker, environment = CreateWorker(0, 1), WorkerEnvironment({}, {})
        try:
            async with asyncio.timeout(POD_SECONDS):
                pod = pods.build_pod(job, worker, environment, self._settings)
                await TemplateDryRun(self._api).give(job.namespace, pod, job.metadata_generation)
        except PlatformError as error:
            return str(error) if error.permanent else ""
        except TimeoutError:
            log.info(
                "the pods of job %s/%s were not tried in time; its first plan tries again", job.namespace, job.name
            )
        return ""


def judged_job(review: AdmissionRequest) -> AdmissionResponse | TrainingJob:
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
        return parse_job(_job_with_name(review))
    except SpecError as error:
        return reject(f"the job cannot be run as it is written: {error}")


def _job_with_name(review: AdmissionRequest) -> dict[str, Any]:
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


# ---- admission webhooks ----------------------------------------------------------------------------------------------

JOBS_PATH, EVICTIONS_PATH = "/v1/admission/trainingjobs", "/v1/admission/evictions"


class Webhooks:
    """Serves both webhooks; `keep_trusted` runs while this replica leads shard 0."""

    def __init__(
        self,
        api: Api,
        shared: SharedResources,
        departure: Callable[[str], str],
        tls: CoordinatorTls | None,
        settings: ClusterSettings,
    ) -> None:
        jobs = JobReviewer(api, shared.pods)
        evictions = EvictionReviewer(api, shared.cache.workers.items, shared.cache.nodes.items, departure)
        paths = {JOBS_PATH: jobs.review, EVICTIONS_PATH: evictions.review}
        self._server = AdmissionServer(settings.admission_port, tls.context if tls is not None else None, paths)
        authority = (lambda: tls.authority) if tls is not None else (lambda: "")
        self._trust = CaBundleUpdater(api, settings.admission_webhooks, authority)

    @property
    def port(self) -> int:
        return self._server.port

    async def start(self) -> None:
        """Listens. Raises OSError if the port is taken."""
        await self._server.start()
        log.info("admission webhooks on port %d", self.port)

    async def keep_ca_bundle_current(self) -> None:
        """Keeps our authority in the webhooks' configuration, until cancelled."""
        await self._trust.run()

    async def close(self) -> None:
        await self._server.close()
