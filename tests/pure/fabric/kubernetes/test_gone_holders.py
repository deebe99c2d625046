"""Holders that are gone are shown for a while, and not for ever: each node of an autoscaler has a new name."""

from __future__ import annotations

import time
from typing import Any, cast

from surefoot_operator.platforms.kubernetes.api_client import Api
from surefoot_operator.platforms.kubernetes.views.cluster_cache import GONE_SECONDS, ClusterCache


def pod(number: int, version: int) -> dict[str, Any]:
    metadata = {"name": f"h{number}", "namespace": "s", "uid": f"u{number}", "resourceVersion": str(version)}
    return {"metadata": metadata, "spec": {"nodeName": f"node-{number}"}, "status": {}}


def test_a_holder_that_is_gone_is_forgotten_after_a_while_or_when_another_comes() -> None:
    cache = ClusterCache(cast(Api, None))
    for number in range(2000):
        cache.holders._event("ADDED", pod(number, 100 + 2 * number))
        cache.holders._event("DELETED", pod(number, 101 + 2 * number))
    assert len(cache.gone_holders) == 2000
    cache.holders._event("ADDED", pod(7, 10_000))
    now = time.monotonic()
    cache.forget_gone_holders(now)
    assert len(cache.gone_holders) == 1999, "every job has yet to see that they are gone"
    cache.forget_gone_holders(now + GONE_SECONDS + 1)
    assert cache.gone_holders == {}
    cache.holders._event("DELETED", pod(7, 10_001))
    assert list(cache.gone_holders) == ["node-7"]
