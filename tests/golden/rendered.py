"""Copies of what a cluster is given: Kubernetes objects, events, metrics, manifests and the rendered chart."""

from __future__ import annotations

import ast
import asyncio
import copy
import hashlib
import importlib
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import yaml
from prometheus_client import Counter, Gauge, Histogram

from chart import helm
from golden import sources
from golden.schemas import text
from support.stored import stored_document

Object = dict[str, Any]


def copies() -> dict[str, str]:
    return {
        "kubernetes.yaml": "".join(_yaml(title, body) for title, body in _objects()),
        "events.txt": text(_events()),
        "metrics.txt": text(_metrics()),
        "manifests.txt": text(_digests()),
    }


def _jobs() -> Iterator[tuple[str, Object]]:
    for path in sorted((helm.PROJECT / "examples" / "cluster").glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text(encoding="utf-8")):
            if document["kind"] == "TrainingJob":
                yield path.name, document
    document = copy.deepcopy(stored_document())
    document["spec"]["schedulingPolicy"] = {"gang": "Coscheduling"}
    yield "Coscheduling", document
    path = Path(__file__).with_name("every_part_of_a_pod.yaml")
    yield path.stem, yaml.safe_load(path.read_text(encoding="utf-8"))


def _objects() -> Iterator[tuple[str, Object]]:
    """What the operator makes for each job: a pod with its environment, what pods share, and what deletes stored data."""
    settings = sources.pods.PodSettings(socket_folder="/run/surefoot-memory", purge_image="purge:1")
    environments = sources.WorkerEnvironmentFactory(
        "wss://operator/v1/agents", 1.0, sources.Secrets(b"r" * 32), coordinator_ca=lambda: "CA", memory_tls_ca=lambda: "TLS",
        fallback_url="wss://other/v1/agents", metrics_port=9464, log_format="json",
    )  # fmt: skip
    for title, document in _jobs():
        job = sources.parse_job(document, uid="uid-1")
        worker = sources.CreateWorker(2, 3, avoid_nodes=("n1", "n2"))
        environment = environments(job, worker)
        yield f"{title}: worker", sources.pods.build_pod(job, worker, environment, settings)
        yield f"{title}: secret", sources.pods.build_secret(job, environment)
        yield f"{title}: service", sources.pods.build_service(job)
        yield f"{title}: deletion of stored data", sources.build_purge_pod(job, 1, environment, settings)
    identity = sources.JobIdentity("team", "gpt", "uid-1")
    group = sources.PodGroup("Coscheduling", 3, 60)
    yield "Coscheduling: group", sources.pod_groups.build_pod_group(identity, group)
    yield "event", _posted_event(identity)


def _posted_event(identity: sources.JobIdentity) -> Object:
    api = mock.AsyncMock()
    event = sources.Event("WorkerLost", "a message", warning=True)
    asyncio.run(sources.record_event(api, identity, event, 3, 1.7e9))
    path, body = api.post.call_args.args
    return {"path": path, **body}


def _yaml(title: str, body: Object) -> str:
    return f"--- # {title}\n{yaml.safe_dump(body, sort_keys=False, allow_unicode=True, width=160)}"


def _events() -> Iterator[str]:
    """Yields the reasons and condition types, which are string constants in CamelCase, then each call that makes an Event,
    a Condition or a Notice with its literal arguments. Both are parsed from the source, so moving code changes nothing."""
    trees = [
        ast.parse(path.read_text(encoding="utf-8"))
        for package in ("surefoot", "surefoot_operator")
        for folder in importlib.import_module(package).__path__
        for path in Path(folder).rglob("*.py")
    ]
    words: dict[str, set[str]] = defaultdict(set)
    for tree in trees:
        for node in tree.body:
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str(word))):
                    if re.fullmatch("([A-Z][a-z]+)+", word):
                        words[name].add(word)
    names = {name: next(iter(found)) for name, found in words.items() if len(found) == 1 and name[0] != "_"}
    made = {cls.__name__ for cls in (sources.Event, sources.Condition, sources.Notice)}
    calls = [
        node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call) and _name(node.func) in made
    ]
    yield from sorted(
        {
            *(word for found in words.values() for word in found),
            *(call.args[0].value for call in calls if call.args and isinstance(call.args[0], ast.Constant)),
        }
    )
    yield from sorted(
        f"{_name(call.func)}({', '.join(_arguments(call, names))})"
        for call in calls
        if len(call.args) + len(call.keywords) >= 2
    )


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")


def _arguments(call: ast.Call, names: dict[str, str]) -> Iterator[str]:
    for place, argument in enumerate(call.args):
        yield _template(argument) if place else names.get(_name(argument)) or _template(argument).strip("'")
    yield from (f"{keyword.arg}={_template(keyword.value)}" for keyword in call.keywords)


def _template(node: ast.expr) -> str:
    """A constant as it is, a text with braces for what is put into it, and braces alone for anything else."""
    if isinstance(node, ast.JoinedStr):
        return repr("".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values))
    return repr(node.value) if isinstance(node, ast.Constant) else "{}"


def _metrics() -> Iterator[str]:
    """Every family of workers, jobs and the operator, series that begin at 0, and a memory server's whole page."""
    lines: set[str] = set()
    for module in (sources.worker_metrics, sources.operator_metrics, sources.process_metrics):
        for value in vars(module).values():
            if isinstance(value, Counter | Gauge | Histogram):
                kind, labels, family = type(value).__name__.lower(), value._labelnames, next(iter(value.collect()))
                limits = getattr(value, "_upper_bounds", ())
                buckets = f" buckets {', '.join(map(str, limits))}" if limits else ""
                lines.add(f"{family.name} {kind} ({', '.join(labels)}) {family.documentation}{buckets}")
                for series in family.samples if labels else ():
                    labelled = " ".join(f"{label}={word}" for label, word in series.labels.items() if label != "le")
                    lines.add(f"{family.name} series {labelled}")
    for family in sources.FAMILIES:
        lines.add(f"{family.name} {family.kind} of jobs ({', '.join(family.labels)}) {family.text}")
    yield from sorted(lines)
    info: dict[str, str] = defaultdict(lambda: "7")
    seen = [sources.CompanionSeen(True, True, "", info, 3, 4, 5.0), sources.CompanionSeen()]
    yield from sources.companion_exposition(seen).decode().splitlines()


def _digests() -> Iterator[str]:
    """The rendered chart as committed, by digest. The CRD is made from `api.spec`, and a test holds it equal to that."""
    path = helm.PROJECT / "manifests" / "install.yaml"
    yield f"{hashlib.sha256(path.read_bytes()).hexdigest()} {path.relative_to(helm.PROJECT)}"


def chart() -> str:
    """Each object but the CRD that helm renders of the chart with its default values, hooks included, by digest."""
    digests = {
        f"{body['kind']} {body['metadata']['name']}": hashlib.sha256(json.dumps(body).encode()).hexdigest()
        for body in helm.objects()
        if body["kind"] != "CustomResourceDefinition"
    }
    return text(f"{name} {digest}" for name, digest in sorted(digests.items()))
