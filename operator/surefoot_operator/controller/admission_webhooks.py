"""Assembles the admission webhooks of one replica.

Created by the composition root if the chart enables them. Every replica reviews jobs. Evictions are reviewed by the
leader of each shard, which the Service in front of it selects: the API server asks every shard, and any may reject.
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

from surefoot.task_set import repeat_until_cancelled
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
# Keeps the operator's CA certificate in the webhooks' configuration. Touches the API server; run by the composition
# root while it leads. The chart creates the configuration without the certificate, which the operator creates itself.
# Without it the API server trusts no response of the webhooks and, by their failure policy, admits everything.

CONFIGURATIONS = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"
CA_BUNDLE_POLL_SECONDS = 60.0
"""An upgrade of the release may overwrite the configuration, without the certificate."""
CA_BUNDLE_RETRY_SECONDS = 2.0
"""Wait after a failed check."""


def ca_bundle_patch(configuration: Mapping[str, Any], authority: str) -> list[dict[str, Any]]:
    """Builds the JSON patch that makes the webhooks trust this CA certificate; empty: they trust it already.

    It tests the version, because an upgrade of the release may renumber the webhooks in between.

    Args:
        configuration: The ValidatingWebhookConfiguration as read.
        authority: CA certificate in PEM.
    """
    ca_bundle = base64.b64encode(authority.encode()).decode()
    version = configuration.get("metadata", {}).get("resourceVersion")
    bundles = [
        {"op": "add", "path": f"/webhooks/{index}/clientConfig/caBundle", "value": ca_bundle}
        for index, webhook in enumerate(configuration.get("webhooks") or ())
        if webhook["clientConfig"].get("caBundle") != ca_bundle
    ]
    return [{"op": "test", "path": "/metadata/resourceVersion", "value": version}, *bundles] if bundles else []


class CaBundleUpdater:
    """Keeps a CA certificate in one webhook configuration.

    Args:
        api: Writes only while this replica leads.
        name: Name of the ValidatingWebhookConfiguration.
        authority: Returns the certificate in PEM; empty: it came from elsewhere, and its issuer configures the
        webhooks.
    """

    def __init__(self, api: Api, name: str, authority: Callable[[], str]) -> None:
        self._api, self._path, self._authority = api, f"{CONFIGURATIONS}/{name}", authority

    async def run(self) -> None:
        """Checks every minute, until cancelled. A failure is logged and retried."""
        await repeat_until_cancelled(self._try_once)

    async def _try_once(self) -> float:
        try:
            await self.update_once()
        except PlatformError as error:
            log.warning(
                "cannot set the admission webhooks' CA certificate, retrying; the API server skips them: %s", error
            )
            return CA_BUNDLE_RETRY_SECONDS
        return CA_BUNDLE_POLL_SECONDS

    async def update_once(self) -> None:
        """Patches the configuration if necessary. Raises PlatformError."""
        ca_certificate = self._authority()
        if not ca_certificate:
            return
        operations = ca_bundle_patch(await self._api.get(self._path), ca_certificate)
        if operations:
            await self._api.patch(self._path, operations)
            log.info("set the CA certificate of the admission webhooks %s", self._path.rsplit("/", 1)[1])


# ---- admission review ------------------------------------------------------------------------------------------------
# Reads an AdmissionReview and builds its response. Pure; the format is `admission.k8s.io/v1`. An unreadable review is
# rejected as a bad request. The API server then applies the webhook's failure policy, so nothing is admitted or
# rejected by a guess.

API_VERSION = "admission.k8s.io/v1"
Object = Mapping[str, Any]
"""A Kubernetes object as JSON."""


class InvalidAdmissionReview(OperatorError):
    """The request body is not an AdmissionReview of a known version."""


@dataclass(frozen=True, slots=True)
class AdmissionRequest:
    """A request of the API server to admit one operation."""

    uid: str
    """Identifies the review; the response must repeat it."""
    operation: str
    """CREATE, UPDATE, DELETE or CONNECT."""
    namespace: str
    """Namespace of the object."""
    name: str
    """Name of the object; empty if the server will generate it from `generateName`."""
    new_object: Object = field(default_factory=dict)
    """The object as it would be stored; empty for a deletion."""
    old_object: Object = field(default_factory=dict)
    """The object as it is stored; empty for a creation."""


@dataclass(frozen=True, slots=True)
class AdmissionResponse:
    """The response to one request, with the messages that users get."""

    allowed: bool
    """Whether the operation is admitted."""
    message: str = ""
    """Why the operation is rejected; empty if it is allowed."""
    status_code: int = 200
    """HTTP status of a rejection."""
    reason: str = ""
    """Kubernetes' reason for a rejection, such as `Invalid`; empty if the operation is allowed."""
    warnings: tuple[str, ...] = ()
    """Messages that kubectl shows for an allowed operation."""


ALLOWED = AdmissionResponse(True)


def reject(message: str) -> AdmissionResponse:
    """Rejects an operation that must be changed before it is sent again."""
    return AdmissionResponse(False, message, 422, "Invalid")


def reject_for_now(message: str) -> AdmissionResponse:
    """Rejects for now, as a PodDisruptionBudget does: `kubectl drain` and autoscalers retry."""
    return AdmissionResponse(False, message, 429, "TooManyRequests")


def parse_review(document: object) -> AdmissionRequest:
    """Reads an AdmissionReview that the API server sent. Raises InvalidAdmissionReview."""
    request = document.get("request") if isinstance(document, Mapping) else None
    if not isinstance(request, Mapping) or document.get("apiVersion") != API_VERSION:  # type: ignore[attr-defined]
        raise InvalidAdmissionReview(f"the request body must be an AdmissionReview of {API_VERSION} with a request")
    texts = [request.get(name) or "" for name in ("uid", "operation", "namespace", "name")]
    bodies = [request.get(name) or {} for name in ("object", "oldObject")]
    if not all(isinstance(text, str) for text in texts) or not texts[0]:
        raise InvalidAdmissionReview(
            "uid, operation, namespace and name of the request must be strings, and the uid must not be empty"
        )
    if not all(isinstance(body, Mapping) for body in bodies):
        raise InvalidAdmissionReview("object and oldObject of the request must be objects")
    uid, operation, namespace, name = texts
    return AdmissionRequest(uid, operation, namespace, name, *bodies)


def build_response(review: AdmissionRequest, verdict: AdmissionResponse) -> dict[str, Any]:
    """Builds the AdmissionReview of the response."""
    response: dict[str, Any] = {"uid": review.uid, "allowed": verdict.allowed}
    if verdict.warnings:
        response["warnings"] = list(verdict.warnings)
    if not verdict.allowed:
        response["status"] = {
            "status": "Failure",
            "message": verdict.message,
            "code": verdict.status_code,
            "reason": verdict.reason,
        }
    return {"apiVersion": API_VERSION, "kind": "AdmissionReview", "response": response}


# ---- admission server ------------------------------------------------------------------------------------------------
# Serves the admission webhooks over HTTPS. Listens; run by the composition root. If a review fails, the response is an
# error, and the webhook's failure policy admits the operation: a broken or absent server blocks no user.

MAX_REVIEW_BYTES = 8 * 1024 * 1024
"""Maximum size of a review: the old and the new object, each at most 1.5 MiB in etcd and larger as JSON."""
Decide = Callable[[AdmissionRequest], Awaitable[AdmissionResponse]]
"""Decides about one request."""


class AdmissionServer:
    """Serves each of `paths` with its function, until closed."""

    def __init__(self, port: int, context: ssl.SSLContext | None, paths: Mapping[str, Decide]) -> None:
        self._listener, self._paths = HttpListener(port, context), paths

    @property
    def port(self) -> int:
        return self._listener.port

    async def start(self) -> None:
        """Starts to listen. Raises OSError if the port is taken."""
        app = web.Application(client_max_size=MAX_REVIEW_BYTES)
        for path in self._paths:
            app.router.add_post(path, self._handle_review)
        await self._listener.start(app)

    async def close(self) -> None:
        await self._listener.close()

    async def _handle_review(self, request: web.Request) -> web.Response:
        path = request.path
        try:
            review = parse_review(await request.json())
            verdict = await self._paths[path](review)
        except (InvalidAdmissionReview, ValueError) as error:
            process_metrics.admission_reviews.labels(path, "unreadable").inc()
            return web.Response(status=400, text=f"{error}\n")
        except web.HTTPException:
            raise  # the body is too large
        except Exception:
            # Respond with an error, so that the failure policy decides instead of a broken handler.
            process_metrics.admission_reviews.labels(path, "failed").inc()
            log.exception("the admission review of %s failed; the webhook's failure policy decides", path)
            return web.Response(status=500, text="the review failed; see the operator's log\n")
        process_metrics.admission_reviews.labels(path, "allowed" if verdict.allowed else "rejected").inc()
        return web.json_response(build_response(review, verdict))


# ---- eviction review -------------------------------------------------------------------------------------------------
# Decides whether a worker's pod may be evicted now. Asks the API server for the pod's node; called by the webhook on
# the leading replica. A cordoned node is switched off once its pods are gone. While only its memory server has the
# newest copy of some data, evictions are rejected as by a PodDisruptionBudget: `kubectl drain`, autoscalers and
# upgrades retry.

NODE_READ_TIMEOUT_SECONDS = 1.0
"""Timeout for reading the node, during which the eviction waits."""
_NamespacedName = tuple[str, str]
"""Namespace and name of an object."""


class EvictionReviewer:
    """Reviews evictions of workers of the jobs that this replica leads; other evictions are allowed.

    Args:
        api: Reads nodes.
        pods: Cached pods by namespace and name.
        nodes: Cached nodes by namespace (empty) and name.
        departure: Describes the data that some job would lose with a node; empty: none.
    """

    def __init__(
        self,
        api: Api,
        pods: Mapping[_NamespacedName, Any],
        nodes: Mapping[_NamespacedName, Any],
        departure: Callable[[str], str],
    ) -> None:
        self._api, self._pods, self._nodes, self._data_lost_with_node = api, pods, nodes, departure

    async def review_eviction(self, review: AdmissionRequest) -> AdmissionResponse:
        """Decides about one eviction."""
        pod = self._pods.get((review.namespace, review.name))
        if pod is None or api_objects.controller_of(pod) is None or pod["metadata"].get("deletionTimestamp"):
            return ALLOWED
        node = node_of(pod)
        if node is None or not await self._is_being_evacuated(node):
            return ALLOWED
        data_lost = self._data_lost_with_node(node)
        if not data_lost:
            return ALLOWED
        process_metrics.evictions_rejected.inc()
        log.info(
            "rejected the eviction of %s/%s from node %s for now: %s", review.namespace, review.name, node, data_lost
        )
        return reject_for_now(
            f"evicting {review.name} from node {node} would lose data: {data_lost}; retry, the eviction is allowed once that is "
            f"over (kubectl delete pod {review.name} does not wait, and may lose the data)"
        )

    async def _is_being_evacuated(self, node: str) -> bool:
        """Reads the node from the server: `kubectl drain` evicts right after it cordons, before a watch shows that."""
        try:
            async with asyncio.timeout(NODE_READ_TIMEOUT_SECONDS):
                node_object: dict[str, Any] = await self._api.get(f"/api/v1/nodes/{node}")
        except (PlatformError, TimeoutError) as error:
            log.warning("cannot read node %s for an eviction, using the cached one: %s", node, error or "time-out")
            node_object = self._nodes.get(("", node), {"metadata": {}, "spec": {}})
        return is_cordoned_or_evacuated(node_object)


# ---- job review ------------------------------------------------------------------------------------------------------
# Decides whether a TrainingJob may be stored. Asks the API server whether it would accept the job's pods; called by the
# webhook. The schema and its CEL rules check all that they can express. This review rejects other errors with the message
# that the job's condition would show later, so that a faulty job does not wait in a queue first.

POD_DRY_RUN_TIMEOUT_SECONDS = 1.5
"""Timeout for the dry run of a pod, during which kubectl waits; the job's first plan repeats a dry run that timed
out."""


class JobReviewer:
    """Reviews jobs that are created or changed; `settings` are those of the workers' pods."""

    def __init__(self, api: Api, settings: pods.PodSettings) -> None:
        self._api, self._settings = api, settings

    async def review_job(self, review: AdmissionRequest) -> AdmissionResponse:
        """Decides about one job."""
        job = job_to_review(review)
        if not isinstance(job, TrainingJob):
            return job
        rejection = await self._pod_rejection(job)
        return (
            reject(f"the API server would reject its pods: {rejection}")
            if rejection
            else AdmissionResponse(True, warnings=_cost_warnings(job))
        )

    async def _pod_rejection(self, job: TrainingJob) -> str:
        """Returns why the API server would reject a worker's pod; empty: it accepts it or does not answer in time."""
        worker, environment = CreateWorker(0, 1), WorkerEnvironment({}, {})
        try:
            async with asyncio.timeout(POD_DRY_RUN_TIMEOUT_SECONDS):
                pod = pods.build_pod(job, worker, environment, self._settings)
                await TemplateDryRun(self._api).validate_template(job.namespace, pod, job.metadata_generation)
        except PlatformError as error:
            return str(error) if error.is_permanent else ""
        except TimeoutError:
            log.info(
                "the dry run of a pod of job %s/%s took too long; the job's first plan repeats it",
                job.namespace,
                job.name,
            )
        return ""


def job_to_review(review: AdmissionRequest) -> AdmissionResponse | TrainingJob:
    """Reads the job that is to be reviewed; returns the response if there is nothing to review or it cannot be read.

    A request that leaves the spec unchanged is always allowed: a finalizer, a label or a deletion must not fail for a
    job that another version admitted.
    """
    spec: Any = review.new_object.get("spec")
    metadata = review.new_object.get("metadata") or {}
    unchanged = review.operation == "UPDATE" and spec == review.old_object.get("spec")
    if review.operation not in ("CREATE", "UPDATE") or unchanged or metadata.get("deletionTimestamp"):
        return ALLOWED
    if isinstance(spec, dict) and spec.get("managedBy", MANAGER) != MANAGER:
        return ALLOWED
    try:
        return parse_job(_job_with_name(review))
    except SpecError as error:
        return reject(f"the job's spec is invalid: {error}")


def _job_with_name(review: AdmissionRequest) -> dict[str, Any]:
    """Returns the job with the name that it will have, or with one like it if the server generates the name."""
    metadata = {"namespace": review.namespace, **(review.new_object.get("metadata") or {})}
    if not metadata.get("name"):
        metadata["name"] = review.name or f"{metadata.get('generateName', '')}00000"
    return {**review.new_object, "metadata": metadata}


def _cost_warnings(job: TrainingJob) -> tuple[str, ...]:
    """Returns warnings about settings that are valid and may cost more than the user expects."""
    checkpoint = job.spec.checkpoint
    if checkpoint.memory.replicas < 2 and checkpoint.persistent is None:
        return (
            "spec.checkpoint: with one copy in memory and no persistent tier, the loss of a node loses every checkpoint; "
            "set memory.replicas to 2, or configure a persistent tier",
        )
    return ()


# ---- admission webhooks ----------------------------------------------------------------------------------------------

JOBS_PATH, EVICTIONS_PATH = "/v1/admission/trainingjobs", "/v1/admission/evictions"


class Webhooks:
    """Serves both webhooks; `keep_ca_bundle_current` runs while this replica leads shard 0."""

    def __init__(
        self,
        api: Api,
        shared: SharedResources,
        departure: Callable[[str], str],
        tls: CoordinatorTls | None,
        settings: ClusterSettings,
    ) -> None:
        jobs = JobReviewer(api, shared.pod_settings)
        evictions = EvictionReviewer(api, shared.cache.workers.items, shared.cache.nodes.items, departure)
        paths = {JOBS_PATH: jobs.review_job, EVICTIONS_PATH: evictions.review_eviction}
        self._server = AdmissionServer(settings.admission_port, tls.context if tls is not None else None, paths)
        authority = (lambda: tls.authority) if tls is not None else (lambda: "")
        self._ca_bundle_updater = CaBundleUpdater(api, settings.admission_webhooks, authority)

    @property
    def port(self) -> int:
        return self._server.port

    async def start(self) -> None:
        """Starts to listen. Raises OSError if the port is taken."""
        await self._server.start()
        log.info("serving admission webhooks on port %d", self.port)

    async def keep_ca_bundle_current(self) -> None:
        """Keeps the operator's CA certificate in the webhooks' configuration, until cancelled."""
        await self._ca_bundle_updater.run()

    async def close(self) -> None:
        await self._server.close()
