"""Finds the training jobs of other systems among a file's objects and converts each to a TrainingJob.

Pure. Each kind has a function that reads the fields that it knows and gives a reason for each field that it leaves out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from surefoot_operator.convert import job_draft
from surefoot_operator.convert.job_draft import (
    RESTARTS,
    Conversion,
    JobDraft,
    build_trainer_template,
    parse_launcher_command,
)
from surefoot_operator.convert.manifest import ForeignManifest, NotConvertible

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
    "metrics": "no autoscaler changes the number of workers; use `kubectl scale`",
}
PERMANENT_EXIT_CODES = [
    {"name": "permanent", "action": "FailJob", "onExitCodes": {"operator": "In", "values": list(range(1, 65))}},
    {"name": "permanent-too", "action": "FailJob", "onExitCodes": {"operator": "In", "values": list(range(65, 128))}},
]
"""Kubeflow's restart policy `ExitCode`: codes 1 to 127 fail the job, 128 and above restart it."""


def convert_pytorch_job(draft: JobDraft, _: Mapping[str, Mapping[str, Any]]) -> None:
    """Converts Kubeflow's PyTorchJob."""
    manifest = draft.manifest
    draft.copy_metadata()

    # limits and cleanup
    for name, field in _RUN_POLICY.items():
        draft.copy_field(("spec", "runPolicy", name), "runPolicy", field)
    draft.copy_field(("spec", "runPolicy", "suspend"), "suspend")
    convert_clean_pod_policy(draft, ("spec", "runPolicy", "cleanPodPolicy"))
    manifest.skip_field("spec", "runPolicy", "managedBy", why="it names a controller of PyTorchJobs")

    # elasticity
    for name, why in _LEFT_OUT_OF_PYTORCH_JOB.items():
        manifest.skip_field("spec", "elasticPolicy", name, why=why)
    draft.copy_field(("spec", "elasticPolicy", "minReplicas"), "elasticPolicy", "minReplicas")
    draft.copy_field(("spec", "elasticPolicy", "maxReplicas"), "elasticPolicy", "maxReplicas")
    draft.copy_field(("spec", "elasticPolicy", "maxRestarts"), "failurePolicy", "maxRestarts")
    ranks = manifest.take_field("spec", "nprocPerNode", to="spec.nprocPerNode")
    ranks = manifest.take_field("spec", "elasticPolicy", "nProcPerNode", to="spec.nprocPerNode") or ranks
    _read_pytorch_replicas(draft, ranks)


def convert_clean_pod_policy(draft: JobDraft, path: tuple[str, ...]) -> None:
    """Copies `Running` and `All`; `None` has no counterpart."""
    policy = draft.manifest.peek_field(*path)
    if policy in ("Running", "All"):
        draft.manifest.take_field(*path, to="spec.runPolicy.cleanPodPolicy")
        draft.set_field(policy, "runPolicy", "cleanPodPolicy")
    elif policy is not None:
        draft.manifest.skip_field(
            *path, why="pods that have ended stay for their logs; pods that still run are deleted"
        )


def _read_pytorch_replicas(draft: JobDraft, ranks: object) -> None:
    """Converts master and workers to one group of equal workers."""
    manifest = draft.manifest
    root = ("spec", "pytorchReplicaSpecs")
    templates = {role: manifest.take_field(*root, role, "template", to="spec.template") for role in _ROLES}
    roles = [role for role in _ROLES if templates[role] is not None]
    if not roles:
        raise NotConvertible("spec.pytorchReplicaSpecs: a Master or a Worker with a pod template is needed")
    counts = [manifest.take_field(*root, role, "replicas", to="spec.replicas") for role in roles]
    counts = [1 if count is None else count for count in counts]
    first = roles[0]
    trainer = build_trainer_template(templates[first], ("pytorch",), ".".join((*root, first, "template")))
    if len(roles) > 1 and templates["Master"] != templates["Worker"]:
        draft.to_do.append(
            "spec.template is that of the Master, which differs from the Worker's: in a TrainingJob all workers have the same template"
        )
    # master and workers together are the replicas; a placeholder among them becomes a task for the user
    numbers = [trainer.resolve_integer(count) for count in counts]
    replicas = sum(n for n in numbers if n is not None) if None not in numbers else counts[numbers.index(None)]

    for role in roles:
        _convert_restart_policy(draft, (*root, role, "restartPolicy"))
    priority = manifest.take_field(
        "spec", "runPolicy", "schedulingPolicy", "priorityClass", to="spec.template.spec.priorityClassName"
    )
    if priority is not None:
        trainer.template["spec"].setdefault("priorityClassName", priority)
    # the scheduler of the pods identifies the gang scheduler, so the template comes first
    draft.use_template(trainer)
    job_draft.convert_scheduling_policy(draft, trainer.template["spec"].get("schedulerName"))
    draft.set_worker_counts(trainer, replicas, ranks)


def _convert_restart_policy(draft: JobDraft, path: tuple[str, ...]) -> None:
    """Converts `Never` and `ExitCode`; others match the behavior of the operator."""
    policy = draft.manifest.peek_field(*path)
    if policy == "Never":
        draft.manifest.take_field(*path, to="spec.failurePolicy.maxRestarts")
        draft.set_field(0, "failurePolicy", "maxRestarts")
    elif policy == "ExitCode":
        draft.manifest.take_field(*path, to="spec.failurePolicy.rules")
        draft.set_field(PERMANENT_EXIT_CODES, "failurePolicy", "rules")
    else:
        draft.manifest.skip_field(*path, why=RESTARTS)


# ---- hyperpod job ----------------------------------------------------------------------------------------------------
# Converts SageMaker HyperPod's HyperPodPyTorchJob (sagemaker.amazonaws.com/v1).

_ELASTIC = {
    "minReplicas": "minReplicas",
    "maxReplicas": "maxReplicas",
    "replicaIncrementStep": "replicaIncrementStep",
    "faultyScaleDownTimeoutInSeconds": "faultyScaleDownTimeoutSeconds",
    "scaleUpSnoozeTimeInSeconds": "scaleUpSnoozeSeconds",
}
_SKIPPED_ELASTIC = {
    "gracefulShutdownTimeoutInSeconds": "before a pod is evicted, all ranks save one step within the grace period of the template",
    "scalingTimeoutInSeconds": "the number of workers changes once they are warm; runPolicy.schedulingDeadlineSeconds limits the wait",
}
_ONE_GROUP = "a TrainingJob is one group of equal workers"
_SKIPPED_MONITORING = "steps and heartbeats are monitored, not log lines"


def convert_hyperpod_job(draft: JobDraft, _: Mapping[str, Mapping[str, Any]]) -> None:
    """Converts SageMaker HyperPod's HyperPodPyTorchJob."""
    manifest = draft.manifest
    draft.copy_metadata()
    policy = ("spec", "runPolicy")

    # limits and cleanup
    draft.copy_field((*policy, "jobMaxRetryCount"), "runPolicy", "backoffLimit")
    draft.copy_field((*policy, "ttlSecondsAfterFinished"), "runPolicy", "ttlSecondsAfterFinished")
    draft.copy_field((*policy, "suspend"), "suspend")
    convert_clean_pod_policy(draft, (*policy, "cleanPodPolicy"))
    draft.copy_field((*policy, "restartPolicy", "evalPeriodSeconds"), "failurePolicy", "evalPeriodSeconds")
    draft.copy_field((*policy, "restartPolicy", "maxFullJobRestarts"), "failurePolicy", "maxRestarts")
    manifest.skip_field(
        *policy,
        "restartPolicy",
        "numRestartBeforeFullJobRestart",
        why="trainers restart in place while their worker runs",
    )
    manifest.skip_field(*policy, "workerMaxRetryCount", why="restarts are limited for the job, not for a worker")

    # elasticity
    for name, field in _ELASTIC.items():
        draft.copy_field(("spec", "elasticPolicy", name), "elasticPolicy", field)
    draft.copy_field(
        ("spec", "elasticPolicy", "replicaDiscreteValues"), "elasticPolicy", "replicaDiscreteValues", integer_only=False
    )
    for name, why in _SKIPPED_ELASTIC.items():
        manifest.skip_field("spec", "elasticPolicy", name, why=why)
    _convert_monitoring(draft)
    ranks = manifest.take_field("spec", "nprocPerNode", to="spec.nprocPerNode")
    _read_hyperpod_replicas(draft, ranks)


def _convert_monitoring(draft: JobDraft) -> None:
    """Converts the time limits of log monitoring to limits for steps; its patterns are left out."""
    seconds: dict[str, list[int]] = {"startup": [], "step": []}
    for root in (("spec", "runPolicy", "logMonitoringConfiguration"), ("spec", "logMonitoringConfiguration")):
        for index in range(draft.manifest.length(*root)):
            startup_seconds = draft.manifest.take_field(
                *root, index, "expectedStartCutOffInSeconds", to="spec.runPolicy.startupDeadlineSeconds"
            )
            step_seconds = draft.manifest.take_field(
                *root, index, "expectedRecurringFrequencyInSeconds", to="spec.healthPolicy.stepTimeoutSeconds"
            )
            seconds["startup"] += [startup_seconds] if isinstance(startup_seconds, int) else []
            seconds["step"] += [step_seconds] if isinstance(step_seconds, int) else []
            draft.manifest.skip_field(*root, index, why=_SKIPPED_MONITORING)
    # several rules may watch the same job: only the longest limit tolerates what each of them does
    if seconds["startup"]:
        draft.set_field(max(seconds["startup"]), "runPolicy", "startupDeadlineSeconds")
    if seconds["step"]:
        draft.set_field(max(seconds["step"]), "healthPolicy", "stepTimeoutSeconds")


def _read_hyperpod_replicas(draft: JobDraft, ranks: object) -> None:
    """Converts the first group of workers, and reports the others as left out."""
    manifest, root = draft.manifest, ("spec", "replicaSpecs", 0)
    template = manifest.take_field(*root, "template", to="spec.template")
    if not isinstance(template, dict):
        raise NotConvertible("spec.replicaSpecs: an entry with a pod template is needed")
    trainer = build_trainer_template(template, ("pytorch", "ptjob", "trainer"), "spec.replicaSpecs[0].template")
    replicas = manifest.take_field(*root, "replicas", to="spec.replicas")
    max_replicas = manifest.take_field(*root, "maxReplicas", to="spec.elasticPolicy.maxReplicas")
    min_replicas = trainer.resolve_integer(replicas if replicas is not None else 1)
    if (
        trainer.resolve_integer(max_replicas) is not None
        and "elasticPolicy" not in draft.spec
        and min_replicas is not None
    ):
        draft.set_field(
            {"minReplicas": min_replicas, "maxReplicas": trainer.resolve_integer(max_replicas)}, "elasticPolicy"
        )
    manifest.skip_field(*root, "name", why=_ONE_GROUP)
    for index in range(1, manifest.length("spec", "replicaSpecs")):
        manifest.skip_field("spec", "replicaSpecs", index, why=f"{_ONE_GROUP}; apply this group separately")
    for path in (("spec",), root):
        draft.skip_volume_claims(manifest, *path)
    draft.copy_field((*root, "spares"), "spares")
    draft.use_template(trainer)
    draft.set_worker_counts(trainer, 1 if replicas is None else replicas, ranks)


# ---- job set ---------------------------------------------------------------------------------------------------------
# Converts a JobSet (jobset.x-k8s.io/v1alpha2): the one group of pods that trains.

CONTAINERS = ("trainer", "pytorch", "node")
_NAMES = ("trainer", "worker", "node", "train", "pytorch")
_SKIPPED_OF_JOB = {
    "backoffLimit": "restarts are limited for the job, not for a pod",
    "backoffLimitPerIndex": "restarts are limited for the job, not for a pod",
    "podReplacementPolicy": "a lost worker is replaced at once, because stores reject writers of older generations",
    "podFailurePolicy": "failurePolicy.rules match exit codes",
    "ttlSecondsAfterFinished": "set it for the whole job, as runPolicy.ttlSecondsAfterFinished",
}
_LEFT_OUT_OF_JOB_SET = {
    "successPolicy": "a job is complete when all its ranks are",
    "startupPolicy": "all workers start together",
    "network": "agents give each rank its address",
    "coordinator": "agents give each rank its address",
    "managedBy": "it names a controller of JobSets",
}


def convert_job_set(draft: JobDraft, _: Mapping[str, Mapping[str, Any]]) -> None:
    """Converts a JobSet by its group of pods that trains."""
    manifest = draft.manifest
    draft.copy_metadata()
    draft.copy_field(("spec", "suspend"), "suspend")
    draft.copy_field(("spec", "ttlSecondsAfterFinished"), "runPolicy", "ttlSecondsAfterFinished")
    draft.copy_field(("spec", "failurePolicy", "maxRestarts"), "failurePolicy", "maxRestarts")
    manifest.skip_field("spec", "failurePolicy", "rules", why="failurePolicy.rules match exit codes")
    manifest.skip_field(
        "spec", "failurePolicy", "restartStrategy", why="trainers restart in place while their worker runs"
    )
    for name, why in _LEFT_OUT_OF_JOB_SET.items():
        manifest.skip_field("spec", name, why=why)
    draft.skip_volume_claims(manifest, "spec")

    # the group of pods that trains becomes the job's template
    group_index = find_training_group(draft)
    root = ("spec", "replicatedJobs", group_index)
    template = manifest.take_field(*root, "template", "spec", "template", to="spec.template")
    if not isinstance(template, dict):
        raise NotConvertible(f"spec.replicatedJobs[{group_index}]: a pod template is needed")
    trainer = build_trainer_template(template, CONTAINERS, f"spec.replicatedJobs[{group_index}].template.spec.template")
    groups = manifest.take_field(*root, "replicas", to="spec.replicas")
    pods = manifest.take_field(*root, "template", "spec", "parallelism", to="spec.replicas")
    for name in ("completions", "completionMode"):
        manifest.skip_field(*root, "template", "spec", name, why="a job is complete when all its ranks are")
    manifest.skip_field(
        *root, "template", "metadata", why="it applies to Jobs; labels and annotations of the pods are kept"
    )
    draft.copy_field((*root, "template", "spec", "activeDeadlineSeconds"), "runPolicy", "activeDeadlineSeconds")
    for name, why in _SKIPPED_OF_JOB.items():
        manifest.skip_field(*root, "template", "spec", name, why=why)
    for name in ("name", "groupName"):
        manifest.skip_field(*root, name, why="a TrainingJob is one group of equal workers")
    manifest.skip_field(
        *root, "dependsOn", why="put tasks that must end first into an init container, or apply them before"
    )
    draft.use_template(trainer)
    # each of the replicated Jobs has `parallelism` pods
    numbers = [trainer.resolve_integer(1 if count is None else count) for count in (groups, pods)]
    are_integers = numbers[0] is not None and numbers[1] is not None
    draft.set_worker_counts(
        trainer, (numbers[0] or 1) * (numbers[1] or 1) if are_integers else f"{groups} × {pods}", None
    )


def find_training_group(draft: JobDraft) -> int:
    """Returns the index of the group of pods that trains, and reports the others as left out.

    It is the only group, or the one with the most likely name, or the one with the most pods.

    Raises:
        NotConvertible: there is no group.
    """
    manifest, root = draft.manifest, ("spec", "replicatedJobs")
    count = manifest.length(*root)
    if not count:
        raise NotConvertible("spec.replicatedJobs: at least one group of pods is needed")
    ranking = []
    for index in range(count):
        counts = (
            manifest.peek_field(*root, index, "replicas"),
            manifest.peek_field(*root, index, "template", "spec", "parallelism"),
        )
        groups, pods = (value if isinstance(value, int) else 1 for value in counts)
        group_name = str(manifest.peek_field(*root, index, "name") or "").rstrip("s")
        name_rank = _NAMES.index(group_name) if group_name in _NAMES else len(_NAMES)
        ranking.append((name_rank, -groups * pods, index))
    chosen = min(ranking)[-1]
    for index in range(count):
        if index != chosen:
            manifest.skip_field(
                *root, index, why="a TrainingJob is one group of equal workers; apply this group separately"
            )
    if count > 1:
        name = manifest.peek_field(*root, chosen, "name")
        draft.to_do.append(
            f"spec.template is that of {name!s:.60}, one of {count} groups: check that it is the group that trains"
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
"""Fields that are read from the `mlPolicy` of a runtime."""
_TRAINER = ("command", "args", "image")


def convert_train_job(draft: JobDraft, runtimes: Mapping[str, Mapping[str, Any]]) -> None:
    """Converts Kubeflow's TrainJob with its training runtime.

    Args:
        runtimes: the training runtimes in the same file, by name.
    """
    manifest = draft.manifest
    draft.copy_metadata()
    draft.copy_field(("spec", "suspend"), "suspend")
    draft.copy_field(("spec", "activeDeadlineSeconds"), "runPolicy", "activeDeadlineSeconds")
    draft.copy_field(("spec", "ttlSecondsAfterFinished"), "runPolicy", "ttlSecondsAfterFinished")
    manifest.skip_field("spec", "managedBy", why="it names a controller of TrainJobs")
    manifest.skip_field(
        "spec", "initializer", why="download data and model in an init container, or read them where they are"
    )
    for name in ("runtimePatches", "podTemplateOverrides", "podSpecOverrides"):
        manifest.skip_field("spec", name, why="it patches the pods: write the patched fields into template.spec")
        if manifest.peek_field("spec", name) is not None:
            draft.to_do.append(f"spec.{name} patches the pods: write the patched fields into spec.template")

    # image, resources and number of nodes may come from the runtime, which the job overrides
    name = str(manifest.peek_field("spec", "runtimeRef", "name") or "")
    manifest.take_field("spec", "runtimeRef", to="spec.template")
    runtime = ForeignManifest(runtimes.get(name) or {}, f"{name}:")
    if name not in runtimes:
        draft.to_do.append(
            f"the runtime {name or 'of the job'} is not in the file: add it, because it has the image and other fields of the"
            f" pods (kubectl get clustertrainingruntime {name} -o yaml)"
        )
    template, policy = _read_runtime(draft, runtime)
    container = template["spec"]["containers"][0]
    _apply_trainer(draft, container)
    trainer = build_trainer_template(template, CONTAINERS, "spec.trainer")
    workers = manifest.take_field("spec", "trainer", "numNodes", to="spec.replicas")
    ranks = manifest.take_field("spec", "trainer", "numProcPerNode", to="spec.nprocPerNode")
    for name, field in (("minNodes", "minReplicas"), ("maxNodes", "maxReplicas")):
        draft.set_field(policy.get("torch", {}).get("elasticPolicy", {}).get(name), "elasticPolicy", field)
    draft.use_template(trainer)
    draft.set_worker_counts(
        trainer, workers or policy.get("numNodes") or 1, ranks or policy.get("torch", {}).get("numProcPerNode")
    )
    draft.skipped_fields += [*runtime.skipped_fields, *runtime.unused_fields()]


def _read_runtime(draft: JobDraft, runtime: ForeignManifest) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the pod template of the runtime's group that trains, with that container first, and its `mlPolicy`.

    The other fields of the runtime are reported like those of the job.
    """
    for key in ("apiVersion", "kind", "metadata"):
        runtime.take_field(key)
    draft.skip_volume_claims(runtime, "spec", "template", "spec")
    job_draft.convert_pod_group_policy(draft, runtime)
    policy: dict[str, Any] = {}
    for path in _POLICY:
        section = policy
        for key in path[:-1]:
            section = section.setdefault(key, {})
        section[path[-1]] = runtime.take_field("spec", "mlPolicy", *path)
    groups = ("spec", "template", "spec", "replicatedJobs")
    for index in range(runtime.length(*groups)):
        pods = (*groups, index, "template", "spec", "template")
        containers = runtime.peek_field(*pods, "spec", "containers") or []
        trainers = [container for container in containers if container.get("name") in ("node", "trainer")]
        if trainers and runtime.peek_field(*groups, index, "name") in ("node", "trainer", "trainer-node"):
            others = [dict(container) for container in containers if container is not trainers[0]]
            template = runtime.take_field(*pods)
            runtime.take_field(*groups, index, "name")
            for other in range(runtime.length(*groups)):
                if other != index:
                    runtime.skip_field(*groups, other, why="put tasks that must end first into an init container")
            return {**template, "spec": {**template["spec"], "containers": [dict(trainers[0]), *others]}}, policy
    # without the runtime, the job's own command and image still make a template to complete
    return {"spec": {"containers": [{"name": "node"}]}}, policy


def _apply_trainer(draft: JobDraft, container: dict[str, Any]) -> None:
    """Overrides the container of the runtime with the `trainer` fields of the job."""
    for name in _TRAINER:
        value = draft.manifest.take_field("spec", "trainer", name, to=f"spec.template.spec.containers[0].{name}")
        if value is not None:
            container[name] = value
    variables = draft.manifest.take_field("spec", "trainer", "env", to="spec.template.spec.containers[0].env") or []
    overridden = {variable.get("name") for variable in variables}
    other_variables = [v for v in container.get("env") or () if v.get("name") not in overridden]
    if other_variables or variables:
        container["env"] = [*other_variables, *variables]
    resources = draft.manifest.take_field(
        "spec", "trainer", "resourcesPerNode", to="spec.template.spec.containers[0].resources"
    )
    if resources is not None:
        container["resources"] = resources


# ---- conversion ------------------------------------------------------------------------------------------------------

Converter = Callable[[JobDraft, Mapping[str, Mapping[str, Any]]], None]

KINDS: dict[tuple[str, str], Converter] = {
    ("kubeflow.org", "PyTorchJob"): convert_pytorch_job,
    ("trainer.kubeflow.org", "TrainJob"): convert_train_job,
    ("sagemaker.amazonaws.com", "HyperPodPyTorchJob"): convert_hyperpod_job,
    ("jobset.x-k8s.io", "JobSet"): convert_job_set,
}
KNOWN = ", ".join(kind for _, kind in KINDS)


def convert_documents(documents: Sequence[Mapping[str, Any]]) -> tuple[list[Conversion], list[str]]:
    """Converts every training job among the objects of a file.

    Returns:
        The conversions, and the names of the other objects.

    Raises:
        NotConvertible: there is no such job, or one of them has no container that could train.
    """
    runtimes = {_name(document): document for document in documents if document.get("kind") in RUNTIMES}
    conversions, others = [], []
    for document in documents:
        name = f"{document.get('kind', 'an object')!s:.60} {_name(document):.60}".strip()
        convert = KINDS.get((str(document.get("apiVersion", "")).partition("/")[0], str(document.get("kind", ""))))
        if convert is None:
            others.append(name)
            continue
        draft = JobDraft(ForeignManifest(document))
        for key in ("apiVersion", "kind"):
            draft.manifest.take_field(key)
        draft.manifest.skip_field("status", why="the operator writes the status of a TrainingJob")
        try:
            convert(draft, runtimes)
        except (AttributeError, TypeError) as error:
            # converters assume the types of the API and check none of them
            raise NotConvertible(f"{name} has a field of a type that its API does not allow ({error})") from error
        conversions.append(draft.build_conversion(name))
    if not conversions:
        raise NotConvertible(f"the file has none of {KNOWN}; it has {', '.join(others) or 'no objects'}")
    return conversions, others


def _name(document: Mapping[str, Any]) -> str:
    metadata = document.get("metadata")
    return str(metadata.get("name", "")) if isinstance(metadata, Mapping) else ""


def convert_command(words: Sequence[str]) -> Conversion:
    """Converts a launcher's command line.

    Raises:
        NotConvertible: it does not start torchrun.
    """
    launch = parse_launcher_command(words)
    if launch is None:
        raise NotConvertible("the command line does not begin with torchrun")
    # a template with that command goes the way of all others, which removes the launcher
    draft = JobDraft(ForeignManifest({}))
    trainer = build_trainer_template(
        {"spec": {"containers": [{"name": "trainer", "command": list(words)}]}}, (), "the command"
    )
    script = next((word for word in launch.program[1:] if not word.startswith("-")), "training")
    # the script's name as a Kubernetes name
    stem = script.rsplit("/", 1)[-1].removesuffix(".py").replace("_", "-").replace(".", "-").lower()
    draft.metadata["name"] = stem.strip("-") or "training"
    draft.use_template(trainer)
    draft.set_worker_counts(trainer, None, None)
    draft.to_do.append(
        "the container's image: set one with the program, torch and surefoot (`surefoot local` needs none)"
    )
    return draft.build_conversion("a command line")
