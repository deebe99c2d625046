"""Implements `--rdzv-backend=surefoot`, registered as a `torchrun.handlers` entry point.

Started by an agent (SUREFOOT_EPOCH is set), torchrun gets one round, the agent's epoch; a second one is refused by
name, because only the coordinator opens rounds. Standing alone (`--rdzv-endpoint=HOST:PORT --rdzv-id=JOB_UID`), each
round is an epoch that the coordinator committed. This module runs inside torchrun only: it needs torch.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
from collections.abc import Callable, Mapping

from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
)

from surefoot.errors import SurefootError
from surefoot.integrations.rendezvous import RendezvousMember, Round
from surefoot.launcher.tcp_store import listening_store

_BACKEND = "surefoot"
_AGENTS = "/v1/agents"


def create_handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Returns the factory of handlers; torchrun's registry calls it once."""
    return _handler


def _handler(params: RendezvousParameters) -> RendezvousHandler:
    if os.environ.get("SUREFOOT_EPOCH"):
        return AgentRound(params.run_id, os.environ)
    return CoordinatorRounds(params, os.environ)


class AgentRound(RendezvousHandler):
    """Serves one round from the environment that an agent gave."""

    def __init__(self, run_id: str, environment: Mapping[str, str]) -> None:
        self._run_id = run_id
        self._environment = environment
        self._taken = False

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return _BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        epoch = self._environment["SUREFOOT_EPOCH"]
        if self._taken:
            raise RendezvousClosedError(
                f"epoch {epoch} had its round: torchrun's own restarts open none, the coordinator does; "
                "run torchrun with --max-restarts=0"
            )
        if self._environment.get("LOCAL_WORLD_SIZE", "1") != "1":
            raise RendezvousStateError(
                "an agent started several torchruns on this worker: set nprocPerNode to 1, and --nproc-per-node instead"
            )
        self._taken = True
        host, port = self._environment["MASTER_ADDR"], int(self._environment["MASTER_PORT"])
        place, places = int(self._environment["GROUP_RANK"]), int(self._environment["GROUP_WORLD_SIZE"])
        return RendezvousInfo(TCPStore(host, port), place, places, RendezvousStoreInfo(host, port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Rounds are the coordinator's."""

    def num_nodes_waiting(self) -> int:
        return 0  # a newer epoch ends this process; it never joins one

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


class CoordinatorRounds(RendezvousHandler):
    """Takes rounds from a coordinator: torchrun waits, warm, for an epoch."""

    def __init__(self, params: RendezvousParameters, environment: Mapping[str, str]) -> None:
        self._run_id = params.run_id
        self._host = params.local_addr or environment.get("SUREFOOT_HOST") or socket.gethostname()
        self._store: TCPStore | None = None
        self._epoch = 0
        self._round = Round(_url(params), _member(params, environment))

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return _BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """Blocks until the coordinator commits an epoch with this worker.

        torchrun's workers are dead by then.
        """
        if self._epoch and not self._round.overtaken(self._epoch):
            self._round.failed(self._epoch, "torchrun's workers failed; its log has their errors")
        self._round.stopped()
        self._store = None
        try:
            assign = self._round.next()
            if assign is None:
                raise RendezvousGracefulExitError(f"job {self._run_id} needs this worker no more")
            self._epoch = assign.epoch
            if assign.group_rank == 0:
                self._store = store = listening_store(self._host)
                host, port = self._host, store.port
                self._round.store_ready(assign.epoch, f"{host}:{port}")
            else:
                host, _, text = self._round.store(assign.epoch).rpartition(":")
                port = int(text)
                self._store = store = TCPStore(host, port)
        except SurefootError as error:
            raise RendezvousConnectionError(str(error)) from error
        return RendezvousInfo(store, assign.group_rank, assign.group_size, RendezvousStoreInfo(host, port))

    def is_closed(self) -> bool:
        return self._round.retired

    def set_closed(self) -> None:
        """Does nothing: only the coordinator closes a job."""

    def num_nodes_waiting(self) -> int:
        """More than 0 makes torchrun stop its workers for the next round."""
        return 1 if self._epoch and (self._round.overtaken(self._epoch) or self._round.retired) else 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        """Reports the end to the coordinator; with an exception in flight: failure.

        torchrun calls this last.
        """
        if self._epoch and not self._round.overtaken(self._epoch):
            if sys.exc_info()[0] is None:
                self._round.finished(self._epoch)
            else:
                self._round.failed(self._epoch, "torchrun gave up; its log has the workers' errors")
        self._round.close()
        self._store = None
        return True


def _url(params: RendezvousParameters) -> str:
    if not params.endpoint:
        raise RendezvousStateError("--rdzv-endpoint=HOST:PORT is missing: the address of surefoot's coordinator")
    scheme = "wss" if params.get_as_bool("tls", False) else "ws"
    return f"{scheme}://{params.endpoint}{_AGENTS}"


def _member(params: RendezvousParameters, environment: Mapping[str, str]) -> RendezvousMember:
    index = params.get("index", environment.get("SUREFOOT_WORKER_INDEX"))
    if index is None:
        raise RendezvousStateError(
            "which worker is this? set SUREFOOT_WORKER_INDEX, or --rdzv-conf=index=N, to its index in the job"
        )
    return RendezvousMember(
        job=params.run_id,
        index=int(index),
        attempt=int(params.get("attempt", environment.get("SUREFOOT_WORKER_ATTEMPT", "0"))),
        node=environment.get("SUREFOOT_NODE") or socket.gethostname(),
        token=environment.get("SUREFOOT_TOKEN", ""),
        incarnation=secrets.token_hex(8),
    )
