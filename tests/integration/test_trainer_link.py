"""What a trainer's end of the line does with late answers, and which slot it writes next."""

from __future__ import annotations

import ctypes
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from support.builders import endpoint
from surefoot.ipc import agent_client as trainer_link
from surefoot.ipc import trainer_messages as line
from surefoot.ipc.agent_client import AgentBackend
from surefoot.ipc.memfd import MemoryFile
from surefoot.ipc.trainer_messages import add_frame
from surefoot.protocol.identities import Checkpoint
from surefoot.protocol.messages import IntervalExponent


def open_files(name: str) -> int:
    found = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found += name in os.readlink(entry)
        except FileNotFoundError:  # the listing's own
            continue
    return found


def test_an_answer_that_comes_too_late_leaves_no_descriptor_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_link, "_STAGED_SAVES_SECONDS", 0.0)
    ours, theirs = socket.socketpair()
    link = AgentBackend(ours)
    link._reader.start()
    memory = os.memfd_create("surefoot-late")
    try:
        assert link.find_reusable_saves(Checkpoint(1, 5)) == {}
        answer = add_frame(line.encode(line.StagedSaves(4096, ((0, 0, 16, "layout"),))))
        socket.send_fds(theirs, [answer[:1]], [memory])
        theirs.sendall(answer[1:] + add_frame(line.encode(IntervalExponent(1, 3))))
        deadline = time.monotonic() + 60
        while link.min_interval_exponent() != 3:  # the reader has taken both
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert open_files("surefoot-late") == 1, "the test's own"
    finally:
        os.close(memory)
        theirs.close()
        link.close(0)


@contextmanager
def answering(end: socket.socket, message: line.ToTrainer, descriptor: int) -> Iterator[None]:
    """Once the link has asked for it."""

    def answer() -> None:
        end.recv(1 << 16)
        socket.send_fds(end, [add_frame(line.encode(message))], [descriptor])

    asked = threading.Thread(target=answer)
    asked.start()
    yield
    asked.join()


def test_a_save_is_not_written_over_the_one_before_it() -> None:
    # the one before it is the newest that is complete, until this one is: it is what is restored if this one stays torn
    ours, theirs = socket.socketpair()
    link = AgentBackend(ours)
    link._reader.start()
    memory = os.memfd_create("surefoot-slots")
    os.ftruncate(memory, 2 * 4096)
    try:
        with answering(theirs, line.StagedSaves(4096, ((0, 0, 16, "layout"),)), memory):
            assert [left.is_own for left in link.find_reusable_saves(Checkpoint(1, 5)).values()] == [True]
        with answering(theirs, line.ArenaGranted(2, 4096, 0.0), memory):
            link.request_arena(4096)
        used = []
        for step in (10, 15, 20):
            slot = link.wait_for_free_slot(60)
            assert slot is not None
            link.hand_over_slot(line.Staged(slot, step, 16, 0, "layout", None))
            theirs.sendall(add_frame(line.encode(line.SlotFreed(slot, step, True))))
            assert link.wait_for_flush(60)
            used.append(slot)
        assert used == [1, 0, 1], "slot 0 held what was restored"
    finally:
        os.close(memory)
        theirs.close()
        link.close(0)


def resident_bytes(memory: memoryview) -> int:
    """What of a mapping is in this process' page table."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    lines = Path("/proc/self/smaps").read_text().splitlines()
    first = next(n for n, text in enumerate(lines) if text.startswith(f"{address:08x}-"))
    return next(int(text.split()[1]) << 10 for text in lines[first:] if text.startswith("Rss:"))


def test_a_restore_in_place_maps_in_the_slot_that_it_reads_and_the_first_save_the_rest() -> None:
    slot_bytes, saved = 1 << 20, (1 << 20) - 5000
    file = MemoryFile("parts", slot_bytes)
    file.prefault()
    ours, theirs = socket.socketpair()
    link = AgentBackend(ours)
    link._reader.start()
    try:
        with answering(theirs, line.StagedSaves(slot_bytes, ((0, 1, saved, "layout"),)), file.fd):
            left = link.find_reusable_saves(Checkpoint(1, 5))[0]
        assert len(left.stream) == saved
        assert left.stream.readonly
        mapping = link._mapping
        assert mapping is not None
        assert 0 < resident_bytes(mapping.memory) <= slot_bytes + (64 << 10), "the other slot is not waited for"
        with answering(theirs, line.ArenaGranted(2, slot_bytes, 0.0), file.fd):
            memory, _, _ = link.request_arena(slot_bytes)
        assert link._mapping is mapping, "it is not mapped anew"
        assert resident_bytes(memory) == 2 * slot_bytes
    finally:
        theirs.close()
        link.close(0)
        file.close()


def test_all_holders_are_asked_for_where_some_were_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_link, "_SERVERS_SECONDS", 0.05)
    ours, theirs = socket.socketpair()
    link = AgentBackend(ours)
    link._reader.start()
    some, every = (endpoint("n0"),), (endpoint("n0"), endpoint("n1"))
    told = line.Attached("job", 1, 2, 0, "i", Checkpoint(1, 5), (), some, 1, 10, None, 0, is_partial=True)
    try:
        link._attached = told
        assert link.fetch_all_servers() is None, "nobody says: asked again later"
        assert line.decode(theirs.recv(1 << 16)[4:]) == line.RequestAllServers()
        monkeypatch.setattr(trainer_link, "_SERVERS_SECONDS", 60.0)
        theirs.sendall(add_frame(line.encode(line.AllServers(every))))
        assert link.fetch_all_servers() == every
        link._attached = replace(told, is_partial=False)
        assert link.fetch_all_servers() == some
    finally:
        theirs.close()
        link.close(0)
