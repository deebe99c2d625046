"""What the agent of a new worker is told."""

from __future__ import annotations

from support.builders import job
from surefoot.logs import VARIABLE
from surefoot.settings import job_settings
from surefoot_operator.api.spec import CheckpointPolicy, HealthPolicy, MemoryTierSpec, PersistentTierSpec
from surefoot_operator.controller.credentials.derived_secrets import Secrets
from surefoot_operator.controller.worker_environment import WorkerEnvironmentFactory
from surefoot_operator.policy.core.actions import CreateWorker


def told(log_format: str) -> dict[str, str]:
    factory = WorkerEnvironmentFactory("wss://operator/v1/agents", 1.0, Secrets(b"root"), log_format=log_format)
    return dict(factory(job(), CreateWorker(0, 1)).plain)


def test_agents_log_in_the_operators_format_and_text_is_left_to_the_template() -> None:
    assert told("json")[VARIABLE] == "json"
    assert VARIABLE not in told("text")


def test_workers_know_their_shards_address_and_whom_to_ask_once_it_is_gone() -> None:
    own, first = "wss://operator-2/v1/agents", "wss://operator/v1/agents"
    plain = WorkerEnvironmentFactory(own, 1.0, Secrets(b"root"), fallback_url=first)(job(), CreateWorker(0, 1)).plain
    assert (plain["SUREFOOT_COORDINATOR_URL"], plain["SUREFOOT_COORDINATOR_FALLBACK_URL"]) == (own, first)
    alone = WorkerEnvironmentFactory(first, 1.0, Secrets(b"root"), fallback_url=first)(job(), CreateWorker(0, 1)).plain
    assert "SUREFOOT_COORDINATOR_FALLBACK_URL" not in alone, "one shard: an agent is told what it always was"


def test_the_limits_of_a_job_reach_its_workers_and_no_limit_is_left_out() -> None:
    factory = WorkerEnvironmentFactory("wss://operator/v1/agents", 1.0, Secrets(b"root"))
    checkpoint = CheckpointPolicy(
        memory=MemoryTierSpec(bandwidth_bytes=500 << 20),
        persistent=PersistentTierSpec("s3://b/p", bandwidth_bytes=3 << 20),
    )
    limited = dict(factory(job(checkpoint=checkpoint), CreateWorker(0, 1)).plain)
    read = job_settings({**limited, "SUREFOOT_MEMORY_PASSWORD": ""})
    assert read.memory_bytes_per_second == 500 << 20
    assert read.persistent is not None
    assert read.persistent.bytes_per_second == 3 << 20
    assert not any("BANDWIDTH" in name for name in told("text"))


def test_agents_try_their_node_only_where_the_job_asks_for_it() -> None:
    factory = WorkerEnvironmentFactory("wss://operator/v1/agents", 1.0, Secrets(b"root"))
    assert "SUREFOOT_PRE_JOIN_CHECK" not in told("text"), "an agent of any version is told nothing"
    for check in ("Warn", "Enforce"):
        asked = job(health_policy=HealthPolicy(pre_join_check=check))
        assert dict(factory(asked, CreateWorker(0, 1)).plain)["SUREFOOT_PRE_JOIN_CHECK"] == check


def test_agents_learn_that_a_job_wants_no_imports_in_advance() -> None:
    factory = WorkerEnvironmentFactory("wss://operator/v1/agents", 1.0, Secrets(b"root"))
    assert "SUREFOOT_WARM_IMPORTS" not in dict(factory(job(), CreateWorker(0, 1)).plain)
    assert dict(factory(job(warm_imports="none"), CreateWorker(0, 1)).plain)["SUREFOOT_WARM_IMPORTS"] == "none"
