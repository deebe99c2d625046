"""Events, incidents and the ends of a job in one order."""

from __future__ import annotations

from dataclasses import replace

from support.builders import BEGAN, running
from support.stored import view_of_snapshot
from surefoot_operator.api.status import Incident
from surefoot_operator.cli.jobs.describe import timeline_lines, timeline_of
from surefoot_operator.cli.local.progress import Happened

LOST = Incident(
    "node-lost", "node n2 is gone", 2, "n2", 1, BEGAN + 40.25,
    claimed_seconds=BEGAN + 40.5, first_step_seconds=BEGAN + 46, steps_lost=3, restored_from="memory",
)  # fmt: skip


def test_everything_is_in_order_and_an_incident_has_its_phases() -> None:
    seen = running()
    status = replace(
        seen.status,
        incidents=(LOST,),
        phase="Complete",
        completion_seconds=BEGAN + 90,
        message="every trainer finished",
    )
    happened = (Happened(BEGAN + 41, "WorkerLost", "worker 2", True), Happened(BEGAN + 46.5, "Restored", "on", False))
    found = timeline_of(view_of_snapshot(replace(seen, status=status), *happened))
    assert [one.kind for one in found] == ["start", "incident", "WorkerLost", "Restored", "end"]
    lines = timeline_lines(found)
    assert lines[1] == "1970-01-01 00:17:20     +40.2 s ! incident: node-lost: node n2 is gone"
    assert [line.strip() for line in lines[2:5]] == [
        "0.000 s  noticed",
        "0.250 s  new epoch claimed",
        "5.750 s  first new step, restored from memory, 3 steps lost",
    ]
    assert lines[-1].endswith("end: Complete: every trainer finished")


def test_incidents_can_be_had_without_events() -> None:
    seen = running()
    view = view_of_snapshot(
        replace(seen, status=replace(seen.status, incidents=(LOST,))), Happened(BEGAN, "x", "y", False)
    )
    assert [one.kind for one in timeline_of(view, events=False)] == ["start", "incident"]


def test_a_planned_change_is_no_warning() -> None:
    seen = running()
    planned = replace(LOST, kind="planned")
    found = timeline_of(view_of_snapshot(replace(seen, status=replace(seen.status, incidents=(planned,)))))
    assert [one.warning for one in found] == [False, False]


def test_nothing_known_is_said() -> None:
    assert "nothing is known" in timeline_lines([])[0]
