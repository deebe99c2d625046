"""Parses and validates a TrainingJob from its mapping.

Pure: mapping in, value out. Called by the CLI, the local platform's job file and the Kubernetes controller. Every rejection
is a SpecError with the path, the value and the allowed values. Values that may be secrets are not shown.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import yaml

from surefoot.protocol.text import short_repr
from surefoot_operator.api.fields import (
    Field,
    Rule,
    check_names,
    check_rules,
    declared_fields,
    optional_mapping,
    read_dataclass,
    require_mapping,
    require_number,
    require_text,
)
from surefoot_operator.api.spec import (
    ACCEPT_LOSS,
    API_VERSION,
    FINALIZER,
    KIND,
    ROLLBACK,
    Template,
    TrainingJob,
    TrainingJobSpec,
)
from surefoot_operator.errors import Redacted, SpecError

# ---- pod template ----------------------------------------------------------------------------------------------------
# Reads the parts of a pod template that every platform needs. The template is kept as a whole. Kubernetes validates the
# fields that Surefoot neither reads nor changes. The types of the others are checked here: text in place of a list would
# crash the operator while it builds a pod.

TRAINER = "trainer"
_PATH = "spec.template"
CONTAINER_NAME = Field(
    max_characters=63, pattern="[a-z0-9]([-a-z0-9]*[a-z0-9])?", allowed="a name of a-z, 0-9 and -, not ending with -,"
)
VARIABLE_NAME = Field(max_characters=512, pattern="[ -<>-~]+", allowed="a name of printable ASCII characters but =")
GRACE_PERIOD = Field(unit="seconds", max_value=10_000_000)
# fields of a pod that a platform reads or adds to, like the program of the trainer
_POD_LISTS = ("volumes", "topologySpreadConstraints", "tolerations", "initContainers", "imagePullSecrets")
_POD_MAPPINGS = ("affinity", "securityContext")
_CONTAINER_LISTS = ("volumeMounts", "ports", "envFrom")
MAX_CONTAINERS, MAX_COMMAND_WORDS, MAX_VARIABLES = 32, 256, 512
RESERVED_VARIABLES = "SUREFOOT_"
COMMAND_NEEDED = (
    "the container named trainer must state its command as a list: the agent starts that command, and the operator cannot read"
    " the entrypoint of the image"
)
VARIABLES_RESERVED = (
    f"only the operator may set variables that begin with {RESERVED_VARIABLES}: remove them from the trainer's env"
)
POD_RULES: tuple[Rule[dict[str, Any]], ...] = (
    Rule(
        ("restartPolicy",),
        "restartPolicy must be Never: the operator restarts workers, and a container that the kubelet restarts would have no"
        " valid rank",
        lambda pod: pod.get("restartPolicy", "Never") == "Never",
        "!has(self.restartPolicy) || self.restartPolicy == 'Never'",
    ),
    Rule(
        ("containers",),
        "exactly one of the containers must be named trainer",
        lambda pod: [container["name"] for container in pod["containers"]].count(TRAINER) == 1,
        "self.containers.exists_one(c, c.name == 'trainer')",
        detail=lambda pod: f"they are named {', '.join(container['name'] for container in pod['containers'])}",
        is_secret=True,
    ),
)
"""Rules for a pod. The CRD has two more; here, their errors also name the container and the variable."""


def read_template(body: object) -> Template:
    """Checks a pod template and reads its container `trainer`. Raises SpecError."""
    raw = require_mapping(body, _PATH)
    for name in raw:
        if name not in ("metadata", "spec"):
            raise SpecError(_PATH, name, "there is no field of that name; allowed are metadata, spec")
    raw = json.loads(json.dumps(raw))  # copies objects that YAML aliases share, so that a change affects one of them
    _check_metadata(raw.get("metadata"))
    pod = require_mapping(raw.get("spec"), f"{_PATH}.spec")
    _check_pod(pod)

    # every container is checked before the rules, which read their names
    containers = pod.get("containers")
    path = f"{_PATH}.spec.containers"
    if not isinstance(containers, list):
        raise SpecError(path, containers, "a list with a container named trainer is allowed")
    if len(containers) > MAX_CONTAINERS:
        raise SpecError(path, Redacted(f"{len(containers)} containers"), f"at most {MAX_CONTAINERS} are allowed")
    names = [_check_container(container, f"{path}[{index}]") for index, container in enumerate(containers)]
    check_rules(POD_RULES, pod, pod, f"{_PATH}.spec")
    trainer_index = names.index(TRAINER)
    return _read_trainer(containers[trainer_index], f"{path}[{trainer_index}]", raw)


def _check_metadata(body: object) -> None:
    for name, value in optional_mapping(body, f"{_PATH}.metadata").items():
        if name in ("labels", "annotations"):
            require_texts(value, f"{_PATH}.metadata.{name}")


def require_texts(body: object, path: str) -> None:
    """Raises SpecError if the value of a label or annotation is not text."""
    for key, value in optional_mapping(body, path).items():
        if not isinstance(value, str):
            raise SpecError(
                path,
                Redacted(f"a value of {key!r:.60} that is not text"),
                "only text is allowed as a value: put it into quotes",
            )


def _check_pod(pod: dict[str, Any]) -> None:
    """Checks the types of the pod's fields that the operator reads. Raises SpecError."""
    path = f"{_PATH}.spec"
    grace = pod.get("terminationGracePeriodSeconds")
    if grace is not None:
        require_number(grace, f"{path}.terminationGracePeriodSeconds", GRACE_PERIOD, is_integer=True)
    for name in _POD_LISTS:
        _check_mappings(pod.get(name), f"{path}.{name}")
    for name in _POD_MAPPINGS:
        optional_mapping(pod.get(name), f"{path}.{name}")
    affinity = pod.get("affinity") or {}
    for name in ("nodeAffinity", "podAffinity", "podAntiAffinity"):
        optional_mapping(affinity.get(name), f"{path}.affinity.{name}")
    preferred = "preferredDuringSchedulingIgnoredDuringExecution"
    _check_mappings((affinity.get("nodeAffinity") or {}).get(preferred), f"{path}.affinity.nodeAffinity.{preferred}")


def _check_container(body: object, path: str) -> str:
    """Checks a container and returns its name."""
    container = require_mapping(body, path)
    name = require_text(container.get("name"), f"{path}.name", CONTAINER_NAME)
    for field in _CONTAINER_LISTS:
        _check_mappings(container.get(field), f"{path}.{field}")
    resources = optional_mapping(container.get("resources"), f"{path}.resources")
    for field in ("limits", "requests"):
        optional_mapping(resources.get(field), f"{path}.resources.{field}")
    _read_environment(container.get("env"), f"{path}.env", name == TRAINER)
    _read_texts(container.get("command"), f"{path}.command")
    return name


def _check_mappings(body: object, path: str) -> None:
    """Raises SpecError unless the value is missing or a list of mappings."""
    if body is None:
        return
    if not isinstance(body, list):
        raise SpecError(path, Redacted(f"a {type(body).__name__}"), "a list is allowed")
    for index, item in enumerate(body):
        require_mapping(item, f"{path}[{index}]")


def _read_trainer(container: dict[str, Any], path: str, raw: dict[str, Any]) -> Template:
    """Reads the program of the container `trainer`. Raises SpecError."""
    command = _read_texts(container.get("command"), f"{path}.command")
    if not command:
        raise SpecError(f"{path}.command", container.get("command"), COMMAND_NEEDED)
    if not command[0].strip():
        raise SpecError(f"{path}.command[0]", command[0], "the name of a program is allowed")
    directory = container.get("workingDir")
    return Template(
        command=command,
        args=_read_texts(container.get("args"), f"{path}.args"),
        env=_read_environment(container.get("env"), f"{path}.env", trainer=True),
        working_dir=None if directory is None else require_text(directory, f"{path}.workingDir"),
        raw=raw,
    )


def _read_texts(body: object, path: str) -> tuple[str, ...]:
    """Returns a list of texts as a tuple, empty if it is missing. Raises SpecError."""
    if body is None:
        return ()
    if not isinstance(body, list):
        raise SpecError(path, body, "a list of texts is allowed")
    if len(body) > MAX_COMMAND_WORDS:
        raise SpecError(path, Redacted(f"{len(body)} texts"), f"at most {MAX_COMMAND_WORDS} are allowed")
    for index, item in enumerate(body):
        if not isinstance(item, str):
            raise SpecError(f"{path}[{index}]", item, "text is allowed (numbers and true/false in quotes)")
    return tuple(body)


def _read_environment(body: object, path: str, trainer: bool) -> tuple[tuple[str, str], ...]:
    """Reads variables with plain values; others stay in the raw template, for the platform."""
    if body is None:
        return ()
    if not isinstance(body, list):
        raise SpecError(path, Redacted(), "a list of mappings with name and value is allowed")
    if len(body) > MAX_VARIABLES:
        raise SpecError(path, Redacted(f"{len(body)} variables"), f"at most {MAX_VARIABLES} are allowed")
    pairs = []
    for index, item in enumerate(body):
        entry = require_mapping(item, f"{path}[{index}]")
        name = require_text(entry.get("name"), f"{path}[{index}].name", VARIABLE_NAME)
        if trainer and name.startswith(RESERVED_VARIABLES):
            raise SpecError(f"{path}[{index}].name", name, VARIABLES_RESERVED)
        if "valueFrom" in entry:
            continue
        value = entry.get("value", "")
        if not isinstance(value, str):
            raise SpecError(f"{path}[{index}].value", Redacted(), f"the value of {name:.60} must be text, in quotes")
        pairs.append((name, value))
    return tuple(pairs)


# ---- checks of single values -----------------------------------------------------------------------------------------
# Limits the size, depth, numbers and text of any job document. Called by `loading` before YAML nodes become values, and
# below for documents from an API server. A thousand bytes of aliases can expand to more values than fit into memory, so
# aliases are counted but never expanded.

MAX_DOCUMENT_CHARACTERS = 1 << 18
"""Characters of a file. A template with every field of Kubernetes takes a tenth of them."""
MAX_VALUES = 50_000
"""Values in a document, each use of an alias counted."""
MAX_DEPTH = 64
"""Levels of nesting in a document."""
MAX_INTEGER = 2**63 - 1
"""Largest integer that an API server stores."""

_SURROGATE = re.compile("[\ud800-\udfff]")
_SIZE = f"at most {MAX_VALUES} values, no deeper than {MAX_DEPTH}, are allowed (each use of an alias counts)"


def check_nodes(root: yaml.Node) -> None:
    """Raises SpecError if a YAML document has too many values or levels. An alias counts at each of its uses."""
    # (values, levels) by node, filled in post-order, so that a shared node is visited once
    counts: dict[int, tuple[int, int]] = {}
    stack = [(root, False)]
    open_nodes: set[int] = set()
    while stack:
        node, done = stack.pop()
        children = _children(node)
        if done:
            # all children are counted: an alias to a counted node adds its values again
            open_nodes.discard(id(node))
            child_counts = [counts[id(child)] for child in children]
            values = 1 + sum(value_count for value_count, _ in child_counts)
            counts[id(node)] = (values, 1 + max((depth for _, depth in child_counts), default=0))
            if counts[id(node)][0] > MAX_VALUES or counts[id(node)][1] > MAX_DEPTH:
                raise SpecError("the document", Redacted("its size"), _SIZE)
        elif id(node) not in counts:
            # a node that is reached again below itself
            if id(node) in open_nodes:
                raise SpecError(
                    "the document",
                    Redacted("an alias that contains itself"),
                    "JSON cannot express it: remove the alias",
                )
            open_nodes.add(id(node))
            stack.append((node, True))
            stack += [(child, False) for child in children if id(child) not in counts]


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


def check_content(body: object, path: str) -> None:
    """Raises SpecError for the first value that JSON cannot express or a program cannot receive."""
    pending: list[tuple[object, str, int]] = [(body, path, 1)]
    value_count = 0
    while pending:
        value, value_path, depth = pending.pop()
        value_count += 1
        if value_count > MAX_VALUES or depth > MAX_DEPTH:
            raise SpecError(path, Redacted("its size"), _SIZE)
        if isinstance(value, dict):
            for key, child in reversed(value.items()):
                if not isinstance(key, str):
                    raise SpecError(value_path, key, "only text is allowed as the name of a field")
                if not key.isprintable():
                    raise SpecError(value_path, key, "only printable characters are allowed in the name of a field")
                pending.append((child, f"{value_path}.{_short(key)}", depth + 1))
        elif isinstance(value, list):
            pending += [(item, f"{value_path}[{index}]", depth + 1) for index, item in reversed(list(enumerate(value)))]
        else:
            _check_scalar(value, value_path)


def _check_scalar(value: Any, path: str) -> None:
    """Raises SpecError if JSON cannot express the value or a program cannot receive it."""
    if isinstance(value, str):
        _check_text(value, path)
    elif isinstance(value, int):
        if abs(value) > MAX_INTEGER:
            raise SpecError(path, value, f"whole numbers up to {MAX_INTEGER} are allowed")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise SpecError(path, value, "a finite number is allowed")
    elif value is not None:
        kind = type(value).__name__
        raise SpecError(path, Redacted(f"a {kind}"), "only the types of JSON are allowed; put text into quotes")


def _check_text(value: str, path: str) -> None:
    """Raises SpecError for text with NUL or half of a surrogate pair."""
    if "\0" in value:
        raise SpecError(path, Redacted("text with a NUL"), "no program can receive it as an argument; remove the NUL")
    if not value.isascii() and _SURROGATE.search(value):
        raise SpecError(path, Redacted("text with half a character"), "text that UTF-8 can encode is allowed")


def _short(key: str) -> str:
    return key if len(key) <= 40 and key.isprintable() else short_repr(key, 40)


# ---- parse -----------------------------------------------------------------------------------------------------------

NAME = "[a-z]([-a-z0-9]{0,50}[a-z0-9])?"
_NAMESPACE = "[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_UID = "[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
NAMES = "at most 52 of a-z, 0-9 and -, beginning with a letter and not ending with -"
_NAMESPACES = "at most 63 of a-z, 0-9 and -, neither beginning nor ending with -"
_UIDS = "at most 63 letters, digits, -, _ and ., beginning and ending with a letter or digit"
_METADATA = ("name", "namespace", "uid", "generation", "labels", "annotations")
# fields that an API server adds to metadata; no decision depends on them
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
        document: the object as read from YAML or from an API server.
        uid: replaces `metadata.uid`, which defaults to the name of the job.

    Raises:
        SpecError: with the path, the value and the allowed values.
    """
    body = require_mapping(dict(document), "the document")
    check_names(body, ("apiVersion", "kind", "metadata", "spec", "status"), "")
    for name, required in (("apiVersion", API_VERSION), ("kind", KIND)):
        if body.get(name) != required:
            raise SpecError(name, body.get(name), f"{required} is allowed")
    metadata = _read_metadata(body.get("metadata"))
    name = _read_name(metadata.get("name"), "name", NAME, NAMES)
    job = TrainingJob(
        name=name,
        namespace=_read_name(metadata.get("namespace", "default"), "namespace", _NAMESPACE, _NAMESPACES),
        # `surefoot local` has no API server that would generate a uid
        uid=uid or _read_name(metadata.get("uid", name), "uid", _UID, _UIDS),
        metadata_generation=int(
            require_number(metadata.get("generation", 1), "metadata.generation", Field(), is_integer=True)
        ),
        spec=parse_spec(body.get("spec")),
    )
    return with_metadata(job, metadata)


def with_metadata(job: TrainingJob, metadata: Mapping[str, Any]) -> TrainingJob:
    """Returns the job with the deletion mark, finalizer and annotations of its metadata.

    These change without a new `metadata.generation`, and apply even while a newer spec is rejected.
    """
    annotations = metadata.get("annotations") or {}
    updated = replace(
        job,
        deleted=metadata.get("deletionTimestamp") is not None,
        has_finalizer=FINALIZER in (metadata.get("finalizers") or ()),
        accepted_loss=str(annotations.get(ACCEPT_LOSS) or ""),
        rollback=str(annotations.get(ROLLBACK) or ""),
    )
    return job if updated == job else updated  # the same object, so that caches by identity stay valid


def _read_metadata(body: object) -> dict[str, Any]:
    """Checks the metadata of a job and returns it. Raises SpecError."""
    metadata = require_mapping(body, "metadata")
    check_names(metadata, (*_METADATA, *_SERVER_METADATA), "metadata")
    for name in ("labels", "annotations"):
        require_texts(metadata.get(name), f"metadata.{name}")
    finalizers = metadata.get("finalizers")
    if finalizers is not None and not isinstance(finalizers, list):
        raise SpecError("metadata.finalizers", finalizers, "a list is allowed")
    return metadata


def _read_name(value: object, field: str, pattern: str, allowed: str) -> str:
    """Returns a field of the metadata that must match a pattern. Raises SpecError."""
    name = require_text(value, f"metadata.{field}")
    if not re.fullmatch(pattern, name):
        raise SpecError(f"metadata.{field}", name, f"{allowed}, are allowed")
    return name


def parse_spec(body: object) -> TrainingJobSpec:
    """Parses and validates the `spec` of a TrainingJob. Raises SpecError."""
    fields = require_mapping(body, "spec")
    check_content(fields, "spec")
    # names first: a misspelt `template` would otherwise be reported as a missing one
    check_names(fields, declared_fields(TrainingJobSpec), "spec", TrainingJobSpec.UNSUPPORTED)
    return read_dataclass(TrainingJobSpec, fields, "spec", {"template": read_template(fields.get("template"))})
