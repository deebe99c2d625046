"""Names the tests that only the nightly run has, and the faster gate tests that cover them.

Whole tests carry the marker `nightly`. Single rows of parametrized tests, and the local twins of cluster scenarios, are
listed here, in one place, so that a reader sees what the gate omits; `table` writes the list into tests/README.md.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TRIED = Path(__file__).with_name("tried.json")


@dataclass(frozen=True, slots=True)
class NightlyRows:
    """Tests of one file that the gate leaves out."""

    file: str
    """Relative to tests/."""
    tests: str
    """Regular expression over the whole name of a test with its parameters, as `test_x[row]`."""
    covered_by: tuple[str, ...]
    """Tests of the gate, as `file::test`, that find the same class of defect."""
    text: str
    """What these tests vary, for the table of tests/README.md."""
    kept: str = ""
    """Regular expression over names that stay in the gate although `tests` matches: one row of each family, on real ranks."""
    kept_count: int = 0
    """How many of them stay."""
    unless_changed: tuple[str, ...] = ()
    """Folders below the root. If a file there changed since a nightly run last passed these tests, the gate runs them too."""


ROWS: tuple[NightlyRows, ...] = (
    NightlyRows(
        "simulator/test_mutations.py",
        r"test_a_broken_rule_is_found.*",
        ("simulator/test_simulation.py::test_jobs_survive_whatever_a_seed_brings",),
        text="each rule broken",
        unless_changed=("tests/simulator", "runtime/surefoot/protocol"),
    ),
    NightlyRows(
        "chart/test_images.py",
        r"test_the_(operators_image|wheel_that_other_images_take)\w+",
        (
            "chart/test_images.py::test_what_is_copied_exists_and_is_not_ignored",
            "chart/test_images.py::test_what_the_runtimes_image_installs_can_be_had",
            "pure/test_extras.py::test_a_command_without_its_part_says_which",
        ),
        text="the operator's image: its install commands",
    ),
    NightlyRows(
        "pure/policy/planning/test_plan.py",
        r"test_(after_any_faults|an_operator_that_dies|epochs_restarts)\w+",
        (
            "simulator/test_simulation.py::test_jobs_survive_whatever_a_seed_brings",
            "pure/policy/planning/test_plan.py::test_a_lost_node_shrinks_the_world_at_once_and_its_return_grows_it_again",
        ),
        text="random faults against decisions and a world without delays",
    ),
    NightlyRows(
        "integration/test_layouts.py",
        r"test_a_layout_returns_into_every_layout\[.*",
        ("pure/restore/test_layout_pairs.py::test_every_pair_of_layouts_at_eight_pairs_of_sizes",),
        text="layouts of real ranks at two changes of size",
        kept_count=10,
        kept=r".*\[(4 to 2-(plain|fsdp2|fsdp_over_tp|fsdp1|flat_partition|float8)|2 to 4-(ddp|hsdp|pipeline|experts))\]",
    ),
    NightlyRows(
        "integration/test_corruption.py",
        r"test_\w+\[.*",
        (
            "integration/test_corruption.py::test_a_hole_in_one_copy_is_read_elsewhere_and_healed",
            "integration/test_corruption.py::test_different_blocks_damaged_on_each_copy_still_make_one_good_restore",
        ),
        text="damaged parts of a save, at each copy",
        kept_count=8,
        kept=r"(test_a_flipped_byte_in_memory\w+\[(chunk 1|digest table|index entry)"
        r"|test_a_flipped_byte_in_the_persistent\w+\[(values|layout)"
        r"|test_with_both\w+\[chunk 0|test_with_no_good\w+\[layout|test_a_hole_under\w+\[values)\]",
    ),
    NightlyRows(
        "integration/test_library_damage.py",
        r"test_(a_damaged_folder_is_gone_on_from|where_nothing_can_be_restored|one_request_that_fails)\w+\[.*",
        ("integration/test_library_damage.py::test_a_tier_that_is_away_at_the_start_is_an_error_and_not_an_empty_one",),
        text="damaged files of a folder",
        kept_count=8,
        kept=r".*\[(a flipped layout|a lost epoch|a removed manifest|a flipped part|two damaged checkpoints|foreign files"
        r"|parts|rank-0.json)\]",
    ),
    NightlyRows(
        "integration/test_swapped_weights.py",
        r"test_(a_change_behind_the_step|a_program_that_settles_first)\w+\[.*",
        ("integration/test_swapped_weights.py::test_a_step_whose_tensors_changed_is_not_saved_later_under_its_number",),
        text="programs that change weights after a step",
        kept_count=7,
        kept=r".*\[(0-ema_by_data|1-pointed_elsewhere|1-by_a_kernel_that_tells_nobody|3-clipped|3-one_row_of_a_view"
        r"|torch_ema|pruned_moments)\]",
    ),
    NightlyRows(
        "simulator/test_simulation.py",
        r"test_jobs_survive_whatever_a_seed_brings\[.*",
        (
            "simulator/test_simulation.py::test_a_seed_replays_exactly",
            "simulator/test_simulation.py::test_what_is_announced_costs_no_step",
        ),
        text="blocks of seeds",
        kept_count=10,
        kept=r".*\[\d\]",
    ),
    NightlyRows(
        "cluster/test_scenario_neighbours.py",
        r"test_.*",
        (
            "contract/test_holder_accounts.py::test_a_job_may_not",
            "contract/test_holder_accounts.py::test_scripts_do_not_reach_another_job_either",
        ),
        text="two jobs on a cluster, each with the other's password",
    ),
    NightlyRows(
        "cluster/test_scenario_fixed.py",
        r"test_.*",
        (
            "cluster/test_scenario_spares.py::test_a_spare_takes_the_rank_of_a_crashed_node_and_the_node_brings_the_next_one",
        ),
        text="a crashed node of a job of fixed size",
    ),
    NightlyRows(
        "cluster/test_scenario_operator.py",
        r"test_the_leaders_own_node\w+",
        (
            "cluster/test_scenario_operator.py::test_a_leader_killed_amid_a_recovery_leaves_it_to_the_next",
            "cluster/test_scenario_nodes.py::test_a_crashed_node_without_a_spare_shrinks_the_world_until_it_returns",
        ),
        text="the leader's own node crashes",
    ),
    NightlyRows(
        "cluster/test_scenario_life.py",
        r"test_a_suspended_job\w+",
        (
            "cluster/test_scenario_life.py::test_a_job_is_scaled_down_and_up_without_losing_a_step",
            "pure/policy/planning/test_plan.py::test_suspending_loses_nothing_and_resuming_goes_on_from_there",
        ),
        text="a suspended and resumed job",
    ),
    NightlyRows(
        "cluster/test_scenario_nodes.py",
        r"test_(a_stopped_kubelet|a_frozen_node)\w+",
        (
            "cluster/test_scenario_nodes.py::test_a_partitioned_node_is_replaced_at_once_and_its_old_world_has_no_effect",
            "simulator/test_simulation.py::test_jobs_survive_whatever_a_seed_brings",
        ),
        text="a kubelet that stops, a node that freezes",
    ),
    NightlyRows(
        "cluster/test_scenario_tiers.py",
        r"test_a_killed_redis\w+",
        (
            "cluster/test_scenario_tiers.py::test_when_every_copy_in_memory_is_lost_s3_has_one",
            "integration/test_kill9.py::test_a_holder_killed_during_a_drain_costs_a_copy_and_its_successor_takes_the_next_save",
        ),
        text="one killed memory server",
    ),
    NightlyRows(
        "cluster/test_scenario_drained.py",
        r"test_a_drained_fixed_size\w+",
        ("cluster/test_scenario_wanted_node.py::test_a_node_under_maintenance_is_left_without_a_lost_step",),
        text="a drained node of a job of fixed size",
    ),
    NightlyRows(
        "cluster/test_chart_cluster.py",
        r"test_the_memory_tier_is_switched\w+",
        (
            "chart/test_rendering.py::test_a_tier_over_tls_speaks_nothing_else_and_never_sees_its_authority_s_key",
            "contract/test_holder_tls.py::test_the_companion_watches_over_tls_and_hands_a_renewed_certificate_in",
            "cluster/test_chart_cluster.py::test_an_upgrade_replaces_the_operator_and_leaves_holders_to_it",
        ),
        text="a memory tier that is switched to TLS while it runs",
    ),
    NightlyRows(
        "cluster/test_controller.py",
        r"test_shards_of_a_running_release\w+",
        (
            "cluster/test_controller.py::test_three_replicas_lead_a_shard_each_and_a_killed_one_moves_its_own_alone",
            "pure/controller/leader/test_election_rules.py::test_shards_are_led_soon_spread_evenly_and_then_stay",
        ),
        text="a change of the number of shards while the operator runs",
    ),
    NightlyRows(
        "integration/test_unkind_loops.py",
        r"test_\w+\[.*",
        (
            "integration/test_own_pace.py::test_what_is_no_wait_for_other_ranks_is_work",
            "simulator/test_simulation.py::test_the_rank_that_hangs_or_is_slow_is_named_and_no_other",
        ),
        text="slow ranks in real loops",
        kept_count=2,
        kept=r".*\[(all are slow|slow)\]",
    ),
    NightlyRows(
        "integration/test_documented_programs.py",
        r"test_in_a_job_with_and_without_torchrun",
        (
            "integration/test_documented_programs.py::test_the_documented_job_as_pasted_ends_and_equals_the_undisturbed_run",
        ),
        text="the documented script in a job under torchrun",
    ),
    NightlyRows(
        "integration/test_local_ranks.py",
        r"test_.*",
        (
            "integration/test_local_faults.py::test_a_killed_trainer_and_a_killed_node_change_nothing_of_the_result",
            "integration/test_layouts.py::test_a_layout_returns_into_every_layout",
        ),
        text="workers of two ranks in a complete run",
    ),
    NightlyRows(
        "integration/test_local_restore_from.py",
        r"test_a_new_job_goes_on\w+",
        ("integration/test_local_restore_from.py::test_a_step_that_the_older_job_does_not_have_fails_the_new_one",),
        text="a job that starts from a source job's checkpoint",
    ),
    NightlyRows(
        "integration/test_dashboards.py",
        r"test_(every_expression_returns|alerts_are_judged|no_series|what_happened)\w+",
        (
            "cluster/test_scenario_metrics.py::test_every_expression_of_dashboards_and_alerts_returns_data_of_the_cluster",
            "chart/test_alerts.py::test_the_alert_is_raised_when_it_should_be_and_not_when_it_should_not",
        ),
        text="dashboards and alerts over a local run",
    ),
    NightlyRows(
        "integration/test_local_replacement.py",
        r"test_.*",
        ("cluster/test_scenario_workers.py::test_a_deleted_pod_is_replaced",),
        text="local twin of a scenario: a replaced worker, bit for bit",
    ),
    NightlyRows(
        "integration/test_local_spares.py",
        r"test_.*",
        (
            "cluster/test_scenario_spares.py::test_a_spare_takes_the_rank_of_a_crashed_node_and_the_node_brings_the_next_one",
        ),
        text="local twin of a scenario: spares",
    ),
    NightlyRows(
        "integration/test_local_coordinator.py",
        r"test_.*",
        ("cluster/test_scenario_operator.py::test_a_leader_killed_amid_a_recovery_leaves_it_to_the_next",),
        text="local twin of a scenario: the coordinator dies",
    ),
    NightlyRows(
        "integration/test_local_total_loss.py",
        r"test_.*",
        (
            "cluster/test_scenario_tiers.py::test_when_every_copy_in_memory_is_lost_s3_has_one",
            "pure/cli/test_command_base.py::test_a_stop_at_any_moment_arrives",
        ),
        text="local twin of a scenario: every copy lost",
    ),
    NightlyRows(
        "integration/test_local_persistent_away.py",
        r"test_.*",
        ("cluster/test_scenario_tiers.py::test_memory_and_s3_away_together_hold_no_training_up",),
        text="local twin of a scenario: the bucket is away",
    ),
    NightlyRows(
        "integration/test_local_servers.py",
        r"test_.*",
        ("cluster/test_scenario_upgrade.py::test_an_upgraded_chart_disturbs_no_training",),
        text="local twin of a scenario: two servers a node",
    ),
    NightlyRows(
        "integration/test_local_socket.py",
        r"test_.*",
        ("cluster/test_scenario_upgrade.py::test_an_upgraded_chart_disturbs_no_training",),
        text="local twin of a scenario: the local socket",
    ),
    NightlyRows(
        "integration/test_local_stragglers.py",
        r"test_.*",
        (
            "simulator/test_simulation.py::test_the_rank_that_hangs_or_is_slow_is_named_and_no_other",
            "integration/test_own_pace.py::test_what_is_no_wait_for_other_ranks_is_work",
        ),
        text="a slow rank in a complete run",
    ),
    NightlyRows(
        "integration/test_local_damage.py",
        r"test_.*",
        ("integration/test_corruption.py::test_a_hole_in_one_copy_is_read_elsewhere_and_healed",),
        text="damage in a complete run",
    ),
    NightlyRows(
        "integration/test_local_fault_kinds.py",
        r"test_.*",
        ("integration/test_local_faults.py::test_a_killed_trainer_and_a_killed_node_change_nothing_of_the_result",),
        text="faults of other kinds in one run",
    ),
    NightlyRows(
        "integration/test_local_join_check.py",
        r"test_.*",
        ("simulator/test_simulation.py::test_who_fails_the_trial_of_its_node_is_kept_out_and_no_job_starves",),
        text="node tests in a complete run",
    ),
    NightlyRows(
        "integration/test_local_intervals.py",
        r"test_(seconds|each_step).*",
        (
            "integration/test_local_intervals.py::test_auto_says_what_it_chose_and_from_what_and_trainers_save_no_oftener",
        ),
        text="ways to configure the save interval",
    ),
    NightlyRows(
        "integration/test_local_hangs.py",
        r"test_where_all_ranks.*",
        ("integration/test_flight_recorder.py::test_a_rank_that_waits_in_a_collective_tells_it",),
        text="a hang in a collective in a complete run",
    ),
    NightlyRows(
        "integration/test_local_numerics.py",
        r"test_an_injected.*",
        (
            "integration/test_local_numerics.py::test_data_that_is_no_number_is_skipped_and_the_run_ends_with_a_finite_loss",
        ),
        text="a NaN that recurs after each rollback",
    ),
    NightlyRows(
        "integration/test_local_endings.py",
        r"test_a_world_that_waits.*",
        ("integration/test_local_endings.py::test_a_job_that_its_deadline_ends_stores_its_newest_checkpoint_first",),
        text="an upload before a wait",
    ),
    NightlyRows(
        "integration/test_loaders.py",
        r"test_(an_elastic_job|each_sample|a_killed_program).*",
        ("pure/data/test_sampler.py::test_each_list_is_one_step_s_through_kills_and_resizes",),
        text="loaders in complete programs",
        kept_count=1,
        kept=r".*\[stream-2\]",
    ),
    NightlyRows(
        "integration/test_sigterm.py",
        r"test_\w+\[.*",
        ("integration/test_sigterm.py::test_a_notice_that_comes_twice_is_one",),
        text="handlers and receivers of SIGTERM",
        kept_count=6,
        kept=r".*\[(around-6|to all by torchrun|before-3|1|called by a later handler)\]",
    ),
    NightlyRows(
        "integration/test_library_ends.py",
        r".*\[with\]",
        ("integration/test_library_ends.py::test_close_raises_once_and_only_for_a_step_that_is_not_saved",),
        text="ways to end a script",
    ),
    NightlyRows(
        "integration/test_library_bucket.py",
        r"test_a_spoiled_answer_costs_no_step\[.*",
        ("integration/test_library_bucket.py::test_checkpoints_that_are_gone_are_named",),
        text="invalid responses of a bucket",
        kept_count=6,
        kept=r".*\[(a throttled listing|a flipped part|a flipped manifest|a stale listing|a part that is missing once|no record of the newest)\]",
    ),
    NightlyRows(
        "integration/test_finished_runs.py",
        r".*\[epochs\]",
        ("integration/test_finished_runs.py::test_a_finished_run_that_is_started_again_changes_nothing",),
        text="loops by epochs",
    ),
    NightlyRows(
        "integration/test_export.py",
        r"test_a_folder_alone_says_where_and_whose",
        ("integration/test_export.py::test_the_command_exports_and_imports",),
        text="ways to name a checkpoint",
    ),
)


def is_left_to_the_night(file: str, name: str) -> bool:
    """Whether a test, named by its file below tests/ and its name with parameters, runs only in the nightly run."""
    return any(
        rows.file == file
        and re.fullmatch(rows.tests, name)
        and not (rows.kept and re.fullmatch(rows.kept, name))
        and (not rows.unless_changed or tried_digests().get(file) == digest_of(rows.unless_changed))
        for rows in ROWS
    )


@cache
def tried_digests() -> dict[str, str]:
    """Returns, by test file, the digest of the sources on which a nightly run last passed it."""
    digests: dict[str, str] = json.loads(TRIED.read_text(encoding="utf-8")) if TRIED.is_file() else {}
    return digests


@cache
def digest_of(folders: tuple[str, ...]) -> str:
    """Returns the digest of all Python sources below these folders of the project."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def write_tried() -> None:
    """Writes to tried.json that the tests with `unless_changed` passed on the present sources. Commit the file."""
    digests = {rows.file: digest_of(rows.unless_changed) for rows in ROWS if rows.unless_changed}
    TRIED.write_text(json.dumps(digests, indent=1) + "\n", encoding="utf-8")


def table() -> str:
    """Returns the table of tests/README.md: what leaves the gate, and which test of the gate covers its class."""
    lines = [
        "| runs only at night | rows that stay in the gate | gate tests that find the same class of defect |",
        "|---|---|---|",
    ]
    for rows in ROWS:
        kept = f"{rows.kept_count} row{'s' if rows.kept_count > 1 else ''}" if rows.kept_count else "–"
        if rows.unless_changed:
            kept = f"all, if {' or '.join(f'`{folder}`' for folder in rows.unless_changed)} changed since the last nightly run that passed them"
        covers = ", ".join(f"`{cover.partition('::')[2]}`" for cover in rows.covered_by)
        lines.append(f"| `{rows.file}`: {rows.text} | {kept} | {covers} |")
    return "\n".join(lines)
