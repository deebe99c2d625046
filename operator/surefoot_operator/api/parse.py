"""Parses and validates a TrainingJob from its mapping.

Pure: mapping in, value out. Called by the CLI, the processes fabric's job file and the Kubernetes controller. Every
refusal is a SpecError that names the path, the value and what is allowed; values that may be secrets are not shown.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from surefoot_operator.api.content import check_content
from surefoot_operator.api.fields import check_names, items, mapping, number, read, text
from surefoot_operator.api.pod_template import read_template, texts
from surefoot_operator.api.spec import (
    ACCEPT_LOSS,
    FINALIZER,
    KIND,
    ROLLBACK,
    FailurePolicy,
    FailureRule,
    TrainingJob,
    TrainingJobSpec,
)
from surefoot_operator.api.spec_limits import LIMITS, Limit, check_spec
from surefoot_operator.api.yaml_names import API_VERSION, yaml_fields
from surefoot_operator.errors import SpecError

_NAME = re.compile(r"[a-z]([-a-z0-9]{0,50}[a-z0-9])?")
_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_UID = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_NAMES = "at most 52 of a-z, 0-9 and -, beginning with a letter and not ending with -"
_NAMESPACES = "at most 63 of a-z, 0-9 and -, neither beginning nor ending with -"
_UIDS = "at most 63 letters, digits, -, _ and ., beginning and ending with a letter or digit"
_METADATA = ("name", "namespace", "uid", "generation", "labels", "annotations")
# what an API server adds to metadata; nothing here acts on it
_SERVER_METADATA = (
    "creationTimestamp",
    "resourceVersion",
    "managedFields",
    "finalizers",
    "ownerReferences",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "selfLink",
    "generateName",
)


def parse_job(document: Mapping[str, Any], uid: str | None = None) -> TrainingJob:
    """Parses and validates a TrainingJob from a mapping.

    Args:
        document: the object as YAML or an API server gives it.
        uid: replaces `metadata.uid`, which defaults to the job's name.

    Raises:
        SpecError: with the path, the value and what is allowed.
    """
    body = mapping(dict(document), "the document")
    check_names(body, ("apiVersion", "kind", "metadata", "spec", "status"), "")
    for name, wanted in (("apiVersion", API_VERSION), ("kind", KIND)):
        if body.get(name) != wanted:
            raise SpecError(name, body.get(name), f"{wanted} is allowed")
    metadata = _metadata(body.get("metadata"))
    name = _named(metadata.get("name"), "name", _NAME, _NAMES)
    made = TrainingJob(
        name=name,
        namespace=_named(metadata.get("namespace", "default"), "namespace", _NAMESPACE, _NAMESPACES),
        uid=uid or _named(metadata.get("uid", name), "uid", _UID, _UIDS),
        generation=int(number(metadata.get("generation", 1), "metadata.generation", Limit(), whole=True)),
        spec=parse_spec(body.get("spec")),
    )
    return with_metadata(made, metadata)


def with_metadata(job: TrainingJob, metadata: Mapping[str, Any]) -> TrainingJob:
    """Takes what is asked beside the spec.

    It changes without a new generation, and counts although a newer spec cannot be read.
    """
    annotations = metadata.get("annotations") or {}
    found = replace(
        job,
        deleted=metadata.get("deletionTimestamp") is not None,
        held=FINALIZER in (metadata.get("finalizers") or ()),
        accepted_loss=str(annotations.get(ACCEPT_LOSS) or ""),
        rollback=str(annotations.get(ROLLBACK) or ""),
    )
    return job if found == job else found  # what is kept beside a job is kept while it is the same


def _metadata(body: object) -> dict[str, Any]:
    metadata = mapping(body, "metadata")
    check_names(metadata, (*_METADATA, *_SERVER_METADATA), "metadata")
    for name in ("labels", "annotations"):
        texts(metadata.get(name), f"metadata.{name}")
    finalizers = metadata.get("finalizers")
    if finalizers is not None and not isinstance(finalizers, list):
        raise SpecError("metadata.finalizers", finalizers, "a list is allowed")
    return metadata


def _named(value: object, field: str, pattern: re.Pattern[str], allowed: str) -> str:
    name = text(value, f"metadata.{field}")
    if not pattern.fullmatch(name):
        raise SpecError(f"metadata.{field}", name, f"{allowed}, are allowed")
    return name


def parse_spec(body: object) -> TrainingJobSpec:
    """Parses and validates `spec` alone. Raises SpecError."""
    found = mapping(body, "spec")
    check_content(found, "spec")
    check_names(found, yaml_fields(TrainingJobSpec), "spec", "TrainingJobSpec")
    given: dict[str, Any] = {"template": read_template(found.get("template"))}
    if found.get("failurePolicy") is not None:
        given["failure_policy"] = _failure_policy(found["failurePolicy"])
    spec = read(TrainingJobSpec, found, "spec", given)
    check_spec(spec)
    return spec


def _failure_policy(body: object) -> FailurePolicy:
    path = "spec.failurePolicy"
    found = mapping(body, path)
    check_names(found, yaml_fields(FailurePolicy), path, "FailurePolicy")
    rules = items(
        [] if found.get("rules") is None else found["rules"], f"{path}.rules", LIMITS["FailurePolicy", "rules"]
    )
    return read(
        FailurePolicy, found, path, {"rules": tuple(_rule(r, f"{path}.rules[{i}]") for i, r in enumerate(rules))}
    )


def _rule(body: object, path: str) -> FailureRule:
    found = mapping(body, path)
    check_names(found, yaml_fields(FailureRule), path, "FailureRule")
    codes = mapping(found.get("onExitCodes"), f"{path}.onExitCodes")
    check_names(codes, ("operator", "values"), f"{path}.onExitCodes")
    operator = codes.get("operator", "In")
    if operator not in ("In", "NotIn"):
        raise SpecError(f"{path}.onExitCodes.operator", operator, "allowed are In, NotIn")
    values = codes.get("values")
    if not isinstance(values, list) or not values:
        raise SpecError(f"{path}.onExitCodes.values", values, "a list of exit codes that is not empty is allowed")
    limit, where = LIMITS["FailureRule", "exit_codes"], f"{path}.onExitCodes.values"
    given = enumerate(items(values, where, limit))
    exits = tuple(int(number(value, f"{where}[{place}]", limit, whole=True)) for place, value in given)
    return read(FailureRule, found, path, {"exit_codes": exits, "operator": operator})
