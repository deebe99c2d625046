"""Reads from a pod template the parts that every fabric needs.

Pure; called by `parse`. The template is kept whole; fields that surefoot neither reads nor adds to are validated by
Kubernetes. Of the others the types are checked here: text in place of a list would crash the operator while it builds a
pod.
"""

from __future__ import annotations

import json
import re
from typing import Any

from surefoot_operator.api.fields import mapping, number, optional_mapping, text
from surefoot_operator.api.spec import Template
from surefoot_operator.api.spec_limits import Limit
from surefoot_operator.errors import Hidden, SpecError

TRAINER = "trainer"
_PATH = "spec.template"
_VARIABLE = re.compile(r"[ -<>-~]{1,512}")  # printable ASCII but "="
_CONTAINER = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_GRACE = Limit(least=0, most=10_000_000)
# what fabrics read or add to, beside the trainer's program
_POD_LISTS = ("volumes", "topologySpreadConstraints", "tolerations", "initContainers", "imagePullSecrets")
_POD_MAPPINGS = ("affinity", "securityContext")
_CONTAINER_LISTS = ("volumeMounts", "ports", "envFrom")
_MOST_CONTAINERS, _MOST_WORDS, _MOST_VARIABLES = 32, 256, 512


def read_template(body: object) -> Template:
    """Checks a pod template and reads its container `trainer`. Raises SpecError."""
    raw = mapping(body, _PATH)
    for name in raw:
        if name not in ("metadata", "spec"):
            raise SpecError(_PATH, name, "there is no field of that name; allowed are metadata, spec")
    raw = json.loads(json.dumps(raw))  # a copy of its own: aliases are one object each
    _metadata(raw.get("metadata"))
    pod = mapping(raw.get("spec"), f"{_PATH}.spec")
    _pod(pod)
    containers = pod.get("containers")
    path = f"{_PATH}.spec.containers"
    if not isinstance(containers, list):
        raise SpecError(path, containers, "a list with a container named trainer is allowed")
    if len(containers) > _MOST_CONTAINERS:
        raise SpecError(path, Hidden(f"{len(containers)} containers"), f"at most {_MOST_CONTAINERS} are allowed")
    names = [_container(container, f"{path}[{place}]") for place, container in enumerate(containers)]
    if names.count(TRAINER) != 1:
        raise SpecError(path, names, "exactly one of them must be named trainer")
    place = names.index(TRAINER)
    return _trainer(containers[place], f"{path}[{place}]", raw)


def _metadata(body: object) -> None:
    for name, kept in optional_mapping(body, f"{_PATH}.metadata").items():
        if name in ("labels", "annotations"):
            texts(kept, f"{_PATH}.metadata.{name}")


def texts(body: object, path: str) -> None:
    """Refuses labels or annotations whose values are not text. Raises SpecError."""
    for key, value in optional_mapping(body, path).items():
        if not isinstance(value, str):
            raise SpecError(path, Hidden(f"{key!r:.60} with no text"), "text is allowed as each value, in quotes")


def _pod(pod: dict[str, Any]) -> None:
    path = f"{_PATH}.spec"
    if pod.get("restartPolicy", "Never") != "Never":
        raise SpecError(
            f"{path}.restartPolicy",
            pod["restartPolicy"],
            "Never is allowed: the operator restarts workers; a container that the kubelet restarts would split the world",
        )
    grace = pod.get("terminationGracePeriodSeconds")
    if grace is not None:
        number(grace, f"{path}.terminationGracePeriodSeconds", _GRACE, whole=True)
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
    container = mapping(body, path)
    name = text(container.get("name"), f"{path}.name")
    if not _CONTAINER.fullmatch(name):
        raise SpecError(f"{path}.name", name, "at most 63 of a-z, 0-9 and -, ending with none, are allowed")
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
        raise SpecError(path, Hidden(f"a {type(body).__name__}"), "a list is allowed")
    for place, item in enumerate(body):
        mapping(item, f"{path}[{place}]")


def _trainer(container: dict[str, Any], path: str, raw: dict[str, Any]) -> Template:
    command = _strings(container.get("command"), f"{path}.command")
    if not command:
        raise SpecError(f"{path}.command", container.get("command"), "the command that trains is required, as a list")
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
    if len(body) > _MOST_WORDS:
        raise SpecError(path, Hidden(f"{len(body)} texts"), f"at most {_MOST_WORDS} are allowed")
    for place, item in enumerate(body):
        if not isinstance(item, str):
            raise SpecError(f"{path}[{place}]", item, "text is allowed (numbers and true/false in quotes)")
    return tuple(body)


def _environment(body: object, path: str, trainer: bool) -> tuple[tuple[str, str], ...]:
    """Plain values; entries with `valueFrom` stay in the raw template, for fabrics that can resolve them."""
    if body is None:
        return ()
    if not isinstance(body, list):
        raise SpecError(path, Hidden(), "a list of name and value is allowed")
    if len(body) > _MOST_VARIABLES:
        raise SpecError(path, Hidden(f"{len(body)} variables"), f"at most {_MOST_VARIABLES} are allowed")
    pairs = []
    for place, item in enumerate(body):
        entry = mapping(item, f"{path}[{place}]")
        name = text(entry.get("name"), f"{path}[{place}].name")
        if not _VARIABLE.fullmatch(name):
            raise SpecError(f"{path}[{place}].name", name, "at most 512 printable ASCII characters but = are allowed")
        if trainer and name.startswith("SUREFOOT_"):
            raise SpecError(
                f"{path}[{place}].name", name, "names that begin with SUREFOOT_ are set by the fabric alone"
            )
        if "valueFrom" in entry:
            continue
        value = entry.get("value", "")
        if not isinstance(value, str):
            raise SpecError(f"{path}[{place}].value", Hidden(), f"the value of {name:.60} must be text, in quotes")
        pairs.append((name, value))
    return tuple(pairs)
