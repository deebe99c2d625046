"""Implements `surefoot nodes`: a job's nodes and what runs there.

Called by `main`. `node_rows` is pure.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from surefoot_operator.api.status import slow_nodes
from surefoot_operator.cli.cli_errors import EXIT_OK
from surefoot_operator.cli.jobs.job_source import add_job, view_of
from surefoot_operator.cli.jobs.job_view import JobView
from surefoot_operator.cli.structured_output import add_output, emit
from surefoot_operator.cli.tables import UNKNOWN, TextTable, text_lines
from surefoot_operator.job_snapshot import NodeSeen


@dataclass(frozen=True, slots=True)
class NodeUse:
    """One node as a job uses it."""

    name: str
    state: str
    domain: str
    workers: tuple[str, ...]
    ranks: tuple[str, ...]
    """Group ranks of the workers that are members of the world."""
    holder: str
    why: str
    """Why it is not used, or is being left."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_job(parser)
    parser.add_argument("--all", action="store_true", help="nodes without a worker or holder too")
    add_output(parser, ("json", "yaml"))


def run(given: argparse.Namespace) -> int:
    view = view_of(given)
    found = node_rows(view, everything=given.all)
    emit(found, given.output, lambda wide: [*node_lines(found), *view.unread])
    return EXIT_OK


def node_rows(view: JobView, everything: bool = False) -> list[NodeUse]:
    """Joins nodes with workers, members and holders, sorted by name."""
    status = view.stored.status
    world = status.world if status is not None else None
    members = world.members if world is not None else ()
    places = {(member.index, member.attempt): place for place, member in enumerate(members)}
    known = {node.name: node for node in view.nodes or ()}
    holders = {one.node: "running" if one.running else "not ready" for one in view.holders or ()}
    left = () if status is None else (*status.excluded_nodes, *slow_nodes(status, view.now))
    avoided = {one.name: one.reason for one in left}
    workers: dict[str, list[tuple[int, int]]] = {}
    for worker in view.workers:
        if worker.node is not None and worker.phase not in ("Succeeded", "Failed"):
            workers.setdefault(worker.node, []).append((worker.index, worker.attempt))
    used = {*workers, *holders, *avoided, *(member.node for member in members)}
    found = []
    for name in sorted(used | set(known) if everything else used):
        node, here = known.get(name), workers.get(name, ())
        found.append(
            NodeUse(
                name=name,
                state=_state(view, node),
                domain=UNKNOWN if node is None else "/".join(filter(None, node.path)) or node.domain,
                workers=tuple(f"{index}-{attempt}" for index, attempt in here),
                ranks=tuple(str(places[one]) for one in here if one in places),
                holder=UNKNOWN if view.holders is None else holders.get(name, "none"),
                why="; ".join(filter(None, (avoided.get(name), *_reasons(node)))),
            )
        )
    return found


def node_lines(found: list[NodeUse]) -> list[str]:
    if not found:
        return ["the job has no node"]
    columns = ("NODE", "STATE", "DOMAIN", "WORKERS", "GROUP RANK", "HOLDER", "WHY")
    rows = tuple(
        (one.name, one.state, one.domain, _joined(one.workers), _joined(one.ranks), one.holder, one.why)
        for one in found
    )
    return text_lines(TextTable(columns, rows))


def _joined(values: tuple[str, ...]) -> str:
    return ",".join(values) or UNKNOWN


def _state(view: JobView, node: NodeSeen | None) -> str:
    if node is None:
        return UNKNOWN if view.nodes is None else "gone"
    if not node.ready:
        return "NotReady"
    if node.doubt:
        return "doubted"
    return "Ready" if node.schedulable else "Ready, cordoned"


def _reasons(node: NodeSeen | None) -> tuple[str, ...]:
    return () if node is None else tuple(filter(None, (node.reason, node.signal, node.doubt, node.remark)))
