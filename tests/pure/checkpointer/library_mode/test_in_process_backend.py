"""The fake of a trainer's backend is held to what backends are: programs that ranks run are checked by their own runs alone."""

from __future__ import annotations

import inspect

import pytest

from support.fakes.fake_link import FakeLink
from surefoot.checkpointer.library_mode.in_process_backend import InProcessBackend
from surefoot.ipc.agent_client import AgentBackend
from surefoot.ipc.save_backend import SaveBackend

METHODS = sorted(name for name, what in vars(SaveBackend).items() if inspect.isfunction(what) and name[0] != "_")


@pytest.mark.parametrize("backend", [FakeLink, InProcessBackend, AgentBackend])
def test_each_backend_takes_what_the_protocol_gives(backend: type) -> None:
    missing = [name for name in METHODS if not hasattr(backend, name)]
    assert METHODS
    assert not missing or backend is FakeLink, "a fake may lack what its programs never call"
    for name in METHODS:
        if name not in missing:
            wanted = list(inspect.signature(getattr(SaveBackend, name)).parameters)
            assert list(inspect.signature(getattr(backend, name)).parameters) == wanted, name
