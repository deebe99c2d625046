"""Strategies for documents: from the CRD's schema, from valid documents changed anywhere, and from raw text."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

from support.sample_jobs import WHOLE

PROJECT = Path(__file__).parents[2]

METADATA = {"namespace": "default", "uid": "11-22", "generation": 3, "finalizers": ["a"]}


@functools.cache
def schema() -> dict[str, Any]:
    """The CRD's, as openAPI says it."""
    body = yaml.safe_load((PROJECT / "manifests" / "crd.yaml").read_text(encoding="utf-8"))
    found: dict[str, Any] = body["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return found


@functools.cache
def valid_documents() -> tuple[dict[str, Any], ...]:
    examples = [*sorted((PROJECT / "examples").glob("**/*.yaml"))]
    found = [d for path in examples for d in yaml.safe_load_all(path.read_text(encoding="utf-8"))]
    whole = {**WHOLE, "metadata": {**WHOLE["metadata"], **METADATA}}
    return (whole, *(body for body in found if isinstance(body, dict) and body.get("kind") == "TrainingJob"))


def places(body: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value below `body`."""
    pairs = body.items() if isinstance(body, dict) else enumerate(body) if isinstance(body, list) else ()
    for key, below in pairs:
        yield (*path, key)
        yield from places(below, (*path, key))


@functools.cache
def places_of(document: int) -> tuple[tuple[Any, ...], ...]:
    return tuple(places(valid_documents()[document]))


NASTY: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 10**309, 10**4000, 0.0, -0.5, 5e-324, 1e308, float("inf"), float("nan"),
    "", " ", "null", "3", "-1", "\0", "a\0b", "\x1b[31m", "\u202e", "\ud800", "a" * 5000, "../../etc", "A=B", "=", "/", "*", "%s",
    "true", "8Gi", "1e3", "s3://a:b@c/d", "file://", "file:///", "http://u:p@h", "é", "𝕏", [], {}, [[]], [None], {"": None},
    {"a": {"b": {"c": []}}}, [1, "a", None, {}], ["a"] * 600, {"name": "trainer"}, [{"name": None}], [{"name": "a", "value": 1}],
    {1: 2}, {None: 1}, b"bytes", {"x" * 3000: 1},
)  # fmt: skip


def scalars() -> st.SearchStrategy[Any]:
    return st.one_of(st.sampled_from(NASTY), st.integers(), st.floats(), st.text(max_size=12), st.booleans(), st.none())


def anything() -> st.SearchStrategy[Any]:
    return st.recursive(
        scalars(), lambda s: st.lists(s, max_size=3) | st.dictionaries(st.text(max_size=6), s, max_size=3), max_leaves=6
    )


@st.composite
def changed_documents(draw: st.DrawFn) -> Any:
    """A valid document with one to three places set, removed, doubled, or given a foreign neighbour."""
    which = draw(st.integers(0, len(valid_documents()) - 1))
    body = copy.deepcopy(valid_documents()[which])
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(places_of(which)))
        at: Any = body
        try:
            for key in path[:-1]:
                at = at[key]
            _change(draw, at, path[-1])
        except (KeyError, IndexError, TypeError, AttributeError):
            continue  # an earlier change took that place away
    return body


def _change(draw: st.DrawFn, at: Any, key: Any) -> None:
    match draw(st.sampled_from(("nasty", "nasty", "drawn", "removed", "neighbour", "moved"))):
        case "nasty":
            at[key] = copy.deepcopy(draw(st.sampled_from(NASTY)))
        case "drawn":
            at[key] = draw(anything())
        case "removed":
            del at[key]
        case "neighbour" if isinstance(at, dict):
            at[draw(st.sampled_from(NASTY).filter(lambda v: isinstance(v, str | int | None)))] = draw(scalars())
        case "neighbour":
            at.append(draw(scalars()))
        case _:
            at[key] = [at[key]] if draw(st.booleans()) else {"value": at[key]}


@st.composite
def schema_documents(draw: st.DrawFn) -> Any:
    """A document as the schema describes it, each value near the edge of what is allowed, some beyond."""
    spec = draw(_cached(schema()["properties"]["spec"]))
    return {"apiVersion": "surefoot.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "a"}, "spec": spec}


_MADE: dict[int, st.SearchStrategy[Any]] = {}


def _cached(part: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Of one part of the schema, which lives as long as this module: to make a strategy costs more than to draw."""
    if id(part) not in _MADE:
        _MADE[id(part)] = _of(part)
    return _MADE[id(part)]


def _of(part: dict[str, Any]) -> st.SearchStrategy[Any]:
    if "enum" in part:
        return st.sampled_from([*part["enum"], *NASTY[:3]])
    if part.get("x-kubernetes-int-or-string"):
        return st.one_of(st.integers(0, 2**40), st.from_regex(part.get("pattern", "a"), fullmatch=True))
    match part.get("type"):
        case "object":
            return _object(part)
        case "array":
            items = _cached(part["items"]) if "items" in part else scalars()
            return st.lists(items, min_size=part.get("minItems", 0), max_size=min(part.get("maxItems", 3), 3))
        case "string":
            return st.one_of(_text(part), st.sampled_from([v for v in NASTY if isinstance(v, str)]))
        case "boolean":
            return st.booleans()
        case "integer" | "number":
            low, high = part.get("minimum", 0), part.get("maximum", 10**6)
            edges = [low, high, low - 1, high + 1, low / 2]
            within = st.integers(int(low), int(high)) if part["type"] == "integer" else st.floats(low, high)
            return st.one_of(within, within, st.sampled_from(edges))
    return scalars()


def _text(part: dict[str, Any]) -> st.SearchStrategy[Any]:
    if "pattern" in part:
        return st.from_regex(part["pattern"], fullmatch=True)
    return st.text(min_size=part.get("minLength", 0), max_size=20)


@st.composite
def _object(draw: st.DrawFn, part: dict[str, Any]) -> Any:
    required = part.get("required", ())
    found = {}
    for name, below in part.get("properties", {}).items():
        if name in required or draw(st.integers(0, 2)) == 0:
            found[name] = draw(_cached(below))
    if name_needed(part, found):
        found["containers"] = [{"name": "trainer", "command": ["a"]}, *found["containers"][:2]]
    return found


def name_needed(part: dict[str, Any], found: dict[str, Any]) -> bool:
    """Three documents of four would otherwise end at the container that is not there."""
    return isinstance(found.get("containers"), list) and "containers" in part.get("required", ())


PIECES = (
    "&a ", "*a", "<<: *a", "!!int ''", "!!bool x", "!!binary a", "!!timestamp x", "!!float ''", "? ", "- ", ": ", "{", "}", "[", "]",
    "|", ">", "'", '"', "#", "%YAML 9.9\n", "---\n", "...\n", "\t", "\0", "\r", "\x85", "\ufeff", "\ud800", "!x ", "!!python/name:os ",
    "0x" + "f" * 50, "1:1:1", ".inf", "2001-99-99", "~", "[" * 40, "a: " * 5, "é", "🦶", "\\u0000", "@", "`",
)  # fmt: skip


@functools.cache
def texts_of(document: int) -> str:
    found: str = yaml.safe_dump(valid_documents()[document])
    return found


@st.composite
def changed_texts(draw: st.DrawFn) -> str:
    """The text of a valid document, cut, doubled and with pieces put in; or nothing but such pieces."""
    pieces = st.one_of(st.sampled_from(PIECES), st.text(max_size=5))
    if draw(st.integers(0, 4)) == 0:
        return "".join(draw(st.lists(pieces, max_size=12)))
    text = texts_of(draw(st.integers(0, len(valid_documents()) - 1)))
    for _ in range(draw(st.integers(1, 4))):
        at, length = draw(st.integers(0, len(text))), draw(st.integers(0, 20))
        text = text[:at] + draw(pieces) + text[at + length :]
    return text


def documents() -> st.SearchStrategy[Any]:
    """A mapping for `parse_job`, a text for `load_yaml`, or the bytes of a file."""
    return st.one_of(
        changed_documents(), changed_documents(), changed_documents(), schema_documents(), changed_texts(), st.binary()
    )
