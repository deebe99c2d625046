"""Implements `--rdzv-backend=surefoot`, registered as a `torchrun.handlers` entry point.

A torchrun that an agent started gets one round, the agent's generation. A second round is rejected, because only the
coordinator starts generations. This module runs only inside torchrun and needs torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
)

_BACKEND = "surefoot"


def create_handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Returns the factory of handlers; torchrun's registry calls it once."""
    return _create_agent_rendezvous


def _create_agent_rendezvous(params: RendezvousParameters) -> RendezvousHandler:
    if not os.environ.get("SUREFOOT_GENERATION"):
        raise RendezvousStateError(
            "--rdzv-backend=surefoot is for a torchrun that an agent starts in a TrainingJob (SUREFOOT_GENERATION is not"
            " set); use --standalone or --rdzv-backend=c10d here: the script's checkpoints work as well"
        )
    return AgentRendezvous(params.run_id, os.environ)


class AgentRendezvous(RendezvousHandler):
    """Serves one round from the environment variables that the agent set."""

    def __init__(self, run_id: str, environment: Mapping[str, str]) -> None:
        self._run_id = run_id
        self._environment = environment
        self._is_served = False

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return _BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        generation = self._environment["SUREFOOT_GENERATION"]
        if self._is_served:
            raise RendezvousClosedError(
                f"generation {generation} already had its rendezvous: the coordinator starts the next one, not torchrun; "
                "run torchrun with --max-restarts=0"
            )
        if self._environment.get("LOCAL_WORLD_SIZE", "1") != "1":
            raise RendezvousStateError(
                "an agent started several torchruns on this worker: set nprocPerNode to 1, and --nproc-per-node instead"
            )
        self._is_served = True
        host, port = self._environment["MASTER_ADDR"], int(self._environment["MASTER_PORT"])
        group_rank, group_world_size = int(self._environment["GROUP_RANK"]), int(self._environment["GROUP_WORLD_SIZE"])
        return RendezvousInfo(TCPStore(host, port), group_rank, group_world_size, RendezvousStoreInfo(host, port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Does nothing: the coordinator decides about rounds."""

    def num_nodes_waiting(self) -> int:
        return 0  # a newer generation ends this process; it never joins one

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True
