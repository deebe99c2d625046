"""Translates pod objects into `WorkerSeen`, `PurgeSeen` and holder addresses.

Pure; called by `platform` and `cluster_cache`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from surefoot_operator.api.known_node_signals import INFORMATIONAL_SIGNALS, KNOWN_SIGNALS, NOT_OF_THE_NODE
from surefoot_operator.api.spec import NodeSignals
from surefoot_operator.api.status import moment_seconds
from surefoot_operator.api.topology_levels import HOSTNAME, topology_path
from surefoot_operator.errors import PlatformError
from surefoot_operator.job_snapshot import ObservedNode, ObservedPurge, ObservedWorker
from surefoot_operator.memory.connection_pool import MemoryServerAddress, MemoryTierCredentials
from surefoot_operator.platforms.kubernetes import api_objects

Object = dict[str, Any]
Phase = Literal["Pending", "Running", "Succeeded", "Failed", "Unknown"]

_PHASES: tuple[Phase, ...] = ("Pending", "Running", "Succeeded", "Failed")
_MAX_MESSAGE_CHARACTERS = 400
"""Characters of a pod's last words that people are told."""
_OOM_KILLED = "OOMKilled"
_NEVER_STARTED = (
    "ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError",
    "RegistryUnavailable", "SignatureValidationFailed", "CreateContainerConfigError", "CreateContainerError",
    "RunContainerError",
)  # fmt: skip
"""What a kubelet waits for that no time alone mends; it tries again by itself."""


def node_of(pod: Object) -> str | None:
    """The pod's node; None before it is scheduled."""
    found = pod["spec"].get("nodeName")
    return str(found) if found else None


def created_seconds(metadata: Object) -> float:
    """Reads an object's creation in Unix seconds; 0: not named."""
    return moment_seconds(metadata.get("creationTimestamp")) or 0.0


def observe_worker(pod: Object) -> ObservedWorker:
    """Translates a worker's pod.

    The phase is that of container `trainer`, not the pod's: a sidecar may outlive it.
    """
    metadata = pod["metadata"]
    try:
        index, attempt = (int(metadata["labels"][name]) for name in (api_objects.WORKER_INDEX, api_objects.ATTEMPT))
    except (KeyError, ValueError) as error:
        raise PlatformError(
            f"pod {metadata['name']} has labels that this operator never sets ({error}); delete the pod"
        ) from error
    phase, exit_code, message = _trainer(pod)
    return ObservedWorker(
        index=index,
        attempt=attempt,
        name=metadata["name"],
        uid=metadata["uid"],
        node=node_of(pod),
        phase=phase,
        exit_code=exit_code,
        message=_disruption(pod) or message,
        created_seconds=created_seconds(metadata),
        deleting=metadata.get("deletionTimestamp") is not None,
        disruption_announced=bool(_disruption(pod)),
        oom_killed=_out_of_memory(pod),
        sidecar_running=phase in ("Succeeded", "Failed") and pod.get("status", {}).get("phase") == "Running",
        start_blocker=_unstarted(pod) if phase in ("Pending", "Failed") and exit_code is None else "",
    )


def _out_of_memory(pod: Object) -> bool:
    ended = _state(pod.get("status", {}), api_objects.TRAINER).get("terminated") or {}
    return bool(ended.get("reason") == _OOM_KILLED)


def _unstarted(pod: Object) -> str:
    """Why its containers cannot be started, as its kubelet says; also that what had to run before them has failed."""
    status = pod.get("status", {})
    if _disruption(pod) or status.get("reason"):
        return ""  # an eviction, or a node that did not take it: no fault of what the pod asks for
    for found in (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())):
        waiting = found.get("state", {}).get("waiting", {})
        if waiting.get("reason") in _NEVER_STARTED:
            return f"{waiting['reason']}: {waiting.get('message', '')}"[:_MAX_MESSAGE_CHARACTERS]
    for found in status.get("initContainerStatuses", ()) if status.get("phase") == "Failed" else ():
        ended = found.get("state", {}).get("terminated") or {}
        if ended.get("exitCode"):
            said = _last_log_line(ended, int(ended["exitCode"])) or ended.get("reason") or ""
            return f"init container {found['name']} ended with exit code {ended['exitCode']}: {said}"[
                :_MAX_MESSAGE_CHARACTERS
            ]
    return ""


def _disruption(pod: Object) -> str:
    """Why the cluster itself ends or ended this pod: an eviction, a preemption, a taint."""
    for condition in pod.get("status", {}).get("conditions", ()):
        if condition["type"] == "DisruptionTarget" and condition["status"] == "True":
            return f"{condition.get('reason', 'DisruptionTarget')}: {condition.get('message', '')}"
    return ""


def observe_purge(pod: Object) -> ObservedPurge | None:
    """Translates a purge pod; None if its labels are not ours."""
    metadata, status = pod["metadata"], pod.get("status", {})
    attempt = metadata["labels"].get(api_objects.ATTEMPT, "")
    if not attempt.isdecimal():
        return None
    phase: Phase = next((p for p in _PHASES if p == status.get("phase")), "Unknown")
    state: Object = next((c.get("state", {}) for c in status.get("containerStatuses", ())), {})
    ended = state.get("terminated") or {}
    said = status.get("message") or ended.get("message") or _waiting(status, state)
    return ObservedPurge(int(attempt), phase, str(said).strip()[:_MAX_MESSAGE_CHARACTERS], created_seconds(metadata))


def _last_log_line(ended: Object, code: int) -> str:
    """The last line of what a program that ended by itself left; one that was killed had no word on it."""
    lines = str(ended.get("message") or "").strip().splitlines()
    return lines[-1][:_MAX_MESSAGE_CHARACTERS] if lines and code > 0 else ""


@dataclass(frozen=True, slots=True)
class _Server:
    """One Redis of a holder's pod."""

    number: int
    container: str
    port: int


def _trainer(pod: Object) -> tuple[Phase, int | None, str]:
    status = pod.get("status", {})
    state = _state(status, api_objects.TRAINER)
    said = status.get("message") or status.get("reason") or ""
    ended = state.get("terminated")
    if ended is not None:
        code = exit_code(int(ended["exitCode"]))
        return (
            ("Failed" if code else "Succeeded"),
            code,
            said or _last_log_line(ended, code) or ended.get("reason") or "",
        )
    phase: Phase = next((p for p in _PHASES if p == status.get("phase")), "Unknown")
    if phase == "Running" and "running" not in state:
        phase = "Pending"  # init containers or sidecars run, the trainer does not yet
    if phase == "Pending":
        said = said or _waiting(status, state)
    return phase, None, said


def exit_code(code: int) -> int:
    """Converts a container's exit code: 128 + n is signal n."""
    return 128 - code if 128 < code < 128 + 65 else code


def _state(status: Object, container: str) -> Object:
    found: Object = next((c for c in status.get("containerStatuses", ()) if c["name"] == container), {})
    state: Object = found.get("state", {})
    return state


def _waiting(status: Object, state: Object) -> str:
    waiting = state.get("waiting", {})
    if waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
        return f"{waiting['reason']}: {waiting.get('message', '')}"
    for condition in status.get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return str(condition.get("message", ""))
    return ""


def observe_servers(
    pod: Object, gone: bool, domain: str, access: MemoryTierCredentials
) -> tuple[MemoryServerAddress, ...]:
    """Translates the servers of a holder's pod.

    One that starts is left out: unknown, not dead.
    """
    status, found = pod.get("status", {}), _servers(pod)
    where, address = node_of(pod), status.get("podIP")
    if where is None or not address:
        return ()
    states: dict[str, Object] = {c["name"]: c for c in status.get("containerStatuses", ())}
    secure = api_objects.HOLDER_TLS in (pod["metadata"].get("annotations") or {})
    return tuple(
        MemoryServerAddress(
            node=where,
            domain=domain,
            host=address,
            port=one.port,
            process=f"{pod['metadata']['uid']}/{states[one.container]['containerID']}",
            running=not gone
            and "running" in states[one.container].get("state", {})
            and status.get("phase") == "Running",
            settling=len(pod["spec"]["containers"]) > len(found) and not is_ready(pod),
            admin_user=access.user,
            admin_password=access.password,
            tls_ca=access.authority if secure else None,
            server=one.number,
            servers=len(found),
        )
        for one in found
        if states.get(one.container, {}).get("containerID")
    )


def server_plan_fields(pod: Object) -> object:
    """The parts of a holder's pod that plans read."""
    return pod["metadata"]["uid"], observe_servers(pod, False, "", MemoryTierCredentials())


def is_ready(pod: Object) -> bool:
    """Whether the pod's condition Ready is true."""
    conditions = pod.get("status", {}).get("conditions", ())
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def count_servers(pod: Object) -> int:
    """Counts the servers of a holder's pod."""
    return len(_servers(pod))


def _servers(pod: Object) -> list[_Server]:
    """Which containers are holders, and where they listen: a companion may stand beside them."""
    containers = pod["spec"].get("containers", ())
    found = []
    for container in containers:
        for port in container.get("ports", ()):
            number = _number(str(port.get("name", "")))
            if number is not None:
                found.append(_Server(number, str(container["name"]), int(port["containerPort"])))
    if found:
        return sorted(found, key=lambda one: one.number)
    first = next((str(container["name"]) for container in containers), api_objects.HOLDER_CONTAINER)
    return [_Server(0, first, api_objects.HOLDER_PORT)]


def _number(port_name: str) -> int | None:
    """A server's number by its port's name, `redis` or `redis-1`; None: it is no server's."""
    if port_name == api_objects.HOLDER_CONTAINER:
        return 0
    text = port_name.removeprefix(f"{api_objects.HOLDER_CONTAINER}-")
    return int(text) if text != port_name and text.isascii() and text.isdecimal() else None


# ---- leases ----------------------------------------------------------------------------------------------------------
# Tracks when each kubelet last renewed its node lease. Owned by `cluster_cache`; time is an argument. A lease's own
# time is never read: clocks of other machines differ. Silence does not count while the API server was away: every lease
# is then as old as the outage, though every kubelet lives.

LEASE_SECONDS = 25.0
"""A kubelet renews its lease every 10 s; after this without, it counts as silent."""


@dataclass(frozen=True, slots=True)
class KubeletLiveness:
    """Nodes whose kubelet renewed its lease, and nodes that are silent.

    A node in neither set is not known yet.
    """

    renewed: frozenset[str] = frozenset()
    silent: frozenset[str] = frozenset()


class NodeLeases:
    """The node leases of one cluster; times are monotonic seconds."""

    def __init__(self) -> None:
        self._known: dict[str, float] = {}
        """Since when each lease stands as it does."""
        self._renewals: dict[str, float] = {}
        """When a renewal was seen to come: one that was there when we came may be of any age."""
        self._liveness: tuple[float, float, KubeletLiveness] | None = None
        """Since when nothing was interrupted, until when nobody else can have fallen silent, and what was said."""
        self._last = KubeletLiveness()

    def record_change(self, old: Object | None, new: Object | None, now: float) -> None:
        """Records a lease's change; None: it does not exist."""
        found = new or old
        assert found is not None
        name = found["metadata"]["name"]
        if new is None:
            self._known.pop(name, None)
            self._renewals.pop(name, None)
            self._liveness = None
        elif old is None:
            self._known[name] = now
            self._liveness = None
        elif old["spec"].get("renewTime") != new["spec"].get("renewTime"):
            self._known[name] = self._renewals[name] = now
            if self._liveness is not None and name not in self._liveness[2].renewed:
                self._liveness = None

    def classify(self, heard_since: float, heard_at: float) -> KubeletLiveness:
        """Classifies nodes as of `heard_at`, the watch's last event.

        `heard_since`: since when the watch was not interrupted. The same value as before, unless it changed: a renewal of
        one more second is no news, and a thousand jobs ask twice a second.
        """
        if self._liveness is None or self._liveness[0] != heard_since or heard_at > self._liveness[1]:
            self._liveness = (heard_since, *self._classify(heard_since, heard_at))
        return self._liveness[2]

    def _classify(self, heard_since: float, heard_at: float) -> tuple[float, KubeletLiveness]:
        since = {node: max(at, heard_since) for node, at in self._known.items()}
        found = KubeletLiveness(
            frozenset(node for node, at in self._renewals.items() if heard_at - at <= LEASE_SECONDS),
            frozenset(node for node, at in since.items() if heard_at - at > LEASE_SECONDS),
        )
        standing = [
            *(at for node, at in self._renewals.items() if node in found.renewed),
            *(at for node, at in since.items() if node not in found.silent),
        ]
        if found != self._last:
            self._last = found
        return min(standing, default=math.inf) + LEASE_SECONDS, self._last


# ---- nodes -----------------------------------------------------------------------------------------------------------
# Translates node objects and kubelet leases into `NodeSeen`. "Not ready" mostly means that the node controller did not
# hear the kubelet; a fault of the controller or the API server looks the same. So a renewed lease outweighs it, and
# where most nodes seem gone at once none counts as gone for that alone.

_OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"
"""Only a person gives it, who knows that the node is down."""
_UNREACHABLE = "node.kubernetes.io/unreachable"
_MAX_CONDITION_CHARACTERS = 200
"""Characters of a condition's own words."""


def observe_node(
    found: Object, heard: KubeletLiveness, topology_key: str = HOSTNAME, signals: NodeSignals = KNOWN_SIGNALS
) -> ObservedNode:
    """Translates one node; what its observer may have caused is a doubt.

    Copies are always kept on different nodes; `topology_key` is the highest level that they are spread over.
    """
    name, labels = found["metadata"]["name"], found["metadata"].get("labels") or {}
    down = _out_of_service(found)
    return ObservedNode(
        name=name,
        domain=labels.get(HOSTNAME, name),
        ready=not down,
        schedulable=not found["spec"].get("unschedulable", False),
        reason=down,
        evacuation_reason=_signal(found, signals),
        informational=_signal(found, INFORMATIONAL_SIGNALS),
        unconfirmed_failure="" if down else _doubt(found, name in heard.renewed) or _unrenewed(name, heard),
        path=topology_path(labels, topology_key),
    )


def without_mass_doubt(nodes: Iterable[ObservedNode]) -> tuple[ObservedNode, ...]:
    """Confirms doubts, unless most nodes seem gone at once.

    Then the observer is the likelier fault. What is confirmed stays a doubt, too: an observer that was away hears the nodes
    again one after another, and the last of them seems gone among others that are well.
    """
    found = tuple(nodes)
    seem_gone = sum(not one.ready or bool(one.unconfirmed_failure) for one in found)
    if 2 * seem_gone > len(found):
        return found
    return tuple(replace(one, ready=False) if one.unconfirmed_failure else one for one in found)


def is_contradicted(found: Object) -> bool:
    """Whether the kubelet's lease renewals outweigh this node's conditions."""
    return _doubt(found, renewed=False) != _doubt(found, renewed=True)


def is_cordoned_or_evacuated(found: Object) -> bool:
    """Whether a node is cordoned, or marked to be left."""
    return bool(found.get("spec", {}).get("unschedulable", False)) or bool(_signal(found, KNOWN_SIGNALS))


def plan_fields(found: Object) -> tuple[Any, ...]:
    """The parts of a node that plans read; heartbeats are left out."""
    metadata, spec = found["metadata"], found["spec"]
    conditions = [(c["type"], c["status"], c.get("reason")) for c in found.get("status", {}).get("conditions", ())]
    return metadata["uid"], metadata.get("labels"), spec.get("taints"), spec.get("unschedulable"), conditions


def _out_of_service(found: Object) -> str:
    taints = {taint["key"] for taint in found["spec"].get("taints", ())}
    return f"it has the taint {_OUT_OF_SERVICE}" if _OUT_OF_SERVICE in taints else ""


def _unrenewed(name: str, heard: KubeletLiveness) -> str:
    return "its kubelet has not renewed its lease" if name in heard.silent else ""


def _doubt(found: Object, renewed: bool) -> str:
    taints = {taint["key"] for taint in found["spec"].get("taints", ())}
    ready: Object | None = next(
        (c for c in found.get("status", {}).get("conditions", ()) if c["type"] == "Ready"), None
    )
    if ready is not None and ready["status"] == "False":
        return f"not ready: {ready.get('message', '')}"
    if renewed and ready is not None:
        return ""  # whoever says that it is unknown has not heard what we have
    if _UNREACHABLE in taints:
        return f"it has the taint {_UNREACHABLE}"
    if ready is None:
        return "its condition Ready is not set yet"
    return "" if ready["status"] == "True" else f"not ready: {ready.get('message', '')}"


def _signal(found: Object, signals: NodeSignals) -> str:
    """The first that it bears, as a sentence."""
    taints = {taint["key"] for taint in found["spec"].get("taints", ())}
    labelled = {f"{key}={value}" for key, value in (found["metadata"].get("labels") or {}).items()}
    excepted = NOT_OF_THE_NODE if signals is KNOWN_SIGNALS else {}
    conditions = found.get("status", {}).get("conditions", ())
    stated = {f"{c['type']}={c['status']}": c for c in conditions if c.get("reason") not in excepted.get(c["type"], ())}
    for kind, wanted, borne in (
        ("taint", signals.taints, taints),
        ("label", signals.labels, labelled),
        ("condition", signals.conditions, stated),
    ):
        there = next((name for name in wanted if name in borne), None)
        if there is not None:
            return f"it has the {kind} {there}{_condition_text(stated.get(there, {}))}"
    return ""


def _condition_text(condition: Object) -> str:
    """Why a condition's writer set it, in its own words."""
    reason, message = condition.get("reason") or "", (condition.get("message") or "").strip()
    told = ": ".join(part for part in (reason, message) if part)
    return f" ({told[:_MAX_CONDITION_CHARACTERS]})" if told else ""
