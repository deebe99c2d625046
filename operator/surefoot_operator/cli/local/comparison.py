"""Compares a run's final parameters with those of an undisturbed run.

Called by `run_local` and `conclusion`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from surefoot_operator.api.spec import TrainingJob
from surefoot_operator.cli.command_base import say
from surefoot_operator.cli.tools import run_tool

INTERVALS_PER_PROMOTION = 10
"""Memory intervals between promotions to a persistent tier that only the comparison asked for."""


def with_persistent_tier(document: dict[str, Any], job: TrainingJob, root: Path) -> dict[str, Any]:
    """Adds a folder as persistent tier to a job that has none.

    Memory is lost when a run ends. The last checkpoint is promoted whatever the interval, and it is the one compared.
    """
    if job.spec.checkpoint.persistent is not None:
        return document
    memory = job.spec.checkpoint.memory
    steps = INTERVALS_PER_PROMOTION * memory.base_steps
    uri = f"file://{root.resolve() / 'persistent'}"
    # fixed steps would be saved in addition to those that the operator chooses
    often: dict[str, Any] = {"interval": "auto"} if memory.adaptive else {"intervalSteps": steps}
    words = "at intervals that the operator chooses" if memory.adaptive else f"every {steps} steps"
    say(f"the job has no persistent tier; for the comparison it is promoted to {uri}, {words}")
    spec = document["spec"]
    checkpoint = {**(spec.get("checkpoint") or {}), "persistent": {"uri": uri, **often}}
    return {**document, "spec": {**spec, "checkpoint": checkpoint}}


def compare_parameters(mine: TrainingJob, other: TrainingJob) -> dict[str, Any]:
    """Compares two runs' final parameters: step, max_difference, bit_exact, tensors; or a problem."""
    tier = mine.spec.checkpoint.persistent
    if tier is None:
        return {"problem": "the job has no persistent tier"}
    return run_tool("compare", tier, ["--job", mine.uid, "--with", other.uid])
