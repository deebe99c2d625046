"""Reads from PyTorch's flight recorder which collective this rank is in.

`answer` runs in the trainer, on the thread that hears the agent: a rank that waits in a collective has released the GIL.
Torch is not imported here: a program that has not done so has made no collective. Its settings of the recorder
(TORCH_FR_BUFFER_SIZE, in older releases TORCH_NCCL_TRACE_BUFFER_SIZE) are its own and stay.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any

from surefoot.ipc.trainer_messages import CollectivesTold
from surefoot.protocol.hangs import Collective
from surefoot.protocol.text import plain, shorten

MOST_GROUPS = 16
_LONGEST = 60
"""Characters of a group's name, and of the tensors of a call."""
_MOST_TENSORS = 4
_DUMPS = {"gloo": "_dump_fr_trace_json", "nccl": "_dump_nccl_trace_json"}

Entry = Mapping[str, Any]


def answer(rank: int, request: int) -> CollectivesTold:
    """This rank's collectives, or why there are none to tell."""
    torch = sys.modules.get("torch")
    bindings = getattr(getattr(torch, "_C", None), "_distributed_c10d", None)
    found: list[tuple[Collective, float]] = []
    why = "this PyTorch has no flight recorder"
    for backend, name in _DUMPS.items():
        dump = getattr(bindings, name, None)
        if dump is None:
            continue
        try:
            entries = json.loads(dump()).get("entries", ())
            found += collectives(rank, backend, entries, time.time())
        except (RuntimeError, ValueError, TypeError, KeyError, AttributeError) as error:
            why = f"its flight recorder cannot be read: {shorten(plain(repr(error)))}"
        else:
            why = "its flight recorder holds nothing"
    found = sorted(found, key=lambda one: (not one[0].waits, one[1]))[:MOST_GROUPS]
    return CollectivesTold(
        request, tuple(c for c, _ in found), tuple(seconds for _, seconds in found), "" if found else why
    )


def collectives(rank: int, backend: str, entries: Iterable[Entry], now: float) -> list[tuple[Collective, float]]:
    """Chooses each group's first unfinished call, else its last.

    Each with the seconds since it was made. Calls of one group are carried out in their order, so all later ones wait for the first unfinished. Entries come in the order
    in which they were made.
    """
    chosen: dict[tuple[str, bool], Entry] = {}
    for entry in entries:
        key = (_group(backend, entry), bool(entry.get("is_p2p")))
        before = chosen.get(key)
        if before is None or _state(backend, before) == "finished":
            chosen[key] = entry
    return [
        (_collective(rank, backend, group, pairwise, entry), round(max(0.0, now - entry["time_created_ns"] / 1e9), 1))
        for (group, pairwise), entry in chosen.items()
    ]


def _collective(rank: int, backend: str, group: str, pairwise: bool, entry: Entry) -> Collective:
    number = entry["p2p_seq_id"] if pairwise else entry["collective_seq_id"]
    call = shorten(plain(str(entry["profiling_name"]).removeprefix(f"{backend}:")), _LONGEST)
    return Collective((rank,), group, int(number), call, _tensors(entry), _state(backend, entry), pairwise)


def _state(backend: str, entry: Entry) -> Any:
    """Gloo only retires what is over; NCCL retires what has timed out too."""
    if entry["state"] == "completed" or (backend == "gloo" and entry["retired"]):
        return "finished"
    return "started" if entry["state"] == "started" else "scheduled"


def _group(backend: str, entry: Entry) -> str:
    """The group's name, which is the same on all its ranks; what its program says of it comes first."""
    name, description = (*entry["process_group"], "", "")[:2]
    known = description not in ("", "undefined", name)
    words = "default_pg" if description == "default_pg" else f"{description} {name}" if known else f"group {name}"
    return shorten(plain(words if backend == "gloo" else f"{words}, {backend}"), _LONGEST)


def _tensors(entry: Entry) -> str:
    types, sizes = entry["input_dtypes"], entry["input_sizes"]
    told = [f"{kind}[{', '.join(map(str, size))}]" for kind, size in zip(types, sizes, strict=False)]
    more = f" and {len(told) - _MOST_TENSORS} more" if len(told) > _MOST_TENSORS else ""
    return shorten(plain(", ".join(told[:_MOST_TENSORS]) + more), _LONGEST)
