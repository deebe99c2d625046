"""Builds one trainer's environment: torchrun's variables and Surefoot's own.

Pure. A program that runs under torchrun finds here what it expects there; `TORCHELASTIC_RESTART_COUNT` is the epoch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from surefoot.protocol.messages import Assign

_OWN_TO_AGENT = (
    "SUREFOOT_TOKEN",
    "SUREFOOT_TOKEN_FILE",
    "SUREFOOT_COORDINATOR_URL",
    "SUREFOOT_COORDINATOR_FALLBACK_URL",
    "SUREFOOT_COORDINATOR_CA",
    "SUREFOOT_METRICS_PORT",
)
"""A trainer has no business with the coordinator: it gets neither its address nor the token. The port is taken."""


@dataclass(frozen=True, slots=True)
class TrainerPlace:
    """Describes a trainer's rank, store, socket and files."""

    assign: Assign
    local: int
    store: str
    """host:port."""
    socket: str
    error_file: str
    stacks_file: str = ""
    restarts_allowed: int = 0


def trainer_environment(base: Mapping[str, str], place: TrainerPlace) -> dict[str, str]:
    """Builds a trainer's environment over the agent's own.

    That carries the job's settings and the template's env.
    """
    assign = place.assign
    host, _, port = place.store.rpartition(":")
    kept = {name: value for name, value in base.items() if name not in _OWN_TO_AGENT}
    # as torchrun does: several ranks with a thread per core each would only fight; set it in the template to differ
    kept.setdefault("OMP_NUM_THREADS", "1")
    return kept | {
        "RANK": str(assign.first_rank + place.local),
        "LOCAL_RANK": str(place.local),
        "WORLD_SIZE": str(assign.world),
        "LOCAL_WORLD_SIZE": str(assign.local_ranks),
        "GROUP_RANK": str(assign.group_rank),
        "GROUP_WORLD_SIZE": str(assign.group_size),
        "ROLE_RANK": str(assign.first_rank + place.local),
        "ROLE_WORLD_SIZE": str(assign.world),
        "ROLE_NAME": "default",
        "MASTER_ADDR": host.strip("[]"),
        "MASTER_PORT": port,
        "TORCHELASTIC_RESTART_COUNT": str(assign.epoch),
        "TORCHELASTIC_MAX_RESTARTS": str(place.restarts_allowed),
        "TORCHELASTIC_RUN_ID": kept.get("SUREFOOT_JOB_UID", "surefoot"),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": place.error_file,
        "SUREFOOT_AGENT_SOCKET": place.socket,
        "SUREFOOT_EPOCH": str(assign.epoch),
        "SUREFOOT_STACKS_FILE": place.stacks_file,
    }
