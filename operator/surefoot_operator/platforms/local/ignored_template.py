"""Lists the pod template fields that processes on one machine ignore.

Pure; called by the CLI before a run. `command`, `args`, `env`, `workingDir`, `restartPolicy` and
`terminationGracePeriodSeconds` are honoured.
"""

from __future__ import annotations

from typing import Any

from surefoot_operator.api.spec import MANAGER, TrainingJobSpec

_POD = ("containers", "restartPolicy", "terminationGracePeriodSeconds")
_CONTAINER = ("name", "command", "args", "env", "workingDir")


def grace_seconds(raw: dict[str, Any], default: float = 30.0) -> float:
    """The template's terminationGracePeriodSeconds."""
    value = raw.get("spec", {}).get("terminationGracePeriodSeconds", default)
    return float(value) if isinstance(value, int | float) and value >= 0 else default


def ignored_parts(spec: TrainingJobSpec) -> tuple[str, ...]:
    """Lists the paths of given fields that have no effect here."""
    raw = spec.template.raw
    found = [f"template.{name}" for name in raw if name != "spec"]
    pod = raw.get("spec", {})
    found += [f"template.spec.{name}" for name in pod if name not in _POD]
    for container in pod.get("containers", []):
        name = container.get("name")
        if name != "trainer":
            found.append(f"container {name}")
            continue
        found += [f"container trainer: {key}" for key in container if key not in _CONTAINER]
        found += [
            f"container trainer: env {e['name']} (valueFrom)" for e in container.get("env") or () if "valueFrom" in e
        ]
    persistent = spec.checkpoint.persistent
    if persistent is not None and persistent.secret_ref is not None:
        found.append("checkpoint.persistent.secretRef (credentials are taken from this environment)")
    if persistent is not None and persistent.on_job_deletion != "Keep":
        found.append("checkpoint.persistent.onJobDeletion (a run folder is removed by hand)")
    if spec.managed_by != MANAGER:
        found.append("managedBy (it runs here whoever manages it)")
    if spec.scheduling_policy is not None:
        found.append("schedulingPolicy (workers go to free nodes one by one; no scheduler here knows groups)")
    if spec.run_policy.ttl_seconds_after_finished is not None:
        found.append("runPolicy.ttlSecondsAfterFinished (a run folder is removed by hand)")
    return tuple(found)
