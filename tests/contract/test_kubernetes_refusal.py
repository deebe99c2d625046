"""A job that the API server accepted and we cannot carry: what people see, once, and that an edit helps."""

from __future__ import annotations

import asyncio
import copy
import itertools
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from support.servers.job_server import JobServer, fabric_of
from surefoot.memory_server import Credentials
from surefoot_operator.api.spec import FINALIZER
from surefoot_operator.api.status import JobStatus
from surefoot_operator.coordinator.agent_channel import AgentChannel
from surefoot_operator.memory import JobMemoryServers, MemoryServerPool
from surefoot_operator.platforms.interface import WorkerEnvironment
from surefoot_operator.platforms.kubernetes.api_objects import ApiError
from surefoot_operator.platforms.kubernetes.platform import KubernetesPlatform
from surefoot_operator.policy.membership import lifecycle
from surefoot_operator.reconcile import Reconciler
from surefoot_operator.reconcile.build_snapshot import Dependencies
from surefoot_operator.settings import OperatorSettings


class Operator:
    """The reconciler of one job on a server of a few lines."""

    def __init__(self, server: JobServer, settle_seconds: float = 0.0) -> None:
        self.server = server
        self.fabric: KubernetesPlatform = fabric_of(server)
        settings = OperatorSettings(progress_interval_seconds=0.0, progress_write_delay_seconds=settle_seconds)
        self.memory = JobMemoryServers(
            "u", Credentials("u", "p"), MemoryServerPool(settings.memory), time.time, lambda urgent: None
        )
        channel = AgentChannel("u", 0.5, time.time, lambda urgent: None)
        empty = WorkerEnvironment({}, {})
        parts = Dependencies(self.fabric, channel, self.memory, lambda job, worker: empty, settings, time.time, str)
        self.reconciler = Reconciler(parts)

    async def once(self) -> None:
        await self.reconciler.reconcile()
        await self.reconciler.calls.wait_until_done()
        await self.reconciler.recorder.flush()

    @property
    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.server.stored["status"]
        return found

    def told(self, reason: str) -> list[str]:
        return [e["message"] for e in self.server.made("events") if e["reason"] == reason]

    def edit(self, **spec: Any) -> None:
        """As a person would; the cache hears of it."""
        self.server.edit(spec)
        self.fabric._cache.jobs.apply_write_result(copy.deepcopy(self.server.stored))


@pytest.fixture
async def operators() -> AsyncIterator[list[Operator]]:
    made: list[Operator] = []
    yield made
    for one in made:
        await one.memory.close()


WRONG = {"failurePolicy": {"maxRestarts": "many"}}


def condition(operator: Operator, kind: str) -> dict[str, Any] | None:
    return next((c for c in operator.status["conditions"] if c["type"] == kind), None)


async def test_a_job_that_cannot_be_read_fails_with_its_sentence_and_begins_once_it_can(
    operators: list[Operator],
) -> None:
    server = JobServer()
    server.stored["spec"] |= WRONG
    operator = Operator(server)
    operators.append(operator)
    for _ in range(3):
        await operator.once()
    assert operator.status["phase"] == "Failed"
    assert "spec.failurePolicy.maxRestarts: 'many' is not allowed" in operator.status["message"]
    found = condition(operator, "Failed")
    assert found is not None
    assert (found["status"], found["reason"], found["message"]) == ("True", "Invalid", operator.status["message"])
    assert operator.told("SpecRejected") == [operator.status["message"]]
    assert operator.status["serial"] == 1  # at rest: nothing is written again and again
    again = Operator(server)  # another leader says it no second time
    operators.append(again)
    await again.once()
    assert len(again.told("SpecRejected")) == 1
    assert again.status["serial"] == 1
    again.edit(failurePolicy={"maxRestarts": 3})
    await again.once()
    assert again.status["phase"] != "Failed"
    assert again.status["membership"]["state"] == "Claimed"
    assert condition(again, "Failed") is None
    assert again.status["observedGeneration"] == 2


async def test_a_job_that_runs_goes_on_as_it_was_asked_for_before_a_wrong_edit(operators: list[Operator]) -> None:
    operator = Operator(JobServer())
    operators.append(operator)
    for _ in range(2):
        await operator.once()
    world, pods = operator.status["membership"], len(operator.server.made("pods"))
    operator.edit(**WRONG)
    for _ in range(2):
        await operator.once()
    assert operator.status["membership"] == world
    assert len(operator.server.made("pods")) == pods == 1
    found = condition(operator, "SpecRejected")
    assert found is not None
    assert found["status"] == "True"
    assert operator.status["observedGeneration"] == 1
    (told,) = operator.told("SpecRejected")
    assert "continues with its former spec" in told
    operator.edit(failurePolicy={"maxRestarts": 3})
    await operator.once()
    assert condition(operator, "SpecRejected") is None
    assert operator.status["observedGeneration"] == 3


async def test_an_operator_that_never_read_a_good_spec_leaves_a_running_job_as_it_is(operators: list[Operator]) -> None:
    first = Operator(JobServer())
    operators.append(first)
    await first.once()
    world = first.status["membership"]
    first.edit(**WRONG)
    second = Operator(first.server)
    operators.append(second)
    await second.once()
    assert (second.status["membership"], second.status["phase"]) == (world, "Pending")
    assert condition(second, "SpecRejected") is not None
    second.edit(failurePolicy={"maxRestarts": 3})
    await second.once()
    assert condition(second, "SpecRejected") is None


async def test_a_status_that_was_edited_is_never_written_over(operators: list[Operator]) -> None:
    server = JobServer()
    server.stored["status"] = {"phase": "Asleep", "serial": 7}
    operator = Operator(server)
    operators.append(operator)
    for _ in range(2):
        await operator.once()
    assert operator.status == {"phase": "Asleep", "serial": 7}
    (told,) = operator.told("SpecRejected")
    assert "was edited and cannot be read: status.phase is 'Asleep'" in told


async def test_the_last_words_on_a_job_are_said_before_it_is_let_go(operators: list[Operator]) -> None:
    server = JobServer()
    persistent = {"uri": "s3://bucket/prefix", "onJobDeletion": "Delete"}
    server.stored["spec"] |= {"checkpoint": {"persistent": persistent}, "suspend": True}
    server.stored["metadata"] |= {"deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": [FINALIZER]}
    operator = Operator(server)
    operators.append(operator)
    await operator.once()
    (pod,) = server.made("pods")
    assert pod["spec"]["containers"][0]["command"] == ["python", "-m", "surefoot.tools.delete"]
    assert server.stored["metadata"]["finalizers"] == [FINALIZER]
    operator.fabric._cache.workers.apply_write_result(server.changed(pod, {"status": {"phase": "Succeeded"}}))
    server.calls.clear()
    await operator.once()
    assert operator.told("PersistentDataDeleted") == ["s3://bucket/prefix/u was deleted"]
    assert server.stored["metadata"]["finalizers"] == []
    assert server.calls[-2:] == ["post", "patch"]


@pytest.mark.parametrize(
    ("refusal", "rounds"),
    [
        ("failed quota: team: must specify limits.cpu for: delete", 4),
        ("unable to create new content in namespace default because it is being terminated", 2),
    ],
    ids=["a quota", "a namespace that is being deleted"],
)
async def test_a_job_goes_though_the_pod_that_deletes_its_data_is_always_refused(
    operators: list[Operator], monkeypatch: pytest.MonkeyPatch, refusal: str, rounds: int
) -> None:
    monkeypatch.setattr(lifecycle, "PURGE_RETRY_SECONDS", 0.0)
    server = JobServer()
    persistent = {"uri": "s3://bucket/prefix", "onJobDeletion": "Delete"}
    server.stored["spec"] |= {"checkpoint": {"persistent": persistent}, "suspend": True}
    server.stored["metadata"] |= {"deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": [FINALIZER]}
    server.refuses = {"pods": ApiError("POST pods", 403, "Forbidden", refusal)}
    operator = Operator(server)
    operators.append(operator)
    for number in range(rounds):
        assert server.stored["metadata"]["finalizers"] == [FINALIZER], number
        await operator.once()
    assert server.stored["metadata"]["finalizers"] == []
    (left,) = operator.told("PersistentDataNotDeleted")
    assert left.startswith(refusal)
    assert "s3://bucket/prefix/u was not deleted" in left
    assert all(text.startswith(refusal) for text in operator.told("PersistentDataDeletionRejected"))


async def test_a_misspelt_field_of_the_template_fails_the_job_with_the_servers_sentence(
    operators: list[Operator],
) -> None:
    """It was dropped from the pod without a word, and the job ran without its limits."""
    server = JobServer()
    typo = 'strict decoding error: unknown field "spec.containers[0].resorces"'
    server.verdicts = [ApiError("POST pods", 400, "BadRequest", typo)]
    operator = Operator(server)
    operators.append(operator)
    for _ in range(4):
        await operator.once()
    assert operator.status["phase"] == "Failed"
    assert typo in operator.status["message"]
    assert any(typo in message for message in operator.told("JobFailed"))
    assert (len(server.tried), server.made("pods"), server.made("secrets")) == (1, [], [])


async def test_a_new_leader_does_not_change_the_words_of_the_former_one_before_it_knows_as_much(
    operators: list[Operator],
) -> None:
    """A thousand jobs that are sealed and read again were told so, and told back, by two thousand writes."""
    server, known = JobServer(), "as the former leader knew it"
    operators.append(Operator(server))
    for _ in range(3):
        await operators[0].once()
    server.stored["status"]["message"] = known
    told = {}
    for settle_seconds in (3600.0, 0.0):
        operator = Operator(server, settle_seconds)
        operators.append(operator)
        for pod in server.made("pods"):
            operator.fabric._cache.workers.apply_write_result(pod)
        for _ in range(3):
            await operator.once()
        told[settle_seconds] = operator.status["message"]
    assert told[3600.0] == known
    assert told[0.0] != known


async def test_what_somebody_asks_for_is_answered_at_once_by_a_new_leader(operators: list[Operator]) -> None:
    server = JobServer()
    for settle_seconds in (0.0, 3600.0):
        operators.append(Operator(server, settle_seconds))
        await operators[-1].once()
    operators[1].edit(suspend=True)
    await operators[1].once()
    assert operators[1].status["observedGeneration"] == 2


async def test_of_a_job_that_this_leader_began_with_everything_is_told_at_once(operators: list[Operator]) -> None:
    operator = Operator(JobServer(), settle_seconds=3600.0)
    operators.append(operator)
    for _ in range(3):
        await operator.once()
    assert operator.status["message"] != "the job starts"


async def test_a_job_whose_records_cannot_be_handled_is_tried_again_even_where_saying_so_fails(
    operators: list[Operator], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second MemoryError ended the job's loop for as long as its operator ran."""
    operator = Operator(JobServer())
    operators.append(operator)
    await operator.once()
    rounds, enough = itertools.count(1), asyncio.Event()

    async def once() -> float:
        if next(rounds) >= 3:
            enough.set()
        raise MemoryError

    async def patch_status(new: JobStatus, old: JobStatus) -> JobStatus:
        raise MemoryError

    monkeypatch.setattr(operator.reconciler, "reconcile", once)
    monkeypatch.setattr(operator.fabric, "patch_status", patch_status)
    running = asyncio.create_task(operator.reconciler.run())
    tried = asyncio.create_task(enough.wait())
    await asyncio.wait((running, tried), timeout=20.0, return_when=asyncio.FIRST_COMPLETED)
    assert not running.done()
    assert enough.is_set()
    running.cancel()
    await asyncio.gather(running, tried, return_exceptions=True)
    assert any("Surefoot cannot plan this job: MemoryError" in text for text in operator.told("RecordsRejected"))
