"""Pods are followed while they come, break off, are replaced and end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from support.builders import running
from support.fakes.fake_api import FakeApi
from support.stored import worker_pod, written
from surefoot_operator.cli import follow_logs
from surefoot_operator.cli.cluster_access import ClusterRefused, OpenCluster
from surefoot_operator.cli.follow_logs import FollowChoice, PodFollower
from surefoot_operator.platforms.kubernetes.api_objects import ApiRefused, ApiSilent

JOB = "/apis/surefoot.dev/v1alpha1/namespaces/team/trainingjobs/gpt"
PODS = "/api/v1/namespaces/team/pods"
Query = Mapping[str, str | int]


def stamped(second: int, text: str) -> bytes:
    return f"2026-11-23T09:00:{second:02}Z {text}\n".encode()


class World:
    """A job of one worker, whose pods a test moves."""

    def __init__(self) -> None:
        self.server, self.shown = FakeApi(), list[str]()
        self.asked: list[Query] = []
        self._changed = asyncio.Event()
        self.phase("Running")

    def phase(self, phase: str) -> None:
        seen = running()
        self.server.keep(JOB, written(replace(seen.status, phase=phase), seen))  # type: ignore[arg-type]

    def pod(self, attempt: int, node: str, chunks: Sequence[bytes | Exception | asyncio.Event]) -> None:
        """A pod whose log has these parts: bytes, waits, and breaks."""
        body = worker_pod(0, node, attempt)
        self.server.keep(f"{PODS}/{body['metadata']['name']}", body)
        left = list(chunks)

        async def stream(query: Query) -> AsyncGenerator[bytes, None]:
            self.asked.append(query)
            while left:
                part = left.pop(0)
                if isinstance(part, asyncio.Event):
                    await part.wait()
                elif isinstance(part, Exception):
                    raise part
                else:
                    yield part

        self.server.streams[f"{PODS}/{body['metadata']['name']}/log"] = stream

    def ended(self, attempt: int, code: int) -> None:
        path = f"{PODS}/gpt-worker-0-{attempt}"
        body = self.server.objects[path]
        body["status"] = {
            "phase": "Failed" if code else "Succeeded",
            "containerStatuses": [{"name": "trainer", "state": {"terminated": {"exitCode": code}}}],
        }
        self.server.keep(path, body)

    def follower(self, choice: FollowChoice | None = None) -> PodFollower:
        cluster = OpenCluster(self.server.api, "team", "https://cluster:6443")
        loop = asyncio.get_running_loop()

        def show(lines: Sequence[str]) -> None:  # in a thread, as a terminal is written to
            self.shown.extend(lines)
            loop.call_soon_threadsafe(self._changed.set)

        return PodFollower(cluster, "gpt", choice or FollowChoice(), show, look_seconds=0.01)

    async def until(self, text: str) -> None:
        async with asyncio.timeout(20):
            while not any(text in line for line in self.shown):
                self._changed.clear()
                await self._changed.wait()


@pytest.fixture
def world() -> World:
    return World()


async def test_a_replaced_worker_is_named_and_followed(world: World) -> None:
    gone = asyncio.Event()
    world.pod(1, "n1", [stamped(1, "[rank 0] first"), gone])
    async with asyncio.timeout(30):
        following = asyncio.create_task(world.follower().run())
        await world.until("first")
        del world.server.objects[f"{PODS}/gpt-worker-0-1"]
        world.pod(2, "n2", [stamped(5, "[rank 0] second"), stamped(6, "the agent")])
        gone.set()
        await world.until("the agent")
        world.ended(2, 0)
        world.phase("Complete")
        assert await following == "Complete"
    kept = [line for line in world.shown if "waits for a node" not in line]
    assert kept[:2] == ["== worker 0 (attempt 1) on n1", "0.1 rank 0   | first"]
    assert "== worker 0 is replaced: attempt 2 on n2 follows attempt 1, which was on n1" in kept
    assert kept.index("0.2 rank 0   | second") < kept.index("0.2 agent    | the agent")
    assert "== worker 0 (attempt 2) ended: Succeeded with exit code 0" in kept


async def test_a_stream_that_breaks_goes_on_behind_its_last_line(world: World) -> None:
    broken = ApiSilent("stream", ConnectionResetError("reset"))
    world.pod(1, "n1", [stamped(1, "a"), stamped(2, "b"), broken, stamped(2, "b"), stamped(3, "c")])
    async with asyncio.timeout(30):
        following = asyncio.create_task(world.follower().run())
        await world.until("| c")
        world.ended(1, 1)
        world.phase("Failed")
        assert await following == "Failed"
    assert [line[-1] for line in world.shown if "|" in line] == ["a", "b", "c"]
    assert (world.asked[0]["tailLines"], "sinceTime" in world.asked[0]) == (20, False)
    assert (world.asked[1].get("sinceTime"), "tailLines" in world.asked[1]) == ("2026-11-23T09:00:02Z", False)
    assert sum("broke off" in line for line in world.shown) == 1


async def test_one_rank_is_followed_alone(world: World) -> None:
    world.pod(1, "n1", [stamped(1, "[rank 0] mine"), stamped(2, "[rank 1] other"), stamped(3, "agent")])
    world.ended(1, 0)
    world.phase("Complete")
    async with asyncio.timeout(30):
        await world.follower(FollowChoice(rank=0)).run()
    assert [line for line in world.shown if "|" in line] == ["0.1 rank 0   | mine"]


async def test_an_api_server_that_is_silent_is_waited_for_and_said_once(world: World) -> None:
    world.pod(1, "n1", [stamped(1, "a")])
    silent = 0

    def before(verb: str, path: str) -> None:
        nonlocal silent
        if path == JOB and silent < 5:
            silent += 1
            raise ApiSilent(f"{verb} {path}", ConnectionRefusedError("refused"))

    world.server.before = before
    world.ended(1, 0)
    world.phase("Complete")
    async with asyncio.timeout(30):
        assert await world.follower().run() == "Complete"
    assert sum("asked again until it answers" in line for line in world.shown) == 1
    assert any(line.endswith("| a") for line in world.shown)


@pytest.mark.parametrize("part", ["/log", "/pods"])
async def test_a_right_that_is_missing_ends_the_command(world: World, part: str) -> None:
    world.pod(1, "n1", [stamped(1, "a")])

    def before(verb: str, path: str) -> None:
        if path.endswith(part):
            raise ApiRefused(f"{verb} {path}", 403, "Forbidden", "no")

    world.server.before = before
    async with asyncio.timeout(30):
        with pytest.raises(ClusterRefused, match="you may not"):
            await world.follower().run()


async def test_a_flood_is_shown_whole_through_a_bounded_queue(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow_logs, "_WAITING_LINES", 10)
    flood = b"".join(b"2026-11-23T09:00:00.%09dZ line %d\n" % (number, number) for number in range(1, 5001))
    world.pod(1, "n1", [flood])
    world.ended(1, 0)
    world.phase("Complete")
    follower = world.follower()
    async with asyncio.timeout(60):
        await follower.run()
    assert follower._lines.maxsize == 10
    assert [line.rpartition(" ")[2] for line in world.shown if "| line" in line] == [str(n) for n in range(1, 5001)]


async def test_of_many_pods_some_are_followed_and_the_rest_is_said(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow_logs, "MOST_PODS", 1)
    never = asyncio.Event()
    for attempt in (1, 2):
        world.pod(attempt, "n1", [stamped(attempt, "a"), never])
    following = asyncio.create_task(world.follower().run())
    await world.until("2 pods have logs and 1 are followed")
    following.cancel()
    with pytest.raises(asyncio.CancelledError):
        await following
    assert all(task.done() for task in asyncio.all_tasks() if task.get_name().startswith("log of"))


def test_the_command_follows_and_ends_as_the_job_did(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from surefoot_operator.cli import logs
    from surefoot_operator.cli.main import main

    def on_cluster(_given: Any, ask: Any) -> Any:
        return asyncio.run(ask(OpenCluster(world.server.api, "team", "s")))

    monkeypatch.setattr(logs, "on_cluster", on_cluster)
    world.pod(1, "n1", [stamped(1, "[rank 0] only")])
    world.ended(1, 3)
    world.phase("Failed")
    assert main(["logs", "gpt", "-f"]) == 1
    assert "0.1 rank 0   | only" in capsys.readouterr().out
    assert main(["logs", "gpt", "-f", "--by-time"]) == 2
