"""One rank of a gloo world that restores every layout from what another world saved, and saves every layout.

layout_world.py RESTORE SAVE KIND...     folders, or `-`; RANK, WORLD_SIZE and GROUP (a file store) in the environment

Saving leaves KIND.whole (as the framework gathers it) and KIND.N (rank N's stream). Restoring writes restored.json:
{"from to": "" or what was wrong}.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from support.gloo_world import leave
from support.layout_kinds import ALONE, KINDS
from support.layout_model import Built, stepped
from support.saved_streams import restored, saved
from surefoot.state import Program

STEP = 3
EXAMPLE = "fsdp2"


def program(built: Built) -> Program:
    where = (dist.get_rank(), dist.get_world_size())
    return Program(built.objects(), where, replicas=built.replicas)


def save(kind: str, folder: Path) -> None:
    built = KINDS[kind](1)
    stepped(built, 5)
    stream = saved(program(built), dist.get_rank(), STEP)
    (folder / f"{kind}.{dist.get_rank()}").write_bytes(pickle.dumps(stream))
    whole = built.gather()
    if dist.get_rank() == 0:
        torch.save(whole, folder / f"{kind}.whole")


def restore(source: str, kind: str, folder: Path) -> str:
    """What differs from the saved whole; nothing if nothing does."""
    built = KINDS[kind](2)
    streams = [pickle.loads(path.read_bytes()) for path in sorted(folder.glob(f"{source}.[0-9]*"))]
    restored(program(built), streams, dist.get_rank(), dist.get_world_size(), STEP)
    found, wanted = built.gather(), torch.load(folder / f"{source}.whole", weights_only=True)
    if found.keys() != wanted.keys():
        return f"other tensors: {sorted(found.keys() ^ wanted.keys())[:3]}"
    unlike = [n for n in wanted if found[n].dtype != wanted[n].dtype or not torch.equal(found[n], wanted[n])]
    return f"differ: {unlike[:3]}" if unlike else ""


def pairs(kinds: list[str], every: bool) -> list[tuple[str, str]]:
    """Each into its own kind, and into every other, or else into one other."""
    same = [(kind, kind) for kind in kinds]
    others = [k for k in kinds if k not in ALONE]
    return same + [(a, b) for a in others for b in (others if every else [EXAMPLE]) if a != b]


def restore_all(kinds: list[str], folder: Path) -> None:
    found: dict[str, Any] = {}
    for source, kind in pairs(kinds, every=dist.get_world_size() == 2):
        problems: list[str] = [""] * dist.get_world_size()
        try:
            mine = restore(source, kind, folder)
        except Exception:  # noqa: BLE001  # the test shows it
            mine = traceback.format_exc()[-1500:]
        dist.all_gather_object(problems, mine)
        found[f"{source} {kind}"] = next((p for p in problems if p), "")
    if dist.get_rank() == 0:
        (folder / "restored.json").write_text(json.dumps(found))


def main() -> None:
    source, target, *kinds = sys.argv[1:]
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=os.environ["GROUP"], rank=rank, world_size=world)
    if source != "-":
        restore_all(kinds, Path(source))
    for kind in kinds if target != "-" else ():
        save(kind, Path(target))
    leave()


if __name__ == "__main__":
    main()
