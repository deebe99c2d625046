"""Converts JobStatus to camelCase JSON and back without loss.

Pure; called by platforms, which store the status. Reading ignores fields that a newer operator added and is strict otherwise:
a damaged status must not be taken for another state of the job.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import quote, unquote

from surefoot.protocol.codec import JsonShape, TypeMismatch, build_from_json
from surefoot.protocol.identities import MemoryServerEndpoint, MemoryServerInstance
from surefoot_operator.api.fields import camel_case
from surefoot_operator.api.status import JobStatus, Member, parse_rfc3339, to_rfc3339
from surefoot_operator.errors import InvariantViolation

# ---- times as text ---------------------------------------------------------------------------------------------------
# Converts the times of a status. Plans calculate in Unix seconds, which users could not compare with a log; in JSON they are
# RFC 3339 times.

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
"""Attributes `…_seconds` of the status that are times, written to JSON as `…Time`. All other seconds are durations."""

_TIME_BY_SECONDS = {f"{name}Seconds": f"{name}Time" for name in MOMENTS}
_SECONDS_BY_TIME = {time_name: seconds_name for seconds_name, time_name in _TIME_BY_SECONDS.items()}


def with_times(body: Any) -> Any:
    """Returns the JSON of a status with Unix seconds replaced by RFC 3339 times."""
    return _convert_times(body, _TIME_BY_SECONDS, lambda value, path: to_rfc3339(value), "")


def with_seconds(body: Any) -> Any:
    """Returns the JSON of a status with RFC 3339 times replaced by Unix seconds. Raises TypeMismatch."""
    return _convert_times(body, _SECONDS_BY_TIME, _parse_time, "")


def _parse_time(value: Any, path: str) -> float:
    """Returns the Unix seconds of an RFC 3339 time. Raises TypeMismatch."""
    seconds = parse_rfc3339(value)
    if seconds is None:
        raise TypeMismatch(path, f"is {value!r}, which is no time such as 2026-01-31T12:00:00.000000Z")
    return seconds


def _convert_times(body: Any, names: Mapping[str, str], change: Callable[[Any, str], Any], path: str) -> Any:
    """Renames the fields in `names` at any depth and applies `change` to their values."""
    if isinstance(body, list):
        return [_convert_times(item, names, change, f"{path}[{index}]") for index, item in enumerate(body)]
    if not isinstance(body, dict):
        return body
    converted: dict[str, Any] = {}
    for name, value in body.items():
        value_path = f"{path}.{name}"
        if name in names:
            converted[names[name]] = None if value is None else change(value, value_path)
        elif name == "extra":  # free text of users: its keys are not fields of the status
            converted[name] = value
        else:
            converted[name] = _convert_times(value, names, change, value_path)
    return converted


# ---- members and memory servers as texts ----------------------------------------------------------------------------
# Writes each member and each assigned memory server as one line of text. With a mapping for each of two thousand workers, a
# status would have 636 kB, more than half of them field names. Every write stores a status as a whole, and every watch
# transfers it.

_PLAIN = re.compile(r"[A-Za-z0-9._:-]*")
_MEMBER = re.compile(r"(-?\d{1,40})\.(-?\d{1,40}) (\S*) (\S*)")
_SERVER = re.compile(r"(\S*) (\S*) (\S*):(-?\d{1,40})(?: domain=(\S*))?( tls)?(?: server=(-?\d{1,40}))?")
_CACHED_MEMBERSHIPS = 64
"""Memberships whose texts are cached, so that a reconcile reads the same member objects that the last one wrote."""

Members = tuple[Member, ...]
Endpoints = tuple[MemoryServerEndpoint, ...]


@functools.lru_cache(_CACHED_MEMBERSHIPS)
def member_texts(members: Members) -> tuple[str, ...]:
    """Returns `status.membership.members`: "INDEX.ATTEMPT NODE INCARNATION" of each worker, in rank order."""
    return tuple(f"{m.index}.{m.attempt} {_encode_word(m.node)} {_encode_word(m.incarnation)}" for m in members)


@functools.lru_cache(_CACHED_MEMBERSHIPS)
def server_texts(servers: Endpoints) -> tuple[str, ...]:
    """Returns `status.assignedServers`: "NODE INSTANCE HOST:PORT" of each memory server.

    " domain=…", " tls" and " server=N" follow where they differ from the node, from plain TCP and from 0.
    """
    return tuple(
        f"{_encode_word(e.instance.node)} {_encode_word(e.instance.run_id)} {_encode_word(e.host)}:{e.port}"
        + (f" domain={_encode_word(e.domain)}" if e.domain != e.instance.node else "")
        + (" tls" if e.tls else "")
        + (f" server={e.server_index}" if e.server_index else "")
        for e in servers
    )


@functools.lru_cache(_CACHED_MEMBERSHIPS)
def _parse_members(texts: tuple[str, ...]) -> Members:
    """Parses the texts that `member_texts` wrote. Raises TypeMismatch."""
    members: list[Member] = []
    for position, text in enumerate(texts):
        index, attempt, node, incarnation = _match_fields(
            _MEMBER, text, f".membership.members[{position}]", "INDEX.ATTEMPT NODE INCARNATION"
        )
        members.append(Member(int(index), int(attempt), _decode_word(incarnation), _decode_word(node)))
    return tuple(members)


@functools.lru_cache(_CACHED_MEMBERSHIPS)
def _parse_servers(texts: tuple[str, ...]) -> Endpoints:
    """Parses the texts that `server_texts` wrote. Raises TypeMismatch."""
    servers: list[MemoryServerEndpoint] = []
    for position, text in enumerate(texts):
        node, run_id, host, port, domain, tls, server_index = _match_fields(
            _SERVER, text, f".assignedServers[{position}]", "NODE INSTANCE HOST:PORT"
        )
        instance = MemoryServerInstance(_decode_word(node), _decode_word(run_id))
        domain_name = instance.node if domain is None else _decode_word(domain)
        servers.append(
            MemoryServerEndpoint(
                instance, _decode_word(host), int(port), domain_name, tls is not None, int(server_index or 0)
            )
        )
    return tuple(servers)


def _match_fields(pattern: re.Pattern[str], text: str, path: str, form: str) -> tuple[Any, ...]:
    """Returns the groups of a pattern that must match the text as a whole. Raises TypeMismatch."""
    match = pattern.fullmatch(text)
    if match is None:
        raise TypeMismatch(path, f"is {text!r:.80}, not {form}")
    return match.groups()


def _encode_word(text: str) -> str:
    """Returns `text` as one word: names of nodes, agents and servers normally have no spaces; others are percent-encoded."""
    return text if _PLAIN.fullmatch(text) else quote(text, ":[]", errors="surrogatepass")


def _decode_word(word: str) -> str:
    """Returns the text that `_encode_word` encoded."""
    return unquote(word, errors="surrogatepass") if "%" in word else word


def _read_texts(body: Mapping[str, Any], name: str, path: str) -> tuple[str, ...]:
    """Returns a list of texts, empty if it is missing. Raises TypeMismatch."""
    texts = body.get(name, [])
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise TypeMismatch(f"{path}.{name}", f"is {texts!r:.40}, not a list of texts")
    return tuple(texts)


# ---- status json -----------------------------------------------------------------------------------------------------

SCHEMA_VERSION = 1
"""The `schemaVersion` that this operator writes, and the only one that it reads."""

_SHAPE = JsonShape(ignores_unknown_fields=True, rename=camel_case)


def status_to_json(status: JobStatus) -> dict[str, Any]:
    """Converts a status to JSON, leaving out fields at their default."""
    members = () if status.membership is None else status.membership.members
    membership = None if status.membership is None else replace(status.membership, members=())
    body: dict[str, Any] = with_times(_without_defaults(replace(status, membership=membership, assigned_servers=())))
    if members:
        body["membership"]["members"] = list(member_texts(members))
    if status.assigned_servers:
        body["assignedServers"] = list(server_texts(status.assigned_servers))
    return {"schemaVersion": SCHEMA_VERSION, **body} if body else {}


def status_from_json(body: Mapping[str, Any]) -> JobStatus:
    """Parses a status. Raises InvariantViolation with the damaged field and its value."""
    try:
        return _read_status(dict(body))
    except TypeMismatch as error:
        raise InvariantViolation(f"status{error.path} {error.reason}: the stored status is damaged") from error


def _read_status(body: dict[str, Any]) -> JobStatus:
    """Reads a status whose members and servers are texts. Raises TypeMismatch."""
    version = body.get("schemaVersion", SCHEMA_VERSION)
    if version != SCHEMA_VERSION:
        raise TypeMismatch(
            ".schemaVersion",
            f"is {version!r:.40}, not {SCHEMA_VERSION}: an operator of another version wrote the status",
        )
    # members and servers are texts in JSON: read them apart from the fields of the dataclass
    members: Members = ()
    servers = _parse_servers(_read_texts(body, "assignedServers", ""))
    body.pop("assignedServers", None)
    membership = body.get("membership")
    if isinstance(membership, dict):
        members = _parse_members(_read_texts(membership, "members", ".membership"))
        body["membership"] = {name: value for name, value in membership.items() if name != "members"}
    status = build_from_json(JobStatus, with_seconds(body), _SHAPE)
    if status.membership is not None:
        status = replace(status, membership=replace(status.membership, members=members))
    return replace(status, assigned_servers=servers)


def _without_defaults(value: Any) -> Any:
    """Returns a value as JSON, without fields at their default."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            camel_case(field.name): _without_defaults(getattr(value, field.name))
            for field in dataclasses.fields(value)
            if getattr(value, field.name) != _default(field)
        }
    if isinstance(value, tuple):
        return [_without_defaults(item) for item in value]
    return dict(value) if isinstance(value, dict) else value


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default  # MISSING if the field is required: no value equals it, so that it is always written
