"""Connects a standalone torchrun to the coordinator, in a thread.

No torch, no trainers: torchrun starts those. Made and closed by `handler.CoordinatorRounds`, whose thread waits here.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from dataclasses import dataclass, field

from surefoot.agent.addresses import begun
from surefoot.agent.coordinator_client import AgentRefused, CoordinatorClient
from surefoot.errors import SurefootError
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
