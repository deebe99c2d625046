"""Makes one side of an all-reduce with another node.

Every number of the result is checked. Forked from the warm process, so it has the program's own PyTorch and the settings of its network, and trainers of this worker do not
run beside it. What a node cannot find alone is found so: a network that garbles, drops or blocks, a route or MTU that fits
small packets only, a collective that hangs between nodes.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from surefoot.fault_files import is_told
from surefoot.launcher.tcp_store import listening_store

MEETING_SECONDS = 6.0
"""How long whoever hosts the store waits for its partner, which hears of it by the coordinator."""

CALL_SECONDS = 4.0
"""For reaching the store, and for each collective."""

FLOATS = 1 << 20
ROUNDS = 5
_SMALL_ROUNDS = 10
_PARTING_SECONDS = 1.0


def try_pair(told_fd: int, host: str, name: str, store: str) -> None:
    """Writes JSON lines into `told_fd`: port, progress, verdict.

    Args:
        told_fd: The agent reads there.
        host: This node's address, at which a store is hosted.
        name: The keys of this one trial in the store.
        store: The partner's; empty: it is hosted here.
    """

    def tell(**said: object) -> None:
        os.write(told_fd, (json.dumps(said) + "\n").encode())

    try:
        import torch.distributed as dist
    except ImportError as error:
        tell(verdict="unknown", text=f"PyTorch could not be imported: {error}")
        return
    rank = 1 if store else 0
    try:
        found = _all_reduced(tell, dist, rank, _store(tell, host, store), name)
    except (RuntimeError, ValueError, OSError) as error:  # DistError and its kin are RuntimeErrors
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        found = {"verdict": "fails", "text": line[:200]}
    tell(**found)
    sys.stdout.flush()


def _store(tell: Callable[..., None], host: str, store: str) -> Any:
    """The store, as its host or its guest."""
    from torch._C._distributed_c10d import TCPStore

    if not store:
        hosted = listening_store(host)
        hosted.set_timeout(timedelta(seconds=MEETING_SECONDS))
        tell(begun=True, port=hosted.port)
        return hosted
    tell(begun=True)
    address, _, port = store.rpartition(":")
    limit = timedelta(seconds=CALL_SECONDS)
    return TCPStore(address.strip("[]"), int(port), is_master=False, wait_for_workers=False, timeout=limit)


def _all_reduced(tell: Callable[..., None], dist: Any, rank: int, store: Any, name: str) -> dict[str, object]:
    import torch

    devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    own = _identities(torch, len(devices))
    store = dist.PrefixStore(name, store)
    store.set(f"devices {rank}", " ".join(own))  # first: who is there has said this, or knows nothing of it
    store.set(f"there {rank}", str(len(devices)))
    try:
        store.wait([f"there {1 - rank}"])
    except RuntimeError:
        return {"verdict": "fails", "text": f"the other node did not come within {MEETING_SECONDS:g} s"}
    tell(met=True)
    shared = min(len(devices), int(store.get(f"there {1 - rank}")))
    others = store.get(f"devices {1 - rank}").decode().split() if store.check([f"devices {1 - rank}"]) else []
    backend = chosen_backend(shared, own, others, dist.is_nccl_available())
    # a collective of NCCL that hangs is to end with an error here, and not to end this process
    os.environ.update(TORCH_NCCL_BLOCKING_WAIT="1", TORCH_NCCL_ASYNC_ERROR_HANDLING="0")
    limit = timedelta(seconds=CALL_SECONDS)
    dist.init_process_group(backend, store=store, rank=rank, world_size=2, timeout=limit)
    spoiled = _is_spoiled()
    rates, latencies = [], []
    for device in devices[:shared] if backend == "nccl" else ["cpu"]:
        rate, latency, wrong = _tried(torch, dist, rank, device, spoiled)
        if wrong:
            return {"verdict": "fails", "text": f"an all-reduce by {backend} on {device} returned {wrong}"}
        rates.append(rate)
        latencies.append(latency)
    store.set(f"over {rank}", "1")
    _part(store, rank)
    return {"verdict": "well", "text": f"{min(rates):.2g} GB/s, {1e3 * max(latencies):.2g} ms by {backend}"}


def chosen_backend(shared: int, own: Sequence[str], others: Sequence[str], has_nccl: bool) -> str:
    """NCCL where each side has GPUs of its own, else gloo.

    Two workers of one machine may have the same GPU: NCCL refuses that, and nothing would be at fault.
    """
    return "nccl" if shared and has_nccl and set(own).isdisjoint(others) else "gloo"


def _identities(torch: Any, count: int) -> list[str]:
    """What a GPU is called on every node and by every process."""
    return [str(torch.cuda.get_device_properties(index).uuid) for index in range(count)]


def _tried(torch: Any, dist: Any, rank: int, device: str, spoiled: bool) -> tuple[float, float, str]:
    """(GB/s, seconds of a small one, what was wrong): whole numbers, whose sums are exact, and other ones each time."""
    own, other = (_numbers(torch, one).to(device) for one in (rank, 1 - rank))
    best = 0.0
    for number in range(ROUNDS):
        values = own + number + spoiled
        expected = own + other + 2 * number
        began = time.monotonic()
        dist.all_reduce(values)
        wrong = int((values != expected).sum().item())
        best = max(best, 4e-9 * FLOATS / max(time.monotonic() - began, 1e-9))
        if wrong:
            return 0.0, 0.0, f"{wrong} of {FLOATS} wrong sums, the {number + 1}. time"
    small, began = torch.zeros(1, device=device), time.monotonic()
    for _ in range(_SMALL_ROUNDS):
        dist.all_reduce(small)
    small.item()
    return best, (time.monotonic() - began) / _SMALL_ROUNDS, ""


def _numbers(torch: Any, rank: int) -> Any:
    place = torch.arange(FLOATS, dtype=torch.int64, device="cpu")
    return ((place * (40503 + 2 * rank)) % 65521 % 4093).to(torch.float32)


def _part(store: Any, rank: int) -> None:
    """Whoever hosts the store leaves last: the other one may still have to say that it is done."""
    if rank == 0:
        store.set_timeout(timedelta(seconds=_PARTING_SECONDS))
        try:
            store.wait([f"over {1 - rank}"])
        except RuntimeError:
            pass  # it says itself how it fared


def _is_spoiled() -> bool:
    """Whether a test has this node send other numbers than it should."""
    return is_told("garbles")
