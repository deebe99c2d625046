"""Finds the training jobs among a file's objects and converts each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from surefoot_operator.convert import job_draft
from surefoot_operator.convert.job_draft import RESTARTS, Conversion, Draft, read_launch, trainer_template
from surefoot_operator.convert.manifest import Manifest, NotConvertible

# ---- pytorch job -----------------------------------------------------------------------------------------------------
# Converts Kubeflow's PyTorchJob (kubeflow.org/v1).

_ROLES = ("Master", "Worker")
_RUN_POLICY = {
    "activeDeadlineSeconds": "activeDeadlineSeconds",
    "ttlSecondsAfterFinished": "ttlSecondsAfterFinished",
    "backoffLimit": "backoffLimit",
}
_LEFT_OUT_OF_PYTORCH_JOB = {
    "rdzvBackend": "agents give the ranks their rendezvous",
    "rdzvHost": "agents give the ranks their rendezvous",
    "rdzvPort": "agents give the ranks their rendezvous",
    "rdzvId": "agents give the ranks their rendezvous",
    "rdzvConf": "agents give the ranks their rendezvous",
    "standalone": "agents give the ranks their rendezvous",
    "metrics": "no autoscaler changes a job's size; `kubectl scale` does",
}
PERMANENT_EXIT_CODES = [
    {"name": "permanent", "action": "FailJob", "onExitCodes": {"operator": "In", "values": list(range(1, 65))}},
    {"name": "permanent-too", "action": "FailJob", "onExitCodes": {"operator": "In", "values": list(range(65, 128))}},
]
"""Kubeflow's `ExitCode`: 1 to 127 are final, 128 and above are tried again."""


def convert_pytorch_job(draft: Draft, _: Mapping[str, Mapping[str, Any]]) -> None:
    """Fills the draft from its manifest."""
    manifest = draft.manifest
    draft.describe()
    for name, field in _RUN_POLICY.items():
        draft.copy_field(("spec", "runPolicy", name), "runPolicy", field)
    draft.copy_field(("spec", "runPolicy", "suspend"), "suspend")
    clean_pod_policy(draft, ("spec", "runPolicy", "cleanPodPolicy"))
    manifest.skip("spec", "runPolicy", "managedBy", why="it names a controller of PyTorchJobs")
    for name, why in _LEFT_OUT_OF_PYTORCH_JOB.items():
        manifest.skip("spec", "elasticPolicy", name, why=why)
    draft.copy_field(("spec", "elasticPolicy", "minReplicas"), "elasticPolicy", "minReplicas")
    draft.copy_field(("spec", "elasticPolicy", "maxReplicas"), "elasticPolicy", "maxReplicas")
    draft.copy_field(("spec", "elasticPolicy", "maxRestarts"), "failurePolicy", "maxRestarts")
    ranks = manifest.take("spec", "nprocPerNode", to="spec.nprocPerNode")
    ranks = manifest.take("spec", "elasticPolicy", "nProcPerNode", to="spec.nprocPerNode") or ranks
    _read_pytorch_replicas(draft, ranks)


def clean_pod_policy(draft: Draft, path: tuple[str, ...]) -> None:
    """Takes `Running` and `All` over; `None` has no counterpart."""
    policy = draft.manifest.peek(*path)
    if policy in ("Running", "All"):
        draft.manifest.take(*path, to="spec.runPolicy.cleanPodPolicy")
        draft.put(policy, "runPolicy", "cleanPodPolicy")
    elif policy is not None:
        draft.manifest.skip(*path, why="pods that have ended stay for their logs, those that run are ended")


def _read_pytorch_replicas(draft: Draft, ranks: object) -> None:
    manifest = draft.manifest
    root = ("spec", "pytorchReplicaSpecs")
    templates = {role: manifest.take(*root, role, "template", to="spec.template") for role in _ROLES}
    there = [role for role in _ROLES if templates[role] is not None]
    if not there:
        raise NotConvertible("spec.pytorchReplicaSpecs: a Master or a Worker with a template is needed")
    asked = [manifest.take(*root, role, "replicas", to="spec.replicas") for role in there]
    asked = [1 if number is None else number for number in asked]
    first = there[0]
    trainer = trainer_template(templates[first], ("pytorch",), ".".join((*root, first, "template")))
    if len(there) > 1 and templates["Master"] != templates["Worker"]:
        draft.to_do.append("spec.template is the Master's; the Worker's is another, and all workers are alike here")
    numbers = [trainer.number(number) for number in asked]
    replicas = sum(n for n in numbers if n is not None) if None not in numbers else asked[numbers.index(None)]
    for role in there:
        _restart_policy(draft, (*root, role, "restartPolicy"))
    priority = manifest.take(
        "spec", "runPolicy", "schedulingPolicy", "priorityClass", to="spec.template.spec.priorityClassName"
    )
    if priority is not None:
        trainer.template["spec"].setdefault("priorityClassName", priority)
    draft.accept(trainer)
    job_draft.gang_of_run_policy(draft, trainer.template["spec"].get("schedulerName"))
    draft.size(trainer, replicas, ranks)


def _restart_policy(draft: Draft, path: tuple[str, ...]) -> None:
    policy = draft.manifest.peek(*path)
    if policy == "Never":
        draft.manifest.take(*path, to="spec.failurePolicy.maxRestarts")
        draft.put(0, "failurePolicy", "maxRestarts")
    elif policy == "ExitCode":
        draft.manifest.take(*path, to="spec.failurePolicy.rules")
        draft.put(PERMANENT_EXIT_CODES, "failurePolicy", "rules")
    else:
        draft.manifest.skip(*path, why=RESTARTS)


# ---- hyperpod job ----------------------------------------------------------------------------------------------------
# Converts SageMaker HyperPod's HyperPodPyTorchJob (sagemaker.amazonaws.com/v1).

_ELASTIC = {
    "minReplicas": "minReplicas",
    "maxReplicas": "maxReplicas",
    "replicaIncrementStep": "replicaIncrementStep",
    "faultyScaleDownTimeoutInSeconds": "faultyScaleDownTimeoutSeconds",
    "scaleUpSnoozeTimeInSeconds": "scaleUpSnoozeSeconds",
}
_ELASTIC_LEFT = {
    "gracefulShutdownTimeoutInSeconds": "a world halts at a saved step, within the template's grace period",
    "scalingTimeoutInSeconds": "the world changes when its workers are there; runPolicy.schedulingDeadlineSeconds bounds it",
}
_ONE_GROUP = "a TrainingJob is one group of equal workers"
_MONITOR_LEFT = "steps and heartbeats tell, no log line does"


def convert_hyperpod_job(draft: Draft, _: Mapping[str, Mapping[str, Any]]) -> None:
    """Fills the draft from its manifest."""
    manifest = draft.manifest
    draft.describe()
    policy = ("spec", "runPolicy")
    draft.copy_field((*policy, "jobMaxRetryCount"), "runPolicy", "backoffLimit")
    draft.copy_field((*policy, "ttlSecondsAfterFinished"), "runPolicy", "ttlSecondsAfterFinished")
    draft.copy_field((*policy, "suspend"), "suspend")
    clean_pod_policy(draft, (*policy, "cleanPodPolicy"))
    draft.copy_field((*policy, "restartPolicy", "evalPeriodSeconds"), "failurePolicy", "evalPeriodSeconds")
    draft.copy_field((*policy, "restartPolicy", "maxFullJobRestarts"), "failurePolicy", "maxRestarts")
    manifest.skip(
        *policy, "restartPolicy", "numRestartBeforeFullJobRestart", why="trainers restart in place where a worker lives"
    )
    manifest.skip(*policy, "workerMaxRetryCount", why="restarts count for the job, not for a worker")
    for name, field in _ELASTIC.items():
        draft.copy_field(("spec", "elasticPolicy", name), "elasticPolicy", field)
    draft.copy_field(
        ("spec", "elasticPolicy", "replicaDiscreteValues"), "elasticPolicy", "replicaDiscreteValues", whole=False
    )
    for name, why in _ELASTIC_LEFT.items():
        manifest.skip("spec", "elasticPolicy", name, why=why)
    _monitoring(draft)
    ranks = manifest.take("spec", "nprocPerNode", to="spec.nprocPerNode")
    _read_hyperpod_replicas(draft, ranks)


def _monitoring(draft: Draft) -> None:
    """Its limits in seconds are those of steps here; its patterns are left."""
    seconds: dict[str, list[int]] = {"startup": [], "step": []}
    for root in (("spec", "runPolicy", "logMonitoringConfiguration"), ("spec", "logMonitoringConfiguration")):
        for place in range(draft.manifest.length(*root)):
            start = draft.manifest.take(
                *root, place, "expectedStartCutOffInSeconds", to="spec.runPolicy.startupDeadlineSeconds"
            )
            again = draft.manifest.take(
                *root, place, "expectedRecurringFrequencyInSeconds", to="spec.healthPolicy.stepTimeoutSeconds"
            )
            seconds["startup"] += [start] if isinstance(start, int) else []
            seconds["step"] += [again] if isinstance(again, int) else []
            draft.manifest.skip(*root, place, why=_MONITOR_LEFT)
    if seconds["startup"]:
        draft.put(max(seconds["startup"]), "runPolicy", "startupDeadlineSeconds")
    if seconds["step"]:
        draft.put(max(seconds["step"]), "healthPolicy", "stepTimeoutSeconds")


def _read_hyperpod_replicas(draft: Draft, ranks: object) -> None:
    manifest, root = draft.manifest, ("spec", "replicaSpecs", 0)
    template = manifest.take(*root, "template", to="spec.template")
    if not isinstance(template, dict):
        raise NotConvertible("spec.replicaSpecs: one with a template is needed")
    trainer = trainer_template(template, ("pytorch", "ptjob", "trainer"), "spec.replicaSpecs[0].template")
    replicas = manifest.take(*root, "replicas", to="spec.replicas")
    most = manifest.take(*root, "maxReplicas", to="spec.elasticPolicy.maxReplicas")
    least = trainer.number(replicas if replicas is not None else 1)
    if trainer.number(most) is not None and "elasticPolicy" not in draft.spec and least is not None:
        draft.put({"minReplicas": least, "maxReplicas": trainer.number(most)}, "elasticPolicy")
    manifest.skip(*root, "name", why=_ONE_GROUP)
    for place in range(1, manifest.length("spec", "replicaSpecs")):
        manifest.skip("spec", "replicaSpecs", place, why=f"{_ONE_GROUP}; apply this one beside it")
    for path in (("spec",), root):
        draft.claims(manifest, *path)
    draft.copy_field((*root, "spares"), "spares")
    draft.accept(trainer)
    draft.size(trainer, 1 if replicas is None else replicas, ranks)


# ---- job set ---------------------------------------------------------------------------------------------------------
# Converts a JobSet (jobset.x-k8s.io/v1alpha2) by its group that trains.

CONTAINERS = ("trainer", "pytorch", "node")
_NAMES = ("trainer", "worker", "node", "train", "pytorch")
_JOB_LEFT = {
    "backoffLimit": "restarts count for the job, not for a pod",
    "backoffLimitPerIndex": "restarts count for the job, not for a pod",
    "podReplacementPolicy": "a lost worker is replaced at once, fenced by its epoch",
    "podFailurePolicy": "failurePolicy.rules match exit codes",
    "ttlSecondsAfterFinished": "it is the job's",
}
_LEFT_OUT_OF_JOB_SET = {
    "successPolicy": "a job is complete when all its ranks are",
    "startupPolicy": "all workers start together",
    "network": "agents give each rank its address",
    "coordinator": "agents give each rank its address",
    "managedBy": "it names a controller of JobSets",
}


def convert_job_set(draft: Draft, _: Mapping[str, Mapping[str, Any]]) -> None:
    """Fills the draft from its manifest."""
    manifest = draft.manifest
    draft.describe()
    draft.copy_field(("spec", "suspend"), "suspend")
    draft.copy_field(("spec", "ttlSecondsAfterFinished"), "runPolicy", "ttlSecondsAfterFinished")
    draft.copy_field(("spec", "failurePolicy", "maxRestarts"), "failurePolicy", "maxRestarts")
    manifest.skip("spec", "failurePolicy", "rules", why="failurePolicy.rules match exit codes")
    manifest.skip("spec", "failurePolicy", "restartStrategy", why="trainers restart in place where a worker lives")
    for name, why in _LEFT_OUT_OF_JOB_SET.items():
        manifest.skip("spec", name, why=why)
    draft.claims(manifest, "spec")
    place = group_that_trains(draft)
    root = ("spec", "replicatedJobs", place)
    template = manifest.take(*root, "template", "spec", "template", to="spec.template")
    if not isinstance(template, dict):
        raise NotConvertible(f"spec.replicatedJobs[{place}]: a pod template is needed")
    trainer = trainer_template(template, CONTAINERS, f"spec.replicatedJobs[{place}].template.spec.template")
    groups = manifest.take(*root, "replicas", to="spec.replicas")
    pods = manifest.take(*root, "template", "spec", "parallelism", to="spec.replicas")
    for name in ("completions", "completionMode"):
        manifest.skip(*root, "template", "spec", name, why="a job is complete when all its ranks are")
    manifest.skip(*root, "template", "metadata", why="it is of Jobs; the pods' own labels and annotations are kept")
    draft.copy_field((*root, "template", "spec", "activeDeadlineSeconds"), "runPolicy", "activeDeadlineSeconds")
    for name, why in _JOB_LEFT.items():
        manifest.skip(*root, "template", "spec", name, why=why)
    for name in ("name", "groupName"):
        manifest.skip(*root, name, why="a TrainingJob is one group of equal workers")
    manifest.skip(*root, "dependsOn", why="put what has to end first into an init container, or apply it before")
    draft.accept(trainer)
    number = [trainer.number(1 if said is None else said) for said in (groups, pods)]
    known = number[0] is not None and number[1] is not None
    draft.size(trainer, (number[0] or 1) * (number[1] or 1) if known else f"{groups} × {pods}", None)


def group_that_trains(draft: Draft) -> int:
    """Finds the place of the one group of pods that trains.

    That is the only one, else the one that is called so, else the one with the most pods.

    Raises:
        NotConvertible: there is none.
    """
    manifest, root = draft.manifest, ("spec", "replicatedJobs")
    count = manifest.length(*root)
    if not count:
        raise NotConvertible("spec.replicatedJobs: a group of pods is needed")
    rank = []
    for place in range(count):
        told = manifest.peek(*root, place, "replicas"), manifest.peek(*root, place, "template", "spec", "parallelism")
        groups, pods = (one if isinstance(one, int) else 1 for one in told)
        named = str(manifest.peek(*root, place, "name") or "").rstrip("s")
        rank.append((_NAMES.index(named) if named in _NAMES else len(_NAMES), -groups * pods, place))
    chosen = min(rank)[-1]
    for place in range(count):
        if place != chosen:
            manifest.skip(*root, place, why="a TrainingJob is one group of equal workers; apply this one beside it")
    if count > 1:
        name = manifest.peek(*root, chosen, "name")
        draft.to_do.append(
            f"spec.template is that of {name!s:.60}, one of {count} groups: see that it is the one that trains"
        )
    return chosen


# ---- train job -------------------------------------------------------------------------------------------------------
# Converts Kubeflow's TrainJob (trainer.kubeflow.org/v1alpha1) and its runtime.

RUNTIMES = ("ClusterTrainingRuntime", "TrainingRuntime")
_POLICY = (
    ("numNodes",),
    ("torch", "numProcPerNode"),
    ("torch", "elasticPolicy", "minNodes"),
    ("torch", "elasticPolicy", "maxNodes"),
)
"""What is read of a runtime's machine learning policy."""
_TRAINER = ("command", "args", "image")


def convert_train_job(draft: Draft, runtimes: Mapping[str, Mapping[str, Any]]) -> None:
    """Fills the draft from its manifest.

    Args:
        runtimes: the training runtimes that stand beside it in the file, by name.
    """
    manifest = draft.manifest
    draft.describe()
    draft.copy_field(("spec", "suspend"), "suspend")
    draft.copy_field(("spec", "activeDeadlineSeconds"), "runPolicy", "activeDeadlineSeconds")
    draft.copy_field(("spec", "ttlSecondsAfterFinished"), "runPolicy", "ttlSecondsAfterFinished")
    manifest.skip("spec", "managedBy", why="it names a controller of TrainJobs")
    manifest.skip("spec", "initializer", why="bring data and model in an init container, or read them where they are")
    for name in ("runtimePatches", "podTemplateOverrides", "podSpecOverrides"):
        manifest.skip("spec", name, why="write into template.spec what it patches")
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
    draft.skipped_fields += [*runtime.skipped_fields, *runtime.unused_fields()]


def _of_runtime(draft: Draft, runtime: Manifest) -> tuple[dict[str, Any], dict[str, Any]]:
    """The pod template of its group that trains, that container first, and its machine learning policy.

    The rest of the runtime is reported as of the job itself.
    """
    for key in ("apiVersion", "kind", "metadata"):
        runtime.take(key)
    draft.claims(runtime, "spec", "template", "spec")
    job_draft.gang_of_runtime(draft, runtime)
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
                    runtime.skip(*groups, other, why="put what has to end first into an init container")
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


# ---- conversion ------------------------------------------------------------------------------------------------------

Converter = Callable[[Draft, Mapping[str, Mapping[str, Any]]], None]

KINDS: dict[tuple[str, str], Converter] = {
    ("kubeflow.org", "PyTorchJob"): convert_pytorch_job,
    ("trainer.kubeflow.org", "TrainJob"): convert_train_job,
    ("sagemaker.amazonaws.com", "HyperPodPyTorchJob"): convert_hyperpod_job,
    ("jobset.x-k8s.io", "JobSet"): convert_job_set,
}
KNOWN = ", ".join(kind for _, kind in KINDS)


def converted(documents: Sequence[Mapping[str, Any]]) -> tuple[list[Conversion], list[str]]:
    """Converts every training job among the objects of a file.

    Returns:
        The conversions, and the names of the other objects.

    Raises:
        NotConvertible: there is no such job, or one of them holds nothing that could train.
    """
    runtimes = {_name(one): one for one in documents if one.get("kind") in RUNTIMES}
    found, others = [], []
    for document in documents:
        name = f"{document.get('kind', 'an object')!s:.60} {_name(document):.60}".strip()
        convert = KINDS.get((str(document.get("apiVersion", "")).partition("/")[0], str(document.get("kind", ""))))
        if convert is None:
            others.append(name)
            continue
        draft = Draft(Manifest(document))
        for key in ("apiVersion", "kind"):
            draft.manifest.take(key)
        draft.manifest.skip("status", why="the operator writes a TrainingJob's own")
        try:
            convert(draft, runtimes)
        except (AttributeError, TypeError) as error:
            raise NotConvertible(f"{name} has a field of another kind than its API allows ({error})") from error
        found.append(draft.build(name))
    if not found:
        raise NotConvertible(f"no object here is one of {KNOWN}; there is {', '.join(others) or 'nothing'}")
    return found, others


def _name(document: Mapping[str, Any]) -> str:
    metadata = document.get("metadata")
    return str(metadata.get("name", "")) if isinstance(metadata, Mapping) else ""


def of_command(words: Sequence[str]) -> Conversion:
    """Converts a launcher's command line.

    Raises:
        NotConvertible: it starts no torchrun.
    """
    launch = read_launch(words)
    if launch is None:
        raise NotConvertible("the command line begins with no torchrun")
    draft = Draft(Manifest({}))
    trainer = trainer_template(
        {"spec": {"containers": [{"name": "trainer", "command": list(words)}]}}, (), "the command"
    )
    script = next((word for word in launch.program[1:] if not word.startswith("-")), "training")
    stem = script.rsplit("/", 1)[-1].removesuffix(".py").replace("_", "-").replace(".", "-").lower()
    draft.metadata["name"] = stem.strip("-") or "training"
    draft.accept(trainer)
    draft.size(trainer, None, None)
    draft.to_do.append("the container's image: one with the program, torch and surefoot (not for `surefoot local`)")
    return draft.build("a command line")
