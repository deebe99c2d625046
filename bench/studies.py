"""Lists every benchmark and study of the project: its name, the command behind it, and what it measures.

`python -m bench NAME [ARGUMENTS]` runs one. A benchmark measures speed or memory; a study runs the product against many
faults, libraries or documents and writes what happened.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Study:
    """One benchmark or study."""

    commands: tuple[tuple[str, ...], ...]
    """Arguments of the interpreter, one tuple a command; the user's arguments follow the last."""
    text: str
    """What it measures, where it writes, how long it takes."""
    needs: str = ""
    """The make target's stamp that installs its libraries; empty: what `make setup` installs."""


def _module(name: str, *arguments: str) -> tuple[tuple[str, ...], ...]:
    return (("-m", name, *arguments),)


def _on_cluster(*commands: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    return tuple(("-m", "cluster", "run", "--", "PYTHON", *command) for command in commands)


_LINES = "build/scale-lines"

BENCHMARKS: dict[str, Study] = {
    "checkpoint": Study(
        _module("bench.checkpoint"),
        "saves and restores beside seven peers on a quiet machine; --quick: under five minutes (build/bench/checkpoint.json)",
        "bench",
    ),
    "listing": Study(
        _module("bench.listing", "--out", "build/bench/listing.json"),
        "16,384 manifests listed through an S3 of 50 ms; three minutes (build/bench/listing.json)",
    ),
    "small-tensors": Study(
        _module("bench.small_tensors", "--out", "build/bench/small_tensors.json"),
        "10,000 tensors of 8 KiB: prepare, stall and restore; a minute (build/bench/small_tensors.json)",
    ),
    "gpu": Study(
        _module("bench.gpu", "--out", "build/bench/gpu.json"),
        "saves and restores on a CUDA device beside torch.save and DCP; two minutes (build/bench/gpu.json)",
    ),
    "frozen": Study(
        _module("bench.frozen_weights", "--out", "build/bench/frozen_weights.json"),
        "bytes that memory servers receive of a state that is 95 % frozen; seconds (build/bench/frozen_weights.json)",
    ),
    "servers": Study(
        _module("bench.node_servers"), "eight ranks of one agent to one, two and four Redis servers a node"
    ),
    "link": Study(
        _module("bench.paced_link"),
        "steps of a training whose saves share a slow link; Linux, root; two minutes (build/paced_link.json)",
    ),
    "data": Study(
        _module("bench.loading", "--out", "build/bench/loading.json"),
        "ElasticLoader, ElasticSampler and ElasticStream beside torch's DataLoader; minutes (build/bench/loading.json)",
    ),
    "heartbeat": Study(
        _module("bench.heartbeats", "--out", "build/bench/heartbeats.json"),
        "CPU that one heartbeat costs the operator; seconds (build/bench/heartbeats.json)",
    ),
    "indexes": Study(
        _module("bench.holder_indexes"), "time of a restoring rank that asks 256 memory servers for one checkpoint"
    ),
    "visits": Study(
        _module("bench.holder_visits"), "cost to the operator of visiting the memory servers of many jobs and nodes"
    ),
    "many-jobs": Study(
        _module("bench.many_jobs"),
        "a replica begins to lead 1,000 jobs of 10 workers, API server in memory; a minute",
        "bench",
    ),
    "scale": Study(
        _module("bench.scale", "--out", "build/scale.json", "--picture", "build/scale.svg"),
        "what a job of 10 to 2,000 workers costs the operator: plans, messages, status, TLS (build/scale.json)",
        "bench",
    ),
    "scale-cluster": Study(
        (
            *_on_cluster(
                ("-m", "cluster.scenarios.fleet"),
                ("-m", "cluster.scenarios.many_lines", "--jobs", "50", "--workers", "40"),
                ("-m", "cluster.scenarios.many_lines", "--jobs", "75", "--workers", "40", "--shards", "3"),
            ),
            (
                *("-m", "bench.scale", "--cluster", "build/scale-cluster.json"),
                *("--beside", f"{_LINES}-1.json", f"{_LINES}-3.json"),
                *("--out", "build/scale.json", "--picture", "build/scale.svg"),
            ),
        ),
        "the same with 1,000 jobs on a real API server with simulated nodes (kwok); 45 minutes (build/scale.json)",
        "bench",
    ),
    "cluster": Study(
        _on_cluster(("-m", "cluster.scenarios.bench")),
        "medians of five of the main faults, stock Kubernetes beside them; 25 minutes (build/cluster.json)",
    ),
}

STUDIES: dict[str, Study] = {
    "simulate": Study(
        _module("simulator"),
        "--seeds 2000: random faults against the real decisions; --replay SEED: one, with its trace",
    ),
    "explore": Study(_module("simulator", "--exhaustive"), "every schedule of small scopes, to the end"),
    "mutate": Study(
        _module("simulator.mutate"),
        "each rule of the protocol broken in turn: which check notices (build/mutations.json)",
    ),
    "week": Study(
        _module("simulator.week_report"),
        "a week of a job on 2,048 nodes under Llama 3's faults (build/week.json)",
        "bench",
    ),
    "judgement": Study(
        _module("simulator.judgement"),
        "--faults 1000: hangs, faulty nodes, stragglers: who is named (build/judgement.json)",
    ),
    "chaos": Study(
        _module("chaos"), "--runs 20 --seed 1: real trainings under random kills and stops (build/chaos.json)"
    ),
    "fuzz": Study(
        _module("fuzzing"), "--documents 100000: TrainingJobs that nobody would write; each is understood or refused"
    ),
    "soak": Study(
        _on_cluster(("-m", "cluster.scenarios.soak")),
        "--minutes 30 --seed 1: a random fault each half minute on a real Kubernetes (build/soak.json)",
    ),
    "demo-cluster": Study(
        _on_cluster(("-m", "cluster.scenarios.demo")),
        "chart installed, job applied, a node crashed and returned, on a real Kubernetes",
    ),
    "compatibility": Study(
        (
            (
                "-W",
                "ignore",
                "-m",
                "compatibility",
                "--json",
                "build/compatibility.json",
                "--page",
                "docs/compatibility.md",
            ),
        ),
        "other people's libraries, each killed and started again; ten minutes (docs/compatibility.md)",
        "compatibility",
    ),
    "frameworks": Study(
        (
            (
                "-m",
                "pytest",
                "-m",
                "nightly",
                "tests/integration/test_framework_examples.py",
                "tests/integration/test_step_log.py",
                "tests/integration/test_finished_runs.py",
                "tests/integration/test_lightning_epochs.py",
                "tests/integration/test_sigterm_frameworks.py",
            ),
        ),
        "examples and loops of transformers, Lightning, Accelerate and torchtitan, killed, ended and started again; 15 minutes",
        "frameworks",
    ),
    "dcp-cases": Study(
        (("-W", "ignore", "-m", "dcp_cases"),),
        "PyTorch's own tests of its distributed checkpoints on this engine; --only planner (build/dcp_cases.json)",
        "compatibility",
    ),
    "observability": Study(
        _module("observability"),
        "every PromQL of dashboards and alerts over a run with a failure (build/observability.json, build/dashboards.html)",
    ),
}
