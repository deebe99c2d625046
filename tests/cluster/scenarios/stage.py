"""What all scenarios of a test run share: the chart, the namespace they are watched in, the undisturbed jobs, the running ones."""

from __future__ import annotations

import fcntl
import itertools
import os
import re
import time
from dataclasses import replace
from typing import Any

from cluster import layout
from cluster.engine import Engine
from cluster.scenarios import rows
from cluster.scenarios.installed import Installed, answered
from cluster.scenarios.job import WAIT_SECONDS, Job
from cluster.scenarios.ledger import Account, account
from cluster.scenarios.measuring import Struck
from cluster.scenarios.rows import Row
from cluster.scenarios.shapes import CREDENTIALS, Asked, Shape
from cluster.scenarios.watching import Namespace
from support.machine_speed import scaled
from support.servers import s3_server
from surefoot_operator.api.time_spent import seconds_spent

TOLERANCE = 1e-9
"""float64, other orders of summation where the world's size changed."""
REFERENCE_PACE = 0.004
RESTS_SECONDS = 8.0
RELEASE_SECONDS = scaled(180.0)
JOBS = "/apis/surefoot.dev/v1alpha1"


class Stage:
    """`open`, then scenarios, then `close`, which ends every job that still runs and holds it against the undisturbed one."""

    def __init__(self, engine: Engine, name: str = "scenarios") -> None:
        self.engine = engine
        self.installed = Installed(engine, name)  # jobs of other tests are not ours
        self._was_installed = True
        self.space = Namespace(self.installed.api, name)
        self._undisturbed: dict[Shape, Job] = {}
        self._running: dict[str, Job] = {}
        self._rows: dict[str, list[Row]] = {}
        self._numbers = itertools.count(1)

    def open(self) -> Stage:
        """Waits while another test run has the stage: there is one release of that name, and one namespace."""
        layout.RUNS.mkdir(exist_ok=True)
        self._lock = (layout.RUNS / "stage.lock").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._was_installed = self.installed.is_there()
        self.installed.up()
        self.space.start()
        self.account_for(self.space.name)
        for name in list(self.space.jobs.items):  # of a test run that was killed
            self.installed.api.call("DELETE", f"{JOBS}/namespaces/{self.space.name}/trainingjobs/{name}")
        return self

    def account_for(self, namespace: str) -> None:
        """The secret with which jobs of that namespace reach S3."""
        content = {"AWS_ACCESS_KEY_ID": s3_server.ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": s3_server.SECRET_KEY}
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": CREDENTIALS}, "stringData": content}
        self.installed.api.create(f"/api/v1/namespaces/{namespace}/secrets", secret)

    def asked(self, kind: str, shape: Shape, **told: Any) -> Asked:
        """A job with a name and a folder that no other has."""
        name = f"{kind}-{os.getpid()}-{next(self._numbers)}"
        return Asked(name, shape, layout.RUNS / name, **told)

    def job(self, kind: str, shape: Shape, **told: Any) -> Job:
        """Asked for; removed by `close` at the latest."""
        job = Job(self.space, self.asked(kind, shape, **told), self.installed.facts).ask()
        self._running[job.asked.name] = job
        return job

    def training(self, kind: str, shape: Shape, **told: Any) -> Job:
        """A job of that kind that trains at its full size: the one that runs already, else a new one."""
        for job in self._running.values():
            if job.asked.name.startswith(f"{kind}-") and job.asked.shape == shape and self._is_well(job):
                return job
        job = self.job(kind, shape, **told)
        job.wait("it trains at its full size", lambda: job.trains(shape.workers), 120.0)
        job.wait("its checkpoint is protected", job.is_protected)
        return job

    def _is_well(self, job: Job) -> bool:
        if job.status.phase in ("Complete", "Failed") or job.step > job.asked.shape.steps * 0.8:
            return False
        try:
            job.wait("it trains at its full size", lambda: job.trains(job.asked.shape.workers), 60.0)
        except AssertionError:
            return False
        return True

    def undisturbed(self, shape: Shape) -> Job:
        """The job of that shape that nobody hurt; made once."""
        if shape not in self._undisturbed:
            job = self.job("undisturbed", shape, pace=REFERENCE_PACE, trace=True)
            job.wait("the undisturbed job is complete", lambda: job.status.phase == "Complete", 240.0)
            self.adopt(job)
        return self._undisturbed[shape]

    # ---- what many scenarios do -------------------------------------------------------------------------------------

    def make_well(self) -> None:
        """Every node and daemon runs and is joined; chart and jobs are left as they are."""
        self.engine.up(len(self.installed.facts.node_names))

    def whole_again(self, job: Job, struck: Struck) -> float:
        """Waits until the world has its full size and makes steps; seconds since the fault."""
        whole = job.asked.shape.workers
        job.wait(f"a world of {whole} that trains", lambda: job.trains(whole) and job.epoch > struck.epoch)
        first = job.ledger.first_step_at(job.epoch, whole)
        assert first is not None
        return first - struck.at

    def goes_on(self, job: Job, seconds: float) -> None:
        """For so long the same world makes steps, and never rests longer than a save may take."""
        epoch, until, step, at = job.epoch, time.time() + seconds, job.step, time.time()

        def rests() -> bool:
            nonlocal step, at
            if job.step > step:
                step, at = job.step, time.time()
            assert time.time() - at < RESTS_SECONDS, f"no step for {RESTS_SECONDS} s\n{job.said()}"
            return time.time() > until

        job.wait("the time is over", rests, seconds + WAIT_SECONDS)
        assert job.epoch == epoch, job.said()

    def still(self, job: Job, seconds: float) -> None:
        """For so long trainers make steps, as they write down themselves: the API server may be away."""
        before = job.step
        deadline = time.time() + seconds
        self.space.wait("the time is over", lambda: time.time() > deadline, seconds + WAIT_SECONDS)
        assert job.step > before, f"no step within {seconds} s\n{job.said()}"

    def wait_led(self, job: Job) -> None:
        """Until an operator leads and has written this job's status."""
        at = time.time()
        self.installed.wait_ready()
        job.wait("the status is written again", lambda: self.space.jobs.heard(job.asked.name, at))

    def wait_release(self, job: Job, rounds: set[str | None]) -> None:
        """Until every pod of operator and memory tier is of that release, and the job is as well as before."""
        try:
            job.wait(
                f"every pod is of release {rounds}",
                lambda: answered(lambda: self.installed.rounds() == rounds),
                RELEASE_SECONDS,
            )
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.installed.log_of_operators()}") from error
        self.installed.wait_ready()
        job.wait("its checkpoint is protected", job.is_protected)

    def check_quiet(self, job: Job, scenario: str, struck: Struck) -> None:
        """Operators were replaced and training never felt it."""
        self.wait_led(job)
        job.wait_steps(10)
        row = self.quiet_row(scenario, struck)
        row.notes["CheckpointProtected"] = self.protected_since(job, struck.at)
        self.check(job, row)

    def protected_since(self, job: Job, at: float) -> list[str]:
        """What CheckpointProtected became since then, each change once."""
        found: list[str] = []
        for one in self.space.jobs.heard(job.asked.name, at):
            for condition in one.thing.get("status", {}).get("conditions", []):
                if condition["type"] == "CheckpointProtected" and found[-1:] != [condition["status"]]:
                    found.append(condition["status"])
        return found[found.index("False") :] if "False" in found else []

    def protected_again(self, job: Job, at: float) -> float:
        """Seconds from then until it was True after it had been False."""
        was = False
        for one in self.space.jobs.heard(job.asked.name, at):
            now = next(c["status"] for c in one.thing["status"]["conditions"] if c["type"] == "CheckpointProtected")
            if now == "False":
                was = True
            elif was:
                return one.at - at
        raise AssertionError(f"it was never protected again\n{job.said()}")

    def late_steps(self, job: Job, epoch: int) -> int:
        """Lines of an epoch that were written after the next one had made its first step."""
        job.ledger.look()
        after = min((line.at_seconds for line in job.ledger.all_lines() if line.generation > epoch), default=0.0)
        return sum(line.at_seconds > after for line in job.ledger.lines[epoch])

    def quiet_row(self, scenario: str, struck: Struck) -> Row:
        """Of a fault that training never felt: no incident, the same world."""
        assert struck.incident is None, struck.job.said()
        return Row(scenario, steps_lost=0, worlds=[struck.world, struck.job.world], notes={"undisturbed": True})

    # ---- the undisturbed job ----------------------------------------------------------------------------------------

    def adopt(self, job: Job) -> None:
        """Others are held against this one from now on."""
        job.ledger.look()
        # an elastic job may begin with the workers that are ready first, and grow
        assert {i.kind for i in job.incidents()} <= {"planned"}, f"somebody hurt the undisturbed job\n{job.said()}"
        assert job.ledger.twice() == []
        self._undisturbed[job.asked.shape] = job

    # ---- holding against each other ---------------------------------------------------------------------------------

    def check(self, job: Job, row: Row) -> Row:
        """Every step up to now; writes the row. Its parameters are added when the job has ended."""
        row.result = self.compared(job, job.step)
        self._rows.setdefault(job.asked.name, []).append(row)
        rows.write(row)
        self.assert_equal(row.result, job)
        return row

    def compared(self, job: Job, until: int | None = None) -> Account:
        """Against the undisturbed job of its shape."""
        straight = self.undisturbed(job.asked.shape)
        job.ledger.look()
        found = account(job.ledger, job.lineage(), straight.ledger, straight.lineage(), until)
        final = job.ledger.final()
        if final is None or until is not None:
            return found
        step, mine = final
        other = straight.ledger.traced(step, len(mine))
        return replace(found, max_parameter_difference=max(abs(a - b) for a, b in zip(mine, other, strict=True)))

    def assert_equal(self, found: Account, job: Job) -> None:
        assert (found.samples_lost, found.samples_repeated) == (0, 0), (found, job.said())
        assert job.ledger.twice() == []
        assert found.max_loss_difference <= TOLERANCE, (found, job.said())
        if found.max_parameter_difference is not None:
            assert found.max_parameter_difference <= TOLERANCE, (found, job.said())

    def assert_accounted(self, job: Job) -> None:
        """Every second of a job that has ended is in a category, whoever led meanwhile."""
        status = job.status
        assert status.start_seconds is not None
        assert status.completion_seconds is not None
        age = status.completion_seconds - status.start_seconds
        spent = sum(seconds_spent(status.time_spent, status.completion_seconds).values())
        assert abs(spent - age) < 0.1, (spent, age, status.time_spent)

    def write(self, job: Job, row: Row) -> None:
        """Of a job that has ended."""
        row.result = self.compared(job)
        rows.write(row)
        self.assert_equal(row.result, job)

    def finish(self, job: Job) -> Account:
        """Ends it, compares its parameters too, and writes them into the rows of its scenarios."""
        if job.status.phase != "Complete":
            job.finish()
        found = self.compared(job)
        assert found.max_parameter_difference is not None, "the job left no parameters"
        self.assert_accounted(job)
        for row in self._rows.pop(job.asked.name, []):
            row.result = found
            rows.write(row)
        self.assert_equal(found, job)
        self.remove(job)
        return found

    def remove(self, job: Job) -> None:
        self._running.pop(job.asked.name, None)
        self._rows.pop(job.asked.name, None)
        job.remove()

    def kubectl(self, *arguments: str, given: str = "") -> str:
        """In the namespace of the jobs; what it said, also when it failed. `given` is its standard input."""
        return self.installed.kubectl(*arguments, namespace=self.space.name, given=given)

    def socket_connections(self, pod: str) -> int:
        """How many connections a worker has to its node's Redis servers by Unix sockets, as the kernel counts them."""
        lines = self.kubectl("exec", pod, "--", "cat", "/proc/net/unix").splitlines()
        # NUM REFCOUNT PROTOCOL FLAGS TYPE STATE INODE PATH: the accepted end, state 3, is listed where the caller is
        return sum(re.search(r"/redis-\d\.sock$", line) is not None and line.split()[5] == "03" for line in lines)

    def close(self) -> None:
        """Ends what runs; fails if one of them came to something else than the undisturbed job."""
        problems = []
        straight = list(self._undisturbed.values())  # last: the others are held against them
        for job in [*(job for job in self._running.values() if job not in straight), *straight]:
            try:
                if job.asked.name in self._rows and job.status.phase != "Failed":
                    self.finish(job)
                else:
                    self.remove(job)
            except (AssertionError, OSError) as error:
                problems.append(f"{job.asked.name}: {error}")
        self.space.end()
        if not self._was_installed:
            self.installed.down()
        self._lock.close()
        assert not problems, "\n".join(problems)
