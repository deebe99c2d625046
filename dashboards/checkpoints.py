"""The dashboard of checkpoint latency: how long saves take and where, what is safe, what failures cost.

Pure: a value of the foundation SDK. docs/operations.md explains each metric; tests/integration/test_dashboards.py runs
every expression against a Prometheus that scraped a real run.
"""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.models import dashboard as models

from dashboards.panels import choice, heat, lines, mark, number, query

UID = "surefoot-checkpoints"
JOB = 'namespace=~"$namespace", job=~"$job"'


def _age(of: str) -> str:
    return f"time() - max by (namespace, job, tier) (surefoot_checkpoint_complete_timestamp_seconds{{{of}}})"


def built() -> models.Dashboard:
    """The whole of it."""
    whole = (
        dashboard.Dashboard("Surefoot: checkpoints and recovery")
        .uid(UID)
        .description("Checkpoint latency by tier and phase, what is safe, and what failures cost each training job.")
        .tags(["surefoot"])
        .editable()
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .time("now-1h", "now")
        .refresh("10s")
        .with_variable(dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
        .with_variable(choice("namespace", "Namespace", "label_values(surefoot_job_phase, namespace)"))
        .with_variable(choice("job", "Job", 'label_values(surefoot_job_phase{namespace=~"$namespace"}, job)'))
        .annotation(
            mark(
                "Incidents",
                "red",
                f"max by (namespace, job, kind) (surefoot_incident_timestamp_seconds{{{JOB}}}) * 1000",
                "{{kind}}",
                at_value=True,
            )
        )
        .annotation(
            mark(
                "Recovering",
                "orange",
                f'max by (namespace, job, phase) (surefoot_job_phase{{{JOB}, phase=~"Recovering|Resizing"}}) == 1',
                "{{phase}}",
                at_value=False,
            )
        )
    )
    for add in (_now, _latency, _safety, _recovery, _training, _memory, _operator):
        add(whole)
    built = whole.build()
    for number_, panel in enumerate(built.panels or [], 1):
        panel.id_val = number_
    return built


def _now(whole: dashboard.Dashboard) -> None:
    whole.with_row(dashboard.Row("Now"))
    whole.with_panel(
        number(
            "Phase",
            "The phase that each job is in.",
            "none",
            f"max by (namespace, job, phase) (surefoot_job_phase{{{JOB}}}) == 1",
            "{{job}} {{phase}}",
        )
    )
    whole.with_panel(
        number(
            "Protected",
            "1: a failure now would find a complete checkpoint with all its copies, or in the persistent tier.",
            "none",
            f"min by (namespace, job) (surefoot_checkpoint_protected{{{JOB}}})",
            "{{job}}",
            {0: "red", 1: "green"},
        )
    )
    whole.with_panel(
        number(
            "Age of the newest checkpoint",
            "Since the newest complete checkpoint in memory was first seen to be complete.",
            "s",
            _age(f'{JOB}, tier="memory"'),
            "{{job}}",
            {0: "green", 300: "orange", 1800: "red"},
        )
    )
    whole.with_panel(
        number(
            "Copies",
            "Of the newest complete checkpoint in memory, the least over its ranks.",
            "none",
            f"min by (namespace, job) (surefoot_checkpoint_copies{{{JOB}}})",
            "{{job}}",
            {0: "red", 1: "orange", 2: "green"},
        )
    )
    whole.with_panel(
        number(
            "World",
            "Ranks in the committed world.",
            "none",
            f"max by (namespace, job) (surefoot_world_size{{{JOB}}})",
            "{{job}}",
        )
    )
    whole.with_panel(
        number(
            "Failures",
            "Incidents in the time shown, planned changes not counted.",
            "none",
            f'sum by (namespace, job) (increase(surefoot_incidents_total{{{JOB}, kind!="planned"}}[$__range]))',
            "{{job}}",
            {0: "green", 1: "orange"},
        )
    )


def _latency(whole: dashboard.Dashboard) -> None:
    whole.with_row(dashboard.Row("Checkpoint latency"))
    phases = {
        ("staging", "stage"): ("Stage", "A rank's state into staging memory, most of it during the next step."),
        ("memory", "replicate"): ("Replicate", "One rank save to one holder of the memory tier."),
        ("memory", "commit"): ("Commit", "The index entry of one rank save on one holder."),
        ("persistent", "promote"): ("Promote", "One rank save from memory to the persistent tier."),
    }
    for (tier, phase), (title, about) in phases.items():
        buckets = f'surefoot_checkpoint_duration_seconds_bucket{{{JOB}, tier="{tier}", phase="{phase}"}}'
        whole.with_panel(heat(f"{title} ({tier})", about, buckets))
    whole.with_panel(
        heat(
            "Stall",
            "How long one save held one rank's training up.",
            f"surefoot_checkpoint_stall_seconds_bucket{{{JOB}}}",
            width=8,
        )
    )
    spread = f"surefoot_checkpoint_duration_seconds_bucket{{{JOB}}}[$__rate_interval]"
    whole.with_panel(
        lines(
            "Latency by tier and phase",
            "Median and 99th percentile of rank saves.",
            "s",
            query(f"histogram_quantile(0.5, sum by (tier, phase, le) (rate({spread})))", "{{tier}} {{phase}} median"),
            query(f"histogram_quantile(0.99, sum by (tier, phase, le) (rate({spread})))", "{{tier}} {{phase}} 99 %"),
        )
    )
    stalled, steps = "surefoot_checkpoint_stall_seconds_sum", "surefoot_step_duration_seconds_sum"
    whole.with_panel(
        lines(
            "Share of training time spent stalled",
            "Stall of all ranks by step time of all workers: with several ranks a worker, divide by their number.",
            "percentunit",
            query(
                f"sum by (namespace, job) (rate({stalled}{{{JOB}}}[$__rate_interval]))"
                f" / sum by (namespace, job) (rate({steps}{{{JOB}}}[$__rate_interval]))",
                "{{job}}",
            ),
        )
    )


def _safety(whole: dashboard.Dashboard) -> None:
    whole.with_row(dashboard.Row("What is safe"))
    whole.with_panel(
        lines("Age of the newest complete checkpoint", "By tier.", "s", query(_age(JOB), "{{job}} {{tier}}"), width=6)
    )
    whole.with_panel(
        lines(
            "Steps behind",
            "Steps that would be run again if all trainers died now, by tier.",
            "none",
            query(
                f"max by (namespace, job) (surefoot_job_step{{{JOB}}}) - on (namespace, job) group_right ()"
                f" max by (namespace, job, tier) (surefoot_checkpoint_complete_step{{{JOB}}})",
                "{{job}} {{tier}}",
            ),
            width=6,
        )
    )
    whole.with_panel(
        lines(
            "Copies and protection",
            "Copies of the newest complete checkpoint in memory; whether a failure now would find one in safety.",
            "none",
            query(f"min by (namespace, job) (surefoot_checkpoint_copies{{{JOB}}})", "{{job}} copies"),
            query(f"min by (namespace, job) (surefoot_checkpoint_protected{{{JOB}}})", "{{job}} protected"),
            width=6,
        )
    )
    whole.with_panel(
        lines(
            "Bytes written",
            "By tier; the memory tier counts every copy.",
            "Bps",
            query(f"sum by (tier) (rate(surefoot_checkpoint_bytes_total{{{JOB}}}[$__rate_interval]))", "{{tier}}"),
            width=6,
        )
    )
    whole.with_panel(
        lines(
            "Saves that failed",
            "Rank saves that a tier did not take, by reason. `fenced` is what an old world tries after its end.",
            "none",
            query(
                f"sum by (tier, reason) (increase(surefoot_checkpoint_failures_total{{{JOB}}}[$__rate_interval]))",
                "{{tier}} {{reason}}",
            ),
        )
    )
    whole.with_panel(
        lines(
            "Saves that were skipped",
            "Due saves for which no slot was free, and how far saving has backed off (every 2^level-th due step).",
            "none",
            query(
                f"sum by (namespace, job) (increase(surefoot_checkpoint_skipped_total{{{JOB}}}[$__rate_interval]))",
                "{{job}} skipped",
            ),
            query(f"max by (namespace, job) (surefoot_checkpoint_backoff_level{{{JOB}}})", "{{job}} level"),
        )
    )
    whole.with_panel(
        lines(
            "Saves under way",
            "Checkpoints staged on a worker and not yet on all their holders, the most of any worker.",
            "none",
            query(f"max by (namespace, job) (surefoot_checkpoint_pending{{{JOB}}})", "{{job}}"),
        )
    )


def _recovery(whole: dashboard.Dashboard) -> None:
    whole.with_row(dashboard.Row("Failures and recovery"))
    whole.with_panel(
        lines(
            "Recovery by phase",
            "Mean time from the first sign of a failure to the end of each phase, over the recoveries of the last hour.",
            "s",
            query(
                f"sum by (phase) (increase(surefoot_recovery_duration_seconds_sum{{{JOB}}}[1h]))"
                f" / sum by (phase) (increase(surefoot_recovery_duration_seconds_count{{{JOB}}}[1h]))",
                "{{phase}}",
            ),
        )
    )
    whole.with_panel(
        heat(
            "To the first new step",
            "From the first sign of a failure until training goes on.",
            f'surefoot_recovery_duration_seconds_bucket{{{JOB}, phase="first-step"}}',
            width=8,
        )
    )
    whole.with_panel(
        lines(
            "Incidents by kind",
            "Failures, and planned changes of the world; counted once a new world answers them.",
            "none",
            query(f"sum by (kind) (surefoot_incidents_total{{{JOB}}}) > 0", "{{kind}}"),
        )
    )
    whole.with_panel(
        heat(
            "Restore",
            "How long one rank read and verified its state.",
            f"surefoot_restore_duration_seconds_bucket{{{JOB}}}",
            width=8,
        )
    )
    whole.with_panel(
        lines(
            "Restored bytes by source",
            "Where the bytes came from that trainers began with.",
            "bytes",
            query(f"sum by (source) (surefoot_restore_bytes_total{{{JOB}}})", "{{source}}"),
            query(f"sum by (reason) (surefoot_restore_fallbacks_total{{{JOB}}})", "read again: {{reason}}"),
            width=8,
        )
    )
    whole.with_panel(
        lines(
            "Steps lost and restarts",
            "Steps that had to be run again; changes of the world after a failure.",
            "none",
            query(f"sum by (namespace, job) (surefoot_lost_steps_total{{{JOB}}})", "{{job}} steps"),
            query(f"sum by (namespace, job) (surefoot_restarts_total{{{JOB}}})", "{{job}} restarts"),
        )
    )


def _training(whole: dashboard.Dashboard) -> None:
    whole.with_row(dashboard.Row("Training"))
    whole.with_panel(
        lines(
            "World and agents",
            "Ranks in the committed world, agents whose line is open, and the epoch.",
            "none",
            query(f"max by (namespace, job) (surefoot_world_size{{{JOB}}})", "{{job}} ranks"),
            query(f"max by (namespace, job) (surefoot_agents_connected{{{JOB}}})", "{{job}} agents"),
            query(f"max by (namespace, job) (surefoot_job_epoch{{{JOB}}})", "{{job}} epoch"),
            width=6,
        )
    )
    whole.with_panel(
        lines(
            "Step",
            "The job's, and the slowest worker's.",
            "none",
            query(f"max by (namespace, job) (surefoot_job_step{{{JOB}}})", "{{job}}"),
            query(f"min by (namespace, job) (surefoot_step{{{JOB}}} > 0)", "{{job}} slowest worker"),
            width=6,
        )
    )
    durations = f"surefoot_step_duration_seconds_bucket{{{JOB}}}[$__rate_interval]"
    whole.with_panel(
        lines(
            "Step time",
            "Median and 99th percentile over all workers.",
            "s",
            query(f"histogram_quantile(0.5, sum by (namespace, job, le) (rate({durations})))", "{{job}} median"),
            query(f"histogram_quantile(0.99, sum by (namespace, job, le) (rate({durations})))", "{{job}} 99 %"),
            width=6,
        )
    )
    whole.with_panel(
        lines(
            "Loss",
            "As the program tells it.",
            "none",
            query(f"avg by (namespace, job) (surefoot_loss{{{JOB}}})", "{{job}}"),
            width=6,
        )
    )


def _memory(whole: dashboard.Dashboard) -> None:
    whole.with_row(dashboard.Row("Memory tier"))
    whole.with_panel(
        lines(
            "Fill",
            "Used memory of each node's Redis by its limit. At 1 saves fail, visibly, and training goes on.",
            "percentunit",
            query("surefoot_holder_memory_used_bytes / (surefoot_holder_memory_max_bytes > 0)", "{{node}}"),
        )
    )
    whole.with_panel(
        lines(
            "Holders as jobs find them",
            "Instances that answer, are silent, or are known to be gone.",
            "none",
            query(f"max by (state) (surefoot_holders{{{JOB}}})", "{{state}}"),
        )
    )
    whole.with_panel(
        lines(
            "Evictions and failed calls",
            "Keys that a Redis threw away (it must not), and calls of the operator that failed.",
            "none",
            query("sum(increase(surefoot_holder_evicted_keys_total[$__rate_interval]))", "evicted keys"),
            query("sum by (call) (increase(surefoot_holder_call_failures_total[$__rate_interval]))", "{{call}}"),
        )
    )


def _operator(whole: dashboard.Dashboard) -> None:
    whole.with_row(dashboard.Row("Operator"))
    whole.with_panel(
        lines(
            "Watch age",
            "Since the API server was last heard of, by what is watched. Beyond 45 s nothing is planned.",
            "s",
            query("max by (kind) (surefoot_watch_age_seconds)", "{{kind}}"),
            width=6,
        )
    )
    reconciles = "surefoot_reconcile_duration_seconds_bucket[$__rate_interval]"
    lags = "surefoot_operator_loop_lag_seconds_bucket[$__rate_interval]"
    whole.with_panel(
        lines(
            "Reconcile and loop lag",
            "99th percentiles: one round of a job, and how late the operator's loop wakes up.",
            "s",
            query(f"histogram_quantile(0.99, sum by (le) (rate({reconciles})))", "reconcile"),
            query(f"histogram_quantile(0.99, sum by (le) (rate({lags})))", "loop lag"),
            width=6,
        )
    )
    whole.with_panel(
        lines(
            "Leader",
            "Operators that lead: one, and for a moment of fail-over none.",
            "none",
            query("sum(surefoot_operator_leader)", "leaders"),
            width=6,
        )
    )
    whole.with_panel(
        lines(
            "What failed",
            "Rounds that ended in an error, agents that were refused, watches that broke.",
            "none",
            query("sum(increase(surefoot_reconcile_failures_total[$__rate_interval]))", "reconciles"),
            query("sum by (reason) (increase(surefoot_agents_refused_total[$__rate_interval]))", "refused: {{reason}}"),
            query("sum(increase(surefoot_watch_failures_total[$__rate_interval]))", "watches"),
            width=6,
        )
    )
