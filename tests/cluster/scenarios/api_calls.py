"""What the operator asks of the API server, as that one counts it in its audit log."""

from __future__ import annotations

import json

from cluster import layout
from cluster.scenarios.installed import NAMESPACE

_ACCOUNT = f"system:serviceaccount:{NAMESPACE}:"


def api_calls() -> dict[str, int]:
    """Calls of the chart's service accounts by verb and resource, both replicas together."""
    found: dict[str, int] = {}
    try:
        lines = layout.AUDIT_LOG.open()
    except FileNotFoundError:
        return {}  # only the engine without docker keeps an audit log
    with lines:
        for line in lines:
            if _ACCOUNT not in line:
                continue
            body = json.loads(line)
            if body["user"]["username"].startswith(_ACCOUNT):
                what = (
                    f"{body['verb']} {body['objectRef'].get('resource', '')}" if "objectRef" in body else body["verb"]
                )
                found[what] = found.get(what, 0) + 1
    return found


def since(after: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    """What was called between two counts."""
    return {what: n - before.get(what, 0) for what, n in sorted(after.items()) if n > before.get(what, 0)}
