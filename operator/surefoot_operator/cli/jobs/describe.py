"""Implements `surefoot describe`, `nodes` and `timeline`, and renders their output.

Called by `main`. Only the `run_` functions read a cluster or a run folder and print; all others are pure.
"""

from __future__ import annotations

import argparse
import statistics
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
    LatencyQuantiles,
    Rollback,
    StoredCheckpoints,
    TimeSpent,
    straggler_nodes,
)
from surefoot_operator.api.time_spent import goodput, seconds_spent
from surefoot_operator.cli.command_base import EXIT_OK
from surefoot_operator.cli.jobs.list_jobs import (
    JobSummary,
    format_at_risk,
    format_newest_checkpoint,
    format_progress,
    format_ready,
    format_seconds,
    persistent_contents,
    recovery_durations,
    summarize,
)
from surefoot_operator.cli.jobs.read_jobs import (
    JobView,
    add_job,
    pace_of,
    step_at,
    view_of,
)
from surefoot_operator.cli.local import run_report
from surefoot_operator.cli.local.run_event import RunEvent
from surefoot_operator.cli.tables import UNKNOWN, add_output, age, emit, number, table_lines
from surefoot_operator.job_snapshot import ObservedNode, ObservedWorker
from surefoot_operator.policy.failure.spare_workers import largest_size

# ---- cost of the next failure ----------------------------------------------------------------------------------------
# Estimates the cost of a failure at this moment, from the status and the observed workers. Pure.


@dataclass(frozen=True, slots=True)
class NodeLossCost:
    """Estimated cost of losing the node that runs the most members of the generation."""

    restored: str
    """Description of the checkpoint that training would restore."""
    steps_again: int | None
    """Number of steps that would run a second time; None if it is not known."""
    workers_after: int
    """Number of workers that would continue to train; 0 if training would wait for a replacement."""


def node_loss_cost(view: JobView) -> NodeLossCost | None:
    """Estimates the cost of losing the job's busiest node; None if no generation is training."""
    job, status = view.stored.job, view.stored.status
    membership = status.membership if status is not None else None
    if job is None or status is None or membership is None or membership.state != "Committed" or not membership.members:
        return None
    if status.phase in ("Complete", "Failed"):
        return None
    step, restored = _restore_point(status)
    # The status is seconds old: count the steps made since, which a restore would repeat too.
    reached_step = step_at(status, pace_of(view.stored, view.now).steps_per_second, view.now)
    [(node, _)] = Counter(member.node for member in membership.members).most_common(1)
    remaining_workers = sum(
        worker.phase == "Running" and not worker.deleting and worker.node != node for worker in view.workers
    )
    return NodeLossCost(
        restored, None if step is None else max(0, reached_step - step), largest_size(job.spec, remaining_workers)
    )


def _restore_point(status: JobStatus) -> tuple[int | None, str]:
    """Returns step and description of the newest checkpoint that survives the loss of one node.

    The operator's condition decides whether the copies in memory suffice. A step of None means that it is not known.
    """
    protected = next(
        (condition.status for condition in status.conditions if condition.type == reasons.CHECKPOINT_PROTECTED),
        "Unknown",
    )
    newest, last_uploaded = status.last_complete, status.last_uploaded
    if protected == "True" and newest is not None:
        return newest.step, f"{newest} (complete and protected)"
    if last_uploaded is not None:
        return last_uploaded.step, f"{last_uploaded} (in the persistent tier)"
    if protected == "False" and newest is None:
        return 0, "the beginning (nothing is saved)"
    return None, "an unknown checkpoint (none is known to outlive the node)"


def recovery_medians(incidents: Sequence[Incident]) -> dict[str, float]:
    """Returns the median seconds from detection to the first new step, for failures and planned changes."""
    return {kind: statistics.median(seconds) for kind, seconds in sorted(recovery_durations(incidents).items())}


def save_intervals(job: TrainingJob, status: JobStatus) -> dict[str, int]:
    """Maps each tier to the steps between two saves to it; without tiers whose interval is not chosen yet."""
    policy = job.spec.checkpoint
    chosen = {"memory": status.memory_interval, "persistent": status.persistent_interval}
    fixed = {
        "memory": policy.memory.base_steps,
        "persistent": None if policy.persistent is None else policy.persistent.fixed_steps,
    }
    steps = {tier: fixed[tier] if interval is None else interval.steps for tier, interval in chosen.items()}
    return {tier: count for tier, count in steps.items() if count is not None}


def restart_budgets(job: TrainingJob, status: JobStatus, now: float) -> dict[str, tuple[int, int]]:
    """Maps each restart budget, by its spec field, to the restarts used and the limit that fails the job."""
    policy = job.spec.failure_policy
    budgets = {
        "backoffLimit": (status.restarts_counted, job.spec.run_policy.backoff_limit),
        "maxNoProgressRestarts": (status.no_progress_restarts, policy.max_no_progress_restarts),
    }
    if policy.max_restarts is not None:
        window_start = now - policy.eval_period_seconds
        used = sum(restarts.count for restarts in status.recent_restarts if restarts.time_seconds >= window_start)
        budgets["maxRestarts"] = used, policy.max_restarts
    return budgets


# ---- describe --------------------------------------------------------------------------------------------------------

_MAX_EVENTS = 8
_MAX_WORKERS = 64
"""Above this number of workers only those that do not run normally are listed, unless the output is wide."""


@dataclass(frozen=True, slots=True)
class JobDescription:
    """Everything that `surefoot describe` prints about one job."""

    summary: JobSummary
    uid: str
    membership_reason: str
    began_step: int | None
    """Step that the current generation restored; 0 if it began without a checkpoint."""
    persistent_step: int | None
    """Newest step that is complete in the persistent tier."""
    good_step: int | None
    """Step of the newest known good checkpoint; None if there is none, or the job does not check for loss anomalies."""
    rollback: Rollback | None
    workers: tuple[ObservedWorker, ...]
    conditions: tuple[Condition, ...]
    incidents: tuple[Incident, ...]
    excluded_nodes: tuple[ExcludedNode, ...]
    events: tuple[RunEvent, ...]
    unread: tuple[str, ...]
    now: float
    seconds: dict[str, float]
    """Seconds that the job spent in each category; categories without any are omitted."""
    goodput: float | None
    data: DataProgress | None
    """Progress through the data as the loader reports it; None if it reports nothing."""
    loss: float | None
    checkpoints: StoredCheckpoints
    """Number and bytes of the checkpoints in each tier; after the job's end, only of those that stay."""
    node_loss: NodeLossCost | None
    """Cost of losing the busiest node now; None if no generation is training."""
    recovery_seconds: dict[str, float]
    """Median seconds from detection to the first new step in this job, by kind of incident."""
    intervals: dict[str, int]
    """Tier -> steps between two saves to it."""
    budgets: dict[str, tuple[int, int]]
    """Spec field of each restart budget -> the restarts used, and the limit."""


def add_describe_arguments(parser: argparse.ArgumentParser) -> None:
    add_job(parser)
    add_output(parser)


def run_describe(args: argparse.Namespace) -> int:
    description = describe_job(view_of(args))
    emit(description, args.output, lambda wide: description_lines(description, wide))
    return EXIT_OK


def describe_job(view: JobView) -> JobDescription:
    """Collects everything that `surefoot describe` prints from one view of a job."""
    job, status = view.stored.job, view.stored.status
    membership = status.membership if status is not None else None
    seconds = seconds_spent(TimeSpent() if status is None else status.time_spent, view.now)
    return JobDescription(
        summary=summarize(view.stored, view.now),
        uid=view.stored.uid,
        membership_reason="" if membership is None else membership.reason,
        began_step=None if membership is None else (membership.parent.step if membership.parent is not None else 0),
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
        intervals={} if status is None or job is None else save_intervals(job, status),
        budgets={} if job is None or status is None else restart_budgets(job, status, view.now),
    )


def description_lines(description: JobDescription, wide: bool = False) -> list[str]:
    """Renders the description as lines; with `wide` every worker and every event is listed."""
    return [
        *_header_lines(description),
        *_section_lines("Workers", _worker_lines(description, wide)),
        *_section_lines("Conditions", _condition_lines(description)),
        *_section_lines("Incidents", [incident_line(incident, description.now) for incident in description.incidents]),
        *_section_lines("Avoided nodes", [f"{node.name}: {node.reason}" for node in description.excluded_nodes]),
        *_section_lines(
            "Events",
            [event_line(event, description.now) for event in description.events[0 if wide else -_MAX_EVENTS :]],
        ),
        *_section_lines("Could not be read", list(description.unread)),
    ]


def _header_lines(description: JobDescription) -> list[str]:
    """Renders the lines `Name: value` at the top of the description."""
    summary, pace = description.summary, description.summary.pace
    rate = "" if pace.steps_per_second is None else f", {pace.steps_per_second:.3g} steps/s"
    remaining_text = "" if pace.remaining_seconds is None else f", about {age(pace.remaining_seconds)} left"
    membership_text = UNKNOWN
    if summary.world_size is not None:
        membership_text = f"generation {summary.generation}, {summary.world_size} ranks, began at step {number(description.began_step)}: {description.membership_reason}"
    newest_text = "none yet" if pace.checkpoint_step is None else f"step {format_newest_checkpoint(pace)}"
    persistent_text = "" if description.persistent_step is None else f"; persistent tier: {description.persistent_step}"
    persistent_text += "" if description.good_step is None else f"; proven good: {description.good_step}"
    rows = (
        (
            "Job",
            f"{summary.namespace}/{summary.name}   uid {description.uid or UNKNOWN}   age {age(summary.age_seconds)}",
        ),
        ("State", f"{summary.state}   workers {format_ready(summary)}   restarts {number(summary.restarts)}"),
        ("Message", summary.message or UNKNOWN),
        ("Checkpoint latency", _latency_text(description)),
        *((("Recovery", _recovery_text(description.recovery_seconds)),) if description.recovery_seconds else ()),
        ("Goodput", _time_text(description)),
        (
            "Step",
            f"{format_progress(pace)}{rate}{remaining_text}{'' if description.loss is None else f', loss {description.loss:.4g}'}",
        ),
        *([] if description.data is None else [("Data", _data_text(description.data))]),
        ("Membership", membership_text),
        ("Checkpoint", f"{newest_text}{persistent_text}"),
        *((("Stored", stored),) if (stored := describe_tiers(description.checkpoints)) else ()),
        ("At risk", _at_risk_text(description)),
        *((("Node lost", _node_loss_text(description.node_loss)),) if description.node_loss is not None else ()),
        *(
            (("Budgets", ", ".join(_budget_text(*budget) for budget in description.budgets.items())),)
            if description.budgets
            else ()
        ),
        *((("Rolled back", _rollback_text(description.rollback)),) if description.rollback is not None else ()),
    )
    return [f"{name + ':':<19} {text}" for name, text in rows]


def _latency_text(description: JobDescription) -> str:
    """Renders median and 99th percentile of each stage, and the intervals to compare them with."""
    latency, step_rate = description.summary.latency, description.summary.pace.steps_per_second
    intervals = []
    for tier, steps in description.intervals.items():
        time_text = "" if step_rate is None else f" ({format_seconds(steps / step_rate)})"
        intervals.append(f"{tier} every {_format_count(steps, 'step', 'steps')}{time_text}")
    stages = (("stall", latency.stall), ("replicated", latency.replicated), ("persistent", latency.persistent))
    texts = [f"{name} {_quantiles_text(stage)}" for name, stage in stages if stage is not None]
    measured_text = ", ".join(texts) or "not measured yet"
    return f"{measured_text}; saved to {', '.join(intervals)}" if intervals else measured_text


def _quantiles_text(quantiles: LatencyQuantiles) -> str:
    return f"{format_seconds(quantiles.p50_seconds)} (p99 {format_seconds(quantiles.p99_seconds)})"


def describe_tiers(stored: StoredCheckpoints) -> str:
    """Renders the contents of the tiers: `memory 1.20 GB in 2 checkpoints, 2 copies of the newest`."""
    newest_copies = "" if stored.copies is None else f", {_format_count(stored.copies, 'copy', 'copies')} of the newest"
    tiers = (("memory", stored.memory, newest_copies), ("persistent tier", stored.persistent, ""))
    return "; ".join(
        f"{name} {format_bytes(contents.bytes)} in {_format_count(contents.checkpoints, 'checkpoint', 'checkpoints')}{copies_text}"
        for name, contents, copies_text in tiers
        if contents is not None
    )


def _format_count(count: int, singular: str, plural: str) -> str:
    return f"{count} {singular if count == 1 else plural}"


def _data_text(progress: DataProgress) -> str:
    rate = "" if progress.samples_per_second is None else f", {progress.samples_per_second:.4g} samples/s"
    return f"{progress.epochs:.3g} passes{rate}"


def _rollback_text(rollback: Rollback) -> str:
    left_out = f", the batches of {rollback.skipped_steps} steps left out" if rollback.skipped_steps else ""
    return f"from step {rollback.reached_step} to {rollback.to_step}{left_out}: {rollback.reason}"


def _at_risk_text(description: JobDescription) -> str:
    if description.summary.state in ("Complete", "Failed"):
        return "nothing: the job is over"
    if description.summary.pace.exposed_steps is None:
        return "every step: no checkpoint is known to be complete yet"
    return f"{format_at_risk(description.summary.pace)} would be run again after a failure now"


def _node_loss_text(cost: NodeLossCost) -> str:
    """Describes the checkpoint that would be restored and the workers that would remain."""
    repeated_text = ""
    if cost.steps_again is not None:
        repeated_text = f" and runs {_format_count(cost.steps_again, 'step', 'steps')} again"
    workers_text = f"with {_format_count(cost.workers_after, 'worker', 'workers')}"
    workers_text = workers_text if cost.workers_after else "once the node is replaced"
    return f"training resumes from {cost.restored}{repeated_text}, {workers_text}"


def _recovery_text(medians: dict[str, float]) -> str:
    durations_text = ", ".join(f"{seconds:.1f} s after a {kind}" for kind, seconds in medians.items())
    return f"{durations_text}, the median of this job's own"


def _budget_text(name: str, used_and_limit: tuple[int, int]) -> str:
    used, limit = used_and_limit
    return (
        f"{used} of {limit} {name}{' (used up: the next restart that counts fails the job)' if used >= limit else ''}"
    )


def _time_text(description: JobDescription) -> str:
    if description.goodput is None:
        return UNKNOWN
    spent_by_category = sorted(description.seconds.items(), key=lambda entry: -entry[1])
    return (
        f"{description.goodput:.1%} ({', '.join(f'{category} {age(spent)}' for category, spent in spent_by_category)})"
    )


def _section_lines(title: str, lines: list[str]) -> list[str]:
    return ["", f"{title}:", *(f"  {line}" for line in lines)] if lines else []


def _worker_lines(description: JobDescription, wide: bool) -> list[str]:
    """Renders the table of workers; of a large job only those that do not run normally, unless `wide`."""
    workers = description.workers
    if len(workers) > _MAX_WORKERS and not wide:
        workers = tuple(worker for worker in workers if worker.phase != "Running" or worker.deleting or worker.message)
    left_out_count = len(description.workers) - len(workers)
    left_out_lines = [f"and {left_out_count} that run; -o wide shows them"] if left_out_count else []
    columns: dict[str, Callable[[ObservedWorker], str]] = {
        "WORKER": lambda worker: str(worker.index),
        "ATTEMPT": lambda worker: str(worker.attempt),
        "POD": lambda worker: worker.name,
        "NODE": lambda worker: worker.node or UNKNOWN,
        "STATE": worker_state,
        "MESSAGE": lambda worker: worker.message,
    }
    return [*(table_lines(workers, columns) if workers else ()), *left_out_lines]


def worker_state(worker: ObservedWorker) -> str:
    """Renders a worker's pod phase, marked if it is terminating, with the exit code if it has ended."""
    if worker.deleting or worker.disruption_announced:
        return f"{worker.phase}, leaving"
    return worker.phase if worker.exit_code is None else f"{worker.phase} ({worker.exit_code})"


def _condition_lines(description: JobDescription) -> list[str]:
    columns: dict[str, Callable[[Condition], str]] = {
        "TYPE": lambda condition: condition.type,
        "STATUS": lambda condition: condition.status,
        "REASON": lambda condition: condition.reason,
        "SINCE": lambda condition: age(description.now - condition.last_transition_seconds),
        "MESSAGE": lambda condition: condition.message,
    }
    conditions = [condition for condition in description.conditions if condition.status != "False" or condition.message]
    return table_lines(conditions, columns) if description.conditions else []


def incident_line(incident: Incident, now: float) -> str:
    """Renders one incident: its age, kind and reason, the recovery time and the steps lost."""
    recovery_text = "still recovering"
    if incident.first_step_seconds is not None:
        recovery_text = f"{incident.first_step_seconds - incident.detected_seconds:.1f} s to the first new step"
    lost_text = "" if incident.steps_lost is None else f", {incident.steps_lost} steps lost"
    return (
        f"{age(now - incident.detected_seconds)} ago, {incident.kind}: {incident.reason} ({recovery_text}{lost_text})"
    )


def event_line(event: RunEvent, now: float) -> str:
    return f"{age(now - event.at_seconds)} ago   {'Warning ' if event.warning else ''}{event.reason}: {event.message}"


# ---- list nodes ------------------------------------------------------------------------------------------------------
# Implements `surefoot nodes`: the job's nodes, and its workers and memory servers on each.


@dataclass(frozen=True, slots=True)
class NodeUse:
    """A row of `surefoot nodes`: one node, and the job's workers and memory server on it."""

    name: str
    state: str
    domain: str
    workers: tuple[str, ...]
    ranks: tuple[str, ...]
    """Group ranks of this node's workers in the current generation; workers without a rank are missing here."""
    server: str
    why: str
    """Reasons why the job avoids or evacuates this node, or doubts it; empty if there are none."""


def add_nodes_arguments(parser: argparse.ArgumentParser) -> None:
    add_job(parser)
    parser.add_argument("--all", action="store_true", help="also show nodes without a worker or memory server")
    add_output(parser, ("json", "yaml"))


def run_nodes(args: argparse.Namespace) -> int:
    view = view_of(args)
    rows = node_rows(view, everything=args.all)
    emit(rows, args.output, lambda wide: [*node_lines(rows), *view.unread])
    return EXIT_OK


def node_rows(view: JobView, everything: bool = False) -> list[NodeUse]:
    """Joins nodes with workers, ranks and memory servers, sorted by name.

    Args:
        everything: Also return the nodes that the job does not use.
    """
    status = view.stored.status
    membership = status.membership if status is not None else None
    members = membership.members if membership is not None else ()
    # Index the sources by node name.
    group_ranks = {(member.index, member.attempt): rank for rank, member in enumerate(members)}
    nodes_by_name = {node.name: node for node in view.nodes or ()}
    server_states = {
        node: "running" if is_running else "not ready" for node, is_running in (view.servers or {}).items()
    }
    excluded = () if status is None else (*status.excluded_nodes, *straggler_nodes(status, view.now))
    avoidance_reasons = {node.name: node.reason for node in excluded}
    workers: dict[str, list[tuple[int, int]]] = {}
    for worker in view.workers:
        if worker.node is not None and worker.phase not in ("Succeeded", "Failed"):
            workers.setdefault(worker.node, []).append((worker.index, worker.attempt))
    # A node is used if it has a worker, a member or a memory server, or if the job avoids it.
    used_names = {*workers, *server_states, *avoidance_reasons, *(member.node for member in members)}
    rows = []
    for name in sorted(used_names | set(nodes_by_name) if everything else used_names):
        node, node_workers = nodes_by_name.get(name), workers.get(name, ())
        node_reasons = (
            () if node is None else (node.reason, node.evacuation_reason, node.unconfirmed_failure, node.informational)
        )
        rows.append(
            NodeUse(
                name=name,
                state=_node_state(view, node),
                domain=UNKNOWN if node is None else "/".join(filter(None, node.path)) or node.domain,
                workers=tuple(f"{index}-{attempt}" for index, attempt in node_workers),
                ranks=tuple(str(group_ranks[worker]) for worker in node_workers if worker in group_ranks),
                server=UNKNOWN if view.servers is None else server_states.get(name, "none"),
                why="; ".join(filter(None, (avoidance_reasons.get(name), *node_reasons))),
            )
        )
    return rows


def node_lines(rows: list[NodeUse]) -> list[str]:
    if not rows:
        return ["the job has no node"]
    columns: dict[str, Callable[[NodeUse], str]] = {
        "NODE": lambda row: row.name,
        "STATE": lambda row: row.state,
        "DOMAIN": lambda row: row.domain,
        "WORKERS": lambda row: ",".join(row.workers) or UNKNOWN,
        "GROUP RANK": lambda row: ",".join(row.ranks) or UNKNOWN,
        "MEMORY SERVER": lambda row: row.server,
        "WHY": lambda row: row.why,
    }
    return table_lines(rows, columns)


def _node_state(view: JobView, node: ObservedNode | None) -> str:
    """Renders a node's readiness. `gone`: it no longer exists; `doubted`: its failure is not confirmed."""
    if node is None:
        return UNKNOWN if view.nodes is None else "gone"
    if not node.ready:
        return "NotReady"
    if node.unconfirmed_failure:
        return "doubted"
    return "Ready" if node.schedulable else "Ready, cordoned"


# ---- job timeline ----------------------------------------------------------------------------------------------------
# Implements `surefoot timeline`: events and incidents of a job in one order. Events record the operator's decisions,
# and incidents record how long each phase of a recovery took. A pause in training can only be explained from both.


@dataclass(frozen=True, slots=True)
class TimelinePhase:
    """A phase that a recovery went through, with the seconds from the incident to its end."""

    name: str
    seconds: float
    text: str


@dataclass(frozen=True, slots=True)
class TimelineEntry:
    """A row of the timeline: an event, an incident with its recovery phases, or the job's start or end."""

    at_seconds: float
    kind: str
    text: str
    warning: bool = False
    phases: tuple[TimelinePhase, ...] = ()
    detail: tuple[str, ...] = ()
    """Lines of the incident's detail, such as the stack of the rank that failed."""


def add_timeline_arguments(parser: argparse.ArgumentParser) -> None:
    add_job(parser)
    parser.add_argument("--incidents", action="store_true", help="incidents alone, without events")
    add_output(parser, ("json", "yaml"))


def run_timeline(args: argparse.Namespace) -> int:
    view = view_of(args)
    entries = timeline_of(view, events=not args.incidents)
    emit(entries, args.output, lambda wide: [*timeline_lines(entries), *view.stored.problems, *view.unread])
    return EXIT_OK


def timeline_of(view: JobView, events: bool = True) -> list[TimelineEntry]:
    """Joins events, incidents and the job's start and end, oldest first. `events=False` omits the events."""
    status = view.stored.status
    entries = []
    if events:
        entries += [
            TimelineEntry(event.at_seconds, event.reason, event.message, event.warning) for event in view.events
        ]
    if status is not None:
        if status.start_seconds is not None:
            entries.append(TimelineEntry(status.start_seconds, "start", "the job starts"))
        entries += [_incident_entry(incident) for incident in status.incidents]
        if status.completion_seconds is not None:
            entries.append(TimelineEntry(status.completion_seconds, "end", f"{status.phase}: {status.message}"))
    return sorted(entries, key=lambda entry: entry.at_seconds)


def _incident_entry(incident: Incident) -> TimelineEntry:
    incident_facts = run_report.incident_report(incident, ())
    return TimelineEntry(
        incident.detected_seconds,
        "incident",
        f"{incident.kind}: {incident.reason}",
        incident.kind != "planned",
        tuple(TimelinePhase(*row) for row in run_report.phase_rows(incident_facts)),
        tuple(incident_facts["detail"].splitlines()[: run_report.MAX_DETAIL_LINES]),
    )


def timeline_lines(entries: list[TimelineEntry]) -> list[str]:
    """Renders entries with the time of day (UTC) and the seconds since the first entry."""
    if not entries:
        return ["nothing is known to have happened: the cluster keeps events for an hour, and the status ten incidents"]
    lines, first_seconds = [], entries[0].at_seconds
    for entry in entries:
        clock = datetime.fromtimestamp(entry.at_seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
        mark = "!" if entry.warning else " "
        lines.append(f"{clock} {entry.at_seconds - first_seconds:+9.1f} s {mark} {entry.kind}: {entry.text}")
        lines += [f"{'':30}    {line}" for line in entry.detail]
        lines += [f"{'':30}  {phase.seconds:8.3f} s  {phase.text}" for phase in entry.phases]
    return lines
