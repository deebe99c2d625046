"""Finds out whether another program writes to the same job's folder, and tells both.

There is no fence here. A start waits for a former program that is still ending (a batch system's requeue), and is
refused where that does not end. A program that another one overtook is told at its next save: it goes on, and its
saves stay on its own branch, where they cut nothing off.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

from surefoot import metrics
from surefoot.checkpointer.library_mode.epoch_records import Patience, answered
from surefoot.errors import OtherWriter, TierError
from surefoot.flush.garbage_collection import BEAT_SECONDS
from surefoot.linux_process import ProcessIdentity, is_alive, this_process
from surefoot.tiers.persistent import ObjectStoreTier

log = logging.getLogger(__name__)

FORMER_WRITER_SECONDS = 60.0
"""How long a start waits for the program before it: batch systems give one 30 s to end."""
STALE_SECONDS = 60.0
"""A sign of life that is older counts as none; clocks of hosts differ by less."""
_WATCH_SECONDS = 2.5 * BEAT_SECONDS
_MAX_MARKS = 4

Verdict = Literal["own", "writes", "ended", "unknown"]


@dataclass(frozen=True, slots=True)
class WriterMark:
    """Identifies the process that writes an epoch, and the time of its last sign of life (Unix seconds)."""

    host: str
    kernel: str
    """The boot, and the namespace in which `process` is a name."""
    process: str
    program: str
    at: float = field(default_factory=time.time)

    @classmethod
    def here(cls) -> WriterMark:
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
            kernel, process = f"{boot} {os.readlink('/proc/self/ns/pid')}", this_process()
        except (OSError, AssertionError):  # no /proc, or not all of it: only a mark that changes tells then
            kernel, process = "", ProcessIdentity(os.getpid(), 0)
        return cls(socket.gethostname(), kernel, str(process), sys.argv[0] if sys.argv else "")

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> WriterMark | None:
        """None for what is no such mark."""
        try:
            body = json.loads(text)
            names = {name: str(body[name])[:1000] for name in ("host", "kernel", "process", "program")}
            ProcessIdentity.parse(names["process"])
            return cls(**names, at=float(body["at"]))
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return None

    def __str__(self) -> str:
        return f"process {self.process.partition(':')[0]} on {self.host} ({self.program or 'a program without a name'})"


def judge(
    mark: WriterMark | None, own: WriterMark, now: float, lives: Callable[[ProcessIdentity], bool] = is_alive
) -> Verdict:
    """Returns what a mark says of its writer.

    `unknown` where only a change of the mark would tell: it is of another host, and young or from the future.
    """
    if mark is None:
        return "unknown"
    if (mark.host, mark.kernel, mark.process) == (own.host, own.kernel, own.process):
        return "own"
    if mark.kernel and mark.kernel == own.kernel:
        return "writes" if lives(ProcessIdentity.parse(mark.process)) else "ended"
    return "ended" if now - mark.at > STALE_SECONDS else "unknown"


class _FormerWriter:
    """Watches the mark of one epoch."""

    def __init__(self, tier: ObjectStoreTier, generation: int) -> None:
        self._tier, self.epoch = tier, generation
        self._first, self._since = self._text(), time.monotonic()
        self._moved = False
        self.name = "another program"

    def look(self, own: WriterMark) -> Verdict:
        """Judges the mark as it is now; one of another host counts as dead when it has not changed for a while."""
        text = self._text()
        if text is None:
            return "ended"
        mark = WriterMark.parse(text)
        self.name = str(mark) if mark is not None else self.name
        self._moved = self._moved or text != self._first
        verdict = judge(mark, own, time.time())
        if verdict != "unknown" or self._moved:
            return "writes" if verdict == "unknown" else verdict
        return "ended" if time.monotonic() - self._since >= _WATCH_SECONDS else "unknown"

    def _text(self) -> str | None:
        return answered(self._tier.location, lambda: self._tier.generations.read_heartbeat(self.epoch))


def wait_for_former_writers(
    tier: ObjectStoreTier, own: WriterMark, allowed: bool, patience: Patience | None = None
) -> None:
    """Waits until no other program writes here.

    Raises OtherWriter where one does not end in time, unless a second one is `allowed`.
    """
    patience = patience or Patience()
    for epoch in answered(tier.location, tier.generations.list_with_heartbeat)[-_MAX_MARKS:]:
        former = _FormerWriter(tier, epoch)
        while (verdict := former.look(own)) in ("writes", "unknown"):
            who = f"{tier.location}: {former.name}"
            if verdict == "writes" and allowed:
                log.error(
                    "%s writes here too, as epoch %d: later starts continue from the newer program's checkpoints",
                    who,
                    epoch,
                )
                break
            if not patience.wait(f"{who} has not ended its epoch {epoch}", FORMER_WRITER_SECONDS):
                raise OtherWriter(
                    f"{who} still writes here, as epoch {epoch}: two programs would undo each other's work. End that one, or"
                    " give this one its own job_uid= or folder=; to start nevertheless, set SUREFOOT_SECOND_WRITER=allow"
                )
        if verdict == "ended":
            answered(tier.location, partial(tier.generations.delete_heartbeat, epoch))


class WriterWatch:
    """Gives this program's signs of life, and looks whether another one overtook it."""

    def __init__(self, generation: int, mark: WriterMark | None = None) -> None:
        self._epoch, self._mark = generation, mark or WriterMark.here()
        self.overtaken = False
        self.refusal = ""
        """Why this program must end, once another start claimed a newer generation; empty: none did."""
        self._saves, self._next_line = 0, 1

    def beat(self, tier: ObjectStoreTier) -> None:
        tier.generations.write_heartbeat(self._epoch, replace(self._mark, at=time.time()).to_text())

    def end(self, tier: ObjectStoreTier) -> None:
        tier.generations.delete_heartbeat(self._epoch)

    def check(self, tier: ObjectStoreTier) -> bool:
        """Returns whether another start claimed a newer epoch.

        Logs it at the first save after that, and each time their number has doubled.
        """
        if not self.overtaken:
            try:
                self.overtaken = tier.generations.is_overtaken(self._epoch)
            except TierError as silent:
                log.info("cannot check whether another program writes to %s: %s", tier.location, silent)
        if self.overtaken:
            self._saves += 1
            if self._saves >= self._next_line:
                self._next_line *= 2
                metrics.fallbacks.labels("writer_overtaken").inc()
                self.refusal = self._sentence(tier)
                log.error("%s", self.refusal)
        return self.overtaken

    def _sentence(self, tier: ObjectStoreTier) -> str:
        try:
            mark = WriterMark.parse(tier.generations.read_heartbeat(self._epoch + 1) or "")
        except TierError:
            mark = None
        who, when = "another start", ""
        if mark is not None:
            who, when = str(mark), time.strftime(", last seen at %Y-%m-%d %H:%M:%S UTC,", time.gmtime(mark.at))
        return (
            f"{tier.location}: {who}{when} has begun generation {self._epoch + 1} while this program runs generation"
            f" {self._epoch}. Later starts continue from the other program's checkpoints and ignore this one's, so this"
            " program is ended. Give each training its own job_uid= or folder="
        )
