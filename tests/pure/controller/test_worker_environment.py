"""What the agent of a new worker is told."""

from __future__ import annotations

from support.builders import job
from surefoot.logs import VARIABLE
from surefoot_operator.controller.credentials.derived_secrets import Secrets
from surefoot_operator.controller.worker_environment import WorkerEnvironmentFactory
from surefoot_operator.policy.actions import CreateWorker


def told(log_format: str) -> dict[str, str]:
    factory = WorkerEnvironmentFactory("wss://operator/v1/agents", 1.0, Secrets(b"root"), log_format=log_format)
    return dict(factory(job(), CreateWorker(0, 1)).plain)


def test_agents_log_in_the_operators_format_and_text_is_left_to_the_template() -> None:
    assert told("json")[VARIABLE] == "json"
    assert VARIABLE not in told("text")
