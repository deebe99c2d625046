"""Copies a rank save between holders, as the leader asked.

The agent runs it in a thread.
"""

from __future__ import annotations

import logging

from surefoot.drain.copying import copy_save
from surefoot.drain.token_bucket import TokenBucket
from surefoot.errors import SurefootError
from surefoot.protocol.identities import RankSave
from surefoot.tiers import Tier

log = logging.getLogger(__name__)


def repair(save: RankSave, source: Tier, target: Tier, epoch: int) -> str | None:
    """Copies, verifies, commits with the writer's epoch `epoch`; None, or why it failed. Closes both tiers."""
    try:
        size = copy_save(save, [source], target, epoch, TokenBucket())
    except SurefootError as error:
        log.warning("repairing %s from %s to %s failed: %s", save, source.name, target.name, error)
        return str(error)
    finally:
        source.close()
        target.close()
    log.info("repaired %s from %s to %s: %d bytes", save, source.name, target.name, size)
    return None
