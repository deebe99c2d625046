"""The tool that brings kind up: what it reads of other programs, and the runtime where root may not raise limits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.kind import task_pid
from images import runtime
from kind.node_image import image_names

TASKS = """TASK                PID     STATUS
aaa                 101     RUNNING
bbb                 102     STOPPED
"""


@pytest.mark.parametrize(("container", "pid"), [("aaa", 101), ("bbb", None), ("ccc", None)])
def test_a_containers_first_process_is_read_of_the_tasks_that_run(container: str, pid: int | None) -> None:
    assert task_pid(TASKS, container) == pid


def test_images_are_found_by_component() -> None:
    listed = (
        "registry.k8s.io/kube-proxy:v1.35.4\nregistry.k8s.io/coredns/coredns:v1.13.1\nregistry.k8s.io/pause:3.10.1\n"
    )
    assert image_names(listed) == {
        "kube-proxy": "registry.k8s.io/kube-proxy:v1.35.4",
        "coredns": "registry.k8s.io/coredns/coredns:v1.13.1",
        "pause": "registry.k8s.io/pause:3.10.1",
    }


@pytest.mark.parametrize(("bounding", "lacking"), [("000001ffffffffff", False), ("0000003ffeffffff", True)])
def test_the_capability_is_read_of_the_bounding_set(bounding: str, lacking: bool) -> None:
    assert runtime.is_lacking(f"CapEff:\t0000000000000000\nCapBnd:\t{bounding}\n") is lacking


PROCESS = {
    "args": ["sh"],
    "oomScoreAdj": -999,
    "rlimits": [{"type": "RLIMIT_NOFILE", "hard": 1, "soft": 1}],
    "capabilities": {"bounding": ["CAP_CHOWN", "CAP_SYS_RESOURCE"], "effective": ["CAP_SYS_RESOURCE"]},
}


@pytest.mark.parametrize("verb", ["create", "exec"])
def test_a_container_is_asked_for_without_what_needs_the_capability(tmp_path: Path, verb: str) -> None:
    runc, program = tmp_path / "runc", tmp_path / "runtime"
    runc.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    runc.chmod(0o755)
    text = runtime.PROGRAM.format(python=sys.executable, capability=runtime.CAPABILITY, runc=runc)
    program.write_text(text)
    program.chmod(0o755)
    config, process = tmp_path / "config.json", tmp_path / "process.json"
    config.write_text(json.dumps({"ociVersion": "1.0", "process": PROCESS}))
    process.write_text(json.dumps(PROCESS))
    told = ["--bundle", str(tmp_path)] if verb == "create" else ["--process", str(process)]
    command = [str(program), "--root", "/r", verb, *told, "name"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30, env=os.environ)
    assert done.stdout.split() == command[1:], "runc is asked what was asked"
    found = json.loads(config.read_text())["process"] if verb == "create" else json.loads(process.read_text())
    assert found == {"args": ["sh"], "capabilities": {"bounding": ["CAP_CHOWN"], "effective": []}}
