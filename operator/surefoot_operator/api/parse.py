"""YAML or its mapping -> TrainingJob, wholly validated: whoever holds one may rely on all that stands in it.

Pure: text in, value out. Called by the CLI, the processes fabric's job file and the Kubernetes controller. Every
refusal is a SpecError that names the path, the value and what is allowed; values that may be secrets are not shown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import yaml

from surefoot_operator.api.limits import LIMITS, Limit, check_spec
from surefoot_operator.api.names import API_VERSION, yaml_fields
from surefoot_operator.api.reading import Hidden, check_names, mapping, number, read, text
from surefoot_operator.api.spec import (
    FINALIZER,
    KIND,
    FailurePolicy,
    FailureRule,
    Template,
    TrainingJob,
    TrainingJobSpec,
)
from surefoot_operator.errors import SpecError

_NAME = re.compile(r"[a-z]([-a-z0-9]{0,50}[a-z0-9])?")
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


class NotYaml(SpecError):
    """The file cannot be read as YAML at all. Never repeats its content, which may hold a secret."""

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(where, Hidden(), "YAML is")
        self.args = (f"{where}: this is not YAML: {problem}",)


class _StrictLoader(yaml.SafeLoader):
    """Refuses a key that stands twice: the last one would win in silence."""


def _unique_mapping(loader: _StrictLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[str] = set()
    for key_node, _ in node.value:
        key = str(key_node.value)
        if key in seen:
            line = key_node.start_mark.line + 1
            raise SpecError(f"line {line}", key, "each field may stand once in its mapping")
        seen.add(key)
    loader.flatten_mapping(node)
    return loader.construct_mapping(node, deep=True)


_StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _unique_mapping)


def load_yaml(content: str) -> dict[str, Any]:
    """The one document in `content`."""
    try:
        documents = [body for body in yaml.load_all(content, Loader=_StrictLoader) if body is not None]
    except yaml.MarkedYAMLError as error:
        # the parser's own text repeats the line, which may hold a secret
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "the document"
        raise NotYaml(where, error.problem or "it cannot be read") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise NotYaml("the document", type(error).__name__) from None
    if len(documents) != 1:
        raise SpecError("the document", len(documents), "exactly one TrainingJob is allowed in a file")
    return mapping(documents[0], "the document")


def parse_yaml(content: str, uid: str | None = None) -> TrainingJob:
    """The TrainingJob that `content` says."""
    return parse_job(load_yaml(content), uid)


def parse_job(document: Mapping[str, Any], uid: str | None = None) -> TrainingJob:
    """The TrainingJob of a mapping as YAML or an API server gives it; `uid` overrides its metadata."""
    body = mapping(dict(document), "the document")
    check_names(body, ("apiVersion", "kind", "metadata", "spec", "status"), "")
    for name, wanted in (("apiVersion", API_VERSION), ("kind", KIND)):
        if body.get(name) != wanted:
            raise SpecError(name, body.get(name), f"{wanted} is allowed")
    metadata = mapping(body.get("metadata"), "metadata")
    check_names(metadata, (*_METADATA, *_SERVER_METADATA), "metadata")
    name = text(metadata.get("name"), "metadata.name")
    if not _NAME.fullmatch(name):
        raise SpecError(
            "metadata.name",
            name,
            "at most 52 of a-z, 0-9 and -, beginning with a letter and not ending with -, are allowed",
        )
    return TrainingJob(
        name=name,
        namespace=text(metadata.get("namespace", "default"), "metadata.namespace"),
        uid=uid or text(metadata.get("uid", name), "metadata.uid"),
        generation=int(number(metadata.get("generation", 1), "metadata.generation", Limit(), whole=True)),
        spec=parse_spec(body.get("spec")),
        deleted=metadata.get("deletionTimestamp") is not None,
        held=FINALIZER in (metadata.get("finalizers") or ()),
    )


def parse_spec(body: object) -> TrainingJobSpec:
    """`spec` alone."""
    found = mapping(body, "spec")
    check_names(found, yaml_fields(TrainingJobSpec), "spec", "TrainingJobSpec")
    given: dict[str, Any] = {"template": _template(found.get("template"))}
    if found.get("failurePolicy") is not None:
        given["failure_policy"] = _failure_policy(found["failurePolicy"])
    spec = read(TrainingJobSpec, found, "spec", given)
    check_spec(spec)
    return spec


def _failure_policy(body: object) -> FailurePolicy:
    path = "spec.failurePolicy"
    found = mapping(body, path)
    check_names(found, yaml_fields(FailurePolicy), path, "FailurePolicy")
    rules = found.get("rules") or []
    if not isinstance(rules, list):
        raise SpecError(f"{path}.rules", rules, "a list is allowed")
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
    limit = LIMITS["FailureRule", "exit_codes"]
    exits = tuple(int(number(v, f"{path}.onExitCodes.values[{i}]", limit, whole=True)) for i, v in enumerate(values))
    return read(FailureRule, found, path, {"exit_codes": exits, "operator": operator})


def _template(body: object) -> Template:
    path = "spec.template"
    raw = mapping(body, path)
    try:
        raw = json.loads(json.dumps(raw))
    except (TypeError, ValueError, RecursionError) as error:
        raise SpecError(path, Hidden(), f"only what JSON can say is allowed: {error}") from None
    check_names(raw, ("metadata", "spec"), path)
    pod = mapping(raw.get("spec"), f"{path}.spec")
    if pod.get("restartPolicy", "Never") != "Never":
        raise SpecError(
            f"{path}.spec.restartPolicy",
            pod["restartPolicy"],
            "Never is allowed: the operator itself restarts, a container that comes back alone would split the world",
        )
    containers = pod.get("containers")
    if not isinstance(containers, list):
        raise SpecError(f"{path}.spec.containers", containers, "a list with a container named trainer is allowed")
    for place, container in enumerate(containers):
        if isinstance(container, dict) and container.get("name") == "trainer":
            return _trainer(container, f"{path}.spec.containers[{place}]", raw)
    names = [c.get("name") if isinstance(c, dict) else c for c in containers]
    raise SpecError(f"{path}.spec.containers", names, "one of them must be named trainer")


def _trainer(container: dict[str, Any], path: str, raw: dict[str, Any]) -> Template:
    command = _strings(container.get("command"), f"{path}.command")
    if not command:
        raise SpecError(f"{path}.command", container.get("command"), "the command that trains is required, as a list")
    directory = container.get("workingDir")
    return Template(
        command=command,
        args=_strings(container.get("args"), f"{path}.args"),
        env=_environment(container.get("env"), f"{path}.env"),
        working_dir=None if directory is None else text(directory, f"{path}.workingDir"),
        raw=raw,
    )


def _strings(body: object, path: str) -> tuple[str, ...]:
    if body is None:
        return ()
    if not isinstance(body, list):
        raise SpecError(path, body, "a list of texts is allowed")
    for place, item in enumerate(body):
        if not isinstance(item, str):
            raise SpecError(f"{path}[{place}]", item, "text is allowed (numbers and true/false in quotes)")
    return tuple(body)


def _environment(body: object, path: str) -> tuple[tuple[str, str], ...]:
    """Plain values; entries with `valueFrom` stay in the raw template, for fabrics that can resolve them."""
    if body is None:
        return ()
    if not isinstance(body, list):
        raise SpecError(path, Hidden(), "a list of name and value is allowed")
    pairs = []
    for place, item in enumerate(body):
        entry = mapping(item, f"{path}[{place}]")
        name = text(entry.get("name"), f"{path}[{place}].name")
        if name.startswith("SUREFOOT_"):
            raise SpecError(f"{path}[{place}].name", name, "names that begin with SUREFOOT_ are the fabric's to set")
        if "valueFrom" in entry:
            continue
        value = entry.get("value", "")
        if not isinstance(value, str):
            raise SpecError(f"{path}[{place}].value", Hidden(), f"the value of {name} must be text, in quotes")
        pairs.append((name, value))
    return tuple(pairs)
