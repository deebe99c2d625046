"""Converts Kubeflow's TrainJob (trainer.kubeflow.org/v1alpha1) and its runtime."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surefoot_operator.convert import gang_policy
from surefoot_operator.convert.job_draft import Draft
from surefoot_operator.convert.job_set import CONTAINERS
from surefoot_operator.convert.manifest import Manifest
from surefoot_operator.convert.trainer_template import trainer_template

RUNTIMES = ("ClusterTrainingRuntime", "TrainingRuntime")
_POLICY = (
    ("numNodes",),
    ("torch", "numProcPerNode"),
    ("torch", "elasticPolicy", "minNodes"),
    ("torch", "elasticPolicy", "maxNodes"),
)
"""What is read of a runtime's machine learning policy."""
_TRAINER = ("command", "args", "image")


def convert(draft: Draft, runtimes: Mapping[str, Mapping[str, Any]]) -> None:
    """Fills the draft from its manifest.

    Args:
        runtimes: the training runtimes that stand beside it in the file, by name.
    """
    manifest = draft.manifest
    draft.describe()
    draft.move(("spec", "suspend"), "suspend")
    draft.move(("spec", "activeDeadlineSeconds"), "runPolicy", "activeDeadlineSeconds")
    draft.move(("spec", "ttlSecondsAfterFinished"), "runPolicy", "ttlSecondsAfterFinished")
    manifest.leave("spec", "managedBy", why="it names a controller of TrainJobs")
    manifest.leave("spec", "initializer", why="bring data and model in an init container, or read them where they are")
    for name in ("runtimePatches", "podTemplateOverrides", "podSpecOverrides"):
        manifest.leave("spec", name, why="write into template.spec what it patches")
        if manifest.peek("spec", name) is not None:
            draft.to_do.append(f"spec.{name} patches the pods: write what it says into spec.template")
    name = str(manifest.peek("spec", "runtimeRef", "name") or "")
    manifest.take("spec", "runtimeRef", to="spec.template")
    runtime = Manifest(runtimes.get(name) or {}, f"{name}:")
    if name not in runtimes:
        draft.to_do.append(
            f"the runtime {name or 'of the job'} is not in the file: image and what else its pods have stand there"
            f" (kubectl get clustertrainingruntime {name} -o yaml)"
        )
    template, policy = _of_runtime(draft, runtime)
    container = template["spec"]["containers"][0]
    _trainer(draft, container)
    trainer = trainer_template(template, CONTAINERS, "spec.trainer")
    workers = manifest.take("spec", "trainer", "numNodes", to="spec.replicas")
    ranks = manifest.take("spec", "trainer", "numProcPerNode", to="spec.nprocPerNode")
    for name, field in (("minNodes", "minReplicas"), ("maxNodes", "maxReplicas")):
        draft.put(policy.get("torch", {}).get("elasticPolicy", {}).get(name), "elasticPolicy", field)
    draft.accept(trainer)
    draft.size(trainer, workers or policy.get("numNodes") or 1, ranks or policy.get("torch", {}).get("numProcPerNode"))
    draft.left += [*runtime.left, *runtime.rest()]


def _of_runtime(draft: Draft, runtime: Manifest) -> tuple[dict[str, Any], dict[str, Any]]:
    """The pod template of its group that trains, that container first, and its machine learning policy.

    The rest of the runtime is reported as of the job itself.
    """
    for key in ("apiVersion", "kind", "metadata"):
        runtime.take(key)
    draft.claims(runtime, "spec", "template", "spec")
    gang_policy.of_runtime(draft, runtime)
    policy: dict[str, Any] = {}
    for path in _POLICY:
        at = policy
        for key in path[:-1]:
            at = at.setdefault(key, {})
        at[path[-1]] = runtime.take("spec", "mlPolicy", *path)
    groups = ("spec", "template", "spec", "replicatedJobs")
    for place in range(runtime.length(*groups)):
        pods = (*groups, place, "template", "spec", "template")
        containers = runtime.peek(*pods, "spec", "containers") or []
        named = [one for one in containers if one.get("name") in ("node", "trainer")]
        if named and runtime.peek(*groups, place, "name") in ("node", "trainer", "trainer-node"):
            others = [dict(one) for one in containers if one is not named[0]]
            template = runtime.take(*pods)
            runtime.take(*groups, place, "name")
            for other in range(runtime.length(*groups)):
                if other != place:
                    runtime.leave(*groups, other, why="put what has to end first into an init container")
            return {**template, "spec": {**template["spec"], "containers": [dict(named[0]), *others]}}, policy
    return {"spec": {"containers": [{"name": "node"}]}}, policy


def _trainer(draft: Draft, container: dict[str, Any]) -> None:
    """Lays what the job says of its trainer over what the runtime says."""
    for name in _TRAINER:
        said = draft.manifest.take("spec", "trainer", name, to=f"spec.template.spec.containers[0].{name}")
        if said is not None:
            container[name] = said
    variables = draft.manifest.take("spec", "trainer", "env", to="spec.template.spec.containers[0].env") or []
    named = {one.get("name") for one in variables}
    kept = [one for one in container.get("env") or () if one.get("name") not in named]
    if kept or variables:
        container["env"] = [*kept, *variables]
    resources = draft.manifest.take(
        "spec", "trainer", "resourcesPerNode", to="spec.template.spec.containers[0].resources"
    )
    if resources is not None:
        container["resources"] = resources
