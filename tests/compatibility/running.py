"""Runs the three lives of a case, each rank of each a process of its own, and reads what they wrote down.

Processes are forked from one that has imported torch and done nothing with it: as fresh as spawned ones for everything
that is to be shown here, and there in a tenth of a second.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import surefoot
from compatibility.case import Case, Context
from compatibility.judging import Life, judged
from compatibility.picture import picture_of
from compatibility.rows import Row
from surefoot.errors import SurefootError

STEPS = 7
KILLED_BEHIND = {"killed": 4, "killed-again": 6}
SAVED_LEAST = 2
"""What changes a program while it trains does so in step 2, and is in what is restored."""
LIFE_SECONDS = 100.0
"""The longest that a life may take on a busy machine."""
GROUP_SECONDS = 30.0
SAVED_SECONDS = 30.0
"""How long a program that is to be killed waits for a first complete checkpoint of its own."""


def preload(quick: bool) -> None:
    """Imports once what every life would import again: most of what a life would take."""
    if not quick:
        for name in ("lightning.fabric.wrappers", "datasets", "torchdata.stateful_dataloader", "webdataset"):
            importlib.import_module(name)
    for name in (
        "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.distributed.optim",
        "torch.distributed.checkpoint.state_dict", "surefoot.checkpointer", "surefoot.data",
    ):  # fmt: skip
        importlib.import_module(name)


def run(case: Case, scratch: Path) -> Row:
    """The row of one case. `scratch` is emptied."""
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    whole = _world(case, "whole", case.ranks, 0, scratch)
    killed, resumed = [Life()], list[Life]()
    if not any(life.failure for life in whole):
        killed = _world(case, "killed", case.ranks, 0, scratch)
    if not any(life.failure for life in [*whole, *killed]):
        if case.again:
            resumed = _world(case, "killed-again", case.afterwards, 5, scratch)
        if not any(life.failure for life in resumed):
            resumed = _world(case, "resumed", case.again or case.afterwards, 9, scratch)
    return judged((case.area, case.name, case.world), whole, killed, resumed or [Life()], STEPS)


def _world(case: Case, life: str, size: int, seed: int, scratch: Path) -> list[Life]:
    place = scratch / life
    place.mkdir()
    ranks = [
        _forked(lambda rank=rank: _live(case, life, Context(rank, size, seed, scratch), place)) for rank in range(size)
    ]  # type: ignore[misc]  # bound on purpose
    ended = _awaited(ranks)
    wanted = -signal.SIGKILL if life in KILLED_BEHIND else 0
    found = [_read(place, rank) for rank in range(size)]
    for rank, (life_of, code) in enumerate(zip(found, ended, strict=True)):
        if code != wanted and life_of.failure is None:
            text = "it did not end in time" if code is None else f"it ended with {code}"
            log = place / f"{rank}.log"
            kind = "crashed" if code is not None and code < 0 else "silence"
            life_of.failure = (kind, " ".join(f"{text}: {_last_words(log)}".split()))
    return found


def _last_words(log: Path) -> str:
    """Of a rank that wrote no failure down: where it crashed, else the end of its log."""
    text = log.read_text(errors="replace") if log.exists() else ""
    fatal = text.find("Fatal Python error")
    return text[fatal : fatal + 1500] if fatal >= 0 else text[-600:]


def _forked(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid:
        return pid
    # torch makes its thread pool anew where it is first asked for behind a fork; two threads that do so at once crash
    torch.set_num_threads(1)
    code = 1
    try:
        work()
        code = 0
    finally:
        os._exit(code)


def _awaited(pids: list[int]) -> list[int | None]:
    """Exit codes; None for a process that had to be ended here. Peers of one that failed get a little longer."""
    codes: dict[int, int | None] = {}
    deadline = time.monotonic() + LIFE_SECONDS
    while len(codes) < len(pids) and time.monotonic() < deadline:
        for pid in [p for p in pids if p not in codes]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
                if codes[pid] not in (0, -signal.SIGKILL):
                    deadline = min(deadline, time.monotonic() + 10.0)
        time.sleep(0.01)
    for pid in [p for p in pids if p not in codes]:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        codes[pid] = None
    return [codes[pid] for pid in pids]


# ---- in a process of its own ------------------------------------------------------------------------------------------


def _live(case: Case, life: str, context: Context, place: Path) -> None:
    log = os.open(place / f"{context.rank}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable()  # a crash says where
    faulthandler.dump_traceback_later(LIFE_SECONDS * 0.8)  # where it stands, if it hangs
    warnings.simplefilter("ignore")
    with (place / f"{context.rank}.jsonl").open("w", buffering=1) as diary:

        def note(**what: Any) -> None:
            diary.write(json.dumps(what) + "\n")

        try:
            _trained(case, life, context, note, place)
        except BaseException as error:
            traceback.print_exc()
            kind = "ours" if isinstance(error, SurefootError) else "other"
            told = f"{error}" if kind == "ours" else f"{type(error).__name__}: {error}"
            note(failure=[kind, " ".join(told.split())[:600]])
            raise
    sys.stdout.flush()


def _trained(case: Case, life: str, context: Context, note: Callable[..., None], place: Path) -> None:
    if context.world > 1:
        store = f"file://{place}/group"
        limit = timedelta(seconds=GROUP_SECONDS)
        dist.init_process_group("gloo", init_method=store, rank=context.rank, world_size=context.world, timeout=limit)
    torch.manual_seed(context.seed)
    training = case.build(context)
    # the undisturbed life has a folder to itself
    folder = context.scratch / ("undisturbed" if life == "whole" else "checkpoints")
    checkpointer = surefoot.Checkpointer(**training.objects, **training.options, folder=str(folder), interval_steps=1)
    start = checkpointer.restore()
    note(restored=start)
    for step in range(start + 1, STEPS + 1):
        loss = float(training.advance(step))
        checkpointer.step(loss)
        note(step=step, loss=loss.hex(), samples=training.samples() if training.samples else [])
        training.behind(step)
        if step == KILLED_BEHIND.get(life):
            _await_save(checkpointer, max(SAVED_LEAST, start + 1), step)
            os.kill(os.getpid(), signal.SIGKILL)
    found = training.picture() if training.picture is not None else picture_of(training.objects)
    torch.save(dict(found), place / f"{context.rank}.pt")


def _await_save(checkpointer: surefoot.Checkpointer, least: int, step: int) -> None:
    deadline = time.monotonic() + SAVED_SECONDS
    while (newest := checkpointer.latest()) is None or newest.step < least:
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"no checkpoint of step {least} or later is complete {SAVED_SECONDS:g} s behind step {step}"
            )
        time.sleep(0.02)


def _read(place: Path, rank: int) -> Life:
    life = Life()
    diary = place / f"{rank}.jsonl"
    for line in diary.read_text().splitlines() if diary.exists() else ():
        said = json.loads(line)
        if "restored" in said:
            life.restored = said["restored"]
        elif "step" in said:
            life.losses[said["step"]] = float.fromhex(said["loss"])
            if said["samples"]:
                life.samples[said["step"]] = said["samples"]
        else:
            life.failure = tuple(said["failure"])
    if (place / f"{rank}.pt").exists():
        life.picture = torch.load(place / f"{rank}.pt", weights_only=True)
    return life
