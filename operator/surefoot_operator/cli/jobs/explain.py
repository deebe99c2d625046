"""Implements `surefoot explain`: what the operator would do, and why.

Called by `main`. `explanation_lines` is pure.
"""

from __future__ import annotations

import argparse

from surefoot_operator.cli.cli_errors import EXIT_OK
from surefoot_operator.cli.jobs.fault_costs import Explanation, FaultCost, explain
from surefoot_operator.cli.jobs.job_source import add_job, view_of
from surefoot_operator.cli.structured_output import add_output, emit
from surefoot_operator.cli.tables import UNKNOWN, age, indented, number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_job(parser)
    add_output(parser, ("json", "yaml"))


def run(given: argparse.Namespace) -> int:
    found = explain(view_of(given))
    emit(found, given.output, lambda wide: explanation_lines(found))
    return EXIT_OK


def explanation_lines(found: Explanation) -> list[str]:
    """Renders an explanation: now, the next fault, the budgets, the doubts."""
    wake = "" if found.wake_after_seconds is None else f" (looks again in {found.wake_after_seconds:.1f} s)"
    lines = [
        f"{found.job}",
        f"  the operator said:       {found.told or UNKNOWN}",
        f"  from here it would say:  {found.decision}{wake}",
        *(f"  and would:               {one}" for one in found.actions),
    ]
    for fault in found.faults:
        lines += ["", f"if {fault.fault} now:", *indented(_fault_lines(fault))]
    lines += ["", "budgets:", *indented(found.budgets)] if found.budgets else []
    return [*lines, "", "not certain:", *indented(found.doubts)]


def _fault_lines(fault: FaultCost) -> list[str]:
    if fault.ends_job:
        return [f"THE JOB WOULD FAIL: {fault.decision}"]
    seconds = "" if fault.steps_lost_seconds is None else f", about {age(fault.steps_lost_seconds)} of training"
    took = "not known: nothing of this kind has happened to this job yet"
    if fault.recovery_seconds is not None:
        took = f"about {fault.recovery_seconds:.1f} s, the median of this job's own"
    after = f"{fault.workers_after} workers go on" if fault.workers_after else "nobody until a replacement has started"
    return [
        f"the operator: {fault.decision}",
        f"run again:    {number(fault.steps_lost)} steps{seconds}",
        f"restored:     {fault.restored}",
        f"back after:   {took}",
        f"world:        {after}",
    ]
