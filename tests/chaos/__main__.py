"""`PYTHONPATH=tests python -m chaos --runs 20 --seed 1`: real trainings under random kills and stops, held against an undisturbed one.

Writes build/chaos.json after each run, and leaves out the seeds that are in it already: cut off, it goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from chaos.judge import judge, sentence_of
from chaos.strikes import Strike, Striker, draw
from support.local_run import LOOK_SECONDS, Job, LocalRun, faults, running

PROGRAM = Path(__file__).with_name("trainer.py")
STEPS = 320
PACE_SECONDS = 0.05
STRIKES = 14
STEP_SECONDS = 120.0
"""No step for so long, though nothing is stopped: it hangs."""
PATIENT = {"runPolicy": {"backoffLimit": 1000}, "failurePolicy": {"maxNoProgressRestarts": 1000}}
AGAIN = {"onTotalLoss": "Restart"}
"""Whoever kills a trainer ten times does what a broken program does: no budget shall end the run for it. Two nodes that
are struck at once may take every copy with them: the run then begins again, and is held against the other all the same."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="chaos", description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1, help="of the first run; each further one has the next")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--strikes", type=int, default=STRIKES, help="of each run")
    parser.add_argument("--report", type=Path, default=Path("build/chaos.json"))
    given = parser.parse_args(arguments)
    given.report.parent.mkdir(parents=True, exist_ok=True)
    known = json.loads(given.report.read_text())["runs"] if given.report.exists() else []
    runs = {run["seed"]: run for run in known if run["steps"] == given.steps and run["strikes"] == given.strikes}
    for seed in range(given.seed, given.seed + given.runs):
        if seed not in runs:
            runs[seed] = one(seed, given.steps, given.strikes)
            _write(given.report, runs)
        _say(runs[seed])
    mine = [runs[seed] for seed in range(given.seed, given.seed + given.runs)]
    wrong = [run for run in mine if run["wrong"]]
    kinds = Counter(kind for run in mine for kind in run["struck"])
    print(f"{len(mine)} runs, {sum(kinds.values())} strikes {dict(sorted(kinds.items()))}: "
          f"{sum(run['lost'] or 0 for run in mine)} samples lost, {sum(run['repeated'] or 0 for run in mine)} repeated, "
          f"{len(wrong)} runs with something wrong; {given.report}")  # fmt: skip
    return 1 if wrong else 0


def _say(run: dict[str, Any]) -> None:
    wrong = f"WRONG: {run['wrong']} (notes and logs in {run['folder']})" if run["wrong"] else "as undisturbed"
    print(
        f"seed {run['seed']}: {len(run['struck'])} strikes, {run['epochs']} epochs, {run['seconds']:.0f} s: {wrong}",
        flush=True,
    )


def _write(report: Path, runs: dict[int, dict[str, Any]]) -> None:
    scratch = report.with_suffix(".new")
    scratch.write_text(json.dumps({"runs": [runs[seed] for seed in sorted(runs)]}, indent=1))
    scratch.replace(report)


def one(seed: int, steps: int, strikes: int) -> dict[str, Any]:
    """One run with its judgement. Its folder stays where something is wrong."""
    rng = random.Random(seed)
    workers = rng.choice((2, 3, 3))
    drawn = draw(rng, strikes, steps)
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    alone = folder / "alone"
    alone.mkdir()
    subprocess.run([sys.executable, str(PROGRAM), str(steps), str(alone), "--alone"], check=True, timeout=300)
    persistent = {"uri": f"file://{folder}/tier", "intervalSteps": 40} if rng.random() < 0.5 else None
    job = Job(steps, workers, elastic=(1, workers), trainer=("--pace", str(PACE_SECONDS)), program=PROGRAM,
              persistent=persistent, policy=AGAIN, spec=PATIENT)  # fmt: skip
    # drawn apart: what a seed did before nodes had several it does still
    servers = random.Random(f"servers {seed}").choice((1, 1, 2))
    nodes = [f"node:{rng.randrange(workers)}@step={s.step},for={s.seconds:.1f}" for s in drawn if s.kind == "node"]
    began = time.monotonic()
    found, told, struck, wrong = None, (0, 0), [], ""
    with running(folder, job, *faults(*nodes), "--servers", str(servers)) as run:
        striker = Striker(run, rng)
        try:
            _disturb(run, striker, [s for s in drawn if s.kind != "node"])
            report = run.finish().report
            struck = [*striker.struck, *["kill node"] * len(report["faults"])]
            told = report["samples_lost"], report["samples_repeated"]
            found = judge(folder, alone, steps)
            wrong = sentence_of(found, steps) or ""
        except AssertionError as failed:
            wrong, struck = str(failed).strip()[:2000], striker.struck
        finally:
            striker.thaw(everybody=True)
    if not wrong and told != (0, 0):
        wrong = f"the report tells of {told[0]} samples lost and {told[1]} repeated, and none was"
    left = run.processes()
    wrong = wrong or (f"processes {left} were left behind" if left else "")
    if not wrong:
        shutil.rmtree(folder)
    return {
        "seed": seed, "steps": steps, "strikes": strikes, "workers": workers, "persistent": persistent is not None,
        "servers": servers,
        "struck": struck, "lost": found.lost if found else None, "repeated": found.repeated if found else None,
        "epochs": found.epochs if found else None,
        "loss_difference": found.loss_difference if found else None,
        "parameter_difference": found.parameter_difference if found else None,
        "seconds": round(time.monotonic() - began, 1), "wrong": wrong, "folder": str(folder) if wrong else "",
    }  # fmt: skip


def _disturb(run: LocalRun, striker: Striker, strikes: list[Strike]) -> None:
    """Strikes whenever a strike's step is there, until the training has ended. Complains where no step comes."""
    waiting, seen, at = list(strikes), 0, time.monotonic()
    while run.process.poll() is None:
        striker.thaw()
        run.events += run.progress.poll()
        step = run.progress.finished_step
        if step > seen or striker.holding:
            seen, at = step, time.monotonic()
        assert time.monotonic() < at + STEP_SECONDS, (
            f"no step for {STEP_SECONDS:g} s after step {seen}: {run.status.message}"
        )
        if waiting and step >= waiting[0].step:
            strike = waiting.pop(0)
            time.sleep(strike.later)
            striker.strike(strike)
        time.sleep(LOOK_SECONDS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
