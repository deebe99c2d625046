"""`python -m surefoot.tools.delete [--dry] [--seconds N]`: deletes everything that a job has in its persistent tier.

Run by the operator in a pod with the job's own identity, for a job that is being deleted and says so
(`checkpoint.persistent.onJobDeletion: Delete`). Which job and which tier come by environment (SUREFOOT_JOB_UID,
SUREFOOT_PERSISTENT_URI, …), so that no credentials stand on a command line. Safe to repeat: what is gone already is
success. Prints one line of JSON: {"job", "uri", "checkpoints": [{"step", "generation"}], "deleted", "problem"}.
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
"""Less than the operator waits for it: it says itself how far it came."""


def delete(tier: ObjectStoreTier, clock: Callable[[], float], until: float) -> None:
    """Deletes checkpoints oldest first, each index before data, then the rest.

    TierUnavailable once `clock()` reaches `until`.
    """
    for checkpoint in tier.list_all_checkpoints():
        if clock() >= until:
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
    # made where there is none: a job that never began has no folder, and its deletion must end
    tier = open_persistent(persistent, job, create_root=not dry)
    try:
        found = [{"step": c.step, "generation": c.generation} for c in tier.list_all_checkpoints()]
        if not dry:
            delete(tier, time.monotonic, time.monotonic() + seconds)
    finally:
        tier.close()
    return {"job": job, "uri": persistent.uri, "checkpoints": found, "deleted": not dry}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="delete everything that a job has in its persistent tier")
    parser.add_argument("--dry", action="store_true", help="say what is there and delete nothing")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="stop between two checkpoints after this")
    given = parser.parse_args(arguments)
    try:
        body = run(job_settings(), given.dry, given.seconds)
    except SurefootError as error:
        body = {"problem": str(error), "deleted": False}
    print(json.dumps(body))
    return 1 if "problem" in body else 0


if __name__ == "__main__":
    sys.exit(main())
