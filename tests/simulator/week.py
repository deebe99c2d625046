"""A week of a job on 2,048 nodes of eight ranks under the faults that Llama 3 met: which share of it makes lasting progress.

Pure: a way of saving and recovering, a seed, and the seconds that each thing takes. What is measured is said in `Costs`; what
is taken from others' reports, and what is taken for granted, too. Called by `week_report`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from surefoot_operator.policy.maintenance.save_intervals import (
    BACKGROUND_COST_RATIO,
    IntervalInputs,
    IntervalRequest,
    choose_exponent,
)

HOUR = 3600.0
WEEK = 7 * 24 * HOUR
LLAMA_3_GPUS = 16_384
LLAMA_3_SECONDS = 54 * 24 * HOUR

Effect = Literal["trainer fails", "ranks hang", "node is lost", "node is left"]
LLAMA_3: Mapping[str, tuple[int, Effect]] = {
    "GPU, its memory, its processor": (148 + 72 + 19 + 17, "node is lost"),
    "software": (54 + 2, "trainer fails"),
    "network switch or cable, NIC": (35 + 7, "node is lost"),
    "unplanned maintenance of a host": (32, "node is lost"),
    "NCCL watchdog": (7, "ranks hang"),
    "silent data corruption": (6, "node is lost"),
    "sensors, SSD, power, chassis, boards, CPU, memory": (6 + 3 + 3 + 2 + 2 + 2 + 2, "node is lost"),
    "planned": (47, "node is left"),
}
"""Interruptions in 54 days on 16,384 GPUs: 419 unexpected ones and 47 planned (The Llama 3 Herd of Models, table 5)."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """The job, and how often it is struck: `faults` times as often as Llama 3, GPU for GPU."""

    nodes: int = 2048
    ranks_of_a_node: int = 8
    step_seconds: float = 6.0
    faults: float = 1.0
    spares: int = 16
    repair_seconds: float = 12 * HOUR

    def rate(self, count: int) -> float:
        """Of a cause with so many interruptions there, how often a second it strikes here."""
        return self.faults * count * self.nodes * self.ranks_of_a_node / LLAMA_3_GPUS / LLAMA_3_SECONDS


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of one way of saving and recovering."""

    stall: float
    """That a save keeps the training."""
    arrival: float
    """Until a save is where it can be restored from; it costs the training a twentieth of that."""
    detected: Mapping[Effect, float]
    ordered: Mapping[Effect, float]
    """From the sign until all workers that are left have their orders."""
    restored: Mapping[Effect, float]
    begun: float
    """From there until the program makes steps: its own beginning, process groups of all ranks."""


@dataclass(frozen=True, slots=True)
class Way:
    """How a job saves and what a fault makes of it."""

    name: str
    costs: Costs
    every_seconds: float | None = None
    """None: as the operator's own rule has it."""
    shrinks: bool = False
    """Goes on with fewer nodes where no spare is left; else it waits for one."""
    holds: bool = False
    """Leaves a node that is announced to go at a saved step."""

    def steps(self, fleet: Fleet) -> int:
        """Steps from one save to the next."""
        if self.every_seconds is not None:
            return max(1, round(self.every_seconds / fleet.step_seconds))
        lost = 1.0 / sum(fleet.rate(count) for count, _ in LLAMA_3.values())
        cost = self.costs.stall + BACKGROUND_COST_RATIO * self.costs.arrival
        found = choose_exponent(
            IntervalRequest(1), IntervalInputs(fleet.step_seconds, cost, self.costs.arrival, lost), None
        )
        assert found is not None, "everything is known"
        return 1 << found.exponent


@dataclass
class Spent:
    """Where the week went, in seconds."""

    incidents: int = 0
    saving: float = 0.0
    repeated: float = 0.0
    recovering: float = 0.0
    missing: float = 0.0
    """What nodes that were not there would have done."""

    @property
    def goodput(self) -> float:
        return 1.0 - (self.saving + self.repeated + self.recovering + self.missing) / WEEK


def faults_of(fleet: Fleet, seed: int) -> Iterator[tuple[float, Effect]]:
    """When and how the job is struck in a week."""
    chance = random.Random(seed)
    effects = [(fleet.rate(count), effect) for count, effect in LLAMA_3.values()]
    whole = sum(rate for rate, _ in effects)
    at = chance.expovariate(whole)
    while at < WEEK:
        yield at, chance.choices([effect for _, effect in effects], [rate for rate, _ in effects])[0]
        at += chance.expovariate(whole)


def spent(fleet: Fleet, way: Way, seed: int) -> Spent:
    """Lives through a week; a fault amid a recovery begins it anew."""
    found, steps = Spent(), way.steps(fleet)
    period = steps * fleet.step_seconds + way.costs.stall + BACKGROUND_COST_RATIO * way.costs.arrival
    away: list[float] = []
    """When each node that is in repair comes back."""
    trains, counted = 0.0, 0.0
    """Since when the world trains, and up to when missing nodes are counted."""
    for at, effect in [*faults_of(fleet, seed), (WEEK, None)]:
        found.missing += _missing(fleet, away, counted, at)
        counted = at
        trained = max(0.0, at - trains)
        found.saving += trained * (period - steps * fleet.step_seconds) / period
        if effect is None:
            break
        found.incidents += 1
        found.repeated += 0.0 if effect == "node is left" and way.holds else _unsaved(way, period, trained)
        away = [back for back in away if back > at]
        waits = 0.0
        if effect in ("node is lost", "node is left"):
            away.append(at + fleet.repair_seconds)
            waits = 0.0 if way.shrinks or len(away) <= fleet.spares else min(away) - at
        pause = (
            way.costs.detected[effect]
            + way.costs.ordered[effect]
            + way.costs.restored[effect]
            + way.costs.begun
            + waits
        )
        until = min(WEEK, at + pause)
        found.recovering += until - max(at, min(trains, until))
        trains = max(trains, until)
    return found


def _unsaved(way: Way, period: float, trained: float) -> float:
    """Steps since the last save that had arrived, as it was when the world fell."""
    into = trained % period if trained >= period else trained
    return min(trained, into if into >= way.costs.arrival or trained < period else into + period)


def _missing(fleet: Fleet, away: list[float], since: float, until: float) -> float:
    """Seconds of the whole job that nodes in repair beyond the spares would have made."""
    moments = sorted({since, until, *(back for back in away if since < back < until)})
    lacking = 0.0
    for begin, end in pairwise(moments):
        short = max(0, sum(back > begin for back in away) - fleet.spares)
        lacking += (end - begin) * short / fleet.nodes
    return lacking
