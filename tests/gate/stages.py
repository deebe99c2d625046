"""Declares the stages of `make test` and `make test-nightly`, and the lanes that order them.

The cluster lane and the compute lane start at once. The cluster lane mostly waits, for pods and leases; the compute lane
uses the CPU time that this leaves, at low priority, so that no test of the cluster misses a deadline. The tests with
real trainers and servers measure time; they start when both lanes have ended and run alone.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "gate"
PYTHON = sys.executable
BIN = Path(sys.executable).parent
WORKERS = int(os.environ.get("WORKERS") or os.cpu_count() or 2)
LOW_PRIORITY = (PYTHON, "-m", "support.low_priority")
SLOWEST = ("--durations=15", "--durations-min=5")


@dataclass(frozen=True, slots=True)
class Stage:
    """One command of a lane; `name` is also the name of its log in build/gate."""

    name: str
    command: tuple[str, ...]
    yields: bool = False
    """Whether it leaves processor time to the stages beside it."""
    why_nightly: str = ""
    """Of stages that only the nightly run has: what they add to the gate."""


@dataclass(frozen=True, slots=True)
class Lane:
    """Stages that follow one another; `after` names lanes that must have ended before."""

    name: str
    stages: tuple[Stage, ...]
    after: frozenset[str] = field(default_factory=frozenset)


def _pytest(
    name: str,
    *paths: str,
    workers: int = WORKERS,
    dist: str = "worksteal",
    marker: str = "not nightly",
    options: tuple[str, ...] = (),
) -> tuple[str, ...]:
    command = [str(BIN / "pytest"), *SLOWEST, "-m", marker, f"--junitxml={BUILD / f'{name}.xml'}", *options]
    if workers:
        command += ["-n", str(workers), "--dist", dist]
    return (*command, *paths)


def _cluster(
    name: str,
    *paths: str,
    marker: str = "not nightly",
    options: tuple[str, ...] = (),
    nodes: tuple[str, ...] = (),
) -> tuple[str, ...]:
    tests = _pytest(name, *paths, workers=0, marker=marker, options=options)
    return (PYTHON, "-m", "cluster", "run", *nodes, "--", *tests)


GATE = (
    Lane(
        "cluster",
        (
            Stage("s3-server", (PYTHON, "-m", "support.servers.s3_server")),
            Stage("cluster-programs", (PYTHON, "-m", "cluster", "build")),
            Stage("cluster", _cluster("cluster", "tests/cluster", options=("--ignore=tests/cluster/test_tool.py",))),
        ),
    ),
    Lane(
        "compute",
        (
            Stage("format", (str(BIN / "ruff"), "format", "--check", "."), yields=True),
            Stage("lint", (str(BIN / "ruff"), "check", "."), yields=True),
            Stage("types", (str(BIN / "mypy"),), yields=True),
            Stage("imports", (str(BIN / "lint-imports"),), yields=True),
            Stage("pure", _pytest("pure", "tests/pure"), yields=True),
            Stage("chart", _pytest("chart", "tests/chart", dist="loadscope"), yields=True),
            Stage("simulation", _pytest("simulation", "tests/simulator"), yields=True),
        ),
    ),
    Lane(
        "servers",
        (
            # real trainers wait more than they compute, so one process more than there are cores
            Stage("contract", _pytest("contract", "tests/contract", workers=WORKERS + 1, dist="loadscope")),
            Stage(
                "integration",
                _pytest("integration", "tests/integration", "tests/gpu", workers=WORKERS + 1, dist="loadscope"),
            ),
        ),
        after=frozenset({"cluster", "compute"}),
    ),
)


def _module(*words: str) -> tuple[str, ...]:
    return (PYTHON, "-m", *words)


NIGHTLY = (
    Lane(
        "nightly",
        (
            Stage(
                "nightly-pure",
                _pytest(
                    "nightly-pure",
                    "tests/pure",
                    marker="nightly or not nightly",
                    options=("--hypothesis-profile=nightly",),
                ),
                why_nightly="2,000 examples of each property; long rows",
            ),
            Stage(
                "nightly-simulation",
                _pytest("nightly-simulation", "tests/simulator", marker="nightly"),
                why_nightly="every mutation that a test of the simulator names",
            ),
            Stage(
                "nightly-contract",
                _pytest("nightly-contract", "tests/contract", workers=WORKERS + 1, dist="loadscope", marker="nightly"),
                why_nightly="the rows of contract matrices",
            ),
            Stage(
                "nightly-integration",
                _pytest(
                    "nightly-integration",
                    "tests/integration",
                    workers=WORKERS + 1,
                    dist="loadscope",
                    marker="nightly",
                    options=("--timeout=1200",),
                ),
                why_nightly="the rows of integration matrices, and longer runs",
            ),
            Stage(
                "nightly-chart",
                _pytest("nightly-chart", "tests/chart", dist="loadscope", marker="nightly"),
                why_nightly="the variants of delivery",
            ),
            Stage(
                "nightly-programs",
                (PYTHON, "-m", "cluster", "build", "--nightly"),
                why_nightly="Kueue, which only nightly tests need",
            ),
            Stage(
                "cluster-tool",
                _cluster(
                    "cluster-tool",
                    "tests/cluster/test_tool.py",
                    marker="nightly or not nightly",
                    nodes=("--nodes", "0"),
                ),
                why_nightly="the tests of the tool that makes a cluster",
            ),
            Stage(
                "nightly-cluster",
                _cluster(
                    "nightly-cluster",
                    "tests/cluster",
                    marker="nightly",
                    options=("--ignore=tests/cluster/test_tool.py",),
                ),
                why_nightly="the longer scenarios on a cluster",
            ),
            Stage(
                "frameworks",
                _module("bench", "frameworks"),
                why_nightly="tests of frameworks that `make setup` does not install",
            ),
            Stage("mutations", _module("simulator.mutate"), why_nightly="every rule broken in turn, and who notices"),
            Stage("explore", _module("simulator", "--exhaustive"), why_nightly="every schedule of small scopes"),
            Stage("seeds", _module("simulator", "--seeds", "2000"), why_nightly="2,000 seeds of the simulator"),
            Stage("fuzz", _module("fuzzing", "--documents", "100000"), why_nightly="100,000 hostile documents"),
            Stage("judgement", _module("simulator.judgement", "--faults", "1000"), why_nightly="1,000 verdicts"),
        ),
        after=frozenset({"cluster", "compute", "servers"}),
    ),
)
