"""Makes agents copy saves: to the persistent tier (uploads), and between memory servers (repairs).

Pure. An upload stays in force, and is retried, until the plan withdraws it. A repair is one numbered request.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from surefoot.protocol.identities import Checkpoint, RankSave, WorkerId
from surefoot.protocol.messages import (
    RepairSave,
    UploadReply,
    UploadSave,
)
from surefoot_operator.coordinator.pending_requests import (
    PendingRequest,
    PendingRequests,
    with_failure,
)

# ---- uploads ---------------------------------------------------------------------------------------------------------

MAX_REMEMBERED_CHECKPOINTS = 8
"""Checkpoints, the newest, whose upload results are remembered; plans read that of the pinned one."""


def set_uploads(requests: PendingRequests, shares: Mapping[WorkerId, UploadSave]) -> PendingRequests:
    """Sets the saves that each worker uploads; a worker that is missing in `shares` stops uploading.

    A share that was withdrawn and returns gets a new round. Otherwise it would equal a message that the agent has
    already received, and would not be sent again, although the upload may have failed.
    """
    new_round = requests.upload_round + 1
    upload_by_worker = {
        worker: replace(
            share, round=old_share.round if (old_share := requests.uploads.get(worker)) is not None else new_round
        )
        for worker, share in shares.items()
    }
    if requests.uploads == upload_by_worker:
        return requests
    newest_round = max((share.round for share in upload_by_worker.values()), default=0)
    return replace(requests, uploads=upload_by_worker, upload_round=max(newest_round, requests.upload_round))


def apply_upload_reply(requests: PendingRequests, worker: WorkerId, message: UploadReply) -> PendingRequests:
    """Records that a save was uploaded, or why it was not; a failed upload is requested again."""
    if message.error is not None:
        requests = _count_failed_upload(_retry_upload(requests, worker, message.save), message.save)
        return with_failure(
            _add_unreadable_save(requests, message.save) if message.unreadable else requests,
            f"{worker} could not upload {message.save}: {message.error}",
        )
    checkpoint = message.save.checkpoint
    uploaded_saves = requests.uploaded_saves.get(checkpoint, frozenset()) | {message.save}
    saves_by_checkpoint = {**requests.uploaded_saves, checkpoint: uploaded_saves}
    seconds_by_worker = dict(requests.upload_seconds.get(checkpoint, {}))
    if message.save not in requests.uploaded_saves.get(checkpoint, frozenset()):
        seconds_by_worker[worker] = seconds_by_worker.get(worker, 0.0) + message.seconds
    upload_times = {**requests.upload_seconds, checkpoint: seconds_by_worker}
    newest = _newest_checkpoints(saves_by_checkpoint)
    return replace(
        requests,
        uploaded_saves={c: saves for c, saves in saves_by_checkpoint.items() if c in newest},
        # a checkpoint that retention deleted has no uploaded save: its time would stay for ever
        upload_seconds={c: seconds for c, seconds in upload_times.items() if c in newest},
    )


def slowest_upload_seconds(requests: PendingRequests, checkpoint: Checkpoint | None) -> float | None:
    """Returns the slowest worker's upload time for a checkpoint, in seconds; None: no upload was reported."""
    seconds_by_worker = requests.upload_seconds.get(checkpoint) if checkpoint is not None else None
    return max(seconds_by_worker.values()) if seconds_by_worker else None


def recent_upload_seconds(requests: PendingRequests) -> tuple[float, ...]:
    """Returns the slowest worker's upload time of each remembered checkpoint, in seconds."""
    return tuple(max(seconds.values()) for seconds in requests.upload_seconds.values() if seconds)


def _newest_checkpoints(checkpoints: Iterable[Checkpoint]) -> frozenset[Checkpoint]:
    """Returns the checkpoints whose upload results are remembered."""
    return frozenset(sorted(set(checkpoints), key=lambda c: (c.step, c.generation))[-MAX_REMEMBERED_CHECKPOINTS:])


def _add_unreadable_save(requests: PendingRequests, save: RankSave) -> PendingRequests:
    unreadable_saves = requests.unreadable_saves | {save}
    newest = _newest_checkpoints(s.checkpoint for s in unreadable_saves)
    return replace(requests, unreadable_saves=frozenset(s for s in unreadable_saves if s.checkpoint in newest))


def _count_failed_upload(requests: PendingRequests, save: RankSave) -> PendingRequests:
    counts = {**requests.failed_uploads, save: requests.failed_uploads.get(save, 0) + 1}
    newest = _newest_checkpoints(s.checkpoint for s in counts)
    return replace(requests, failed_uploads={s: n for s, n in counts.items() if s.checkpoint in newest})


def _retry_upload(requests: PendingRequests, worker: WorkerId, save: RankSave) -> PendingRequests:
    """Requests the upload again in a new round, because the agent has used up its own retries."""
    share = requests.uploads.get(worker)
    if share is None or save not in share.saves:
        return requests
    new_round = requests.upload_round + 1
    upload_by_worker = {**requests.uploads, worker: replace(share, round=new_round)}
    return replace(requests, uploads=upload_by_worker, upload_round=new_round)


# ---- repairs ---------------------------------------------------------------------------------------------------------

INDEX_REFRESH_SECONDS = 2.0
"""Time after a repair within which the target server's index is read again and shows the copy."""


def request_repairs(
    requests: PendingRequests, copies: Iterable[tuple[WorkerId, RepairSave]], now: float
) -> PendingRequests:
    """Requests and numbers repairs that are neither under way nor just finished.

    Takes all repairs of a plan at once: a memory server that restarted empty lacks thousands of saves, and adding them
    one by one would compare each with all others. A finished repair is not requested again before the target's index
    was read; otherwise every plan until then would copy the same bytes once more.
    """
    pending_messages = (request.message for request in requests.by_id.values())
    requested_copies = {(m.save, m.target, m.generation) for m in pending_messages if isinstance(m, RepairSave)}
    new_requests: dict[int, PendingRequest] = {}
    for worker, copy in copies:
        was_just_copied = (
            now - requests.repair_seconds_by_copy.get((copy.save, copy.target), -math.inf) < INDEX_REFRESH_SECONDS
        )
        if not was_just_copied and (copy.save, copy.target, copy.generation) not in requested_copies:
            requested_copies.add((copy.save, copy.target, copy.generation))
            request_id = requests.next_request + len(new_requests)
            new_requests[request_id] = PendingRequest(worker, replace(copy, request=request_id), copy.generation, now)
    if not new_requests:
        return requests
    return replace(
        requests, next_request=requests.next_request + len(new_requests), by_id={**requests.by_id, **new_requests}
    )


def confirm_repair(requests: PendingRequests, copy: RepairSave, now: float) -> PendingRequests:
    """Records that a save was copied to a memory server whose index may not show it yet."""
    recent_copies = {
        save_and_target: copied_seconds
        for save_and_target, copied_seconds in requests.repair_seconds_by_copy.items()
        if now - copied_seconds < INDEX_REFRESH_SECONDS
    }
    return replace(requests, repair_seconds_by_copy={**recent_copies, (copy.save, copy.target): now})
