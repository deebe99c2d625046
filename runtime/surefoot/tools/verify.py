"""`python -m surefoot.tools.verify --job UID [--step N] [--list]`: whether a job's saved bytes are the saved ones.

Which tier comes by environment (SUREFOOT_PERSISTENT_URI, …), so that credentials stand on no command line. Prints one
line of JSON: {"checkpoints": [{"step", "generation", "world_size", "ranks", "bytes", "state", "damaged"}]}.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from surefoot.errors import SurefootError
from surefoot.protocol.identities import Checkpoint
from surefoot.tiers.persistent import ObjectStoreTier
from surefoot.tools.rank_streams import (
    ByteProgress,
    Ranks,
    by_checkpoint,
    is_complete,
    layout_problem,
    open_tier,
    read_rank,
)


def describe_checkpoint(
    tier: ObjectStoreTier, checkpoint: Checkpoint, ranks: Ranks, progress: ByteProgress | None
) -> dict[str, Any]:
    """Describes one checkpoint; with `progress`, every byte is read and checked."""
    whole = is_complete(ranks)
    damaged: list[str] = []
    if progress is not None:
        problem = layout_problem(tier, ranks) if whole else None
        damaged += [problem] if problem else []
        for _, manifest in sorted(ranks.items()):
            try:
                tier.read_manifest(manifest.save)  # a list of all manifests would hide one whose own file is damaged
                read_rank(tier, manifest, progress)
            except SurefootError as error:
                damaged.append(str(error))
    state = "damaged" if damaged else "incomplete" if not whole else "verified" if progress is not None else "complete"
    return {
        "step": checkpoint.step,
        "generation": checkpoint.generation,
        "world_size": next(iter(ranks.values())).world_size,
        "ranks": len(ranks),
        "bytes": sum(m.stream_bytes + m.values_bytes + m.digests_bytes for m in ranks.values()),
        "state": state,
        "damaged": damaged,
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="verify a job's checkpoints in the persistent tier")
    parser.add_argument("--job", required=True, help="the job's uid")
    parser.add_argument("--step", type=int, help="only this step")
    parser.add_argument("--list", action="store_true", help="say what is there without reading it")
    given = parser.parse_args(arguments)
    try:
        tier = open_tier(given.job)
        found = by_checkpoint(tier)
        wanted = {c: r for c, r in found.items() if given.step in (None, c.step)}
        total = sum(manifest.stream_bytes for ranks in wanted.values() for manifest in ranks.values())
        progress = None if given.list else ByteProgress(total)
        entries = [describe_checkpoint(tier, checkpoint, ranks, progress) for checkpoint, ranks in wanted.items()]
        body: dict[str, Any] = {"checkpoints": entries, "unreadable_manifests": list(tier.damaged())}
        tier.close()
    except SurefootError as error:
        body = {"problem": str(error)}
    print(json.dumps(body))
    bad = "problem" in body or body["unreadable_manifests"] or any(e["damaged"] for e in body["checkpoints"])
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
