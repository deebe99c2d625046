"""Reads the size of a complete checkpoint from the holders' indexes.

Called by `supervise` every few seconds; every call has a short timeout.
"""

from __future__ import annotations

from itertools import chain

from surefoot.errors import SurefootError
from surefoot.holder import Credentials, HolderClient
from surefoot.holder.provisioning import HolderAdmin
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.identities import Checkpoint, HolderEndpoint, HolderId
from surefoot_operator.platforms.local.run_records import HolderRecord, NodeRecord

_CALL_SECONDS = 0.3


def checkpoint_bytes(job: str, nodes: list[NodeRecord], checkpoint: Checkpoint) -> int | None:
    """Adds up one checkpoint's bytes over ranks; None while any is missing."""
    found: dict[int, RankManifest] = {}
    for node in nodes:
        for manifest in chain(*(_index_of(job, node, holder) for holder in node.holders)):
            if manifest.save.checkpoint == checkpoint:
                found[manifest.save.rank] = manifest
    if not found or len(found) < next(iter(found.values())).world:
        return None
    return sum(m.stream_bytes + m.values_bytes + m.digests_bytes for m in found.values())


def _index_of(job: str, node: NodeRecord, holder: HolderRecord) -> tuple[RankManifest, ...]:
    host, port, password = holder.host, holder.port, holder.admin_password
    admin = HolderAdmin(host, port, password, _CALL_SECONDS)
    try:
        place = HolderEndpoint(HolderId(node.name, admin.instance_of(job)), host, port, node.domain)
        client = HolderClient(place, job, Credentials("", password), _CALL_SECONDS)
        try:
            return client.index().manifests
        finally:
            client.close()
    except (SurefootError, ValueError):
        return ()  # damaged, just killed, or not provisioned yet: a figure for people is not worth waiting for
    finally:
        admin.close()
