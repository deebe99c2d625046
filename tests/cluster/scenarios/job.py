"""One TrainingJob on the cluster as a scenario sees it: asked for, watched, struck, ended, and held against the undisturbed one.

What the operator says is read from the API; what really happened, from what the trainers wrote down.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from typing import Any

from cluster.api import Api
from cluster.engine import Facts
from cluster.scenarios.ledger import Ledger
from cluster.scenarios.shapes import Asked, document
from cluster.scenarios.trainer_files import LAST
from cluster.scenarios.watching import Heard, Namespace, Object
from support.machine_speed import scaled
from surefoot.protocol.checkpoints.completeness import Lineage, LineageEntry
from surefoot_operator.api.status import Incident, JobStatus
from surefoot_operator.api.status_json import status_from_json

WAIT_SECONDS = scaled(90.0)
END_STEPS = 15

JOB_LABEL = "surefoot.dev/job-uid"


class Job:
    """Made by `ask`. Every wait fails with what the job last said."""

    def __init__(self, space: Namespace, asked: Asked, facts: Facts) -> None:
        self.space, self.asked = space, asked
        self.api: Api = space.api
        self._document = document(asked, facts)
        self.path = f"/apis/surefoot.dev/v1alpha1/namespaces/{space.name}/trainingjobs/{asked.name}"
        self.ledger = Ledger(asked.folder)
        self.uid = ""
        self.began = 0.0
        self._lineage: dict[int, LineageEntry] = {}
        self._incidents: dict[tuple[int, float], Incident] = {}
        self._read = 0.0

    # ---- asking -----------------------------------------------------------------------------------------------------

    def ask(self) -> Job:
        """As `kubectl apply` would."""
        self.asked.folder.mkdir(parents=True, exist_ok=False)
        self.asked.folder.chmod(0o1777)
        self.began = time.time()
        made = self.api.call("POST", self.path.rpartition("/")[0], self._document)
        self.uid = made["metadata"]["uid"]
        self.wait("the job is seen", lambda: self.asked.name in self.space.jobs.items)
        return self

    def change(self, spec: dict[str, Any]) -> None:
        """As `kubectl patch --type merge` would."""
        self.api.merge(self.path, {"spec": spec})

    def delete(self) -> None:
        """As `kubectl delete --wait=false` would."""
        self.api.call("DELETE", self.path)

    def remove(self) -> None:
        """Whatever of it is there, and waits until its pods are gone."""
        if self.asked.name in self.space.jobs.items:
            self.delete()
        self.space.wait("the job is gone", lambda: self.asked.name not in self.space.jobs.items, WAIT_SECONDS)
        self.space.wait("its pods are gone", lambda: not self.pods(), WAIT_SECONDS, self.said)
        shutil.rmtree(self.asked.folder, ignore_errors=True)

    # ---- seeing -----------------------------------------------------------------------------------------------------

    @property
    def status(self) -> JobStatus:
        """As the watch last heard it."""
        found = self.space.jobs.items.get(self.asked.name)
        return status_from_json({} if found is None else found.get("status", {}))

    def pods(self) -> list[Object]:
        with self.space.changed:
            found = list(self.space.pods.items.values())
        return [pod for pod in found if pod["metadata"].get("labels", {}).get(JOB_LABEL) == self.uid]

    def pod_of(self, index: int) -> Object:
        """The pod of the committed member with that worker index."""
        member = self.member(index)
        name = f"{self.asked.name}-worker-{member.index}-{member.attempt}"
        return self.space.pods.items[name]

    def member(self, index: int) -> Any:
        assert self.status.membership is not None
        return next(m for m in self.status.membership.members if m.index == index)

    def worker_on(self, node: str) -> int | None:
        """The index of the committed member there."""
        world = self.status.membership
        return next((m.index for m in world.members if m.node == node), None) if world else None

    @property
    def epoch(self) -> int:
        """Of the committed world; 0 before and between."""
        world = self.status.membership
        return world.generation if world is not None and world.state == "Committed" else 0

    def last_heard(self) -> float:
        """When the API server last said something about it."""
        return self.space.jobs.heard(self.asked.name)[-1].at

    def is_claimed(self) -> bool:
        """Whether a new epoch is claimed and not committed yet."""
        world = self.status.membership
        return world is not None and world.state == "Claimed"

    @property
    def world(self) -> int:
        """Its ranks, 0 while none is committed."""
        world = self.status.membership
        return world.world_size if world is not None and world.state == "Committed" else 0

    @property
    def step(self) -> int:
        """The newest step that every rank of the committed world finished, as they wrote it down themselves."""
        self.ledger.look()
        return self.ledger.finished(self.epoch, self.world)

    def trains(self, world: int, beyond: int = 0) -> bool:
        """Whether a world of that size is committed, Running, and has made a step beyond that one."""
        return self.world == world and self.status.phase == "Running" and self.step > beyond

    def is_protected(self) -> bool:
        return self.condition("CheckpointProtected") == "True"

    def condition(self, kind: str) -> str:
        return next((c.status for c in self.status.conditions if c.type == kind), "")

    def events(self, reason: str) -> list[Object]:
        with self.space.changed:
            found = list(self.space.events.items.values())
        return [e for e in found if e["involvedObject"].get("uid") == self.uid and e["reason"] == reason]

    def lineage(self) -> Lineage:
        """Every epoch ever committed, also those that status has dropped."""
        self._read_history()
        return tuple(self._lineage[epoch] for epoch in sorted(self._lineage))

    def incidents(self) -> list[Incident]:
        """Every incident as it was last told, oldest first."""
        self._read_history()
        return sorted(self._incidents.values(), key=lambda i: i.detected_seconds)

    def pods_made(self, since: float) -> list[Heard]:
        """Pods of this job that were first heard of since then."""
        with self.space.changed:
            found = list(self.space.pods.history)
        return [
            one
            for one in found
            if one.kind == "ADDED"
            and one.at >= since
            and one.thing["metadata"].get("labels", {}).get(JOB_LABEL) == self.uid
        ]

    def _read_history(self) -> None:
        heard = self.space.jobs.heard(self.asked.name, self._read)
        for one in heard:
            if one.thing["metadata"]["uid"] != self.uid:
                continue
            status = status_from_json(one.thing.get("status", {}))
            self._lineage.update({entry.generation: entry for entry in status.lineage})
            self._incidents.update({(i.generation, i.detected_seconds): i for i in status.incidents})
            self._read = one.at

    # ---- waiting ----------------------------------------------------------------------------------------------------

    def wait(self, what: str, condition: Callable[[], object], seconds: float = WAIT_SECONDS) -> None:
        """Until it holds; a job that failed meanwhile is told at once."""

        def looked() -> object:
            if condition():
                return True
            assert self.status.phase != "Failed", f"the job failed while we waited for {what}:\n{self.said()}"
            return False

        self.space.wait(what, looked, seconds, self.said)

    def wait_training(self, world: int, steps: int = 1) -> None:
        """Until a world of that size has made some more steps."""
        before = self.step if self.world == world else 0
        self.wait(f"{steps} more steps of a world of {world}", lambda: self.trains(world, before + steps - 1))

    def wait_steps(self, more: int) -> None:
        """Until so many more steps were finished, whatever the world."""
        target = self.step + more
        self.wait(f"step {target}", lambda: self.step >= target)

    def end_soon(self) -> None:
        """All ranks stop a few steps from now, at the same one."""
        fresh = self.asked.folder / f"{LAST}.new"
        fresh.write_text(str(max(self.step, self.status.step) + END_STEPS))
        fresh.rename(self.asked.folder / LAST)

    def finish(self) -> None:
        """Ends it soon and waits until it is Complete."""
        self.end_soon()
        self.wait("the job is complete", lambda: self.status.phase == "Complete")
        self.ledger.look()

    def said(self) -> str:
        """For people, when something did not happen."""
        status = self.status
        lines = [f"job {self.asked.name}: {status.phase}, {status.message}", f"  world {status.membership}"]
        lines += [f"  condition {c.type} {c.status} {c.reason}: {c.message}" for c in status.conditions]
        for pod in self.pods():
            where, phase = pod["spec"].get("nodeName"), pod.get("status", {}).get("phase")
            lines.append(f"  pod {pod['metadata']['name']} on {where}: {phase}")
        with self.space.changed:
            events = [e for e in self.space.events.items.values() if e["involvedObject"].get("uid") == self.uid]
        events.sort(key=lambda e: str(e.get("lastTimestamp") or e.get("eventTime")))
        lines += [f"  event {e['reason']}: {e['message']}" for e in events[-12:]]
        lines += [f"  {i}" for i in status.incidents[-3:]]
        return "\n".join(lines)
