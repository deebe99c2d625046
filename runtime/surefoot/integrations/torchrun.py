"""Implements `--rdzv-backend=surefoot`, registered as a `torchrun.handlers` entry point.

Started by an agent (SUREFOOT_EPOCH is set), torchrun gets one round, the agent's epoch; a second one is refused by
name, because only the coordinator opens rounds. Standing alone (`--rdzv-endpoint=HOST:PORT --rdzv-id=JOB_UID`), each
round is an epoch that the coordinator committed. This module runs inside torchrun only: it needs torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

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

from surefoot.agent.coordinator_client import AgentRefused, CoordinatorClient, begun
from surefoot.errors import SurefootError
from surefoot.launcher.tcp_store import listening_store
from surefoot.protocol.messages import (
    Assign,
    Exited,
    Finished,
    FromAgent,
    Heartbeat,
    Hello,
    Retire,
    Stop,
    Stopped,
    StoreReady,
    ToAgent,
    Welcome,
)

# ---- rendezvous ------------------------------------------------------------------------------------------------------
# Connects a standalone torchrun to the coordinator, in a thread. No torch, no trainers: torchrun starts those. Made and
# closed by `handler.CoordinatorRounds`, whose thread waits here.

_STORE_SECONDS = 300.0
_CLOSE_SECONDS = 5.0
_UNKNOWN = -1


@dataclass(frozen=True, slots=True)
class RendezvousMember:
    """Identifies this worker in its Hello."""

    job: str
    index: int
    attempt: int
    node: str
    incarnation: str
    token: str = field(repr=False)


class Round:
    """Speaks to the coordinator in a thread, heartbeats included; thread-safe."""

    def __init__(self, url: str, member: RendezvousMember) -> None:
        self._url = url
        self._member = member
        self._changed = threading.Condition()
        # guarded by _changed
        self._claimed = 0
        self._stopped = 0
        self._taken = 0
        self._idle = True
        self._assign: Assign | None = None
        self._facts: tuple[FromAgent, ...] = ()
        self._store: str | None = None
        self._retired = False
        self._refused: str | None = None
        self._line: CoordinatorClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending: asyncio.Event | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="surefoot-round", daemon=True)
        self._thread.start()

    @property
    def retired(self) -> bool:
        with self._changed:
            return self._retired

    def overtaken(self, epoch: int) -> bool:
        """Whether a newer epoch is claimed."""
        with self._changed:
            return self._claimed > epoch

    def next(self) -> Assign | None:
        """Waits for the next epoch with this worker; None: it is dismissed.

        There is no time limit. Raises SurefootError once the connection ended for good.
        """
        with self._changed:
            while True:
                if self._refused is not None:
                    raise SurefootError(self._refused)
                if self._retired:
                    return None
                assign = self._assign
                if assign is not None and assign.epoch == self._claimed > self._taken:
                    self._taken = assign.epoch
                    self._idle = False
                    return assign
                self._changed.wait()

    def store(self, epoch: int) -> str:
        """Waits for the epoch's store address; SurefootError if overtaken first."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._stored(epoch) or self._claimed > epoch or self._retired, _STORE_SECONDS
            )
            address = self._stored(epoch)
        if address is None:
            raise SurefootError(f"epoch {epoch} ended before its store was there")
        return address

    def stopped(self) -> None:
        """Reports torchrun's workers dead: the next epoch may begin."""
        with self._changed:
            self._stopped = max(self._claimed, self._stopped)
            self._store = None
            self._idle = True
            message = Stopped(self._stopped)
        self._say(message)

    def store_ready(self, epoch: int, address: str) -> None:
        with self._changed:
            self._store = address
        self._fact(StoreReady(epoch, address), epoch)

    def failed(self, epoch: int, cause: str) -> None:
        with self._changed:
            rank = self._assign.first_rank if self._assign is not None else 0
        self._fact(Exited(epoch, rank, 1, cause, secondary=False, step=0), epoch)

    def finished(self, epoch: int) -> None:
        """Reports success, without steps: trainers under plain torchrun report none."""
        self._fact(Finished(epoch, 0, steps=_UNKNOWN), epoch)

    def close(self) -> None:
        """Sends what is still queued and ends the thread."""
        with self._changed:
            loop, ending = self._loop, self._ending
        if loop is not None and ending is not None:
            with contextlib.suppress(RuntimeError):  # it has ended by itself
                loop.call_soon_threadsafe(ending.set)
        self._thread.join(_CLOSE_SECONDS)

    def _stored(self, epoch: int) -> str | None:
        assign = self._assign
        return assign.store if assign is not None and assign.epoch == epoch else None

    def _fact(self, message: FromAgent, epoch: int) -> None:
        with self._changed:
            if epoch == self._claimed:
                self._facts = (*self._facts, message)
        self._say(message)

    def _say(self, message: FromAgent) -> None:
        with self._changed:
            loop, line = self._loop, self._line
        if loop is not None and line is not None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(functools.partial(line.send, message))

    # ---- in the thread ------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        line = CoordinatorClient(begun(self._url), self._hello, self._heartbeat, self._hear)
        ending = asyncio.Event()
        with self._changed:
            self._line, self._loop, self._ending = line, asyncio.get_running_loop(), ending
        talking = asyncio.create_task(line.run())
        waiting = asyncio.create_task(ending.wait())
        await asyncio.wait([talking, waiting], return_when=asyncio.FIRST_COMPLETED)
        if not talking.done():
            await line.wait_sent(_CLOSE_SECONDS / 2)
        for task in (talking, waiting):
            task.cancel()
        results = await asyncio.gather(talking, waiting, return_exceptions=True)
        with self._changed:
            if isinstance(results[0], AgentRefused):
                self._refused = str(results[0])
            elif not ending.is_set():
                self._refused = f"the line to the coordinator ended: {results[0]!r}"
            self._changed.notify_all()

    def _hello(self) -> Hello:
        who = self._member
        with self._changed:
            return Hello(
                job=who.job,
                index=who.index,
                attempt=who.attempt,
                incarnation=who.incarnation,
                node=who.node,
                token=who.token,
                epoch=self._taken if self._stopped <= self._taken else 0,
                stopped=self._stopped,
                warm=True,
                store=self._store,
            )

    def _heartbeat(self) -> Heartbeat:
        with self._changed:
            return Heartbeat(epoch=self._taken, stopped=self._stopped, warm=True)

    def _hear(self, message: ToAgent) -> None:
        again: tuple[FromAgent, ...] = ()
        with self._changed:
            match message:
                case Welcome():
                    again = self._facts
                case Stop(epoch=epoch):
                    self._claim(epoch)
                    if self._idle:  # torchrun waits in a round: none of its workers lives
                        self._stopped = max(self._stopped, epoch)
                        again = (Stopped(self._stopped),)
                case Assign(epoch=epoch) if epoch >= self._claimed:
                    self._claim(epoch)
                    self._assign = message
                case Retire():
                    self._retired = True
                case _:
                    pass  # holds, holders and requests are for agents, which keep staging memory
            self._changed.notify_all()
        for fact in again:
            self._say(fact)

    def _claim(self, epoch: int) -> None:
        if epoch > self._claimed:
            self._claimed, self._assign, self._facts = epoch, None, ()


# ---- torchrun --------------------------------------------------------------------------------------------------------

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
