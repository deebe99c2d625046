"""Names a job's shard, and a shard's lease, label and address.

Pure; called by the composition root and `shard_election`. With one shard every name is that of an operator without
shards, so that an upgrade renames nothing.
"""

from __future__ import annotations

import hashlib
import ipaddress
from urllib.parse import urlsplit, urlunsplit

from surefoot_operator.api.spec import GROUP

HIGHEST = 8
"""Shards of one release at most: each costs every replica two calls a second. The chart's role names as many leases."""


def shard_of(uid: str, shards: int) -> int:
    """Returns the shard of the job with this uid."""
    return int.from_bytes(hashlib.sha256(uid.encode()).digest()[:8]) % shards


def lease_name(base: str, shard: int) -> str:
    """Names the Lease of a shard."""
    return base if shard == 0 else f"{base}-shard-{shard}"


def leader_label(shard: int) -> str:
    """Names the label by which a shard's Service finds its leader."""
    return f"{GROUP}/leader" if shard == 0 else f"{GROUP}/leads-shard-{shard}"


def shard_url(url: str, shard: int) -> str:
    """Returns where agents of a shard connect.

    Those of shard 0 connect to `url`. The Service's name gets the shard's number. A plain address has no Service behind it, and stays.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    if shard == 0 or _is_address(host):
        return url
    first, dot, rest = host.partition(".")
    port = f":{parts.port}" if parts.port is not None else ""
    return urlunsplit(parts._replace(netloc=f"{first}-{shard}{dot}{rest}{port}"))


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
