"""`python -m bench checkpoint [--quick] [--only SYSTEM …] [--out FOLDER]`: runs the sections, writes checkpoint.json and .svg."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path

from bench.quiet import refusal
from bench.settings import FULL, QUICK
from bench.systems import SYSTEMS

SHARED_MEMORY = "/dev/shm"
EVERYWHERE = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Compute threads that wait do not spin: they would take cores from whatever saves."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench checkpoint", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions of less state: under five minutes")
    parser.add_argument("--only", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS))
    parser.add_argument("--although-busy", action="store_true", help="beside other work; the result says so")
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    options = parser.parse_args()
    if why := refusal(os.getloadavg()[0], options.although_busy):
        raise SystemExit(why)
    os.environ |= EVERYWHERE
    from bench.run import measured  # imports torch, whose library of compute threads reads the environment then

    with tempfile.TemporaryDirectory(prefix="surefoot-bench-", dir=SHARED_MEMORY) as folder:
        found = measured(QUICK if options.quick else FULL, options.only, folder, options.although_busy)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "checkpoint.json").write_text(json.dumps(found, indent=1) + "\n")
    from bench import picture  # last: what it lacks must not lose what was measured

    picture.draw(found["figures"], options.out / "checkpoint.svg")
    print(json.dumps({key: found[key] for key in ("summary", "spreads")}, indent=1))


if __name__ == "__main__":
    main()
