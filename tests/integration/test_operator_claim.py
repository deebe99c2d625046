"""Two installations of the operator in one cluster: one operates, the other stands by, says so, and succeeds it."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import REGISTRY

from support.fakes.fake_agent import until
from support.fakes.fake_api import FakeApi, silent
from surefoot_operator.controller.cluster_operator import ClusterOperator
from surefoot_operator.controller.cluster_settings import read_cluster_settings
from surefoot_operator.controller.leader import cluster_claim
from surefoot_operator.controller.leader.cluster_claim import CLAIMS_LEASE, ClusterClaim
from surefoot_operator.controller.leader.leader_election import LeaseLost
from surefoot_operator.errors import NotLeader
from surefoot_operator.platforms.kubernetes.api_objects import ApiError

SECONDS = 60.0


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_claim, "EXPIRY_SECONDS", 1.0)
    monkeypatch.setattr(cluster_claim, "RENEW_SECONDS", 0.05)
    monkeypatch.setattr(cluster_claim, "MAX_READ_GAP_SECONDS", 0.7)


class Installation:
    """One replica of an installation, with what it said."""

    def __init__(self, server: FakeApi, name: str, namespace: str = "", identity: str = "op-0") -> None:
        self.said: list[str] = []
        self.claim = ClusterClaim(server.api, name, namespace, identity, self.said.append, interval_seconds=0.02)
        self.task: asyncio.Task[None] | None = None

    def start(self) -> Installation:
        self.task = asyncio.create_task(self._run())
        return self

    async def _run(self) -> None:
        await self.claim.acquire()
        await self.claim.renew_until_lost()

    @property
    def operates(self) -> bool:
        try:
            self.claim.require_claim()
        except NotLeader:
            return False
        return True

    async def until(self, operates: bool) -> None:
        await until(lambda: self.operates is operates, f"operates: {operates}")

    async def says(self, sentence: str) -> None:
        await until(lambda: self.said[-1:] == [sentence], f"{sentence}, not {self.said}")

    async def stop(self) -> None:
        assert self.task is not None
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


async def rounds(server: FakeApi, count: int) -> None:
    """Waits until the claims were read so often more."""
    goal = len(server.asked) + count
    await until(lambda: len(server.asked) >= goal, f"{count} calls")


def test_the_second_stands_by_says_why_and_succeeds_the_first() -> None:
    async def case() -> None:
        server = FakeApi()
        first = Installation(server, "surefoot-system/surefoot-operator").start()
        await first.until(operates=True)
        second = Installation(server, "other/surefoot-operator").start()
        await second.says("standing by: surefoot-system/surefoot-operator operates this cluster")
        await rounds(server, 100)
        assert first.operates
        assert not second.operates
        assert len(second.said) == 1, "said once"
        await first.stop()
        await second.until(operates=True)
        assert second.said[-1] == ""
        await second.stop()

    asyncio.run(case())


def test_both_at_once_and_one_has_it() -> None:
    async def case() -> None:
        server = FakeApi()
        both = [Installation(server, f"n{n}/surefoot-operator").start() for n in range(4)]
        await rounds(server, 200)
        assert sum(one.operates for one in both) == 1
        await asyncio.gather(*(one.stop() for one in both))

    asyncio.run(case())


def test_replicas_share_a_claim_and_other_namespaces_have_their_own() -> None:
    async def case() -> None:
        server = FakeApi()
        fine = [
            Installation(server, "one/surefoot-operator", "a", "op-0").start(),
            Installation(server, "one/surefoot-operator", "a", "op-1").start(),
            Installation(server, "two/surefoot-operator", "b", "op-0").start(),
        ]
        for one in fine:
            await one.until(operates=True)
        whole = Installation(server, "three/surefoot-operator").start()
        await whole.says("standing by: one/surefoot-operator operates the jobs of the namespace a")
        await fine[0].stop()
        await rounds(server, 200)
        assert fine[1].operates, "the other replica renews"
        assert not whole.operates
        await asyncio.gather(*(one.stop() for one in (*fine[1:], whole)))

    asyncio.run(case())


def test_one_more_than_have_room_stands_by_and_keeps_nobody_else_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its claim made the object unreadable: whoever operated went on, and no replica that was restarted came back."""
    monkeypatch.setattr(cluster_claim, "MAX_INSTALLATIONS", 2)

    async def case() -> None:
        server = FakeApi()
        fine = [Installation(server, f"{name}/surefoot-operator", name).start() for name in "ab"]
        for one in fine:
            await one.until(operates=True)
        more = Installation(server, "c/surefoot-operator", "c").start()
        await until(lambda: any("at most 2 installations" in text for text in more.said), "it stands by")
        again = Installation(server, "a/surefoot-operator", "a", "op-1").start()
        await again.until(operates=True)
        assert not more.operates
        await fine[1].stop()
        await more.until(operates=True)
        await asyncio.gather(*(one.stop() for one in (fine[0], more, again)))

    asyncio.run(case())


@pytest.mark.parametrize("refusal", ["silence", "forbidden", "rubbish"])
def test_what_cannot_be_read_ends_nobody_and_lets_nobody_begin(refusal: str) -> None:
    async def case() -> None:
        server = FakeApi()
        first = Installation(server, "one/surefoot-operator").start()
        await first.until(operates=True)
        stored = server.objects[CLAIMS_LEASE.path]

        def forbidden(verb: str, path: str) -> None:
            raise ApiError(f"{verb} {path}", 403, "Forbidden", "leases is forbidden")

        if refusal == "rubbish":
            rubbish = {
                **stored,
                "metadata": {**stored["metadata"], "annotations": {"surefoot.dev/installations": "[]"}},
            }
            server.keep(CLAIMS_LEASE.path, rubbish)
        else:
            server.before = silent if refusal == "silence" else forbidden
        second = Installation(server, "two/surefoot-operator").start()
        await rounds(server, 150)
        assert first.operates, "it goes on with what it leads"
        assert not second.operates
        assert second.said[0].startswith(
            "standing by: cannot read or write the claim on the cluster's jobs (lease kube-node-lease/surefoot-operators): "
        )
        server.before = lambda verb, path: None
        server.keep(CLAIMS_LEASE.path, stored)
        await second.says("standing by: one/surefoot-operator operates this cluster")
        assert first.operates
        await asyncio.gather(first.stop(), second.stop())

    asyncio.run(case())


def test_one_that_was_frozen_finds_another_in_its_place_and_ends() -> None:
    async def case() -> None:
        server = FakeApi()
        first = Installation(server, "one/surefoot-operator").start()
        await first.until(operates=True)
        await first.stop()  # no round any more, as of a process that is stopped
        second = Installation(server, "two/surefoot-operator").start()
        await second.until(operates=True)
        await first.until(operates=False)
        with pytest.raises(LeaseLost, match="two/surefoot-operator operates this cluster now"):
            async with asyncio.timeout(SECONDS):
                await first.claim.renew_until_lost()
        assert not first.operates
        await second.stop()

    asyncio.run(case())


def test_a_claim_that_somebody_deleted_is_made_again_by_whoever_had_it() -> None:
    async def case() -> None:
        server = FakeApi()
        first = Installation(server, "one/surefoot-operator").start()
        await first.until(operates=True)
        del server.objects[CLAIMS_LEASE.path]
        await rounds(server, 20)
        assert first.operates
        assert "one/surefoot-operator" in str(server.objects[CLAIMS_LEASE.path])
        await first.stop()

    asyncio.run(case())


def test_an_operator_that_stands_by_tells_probes_metrics_and_its_pod() -> None:
    sentence = "standing by: surefoot-system/surefoot-operator operates this cluster"

    async def case() -> None:
        server = FakeApi()
        found = read_cluster_settings({"SUREFOOT_POD_NAME": "op-7"}, [], "other")
        operator = ClusterOperator(server.api, found)
        operator._report_standby(sentence)
        events = "/api/v1/namespaces/other/events/"
        await until(lambda: any(path.startswith(events) for path in server.objects), "the event")
        ((_, event),) = [(path, body) for path, body in server.objects.items() if path.startswith(events)]
        assert (event["reason"], event["message"], event["type"]) == ("OperatorStandingBy", sentence, "Warning")
        assert (event["involvedObject"]["kind"], event["involvedObject"]["name"]) == ("Pod", "op-7")
        assert operator._readiness_failures() == [sentence]
        assert REGISTRY.get_sample_value("surefoot_operator_standing_by") == 1
        operator._report_standby("")
        assert operator._readiness_failures() == []
        assert REGISTRY.get_sample_value("surefoot_operator_standing_by") == 0

    asyncio.run(case())
