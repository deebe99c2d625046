"""Trainers' counts beside their agent's, and a job's at the operator: added rightly, labelled boundedly, gone in time."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from itertools import pairwise

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from support.builders import BEGAN, job, running
from surefoot import metrics as runtime
from surefoot.ipc import trainer_messages as line
from surefoot.ipc.metric_deltas import MAX_SERIES, MetricDeltas, MetricSums
from surefoot.protocol.timeouts import BUCKETS_SECONDS
from surefoot_operator.api.status import DataProgress, Incident, JobStatus, SaveInterval, Straggler, TimeSpent
from surefoot_operator.policy.maintenance.maintenance_plan import plan_maintenance
from surefoot_operator.reconcile.job_metrics import JobMetrics, job_collector


class Process:
    """What one process counts."""

    def __init__(self) -> None:
        registry = CollectorRegistry()
        self.saves = Counter("saves", "", ["tier"], registry=registry)
        self.times = Histogram("times", "", ["phase"], buckets=(0.1, 1.0), registry=registry)
        self.step = Gauge("step", "", registry=registry)
        self.families: tuple[Collector, ...] = (self.saves, self.times, self.step)


def samples(families: list[Metric]) -> dict[str, float]:
    return {f"{s.name}{sorted(s.labels.items())}": s.value for family in families for s in family.samples}


def test_what_grew_is_said_once_and_gauges_are_not_added() -> None:
    trainer = Process()
    trainer.saves.labels("memory").inc(5)
    growth = MetricDeltas(trainer.families)
    assert growth.take_increases() == ()
    trainer.saves.labels("memory").inc(2)
    trainer.step.set(9)
    assert growth.take_increases() == (("saves_total", {"tier": "memory"}, 2.0),)
    assert growth.take_increases() == ()


def test_growth_crosses_the_line_and_adds_up_over_trainers_that_come_and_go() -> None:
    agent, sums = Process(), MetricSums()
    agent.saves.labels("memory").inc(1)
    agent.step.set(3)
    for seconds in (0.05, 0.5, 50.0):
        trainer = Process()
        growth = MetricDeltas(trainer.families)
        trainer.times.labels("stage").observe(seconds)
        trainer.saves.labels("staging").inc()
        said = line.decode(line.encode(line.MetricsReport(growth.take_increases())))
        assert isinstance(said, line.MetricsReport)
        sums.add_increases(said.deltas)
    found = samples(list(sums.with_agent_metrics(agent.families)))
    assert found["saves_total[('tier', 'memory')]"] == 1
    assert found["saves_total[('tier', 'staging')]"] == 3
    buckets = [found[f"times_bucket[('le', '{le}'), ('phase', 'stage')]"] for le in ("0.1", "1.0", "+Inf")]
    assert buckets == [1, 2, 3]
    assert found["times_sum[('phase', 'stage')]"] == pytest.approx(50.55)
    assert found["step[]"] == 3
    assert not any("created" in name for name in found)


def test_the_exposition_is_what_a_scraper_reads_with_buckets_in_order() -> None:
    agent, sums, trainer = Process(), MetricSums(), Process()
    growth = MetricDeltas(trainer.families)
    trainer.times.labels("stage").observe(0.5)
    sums.add_increases(growth.take_increases())

    class Shown(Collector):
        def collect(self) -> list[Metric]:
            return list(sums.with_agent_metrics(agent.families))

    text = generate_latest(Shown()).decode()  # type: ignore[arg-type]  # asks for nothing but collect()
    (times,) = [f for f in text_string_to_metric_families(text) if f.name == "times"]
    bounds = [s.labels["le"] for s in times.samples if s.name == "times_bucket"]
    assert (times.type, bounds) == ("histogram", ["0.1", "1.0", "+Inf"])


def test_a_trainer_that_names_ever_new_series_does_not_fill_the_agent() -> None:
    sums = MetricSums()
    for number in range(2 * MAX_SERIES):
        sums.add_increases((("saves_total", {"tier": str(number)}, 1.0),))
    (saves, *_) = sums.with_agent_metrics(Process().families)
    assert len(saves.samples) == MAX_SERIES


def test_every_family_of_the_runtime_is_exported() -> None:
    ours = {name for name, value in vars(runtime).items() if isinstance(value, Counter | Gauge | Histogram)}
    assert {id(getattr(runtime, name)) for name in ours} == {id(family) for family in runtime.FAMILIES}


# ---- a job, at the operator ----------------------------------------------------------------------------------------


def of_job() -> dict[str, float]:
    found = samples(list(job_collector.collect()))
    return {name: value for name, value in found.items() if "'figured'" in name}


def value(name: str, labels: str = "") -> float:
    (found,) = [value for key, value in of_job().items() if key.startswith(f"{name}[") and labels in key]
    return found


def test_a_jobs_series_come_with_it_and_go_with_it() -> None:
    figures, seen = JobMetrics(), running()
    seen = replace(seen, job=replace(seen.job, name="figured"))
    figures.update_gauges(seen, replace(seen.status, data=DataProgress(1.25, 48.0)), plan_maintenance(seen))
    assert (value("surefoot_job_data_epochs"), value("surefoot_job_samples_per_second")) == (1.25, 48)
    assert value("surefoot_world_size") == 3
    assert value("surefoot_requested_world_size") == 3
    assert value("surefoot_checkpoint_copies") == 2
    assert value("surefoot_checkpoint_complete_timestamp_seconds") == seen.now_seconds
    assert value("surefoot_job_phase", "('phase', 'Running')") == 1
    over = replace(seen, status=replace(seen.status, phase="Complete"))
    figures.update_gauges(over, over.status, None)
    assert not any(name.startswith(("surefoot_checkpoint", "surefoot_job_data")) for name in of_job())
    assert value("surefoot_job_phase", "('phase', 'Complete')") == 1
    assert value("surefoot_job_step") == 42
    figures.stop_export()
    assert of_job() == {}


def test_a_jobs_step_is_the_last_known_one_until_its_new_world_has_made_one() -> None:
    figures, seen = JobMetrics(), running()
    unheard = tuple(replace(s, progress=replace(s.progress, step=0)) for s in seen.sessions)
    begun = replace(seen, job=replace(seen.job, name="figured"), sessions=unheard)
    try:
        figures.update_gauges(begun, begun.status, None)
        assert value("surefoot_job_step") == 42
        stepped = replace(unheard[0], progress=replace(unheard[0].progress, step=41))
        figures.update_gauges(replace(begun, sessions=(stepped, *unheard[1:])), begun.status, None)
        assert value("surefoot_job_step") == 41
    finally:
        figures.stop_export()


def test_where_a_jobs_seconds_went_is_exported_and_adds_up() -> None:
    figures, seen = JobMetrics(), running()
    spent = TimeSpent(
        "training",
        seen.now_seconds - 60,
        training_seconds=20,
        recovering_seconds=15,
        suspended_seconds=100,
        recomputed_seconds=5,
    )
    seen = replace(seen, job=replace(seen.job, name="figured"), status=replace(seen.status, time_spent=spent))
    figures.update_gauges(seen, seen.status, None)
    assert value("surefoot_job_time_seconds", "'training'") == 80
    assert sum(v for name, v in of_job().items() if name.startswith("surefoot_job_time_seconds[")) == 200
    assert value("surefoot_job_goodput_ratio") == 0.8
    over = replace(seen.status, phase="Complete", time_spent=replace(spent, category=""))
    figures.update_gauges(seen, over, None)
    assert value("surefoot_job_goodput_ratio") == 0.5
    assert not any(name.startswith("surefoot_job_time") for name in of_job())
    figures.stop_export()


def test_a_job_that_rests_has_few_series_and_one_that_begins_has_all_that_it_counts() -> None:
    figures, seen = JobMetrics(), running()
    seen = replace(seen, job=replace(seen.job, name="figured"))
    resting = replace(seen, status=JobStatus(phase="Suspended"), sessions=(), servers=())
    try:
        figures.update_gauges(resting, resting.status, plan_maintenance(resting))
        assert len(of_job()) <= 15
        figures.update_gauges(seen, seen.status, plan_maintenance(seen))
        counted = [name for name in of_job() if name.startswith(("surefoot_restarts", "surefoot_recovery_duration"))]
        assert counted, "a rate sees the first restart only if the series was there before it"
    finally:
        figures.stop_export()


def test_a_node_that_holds_nothing_any_more_has_no_figures_of_what_it_needs() -> None:
    figures, seen = JobMetrics(), running()
    seen = replace(seen, job=replace(seen.job, name="figured"))
    budgeted = replace(
        seen,
        sessions=tuple(replace(s, progress=replace(s.progress, save_bytes=25_600)) for s in seen.sessions),
        servers=tuple(replace(h, limit_bytes=10**6, used_bytes=0) for h in seen.servers),
    )
    try:
        figures.update_gauges(budgeted, seen.status, plan_maintenance(budgeted))
        assert value("surefoot_memory_needed_bytes", "('node', 'n1')") == 3 * 2 * 25_700
        assert value("surefoot_memory_available_bytes", "('node', 'n1')") == 10**6
        fewer = replace(budgeted, servers=budgeted.servers[:1])
        figures.update_gauges(fewer, seen.status, plan_maintenance(fewer))
        assert [
            name
            for name in of_job()
            if name.startswith(("surefoot_memory_needed", "surefoot_memory_available")) and "n0" not in name
        ] == []
        assert value("surefoot_memory_needed_bytes", "('node', 'n0')") > 0
    finally:
        figures.stop_export()


def test_an_interval_is_shown_as_asked_for_or_with_what_it_was_chosen_from() -> None:
    figures, seen = JobMetrics(), running()
    seen = replace(seen, job=replace(seen.job, name="figured"))
    chosen = SaveInterval(
        64, 6, "it costs least", 0.0, 0, 0.0, target_seconds=60.5, cost_seconds=0.25, memory_loss_probability=0.05
    )
    try:
        figures.update_gauges(seen, seen.status, plan_maintenance(seen))
        assert value("surefoot_checkpoint_interval_steps", "('tier', 'memory')") == 10
        assert not any("interval_input" in name for name in of_job())
        figures.update_gauges(seen, replace(seen.status, memory_interval=chosen), None)
        assert value("surefoot_checkpoint_interval_steps", "('tier', 'memory')") == 64
        assert value("surefoot_checkpoint_interval_input_seconds", "('input', 'target')") == 60.5
        assert value("surefoot_checkpoint_interval_input_seconds", "('input', 'cost')") == 0.25
        assert value("surefoot_checkpoint_memory_loss_probability") == 0.05
    finally:
        figures.stop_export()


def test_an_incident_is_counted_once_when_it_is_answered_and_timed_when_it_is_over() -> None:
    figures, named = JobMetrics(), replace(job(), name="figured")
    begun = Incident("agent-lost", "its line broke", 1, "a", 1, BEGAN, claimed_seconds=BEGAN + 0.1)
    answered = replace(begun, kind="node-lost", committed_seconds=BEGAN + 0.5, steps_lost=4)
    over = replace(answered, first_step_seconds=BEGAN + 0.9)
    history = [JobStatus(), *(JobStatus(incidents=(one,)) for one in (begun, answered, answered, over, over))]
    try:
        for old, new in pairwise(history):
            figures.count_changes(old, new, named)
        found = of_job()
    finally:
        figures.stop_export()
    counted = {name: value for name, value in found.items() if name.startswith("surefoot_incidents_total") and value}
    assert [("node-lost" in name, value) for name, value in counted.items()] == [(True, 1)]
    seconds = {name: value for name, value in found.items() if "duration_seconds_sum" in name and "first-step" in name}
    assert list(seconds.values()) == [pytest.approx(0.9)]
    assert [value for name, value in found.items() if name.startswith("surefoot_lost_steps_total")] == [4]


def test_the_worst_stragglers_slowdown_is_shown_and_one_while_there_is_none() -> None:
    figures, seen = JobMetrics(), running()
    seen = replace(seen, job=replace(seen.job, name="figured"))
    slow = tuple(Straggler(rank, rank, f"n{rank}", ratio, 0.1, 5, BEGAN) for rank, ratio in ((0, 1.5), (2, 3.0)))
    none: tuple[Straggler, ...] = ()
    try:
        for stragglers, worst in ((none, 1.0), (slow, 3.0), (none, 1.0)):
            figures.update_gauges(seen, replace(seen.status, stragglers=stragglers), None)
            assert value("surefoot_straggler_slowdown_ratio") == worst
    finally:
        figures.stop_export()


def test_the_stragglers_slowdown_keeps_its_last_value_while_the_world_changes() -> None:
    figures, seen = JobMetrics(), running()
    seen = replace(seen, job=replace(seen.job, name="figured"))
    assert seen.status.membership is not None
    slow = replace(seen.status, stragglers=(Straggler(0, 0, "n0", 1.5, 0.1, 5, BEGAN),))
    claimed = replace(seen.status, membership=replace(seen.status.membership, generation=3, state="Claimed"))
    try:
        figures.update_gauges(seen, claimed, None)
        assert not any("straggler" in name for name in of_job()), "no generation was committed yet"
        for status in (slow, claimed):
            figures.update_gauges(seen, status, None)
            assert value("surefoot_straggler_slowdown_ratio") == 1.5
        figures.update_gauges(seen, replace(claimed, phase="Failed"), None)
        assert not any("straggler" in name for name in of_job())
    finally:
        figures.stop_export()


def test_jobs_read_as_series_of_the_library_do_whatever_they_are_called() -> None:
    figures, namesake, named = JobMetrics(), JobMetrics(), replace(job(), name='a "quoted\\\n', namespace="figured")
    theirs = CollectorRegistry()
    labels = ["namespace", "job", "phase"]
    timed = Histogram(
        "surefoot_recovery_duration_seconds",
        "From the first sign of a failure to the end of each phase of its recovery.",
        labels,
        registry=theirs,
        buckets=BUCKETS_SECONDS,
    )
    durations = {"claimed": 0.0005, "stopped": 0.001, "fenced": 0.3, "committed": 3.0, "first-step": 1e6}
    for recovery_phase, seconds in durations.items():
        timed.labels(named.namespace, named.name, recovery_phase).observe(seconds)
    moments = {f"{name.replace('-', '_')}_seconds": seconds for name, seconds in durations.items()}
    recovered = Incident("node-lost", "its node is gone", 1, "a", 1, 0.0, **moments)  # type: ignore[arg-type]
    try:
        namesake.count_changes(JobStatus(), JobStatus(), named)
        figures.count_changes(JobStatus(), JobStatus(incidents=(recovered,)), named)
        namesake.stop_export()
        ours = [family for family in job_collector.collect() if family.name == "surefoot_recovery_duration_seconds"]
        (expected,) = theirs.collect()
        own = [sample for sample in ours[0].samples if sample.labels["namespace"] == "figured"]
        assert {str(sample) for sample in own} == {str(sample) for sample in expected.samples}
        assert ours[0].documentation == expected.documentation
        assert 'job="a \\"quoted' in generate_latest(job_collector).decode()
    finally:
        figures.stop_export()


def test_jobs_are_read_while_they_come_change_and_go() -> None:
    seen, ended, interval = running(), threading.Event(), sys.getswitchinterval()
    made: list[JobMetrics] = []

    def change() -> None:
        number = 0
        while not ended.is_set():
            number += 1
            figures = JobMetrics()
            made.append(figures)
            shown = replace(seen, job=replace(seen.job, name=f"figured-{number % 30}"))
            figures.update_gauges(shown, shown.status, None)
            if number % 7 == 0:
                figures.stop_export()

    changing = threading.Thread(target=change)
    sys.setswitchinterval(1e-6)
    try:
        changing.start()
        for _ in range(50):
            (ranks,) = [family for family in job_collector.collect() if family.name == "surefoot_world_size"]
            assert all(sample.value == 3 for sample in ranks.samples if sample.labels["job"].startswith("figured-"))
    finally:
        ended.set()
        changing.join()
        sys.setswitchinterval(interval)
        for figures in made:
            figures.stop_export()
