"""Runs PyTorch's own tests of DCP with this engine as the storage; writes build/dcp_cases.json and prints a table.

    python -m dcp_cases [--source FOLDER] [--only NAME] [--engine torch]

With each failed test the same is run with torch's own storage. What fails there too says nothing of the engine: such a
test wants CUDA, or a torch of the release it belongs to.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import torch

from dcp_cases.port import asks_a_storage, cases, ported
from dcp_cases.source import VERSION, NoSource, cached

FILE_SECONDS = 1800.0
TEST_SECONDS = "180"
"""How long torch lets the ranks of one test run before it takes them for hung."""

Row = dict[str, str]


def main(argv: list[str]) -> int:
    options = _options(argv)
    try:
        folder = options.source or cached()
    except NoSource as problem:
        print(problem, file=sys.stderr)
        return 2
    told: list[Row] = []
    for file in cases(folder):
        told += _rows_of(file, folder, options)
        _write(told, options)  # after each: whoever ends a long run has what was run
    for row in told:
        print(f"{row['result']:<10} {row['file']}::{row['test']}  {row['why']}")
    counts = _counts(told)
    print(", ".join(f"{count} {result}" for result, count in counts.items()))
    return 1 if counts.get("failed") else 0


def _write(rows: list[Row], options: argparse.Namespace) -> None:
    report = {"tests_of": str(options.source) if options.source else VERSION, "torch": torch.__version__}
    options.report.parent.mkdir(parents=True, exist_ok=True)
    options.report.write_text(json.dumps({**report, "counts": _counts(rows), "rows": rows}, indent=1) + "\n")


def _counts(rows: list[Row]) -> dict[str, int]:
    results = [row["result"] for row in rows]
    return {result: results.count(result) for result in sorted(set(results))}


def _options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="dcp_cases", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--source", type=Path, help="test/distributed/checkpoint of a checkout of PyTorch")
    parser.add_argument("--only", default="", help="files whose name has this in it")
    parser.add_argument("--tests", default="", help="tests that pytest's -k names")
    parser.add_argument("--engine", choices=("surefoot", "torch"), default="surefoot")
    parser.add_argument("--report", type=Path, default=Path("build/dcp_cases.json"))
    return parser.parse_args(argv)


def _rows_of(file: Path, folder: Path, options: argparse.Namespace) -> list[Row]:
    name = str(file.relative_to(folder))
    if options.only not in name:
        return []
    text = file.read_text()
    if not asks_a_storage(text):
        return [_row(name, "*", options.engine, "no storage", "tries DCP's planning or dictionaries, asks no storage")]
    rows = _run(file, name, options.engine, options.tests)
    failed = [r["test"].rpartition(".")[2] for r in rows if r["result"] == "failed"]
    if failed and options.engine == "surefoot":
        control = {r["test"]: r["result"] for r in _run(file, name, "torch", " or ".join(failed))}
        for row in rows:
            if (row["result"], control.get(row["test"])) == ("failed", "failed"):
                row["result"] = "fails with torch's own storage too"
    return rows


def _run(file: Path, name: str, engine: str, which: str) -> list[Row]:
    """One file in a pytest of its own; a rank that hangs is ended by torch's own limit."""
    with tempfile.TemporaryDirectory(prefix="surefoot-dcp-") as scratch:
        work = Path(scratch)
        (work / file.name).write_text(ported(file.read_text()))
        (work / "shim.py").write_text((Path(__file__).parent / "shim.py").read_text())
        (work / "tmp").mkdir()
        environment = {k: v for k, v in os.environ.items() if not k.startswith("SUREFOOT_")} | {
            "DCP_ENGINE": engine, "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": TEST_SECONDS, "OMP_NUM_THREADS": "1",
            "TMPDIR": str(work / "tmp"), "CUDA_VISIBLE_DEVICES": "",
        }  # fmt: skip
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml=out.xml", file.name]
        command += ["-k", which] if which else []
        print(f"{name} ({engine})", file=sys.stderr, flush=True)
        try:
            ended = subprocess.run(
                command, check=False, cwd=work, env=environment, timeout=FILE_SECONDS, capture_output=True, text=True
            )
        except subprocess.TimeoutExpired:
            return [_row(name, "*", engine, "failed", f"no end within {FILE_SECONDS:.0f} s")]
        if not (work / "out.xml").exists():
            return [_row(name, "*", engine, "failed", (ended.stdout + ended.stderr).strip()[-300:])]
        return _read(work / "out.xml", name, engine)


def _read(report: Path, name: str, engine: str) -> list[Row]:
    rows = []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        test = f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}"
        problem = next((case.find(kind) for kind in ("failure", "error") if case.find(kind) is not None), None)
        skipped = case.find("skipped")
        if problem is not None:
            rows.append(_row(name, test, engine, "failed", _last_error(problem)))
        elif skipped is not None:
            rows.append(_row(name, test, engine, "skipped", skipped.get("message") or ""))
        else:
            rows.append(_row(name, test, engine, "passed", ""))
    return rows


def _last_error(problem: ElementTree.Element) -> str:
    """The line that names the error: of the rank that raised, where it was one."""
    lines = [line.strip() for line in (problem.text or "").splitlines()]
    named = [line.removeprefix("E").strip() for line in lines if "Error:" in line or "Exception:" in line]
    return (named[-1] if named else problem.get("message") or "")[:300]


def _row(file: str, test: str, engine: str, result: str, why: str) -> Row:
    return {"file": file, "test": test, "engine": engine, "result": result, "why": why}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
