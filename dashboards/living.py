"""Closed rows about what goes on beside saves: recoveries, training, the memory tier, the operator. Pure; part of `checkpoints`."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard

from dashboards.panels import JOB, heat, lines, query


def recovery() -> dashboard.Row:
    row = dashboard.Row("Failures and recovery")
    row.with_panel(
        heat(
            "To the first new step",
            "From the first sign of a failure until training goes on.",
            f'surefoot_recovery_duration_seconds_bucket{{{JOB}, phase="first-step"}}',
            width=8,
        )
    )
    row.with_panel(
        lines(
            "Incidents by kind",
            "Failures and planned changes, counted once they led to a new generation.",
            "none",
            query(f"sum by (kind) (surefoot_incidents_total{{{JOB}}}) > 0", "{{kind}}"),
        )
    )
    row.with_panel(
        heat(
            "Restore",
            "How long one rank read and verified its state.",
            f"surefoot_restore_duration_seconds_bucket{{{JOB}}}",
            width=8,
        )
    )
    row.with_panel(
        lines(
            "Restored bytes by source",
            "Where restored trainers read their state from.",
            "bytes",
            query(f"sum by (source) (surefoot_restore_bytes_total{{{JOB}}})", "{{source}}"),
            query(f"sum by (reason) (surefoot_restore_fallbacks_total{{{JOB}}})", "read again: {{reason}}"),
            width=8,
        )
    )
    row.with_panel(
        lines(
            "Steps lost and restarts",
            "Steps that had to be run again; new generations after a failure.",
            "none",
            query(f"sum by (namespace, job) (surefoot_lost_steps_total{{{JOB}}})", "{{job}} steps"),
            query(f"sum by (namespace, job) (surefoot_restarts_total{{{JOB}}})", "{{job}} restarts"),
        )
    )
    row.with_panel(
        lines(
            "Goodput",
            "Share of training that was not run again, of all time but suspension.",
            "percentunit",
            query(f"max by (namespace, job) (surefoot_job_goodput_ratio{{{JOB}}})", "{{job}}"),
        )
    )
    return row


def training() -> dashboard.Row:
    row = dashboard.Row("Training")
    row.with_panel(
        lines(
            "Generation and agents",
            "Ranks in the committed generation, connected agents, and the generation's number.",
            "none",
            query(f"max by (namespace, job) (surefoot_world_size{{{JOB}}})", "{{job}} ranks"),
            query(f"max by (namespace, job) (surefoot_agents_connected{{{JOB}}})", "{{job}} agents"),
            query(f"max by (namespace, job) (surefoot_job_generation{{{JOB}}})", "{{job}} generation"),
            width=6,
        )
    )
    row.with_panel(
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
    row.with_panel(
        lines(
            "Step time",
            "Median and 99th percentile over all workers.",
            "s",
            query(f"histogram_quantile(0.5, sum by (namespace, job, le) (rate({durations})))", "{{job}} median"),
            query(f"histogram_quantile(0.99, sum by (namespace, job, le) (rate({durations})))", "{{job}} 99 %"),
            width=6,
        )
    )
    row.with_panel(
        lines(
            "Loss",
            "Mean of the workers that report one; since the start, steps whose loss was not finite or spiked, and rollbacks.",
            "none",
            query(f"avg by (namespace, job) (surefoot_loss{{{JOB}}} > -Inf)", "{{job}}"),
            query(f"sum by (namespace, job) (surefoot_nonfinite_losses_total{{{JOB}}})", "{{job}} not finite"),
            query(f"sum by (namespace, job) (surefoot_loss_spikes_total{{{JOB}}})", "{{job}} spikes"),
            query(f"sum by (namespace, job) (surefoot_rollbacks_total{{{JOB}}})", "{{job}} rollbacks"),
            width=6,
        )
    )
    row.with_panel(
        lines(
            "Samples per second",
            "Rate over the last steps; of packed data, rows.",
            "none",
            query(f"max by (namespace, job) (surefoot_job_samples_per_second{{{JOB}}})", "{{job}}"),
            width=8,
        )
    )
    row.with_panel(
        lines(
            "Passes over the data",
            "Including the part of the current one; of several sources, the lowest.",
            "none",
            query(f"max by (namespace, job) (surefoot_job_data_epochs{{{JOB}}})", "{{job}}"),
            width=8,
        )
    )
    row.with_panel(
        lines(
            "Stragglers",
            "How many times as long as its peers the worst straggler works; at 1 no rank is persistently slower. Its event names it.",
            "none",
            query(f"max by (namespace, job) (surefoot_straggler_slowdown_ratio{{{JOB}}})", "{{job}}"),
            width=8,
        )
    )
    return row


def memory() -> dashboard.Row:
    row = dashboard.Row("Memory tier")
    row.with_panel(
        lines(
            "Fill",
            "Used memory of each memory server of a node, divided by its limit. At 1 saves fail, visibly, and training goes on.",
            "percentunit",
            query(
                "surefoot_memory_server_used_bytes / (surefoot_memory_server_max_bytes > 0)",
                "{{node}} server {{server}}",
            ),
        )
    )
    row.with_panel(
        lines(
            "Memory servers as jobs see them",
            "Memory servers that answer, do not answer, or are known to be gone.",
            "none",
            query(f"max by (state) (surefoot_memory_servers{{{JOB}}})", "{{state}}"),
        )
    )
    row.with_panel(
        lines(
            "Evictions and failed calls",
            "Keys that a memory server evicted (it must not), and calls of the operator that failed.",
            "none",
            query("sum(increase(surefoot_memory_server_evicted_keys_total[$__rate_interval]))", "evicted keys"),
            query("sum by (call) (increase(surefoot_memory_call_failures_total[$__rate_interval]))", "{{call}}"),
        )
    )
    return row


def operator() -> dashboard.Row:
    row = dashboard.Row("Operator")
    row.with_panel(
        lines(
            "Watch age",
            "Since the API server's last message, by watched kind. Beyond 45 s nothing is planned.",
            "s",
            query("max by (kind) (surefoot_watch_age_seconds)", "{{kind}}"),
            width=6,
        )
    )
    reconciles = "surefoot_reconcile_duration_seconds_bucket[$__rate_interval]"
    lags = "surefoot_operator_loop_lag_seconds_bucket[$__rate_interval]"
    row.with_panel(
        lines(
            "Reconcile and loop lag",
            "99th percentiles: one reconcile of a job, and how late the operator's event loop wakes up.",
            "s",
            query(f"histogram_quantile(0.99, sum by (le) (rate({reconciles})))", "reconcile"),
            query(f"histogram_quantile(0.99, sum by (le) (rate({lags})))", "loop lag"),
            width=6,
        )
    )
    row.with_panel(
        lines(
            "Leader",
            "Replicas that lead each shard: one, and none for a moment of a fail-over.",
            "none",
            query("sum by (shard) (surefoot_operator_leader)", "shard {{shard}}"),
            width=6,
        )
    )
    row.with_panel(
        lines(
            "What failed",
            "Reconciles that ended in an error, connections of agents that were rejected, watches that broke.",
            "none",
            query("sum(increase(surefoot_reconcile_failures_total[$__rate_interval]))", "reconciles"),
            query(
                "sum by (reason) (increase(surefoot_agent_connections_rejected_total[$__rate_interval]))",
                "rejected: {{reason}}",
            ),
            query("sum(increase(surefoot_watch_failures_total[$__rate_interval]))", "watches"),
            width=6,
        )
    )
    return row
