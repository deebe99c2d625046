"""How often progress alone is written by many jobs: bounded for all together, at once for few."""

from __future__ import annotations

from surefoot_operator.reconcile.build_snapshot import RETRY_SECONDS, ProgressPace


def written(jobs: int, seconds: int, every: float, pace: ProgressPace) -> int:
    """How many of so many jobs write, of which each has news again and again, and asks again when it is told to."""
    due, count, now = dict.fromkeys(range(jobs), 0.0), 0, 0.0
    while now < seconds:
        for job, at in due.items():
            if at <= now:
                wait = pace.wait_seconds(now)
                count += wait == 0
                due[job] = now + (wait or every)
        now += 0.25
    return count


def test_few_jobs_wait_for_nobody() -> None:
    assert written(50, 60, 3.0, ProgressPace(30.0, 60)) == 50 * 20


def test_what_a_thousand_jobs_write_does_not_grow_with_them() -> None:
    counts = {jobs: written(jobs, 60, 3.0, ProgressPace(30.0, 60)) for jobs in (500, 1000, 2000)}
    assert max(counts.values()) <= 60 + 60 * 30
    assert min(counts.values()) >= 0.95 * 60 * 30


def test_every_job_has_its_turn() -> None:
    pace, done, now = ProgressPace(30.0, 60), set[int](), 0.0
    while len(done) < 1000:
        done |= {job for job in range(1000) if job not in done and pace.wait_seconds(now) == 0}
        now += RETRY_SECONDS
    assert now <= 1000 / 30.0 + 2
