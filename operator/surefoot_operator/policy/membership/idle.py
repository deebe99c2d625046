"""Decides whether a job is idle and can be observed less often.

Pure; called by `reconcile`.
"""

from __future__ import annotations

from collections.abc import Sequence

from surefoot_operator.api.spec import TrainingJob
from surefoot_operator.api.status import JobStatus
from surefoot_operator.job_snapshot import WorkerSeen


def is_idle(job: TrainingJob, status: JobStatus, workers: Sequence[WorkerSeen]) -> bool:
    """Decides whether a suspended or ended job needs no regular rounds.

    With no worker left, nothing changes until somebody edits the job.
    """
    world = status.world
    empty = world is None or (world.state == "Committed" and not world.members)
    over = status.phase in ("Complete", "Failed")
    if job.deleted:
        return False
    # pods that have ended stay for their logs
    return status.tidied if over else job.spec.suspend and empty and not workers
