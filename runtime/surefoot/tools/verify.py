"""`python -m surefoot.tools.verify --job UID [--step N] [--list]`: verifies the digests of a job's saved bytes.

The environment names the tier (SUREFOOT_PERSISTENT_URI, …), so that no command line has credentials. Prints one line of
JSON: {"checkpoints": [{"step", "generation", "world_size", "ranks", "bytes", "state", "damaged"}]}.
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
    """Describes one checkpoint; if `progress` is given, every byte is read and verified."""
    complete = is_complete(ranks)
    damaged: list[str] = []
    if progress is not None:
        problem = layout_problem(tier, ranks) if complete else None
        damaged += [problem] if problem else []
        for _, manifest in sorted(ranks.items()):
            try:
                tier.read_manifest(manifest.save)  # the list of all manifests would hide a damaged manifest file
                read_rank(tier, manifest, progress)
            except SurefootError as error:
                damaged.append(str(error))
    state = (
        "damaged" if damaged else "incomplete" if not complete else "verified" if progress is not None else "complete"
    )
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
    args = parser.parse_args(arguments)
    try:
        tier = open_tier(args.job)
        ranks_by_checkpoint = by_checkpoint(tier)
        selected = {c: r for c, r in ranks_by_checkpoint.items() if args.step in (None, c.step)}
        total_bytes = sum(manifest.stream_bytes for ranks in selected.values() for manifest in ranks.values())
        progress = None if args.list else ByteProgress(total_bytes)
        entries = [describe_checkpoint(tier, checkpoint, ranks, progress) for checkpoint, ranks in selected.items()]
        result: dict[str, Any] = {"checkpoints": entries, "unreadable_manifests": list(tier.damaged())}
        tier.close()
    except SurefootError as error:
        result = {"problem": str(error)}
    print(json.dumps(result))
    has_problems = (
        "problem" in result or result["unreadable_manifests"] or any(e["damaged"] for e in result["checkpoints"])
    )
    return 1 if has_problems else 0


if __name__ == "__main__":
    sys.exit(main())
