"""The real decisions under an own clock and a seed: whatever fails, what must hold holds, and the job completes."""

import re
from collections import Counter
from dataclasses import replace

import pytest

from simulator import announced, damage, judgement, rollout, starting
from simulator.mutations.spreading import RACKS
from simulator.restless import RESTLESS
from simulator.settings import Settings
from simulator.world import simulate

BLOCKS = 20
SEEDS_PER_BLOCK = 10


@pytest.mark.parametrize("block", range(BLOCKS))
def test_jobs_survive_whatever_a_seed_brings(block: int) -> None:
    for seed in range(block * SEEDS_PER_BLOCK, (block + 1) * SEEDS_PER_BLOCK):
        outcome = simulate(seed)
        assert outcome.violation is None, (
            f"seed {seed}: {outcome.violation}; replay: PYTHONPATH=tests python -m simulator --replay {seed}"
        )


LEFT_IN_ORDER = {
    "node is to be left": ("node dies", "node freezes", "operator dies"),
    "pod is deleted": ("trainer dies", "node dies", "operator dies"),
}
"""With what fails beside it."""


@pytest.mark.parametrize("kind", LEFT_IN_ORDER)
@pytest.mark.parametrize("block", range(4))
def test_what_is_to_be_left_is_left_in_order_whatever_else_fails(kind: str, block: int) -> None:
    for seed in range(block * 5, (block + 1) * 5):
        for kinds in ((kind,), (kind, *LEFT_IN_ORDER[kind])):
            wish = Settings(nodes=4, workers=3, least_workers=2, steps=40, faults=4, kinds=kinds)
            outcome = simulate(seed, wish)
            assert outcome.violation is None, f"seed {seed} with {kinds}: {outcome.violation}"


@pytest.mark.parametrize("block", range(4))
def test_a_world_tied_to_its_size_waits_for_it_whatever_fails(block: int) -> None:
    for seed in range(block * 5, (block + 1) * 5):
        outcome = simulate(seed, Settings(nodes=4, workers=3, least_workers=1, steps=40, tied=True))
        assert outcome.violation is None, f"seed {seed}: {outcome.violation}"


@pytest.mark.parametrize("block", range(2))
def test_a_rack_that_dies_whole_takes_no_checkpoint_along(block: int) -> None:
    """Of two racks of the same size, or three; the job goes on from what it had, with the nodes that are left or all."""
    struck: Counter[str] = Counter()
    for seed in range(block * 6, (block + 1) * 6):
        for racks, least in ((2, 1), (3, 6)):
            outcome = simulate(seed, replace(RACKS, racks=racks, least_workers=least))
            assert outcome.violation is None, f"seed {seed} with {racks} racks: {outcome.violation}"
            struck += Counter(outcome.faults)
    assert struck["rack dies"] == 12


SHAPES = ((3, 3, 4), (3, 1, 3), (3, 2, 4), (2, 2, 2), (3, 3, 3))
"""Workers, the fewest that are allowed, nodes."""


@pytest.mark.parametrize("block", range(4))
def test_what_is_announced_costs_no_step(block: int) -> None:
    judged: Counter[str] = Counter()
    for seed in range(block * 8, (block + 1) * 8):
        workers, least, nodes = SHAPES[seed % len(SHAPES)]
        wish = Settings(
            nodes=nodes, workers=workers, least_workers=least, steps=60, interval=(1, 3, 50)[seed % 3], replicas=1 + seed % 2,
            persistent_interval=(None, 6)[seed // 2 % 2], faults=1 + seed % 4, kinds=tuple(announced.KINDS),
        )  # fmt: skip
        outcome = simulate(seed, wish)
        assert outcome.violation is None, f"seed {seed}: {outcome.violation}"
        judged.update(outcome.lossless)
    assert judged.total() >= 15
    assert len({one.partition(", ")[0] for one in judged} & set(announced.KINDS)) >= 4


SPARED_FROM = ("node dies", "node freezes", "agent dies", "trainer dies", "operator dies", "pod is deleted",
               "node is drained", "node is to be left")  # fmt: skip


@pytest.mark.parametrize("block", range(2))
def test_spares_answer_losses_and_are_replaced(block: int) -> None:
    taken = 0
    for seed in range(block * 12, (block + 1) * 12):
        wish = Settings(
            nodes=5 + seed % 2, workers=3, least_workers=(3, 2, 1)[seed % 3], spares=1 + seed % 2, steps=60,
            interval=(1, 3, 50)[seed % 3], replicas=1 + seed % 2, faults=1 + seed % 4, kinds=SPARED_FROM,
        )  # fmt: skip
        outcome = simulate(seed, wish)
        assert outcome.violation is None, f"seed {seed}: {outcome.violation}"
        taken += outcome.spares_taken
    assert taken >= 2


JOINING = ("agent dies", "node dies", "pod is deleted", "operator dies", "trainer dies", "node freezes")
TRIED_SHAPES = ((3, 3, 4), (3, 1, 3), (3, 2, 4), (2, 2, 2), (1, 1, 3), (4, 2, 6), (3, 3, 3))


@pytest.mark.parametrize("block", range(2))
def test_who_fails_the_trial_of_its_node_is_kept_out_and_no_job_starves(block: int) -> None:
    """Nodes that fail once or always, each by itself or all alike, and trials that hang, crash or take long: `JoinWatch`."""
    kept_out = 0
    for seed in range(block * 42, block * 42 + 14):
        workers, least, nodes = TRIED_SHAPES[seed % len(TRIED_SHAPES)]
        wish = Settings(
            nodes, workers, least, steps=40, faults=seed // 7 % 4, kinds=JOINING, pre_join_check="Enforce",
            spares=(0, 0, 1)[seed % 3],
        )  # fmt: skip
        outcome = simulate(seed, wish)
        assert (outcome.violation, outcome.phase) == (None, "Complete"), f"seed {seed}"
        kept_out += outcome.kept_out
    assert kept_out >= 1


@pytest.mark.parametrize("least", [3, 1], ids=["fixed", "elastic"])
@pytest.mark.parametrize("block", range(2))
def test_workers_that_cannot_be_started_for_minutes_end_no_job(block: int, least: int) -> None:
    kinds = (*starting.KINDS, "agent dies", "node dies", "pod is deleted", "operator dies")
    complete = 0
    for seed in range(block * 4, (block + 1) * 4):
        for persistent in (None, 6):
            wish = Settings(
                nodes=4, workers=3, least_workers=least, steps=60, faults=6, kinds=kinds, persistent_interval=persistent
            )
            outcome = simulate(seed, wish)
            assert outcome.violation is None, f"seed {seed}, persistent {persistent}: {outcome.violation}"
            complete += outcome.phase == "Complete"
    assert complete >= 6, "others lost every copy of every checkpoint"


@pytest.mark.parametrize("least", [3, 1], ids=["fixed", "elastic"])
def test_a_job_that_its_deadline_ends_stores_its_newest_checkpoint_first(least: int) -> None:
    kinds = (*starting.KINDS, "agent dies", "node dies", "trainer dies", "operator dies")
    stored = 0
    for seed in range(8):
        wish = Settings(
            nodes=3 + seed % 2, workers=3, least_workers=least, steps=2000, interval=1 + seed % 3, persistent_interval=300,
            faults=seed % 5, kinds=kinds, active_deadline_seconds=6.0 + seed, deadline_seconds=800.0,
        )  # fmt: skip
        outcome = simulate(seed, wish, tracing=True)
        assert (outcome.violation, outcome.phase) == (None, "Failed"), f"seed {seed}"
        stored += any("is uploaded to the persistent tier first" in line for line in outcome.trace)
    assert stored >= 4


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("block", range(2))
def test_what_cannot_be_read_is_never_taken_for_absent(replicas: int, block: int) -> None:
    kinds = (*damage.KINDS, "trainer dies", "operator dies", "holder restarts")
    for seed in range(block * 5, (block + 1) * 5):
        wish = Settings(replicas=replicas, interval=1, persistent_interval=1, faults=14, steps=60, kinds=kinds)
        outcome = simulate(seed, wish)
        assert outcome.violation is None, f"seed {seed}: {outcome.violation}"


ROLLOUTS = (tuple(rollout.KINDS), (*rollout.KINDS, "trainer dies", "node dies", "holder restarts", "lines are cut"))
"""Alone, and with what else goes on meanwhile."""


@pytest.mark.parametrize("kinds", ROLLOUTS, ids=["alone", "with faults"])
@pytest.mark.parametrize("block", range(2))
def test_operator_and_pods_are_rolled_out_under_a_job_that_trains(kinds: tuple[str, ...], block: int) -> None:
    for seed in range(block * 4, (block + 1) * 4):
        workers, least, nodes = SHAPES[seed % len(SHAPES)]
        wish = Settings(nodes, workers, least, steps=50, faults=2 + seed % 3, kinds=kinds, encoded=True)
        outcome = simulate(seed, wish)
        assert outcome.violation is None, f"seed {seed}: {outcome.violation}"


def test_a_node_that_is_to_be_left_costs_no_step() -> None:
    wish = Settings(nodes=4, workers=3, least_workers=3, steps=40, faults=1, kinds=("node is to be left",))
    outcomes = [simulate(seed, wish, tracing=True) for seed in range(6)]
    moved = [o for o in outcomes if any("is moved off node" in line for line in o.trace)]
    assert moved
    assert [o.phase for o in outcomes] == ["Complete"] * 6


@pytest.mark.parametrize("least", [2, 3], ids=["a smaller world goes on", "it waits for a place"])
def test_a_deleted_pod_costs_no_step(least: int) -> None:
    wish = Settings(
        nodes=4, workers=3, least_workers=least, steps=60, faults=1, kinds=("pod is deleted",), fault_span_seconds=8.0
    )
    left = 0
    for seed in range(8):
        trace = "\n".join(simulate(seed, wish, tracing=True).trace)
        before, deleted, _ = trace.partition("-1 is deleted")
        if deleted and "generation 1 runs" in before:
            until, _, after = trace.partition("generation 2 restores ")
            step = re.findall(r"3 of 3 workers wait at step (\d+)", until)[-1]
            assert after.startswith(f"step {step} of generation 1"), f"seed {seed}"
            left += 1
    assert left >= 4


@pytest.mark.parametrize("block", range(4))
def test_ranks_without_room_to_stage_a_save_whatever_else_fails_cost_no_checkpoint(block: int) -> None:
    for seed in range(block * 3, (block + 1) * 3):
        for persistent in (None, 2):
            wish = Settings(steps=40, interval=1, refused=0.3, persistent_interval=persistent, faults=seed % 7)
            outcome = simulate(seed, wish)
            assert outcome.violation is None, f"seed {seed}, persistent {persistent}: {outcome.violation}"


def test_what_can_never_become_complete_does_not_pile_up() -> None:
    wish = Settings(steps=60, interval=1, refused=0.8, persistent_interval=None, faults=0)
    for seed in range(5):
        outcome = simulate(seed, wish)
        assert (outcome.violation, outcome.phase) == (None, "Complete")
        assert outcome.most_kept <= 6, f"seed {seed}"


def test_nothing_piles_up_on_holders_that_the_operator_does_not_reach() -> None:
    wish = Settings(
        nodes=2, workers=2, steps=120, interval=1, persistent_interval=None, faults=4, kinds=("operator loses holders",)
    )
    for seed in range(5):
        outcome = simulate(seed, wish)
        assert (outcome.violation, outcome.phase) == (None, "Complete")
        assert outcome.most_kept <= 35, f"seed {seed}: 38 to 59 where nobody drops them"


@pytest.mark.parametrize("block", range(6))
def test_levels_that_change_whatever_else_fails_cost_no_checkpoint(block: int) -> None:
    for seed in range(block * 5, (block + 1) * 5):
        for persistent in (None, 2):
            wish = Settings(steps=40, adaptive=True, persistent_interval=persistent, faults=seed % 7)
            outcome = simulate(seed, wish, decisions=RESTLESS)
            assert outcome.violation is None, f"seed {seed}, persistent {persistent}: {outcome.violation}"


def test_the_operator_chooses_a_level_and_trainers_follow_it() -> None:
    wish = Settings(steps=40, adaptive=True, faults=0)
    outcome = simulate(3, wish, tracing=True)
    assert (outcome.violation, outcome.phase) == (None, "Complete")
    # four steps are asked for at most; a little room keeps the promise
    assert {f"rank {rank} of epoch 1 saves at level 1" for rank in range(3)} <= {_words(line) for line in outcome.trace}


def _words(line: str) -> str:
    """Of a line of the trace, without its time."""
    return line.strip().partition(" ")[2].strip()


def test_a_seed_replays_exactly() -> None:
    first, second = simulate(7, tracing=True), simulate(7, tracing=True)

    assert first == second
    assert first.trace


def test_an_upload_that_failed_is_asked_for_again() -> None:
    away = Settings(faults=3, kinds=("persistent tier is away",), steps=40, fault_span_seconds=4.0)

    outcomes = [simulate(seed, away) for seed in range(5)]

    assert [(o.violation, o.phase) for o in outcomes] == [(None, "Complete")] * 5


@pytest.mark.parametrize("least", [2, 3], ids=["elastic", "fixed"])
def test_sick_nodes_are_left_at_saved_steps_and_healthy_ones_are_not(least: int) -> None:
    """Hardware, programs' errors and what all nodes find at once: `SickWatch` and `Lossless` judge each."""
    moved = 0
    for seed in range(8):
        outcome = simulate(seed, replace(judgement.SICK, least_workers=least), tracing=True)
        assert outcome.violation is None, f"seed {seed}: {outcome.violation}"
        moved += any("is moved off node" in line and "GpuLost" in line for line in outcome.trace)
    assert moved >= 2


@pytest.mark.parametrize(("turn", "least"), [(0, 4), (3, 2)], ids=["hangs", "is slow"])
def test_the_rank_that_hangs_or_is_slow_is_named_and_no_other(turn: int, least: int) -> None:
    """A few jobs of `python -m bench judgement`, which counts a thousand faults."""
    named = Counter[str]()
    for seed in range(turn, 17, 4):
        outcome = judgement.run(seed)
        assert outcome.violation is None, f"seed {seed}: {outcome.violation}"
        named.update(outcome.named)
    assert sum(count for what, count in named.items() if what.endswith(", named")) >= least
    assert judgement.share_named(named) >= 0.95


def test_who_fails_again_and_again_is_left_and_nobody_else() -> None:
    """A few jobs of `python -m bench judgement`: what the watches do not allow is a violation."""
    named = Counter[str]()
    for seed in range(2, 22, 4):
        outcome = judgement.run(seed)
        assert (outcome.violation, outcome.phase) == (None, "Complete"), f"seed {seed}"
        named.update(outcome.named)
    assert named["failing node, left"] >= 1
    assert named["failing node, kept"] == 0
