"""What is written into the webhooks' configuration, and when nothing is."""

from __future__ import annotations

import base64
from typing import Any

from surefoot_operator.controller.admission_webhooks import trusting

AUTHORITY = "-----BEGIN CERTIFICATE-----\n"
WANTED = base64.b64encode(AUTHORITY.encode()).decode()


def configuration(*bundles: str | None) -> dict[str, Any]:
    return {
        "metadata": {"resourceVersion": "7"},
        "webhooks": [{"clientConfig": {} if one is None else {"caBundle": one}} for one in bundles],
    }


def test_each_webhook_that_trusts_another_or_nobody_is_patched() -> None:
    version, *operations = trusting(configuration(None, WANTED, "b3RoZXI="), AUTHORITY)
    assert version == {"op": "test", "path": "/metadata/resourceVersion", "value": "7"}
    assert [one["path"] for one in operations] == [
        "/webhooks/0/clientConfig/caBundle",
        "/webhooks/2/clientConfig/caBundle",
    ]
    assert {one["value"] for one in operations} == {WANTED}


def test_nothing_is_written_where_all_trust_us() -> None:
    assert trusting(configuration(WANTED, WANTED), AUTHORITY) == []
    assert trusting({}, AUTHORITY) == []
