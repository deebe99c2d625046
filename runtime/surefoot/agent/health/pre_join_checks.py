"""Tries this agent's node once, before it gets a rank.

Run by `node_monitor` in a thread. `surefoot.node_tests` is a process of its own: numbers that go wrong may end it, a disk may hold
it, and the warm process imports at the same time. What is slow proves nothing and is logged; what fails no well
node does. A node that was found well is not tried again for some hours, whichever worker comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from surefoot.errors import SurefootError
from surefoot.launcher.child_process import Child
from surefoot.launcher.starter import PairWords
from surefoot.protocol.messages import LONGEST_TEXT, FromAgent, NodeFinding, PairResult, PairStore, PairTrial
from surefoot.protocol.text import listed, plain, shorten

_log = logging.getLogger(__name__)


LIMIT_SECONDS = 9.0
"""For all trials together; what was told by then counts. A `node_monitor` says of longer ones that they hang."""

KEPT_SECONDS = 6 * 3600.0
_BOOT = Path("/proc/sys/kernel/random/boot_id")

Probe = Callable[[], Sequence[str]]
"""Tries the node and returns what was told, line by line."""


class JoinCheck:
    """Finds what fails on this node.

    `blamed` False: people are told, and nothing follows.
    """

    name = "join"
    period_seconds = math.inf

    def __init__(
        self, node: str, folder: Path, blamed: bool, probe: Probe, clock: Callable[[], float] = time.time
    ) -> None:
        self._node, self._kept = node, folder / f"join-check-{node}.json"
        self._blamed, self._probe, self._clock = blamed, probe, clock

    def find(self) -> Sequence[NodeFinding]:
        if self._is_known_well():
            return ()
        told = _read(self._probe())
        trials = [one for one in told if "verdict" in one]
        failed = [one for one in trials if one.get("verdict") == "fails"]
        for one in trials:
            if one.get("verdict") == "unknown":
                _log.info("before joining, %s proves nothing: %s", one.get("name"), one.get("text"))
        _log.info("this node was tried before joining: %s", _rates(trials) or "nothing could be tried")
        if not failed:
            if not any(one.get("over") for one in told):
                raise ChildProcessError(_cut_off(told, trials))  # proves nothing, and people are told
            self._keep()
        blame = "node" if self._blamed else "unknown"
        return [NodeFinding(str(one["reason"]), plain(str(one["text"])), blame) for one in failed]  # type: ignore[arg-type]

    def _is_known_well(self) -> bool:
        try:
            kept = json.loads(self._kept.read_text())
            age = self._clock() - float(kept["at_seconds"])
            return kept["boot"] == _boot() and kept["node"] == self._node and 0.0 <= age < KEPT_SECONDS
        except (OSError, ValueError, KeyError, TypeError):
            return False  # none, or one of another version

    def _keep(self) -> None:
        body = json.dumps({"node": self._node, "boot": _boot(), "at_seconds": self._clock()})
        new = self._kept.with_suffix(f".{os.getpid()}")
        try:
            new.write_text(body)
            new.replace(self._kept)
        except OSError as error:
            _log.info("that this node is well is not kept: %s", error)


class ProbeProcess:
    """Runs `surefoot.node_tests`; `own` is its process while it runs."""

    def __init__(self, host: str, folder: Path, environment: Mapping[str, str]) -> None:
        self._command = [sys.executable, "-m", "surefoot.node_tests", str(os.getpid()), host, str(folder)]
        # one thread: what is tried is whether results are right, and all cores are busy with imports
        self._environment = {**environment, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self._running: set[int] = set()

    def own(self) -> set[int]:
        return set(self._running)

    def __call__(self) -> Sequence[str]:
        process = subprocess.Popen(
            self._command, env=self._environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        self._running.add(process.pid)
        ended = ""
        try:
            said, errors = process.communicate(timeout=LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            ended = f"took longer than {LIMIT_SECONDS:g} s"
            process.kill()
            said, errors = process.communicate()
        finally:
            self._running.discard(process.pid)
        if not ended and process.returncode < 0:
            ended = f"was ended by signal {-process.returncode}"
        if errors:
            _log.info("the trial of this node said: %s", shorten(plain(errors), 500))
        return [*said.splitlines(), *([json.dumps({"ended": ended})] if ended else [])]


def _read(lines: Sequence[str]) -> list[Mapping[str, Any]]:
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]


def _cut_off(told: Sequence[Mapping[str, Any]], trials: Sequence[Mapping[str, Any]]) -> str:
    """Says how far the probe came."""
    how = next((str(one["ended"]) for one in told if "ended" in one), "ended early")
    done = listed([str(one.get("name")) for one in trials]) if trials else "nothing"
    return f"the trial of this node {how}, after {done}: what is left of it proves nothing, and the worker joins"


def _rates(trials: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(f"{one['name']} {one['rate']:.3g} {one['unit']}/s" for one in trials if one.get("rate"))


def _boot() -> str:
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""


# ---- whether the machine is idle -------------------------------------------------------------------------------------
# Measures for how long this process stood still. A machine that is paused, and a process that is stopped, sees others'
# time run out: what a deadline says then is said of the pause, and not of the node that was waited for.

TICK_SECONDS = 0.25


class Stillness:
    """Ticks on the event loop from `async with` to its end.

    `longest_seconds` is the worst delay of a tick.
    """

    def __init__(self) -> None:
        self.longest_seconds = 0.0
        self._ticking: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._ticking = asyncio.create_task(self._tick(asyncio.get_running_loop().time() + TICK_SECONDS))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._ticking is not None:
            self._ticking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticking

    async def _tick(self, due: float) -> None:
        """`due` is of the first tick: this task may begin late, too."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                await asyncio.sleep(TICK_SECONDS)
            finally:  # a deadline may end the wait in the same turn of the loop that comes late
                self.longest_seconds = max(self.longest_seconds, loop.time() - due)
            due = loop.time() + TICK_SECONDS


# ---- pair test -------------------------------------------------------------------------------------------------------
# Tries this agent's node together with another one, as the coordinator asks. One trial at a time, in a child of the
# warm process that is ended by its id after its time; what it says is the answer. Where it did not begin at once, did
# not come to an end of itself, or this node stood still meanwhile, that proves nothing: it would else blame the network
# for a busy machine, or the partner for a pause of this one.

PAIR_LIMIT_SECONDS = 12.0
"""Longer than everything that is waited for in a trial, so that what hangs says so by itself where it can."""

BEGIN_SECONDS = 2.0
"""Who begins later may have missed its partner."""

STILL_SECONDS = 2.0
"""Who stood still for so long in the middle of a trial may have kept its partner waiting."""


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
            async with asyncio.timeout(PAIR_LIMIT_SECONDS):
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
            found = _PairOutcome("fails", f"it hangs: not over after {PAIR_LIMIT_SECONDS:g} s")
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
