"""What a save and a restore of a program on a GPU cost, beside torch.save and DCP on tmpfs, turn by turn in one process.

`python -m bench.gpu [--width 2048] [--layers 4] [--turns 5] [--out FILE]`, on a machine with a CUDA device. Steps are
timed to the end of what the device has to do for them. The stall of a save is what the step that saves takes longer than
the median plain step; `lost` is what six steps with a save in their midst take longer than six without, where the host
waits for the device at their end alone, as trainings do. Every save is waited for before anybody has the next turn. Before each restore all tensors are overwritten; after it every byte is compared, on the device. Floors:
one copy of the same tensors out of pinned memory or into it, by the device alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager

from bench import holders
from bench.jobs import run_module
from bench.keeper import IN_PLACE
from bench.program import Program
from bench.systems.dcp import DcpThread
from bench.systems.surefoot import Surefoot
from bench.systems.system import System
from bench.systems.torch_save import TorchSave
from bench.worker import timed

SHARED_MEMORY = "/dev/shm"
FROM_HOLDERS = 2
PLAIN_STEPS = 12
STRETCH = 6
"""Steps that the host queues without waiting for the device."""
TURN_SECONDS = 500.0


class DcpPinned(DcpThread):
    """`async_save` with the stager that DCP brings, as it is by default: pinned memory, copied in a thread.

    Its stream does not wait for the one that computes, so its caller waits for the device first.
    """

    def prepare(self) -> None:
        super().prepare()
        self._stager = DefaultStager()

    def begin(self, step: int) -> None:
        torch.cuda.synchronize()
        self.finish()
        state = self.program.state()
        state["model"] = dict(self.program.model.state_dict())
        answer: Any = dcp.async_save(state, checkpoint_id=self.place(step), async_stager=self._stager)
        self._upload, self._staging = answer.upload_completion, answer.staging_completion

    def close(self) -> None:
        self._stager.close()
        super().close()


class Turns:
    """One program on the device; every system saves and restores it in turn."""

    def __init__(self, task: dict[str, Any], folder: Path) -> None:
        self.task = task
        self.program = Program(task["width"], task["layers"], task["sequences"], device="cuda")
        self.ours = Surefoot(self.program, folder)
        made: dict[str, type[System]] = {
            "torch.save": TorchSave, "dcp.async_save": DcpThread, "dcp.async_save stager": DcpPinned,
        }  # fmt: skip
        self.systems: dict[str, System] = {"surefoot": self.ours}
        for name, kind in made.items():
            (folder / name).mkdir()
            self.systems[name] = kind(self.program, folder / name)
        self.saved_step = 0

    def measured(self) -> dict[str, Any]:
        found: dict[str, Any] = {"state_bytes": self.program.size_bytes, **machine(), "prepare_seconds": {}}
        free, _ = torch.cuda.mem_get_info()
        for name, system in self.systems.items():
            found["prepare_seconds"][name] = timed(system.prepare)
        for _ in range(3):
            self._step()
        plain = [self._step() for _ in range(PLAIN_STEPS)]
        found |= {"plain_step_seconds": plain, "saves": {name: [] for name in self.systems}, "errors": {}}
        usual = statistics.median(plain)
        for _ in range(self.task["turns"] + 1):
            for name in list(self.systems):
                try:
                    found["saves"][name].append(self._saved(name, usual))
                except Exception as error:  # noqa: BLE001  # a peer that fails stands under `errors`; the others go on
                    found["errors"][name] = repr(error)[:500]
                    del self.systems[name], found["saves"][name]
        found["plain_step_seconds_after"] = [self._step() for _ in range(PLAIN_STEPS)]
        found["incomplete"] = self.ours.incomplete()
        found["device_bytes_more"] = free - torch.cuda.mem_get_info()[0]
        found["restores"] = self._restores()
        found["copies"] = {"to host": self._copies(to_host=True), "to device": self._copies(to_host=False)}
        return found

    def _step(self, save: Callable[[], None] | None = None, behind: Callable[[], None] | None = None) -> float:
        torch.cuda.synchronize()
        began = time.monotonic()
        if save is not None:
            save()
        self.program.train()
        if behind is not None:
            behind()
        self.program.advance()
        torch.cuda.synchronize()
        return time.monotonic() - began

    def _stretch(self, system: System | None) -> float:
        """Steps without a look at the device; with a system, it saves in their midst."""
        torch.cuda.synchronize()
        began = time.monotonic()
        for number in range(STRETCH):
            saving = system if number == STRETCH // 2 else None
            if saving is not None:
                saving.begin(self.saved_step)
            self.program.train()
            if saving is not None:
                saving.before_step()
            self.program.advance()
        torch.cuda.synchronize()
        return time.monotonic() - began

    def _saved(self, name: str, usual: float) -> dict[str, float]:
        system, call = self.systems[name], list[float]()
        self.saved_step += 1
        began = time.monotonic()
        first = self._step(
            lambda: call.append(timed(lambda: system.begin(self.saved_step))),
            lambda: call.append(timed(system.before_step)),
        )
        system.finish()
        safe = time.monotonic() - began
        plain = self._stretch(None)
        self.saved_step += 1
        lost = self._stretch(system) - plain
        system.finish()
        return {"call_seconds": sum(call), "stall_seconds": first - usual, "lost_seconds": lost, "safe_seconds": safe}

    def _restores(self) -> dict[str, list[float]]:
        """Of one state: each system saves it once more, and is asked for that."""
        kept = [tensor.detach().clone() for tensor in self.program.tensors()]
        for system in self.systems.values():
            self.saved_step += 1
            system.begin(self.saved_step)
            system.before_step()
            system.finish()
        self.ours.close()
        ways: dict[str, Callable[[], float]] = {
            "surefoot": lambda: self._ours(FROM_HOLDERS),
            "surefoot in place": lambda: self._ours(IN_PLACE),
        }
        if "dcp.async_save" in self.systems:
            ways["dcp.load"] = lambda: self._dcp_load(self.systems["dcp.async_save"].newest)
        if "torch.save" in self.systems:
            ways["torch.load"] = lambda: timed(lambda: self._waited(self.systems["torch.save"].load))
        found: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(self.task["turns"] + 1):
            for name, way in ways.items():
                with torch.no_grad():
                    for tensor in self.program.tensors():
                        tensor.fill_(-1)
                torch.cuda.synchronize()
                found[name].append(way())
                if not all(map(torch.equal, kept, self.program.tensors())):
                    raise AssertionError(f"{name} brought back other bytes than were saved")
        return found

    def _ours(self, epoch: int) -> float:
        os.environ["SUREFOOT_GENERATION"] = str(epoch)
        reading = self.ours._opened()
        seconds = timed(lambda: self._waited(reading.restore))
        reading._end(flush_seconds=0.0)
        return seconds

    def _dcp_load(self, place: Path) -> float:
        """Into the tensors that are there."""
        state = self.program.state()
        return timed(lambda: self._waited(lambda: dcp.load(state, checkpoint_id=place)))

    def _waited(self, call: Callable[[], Any]) -> None:
        call()
        torch.cuda.synchronize()

    def _copies(self, to_host: bool) -> list[float]:
        """The floor: the device copies every tensor to or from pinned memory, and nothing else is done."""
        tensors = [tensor for tensor in self.program.tensors() if tensor.is_cuda]
        host = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]

        def once() -> None:
            with torch.no_grad():
                for there, here in zip(tensors, host, strict=True):
                    one, other = (here, there) if to_host else (there, here)
                    one.copy_(other, non_blocking=True)

        once()
        return [timed(lambda: self._waited(once)) for _ in range(self.task["turns"] + 1)][1:]


def machine() -> dict[str, Any]:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    said = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    return {"gpu": said, "torch": torch.__version__, "cores": len(os.sched_getaffinity(0)), "load": os.getloadavg()[0]}


def of(values: list[float]) -> dict[str, float]:
    """Without the first, which warms its system up."""
    rest = values[1:]
    return {"median": round(statistics.median(rest), 4), "least": round(min(rest), 4), "most": round(max(rest), 4)}


def summary(found: dict[str, Any]) -> dict[str, Any]:
    size = found["state_bytes"] / 1e9
    copies = {name: size / statistics.median(seconds) for name, seconds in found["copies"].items()}
    return {
        "state_gb": round(size, 3),
        "plain_step_seconds": of(found["plain_step_seconds"] + found["plain_step_seconds_after"]),
        **{
            kind: {name: of([one[kind] for one in saves]) for name, saves in found["saves"].items()}
            for kind in ("call_seconds", "stall_seconds", "lost_seconds", "safe_seconds")
        },
        "restore_seconds": {name: of(seconds) for name, seconds in found["restores"].items()},
        "pinned_copy_gb_per_second": {name: round(rate, 1) for name, rate in copies.items()},
    }


def main() -> None:
    if len(sys.argv) == 3 and sys.argv[1].startswith("{"):  # the process of the turns
        with tempfile.TemporaryDirectory(prefix="surefoot-bench-", dir=SHARED_MEMORY) as folder:
            found = Turns(json.loads(sys.argv[1]), Path(folder)).measured()
        Path(sys.argv[2]).write_text(json.dumps(found))
        return
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument(
        "--sequences", type=int, default=128, help="in a batch, of 64 tokens each: how long a step takes"
    )
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    task = {name: getattr(options, name) for name in ("width", "layers", "sequences", "turns")}
    state = 12 * (options.layers * 12 * options.width**2 + 1024 * options.width)
    with holders.running(state) as tier:
        found = run_module("bench.gpu", [json.dumps(task)], tier.environment(), TURN_SECONDS)
    if "error" in found:
        raise SystemExit(found["error"])
    found = {"task": task, "summary": summary(found), **found}
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(
        json.dumps({key: found[key] for key in ("gpu", "torch", "cores", "summary", "incomplete", "errors")}, indent=1)
    )


if __name__ == "__main__":
    main()
