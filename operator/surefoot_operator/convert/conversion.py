"""Finds the training jobs among a file's objects and converts each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from surefoot_operator.convert import hyperpod_job, job_set, pytorch_job, train_job
from surefoot_operator.convert.conversion_errors import NotConvertible
from surefoot_operator.convert.job_draft import Conversion, Draft
from surefoot_operator.convert.launcher import read_launch
from surefoot_operator.convert.manifest import Manifest
from surefoot_operator.convert.trainer_template import trainer_template

Converter = Callable[[Draft, Mapping[str, Mapping[str, Any]]], None]

KINDS: dict[tuple[str, str], Converter] = {
    ("kubeflow.org", "PyTorchJob"): pytorch_job.convert,
    ("trainer.kubeflow.org", "TrainJob"): train_job.convert,
    ("sagemaker.amazonaws.com", "HyperPodPyTorchJob"): hyperpod_job.convert,
    ("jobset.x-k8s.io", "JobSet"): job_set.convert,
}
KNOWN = ", ".join(kind for _, kind in KINDS)


def converted(documents: Sequence[Mapping[str, Any]]) -> tuple[list[Conversion], list[str]]:
    """Converts every training job among the objects of a file.

    Returns:
        The conversions, and the names of the other objects.

    Raises:
        NotConvertible: there is no such job, or one of them holds nothing that could train.
    """
    runtimes = {_name(one): one for one in documents if one.get("kind") in train_job.RUNTIMES}
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
        draft.manifest.leave("status", why="the operator writes a TrainingJob's own")
        try:
            convert(draft, runtimes)
        except (AttributeError, TypeError) as error:
            raise NotConvertible(f"{name} has a field of another kind than its API allows ({error})") from error
        found.append(draft.finished(name))
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
    return draft.finished("a command line")
