"""Converts pods, node leases and nodes to the observations that plans read.

Pure; called by `platform`, `cluster_cache` and `memory_tier_pods`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from surefoot_operator.api.known_node_signals import IGNORED_REASONS, INFORMATIONAL_SIGNALS, KNOWN_SIGNALS
from surefoot_operator.api.spec import NodeSignals
from surefoot_operator.api.status import parse_rfc3339
from surefoot_operator.api.topology_levels import HOSTNAME, topology_path
from surefoot_operator.errors import PlatformError
from surefoot_operator.job_snapshot import ObservedNode, ObservedPurge, ObservedWorker
from surefoot_operator.memory.connection_pool import MemoryServerAddress, MemoryTierCredentials
from surefoot_operator.platforms.kubernetes import api_objects

Object = dict[str, Any]
Phase = Literal["Pending", "Running", "Succeeded", "Failed", "Unknown"]

_PHASES: tuple[Phase, ...] = ("Pending", "Running", "Succeeded", "Failed")
_MAX_MESSAGE_CHARACTERS = 400
"""Length limit of a pod's message in the job's status and events."""
_OOM_KILLED = "OOMKilled"
_START_FAILURES = (
    "ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError",
    "RegistryUnavailable", "SignatureValidationFailed", "CreateContainerConfigError", "CreateContainerError",
    "RunContainerError",
)  # fmt: skip
"""Waiting reasons of containers that cannot start until a user fixes the cause; the kubelet keeps trying."""


def node_of(pod: Object) -> str | None:
    """Returns the name of the pod's node; None before it is scheduled."""
    node = pod["spec"].get("nodeName")
    return str(node) if node else None


def created_seconds(metadata: Object) -> float:
    """Returns the Unix time at which an object was created; 0 if it has no creation time."""
    return parse_rfc3339(metadata.get("creationTimestamp")) or 0.0


def observe_worker(pod: Object) -> ObservedWorker:
    """Converts a worker's pod.

    The phase is that of the container `trainer`, not of the pod, because a sidecar may outlive the trainer.

    Raises:
        PlatformError: Its labels have no valid index and attempt.
    """
    metadata = pod["metadata"]
    try:
        index, attempt = (
            int(metadata["labels"][name]) for name in (api_objects.WORKER_INDEX_LABEL, api_objects.ATTEMPT_LABEL)
        )
    except (KeyError, ValueError) as error:
        raise PlatformError(
            f"pod {metadata['name']} has an invalid or missing label of this operator ({error}); delete the pod"
        ) from error
    phase, exit_code, message = _observe_trainer(pod)
    return ObservedWorker(
        index=index,
        attempt=attempt,
        name=metadata["name"],
        uid=metadata["uid"],
        node=node_of(pod),
        phase=phase,
        exit_code=exit_code,
        message=_disruption_reason(pod) or message,
        created_seconds=created_seconds(metadata),
        deleting=metadata.get("deletionTimestamp") is not None,
        disruption_announced=bool(_disruption_reason(pod)),
        oom_killed=_was_oom_killed(pod),
        sidecar_running=phase in ("Succeeded", "Failed") and pod.get("status", {}).get("phase") == "Running",
        start_blocker=_start_blocker(pod) if phase in ("Pending", "Failed") and exit_code is None else "",
    )


def _was_oom_killed(pod: Object) -> bool:
    terminated = _container_state(pod.get("status", {}), api_objects.TRAINER_CONTAINER).get("terminated") or {}
    return bool(terminated.get("reason") == _OOM_KILLED)


def _start_blocker(pod: Object) -> str:
    """Returns why a pod's containers cannot start: the kubelet's reason, or a failed init container; empty: neither."""
    status = pod.get("status", {})
    if _disruption_reason(pod) or status.get("reason"):
        return ""  # evicted, or rejected by its node: the pod's spec is not the cause
    for container_status in (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())):
        waiting = container_status.get("state", {}).get("waiting", {})
        if waiting.get("reason") in _START_FAILURES:
            return f"{waiting['reason']}: {waiting.get('message', '')}"[:_MAX_MESSAGE_CHARACTERS]
    for container_status in status.get("initContainerStatuses", ()) if status.get("phase") == "Failed" else ():
        terminated = container_status.get("state", {}).get("terminated") or {}
        if terminated.get("exitCode"):
            cause = _last_log_line(terminated, int(terminated["exitCode"])) or terminated.get("reason") or ""
            return f"init container {container_status['name']} failed with exit code {terminated['exitCode']}: {cause}"[
                :_MAX_MESSAGE_CHARACTERS
            ]
    return ""


def _disruption_reason(pod: Object) -> str:
    """Returns why the cluster ends or ended this pod (eviction, preemption, taint); empty: it did not."""
    for condition in pod.get("status", {}).get("conditions", ()):
        if condition["type"] == "DisruptionTarget" and condition["status"] == "True":
            return f"{condition.get('reason', 'DisruptionTarget')}: {condition.get('message', '')}"
    return ""


def observe_purge(pod: Object) -> ObservedPurge | None:
    """Converts the pod of an attempt to delete persistent data; None if it has no valid label of this operator."""
    metadata, status = pod["metadata"], pod.get("status", {})
    attempt = metadata["labels"].get(api_objects.ATTEMPT_LABEL, "")
    if not attempt.isdecimal():
        return None
    phase: Phase = next((p for p in _PHASES if p == status.get("phase")), "Unknown")
    state: Object = next((c.get("state", {}) for c in status.get("containerStatuses", ())), {})
    terminated = state.get("terminated") or {}
    message = status.get("message") or terminated.get("message") or _waiting_reason(status, state)
    return ObservedPurge(int(attempt), phase, str(message).strip()[:_MAX_MESSAGE_CHARACTERS], created_seconds(metadata))


def _last_log_line(terminated: Object, code: int) -> str:
    """Returns the last line of a program's log; empty if a signal killed it, because it then logged no reason."""
    lines = str(terminated.get("message") or "").strip().splitlines()
    return lines[-1][:_MAX_MESSAGE_CHARACTERS] if lines and code > 0 else ""


@dataclass(frozen=True, slots=True)
class _Server:
    """A memory server (Redis process) of a pod."""

    index: int
    """Index of the server on its node, from 0."""
    container: str
    """Name of its container."""
    port: int
    """Port at which it listens."""


def _observe_trainer(pod: Object) -> tuple[Phase, int | None, str]:
    """Returns the phase, the exit code and the message of the trainer's container; None: it has not exited."""
    status = pod.get("status", {})
    state = _container_state(status, api_objects.TRAINER_CONTAINER)
    message = status.get("message") or status.get("reason") or ""
    terminated = state.get("terminated")
    if terminated is not None:
        code = decode_exit_code(int(terminated["exitCode"]))
        return (
            ("Failed" if code else "Succeeded"),
            code,
            message or _last_log_line(terminated, code) or terminated.get("reason") or "",
        )
    phase: Phase = next((p for p in _PHASES if p == status.get("phase")), "Unknown")
    if phase == "Running" and "running" not in state:
        phase = "Pending"  # init containers or sidecars are running, but not the trainer yet
    if phase == "Pending":
        message = message or _waiting_reason(status, state)
    return phase, None, message


def decode_exit_code(code: int) -> int:
    """Converts a container's exit code 128 + n, which means signal n, to -n; returns others unchanged."""
    return 128 - code if 128 < code < 128 + 65 else code


def _container_state(status: Object, container: str) -> Object:
    container_status: Object = next((c for c in status.get("containerStatuses", ()) if c["name"] == container), {})
    state: Object = container_status.get("state", {})
    return state


def _waiting_reason(status: Object, state: Object) -> str:
    """Returns why a container waits, or why its pod is not scheduled; empty: no reason is known."""
    waiting = state.get("waiting", {})
    if waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
        return f"{waiting['reason']}: {waiting.get('message', '')}"
    for condition in status.get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return str(condition.get("message", ""))
    return ""


def observe_servers(
    pod: Object, is_deleted: bool, domain: str, access: MemoryTierCredentials
) -> tuple[MemoryServerAddress, ...]:
    """Converts the memory servers of a pod; leaves out a server that has not started yet.

    Args:
        pod: The pod.
        is_deleted: Whether it was deleted.
        domain: Failure domain of its node.
        access: Credentials of the memory servers.
    """
    status, servers = pod.get("status", {}), _find_servers(pod)
    node, address = node_of(pod), status.get("podIP")
    if node is None or not address:
        return ()
    states: dict[str, Object] = {c["name"]: c for c in status.get("containerStatuses", ())}
    uses_tls = api_objects.MEMORY_SERVER_TLS in (pod["metadata"].get("annotations") or {})
    return tuple(
        MemoryServerAddress(
            node=node,
            domain=domain,
            host=address,
            port=server.port,
            process=f"{pod['metadata']['uid']}/{states[server.container]['containerID']}",
            running=not is_deleted
            and "running" in states[server.container].get("state", {})
            and status.get("phase") == "Running",
            may_be_prefaulting=len(pod["spec"]["containers"]) > len(servers) and not is_ready(pod),
            admin_user=access.user,
            admin_password=access.password,
            tls_ca=access.authority if uses_tls else None,
            server_index=server.index,
            servers_on_node=len(servers),
        )
        for server in servers
        if states.get(server.container, {}).get("containerID")
    )


def server_plan_fields(pod: Object) -> object:
    """Returns the fields of a memory server's pod that plans read."""
    return pod["metadata"]["uid"], observe_servers(pod, False, "", MemoryTierCredentials())


def is_ready(pod: Object) -> bool:
    """Whether the pod's condition Ready is True."""
    conditions = pod.get("status", {}).get("conditions", ())
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def count_servers(pod: Object) -> int:
    """Returns the number of memory servers in a pod."""
    return len(_find_servers(pod))


def _find_servers(pod: Object) -> list[_Server]:
    """Finds the containers that are memory servers, by the names of their ports; others are sidecars.

    If no port has such a name, the first container is the server, at the default port.
    """
    containers = pod["spec"].get("containers", ())
    servers = []
    for container in containers:
        for port in container.get("ports", ()):
            number = _server_index(str(port.get("name", "")))
            if number is not None:
                servers.append(_Server(number, str(container["name"]), int(port["containerPort"])))
    if servers:
        return sorted(servers, key=lambda server: server.index)
    first_container = next((str(container["name"]) for container in containers), api_objects.MEMORY_SERVER_CONTAINER)
    return [_Server(0, first_container, api_objects.MEMORY_SERVER_PORT)]


def _server_index(port_name: str) -> int | None:
    """Returns a server's index from its port's name, such as `redis` or `redis-1`; None: it is no server's port."""
    if port_name == api_objects.MEMORY_SERVER_CONTAINER:
        return 0
    index_text = port_name.removeprefix(f"{api_objects.MEMORY_SERVER_CONTAINER}-")
    return int(index_text) if index_text != port_name and index_text.isascii() and index_text.isdecimal() else None


# ---- leases ----------------------------------------------------------------------------------------------------------
# Tracks when each kubelet last renewed its node lease. Owned by `cluster_cache`; time is an argument. The time in the
# lease is never read, because the clocks of other machines differ. The time of an API server outage does not count:
# after it, every lease is as old as the outage, although every kubelet may be alive.

MAX_LEASE_AGE_SECONDS = 25.0
"""Time without a renewal after which a kubelet counts as silent; kubelets renew their lease every 10 s."""


@dataclass(frozen=True, slots=True)
class KubeletLiveness:
    """The nodes whose kubelet renews its lease, and those whose kubelet does not.

    For a node in neither set it is not known yet.
    """

    renewed: frozenset[str] = frozenset()
    """Nodes whose kubelet was observed to renew its lease within `MAX_LEASE_AGE_SECONDS`."""
    silent: frozenset[str] = frozenset()
    """Nodes whose lease was observed for `MAX_LEASE_AGE_SECONDS` without a renewal."""


class NodeLeases:
    """The node leases of one cluster; all times are monotonic seconds."""

    def __init__(self) -> None:
        self._unchanged_since: dict[str, float] = {}
        """Node → time since which its lease has not changed, or since which it is observed."""
        self._renewals: dict[str, float] = {}
        """Node → time of the last observed renewal; a renewal before the watch began may have any age."""
        self._liveness: tuple[float, float, KubeletLiveness] | None = None
        """The last result, with the start of the uninterrupted watch and the time until which it stays valid."""
        self._last_result = KubeletLiveness()
        """The last result that differed from the one before."""

    def record_change(self, old: Object | None, new: Object | None, now: float) -> None:
        """Records the change of a lease; None: it does not exist."""
        lease = new or old
        assert lease is not None
        name = lease["metadata"]["name"]
        if new is None:
            self._unchanged_since.pop(name, None)
            self._renewals.pop(name, None)
            self._liveness = None
        elif old is None:
            self._unchanged_since[name] = now
            self._liveness = None
        elif old["spec"].get("renewTime") != new["spec"].get("renewTime"):
            self._unchanged_since[name] = self._renewals[name] = now
            if self._liveness is not None and name not in self._liveness[2].renewed:
                self._liveness = None

    def classify_nodes(self, contact_since_seconds: float, last_contact_seconds: float) -> KubeletLiveness:
        """Classifies the nodes by the leases of an uninterrupted watch.

        Returns the same object until a node changes its class, because a thousand jobs call this twice a second.

        Args:
            contact_since_seconds: Time since which the watch was not interrupted.
            last_contact_seconds: Time of the watch's last event; the result is as of this time.
        """
        if (
            self._liveness is None
            or self._liveness[0] != contact_since_seconds
            or last_contact_seconds > self._liveness[1]
        ):
            self._liveness = (
                contact_since_seconds,
                *self._compute_liveness(contact_since_seconds, last_contact_seconds),
            )
        return self._liveness[2]

    def _compute_liveness(
        self, contact_since_seconds: float, last_contact_seconds: float
    ) -> tuple[float, KubeletLiveness]:
        unchanged_seconds = {
            node: max(seconds, contact_since_seconds) for node, seconds in self._unchanged_since.items()
        }
        liveness = KubeletLiveness(
            frozenset(
                node
                for node, seconds in self._renewals.items()
                if last_contact_seconds - seconds <= MAX_LEASE_AGE_SECONDS
            ),
            frozenset(
                node
                for node, seconds in unchanged_seconds.items()
                if last_contact_seconds - seconds > MAX_LEASE_AGE_SECONDS
            ),
        )
        expiring = [
            *(seconds for node, seconds in self._renewals.items() if node in liveness.renewed),
            *(seconds for node, seconds in unchanged_seconds.items() if node not in liveness.silent),
        ]
        if liveness != self._last_result:
            self._last_result = liveness
        return min(expiring, default=math.inf) + MAX_LEASE_AGE_SECONDS, self._last_result


# ---- nodes -----------------------------------------------------------------------------------------------------------
# Converts nodes and kubelet leases to `ObservedNode`. "Not ready" mostly means that the node controller received no
# status from the kubelet, and a fault of the controller or of the API server has the same effect. So a renewed lease
# outweighs this condition, and if most nodes seem lost at once, none is declared lost for this reason alone.

_OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"
"""Taint that an administrator sets on a node that is known to be shut down."""
_UNREACHABLE = "node.kubernetes.io/unreachable"
_MAX_CONDITION_CHARACTERS = 200
"""Length limit of a condition's reason and message in the text about a node."""


def observe_node(
    item: Object, kubelets: KubeletLiveness, topology_key: str = HOSTNAME, signals: NodeSignals = KNOWN_SIGNALS
) -> ObservedNode:
    """Converts one node; a failure that the control plane may have caused is an unconfirmed failure.

    Args:
        item: The node.
        kubelets: Which kubelets have renewed their lease.
        topology_key: Node label of the highest level over which copies are spread; they are always on different nodes.
        signals: The node signals that make a job evacuate a node.
    """
    name, labels = item["metadata"]["name"], item["metadata"].get("labels") or {}
    down_reason = _out_of_service(item)
    return ObservedNode(
        name=name,
        domain=labels.get(HOSTNAME, name),
        ready=not down_reason,
        schedulable=not item["spec"].get("unschedulable", False),
        reason=down_reason,
        evacuation_reason=_find_signal(item, signals),
        informational=_find_signal(item, INFORMATIONAL_SIGNALS),
        unconfirmed_failure=""
        if down_reason
        else _unconfirmed_failure(item, name in kubelets.renewed) or _missing_renewal(name, kubelets),
        path=topology_path(labels, topology_key),
    )


def confirm_node_failures(nodes: Iterable[ObservedNode]) -> tuple[ObservedNode, ...]:
    """Marks nodes with an unconfirmed failure as not ready, unless most nodes seem to have failed at once.

    In that case a fault of the control plane is more likely. A node that is marked keeps its unconfirmed failure: after
    such a fault the nodes recover one by one, and the last ones would seem to have failed among healthy ones.
    """
    all_nodes = tuple(nodes)
    failed_count = sum(not node.ready or bool(node.unconfirmed_failure) for node in all_nodes)
    if 2 * failed_count > len(all_nodes):
        return all_nodes
    return tuple(replace(node, ready=False) if node.unconfirmed_failure else node for node in all_nodes)


def lease_outweighs_conditions(item: Object) -> bool:
    """Whether renewals of the kubelet's lease outweigh this node's conditions."""
    return _unconfirmed_failure(item, has_renewed=False) != _unconfirmed_failure(item, has_renewed=True)


def is_cordoned_or_evacuated(item: Object) -> bool:
    """Whether a node is cordoned, or bears a signal that makes jobs evacuate it."""
    return bool(item.get("spec", {}).get("unschedulable", False)) or bool(_find_signal(item, KNOWN_SIGNALS))


def node_plan_fields(item: Object) -> tuple[Any, ...]:
    """Returns the fields of a node that plans read, without those that every heartbeat changes."""
    metadata, spec = item["metadata"], item["spec"]
    conditions = [(c["type"], c["status"], c.get("reason")) for c in item.get("status", {}).get("conditions", ())]
    return metadata["uid"], metadata.get("labels"), spec.get("taints"), spec.get("unschedulable"), conditions


def _out_of_service(item: Object) -> str:
    """Returns why a node is certainly down; empty: it is not."""
    taints = {taint["key"] for taint in item["spec"].get("taints", ())}
    return f"it has the taint {_OUT_OF_SERVICE}" if _OUT_OF_SERVICE in taints else ""


def _missing_renewal(name: str, kubelets: KubeletLiveness) -> str:
    return "its kubelet has not renewed its lease" if name in kubelets.silent else ""


def _unconfirmed_failure(item: Object, has_renewed: bool) -> str:
    """Returns why a node may have failed; empty: nothing suggests it. `has_renewed`: its kubelet renewed its lease."""
    taints = {taint["key"] for taint in item["spec"].get("taints", ())}
    ready: Object | None = next((c for c in item.get("status", {}).get("conditions", ()) if c["type"] == "Ready"), None)
    if ready is not None and ready["status"] == "False":
        return f"not ready: {ready.get('message', '')}"
    if has_renewed and ready is not None:
        return ""  # the renewal proves that the kubelet lives, so "Unknown" is a fault of the control plane
    if _UNREACHABLE in taints:
        return f"it has the taint {_UNREACHABLE}"
    if ready is None:
        return "its condition Ready is not set yet"
    return "" if ready["status"] == "True" else f"not ready: {ready.get('message', '')}"


def _find_signal(item: Object, signals: NodeSignals) -> str:
    """Returns a text about the first of these signals that the node bears; empty: it bears none."""
    taints = {taint["key"] for taint in item["spec"].get("taints", ())}
    labels = {f"{key}={value}" for key, value in (item["metadata"].get("labels") or {}).items()}
    ignored_reasons = IGNORED_REASONS if signals is KNOWN_SIGNALS else {}
    conditions = item.get("status", {}).get("conditions", ())
    condition_by_text = {
        f"{c['type']}={c['status']}": c for c in conditions if c.get("reason") not in ignored_reasons.get(c["type"], ())
    }
    for kind, signal_names, present in (
        ("taint", signals.taints, taints),
        ("label", signals.labels, labels),
        ("condition", signals.conditions, condition_by_text),
    ):
        signal = next((name for name in signal_names if name in present), None)
        if signal is not None:
            return f"it has the {kind} {signal}{_condition_text(condition_by_text.get(signal, {}))}"
    return ""


def _condition_text(condition: Object) -> str:
    """Returns a condition's reason and message in parentheses; empty if it has neither."""
    reason, message = condition.get("reason") or "", (condition.get("message") or "").strip()
    text = ": ".join(part for part in (reason, message) if part)
    return f" ({text[:_MAX_CONDITION_CHARACTERS]})" if text else ""
