"""Converts JobStatus to camelCase JSON and back without loss.

Pure; called by fabrics that store status. Reading ignores fields that a newer operator added, and is strict otherwise. The
former version, without `schemaVersion`, had a mapping for each member and holder and its moments in Unix seconds.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, TypeVar

from surefoot.protocol.codec import JsonShape, Misfit, read
from surefoot.protocol.identities import HolderEndpoint, HolderId
from surefoot_operator.api.fields import camel_case
from surefoot_operator.api.status import JobStatus, Member, moment, moment_seconds
from surefoot_operator.errors import InvariantBroken

# ---- times as text ---------------------------------------------------------------------------------------------------
# Turns a status' moments into times, and back. Plans count in Unix seconds. In a status they would be numbers that
# nobody can hold against a log.

MOMENTS = (
    "changed",
    "detected",
    "claimed",
    "stopped",
    "sealed",
    "assigned",
    "firstStep",
    "replaced",
    "since",
    "measured",
    "at",
    "lastTransition",
    "until",
    "start",
    "completion",
    "progress",
)
"""Names in JSON, before `Seconds` in the former version and `Time` in this one. All other seconds are durations."""

_WRITTEN = {f"{name}Seconds": f"{name}Time" for name in MOMENTS}
_READ = {written: plain for plain, written in _WRITTEN.items()}


def with_moments(body: Any) -> Any:
    """The body of a status with its moments as times."""
    return _renamed(body, _WRITTEN, lambda value, path: moment(value), "")


def with_seconds(body: Any) -> Any:
    """The inverse of `with_moments`; seconds of the former version stay. Raises Misfit."""
    return _renamed(body, _READ, _seconds, "")


def _seconds(value: Any, path: str) -> float:
    found = moment_seconds(value)
    if found is None:
        raise Misfit(path, f"is {value!r}, which is no time as 2026-01-31T12:00:00.000000Z")
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


# ---- columns in packed text ------------------------------------------------------------------------------------------
# Packs members and holders of a status into columns. Pure: numbers as runs, texts without what they share. A mapping
# for each of two thousand workers makes a status of 636 kB, which each write stores whole and each watch carries. A
# column is one string, so that a schema can describe it and `kubectl get -o yaml` shows it in a few lines: `0..1999`,
# `1x2000`, `node-{a,b,c}.example`. Random identities of many entries are base64, the only part that people cannot read.

MOST_ENTRIES = 100_000
"""Of one column: ten times what the API server lets a list have."""
FEWEST_PACKED = 64
"""Fewer identities are listed as they are: people compare them with a log."""

_TOKEN = re.compile(r"(-?\d{1,40})(?:\.\.(-?\d{1,40})|x(\d{1,6}))?")
_PLAIN = re.compile(r"[A-Za-z0-9._:-]+")
_HEX = re.compile(r"(?:[0-9a-f]{2})+")
_BRACES = re.compile(r"([^{}]*)\{([^{}]*)\}([^{}]*)")
_PACKED = re.compile(r"#(\d{1,3}):([A-Za-z0-9+/]*={0,2})")


def packed_numbers(values: Sequence[int]) -> str:
    """Packs numbers: successive ones as `0..1999`, repeated `1x2000`, others `3,5`."""
    return ",".join(_tokens(values))


def numbers(column: str) -> list[int]:
    """The inverse of `packed_numbers`. Raises ValueError that says what is wrong."""
    found: list[int] = []
    for token in column.split(",") if column else ():
        match = _TOKEN.fullmatch(token)
        if match is None:
            raise ValueError(f"{token[:40]!r} is neither a number nor a run of numbers")
        first, last = int(match[1]), int(match[2] or match[1])
        count = int(match[3] or 1) if match[2] is None else last - first + 1
        if not 1 <= count <= MOST_ENTRIES - len(found):
            raise ValueError(f"{token[:40]!r} is no run, or makes more than {MOST_ENTRIES} entries")
        found += range(first, last + 1) if match[2] is not None else [first] * count
    return found


def packed_texts(values: Sequence[str]) -> str:
    """Packs texts in the shortest form that `texts` reads and that fits.

    Braces, a few texts with who has which, base64 of hex, or JSON.
    """
    if not values:
        return ""
    if not all(map(_PLAIN.fullmatch, values)):
        return json.dumps(list(values), separators=(",", ":"))
    distinct = list(dict.fromkeys(values))
    if 2 * len(distinct) <= len(values):
        places = {text: place for place, text in enumerate(distinct)}
        return f"{_braced(distinct)}|{packed_numbers([places[text] for text in values])}"
    size = len(values[0])
    if len(values) >= FEWEST_PACKED and all(len(text) == size and _HEX.fullmatch(text) for text in values):
        return f"#{size // 2}:{base64.b64encode(bytes.fromhex(''.join(values))).decode()}"
    return _braced(values)


def texts(column: str) -> list[str]:
    """The inverse of `packed_texts`. Raises ValueError that says what is wrong."""
    if column.startswith("["):
        found = json.loads(column)
        if not all(isinstance(text, str) for text in found):
            raise ValueError("a list has something that is no text")
        return list(found)
    if column.startswith("#"):
        return _unpacked(column)
    named, bar, places = column.partition("|")
    distinct = _unbraced(named)
    if not bar:
        return distinct
    chosen = numbers(places)
    if any(not 0 <= place < len(distinct) for place in chosen):
        raise ValueError(f"it names more than the {len(distinct)} texts that it has")
    return [distinct[place] for place in chosen]


def _tokens(values: Sequence[int]) -> Iterator[str]:
    place = 0
    while place < len(values):
        first, step = values[place], values[place + 1] - values[place] if place + 1 < len(values) else None
        end = place + 1
        while step in (0, 1) and end < len(values) and values[end] - values[end - 1] == step:
            end += 1
        count = end - place
        if count == 1:
            yield str(first)
        else:
            yield f"{first}..{values[end - 1]}" if step == 1 else f"{first}x{count}"
        place = end


def _braced(values: Sequence[str]) -> str:
    """`prefix{a,b}suffix`, the suffix none where it would overlap the prefix in any text."""
    if len(values) == 1:
        return values[0]
    prefix = values[0][: _shared_length(values)]
    rest = [text[len(prefix) :] for text in values]
    suffix = rest[0][len(rest[0]) - _shared_length([text[::-1] for text in rest]) :]
    return f"{prefix}{{{','.join(text[: len(text) - len(suffix)] for text in rest)}}}{suffix}"


def _shared_length(values: Sequence[str]) -> int:
    """Characters that all texts begin with: the first and the last in order differ at the earliest place."""
    first, last = min(values), max(values)
    return next((place for place, pair in enumerate(zip(first, last, strict=False)) if len(set(pair)) > 1), len(first))


def _unbraced(column: str) -> list[str]:
    if not column:
        return []
    match = _BRACES.fullmatch(column)
    if match is None:
        if "{" in column or "}" in column:
            raise ValueError(f"{column[:40]!r} has braces that are not one pair")
        return [column]
    return [f"{match[1]}{text}{match[3]}" for text in match[2].split(",")]


def _unpacked(column: str) -> list[str]:
    match = _PACKED.fullmatch(column)
    size = int(match[1]) if match is not None else 0
    if match is None or not size:
        raise ValueError(f"{column[:40]!r} is no packed column")
    held = base64.b64decode(match[2], validate=True)
    if len(held) % size:
        raise ValueError(f"{len(held)} bytes are not a multiple of {size}")
    bounds = range(0, len(held) + 1, size)
    return [held[begin:end].hex() for begin, end in pairwise(bounds)]


# ---- members in packed text ------------------------------------------------------------------------------------------
# Packs members and named holders of a status into one row each. Pure; reads both versions. The lists stay lists of
# mappings: an API server drops what its schema does not know when it reads, so that lists of another type would lose
# the members of every job that runs while the operator is upgraded; and a former operator, which finds no `index` and
# no `holder` there, refuses the status instead of taking the world for empty.

Members = tuple[Member, ...]
Endpoints = tuple[HolderEndpoint, ...]
Row = dict[str, str]
_KEPT = 64
"""Worlds whose rows are remembered: a round reads the row that the last one wrote, and gets the very same members."""
T = TypeVar("T")


def member_rows(members: Members) -> list[Row]:
    """`status.world.members` as JSON has it."""
    return [dict(_member_row(members))] if members else []


def members_in(rows: Any) -> Members | None:
    """Reads members from rows; None: the former version's mappings. Raises Misfit."""
    row = _row(rows, "index", ".world.members")
    if row is None:
        return None
    names = ("indices", "attempts", "incarnations", "nodes")
    return _members(*(_text(row, name, ".world.members[0]") for name in names))


def holder_rows(holders: Endpoints, members: Members) -> list[Row]:
    """Packs holders as `status.namedHolders`; members' nodes become their places."""
    return [dict(_holder_row(holders, members))] if holders else []


def holders_in(rows: Any, members: Members) -> Endpoints | None:
    """The holders of rows, as `members_in`. Raises Misfit."""
    row = _row(rows, "holder", ".namedHolders")
    if row is None:
        return None
    names = ("nodes", "others", "instances", "hosts", "ports", "domains", "secured", "servers")
    return _holders(members, *(_text(row, name, ".namedHolders[0]", "") for name in names))


@functools.lru_cache(_KEPT)
def _member_row(members: Members) -> tuple[tuple[str, str], ...]:
    return (
        ("indices", packed_numbers([one.index for one in members])),
        ("attempts", packed_numbers([one.attempt for one in members])),
        ("incarnations", packed_texts([one.incarnation for one in members])),
        ("nodes", packed_texts([one.node for one in members])),
    )


@functools.lru_cache(_KEPT)
def _members(indices: str, attempts: str, incarnations: str, nodes: str) -> Members:
    where = ".world.members[0]"
    indices_in, attempts_in = (
        _column(numbers, indices, f"{where}.indices"),
        _column(numbers, attempts, f"{where}.attempts"),
    )
    named, on = _column(texts, incarnations, f"{where}.incarnations"), _column(texts, nodes, f"{where}.nodes")
    _check_lengths(where, indices_in, attempts_in, named, on)
    return tuple(Member(*one) for one in zip(indices_in, attempts_in, named, on, strict=True))


@functools.lru_cache(_KEPT)
def _holder_row(holders: Endpoints, members: Members) -> tuple[tuple[str, str], ...]:
    nodes, known = [one.holder.node for one in holders], {one.node for one in members}
    others = [node for node in dict.fromkeys(nodes) if node not in known]
    places = {node: place for place, node in enumerate(_node_order(members, others))}
    domains, tls = [one.domain for one in holders], [int(one.tls) for one in holders]
    servers = [one.server for one in holders]
    row = (
        ("nodes", packed_numbers([places[node] for node in nodes])),
        ("others", packed_texts(others)),
        ("instances", packed_texts([one.holder.instance for one in holders])),
        ("hosts", packed_texts([one.host for one in holders])),
        ("ports", packed_numbers([one.port for one in holders])),
        ("domains", "" if domains == nodes else packed_texts(domains)),
        ("secured", packed_numbers(tls) if any(tls) else ""),
        ("servers", packed_numbers(servers) if any(servers) else ""),
    )
    return tuple((name, column) for name, column in row if column)


@functools.lru_cache(_KEPT)
def _holders(members: Members, nodes: str, others: str, *columns: str) -> Endpoints:
    instances, hosts, ports, domains, tls, servers = columns
    where = ".namedHolders[0]"
    order = _node_order(members, _column(texts, others, f"{where}.others"))
    places, at = _column(numbers, nodes, f"{where}.nodes"), _column(numbers, ports, f"{where}.ports")
    if any(not 0 <= place < len(order) for place in places):
        raise Misfit(f"{where}.nodes", f"names more than the {len(order)} nodes that there are")
    on = [order[place] for place in places]
    within = _column(texts, domains, f"{where}.domains") if domains else on
    safe = _column(numbers, tls, f"{where}.secured") if tls else [0] * len(on)
    numbered = _column(numbers, servers, f"{where}.servers") if servers else [0] * len(on)
    named, hosted = _column(texts, instances, f"{where}.instances"), _column(texts, hosts, f"{where}.hosts")
    _check_lengths(where, on, named, hosted, at, within, safe, numbered)
    return tuple(
        HolderEndpoint(HolderId(node, instance), host, port, domain, bool(secure), server)
        for node, instance, host, port, domain, secure, server in zip(
            on, named, hosted, at, within, safe, numbered, strict=True
        )
    )


def _node_order(members: Members, others: list[str]) -> list[str]:
    """Nodes by which holders are named: sorted, as holders are, so that all of them are one run."""
    return sorted({one.node for one in members}.union(others))


def _row(rows: Any, former: str, where: str) -> dict[str, Any] | None:
    """The one row of columns; None where each entry is a mapping, or none is there. Raises Misfit."""
    if not isinstance(rows, list) or not rows or not isinstance(rows[0], dict) or former in rows[0]:
        return None
    if len(rows) != 1:
        raise Misfit(where, f"has {len(rows)} rows, not one")
    return rows[0]


def _text(row: dict[str, Any], name: str, where: str, default: str | None = None) -> str:
    found = row.get(name, default)
    if not isinstance(found, str):
        raise Misfit(f"{where}.{name}", "is missing" if found is None else f"is {found!r:.40}, which is no text")
    return found


def _column(unpack: Callable[[str], list[T]], column: str, where: str) -> list[T]:
    try:
        return unpack(column)
    except ValueError as error:
        raise Misfit(where, f"cannot be read: {error}") from error


def _check_lengths(where: str, *columns: list[Any]) -> None:
    found = {len(column) for column in columns}
    if len(found) != 1:
        raise Misfit(where, f"has columns of {', '.join(map(str, sorted(found)))} entries, not of as many each")


# ---- status json -----------------------------------------------------------------------------------------------------

SCHEMA_VERSION = 2
"""What this operator writes, in `schemaVersion`."""

_SHAPE = JsonShape(foreign=True, rename=camel_case)


def status_to_json(status: JobStatus) -> dict[str, Any]:
    """Converts a status to JSON, leaving out fields at their default."""
    members = () if status.world is None else status.world.members
    world = None if status.world is None else replace(status.world, members=())
    body: dict[str, Any] = with_moments(_plain(replace(status, world=world, named_holders=())))
    if members:
        body["world"]["members"] = member_rows(members)
    if status.named_holders:
        body["namedHolders"] = holder_rows(status.named_holders, members)
    return {"schemaVersion": SCHEMA_VERSION, **body} if body else {}


def status_from_json(body: Mapping[str, Any]) -> JobStatus:
    """Parses a status. Raises InvariantBroken with the damaged field and its value."""
    try:
        return _read(dict(body))
    except Misfit as misfit:
        raise InvariantBroken(f"status{misfit.path} {misfit.why}: the stored status was damaged") from misfit


def _read(body: dict[str, Any]) -> JobStatus:
    version = body.get("schemaVersion", 1)
    if version not in (1, SCHEMA_VERSION):
        raise Misfit(".schemaVersion", f"is {version!r:.40}: an operator of another version wrote it")
    world = body.get("world")
    members = members_in(world.get("members")) if isinstance(world, dict) else None
    if isinstance(world, dict) and members is not None:
        body["world"] = {name: value for name, value in world.items() if name != "members"}
    holders = holders_in(body.get("namedHolders"), members or ())
    if holders is not None:
        del body["namedHolders"]
    status = read(JobStatus, body if version == 1 else with_seconds(body), _SHAPE)
    if members is not None and status.world is not None:
        status = replace(status, world=replace(status.world, members=members))
    return status if holders is None else replace(status, named_holders=holders)


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
