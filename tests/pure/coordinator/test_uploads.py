"""Uploads as the coordinator orders them: told to their workers, counted, and asked for again."""

from __future__ import annotations

from dataclasses import replace

from support.talk import CLAIMED, A, talking, words
from surefoot.protocol.identities import Checkpoint, RankSave
from surefoot.protocol.messages import UploadReply, UploadSave
from surefoot_operator.coordinator import listings, uploads
from surefoot_operator.coordinator.desired_messages import diff_messages
from surefoot_operator.coordinator.sessions import apply_membership, apply_message


def test_uploads_are_told_to_their_workers_and_counted_by_checkpoint() -> None:
    sessions = talking()
    saves = (RankSave(2, 50, 0), RankSave(2, 50, 1))
    sessions = replace(sessions, requests=uploads.set_uploads(sessions.requests, {A: UploadSave(2, saves)}))
    assert UploadSave(2, saves, 1) in words(sessions, A)
    sessions = apply_message(sessions, A, UploadReply(saves[0]), 1002.0)
    sessions = apply_message(sessions, A, UploadReply(saves[1], error="slow down"), 1002.0)
    assert sessions.requests.uploaded_saves == {Checkpoint(2, 50): frozenset({saves[0]})}
    assert sessions.requests.failed_uploads == {saves[1]: 1}
    assert apply_membership(sessions, CLAIMED.membership).requests.uploads == {}


def test_an_upload_that_was_not_wanted_for_a_while_is_asked_for_again() -> None:
    """Its failure was told meanwhile, and meant nothing then (simulator, seed 8148)."""
    sessions = talking()
    share = {A: UploadSave(2, (RankSave(2, 50, 0),))}
    sessions = replace(sessions, requests=uploads.set_uploads(sessions.requests, share))
    _, told = diff_messages({}, words(sessions, A))
    sessions = replace(sessions, requests=uploads.set_uploads(sessions.requests, {}))
    sessions = apply_message(sessions, A, UploadReply(RankSave(2, 50, 0), error="no answer"), 1002.0)
    sessions = replace(sessions, requests=uploads.set_uploads(sessions.requests, share))
    said, _ = diff_messages(told, words(sessions, A))
    assert [type(message) for message in said] == [UploadSave]
    assert uploads.set_uploads(sessions.requests, share) is sessions.requests


def test_uploads_of_long_ago_are_not_remembered_forever() -> None:
    sessions = talking()
    for step in range(1, 50):
        sessions = apply_message(sessions, A, UploadReply(RankSave(2, step, 0)), 1002.0)
    for step in range(1, 50):
        sessions = apply_message(sessions, A, UploadReply(RankSave(2, step, 0), error="slow down"), 1002.0)
    assert len(sessions.requests.failed_uploads) == uploads.MAX_REMEMBERED_CHECKPOINTS
    assert len(sessions.requests.uploaded_saves) == uploads.MAX_REMEMBERED_CHECKPOINTS
    assert Checkpoint(2, 49) in sessions.requests.uploaded_saves


def test_the_seconds_of_an_upload_go_with_its_checkpoint() -> None:
    """Retention deletes each checkpoint some time after its upload: its seconds would stay for as long as the job runs."""
    older, newer = RankSave(2, 50, 0), RankSave(2, 60, 0)
    sessions = apply_message(talking(), A, UploadReply(older, seconds=3.0), 1002.0)
    assert uploads.slowest_upload_seconds(sessions.requests, older.checkpoint) == 3.0
    orders = listings.request_deletion(sessions.requests, A, 2, (older.checkpoint,), 1003.0)
    sessions = apply_message(replace(sessions, requests=orders), A, UploadReply(newer, seconds=4.0), 1004.0)
    assert sessions.requests.upload_seconds == {newer.checkpoint: {A: 4.0}}
    assert uploads.recent_upload_seconds(sessions.requests) == (4.0,)


def test_what_an_upload_found_to_be_unreadable_is_remembered_of_the_newest_few() -> None:
    sessions = talking()
    sessions = apply_message(sessions, A, UploadReply(RankSave(2, 50, 0), error="no answer"), 1002.0)
    assert sessions.requests.unreadable_saves == frozenset()
    for step in range(1, 50):
        sessions = apply_message(
            sessions, A, UploadReply(RankSave(2, step, 0), "no copy is good", unreadable=True), 1002.0
        )
    assert len(sessions.requests.unreadable_saves) == uploads.MAX_REMEMBERED_CHECKPOINTS
    assert RankSave(2, 49, 0) in sessions.requests.unreadable_saves


def test_an_agent_that_says_that_copies_are_good_is_believed() -> None:
    saves, sessions = (RankSave(2, 50, 0), RankSave(2, 50, 1)), talking()
    sessions = apply_message(sessions, A, UploadReply(saves[0]), 1002.0)
    for _ in range(10):
        sessions = apply_message(sessions, A, UploadReply(saves[1], error="slow down"), 1002.0)
    assert sessions.requests.unreadable_saves == frozenset()
