"""`surefoot local` with a loss that turns NaN: rolled back, the window skipped, and bounded where it comes again."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from support.local_run import SECONDS, Job, run, running

BATCH = 12
WATCHED = {"healthPolicy": {"numerics": {"goodAfterSteps": 4, "maxRollbacks": 2}}}


def losses(folder: Path) -> dict[int, list[tuple[int, float]]]:
    """Of each epoch: (step, loss), as rank 0 wrote them."""
    found: dict[int, list[tuple[int, float]]] = {}
    for path in sorted((folder / "run" / "ledger").glob("*.jsonl")):
        for text in path.read_text().splitlines():
            line: dict[str, Any] = json.loads(text)
            if line["rank"] == 0 and line["loss"] is not None:
                found.setdefault(line["generation"], []).append((line["step"], line["loss"]))
    return found


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_data_that_is_no_number_is_skipped_and_the_run_ends_with_a_finite_loss(tmp_path: Path) -> None:
    """Batch 23 of the order is NaN: the run goes back well before it, and on behind all that it had read."""
    # one batch only: the operator may stop the trainers before they read the next, which no rollback leaves out then
    job = Job(steps=60, workers=2, trainer=("--spoiled", "23,23", "--pace", "0.1"), spec=WATCHED)
    done = run(tmp_path, job)
    report = done.report
    assert report["outcome"] == "Complete"
    kinds = [incident["kind"] for incident in report["incidents"]]
    assert kinds == ["numerics"], done.said
    told = losses(tmp_path)
    first, last = told[1], told[2]
    assert math.isnan(dict(first)[23])
    assert all(math.isfinite(loss) for _, loss in last)
    assert last[-1][0] == 60
    begun = report["generations"][1]["from_step"]
    assert begun in (5, 10, 15), "steps behind it that were well proved it: 20 had too few of them"
    reached = report["incidents"][0]["steps_lost"] + begun
    assert reached >= 23
    # what lies between is left out as a whole, and nothing else
    assert report["samples_skipped_at"] == [[begun * BATCH, reached * BATCH]]
    assert (report["samples_lost"], report["samples_repeated"]) == (0, 0)
    assert f"samples skipped by rollbacks {(reached - begun) * BATCH}: positions " in done.said
    assert done.told("RolledBack")
    assert any("are left out by loader" in text for text in done.told("DataSkipped"))


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_an_injected_nan_is_healed_and_one_that_always_returns_ends_the_job(tmp_path: Path) -> None:
    healed = run(
        tmp_path, Job(steps=60, workers=2, spec=WATCHED, trainer=("--pace", "0.1")), "--fault", "nan:1@step=25"
    )
    assert healed.report["outcome"] == "Complete"
    assert [incident["kind"] for incident in healed.report["incidents"]] == ["numerics"]
    assert math.isfinite(losses(tmp_path)[2][-1][1])
    again = tmp_path / "again"
    again.mkdir()
    # from step 22 on, whatever it reads: two rollbacks are tried, and the third is not
    with running(
        again, Job(steps=60, workers=2, trainer=("--spoils", "22", "--pace", "0.1"), spec=WATCHED)
    ) as under_way:
        spoiled = under_way.finish(code=1)
    assert [incident["kind"] for incident in spoiled.report["incidents"]] == ["numerics", "numerics"]
    assert "2 rollbacks in a row led to no newer good checkpoint (maxRollbacks)" in spoiled.said
    assert re.search("the last good checkpoint is that of step (5|10|15);", spoiled.said)
