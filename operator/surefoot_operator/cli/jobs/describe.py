"""Implements `surefoot describe`, `list`, `nodes` and `timeline`, and what they print.

Called by `main`. `described` and `description_lines` are pure.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from surefoot.protocol.text import format_bytes
from surefoot_operator import reasons
from surefoot_operator.api.spec import TrainingJob
from surefoot_operator.api.status import (
    Condition,
    DataProgress,
    ExcludedNode,
    Incident,
    JobStatus,
    Rollback,
    StoredCheckpoints,
    TimeSpent,
    straggler_nodes,
)
from surefoot_operator.cli.cluster_access import add_cluster
from surefoot_operator.cli.command_base import EXIT_OK
from surefoot_operator.cli.jobs.read_jobs import (
    JobProgress,
    JobView,
    StoredJob,
    add_job,
    add_run_folder,
    on_cluster,
    pace_of,
    read_jobs,
    read_run,
    step_at,
    view_of,
)
from surefoot_operator.cli.local import run_report
from surefoot_operator.cli.local.progress import RunEvent
from surefoot_operator.cli.tables import UNKNOWN, add_output, age, emit, number, table_lines
from surefoot_operator.job_snapshot import ObservedNode, ObservedWorker
from surefoot_operator.policy.failure.spare_workers import largest_size
from surefoot_operator.policy.report.time_spent import goodput, seconds_spent

# ---- job summary -----------------------------------------------------------------------------------------------------
# Summarises one job in a row of `surefoot list`. Pure.


@dataclass(frozen=True, slots=True)
class JobSummary:
    """What a person asks first of one job."""

    namespace: str
    name: str
    state: str
    ready: str
    world_size: int | None
    generation: int | None
    pace: JobProgress
    restarts: int | None
    age_seconds: float | None
    message: str
    memory_bytes: int | None = None
    """Of its checkpoints in memory, every copy counted."""
    persistent_bytes: int | None = None


def summarize(stored: StoredJob, now: float) -> JobSummary:
    """Summarises a job; what cannot be read is its message."""
    status = stored.status
    world = status.membership if status is not None else None
    there = StoredCheckpoints() if status is None else persistent_contents(status)
    message = "" if status is None else status.message
    if not stored.phase:
        message = "no operator has looked at this job yet: is surefoot-operator running?"
    began = stored.created_seconds or (status.start_seconds if status is not None else None)
    return JobSummary(
        namespace=stored.namespace,
        name=stored.name,
        state=stored.phase or "Unseen",
        ready=stored.ready,
        world_size=None if world is None else world.world_size,
        generation=None if world is None else world.generation,
        pace=pace_of(stored, now),
        restarts=stored.restarts,
        age_seconds=None if began is None else max(0.0, now - began),
        message="; ".join(stored.problems) or message,
        memory_bytes=None if there.memory is None else there.memory.bytes,
        persistent_bytes=None if there.persistent is None else there.persistent.bytes,
    )


def persistent_contents(status: JobStatus) -> StoredCheckpoints:
    """What each tier keeps: nothing in memory once a job is over."""
    over = status.phase in ("Complete", "Failed")
    return StoredCheckpoints(persistent=status.checkpoints.persistent) if over else status.checkpoints


JOB_COLUMNS: dict[str, Callable[[JobSummary], str]] = {
    "NAME": lambda job: job.name,
    "STATE": lambda job: job.state,
    "READY": lambda job: job.ready or UNKNOWN,
    "WORLD": lambda job: number(job.world_size),
    "STEP": lambda job: format_progress(job.pace),
    "LEFT": lambda job: age(job.pace.remaining_seconds),
    "CHECKPOINT": lambda job: format_newest_checkpoint(job.pace),
    "RESTARTS": lambda job: number(job.restarts),
    "AGE": lambda job: age(job.age_seconds),
}
WIDE_COLUMNS: dict[str, Callable[[JobSummary], str]] = {
    "EPOCH": lambda job: number(job.generation),
    "RATE": lambda job: UNKNOWN if job.pace.steps_per_second is None else f"{job.pace.steps_per_second:.3g}/s",
    "EXPOSED": lambda job: format_at_risk(job.pace),
    "IN-MEMORY": lambda job: UNKNOWN if job.memory_bytes is None else format_bytes(job.memory_bytes),
    "PERSISTENT": lambda job: UNKNOWN if job.persistent_bytes is None else format_bytes(job.persistent_bytes),
    "MESSAGE": lambda job: job.message,
}


def format_progress(pace: JobProgress) -> str:
    """`420/1000 (42%)`, or the step alone."""
    if pace.step is None or pace.total_steps is None:
        return number(pace.step)
    return f"{pace.step}/{pace.total_steps} ({min(100, 100 * pace.step // pace.total_steps)}%)"


def format_newest_checkpoint(pace: JobProgress) -> str:
    """The newest complete checkpoint and its age: `420 (12s)`."""
    if pace.checkpoint_step is None:
        return UNKNOWN
    aged = pace.checkpoint_age_seconds
    return str(pace.checkpoint_step) if aged is None else f"{pace.checkpoint_step} ({age(aged)})"


def format_at_risk(pace: JobProgress) -> str:
    """What a failure now would repeat: `5 steps (2s)`."""
    if pace.exposed_steps is None:
        return UNKNOWN
    steps = f"{pace.exposed_steps} step{'' if pace.exposed_steps == 1 else 's'}"
    return steps if pace.exposed_seconds is None else f"{steps} ({age(pace.exposed_seconds)})"


# ---- cost of the next failure ----------------------------------------------------------------------------------------
# Estimates what a failure now would cost, from the status and what can be seen of the workers. Pure.


@dataclass(frozen=True, slots=True)
class NodeLossCost:
    """What the loss of the node with the most members of the world would cost."""

    restored: str
    """The checkpoint that training would be restored from."""
    steps_again: int | None
    """Steps to be run again; None: not known."""
    workers_after: int
    """Workers of the world that goes on; 0: it waits for a replacement."""


def node_loss_cost(view: JobView) -> NodeLossCost | None:
    """Estimates it; None: no world trains."""
    job, status = view.stored.job, view.stored.status
    world = status.membership if status is not None else None
    if job is None or status is None or world is None or world.state != "Committed" or not world.members:
        return None
    if status.phase in ("Complete", "Failed"):
        return None
    step, restored = _restore_point(status)
    reached = step_at(status, pace_of(view.stored, view.now).steps_per_second, view.now)
    [(node, _)] = Counter(member.node for member in world.members).most_common(1)
    remaining = sum(one.phase == "Running" and not one.deleting and one.node != node for one in view.workers)
    return NodeLossCost(restored, None if step is None else max(0, reached - step), largest_size(job.spec, remaining))


def _restore_point(status: JobStatus) -> tuple[int | None, str]:
    """Returns the newest checkpoint that survives a node, by the operator's condition, and its description."""
    protected = next((one.status for one in status.conditions if one.type == reasons.CHECKPOINT_PROTECTED), "Unknown")
    newest, floor = status.last_complete, status.last_uploaded
    if protected == "True" and newest is not None:
        return newest.step, f"{newest}, complete and protected"
    if floor is not None:
        return floor.step, f"{floor}, in the persistent tier"
    if protected == "False" and newest is None:
        return 0, "the beginning: nothing is saved"
    return None, "not known: no checkpoint is known to survive it"


def recovery_medians(incidents: Sequence[Incident]) -> dict[str, float]:
    """Returns the median seconds to the first new step, of failures and of planned changes."""
    durations: dict[str, list[float]] = {}
    for one in incidents:
        if one.first_step_seconds is not None:
            kind = "planned change" if one.kind == "planned" else "failure"
            durations.setdefault(kind, []).append(one.first_step_seconds - one.detected_seconds)
    return {kind: statistics.median(seconds) for kind, seconds in sorted(durations.items())}


def restart_budgets(job: TrainingJob, status: JobStatus, now: float) -> dict[str, tuple[int, int]]:
    """Maps each budget whose end fails the job to what is used of it, and its limit."""
    policy = job.spec.failure_policy
    budgets = {
        "backoffLimit": (status.restarts_counted, job.spec.run_policy.backoff_limit),
        "maxNoProgressRestarts": (status.no_progress_restarts, policy.max_no_progress_restarts),
    }
    if policy.max_restarts is not None:
        window_start = now - policy.eval_period_seconds
        used = sum(one.count for one in status.recent_restarts if one.time_seconds >= window_start)
        budgets["maxRestarts"] = used, policy.max_restarts
    return budgets


# ---- describe --------------------------------------------------------------------------------------------------------

_MAX_EVENTS = 8
_MAX_WORKERS = 64
"""Of more only those that are not well are shown."""


@dataclass(frozen=True, slots=True)
class JobDescription:
    """What `describe` shows of one job."""

    summary: JobSummary
    uid: str
    membership_reason: str
    began_step: int | None
    """The step that the present world restored."""
    persistent_step: int | None
    """Newest step complete in the persistent tier."""
    good_step: int | None
    """Of the newest checkpoint that is proven to be good, where the job asks for that."""
    rollback: Rollback | None
    workers: tuple[ObservedWorker, ...]
    conditions: tuple[Condition, ...]
    incidents: tuple[Incident, ...]
    excluded_nodes: tuple[ExcludedNode, ...]
    events: tuple[RunEvent, ...]
    unread: tuple[str, ...]
    now: float
    seconds: dict[str, float]
    """Where the job's seconds went, by category; those that took none are left out."""
    goodput: float | None
    data: DataProgress | None
    """As the loader told; None: it tells nothing."""
    loss: float | None
    checkpoints: StoredCheckpoints
    """What each tier has, with its bytes; of a job that is over, what stays."""
    node_loss: NodeLossCost | None
    """None: no world trains."""
    recovery_seconds: dict[str, float]
    """From the first sign to the first new step, by what was recovered from; the median of this job's own."""
    budgets: dict[str, tuple[int, int]]
    """The spec's field of each budget of restarts -> what is used, and its limit."""


def add_describe_arguments(parser: argparse.ArgumentParser) -> None:
    add_job(parser)
    add_output(parser)


def run_describe(given: argparse.Namespace) -> int:
    found = describe_job(view_of(given))
    emit(found, given.output, lambda wide: description_lines(found, wide))
    return EXIT_OK


def describe_job(view: JobView) -> JobDescription:
    """Gathers what is shown of one look at a job."""
    job, status = view.stored.job, view.stored.status
    world = status.membership if status is not None else None
    seconds = seconds_spent(TimeSpent() if status is None else status.time_spent, view.now)
    return JobDescription(
        summary=summarize(view.stored, view.now),
        uid=view.stored.uid,
        membership_reason="" if world is None else world.reason,
        began_step=None if world is None else (world.parent.step if world.parent is not None else 0),
        persistent_step=None if status is None or status.last_uploaded is None else status.last_uploaded.step,
        good_step=None if status is None or status.last_good is None else status.last_good.step,
        rollback=None if status is None else status.rollback,
        workers=view.workers,
        conditions=() if status is None else status.conditions,
        incidents=() if status is None else status.incidents,
        excluded_nodes=() if status is None else (*status.excluded_nodes, *straggler_nodes(status, view.now)),
        events=view.events,
        unread=(*view.stored.problems, *view.unread),
        now=view.now,
        seconds={category: spent for category, spent in seconds.items() if spent},
        goodput=goodput(seconds),
        data=None if status is None else status.data,
        loss=None if status is None else status.loss,
        checkpoints=StoredCheckpoints() if status is None else persistent_contents(status),
        node_loss=node_loss_cost(view),
        recovery_seconds={} if status is None else recovery_medians(status.incidents),
        budgets={} if job is None or status is None else restart_budgets(job, status, view.now),
    )


def description_lines(found: JobDescription, wide: bool = False) -> list[str]:
    """Renders the description; `wide`: every worker and event."""
    return [
        *_head(found),
        *_section("Workers", _workers(found, wide)),
        *_section("Conditions", _conditions(found)),
        *_section("Incidents", [incident_line(one, found.now) for one in found.incidents]),
        *_section("Avoided nodes", [f"{one.name}: {one.reason}" for one in found.excluded_nodes]),
        *_section("Events", [event_line(one, found.now) for one in found.events[0 if wide else -_MAX_EVENTS :]]),
        *_section("Could not be read", list(found.unread)),
    ]


def _head(found: JobDescription) -> list[str]:
    one, pace = found.summary, found.summary.pace
    rate = "" if pace.steps_per_second is None else f", {pace.steps_per_second:.3g} steps/s"
    left = "" if pace.remaining_seconds is None else f", about {age(pace.remaining_seconds)} left"
    world = UNKNOWN
    if one.world_size is not None:
        world = f"epoch {one.generation}, {one.world_size} ranks, began at step {number(found.began_step)}: {found.membership_reason}"
    newest = "none yet" if pace.checkpoint_step is None else f"step {format_newest_checkpoint(pace)}"
    kept = "" if found.persistent_step is None else f"; persistent tier: {found.persistent_step}"
    kept += "" if found.good_step is None else f"; proven good: {found.good_step}"
    rows = (
        ("Job", f"{one.namespace}/{one.name}   uid {found.uid or UNKNOWN}   age {age(one.age_seconds)}"),
        ("State", f"{one.state}   workers {one.ready or UNKNOWN}   restarts {number(one.restarts)}"),
        ("Message", one.message or UNKNOWN),
        ("Step", f"{format_progress(pace)}{rate}{left}{'' if found.loss is None else f', loss {found.loss:.4g}'}"),
        *([] if found.data is None else [("Data", _data(found.data))]),
        ("World", world),
        ("Checkpoint", f"{newest}{kept}"),
        *((("Stored", stored),) if (stored := describe_tiers(found.checkpoints)) else ()),
        ("At risk", _at_risk(found)),
        *((("Node lost", _node_lost(found.node_loss)),) if found.node_loss is not None else ()),
        *((("Recovery", _recovery(found.recovery_seconds)),) if found.recovery_seconds else ()),
        *((("Budgets", ", ".join(_budget(*one) for one in found.budgets.items())),) if found.budgets else ()),
        ("Time", _time(found)),
        *((("Rolled back", _rolled_back(found.rollback)),) if found.rollback is not None else ()),
    )
    return [f"{name + ':':<12} {text}" for name, text in rows]


def describe_tiers(stored: StoredCheckpoints) -> str:
    """Words what each tier has: `memory 1.20 GB in 2 checkpoints, 2 copies of the newest`."""
    copies = "" if stored.copies is None else f", {_counted(stored.copies, 'copy', 'copies')} of the newest"
    tiers = (("memory", stored.memory, copies), ("persistent tier", stored.persistent, ""))
    return "; ".join(
        f"{name} {format_bytes(there.bytes)} in {_counted(there.checkpoints, 'checkpoint', 'checkpoints')}{more}"
        for name, there, more in tiers
        if there is not None
    )


def _counted(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"


def _data(data: DataProgress) -> str:
    rate = "" if data.samples_per_second is None else f", {data.samples_per_second:.4g} samples/s"
    return f"{data.epochs:.3g} passes{rate}"


def _rolled_back(back: Rollback) -> str:
    left_out = f", the batches of {back.skipped_steps} steps left out" if back.skipped_steps else ""
    return f"from step {back.reached_step} to {back.to_step}{left_out}: {back.reason}"


def _at_risk(found: JobDescription) -> str:
    if found.summary.state in ("Complete", "Failed"):
        return "nothing: the job is over"
    if found.summary.pace.exposed_steps is None:
        return "every step: no checkpoint is known to be complete yet"
    return f"{format_at_risk(found.summary.pace)} would be run again after a failure now"


def _node_lost(cost: NodeLossCost) -> str:
    again = "" if cost.steps_again is None else f" ({cost.steps_again} steps again)"
    after = _counted(cost.workers_after, "worker goes on", "workers go on")
    after = after if cost.workers_after else "training waits for a replacement"
    return f"restored: {cost.restored}{again}; {after}"


def _recovery(medians: dict[str, float]) -> str:
    told = ", ".join(f"{seconds:.1f} s after a {kind}" for kind, seconds in medians.items())
    return f"{told}, the median of this job's own"


def _budget(name: str, used_and_limit: tuple[int, int]) -> str:
    used, limit = used_and_limit
    return (
        f"{used} of {limit} {name}{' (used up: the next restart that counts fails the job)' if used >= limit else ''}"
    )


def _time(found: JobDescription) -> str:
    if found.goodput is None:
        return UNKNOWN
    parts = sorted(found.seconds.items(), key=lambda one: -one[1])
    return f"{found.goodput:.1%} of it training ({', '.join(f'{category} {age(spent)}' for category, spent in parts)})"


def _section(title: str, lines: list[str]) -> list[str]:
    return ["", f"{title}:", *(f"  {line}" for line in lines)] if lines else []


def _workers(found: JobDescription, wide: bool) -> list[str]:
    shown = found.workers
    if len(shown) > _MAX_WORKERS and not wide:
        shown = tuple(one for one in shown if one.phase != "Running" or one.deleting or one.message)
    left_out = len(found.workers) - len(shown)
    more = [f"and {left_out} that run; -o wide shows them"] if left_out else []
    columns: dict[str, Callable[[ObservedWorker], str]] = {
        "WORKER": lambda one: str(one.index),
        "ATTEMPT": lambda one: str(one.attempt),
        "POD": lambda one: one.name,
        "NODE": lambda one: one.node or UNKNOWN,
        "STATE": worker_state,
        "MESSAGE": lambda one: one.message,
    }
    return [*(table_lines(shown, columns) if shown else ()), *more]


def worker_state(one: ObservedWorker) -> str:
    """Words one worker's state: leaving before running, with its exit code."""
    if one.deleting or one.disruption_announced:
        return f"{one.phase}, leaving"
    return one.phase if one.exit_code is None else f"{one.phase} ({one.exit_code})"


def _conditions(found: JobDescription) -> list[str]:
    columns: dict[str, Callable[[Condition], str]] = {
        "TYPE": lambda one: one.type,
        "STATUS": lambda one: one.status,
        "REASON": lambda one: one.reason,
        "SINCE": lambda one: age(found.now - one.last_transition_seconds),
        "MESSAGE": lambda one: one.message,
    }
    shown = [one for one in found.conditions if one.status != "False" or one.message]
    return table_lines(shown, columns) if found.conditions else []


def incident_line(one: Incident, now: float) -> str:
    """Words one incident: when, what, and what it cost."""
    took = "still recovering"
    if one.first_step_seconds is not None:
        took = f"{one.first_step_seconds - one.detected_seconds:.1f} s to the first new step"
    lost = "" if one.steps_lost is None else f", {one.steps_lost} steps lost"
    return f"{age(now - one.detected_seconds)} ago, {one.kind}: {one.reason} ({took}{lost})"


def event_line(one: RunEvent, now: float) -> str:
    return f"{age(now - one.at_seconds)} ago   {'Warning ' if one.warning else ''}{one.reason}: {one.message}"


# ---- list jobs -------------------------------------------------------------------------------------------------------
# Implements `surefoot list`: one row a job.


def add_list_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-A", "--all-namespaces", action="store_true", help="jobs of all namespaces")
    add_run_folder(parser)
    add_cluster(parser)
    add_output(parser)


def run_list(given: argparse.Namespace) -> int:
    if given.run_folder is not None:
        view = read_run(given.run_folder)
        found = [summarize(view.stored, view.now)]
    else:
        stored, now = on_cluster(given, read_jobs), time.time()
        found = [summarize(one, now) for one in sorted(stored, key=str)]
    emit(found, given.output, lambda wide: job_lines(found, wide, given.all_namespaces))
    return EXIT_OK


def job_lines(found: list[JobSummary], wide: bool, everywhere: bool) -> list[str]:
    """Renders the list, or says that there is none."""
    if not found:
        return [f"no TrainingJobs{'' if everywhere else ' in this namespace; -A looks in all'}"]
    namespace: dict[str, Callable[[JobSummary], str]] = {"NAMESPACE": lambda job: job.namespace}
    columns = {**(namespace if everywhere else {}), **JOB_COLUMNS, **(WIDE_COLUMNS if wide else {})}
    return table_lines(found, columns)


# ---- list nodes ------------------------------------------------------------------------------------------------------
# Implements `surefoot nodes`: a job's nodes and what runs there. `node_rows` is pure.


@dataclass(frozen=True, slots=True)
class NodeUse:
    """One node as a job uses it."""

    name: str
    state: str
    domain: str
    workers: tuple[str, ...]
    ranks: tuple[str, ...]
    """Group ranks of the workers that are members of the world."""
    server: str
    why: str
    """Why it is not used, or is being left."""


def add_nodes_arguments(parser: argparse.ArgumentParser) -> None:
    add_job(parser)
    parser.add_argument("--all", action="store_true", help="nodes without a worker or holder too")
    add_output(parser, ("json", "yaml"))


def run_nodes(given: argparse.Namespace) -> int:
    view = view_of(given)
    found = node_rows(view, everything=given.all)
    emit(found, given.output, lambda wide: [*node_lines(found), *view.unread])
    return EXIT_OK


def node_rows(view: JobView, everything: bool = False) -> list[NodeUse]:
    """Joins nodes with workers, members and holders, sorted by name."""
    status = view.stored.status
    world = status.membership if status is not None else None
    members = world.members if world is not None else ()
    places = {(member.index, member.attempt): place for place, member in enumerate(members)}
    known = {node.name: node for node in view.nodes or ()}
    holders = {node: "running" if runs else "not ready" for node, runs in (view.servers or {}).items()}
    left = () if status is None else (*status.excluded_nodes, *straggler_nodes(status, view.now))
    avoided = {one.name: one.reason for one in left}
    workers: dict[str, list[tuple[int, int]]] = {}
    for worker in view.workers:
        if worker.node is not None and worker.phase not in ("Succeeded", "Failed"):
            workers.setdefault(worker.node, []).append((worker.index, worker.attempt))
    used = {*workers, *holders, *avoided, *(member.node for member in members)}
    found = []
    for name in sorted(used | set(known) if everything else used):
        node, here = known.get(name), workers.get(name, ())
        why = (
            () if node is None else (node.reason, node.evacuation_reason, node.unconfirmed_failure, node.informational)
        )
        found.append(
            NodeUse(
                name=name,
                state=_state(view, node),
                domain=UNKNOWN if node is None else "/".join(filter(None, node.path)) or node.domain,
                workers=tuple(f"{index}-{attempt}" for index, attempt in here),
                ranks=tuple(str(places[one]) for one in here if one in places),
                server=UNKNOWN if view.servers is None else holders.get(name, "none"),
                why="; ".join(filter(None, (avoided.get(name), *why))),
            )
        )
    return found


def node_lines(found: list[NodeUse]) -> list[str]:
    if not found:
        return ["the job has no node"]
    columns: dict[str, Callable[[NodeUse], str]] = {
        "NODE": lambda one: one.name,
        "STATE": lambda one: one.state,
        "DOMAIN": lambda one: one.domain,
        "WORKERS": lambda one: ",".join(one.workers) or UNKNOWN,
        "GROUP RANK": lambda one: ",".join(one.ranks) or UNKNOWN,
        "HOLDER": lambda one: one.server,
        "WHY": lambda one: one.why,
    }
    return table_lines(found, columns)


def _state(view: JobView, node: ObservedNode | None) -> str:
    if node is None:
        return UNKNOWN if view.nodes is None else "gone"
    if not node.ready:
        return "NotReady"
    if node.unconfirmed_failure:
        return "doubted"
    return "Ready" if node.schedulable else "Ready, cordoned"


# ---- job timeline ----------------------------------------------------------------------------------------------------
# Implements `surefoot timeline`: what happened to a job, in order. `timeline_of` and `timeline_lines` are pure. Events
# say what the operator decided, incidents where each second of a recovery went: read apart, neither explains a pause.


@dataclass(frozen=True, slots=True)
class TimelineEntry:
    """One thing that happened; of an incident also its phases."""

    at_seconds: float
    kind: str
    text: str
    warning: bool = False
    phases: tuple[str, ...] = ()


def add_timeline_arguments(parser: argparse.ArgumentParser) -> None:
    add_job(parser)
    parser.add_argument("--incidents", action="store_true", help="incidents alone, without events")
    add_output(parser, ("json", "yaml"))


def run_timeline(given: argparse.Namespace) -> int:
    view = view_of(given)
    found = timeline_of(view, events=not given.incidents)
    emit(found, given.output, lambda wide: [*timeline_lines(found), *view.stored.problems, *view.unread])
    return EXIT_OK


def timeline_of(view: JobView, events: bool = True) -> list[TimelineEntry]:
    """Joins events, incidents and the job's own beginning and end, oldest first."""
    status = view.stored.status
    found = []
    if events:
        found += [TimelineEntry(e.at_seconds, e.reason, e.message, e.warning) for e in view.events]
    if status is not None:
        if status.start_seconds is not None:
            found.append(TimelineEntry(status.start_seconds, "start", "the job starts"))
        found += [_of_incident(one) for one in status.incidents]
        if status.completion_seconds is not None:
            found.append(TimelineEntry(status.completion_seconds, "end", f"{status.phase}: {status.message}"))
    return sorted(found, key=lambda one: one.at_seconds)


def _of_incident(incident: Incident) -> TimelineEntry:
    found = run_report.incident_report(incident, ())
    _, *phases = run_report.timeline({"incidents": [found]})
    return TimelineEntry(
        incident.detected_seconds,
        "incident",
        f"{incident.kind}: {incident.reason}",
        incident.kind != "planned",
        tuple(phases),
    )


def timeline_lines(found: list[TimelineEntry]) -> list[str]:
    """Renders entries with the clock (UTC) and the seconds since the first."""
    if not found:
        return ["nothing is known to have happened: the cluster keeps events for an hour, and the status ten incidents"]
    lines, first = [], found[0].at_seconds
    for one in found:
        clock = datetime.fromtimestamp(one.at_seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
        mark = "!" if one.warning else " "
        lines.append(f"{clock} {one.at_seconds - first:+9.1f} s {mark} {one.kind}: {one.text}")
        lines += [f"{'':30}{phase}" for phase in one.phases]
    return lines
