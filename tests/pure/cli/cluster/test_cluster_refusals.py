"""What a cluster refuses is said with the verb, the resource and who can give it."""

from __future__ import annotations

import pytest

from surefoot_operator.cli.cluster_access import Right, jobs_right, refused
from surefoot_operator.errors import FabricError
from surefoot_operator.platforms.kubernetes.api_objects import ApiRefused, ApiSilent

SERVER = "https://cluster:6443"


def answer(code: int) -> ApiRefused:
    return ApiRefused("GET /x", code, "Reason", "words")


@pytest.mark.parametrize(
    ("error", "needed", "said"),
    [
        (answer(403), jobs_right("list", "team"), "you may not list trainingjobs.surefoot.dev in namespace team (403)"),
        (answer(403), jobs_right("list", ""), "in the whole cluster (403): whoever has Kubernetes' role view"),
        (answer(403), jobs_right("patch", "team"), "whoever has Kubernetes' role edit there may"),
        (answer(403), Right("list", "pods", "team"), "you may not list pods in namespace team (403)"),
        (answer(403), Right("list", "nodes"), "a ClusterRole with the verb list on nodes"),
        (answer(401), jobs_right("list", "team"), "does not accept your credentials (401)"),
        (answer(404), jobs_right("list", "team"), "the CRD is not installed"),
        (answer(409), jobs_right("patch", "team"), "somebody else changed the job meanwhile"),
        (answer(500), jobs_right("get", "team"), "could not get trainingjobs.surefoot.dev in namespace team"),
        (ApiSilent("GET /x", TimeoutError()), jobs_right("get", "team"), f"Is {SERVER} running"),
    ],
)
def test_a_refusal_says_what_is_missing(error: FabricError, needed: Right, said: str) -> None:
    found = str(refused(error, needed, SERVER, "the CRD is not installed"))
    assert said in found
    assert "trying again" not in found
