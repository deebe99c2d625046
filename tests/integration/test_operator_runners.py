"""Which jobs are looked after, with a cache that a test fills and an API server in memory: begun, ended, never mistaken."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from support.fakes.fake_api import FakeApi, silent
from surefoot.protocol.messages import HelloRejected
from surefoot_operator.controller import shard_leadership as runners_module
from surefoot_operator.controller.credentials.derived_secrets import Secrets
from surefoot_operator.controller.job_runner import JobKey, JobRunner, SharedResources
from surefoot_operator.controller.shard_leadership import JobRunners
from surefoot_operator.controller.worker_environment import WorkerEnvironmentFactory
from surefoot_operator.coordinator.agent_server import AgentServer
from surefoot_operator.memory import JobMemoryServers, MemoryServerPool
from surefoot_operator.memory.connection_pool import MemoryTierCredentials
from surefoot_operator.platforms.kubernetes.api_objects import jobs_path
from surefoot_operator.platforms.kubernetes.pods import PodSettings
from surefoot_operator.platforms.kubernetes.views.cluster_cache import ClusterCache
from surefoot_operator.settings import CoordinatorSettings, OperatorSettings


async def _nobody(_: Any) -> HelloRejected | None:
    return None


class Stand:
    """Runners over a cache whose jobs are put there by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.server = FakeApi()
        self.cache = ClusterCache(self.server.api)
        self.agents = AgentServer(CoordinatorSettings(), _nobody)
        telling = WorkerEnvironmentFactory("ws://nowhere/v1/agents", 1.0, Secrets(b"root"))
        settings = OperatorSettings()
        self.shared = SharedResources(
            self.cache,
            self.agents,
            telling,
            PodSettings(),
            MemoryTierCredentials(),
            settings,
            MemoryServerPool(settings.memory),
        )
        self.runners = JobRunners(self.shared)
        self.cleaned: list[str] = []
        stand = self

        async def clean(tier: JobMemoryServers) -> None:
            stand.cleaned.append(tier._job)

        monkeypatch.setattr(JobMemoryServers, "delete_job", clean)

    def put(self, name: str, uid: str = "", **spec: Any) -> None:
        """The server has it, and the cache knows."""
        metadata = {"name": name, "namespace": "team", "uid": uid or f"uid-{name}", "resourceVersion": "1"}
        body = {"metadata": metadata, "spec": spec}
        self.server.keep(jobs_path("team", name), body)
        old = self.cache.jobs.items.get(("team", name))
        self.cache.jobs.items["team", name] = body
        self.cache.jobs._on_event(old, body)

    def lose(self, name: str, really: bool = True) -> None:
        """The cache has it no more."""
        old = self.cache.jobs.items.pop(("team", name))
        if really:
            del self.server.objects[jobs_path("team", name)]
        self.cache.jobs._on_event(old, None)

    def names(self) -> list[str]:
        return sorted(f"{key.name} {key.uid}" for key in self.runners.running_jobs)

    async def ended(self) -> None:
        await self.runners._stop_tasks.join()


@pytest.fixture
async def stand(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stand]:
    made = Stand(monkeypatch)
    yield made
    await made.runners.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_nobody_is_looked_after_before_this_operator_leads(stand: Stand) -> None:
    stand.put("a")
    stand.runners.sync_runners()
    assert stand.names() == []
    stand.runners.start()
    assert stand.names() == ["a uid-a"]
    stand.put("b")
    assert stand.names() == ["a uid-a", "b uid-b"]


async def test_a_job_that_is_gone_is_let_go_with_its_memory(stand: Stand) -> None:
    stand.put("a")
    stand.put("b")
    stand.runners.start()
    stand.lose("a")
    assert stand.names() == ["b uid-b"]
    await stand.ended()
    assert stand.cleaned == ["uid-a"]


async def test_a_job_made_anew_under_its_name_is_another(stand: Stand) -> None:
    stand.put("a", "first")
    stand.runners.start()
    stand.put("a", "second")
    assert stand.names() == ["a second"]
    await stand.ended()
    assert stand.cleaned == ["first"]


async def test_no_memory_is_deleted_because_a_watch_was_mistaken(stand: Stand) -> None:
    stand.put("a")
    stand.runners.start()
    stand.lose("a", really=False)
    await stand.ended()
    assert stand.names() == []
    assert stand.cleaned == []
    stand.put("a")
    assert stand.names() == ["a uid-a"]
    stand.server.before = silent
    stand.lose("a")
    await stand.ended()
    assert stand.cleaned == []


async def test_a_job_that_a_watch_mistook_for_a_moment_keeps_its_agents(stand: Stand) -> None:
    stand.put("a")
    stand.runners.start()
    (first,) = stand.runners._runners.values()
    stand.lose("a", really=False)
    stand.put("a")  # before the first runner's end has begun
    (second,) = stand.runners._runners.values()
    assert second is not first
    await stand.ended()
    assert stand.agents._channels == {"uid-a": second._channel}


async def test_who_leaves_in_peace_takes_nothing_along(stand: Stand) -> None:
    stand.put("a")
    stand.runners.start()
    await stand.runners.close()
    assert stand.names() == []
    assert stand.cleaned == []
    stand.put("b")
    assert stand.names() == []


async def test_one_job_that_cannot_be_begun_keeps_no_other_from_it(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = [True]

    def begin(key: JobKey, shared: SharedResources) -> JobRunner:
        if key.name == "a" and bad:
            raise RuntimeError("a bug of ours")
        return JobRunner(key, shared)

    monkeypatch.setattr(runners_module, "JobRunner", begin)
    stand.put("a")
    stand.put("b")
    stand.runners.start()
    assert stand.names() == ["b uid-b"]
    bad.clear()
    stand.runners.sync_runners()
    assert stand.names() == ["a uid-a", "b uid-b"]


async def test_what_no_watch_tells_is_seen_at_the_next_look(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runners_module, "RESYNC_SECONDS", 0.01)
    stand.runners.start()
    metadata = {"name": "quiet", "namespace": "team", "uid": "uid-quiet", "resourceVersion": "1"}
    stand.cache.jobs.items["team", "quiet"] = {"metadata": metadata, "spec": {}}
    looking = asyncio.create_task(stand.runners.resync())
    await until(lambda: stand.names() == ["quiet uid-quiet"])
    looking.cancel()
    await asyncio.gather(looking, return_exceptions=True)
