"""A pod that would never be made, or not as it is written, is found by one dry run before the first world."""

from __future__ import annotations

import pytest

from support.servers.job_server import JobServer, fabric_of
from surefoot.protocol.checkpoints.completeness import LineageEntry
from surefoot_operator.api.status import JobStatus
from surefoot_operator.api.status_json import status_to_json
from surefoot_operator.errors import PlatformError
from surefoot_operator.platforms.interface import WorkerEnvironment
from surefoot_operator.platforms.kubernetes.api_objects import ApiError, ApiUnreachable
from surefoot_operator.policy.core.actions import CreateWorker

STRICT = {"dryRun": "All", "fieldValidation": "Strict"}
TYPO = ApiError(
    "POST pods",
    400,
    "BadRequest",
    'Pod in version "v1" cannot be handled as a Pod: strict decoding error: unknown field "spec.tolerationz"',
)
WEBHOOK = ApiError("POST pods", 400, "BadRequest", 'admission webhook "x.y" does not support dry run')
QUOTA = ApiError("POST pods", 403, "Forbidden", "exceeded quota")
BUSY = ApiError("POST pods", 429, "TooManyRequests", "later")
SILENT = ApiUnreachable("POST pods", TimeoutError())
EMPTY = WorkerEnvironment({}, {})


async def make(fabric: object, *indexes: int) -> None:
    for index in indexes:
        await fabric.create_worker(CreateWorker(index, 1), EMPTY)  # type: ignore[attr-defined]


async def test_one_dry_run_judges_the_template_for_all_its_pods() -> None:
    server = JobServer()
    await make(fabric_of(server), 0, 1, 2)
    assert server.tried == [STRICT]
    assert len(server.made("pods")) == 3


async def test_a_misspelt_field_is_a_lasting_refusal_that_leaves_nothing_and_is_asked_about_once() -> None:
    server = JobServer()
    server.verdicts = [TYPO]
    fabric = fabric_of(server)
    for _ in range(3):
        with pytest.raises(ApiError, match=r'unknown field "spec.tolerationz"') as refused:
            await make(fabric, 0)
        assert refused.value.is_permanent
    assert (server.tried, server.calls) == ([STRICT], [])


async def test_another_spec_is_judged_anew() -> None:
    server = JobServer()
    server.verdicts = [TYPO]
    fabric = fabric_of(server)
    with pytest.raises(ApiError):
        await make(fabric, 0)
    server.verdicts = []
    server.edit({"replicas": 2})
    fabric._cache.jobs.apply_write_result(server.changed(server.stored, {}))
    await make(fabric, 0)
    assert len(server.tried) == 2


@pytest.mark.parametrize(("verdict", "asked"), [(WEBHOOK, 1), (QUOTA, 1), (BUSY, 2), (SILENT, 2)])
async def test_what_says_nothing_of_the_pod_keeps_none_from_being_asked_for(verdict: PlatformError, asked: int) -> None:
    server = JobServer()
    server.verdicts = [verdict]
    await make(fabric_of(server), 0, 1)
    assert len(server.made("pods")) == 2
    assert len(server.tried) == asked


async def test_a_job_that_has_trained_is_not_judged_any_more() -> None:
    server = JobServer()
    server.verdicts = [TYPO]
    server.stored["status"] = status_to_json(JobStatus(lineage=(LineageEntry(1, None, 1),)))
    await make(fabric_of(server), 0)
    assert (server.tried, len(server.made("pods"))) == ([], 1)
