"""The epoch's secret: told to members alone, the same by every leader, and written down nowhere."""

from __future__ import annotations

import hashlib
import json

from support.builders import running
from support.talk import NODES, STATUS, A, B, talking, words
from surefoot.protocol.messages import Assign
from surefoot_operator.api.status_json import status_to_json
from surefoot_operator.controller.credentials.derived_secrets import Secrets
from surefoot_operator.coordinator.desired_messages import desired_messages, desired_state
from surefoot_operator.policy.failure.memory_server_liveness import UsableHolders

ROOT = bytes(range(32))


def test_leaders_that_share_the_root_tell_the_same_and_nobody_else_can() -> None:
    first, second, stranger = Secrets(ROOT), Secrets(ROOT), Secrets(bytes(32))
    token = first.epoch_token("uid-1", 2)
    assert second.epoch_token("uid-1", 2) == token
    others = {stranger.epoch_token("uid-1", 2), first.epoch_token("uid-1", 3), first.epoch_token("uid-2", 2)}
    assert token not in others
    assert len(others) == 3
    assert not hashlib.sha256(b"surefoot:uid-1:2").hexdigest().startswith(token)


def test_a_late_member_hears_what_the_first_heard_and_the_status_does_not_know_it() -> None:
    token = Secrets(ROOT).epoch_token("job-1", 2)
    told = [
        message.token
        for worker in (A, B)
        for message in desired_messages(
            desired_state(STATUS, UsableHolders(NODES), 2, Secrets(ROOT).epoch_token("job-1", 2)), talking(), worker
        )
        if isinstance(message, Assign)
    ]
    assert told == [token, token]
    assert "oken" not in json.dumps(status_to_json(running().status))
    assert token not in repr(desired_state(STATUS, UsableHolders(NODES), 2, token))
    assert all(m.token == "t2" for m in words(talking(), A) if isinstance(m, Assign))
