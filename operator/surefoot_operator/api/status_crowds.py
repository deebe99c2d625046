"""Packs members and named holders of a status into one row each.

Pure; reads both versions. Called by `status_json`. The lists stay lists of mappings: an API server drops what its
schema does not know when it reads, so that lists of another type would lose the members of every job that runs while
the operator is upgraded; and a former operator, which finds no `index` and no `holder` there, refuses the status
instead of taking the world for empty.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from surefoot.protocol.identities import HolderEndpoint, HolderId
from surefoot.protocol.strict import Misfit
from surefoot_operator.api.status import Member
from surefoot_operator.api.status_columns import numbers, packed_numbers, packed_texts, texts

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
