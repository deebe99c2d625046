"""Converts JobStatus to camelCase JSON and back without loss.

Pure; called by fabrics that store status. Reading ignores fields that a newer operator added, and is strict otherwise.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import quote, unquote

from surefoot.protocol.codec import JsonShape, TypeMismatch, read
from surefoot.protocol.identities import MemoryServerEndpoint, MemoryServerInstance
from surefoot_operator.api.fields import camel_case
from surefoot_operator.api.status import JobStatus, Member, moment_seconds, to_rfc3339
from surefoot_operator.errors import InvariantViolation

# ---- times as text ---------------------------------------------------------------------------------------------------
# Turns a status' moments into times, and back. Plans count in Unix seconds. In a status they would be numbers that
# nobody can hold against a log.

MOMENTS = (
    "changed",
    "detected",
    "claimed",
    "stopped",
    "fenced",
    "committed",
    "firstStep",
    "replaced",
    "since",
    "measured",
    "time",
    "lastTransition",
    "until",
    "start",
    "completion",
    "progress",
)
"""Names before `Seconds` in the class, and before `Time` in JSON. All other seconds are durations."""

_WRITTEN = {f"{name}Seconds": f"{name}Time" for name in MOMENTS}
_READ = {written: plain for plain, written in _WRITTEN.items()}


def with_moments(body: Any) -> Any:
    """The body of a status with its moments as times."""
    return _renamed(body, _WRITTEN, lambda value, path: to_rfc3339(value), "")


def with_seconds(body: Any) -> Any:
    """The inverse of `with_moments`. Raises Misfit."""
    return _renamed(body, _READ, _seconds, "")


def _seconds(value: Any, path: str) -> float:
    found = moment_seconds(value)
    if found is None:
        raise TypeMismatch(path, f"is {value!r}, which is no time as 2026-01-31T12:00:00.000000Z")
    return found


def _renamed(body: Any, names: Mapping[str, str], change: Callable[[Any, str], Any], path: str) -> Any:
    if isinstance(body, list):
        return [_renamed(item, names, change, f"{path}[{place}]") for place, item in enumerate(body)]
    if not isinstance(body, dict):
        return body
    found: dict[str, Any] = {}
    for name, value in body.items():
        where = f"{path}.{name}"
        if name in names:
            found[names[name]] = None if value is None else change(value, where)
        elif name == "extra":  # free words: none of them is ours
            found[name] = value
        else:
            found[name] = _renamed(value, names, change, where)
    return found


# ---- members and holders as texts -------------------------------------------------------------------------------------
# Writes each member and each named holder as one line of text. A mapping for each of two thousand workers makes a status
# of 636 kB, which each write stores whole and each watch carries: more than half of it would be the names of fields.

_PLAIN = re.compile(r"[A-Za-z0-9._:-]*")
_MEMBER = re.compile(r"(-?\d{1,40})\.(-?\d{1,40}) (\S*) (\S*)")
_HOLDER = re.compile(r"(\S*) (\S*) (\S*):(-?\d{1,40})(?: domain=(\S*))?( tls)?(?: server=(-?\d{1,40}))?")
_CACHED_WORLDS = 64
"""Worlds that are remembered: a round reads the texts that the last one wrote, and gets the very same members."""

Members = tuple[Member, ...]
Endpoints = tuple[MemoryServerEndpoint, ...]


@functools.lru_cache(_CACHED_WORLDS)
def member_texts(members: Members) -> tuple[str, ...]:
    """`status.membership.members`: "INDEX.ATTEMPT NODE INCARNATION" of each worker, in the order of ranks."""
    return tuple(f"{m.index}.{m.attempt} {_word(m.node)} {_word(m.incarnation)}" for m in members)


@functools.lru_cache(_CACHED_WORLDS)
def holder_texts(holders: Endpoints) -> tuple[str, ...]:
    """`status.assignedServers`: "NODE INSTANCE HOST:PORT", then " domain=…", " tls" and " server=N" where they say more."""
    return tuple(
        f"{_word(e.instance.node)} {_word(e.instance.run_id)} {_word(e.host)}:{e.port}"
        + (f" domain={_word(e.domain)}" if e.domain != e.instance.node else "")
        + (" tls" if e.tls else "")
        + (f" server={e.server_index}" if e.server_index else "")
        for e in holders
    )


@functools.lru_cache(_CACHED_WORLDS)
def _members(texts: tuple[str, ...]) -> Members:
    members: list[Member] = []
    for place, text in enumerate(texts):
        index, attempt, node, incarnation = _parts(
            _MEMBER, text, f".membership.members[{place}]", "INDEX.ATTEMPT NODE INCARNATION"
        )
        members.append(Member(int(index), int(attempt), _text(incarnation), _text(node)))
    return tuple(members)


@functools.lru_cache(_CACHED_WORLDS)
def _servers(texts: tuple[str, ...]) -> Endpoints:
    holders: list[MemoryServerEndpoint] = []
    for place, text in enumerate(texts):
        node, instance, host, port, domain, tls, server = _parts(
            _HOLDER, text, f".assignedServers[{place}]", "NODE INSTANCE HOST:PORT"
        )
        holder = MemoryServerInstance(_text(node), _text(instance))
        within = holder.node if domain is None else _text(domain)
        holders.append(MemoryServerEndpoint(holder, _text(host), int(port), within, tls is not None, int(server or 0)))
    return tuple(holders)


def _parts(form: re.Pattern[str], text: str, where: str, words: str) -> tuple[Any, ...]:
    match = form.fullmatch(text)
    if match is None:
        raise TypeMismatch(where, f"is {text!r:.80}, not {words}")
    return match.groups()


def _word(text: str) -> str:
    """`text` without spaces; what a node, an agent or a server is called has none by itself."""
    return text if _PLAIN.fullmatch(text) else quote(text, ":[]", errors="surrogatepass")


def _text(word: str) -> str:
    return unquote(word, errors="surrogatepass") if "%" in word else word


def _texts(body: Mapping[str, Any], name: str, where: str) -> tuple[str, ...]:
    texts = body.get(name, [])
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise TypeMismatch(f"{where}.{name}", f"is {texts!r:.40}, not a list of texts")
    return tuple(texts)


# ---- status json -----------------------------------------------------------------------------------------------------

SCHEMA_VERSION = 1
"""What this operator writes, in `schemaVersion`, and all that it reads."""

_SHAPE = JsonShape(foreign=True, rename=camel_case)


def status_to_json(status: JobStatus) -> dict[str, Any]:
    """Converts a status to JSON, leaving out fields at their default."""
    members = () if status.membership is None else status.membership.members
    world = None if status.membership is None else replace(status.membership, members=())
    body: dict[str, Any] = with_moments(_plain(replace(status, membership=world, assigned_servers=())))
    if members:
        body["membership"]["members"] = list(member_texts(members))
    if status.assigned_servers:
        body["assignedServers"] = list(holder_texts(status.assigned_servers))
    return {"schemaVersion": SCHEMA_VERSION, **body} if body else {}


def status_from_json(body: Mapping[str, Any]) -> JobStatus:
    """Parses a status. Raises InvariantBroken with the damaged field and its value."""
    try:
        return _read(dict(body))
    except TypeMismatch as misfit:
        raise InvariantViolation(f"status{misfit.path} {misfit.reason}: the stored status was damaged") from misfit


def _read(body: dict[str, Any]) -> JobStatus:
    version = body.get("schemaVersion", SCHEMA_VERSION)
    if version != SCHEMA_VERSION:
        raise TypeMismatch(
            ".schemaVersion", f"is {version!r:.40}, not {SCHEMA_VERSION}: an operator of another version wrote it"
        )
    members: Members = ()
    holders = _servers(_texts(body, "assignedServers", ""))
    body.pop("assignedServers", None)
    world = body.get("membership")
    if isinstance(world, dict):
        members = _members(_texts(world, "members", ".membership"))
        body["membership"] = {name: value for name, value in world.items() if name != "members"}
    status = read(JobStatus, with_seconds(body), _SHAPE)
    if status.membership is not None:
        status = replace(status, membership=replace(status.membership, members=members))
    return replace(status, assigned_servers=holders)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            camel_case(field.name): _plain(getattr(value, field.name))
            for field in dataclasses.fields(value)
            if getattr(value, field.name) != _default(field)
        }
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return dict(value) if isinstance(value, dict) else value


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default  # MISSING where it is required: equal to nothing that can stand in a field
