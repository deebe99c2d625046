"""`surefoot local` as a test sees it: a job of tiny real trainers, watched while it runs, and what it came to.

`run` waits for the end; `running` hands the run out while it lasts, for tests that strike by themselves. Both see to it
that nothing of the run is left, whatever happens.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from support.machine_speed import scaled
from surefoot.errors import TierError
from surefoot.linux_process import (
    ProcessIdentity,
    find_by_environment,
    identity_of,
    is_alive,
    send_signal,
    state_of,
)
from surefoot.memory_server import scripts
from surefoot.memory_server.client import MemoryServerClient, MemoryServerIndex
from surefoot.memory_server.connection import Credentials, RespConnection
from surefoot.memory_server.provisioning import MemoryServerAdmin
from surefoot.protocol.identities import MemoryServerEndpoint, MemoryServerInstance, RankSave
from surefoot_operator.api.status import JobStatus, Member
from surefoot_operator.cli.local.progress import RunProgress
from surefoot_operator.cli.local.run_event import RunEvent
from surefoot_operator.platforms.local.local_nodes import is_trainer
from surefoot_operator.platforms.local.platform import RunFolderStore
from surefoot_operator.platforms.local.run_folder import NodeRecord, RunFolder, parse_record, read_json

SECONDS = scaled(240)
"""Limit of a whole run; a busy machine takes many times what a quiet one does."""

WAIT_SECONDS = scaled(90.0)
LOOK_SECONDS = 0.02

TRAINER = Path(__file__).with_name("programs") / "local_trainer.py"


@dataclass(frozen=True, slots=True)
class Job:
    """What is run: `elastic` (min, max) or a fixed size; `gates` are the steps at which training waits for the test."""

    steps: int
    workers: int = 2
    ranks: int = 1
    """Of each worker."""
    elastic: tuple[int, int] | None = None
    interval_steps: int | None = 5
    """None: `memory` says how often, in another way."""
    memory: Mapping[str, Any] = field(default_factory=dict)
    persistent: Mapping[str, Any] | None = None
    policy: Mapping[str, Any] = field(default_factory=dict)
    """Of `checkpoint`, beside the tiers."""
    gates: tuple[int, ...] = ()
    trainer: tuple[str, ...] = ()
    program: Path = TRAINER
    """Takes STEPS FOLDER, what `trainer` says, and --gates."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Of `surefoot local` itself, beside ours."""
    spec: Mapping[str, Any] = field(default_factory=dict)
    """What else stands in the job's spec."""

    def document(self, folder: Path) -> dict[str, Any]:
        often = {} if self.interval_steps is None else {"intervalSteps": self.interval_steps}
        memory = {**often, "replicas": 2, **self.memory}
        checkpoint: dict[str, Any] = {"memory": memory, **self.policy}
        if self.persistent is not None:
            checkpoint["persistent"] = dict(self.persistent)
        command = ["python", str(self.program), str(self.steps), str(folder), *self.trainer]
        command += ["--gates", ",".join(map(str, self.gates))]
        spec: dict[str, Any] = {
            "replicas": self.workers,
            "nprocPerNode": self.ranks,
            "checkpoint": checkpoint,
            "template": {"spec": {"containers": [{"name": "trainer", "command": command}]}},
            **self.spec,
        }
        if self.elastic is not None:
            spec["elasticPolicy"] = dict(zip(("minReplicas", "maxReplicas"), self.elastic, strict=True))
        return {"apiVersion": "surefoot.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "j"}, "spec": spec}


@dataclass(frozen=True, slots=True)
class Result:
    """How it ended: the report, everything that was said, and the events in order."""

    report: dict[str, Any]
    said: str
    events: tuple[RunEvent, ...]

    def told(self, reason: str) -> list[str]:
        return [event.message for event in self.events if event.reason == reason]


@dataclass(frozen=True, slots=True)
class Holder:
    """One node's Redis, through the administrator's account."""

    node: str
    host: str
    port: int
    password: str = field(repr=False)

    def index(self, job: str) -> MemoryServerIndex:
        """Fence and entries as of one moment."""
        admin = MemoryServerAdmin(self.host, self.port, self.password)
        try:
            here = MemoryServerEndpoint(
                MemoryServerInstance(self.node, admin.read_instance()), self.host, self.port, self.node
            )
        finally:
            admin.close()
        client = MemoryServerClient(here, job, Credentials("", self.password))
        try:
            return client.read_index()
        finally:
            client.close()

    def flip_a_byte(self, job: str, save: RankSave) -> None:
        """In the middle of the save's first chunk."""
        name = scripts.chunk_key(job, save, 0)
        middle = int(self.call("STRLEN", name)) // 2
        byte = self.call("GETRANGE", name, middle, middle)
        self.call("SETRANGE", name, middle, bytes([byte[0] ^ 1]))

    def call(self, *command: Any) -> Any:
        wire = RespConnection(self.host, self.port, Credentials("", self.password), 2.0)
        try:
            return wire.call(*command)
        finally:
            wire.close()


class LocalRun:
    """A run that is under way."""

    def __init__(self, folder: Path, job: Job, arguments: Sequence[str]) -> None:
        self.folder = folder
        self.job = job
        self.run_folder = RunFolder((folder / "run").resolve())
        self.progress = RunProgress(self.run_folder)
        self.events: list[RunEvent] = []
        self._report = folder / "report.json"
        self._output = folder / "said.txt"
        path = folder / "job.json"
        path.write_text(json.dumps(job.document(folder)))
        # as from a terminal: a shell that runs the tests in the background has its children ignore SIGINT
        command = ["env", "--default-signal=INT", sys.executable, "-m", "surefoot_operator.cli.main"]
        command += [
            "local",
            "-f",
            str(path),
            "--plain",
            "--run-folder",
            str(folder / "run"),
            "--report",
            str(self._report),
            *arguments,
        ]
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **job.environment}
            )

    # ---- watching ---------------------------------------------------------------------------------------------------

    @staticmethod
    def now() -> float:
        """As status tells time."""
        return time.time()

    @property
    def said(self) -> str:
        return self._output.read_text(errors="replace")

    @property
    def uid(self) -> str:
        return RunFolderStore(self.run_folder).read_job().uid

    @property
    def status(self) -> JobStatus:
        return self.progress.status

    def look(self) -> None:
        """Reads what is new; the test fails where the run has ended before its time."""
        ended = self.process.poll() is not None
        self.events += self.progress.poll()
        assert not ended, f"the run ended with {self.process.returncode}:\n{self.said}"

    def wait(self, what: str, condition: Callable[[], bool], seconds: float = WAIT_SECONDS) -> None:
        """Until it holds."""
        deadline = time.monotonic() + seconds
        while True:
            self.look()
            if condition():
                return
            assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}\n{self.said}"
            time.sleep(LOOK_SECONDS)

    def wait_for_step(self, step: int) -> None:
        self.wait(f"step {step}", lambda: self.progress.finished_step >= step)

    def wait_for_epoch(self, epoch: int) -> None:
        """Until it has begun and made a step."""
        self.wait(f"a step of epoch {epoch}", lambda: self.epoch() >= epoch and self.progress.finished_step > 0)

    def told(self, reason: str) -> list[str]:
        return [event.message for event in self.events if event.reason == reason]

    def epoch(self) -> int:
        """Of the committed world; 0 before and between."""
        world = self.status.membership
        return world.generation if world is not None and world.state == "Committed" else 0

    # ---- its holders ------------------------------------------------------------------------------------------------

    def holders(self) -> list[Holder]:
        """Of nodes that live, by name; one that is stopped would only make us wait."""
        found = []
        for path in sorted(self.run_folder.nodes_folder.glob("node-*.json")):
            body = read_json(path)
            record = None if body is None else parse_record(NodeRecord, body)
            for holder in () if record is None else record.servers:
                if record is not None and _answers(ProcessIdentity.parse(holder.life)):
                    found.append(Holder(record.name, holder.host, holder.port, holder.admin_password))
        return found

    def index_of(self, holder: Holder) -> MemoryServerIndex | None:
        """None from one that does not answer, or is not the job's yet."""
        try:
            return holder.index(self.uid)
        except TierError:
            return None

    # ---- doing ------------------------------------------------------------------------------------------------------

    def open_gate(self, step: int) -> None:
        (self.folder / f"gate-{step}").touch()

    def processes(self) -> list[int]:
        return find_by_environment("SUREFOOT_RUN_FOLDER", str(self.run_folder.root))

    def trainers(self) -> dict[int, Path]:
        """Process id -> the log it writes: `.../worker-INDEX-ATTEMPT/epoch-E/rank-R.log`."""
        found = {}
        for pid in self.processes():
            if is_trainer(pid):
                with contextlib.suppress(OSError):  # it ended between the two looks
                    found[pid] = Path(os.readlink(f"/proc/{pid}/fd/1"))
        return found

    def epochs_of_trainers(self) -> list[int]:
        """One for each that runs."""
        return [int(log.parent.name.removeprefix("epoch-")) for log in self.trainers().values()]

    def agent_log(self, index: int) -> str:
        """Of all attempts of this worker."""
        logs = sorted(self.run_folder.logs_folder.glob(f"worker-{index}-*/agent.log"))
        return "".join(log.read_text(errors="replace") for log in logs)

    def node_of_rank(self, rank: int) -> str:
        """Of the world that is committed, with one rank on each worker."""
        assert self.status.membership is not None
        return self.status.membership.members[rank].node

    def members(self) -> tuple[Member, ...]:
        """Of the world that is committed or was last."""
        world = self.status.membership
        return world.members if world is not None else ()

    def operator(self) -> ProcessIdentity:
        """The operator's process, awaited where there is none at this moment."""
        found: list[ProcessIdentity] = []

        def is_there() -> bool:
            named = [pid for pid in self.processes() if _runs(pid, "surefoot_operator.controller.local_operator")]
            found[:] = [life for pid in named if (life := identity_of(pid)) is not None]
            return bool(found)

        self.wait("an operator", is_there)
        return found[0]

    def kill_a_trainer(self) -> None:
        os.kill(min(self.trainers()), signal.SIGKILL)

    def kill_agent(self, member: Member) -> None:
        """With it end its trainers."""
        state = read_json(self.run_folder.worker_state_file(f"j-{member.index}-{member.attempt}"))
        assert state is not None
        assert send_signal(ProcessIdentity.parse(state["life"]), signal.SIGKILL)

    def kill_node(self, member: Member) -> None:
        """Everything on it ends at once, its Redis too."""
        body = read_json(self.run_folder.node_file(member.node))
        assert body is not None
        os.killpg(ProcessIdentity.parse(parse_record(NodeRecord, body).life).pid, signal.SIGKILL)

    def kill_operator(self) -> None:
        """The run starts it again by itself."""
        assert send_signal(self.operator(), signal.SIGKILL)

    def finish(self, code: int = 0) -> Result:
        """Opens every gate and waits for the end, which must leave nothing behind."""
        for step in self.job.gates:
            self.open_gate(step)
        try:
            self.process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the run did not end within {SECONDS} s:\n{self.said}") from None
        self.events += self.progress.poll()
        assert self.process.returncode == code, self.said
        assert self.processes() == []
        assert [path for path in self.run_folder.root.rglob("*") if path.is_socket()] == []
        return Result(json.loads(self._report.read_text()), self.said, tuple(self.events))

    def end(self) -> None:
        """Whatever of it still runs."""
        if self.process.poll() is None:
            self.process.terminate()  # it ends its nodes
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()  # and the kernel ends them
                self.process.wait()


@contextmanager
def running(folder: Path, job: Job, *arguments: str) -> Iterator[LocalRun]:
    """The run while it lasts."""
    run = LocalRun(folder, job, arguments)
    try:
        yield run
    finally:
        run.end()


def run(folder: Path, job: Job, *arguments: str) -> Result:
    """The run from its beginning to its end."""
    with running(folder, job, *arguments) as under_way:
        return under_way.finish()


def faults(*texts: str) -> list[str]:
    """The command line's way of striking."""
    return [part for text in texts for part in ("--fault", text)]


def assert_whole(report: dict[str, Any], steps: int) -> None:
    """It completed, and used every sample once."""
    assert report["outcome"] == "Complete"
    assert (report["samples_lost"], report["samples_repeated"], report["steps"]) == (0, 0, steps)
    assert report["samples_unknown"] == 0
    assert sum(report["seconds"].values()) == pytest.approx(report["age_seconds"], abs=0.1)


def assert_equal(report: dict[str, Any], tolerance: float = 1e-10) -> None:
    """To the undisturbed run."""
    assert report["max_loss_difference"] <= tolerance
    assert report["max_parameter_difference"] <= tolerance


def assert_little_lost(incidents: Sequence[Mapping[str, Any]], interval_steps: int = 5) -> None:
    """Each went back to the newest complete checkpoint, or to the one before while that was being copied."""
    lost = {incident["reason"]: incident["steps_lost"] for incident in incidents}
    assert all(steps < 2 * interval_steps for steps in lost.values()), lost


def _answers(life: ProcessIdentity) -> bool:
    return is_alive(life) and state_of(life.pid) != "T"


def _runs(pid: int, module: str) -> bool:
    try:
        return module.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
