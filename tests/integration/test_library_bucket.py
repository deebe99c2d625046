"""Without an agent, from a bucket whose answers are spoiled: the newest checkpoint is restored, or a start names it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from uuid import uuid4

import pytest
import torch

import surefoot
from support.servers import s3_server
from support.servers.s3_server import S3Server
from support.servers.spoiling_proxy import Proxy, Rule, spoiling
from surefoot.checkpointer.library_mode import epoch_records, library
from surefoot.errors import TierUnavailable, Unreadable
from surefoot.settings import job_settings
from surefoot.tiers import open_persistent
from surefoot.tiers.persistent import ObjectStoreTier


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server.running(tmp_path_factory.mktemp("s3")) as started:
        yield started


@pytest.fixture(scope="module")
def module_proxy(server: S3Server) -> Iterator[Proxy]:
    with spoiling(server.endpoint) as proxy:
        yield proxy


@pytest.fixture
def proxy(module_proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> Proxy:
    """The way of this process to its bucket, with whole checkpoints of steps 10, 20 and 30 behind it."""
    module_proxy.rules.clear()
    monkeypatch.setenv("SUREFOOT_PERSISTENT_ENDPOINT", module_proxy.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_server.ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_server.SECRET_KEY)
    monkeypatch.setenv("SUREFOOT_PERSISTENT_URI", f"s3://{s3_server.BUCKET}/{uuid4().hex}")
    made = checkpointer()
    assert made.restore() == 0
    for step in range(1, 31):
        made.step()
        assert step % 10 or made.save_now()
    made.close()
    return module_proxy


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epoch_records, "MIN_SECONDS", 1.0)
    monkeypatch.setattr(library, "step_seconds_of", lambda manifests: 0.001)
    monkeypatch.setattr(epoch_records, "MISSING_SECONDS", 1.0)
    monkeypatch.setattr(epoch_records, "AWAY_SECONDS", 1.0)


def checkpointer() -> surefoot.Checkpointer:
    torch.manual_seed(3)
    return surefoot.Checkpointer(model=torch.nn.Linear(30, 30), interval_steps=1000, keep=9)


def start() -> int:
    made = checkpointer()
    restored = made.restore()
    made.close()
    return restored


RECOVERED = {
    "a throttled manifest": Rule(r"GET .*/30-1/rank-0\.json", "slow down", 14),
    "a throttled listing": Rule("list-type", "slow down", 12),
    "a manifest that is missing once": Rule(r"GET .*/30-1/rank-0\.json", "missing", 1),
    "a part that is missing once": Rule("GET .*/30-1/rank-0/p0", "missing", 1),
    "a flipped part": Rule("GET .*/30-1/rank-0/p0", "flip", 1),
    "a short part": Rule("GET .*/30-1/rank-0/p0", "halve", 1),
    "short values": Rule("GET .*/30-1/rank-0/values", "halve", 1),
    "a flipped manifest": Rule(r"GET .*/30-1/rank-0\.json", "flip", 1),
    "a flipped layout": Rule("GET .*/layouts/", "flip", 1),
    "a stale listing": Rule(r"list-type.*prefix=[^&]*default%2F(&|$)", "hide", hidden=("10-1", "20-1", "30-1")),
    "no record of the newest": Rule("GET .*newest", "missing"),
    "a flipped record of the newest": Rule("GET .*newest", "flip"),
    "a record of the newest that is not given": Rule("GET .*newest", "slow down"),
    "one record of the epoch": Rule(r"GET .*/lineage/1\.json", "slow down"),
}


@pytest.mark.parametrize("case", RECOVERED)
def test_a_spoiled_answer_costs_no_step(case: str, proxy: Proxy) -> None:
    rule = RECOVERED[case]
    rule.struck = 0
    proxy.rules.append(rule)
    assert start() == 30
    assert rule.struck >= min(rule.times, 1)


def test_a_manifest_that_is_never_given_is_an_error_and_nothing_is_claimed(proxy: Proxy, hasty: None) -> None:
    proxy.rules.append(Rule(r"GET .*/30-1/rank-0\.json", "slow down"))
    with pytest.raises(Unreadable, match=r"step 30 of generation 1 cannot be read.*SlowDown.*SUREFOOT_ACCEPT_STEP=20 "):
        checkpointer()
    proxy.rules.clear()
    assert start() == 30


@pytest.mark.parametrize("pattern", ["GET", "list-type"])
def test_a_portal_in_the_place_of_the_bucket_is_an_error(pattern: str, proxy: Proxy, hasty: None) -> None:
    proxy.rules.append(Rule(pattern, "portal"))
    with pytest.raises(
        (TierUnavailable, Unreadable), match="the answer is no listing; check that the endpoint is an S3 server"
    ):
        checkpointer()


def test_checkpoints_that_are_gone_are_named(proxy: Proxy, hasty: None) -> None:
    persistent = job_settings({**os.environ, "SUREFOOT_JOB_UID": "default"}).persistent
    assert persistent is not None
    tier: ObjectStoreTier = open_persistent(persistent, "default")
    for checkpoint in tier.list_all_checkpoints():
        tier.drop_checkpoint(checkpoint)
    tier.close()
    with pytest.raises(Unreadable, match=r"newest\.json names step 30 of generation 1, but no file of it exists"):
        checkpointer()
