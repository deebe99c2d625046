"""Translates pod objects into `WorkerSeen`, `PurgeSeen` and holder addresses.

Pure; called by `platform` and `cluster_cache`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from surefoot_operator.api.moments import moment_seconds
from surefoot_operator.errors import FabricError
from surefoot_operator.job_snapshot import PurgeSeen, WorkerSeen
from surefoot_operator.memory.holder_place import HolderPlace, TierAccess
from surefoot_operator.platforms.kubernetes import api_objects

Object = dict[str, Any]
Phase = Literal["Pending", "Running", "Succeeded", "Failed", "Unknown"]

_PHASES: tuple[Phase, ...] = ("Pending", "Running", "Succeeded", "Failed")
_SAID = 400
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


def worker(pod: Object) -> WorkerSeen:
    """Translates a worker's pod.

    The phase is that of container `trainer`, not the pod's: a sidecar may outlive it.
    """
    metadata = pod["metadata"]
    try:
        index, attempt = (int(metadata["labels"][name]) for name in (api_objects.WORKER_INDEX, api_objects.ATTEMPT))
    except (KeyError, ValueError) as error:
        raise FabricError(
            f"pod {metadata['name']} has labels that this operator never sets ({error}); delete the pod"
        ) from error
    phase, exit_code, message = _trainer(pod)
    return WorkerSeen(
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
        disrupted=bool(_disruption(pod)),
        out_of_memory=_out_of_memory(pod),
        lingering=phase in ("Succeeded", "Failed") and pod.get("status", {}).get("phase") == "Running",
        unstarted=_unstarted(pod) if phase in ("Pending", "Failed") and exit_code is None else "",
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
            return f"{waiting['reason']}: {waiting.get('message', '')}"[:_SAID]
    for found in status.get("initContainerStatuses", ()) if status.get("phase") == "Failed" else ():
        ended = found.get("state", {}).get("terminated") or {}
        if ended.get("exitCode"):
            said = _last_words(ended, int(ended["exitCode"])) or ended.get("reason") or ""
            return f"init container {found['name']} ended with exit code {ended['exitCode']}: {said}"[:_SAID]
    return ""


def _disruption(pod: Object) -> str:
    """Why the cluster itself ends or ended this pod: an eviction, a preemption, a taint."""
    for condition in pod.get("status", {}).get("conditions", ()):
        if condition["type"] == "DisruptionTarget" and condition["status"] == "True":
            return f"{condition.get('reason', 'DisruptionTarget')}: {condition.get('message', '')}"
    return ""


def purge(pod: Object) -> PurgeSeen | None:
    """Translates a purge pod; None if its labels are not ours."""
    metadata, status = pod["metadata"], pod.get("status", {})
    attempt = metadata["labels"].get(api_objects.ATTEMPT, "")
    if not attempt.isdecimal():
        return None
    phase: Phase = next((p for p in _PHASES if p == status.get("phase")), "Unknown")
    state: Object = next((c.get("state", {}) for c in status.get("containerStatuses", ())), {})
    ended = state.get("terminated") or {}
    said = status.get("message") or ended.get("message") or _waiting(status, state)
    return PurgeSeen(int(attempt), phase, str(said).strip()[:_SAID], created_seconds(metadata))


def _last_words(ended: Object, code: int) -> str:
    """The last line of what a program that ended by itself left; one that was killed had no word on it."""
    lines = str(ended.get("message") or "").strip().splitlines()
    return lines[-1][:_SAID] if lines and code > 0 else ""


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
        return ("Failed" if code else "Succeeded"), code, said or _last_words(ended, code) or ended.get("reason") or ""
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


def holders(pod: Object, gone: bool, domain: str, access: TierAccess) -> tuple[HolderPlace, ...]:
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
        HolderPlace(
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


def holder_marks(pod: Object) -> object:
    """The parts of a holder's pod that plans read."""
    return pod["metadata"]["uid"], holders(pod, False, "", TierAccess())


def is_ready(pod: Object) -> bool:
    """Whether the pod's condition Ready is true."""
    conditions = pod.get("status", {}).get("conditions", ())
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def servers(pod: Object) -> int:
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
