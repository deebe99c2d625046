"""What a trainer's end of the line does with answers that nobody waits for any more."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest

from surefoot.agent import line, trainer_link
from surefoot.agent.framing import framed
from surefoot.agent.trainer_link import AgentLink
from surefoot.protocol.identities import Checkpoint


def open_files(name: str) -> int:
    found = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found += name in os.readlink(entry)
        except FileNotFoundError:  # the listing's own
            continue
    return found


def test_an_answer_that_comes_too_late_leaves_no_descriptor_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_link, "_LEFT_SECONDS", 0.0)
    ours, theirs = socket.socketpair()
    link = AgentLink(ours)
    link._reader.start()
    memory = os.memfd_create("surefoot-late")
    try:
        assert link.left(Checkpoint(1, 5)) == {}
        answer = framed(line.encode(line.LeftHere(4096, ((0, 0, 16, "layout"),))))
        socket.send_fds(theirs, [answer[:1]], [memory])
        theirs.sendall(answer[1:] + framed(line.encode(line.LevelIs(3))))
        deadline = time.monotonic() + 60
        while link.level() != 3:  # the reader has taken both
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert open_files("surefoot-late") == 1, "the test's own"
    finally:
        os.close(memory)
        theirs.close()
        link.close(0)
