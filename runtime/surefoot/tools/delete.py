"""`python -m surefoot.tools.delete [--dry] [--seconds N]`: deletes everything that a job has in its persistent tier.

The operator runs it in a pod with the job's own identity when a job with
`checkpoint.persistent.onJobDeletion: Delete` is deleted. The environment names the job and the tier (SUREFOOT_JOB_UID,
SUREFOOT_PERSISTENT_URI, …), so that no command line has credentials. It is safe to repeat: missing objects count as
deleted. Prints one line of JSON: {"job", "uri", "checkpoints": [{"step", "generation"}], "deleted", "problem"}.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Any

from surefoot.errors import ConfigurationError, SurefootError, TierUnavailable
from surefoot.settings import JobSettings, job_settings
from surefoot.tiers.persistent import ObjectStoreTier, open_persistent

SECONDS = 540.0
"""Less than the operator's own timeout, so that this tool can report its progress itself."""


def delete(tier: ObjectStoreTier, clock: Callable[[], float], deadline: float) -> None:
    """Deletes checkpoints oldest first, each index before its data, then all other objects.

    Raises TierUnavailable once `clock()` reaches `deadline`.
    """
    for checkpoint in tier.list_all_checkpoints():
        if clock() >= deadline:
            raise TierUnavailable(f"the time was up before {checkpoint} was deleted; run it again for the rest")
        tier.drop_checkpoint(checkpoint)
    tier.remove_all()


def run(settings: JobSettings, dry: bool, seconds: float) -> dict[str, Any]:
    """Lists a job's checkpoints and, unless `dry`, deletes them."""
    job, persistent = settings.job, settings.persistent
    if job in (".", "..") or "/" in job:
        raise ConfigurationError(f"SUREFOOT_JOB_UID is {job!r}: the name of one folder is allowed")
    if persistent is None:
        raise ConfigurationError("SUREFOOT_PERSISTENT_URI is not set: there is nothing that could be deleted")
    # create a missing folder: a job that never started has none, and its deletion must succeed
    tier = open_persistent(persistent, job, create_root=not dry)
    try:
        checkpoints = [{"step": c.step, "generation": c.generation} for c in tier.list_all_checkpoints()]
        if not dry:
            delete(tier, time.monotonic, time.monotonic() + seconds)
    finally:
        tier.close()
    return {"job": job, "uri": persistent.uri, "checkpoints": checkpoints, "deleted": not dry}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="delete everything that a job has in its persistent tier")
    parser.add_argument("--dry", action="store_true", help="say what is there and delete nothing")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="stop between two checkpoints after this")
    args = parser.parse_args(arguments)
    try:
        result = run(job_settings(), args.dry, args.seconds)
    except SurefootError as error:
        result = {"problem": str(error), "deleted": False}
    print(json.dumps(result))
    return 1 if "problem" in result else 0


if __name__ == "__main__":
    sys.exit(main())
