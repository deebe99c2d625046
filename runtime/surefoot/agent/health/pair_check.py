"""Tries this agent's node together with another one, as the coordinator asks.

Used by `agent_process`, on its loop. One trial at a time, in a child of the warm process that is ended by its id after its time; what
it says is the answer. Where it did not begin at once, did not come to an end of itself, or this node stood still meanwhile, that
proves nothing: it would else blame the network for a busy machine, or the partner for a pause of this one.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, Literal

from surefoot.agent.health.stillness import Stillness
from surefoot.errors import SurefootError
from surefoot.launcher.child_process import Child
from surefoot.launcher.zygote_client import PairWords
from surefoot.protocol.messages import FromAgent
from surefoot.protocol.node_findings import LONGEST_TEXT
from surefoot.protocol.pair_messages import PairResult, PairStore, PairTrial
from surefoot.protocol.text import plain

LIMIT_SECONDS = 12.0
"""Longer than everything that is waited for in a trial, so that what hangs says so by itself where it can."""

BEGIN_SECONDS = 2.0
"""Who begins later may have missed its partner."""

STILL_SECONDS = 2.0
"""Who stood still for so long in the middle of a trial may have kept its partner waiting."""

_log = logging.getLogger(__name__)

StartPair = Callable[[PairWords, int], Awaitable[Child]]


@dataclass(frozen=True, slots=True)
class _PairOutcome:
    verdict: Literal["well", "fails", "unknown"]
    text: str
    worth_telling: bool = False
    """Whether it was more than waiting for a partner that may never have come."""


class PairCheck:
    """`ask` for a trial; `stop` where its worker gets a rank.

    Args:
        job: The job's id, a part of the trial's name.
        host: This node's address.
        start: Starts the child, which tells what it finds into a descriptor.
        send: Sends a message to the coordinator.
        notice: Tells people, by reason and text.
    """

    def __init__(
        self,
        job: str,
        host: str,
        start: StartPair,
        send: Callable[[FromAgent], None],
        notice: Callable[[str, str], None],
    ) -> None:
        self._job, self._host = job, host
        self._start, self._send, self._notice = start, send, notice
        self._request = 0
        self._running: PairTrial | None = None
        self._child: Child | None = None
        self._said: list[FromAgent] = []
        """Of the newest request, which a coordinator asks for again on each connection."""

    def ask(self, trial: PairTrial) -> Coroutine[Any, Any, None] | None:
        """Returns what is to be run.

        None: it is running already, or over and answered once more.
        """
        if trial.request == self._request:
            for message in self._said:
                self._send(message)
            return None
        self.stop()
        self._request, self._said, self._running = trial.request, [], trial
        return self._try(trial)

    def stop(self) -> None:
        """Ends the trial that runs; it proves nothing then."""
        self._running = None
        if self._child is not None:
            self._child.kill()

    async def _try(self, trial: PairTrial) -> None:
        asked_seconds = asyncio.get_running_loop().time()
        try:
            reading, writing = os.pipe2(os.O_CLOEXEC)
        except OSError as error:
            self._answer(trial, _PairOutcome("unknown", str(error)))
            return
        try:
            child = await self._start(PairWords(self._host, f"{self._job}/{trial.request}", trial.store), writing)
        except (SurefootError, OSError) as error:
            os.close(reading)
            self._answer(trial, _PairOutcome("unknown", str(error)))
            return
        finally:
            os.close(writing)
        self._child = child
        if self._running is not trial:
            child.kill()
        try:
            async with Stillness() as still:
                found = await self._heard(trial, reading, asked_seconds)
        finally:
            child.kill()
        if still.longest_seconds > STILL_SECONDS:
            # whatever it found: the partner may have failed for want of this side
            found = _PairOutcome("unknown", f"this node stood still for {still.longest_seconds:.0f} s: {found.text}")
        if self._running is not trial:
            found = _PairOutcome("unknown", "it was called off: this worker got a rank, or another trial")
        self._answer(trial, found)

    async def _heard(self, trial: PairTrial, reading: int, asked_seconds: float) -> _PairOutcome:
        """What comes of it, from what the child says until it ends or its time is over."""
        loop = asyncio.get_running_loop()
        stream, found = asyncio.StreamReader(), _PairOutcome("unknown", "its process ended early")
        pipe = os.fdopen(reading, "rb")
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), pipe)
        in_time = met = False
        try:
            async with asyncio.timeout(LIMIT_SECONDS):
                while line := await stream.readline():
                    said = json.loads(line)
                    met = met or "met" in said
                    if "begun" in said:
                        in_time = loop.time() - asked_seconds <= BEGIN_SECONDS
                    if "port" in said:
                        self._tell(trial, PairStore(trial.request, self._address(int(said["port"]))))
                    if "verdict" in said:
                        found = _PairOutcome(said["verdict"], str(said["text"]))
        except (ValueError, LookupError) as error:
            return _PairOutcome("unknown", f"its process said something else than it should: {error}")
        except TimeoutError:
            found = _PairOutcome("fails", f"it hangs: not over after {LIMIT_SECONDS:g} s")
        finally:
            transport.close()
        if found.verdict == "fails" and not in_time:
            return _PairOutcome("unknown", f"it began late, and then: {found.text}")
        return replace(found, worth_telling=met or bool(trial.store))

    def _address(self, port: int) -> str:
        return f"[{self._host}]:{port}" if ":" in self._host else f"{self._host}:{port}"

    def _answer(self, trial: PairTrial, found: _PairOutcome) -> None:
        text = plain(found.text)[:LONGEST_TEXT]
        _log.info("an all-reduce with node %s, before joining: %s (%s)", trial.partner, found.verdict, text)
        self._tell(trial, PairResult(trial.request, found.verdict, text))
        if found.verdict == "fails" and found.worth_telling:
            self._notice("AllReduceFails", f"an all-reduce with node {trial.partner} failed: {text}")

    def _tell(self, trial: PairTrial, message: FromAgent) -> None:
        if trial.request == self._request:
            self._said.append(message)
            self._send(message)
