"""Gathers a TrainingJob while another system's object is read.

Pure. Checked at the end as the operator would check it; what is then refused is a thing to do, not an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from surefoot_operator.api.parse import parse_job
from surefoot_operator.api.spec import KIND
from surefoot_operator.api.yaml_names import API_VERSION
from surefoot_operator.convert.manifest import Manifest, Note
from surefoot_operator.convert.trainer_template import Trainer
from surefoot_operator.errors import SpecError

THE_PROGRAM = (
    "the program saves and restores with surefoot.Checkpointer and reads its data elastically, some three lines:"
    " docs/python.md. Without them each restart begins at step 0"
)
_PLACEHOLDER = re.compile(r"\$(?:\{[A-Za-z_]\w*\}|[A-Za-z_]\w*)")
_WRITTEN_ANEW = "the API server writes it anew"
_NOT_OURS = ("kubectl.kubernetes.io/last-applied-configuration",)
_KUEUE = "kueue.x-k8s.io/"
_QUEUE_PREFIXES = (
    _KUEUE,
    "kai.scheduler/",
    "runai/",
    "scheduling.volcano.sh/",
    "volcano.sh/",
    "yunikorn.apache.org/",
)
"""Labels and annotations by which a queueing system finds a job. None of these systems knows a TrainingJob; all read pods."""
_ORDER = [
    "replicas",
    "nprocPerNode",
    "spares",
    "suspend",
    "elasticPolicy",
    "runPolicy",
    "schedulingPolicy",
    "failurePolicy",
    "healthPolicy",
    "checkpoint",
    "template",
]


@dataclass(frozen=True, slots=True)
class Conversion:
    """A TrainingJob, its fields' sources, and what a person does first."""

    source: str
    job: dict[str, Any]
    taken: tuple[Note, ...]
    left: tuple[Note, ...]
    to_do: tuple[str, ...]


@dataclass(slots=True)
class Draft:
    """What is known of the job so far."""

    manifest: Manifest
    metadata: dict[str, Any] = field(default_factory=dict)
    spec: dict[str, Any] = field(default_factory=dict)
    left: list[Note] = field(default_factory=list)
    to_do: list[str] = field(default_factory=list)
    pod_metadata: dict[str, dict[str, str]] = field(default_factory=dict)
    """Labels and annotations of the job that queueing systems have to find on its pods."""

    @property
    def is_queued_by_kueue(self) -> bool:
        """Whether the job, or its pod template, names a queue of Kueue."""
        pod_labels = self.spec.get("template", {}).get("metadata", {}).get("labels") or {}
        return any(name.startswith(_KUEUE) for name in (*self.pod_metadata.get("labels", {}), *pod_labels))

    def put(self, value: object, *path: str) -> None:
        """Writes a field of the spec that has a value."""
        if value is None:
            return
        at = self.spec
        for key in path[:-1]:
            at = at.setdefault(key, {})
        at[path[-1]] = value

    def move(self, source: tuple[str | int, ...], *path: str, whole: bool = True) -> None:
        """Takes a field over as it is.

        One that shall be a number and is none, as a placeholder is, becomes a thing to do.
        """
        value = self.manifest.take(*source, to="spec." + ".".join(path))
        if value is not None and whole and not isinstance(value, int):
            self.to_do.append(f"spec.{'.'.join(path)}: a number, where {value!s:.60} stood")
            return
        self.put(value, *path)

    def describe(self) -> None:
        """Takes over name, namespace, labels and annotations."""
        for key in ("name", "namespace"):
            value = self.manifest.take("metadata", key)
            if value is not None:
                self.metadata[key] = str(value)
        generated = self.manifest.peek("metadata", "generateName")
        if generated and "name" not in self.metadata:
            self.manifest.take("metadata", "generateName", to="metadata.name")
            self.metadata["name"] = str(generated).rstrip("-.")
            self.to_do.append("metadata.name: it was generated; a TrainingJob's name is its own")
        for key in ("labels", "annotations"):
            kept = self.manifest.take("metadata", key) or {}
            self.left += [Note(f"metadata.{key}[{name}]", _WRITTEN_ANEW) for name in kept if name in _NOT_OURS]
            kept = {name: str(value) for name, value in kept.items() if name not in _NOT_OURS}
            for_pods = {name: value for name, value in kept.items() if name.startswith(_QUEUE_PREFIXES)}
            if for_pods:
                # on a TrainingJob the queue would not see them, and the job would run past its quota
                self.pod_metadata[key] = for_pods
                target = f"spec.template.metadata.{key}"
                self.manifest.taken += [Note(f"metadata.{key}[{name}]", f"{target}[{name}]") for name in for_pods]
            if own := {name: value for name, value in kept.items() if name not in for_pods}:
                self.metadata[key] = own
        for key in ("creationTimestamp", "resourceVersion", "uid", "generation", "managedFields"):
            self.manifest.leave("metadata", key, why=_WRITTEN_ANEW)
        self.manifest.leave("metadata", "generateName", why="the object has a name")

    def size(self, trainer: Trainer, replicas: object, ranks: object) -> None:
        """Settles the number of workers, and of ranks in each.

        Manifest and launcher may both say something; the manifest's workers and the launcher's ranks go first.
        """
        launch = trainer.launch
        low, _, high = (launch.nodes if launch is not None else "").partition(":")
        least, most = trainer.number(low), trainer.number(high)
        number = trainer.number(replicas) if replicas is not None else None
        number = number if number is not None or replicas is not None else (most or least)
        if number is None:
            number = 1
            said = f", where {replicas!s:.60} stood" if replicas is not None else ""
            self.to_do.append(f"spec.replicas: how many workers{said}")
        self.put(number, "replicas")
        if least and most and "elasticPolicy" not in self.spec:
            self.put({"minReplicas": least, "maxReplicas": most}, "elasticPolicy")
        self._ranks(trainer, ranks)
        if launch is not None:
            restarts = trainer.number(launch.restarts)
            if restarts is not None and "maxRestarts" not in self.spec.get("failurePolicy", {}):
                self.put(restarts, "failurePolicy", "maxRestarts")
            if launch.dropped:
                dropped = ", ".join(launch.dropped)
                self.left.append(
                    Note("the launcher's options", f"{dropped}: agents start the ranks and give them their rendezvous")
                )

    def _ranks(self, trainer: Trainer, ranks: object) -> None:
        if trainer.launch is None:
            if (trainer.accelerators or 1) > 1 or (trainer.number(ranks) or 1) > 1:
                self.to_do.append(
                    "spec.nprocPerNode: the command started one process a worker; one for each GPU is usual"
                )
            return
        said = trainer.launch.ranks or ranks
        number = trainer.number(said) if said else None
        if number is None and said in ("", None, "auto", "gpu", *_variable(said)):
            number = trainer.accelerators
        if number is None and said:
            self.to_do.append(f"spec.nprocPerNode: how many ranks a worker has, where {said!s:.60} stood")
        if number not in (None, 1):
            self.put(number, "nprocPerNode")

    def accept(self, trainer: Trainer) -> None:
        """Takes the template, and what was found out with it."""
        template = self.spec["template"] = trainer.template
        for key, values in self.pod_metadata.items():
            metadata = template.setdefault("metadata", {})
            # the template's own value is what its pods carried until now
            metadata[key] = {**values, **(metadata.get(key) or {})}
        if self.is_queued_by_kueue and self.spec.pop("suspend", False):
            self.left.append(Note("suspend", "Kueue suspends jobs of other kinds; here it admits each pod"))
        self.left += trainer.left
        self.to_do += trainer.to_do

    def claims(self, manifest: Manifest, *path: str | int) -> None:
        """Reports claims that another controller made and mounted by name."""
        manifest.leave(*path, "volumeClaimPolicies", why="make the claims, and name them in spec.template.spec.volumes")

    def finished(self, source: str) -> Conversion:
        """The job as it would be applied."""
        _within(self.spec)
        spec = {key: self.spec[key] for key in _ORDER if key in self.spec}
        job = {"apiVersion": API_VERSION, "kind": KIND, "metadata": self.metadata, "spec": spec}
        placeholders = sorted(set(_placeholders([job["metadata"], _without_programs(spec.get("template", {}))])))
        if placeholders:
            self.to_do.append(
                f"placeholders are left: {', '.join(placeholders)}; --set NAME=VALUE, or envsubst, fills them"
            )
        missing = sorted(_mounted_and_not_there(spec.get("template", {})))
        if missing:
            self.to_do.append(
                f"spec.template.spec.volumes lacks {', '.join(missing)}, which volumeMounts name: no pod begins without"
            )
        to_do = [*self.to_do, THE_PROGRAM]
        try:
            parse_job(job)
        except SpecError as refused:
            to_do.insert(0, str(refused))
        left = (*self.left, *self.manifest.left, *self.manifest.rest())
        return Conversion(source, job, tuple(self.manifest.taken), left, tuple(dict.fromkeys(to_do)))


def _placeholders(tree: Any) -> Iterator[str]:
    """Values that are nothing but a shell's variable: whoever applied the file put something in their place."""
    if isinstance(tree, Mapping):
        tree = list(tree.values())
    if isinstance(tree, list):
        for item in tree:
            yield from _placeholders(item)
    elif isinstance(tree, str) and _PLACEHOLDER.fullmatch(tree):
        yield tree


def _without_programs(template: Mapping[str, Any]) -> dict[str, Any]:
    """The template without commands, in which a shell's variables are meant."""
    pod = template.get("spec", {})
    containers = [
        {key: value for key, value in one.items() if key not in ("command", "args")}
        if isinstance(one, Mapping)
        else one
        for one in pod.get("containers", [])
    ]
    return {**template, "spec": {**pod, "containers": containers}}


def _mounted_and_not_there(template: Mapping[str, Any]) -> set[str]:
    """Volumes that containers mount and the template has not: their claims were made from elsewhere."""
    pod = template.get("spec", {})
    there = {str(one.get("name")) for one in _mappings(pod.get("volumes"))}
    containers = [*_mappings(pod.get("initContainers")), *_mappings(pod.get("containers"))]
    return {str(one.get("name")) for each in containers for one in _mappings(each.get("volumeMounts"))} - there


def _mappings(items: Any) -> list[Mapping[str, Any]]:
    return [one for one in items if isinstance(one, Mapping)] if isinstance(items, list) else []


def _variable(said: object) -> tuple[object, ...]:
    """What is written, where it is a variable that nothing here sets: the accelerators are as good a guess."""
    return (said,) if str(said).lstrip("'\"").startswith("$") else ()


def _within(spec: Mapping[str, Any]) -> None:
    """Widens the sizes of an elastic job to the one it begins with."""
    elastic, replicas = spec.get("elasticPolicy"), spec.get("replicas")
    if elastic is not None and isinstance(replicas, int):
        elastic["minReplicas"] = min(elastic.get("minReplicas", replicas), replicas)
        elastic["maxReplicas"] = max(elastic.get("maxReplicas", replicas), replicas)
