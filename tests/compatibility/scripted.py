"""Whole scripts under their own frameworks, as programs: killed with SIGKILL from outside while they train."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from compatibility.case import title_of, world_of
from compatibility.judging import Life, judged
from compatibility.rows import Row

SCRIPTS = Path(__file__).parent / "scripts"
STEPS, KILLED_BEHIND = 12, 4
PAUSE_SECONDS = {"undisturbed": "0", "killed": "0.2", "resumed": "0"}
LIFE_SECONDS = 240.0


@dataclass(frozen=True, slots=True)
class Script:
    """A program of `scripts`, begun on `ranks` and again on `resumed`."""

    area: str
    name: str
    file: str
    ranks: int = 1
    resumed: int = 0
    quick: bool = False

    @property
    def world(self) -> str:
        return world_of(self.ranks, self.resumed)

    @property
    def title(self) -> str:
        return title_of(self.area, self.name, self.world)


def run(script: Script, scratch: Path) -> Row:
    """The row of one script. `scratch` is emptied."""
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    whole = _life(script, "undisturbed", script.ranks, scratch)
    killed = resumed = [Life()]
    if whole[0].failure is None:
        killed = _life(script, "killed", script.ranks, scratch)
    if whole[0].failure is None and killed[0].failure is None:
        resumed = _life(script, "resumed", script.resumed or script.ranks, scratch)
        first = min(resumed[0].losses, default=0)
        resumed[0].restored = first - 1
    return judged((script.area, script.name, script.world), whole, killed, resumed, STEPS)


def _life(script: Script, life: str, size: int, scratch: Path) -> list[Life]:
    folder = scratch / ("whole" if life == "undisturbed" else "checkpoints")
    logs = [scratch / f"{life}-{rank}.log" for rank in range(size)]
    given = _environment(size, folder, PAUSE_SECONDS[life], "9" if life == "resumed" else "0")
    command = [sys.executable, "-W", "ignore", str(SCRIPTS / script.file)]
    ranks = []
    for rank, log in enumerate(logs):
        with log.open("w") as out:
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if size > 1 else {}
            ranks.append(subprocess.Popen(command, env=given | own, stdout=out, stderr=out, cwd=scratch))
    deadline = time.monotonic() + LIFE_SECONDS
    try:
        while any(p.poll() is None for p in ranks) and time.monotonic() < deadline:
            if life == "killed" and _may_be_killed(logs[0], folder):
                for process in ranks:
                    process.send_signal(signal.SIGKILL)
            if any(p.poll() not in (None, 0, -signal.SIGKILL) for p in ranks):
                deadline = min(deadline, time.monotonic() + 15.0)
            time.sleep(0.02)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    wanted = -signal.SIGKILL if life == "killed" else 0
    found = [_read(log, process.returncode, wanted) for log, process in zip(logs, ranks, strict=True)]
    if life == "killed" and max(found[0].losses, default=0) >= STEPS:
        found[0].failure = ("silence", "it ended before it was killed")
    return found


def _environment(size: int, folder: Path, pause: str, seed: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SUREFOOT_")}
    kept |= {"SEED": seed, "CHECKPOINTS": str(folder), "STEPS": str(STEPS), "PAUSE": pause, "OMP_NUM_THREADS": "1"}
    kept |= {"HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "1", "CUDA_VISIBLE_DEVICES": ""}
    if size > 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            kept |= {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    return kept


def _may_be_killed(log: Path, folder: Path) -> bool:
    """It has trained for a while, and something is whole in its folder."""
    return max(_read(log, None, None).losses, default=0) >= KILLED_BEHIND and any(folder.glob("*/newest.json"))


def _read(log: Path, code: int | None, wanted: int | None) -> Life:
    life = Life()
    text = log.read_text(errors="replace")
    for words in (line.split() for line in text.splitlines(keepends=False)):
        if len(words) == 3 and words[0] == "step":
            life.losses[int(words[1])] = float.fromhex(words[2])
    if code != wanted:
        errors = [line for line in text.splitlines() if "Error: " in line or "Mismatch: " in line]
        last = errors[-1] if errors else f"it ended with {code}"
        life.failure = (
            "ours" if last.startswith("surefoot.errors.") else "other",
            last.removeprefix("surefoot.errors."),
        )
    return life


CASES = (
    Script("framework", "transformers Trainer, two batches a step", "hf_trainer.py"),
    Script("framework", "transformers Trainer, two batches a step", "hf_trainer.py", ranks=2, resumed=3),
    Script("framework", "Lightning, with a scheduler", "lightning_fit.py"),
    Script("average", "Lightning WeightAveraging, validated after every step", "lightning_ema.py"),
    Script("framework", "Accelerate, two batches a step", "accelerate_loop.py"),
    Script("framework", "Accelerate, two batches a step", "accelerate_loop.py", ranks=2, resumed=3),
    Script("framework", "Accelerate, a loader that it prepared", "accelerate_prepared.py"),
    Script("framework", "a loop that draws its next batch before the step ends", "draws_ahead.py"),
)
