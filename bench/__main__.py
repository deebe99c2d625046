"""`python -m bench NAME [ARGUMENTS]`: runs a benchmark or study of bench/studies.py; without a name it lists them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from bench.studies import BENCHMARKS, STUDIES, Study

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    names = {**BENCHMARKS, **STUDIES}
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print(_listing())
        return 0
    if name not in names:
        print(f"there is no benchmark or study {name!r}; `python -m bench` lists them", file=sys.stderr)
        return 2
    return _run(names[name], arguments)


def _listing() -> str:
    lines = ["python -m bench NAME [ARGUMENTS]", "", "benchmarks:"]
    lines += [f"  {name:16}{study.text}" for name, study in BENCHMARKS.items()]
    lines += ["", "studies:", *(f"  {name:16}{study.text}" for name, study in STUDIES.items())]
    return "\n".join(lines)


def _run(study: Study, arguments: list[str]) -> int:
    """Runs the study's commands in turn; the first that fails ends it with its exit code."""
    if study.needs:
        subprocess.run(["make", f".venv/.{study.needs}"], cwd=ROOT, check=True)
    environment = {**os.environ, "PYTHONPATH": "tests"}
    for number, command in enumerate(study.commands, 1):
        words = [sys.executable if word == "PYTHON" else word for word in command]
        given = arguments if number == len(study.commands) else []
        code = subprocess.run([sys.executable, *words, *given], cwd=ROOT, env=environment, check=False).returncode
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
