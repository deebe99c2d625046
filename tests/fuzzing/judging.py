"""What must hold of every document: understood or refused, and never anything else."""

from __future__ import annotations

import functools
import json
from typing import Any

import jsonschema

from fuzzing.documents import schema
from surefoot_operator.api.loading import load_yaml
from surefoot_operator.api.parse import parse_job
from surefoot_operator.api.spec import TrainingJob, allowed_sizes
from surefoot_operator.errors import SpecError
from surefoot_operator.platforms.interface import WorkerEnvironment
from surefoot_operator.platforms.kubernetes.pods import (
    PodSettings,
    build_pod,
    build_purge_pod,
    build_secret,
    build_service,
)
from surefoot_operator.platforms.local.platform import grace_seconds, list_ignored_fields
from surefoot_operator.policy.core.actions import CreateWorker

LONGEST_MESSAGE = 700
"""A path of ours, a glance of the value, and what is allowed."""
_ENVIRONMENT = WorkerEnvironment(plain={"SUREFOOT_A": "b", "SUREFOOT_METRICS_PORT": "9"}, secret={"SUREFOOT_KEY": "c"})
_SETTINGS = PodSettings(socket_folder="/run/holder")


def judge(document: Any) -> TrainingJob | None:
    """The job, or None where it was refused; raises where anything else happened."""
    try:
        body = document
        if isinstance(body, bytes):
            body = body.decode("utf-8", errors="replace")  # what is no UTF-8 is refused before the parser
        if isinstance(body, str):
            body = load_yaml(body)
        job = parse_job(body)
    except SpecError as error:
        said = str(error)
        assert len(said) <= LONGEST_MESSAGE, said[:2000]
        assert said.isprintable(), repr(said)
        return None
    _rely_on(job)
    stored = json.loads(json.dumps(body["spec"]))
    _validator().validate({"spec": stored})
    return job


def _rely_on(job: TrainingJob) -> None:
    """What the fabrics make of a job that was accepted."""
    created = CreateWorker(0, 1, avoid_nodes=("a",))
    json.dumps([build_pod(job, created, _ENVIRONMENT, _SETTINGS), build_secret(job, _ENVIRONMENT), build_service(job)])
    json.dumps(build_purge_pod(job, 1, _ENVIRONMENT, _SETTINGS))
    grace_seconds(job.spec.template.raw)
    allowed_sizes(job.spec)
    for words in (*job.spec.template.command, *job.spec.template.args, *(v for p in job.spec.template.env for v in p)):
        assert b"\0" not in words.encode()
    assert all(name.isprintable() for name in list_ignored_fields(job.spec))


@functools.cache
def _validator() -> jsonschema.Draft4Validator:
    """What the parser accepts an API server accepts, as far as a schema says it; the reverse is a status' to tell."""
    return jsonschema.Draft4Validator(_nullable(schema()))


def _nullable(part: Any) -> Any:
    """An API server drops a null where nothing says that it may stand; the parser takes it for left out."""
    if isinstance(part, list):
        return [_nullable(item) for item in part]
    if not isinstance(part, dict):
        return part
    found = {name: _nullable(value) for name, value in part.items()}
    if isinstance(found.get("type"), str):
        found["type"] = [found["type"], "null"]
        if "enum" in found:
            found["enum"] = [*found["enum"], None]
    return found
