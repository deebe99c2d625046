"""Parses and validates a TrainingJob from its mapping.

Pure: mapping in, value out. Called by the CLI, the processes fabric's job file and the Kubernetes controller. Every
refusal is a SpecError that names the path, the value and what is allowed; values that may be secrets are not shown.
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
    read,
    require_mapping,
    require_number,
    text,
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
# Reads from a pod template the parts that every fabric needs. The template is kept whole; fields that surefoot neither
# reads nor adds to are validated by Kubernetes. Of the others the types are checked here: text in place of a list would
# crash the operator while it builds a pod.

TRAINER = "trainer"
_PATH = "spec.template"
CONTAINER_NAME = Field(
    characters=63, pattern="[a-z0-9]([-a-z0-9]*[a-z0-9])?", allowed="a name of a-z, 0-9 and -, not ending with -,"
)
VARIABLE_NAME = Field(characters=512, pattern="[ -<>-~]+", allowed="a name of printable ASCII characters but =")
GRACE_PERIOD = Field(unit="seconds", most=10_000_000)
# the parts of a pod that a platform reads or adds to; it does the same with the trainer's program
_POD_LISTS = ("volumes", "topologySpreadConstraints", "tolerations", "initContainers", "imagePullSecrets")
_POD_MAPPINGS = ("affinity", "securityContext")
_CONTAINER_LISTS = ("volumeMounts", "ports", "envFrom")
MAX_CONTAINERS, MAX_COMMAND_WORDS, MAX_VARIABLES = 32, 256, 512
RESERVED_VARIABLES = "SUREFOOT_"
COMMAND_NEEDED = (
    "the container named trainer must state its command, as a list: the image's own entrypoint cannot be seen from here, and"
    " the agent starts what stands there"
)
VARIABLES_RESERVED = (
    f"names in the trainer's env that begin with {RESERVED_VARIABLES} are the operator's to set: leave them out"
)
POD_RULES: tuple[Rule[dict[str, Any]], ...] = (
    Rule(
        ("restartPolicy",),
        "restartPolicy must be Never: the operator restarts workers; a container that the kubelet restarts would split the"
        " world",
        lambda pod: pod.get("restartPolicy", "Never") == "Never",
        "!has(self.restartPolicy) || self.restartPolicy == 'Never'",
    ),
    Rule(
        ("containers",),
        "exactly one of the containers must be named trainer",
        lambda pod: [container["name"] for container in pod["containers"]].count(TRAINER) == 1,
        "self.containers.exists_one(c, c.name == 'trainer')",
        detail=lambda pod: f"they are named {', '.join(container['name'] for container in pod['containers'])}",
        secret=True,
    ),
)
"""What a pod must be. The CRD has two rules more, whose errors here name the container and the variable."""


def read_template(body: object) -> Template:
    """Checks a pod template and reads its container `trainer`. Raises SpecError."""
    raw = require_mapping(body, _PATH)
    for name in raw:
        if name not in ("metadata", "spec"):
            raise SpecError(_PATH, name, "there is no field of that name; allowed are metadata, spec")
    raw = json.loads(json.dumps(raw))  # a copy of its own: aliases are one object each
    _check_metadata(raw.get("metadata"))
    pod = require_mapping(raw.get("spec"), f"{_PATH}.spec")
    _pod(pod)
    containers = pod.get("containers")
    path = f"{_PATH}.spec.containers"
    if not isinstance(containers, list):
        raise SpecError(path, containers, "a list with a container named trainer is allowed")
    if len(containers) > MAX_CONTAINERS:
        raise SpecError(path, Redacted(f"{len(containers)} containers"), f"at most {MAX_CONTAINERS} are allowed")
    names = [_container(container, f"{path}[{place}]") for place, container in enumerate(containers)]
    check_rules(POD_RULES, pod, pod, f"{_PATH}.spec")
    place = names.index(TRAINER)
    return _trainer(containers[place], f"{path}[{place}]", raw)


def _check_metadata(body: object) -> None:
    for name, kept in optional_mapping(body, f"{_PATH}.metadata").items():
        if name in ("labels", "annotations"):
            require_texts(kept, f"{_PATH}.metadata.{name}")


def require_texts(body: object, path: str) -> None:
    """Refuses labels or annotations whose values are not text. Raises SpecError."""
    for key, value in optional_mapping(body, path).items():
        if not isinstance(value, str):
            raise SpecError(path, Redacted(f"{key!r:.60} with no text"), "text is allowed as each value, in quotes")


def _pod(pod: dict[str, Any]) -> None:
    path = f"{_PATH}.spec"
    grace = pod.get("terminationGracePeriodSeconds")
    if grace is not None:
        require_number(grace, f"{path}.terminationGracePeriodSeconds", GRACE_PERIOD, whole=True)
    for name in _POD_LISTS:
        _mappings(pod.get(name), f"{path}.{name}")
    for name in _POD_MAPPINGS:
        optional_mapping(pod.get(name), f"{path}.{name}")
    affinity = pod.get("affinity") or {}
    for name in ("nodeAffinity", "podAffinity", "podAntiAffinity"):
        optional_mapping(affinity.get(name), f"{path}.affinity.{name}")
    preferred = "preferredDuringSchedulingIgnoredDuringExecution"
    _mappings((affinity.get("nodeAffinity") or {}).get(preferred), f"{path}.affinity.nodeAffinity.{preferred}")


def _container(body: object, path: str) -> str:
    """Its name."""
    container = require_mapping(body, path)
    name = text(container.get("name"), f"{path}.name", CONTAINER_NAME)
    for field in _CONTAINER_LISTS:
        _mappings(container.get(field), f"{path}.{field}")
    resources = optional_mapping(container.get("resources"), f"{path}.resources")
    for field in ("limits", "requests"):
        optional_mapping(resources.get(field), f"{path}.resources.{field}")
    _environment(container.get("env"), f"{path}.env", name == TRAINER)
    _strings(container.get("command"), f"{path}.command")
    return name


def _mappings(body: object, path: str) -> None:
    if body is None:
        return
    if not isinstance(body, list):
        raise SpecError(path, Redacted(f"a {type(body).__name__}"), "a list is allowed")
    for place, item in enumerate(body):
        require_mapping(item, f"{path}[{place}]")


def _trainer(container: dict[str, Any], path: str, raw: dict[str, Any]) -> Template:
    command = _strings(container.get("command"), f"{path}.command")
    if not command:
        raise SpecError(f"{path}.command", container.get("command"), COMMAND_NEEDED)
    if not command[0].strip():
        raise SpecError(f"{path}.command[0]", command[0], "the name of a program is allowed")
    directory = container.get("workingDir")
    return Template(
        command=command,
        args=_strings(container.get("args"), f"{path}.args"),
        env=_environment(container.get("env"), f"{path}.env", trainer=True),
        working_dir=None if directory is None else text(directory, f"{path}.workingDir"),
        raw=raw,
    )


def _strings(body: object, path: str) -> tuple[str, ...]:
    if body is None:
        return ()
    if not isinstance(body, list):
        raise SpecError(path, body, "a list of texts is allowed")
    if len(body) > MAX_COMMAND_WORDS:
        raise SpecError(path, Redacted(f"{len(body)} texts"), f"at most {MAX_COMMAND_WORDS} are allowed")
    for place, item in enumerate(body):
        if not isinstance(item, str):
            raise SpecError(f"{path}[{place}]", item, "text is allowed (numbers and true/false in quotes)")
    return tuple(body)


def _environment(body: object, path: str, trainer: bool) -> tuple[tuple[str, str], ...]:
    """Plain values; entries with `valueFrom` stay in the raw template, for fabrics that can resolve them."""
    if body is None:
        return ()
    if not isinstance(body, list):
        raise SpecError(path, Redacted(), "a list of name and value is allowed")
    if len(body) > MAX_VARIABLES:
        raise SpecError(path, Redacted(f"{len(body)} variables"), f"at most {MAX_VARIABLES} are allowed")
    pairs = []
    for place, item in enumerate(body):
        entry = require_mapping(item, f"{path}[{place}]")
        name = text(entry.get("name"), f"{path}[{place}].name", VARIABLE_NAME)
        if trainer and name.startswith(RESERVED_VARIABLES):
            raise SpecError(f"{path}[{place}].name", name, VARIABLES_RESERVED)
        if "valueFrom" in entry:
            continue
        value = entry.get("value", "")
        if not isinstance(value, str):
            raise SpecError(f"{path}[{place}].value", Redacted(), f"the value of {name:.60} must be text, in quotes")
        pairs.append((name, value))
    return tuple(pairs)


# ---- checks of single values -----------------------------------------------------------------------------------------
# Limits the size, depth, numbers and text of any job document. Pure; called by `loading` before YAML's nodes become
# values, and below for what an API server gives. A thousand bytes of aliases can expand to more values than a machine
# holds, so aliases are counted, never expanded.

MOST_CHARACTERS = 1 << 18
"""Of a file: a template with all that Kubernetes knows takes a tenth of it."""
MOST_VALUES = 50_000
DEEPEST = 64
LARGEST = 2**63 - 1
"""A whole number in JSON, as an API server keeps it."""

_HALF = re.compile("[\ud800-\udfff]")
_SIZE = f"at most {MOST_VALUES} values, no deeper than {DEEPEST}, are allowed (each use of an alias counts)"


def check_nodes(root: yaml.Node) -> None:
    """Refuses a YAML document that is too large or deep. Raises SpecError.

    An alias counts at each of its uses.
    """
    counts: dict[int, tuple[int, int]] = {}
    stack = [(root, False)]
    open_nodes: set[int] = set()
    while stack:
        node, done = stack.pop()
        children = _children(node)
        if done:
            open_nodes.discard(id(node))
            found = [counts[id(child)] for child in children]
            counts[id(node)] = (1 + sum(c for c, _ in found), 1 + max((d for _, d in found), default=0))
            if counts[id(node)][0] > MOST_VALUES or counts[id(node)][1] > DEEPEST:
                raise SpecError("the document", Redacted("its size"), _SIZE)
        elif id(node) not in counts:
            if id(node) in open_nodes:
                raise SpecError("the document", Redacted("an alias that contains itself"), "JSON cannot hold it")
            open_nodes.add(id(node))
            stack.append((node, True))
            stack += [(child, False) for child in children if id(child) not in counts]


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


def check_content(body: object, path: str) -> None:
    """Refuses the first value that JSON or programs cannot take. Raises SpecError."""
    left: list[tuple[object, str, int]] = [(body, path, 1)]
    seen = 0
    while left:
        value, where, depth = left.pop()
        seen += 1
        if seen > MOST_VALUES or depth > DEEPEST:
            raise SpecError(path, Redacted("its size"), _SIZE)
        if isinstance(value, dict):
            for key, below in reversed(value.items()):
                if not isinstance(key, str):
                    raise SpecError(where, key, "only text is allowed as the name of a field")
                if not key.isprintable():
                    raise SpecError(where, key, "the name of a field is allowed to hold printable characters alone")
                left.append((below, f"{where}.{_short(key)}", depth + 1))
        elif isinstance(value, list):
            left += [(item, f"{where}[{place}]", depth + 1) for place, item in reversed(list(enumerate(value)))]
        else:
            _check_scalar(value, where)


def _check_scalar(value: Any, path: str) -> None:
    if isinstance(value, str):
        _check_text(value, path)
    elif isinstance(value, int):
        if abs(value) > LARGEST:
            raise SpecError(path, value, f"whole numbers up to {LARGEST} are allowed")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise SpecError(path, value, "a finite number is allowed")
    elif value is not None:
        kind = type(value).__name__
        raise SpecError(path, Redacted(f"a {kind}"), "only JSON's types are allowed; put text into quotes")


def _check_text(value: str, path: str) -> None:
    if "\0" in value:
        raise SpecError(path, Redacted("text with a NUL"), "programs cannot take it as an argument; remove the NUL")
    if not value.isascii() and _HALF.search(value):
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
    body = require_mapping(dict(document), "the document")
    check_names(body, ("apiVersion", "kind", "metadata", "spec", "status"), "")
    for name, wanted in (("apiVersion", API_VERSION), ("kind", KIND)):
        if body.get(name) != wanted:
            raise SpecError(name, body.get(name), f"{wanted} is allowed")
    metadata = _metadata(body.get("metadata"))
    name = _named(metadata.get("name"), "name", NAME, NAMES)
    made = TrainingJob(
        name=name,
        namespace=_named(metadata.get("namespace", "default"), "namespace", _NAMESPACE, _NAMESPACES),
        uid=uid or _named(metadata.get("uid", name), "uid", _UID, _UIDS),
        metadata_generation=int(
            require_number(metadata.get("generation", 1), "metadata.generation", Field(), whole=True)
        ),
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
        has_finalizer=FINALIZER in (metadata.get("finalizers") or ()),
        accepted_loss=str(annotations.get(ACCEPT_LOSS) or ""),
        rollback=str(annotations.get(ROLLBACK) or ""),
    )
    return job if found == job else found  # what is kept beside a job is kept while it is the same


def _metadata(body: object) -> dict[str, Any]:
    metadata = require_mapping(body, "metadata")
    check_names(metadata, (*_METADATA, *_SERVER_METADATA), "metadata")
    for name in ("labels", "annotations"):
        require_texts(metadata.get(name), f"metadata.{name}")
    finalizers = metadata.get("finalizers")
    if finalizers is not None and not isinstance(finalizers, list):
        raise SpecError("metadata.finalizers", finalizers, "a list is allowed")
    return metadata


def _named(value: object, field: str, pattern: str, allowed: str) -> str:
    name = text(value, f"metadata.{field}")
    if not re.fullmatch(pattern, name):
        raise SpecError(f"metadata.{field}", name, f"{allowed}, are allowed")
    return name


def parse_spec(body: object) -> TrainingJobSpec:
    """Parses and validates `spec` alone. Raises SpecError."""
    fields = require_mapping(body, "spec")
    check_content(fields, "spec")
    # before the template is read, as a misspelt `template` is the likelier mistake than none
    check_names(fields, declared_fields(TrainingJobSpec), "spec", TrainingJobSpec.UNSUPPORTED)
    return read(TrainingJobSpec, fields, "spec", {"template": read_template(fields.get("template"))})
