"""Stores job and status in the run folder by compare-and-swap.

Touches files; blocking: called in a thread by `platform` and directly by the CLI. Lock, rename and both fsyncs
keep a written status through a crash, and two leaders from overwriting each other.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from surefoot_operator.api.parse import parse_job
from surefoot_operator.api.spec import TrainingJob
from surefoot_operator.api.status import JobStatus, stamp
from surefoot_operator.api.status_json import status_from_json, status_to_json
from surefoot_operator.errors import FabricError, OperatorError, WorldMoved
from surefoot_operator.platforms.local.run_folder import LockBusy, RunFolder, open_private, read_json, write_json
from surefoot_operator.policy.core.actions import Event


class Store:
    """Reads and writes job, status and events of one run folder."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._job: tuple[tuple[int, int], TrainingJob] | None = None

    def write_job(self, document: Mapping[str, Any], uid: str) -> TrainingJob:
        """Stores the job; its generation grows with each change of the spec."""
        with self._folder.locked():
            old = read_json(self._folder.job)
            generation = 1
            if old is not None:
                generation = old["metadata"]["generation"] + (old["spec"] != document["spec"])
            metadata = {**document["metadata"], "uid": uid, "generation": generation}
            body = {**document, "metadata": metadata}
            job = parse_job(body)
            write_json(self._folder.job, body, durable=True)
        return job

    def job(self) -> TrainingJob:
        """Reads the job. Raises FabricError where there is none."""
        try:
            found = os.stat(self._folder.job)
        except FileNotFoundError:
            raise FabricError(f"{self._folder.job} is not there: the run folder has no job yet") from None
        stamp = (found.st_mtime_ns, found.st_ino)
        if self._job is None or self._job[0] != stamp:
            try:
                body = read_json(self._folder.job)
                self._job = (stamp, parse_job(body or {}))
            except (ValueError, OSError, OperatorError) as error:
                raise FabricError(f"{self._folder.job} cannot be read: {error}") from error
        return self._job[1]

    def status(self) -> JobStatus:
        """Reads the status; an empty one before the first write."""
        try:
            return status_from_json(read_json(self._folder.status) or {})
        except (ValueError, OSError) as error:
            raise FabricError(f"{self._folder.status} cannot be read: {error}") from error

    def patch_status(self, new: JobStatus, old: JobStatus) -> JobStatus:
        """Writes `new` if the stored status still has the stamp of `old`.

        Returns it with its new serial. Raises WorldMoved, FabricError.
        """
        written = replace(new, serial=old.serial + 1)
        try:
            with self._folder.locked():
                stored = stamp(self.status())
                if stored != stamp(old):
                    raise WorldMoved(f"the stored status is {stored}, this write expects {stamp(old)}: observe again")
                write_json(self._folder.status, status_to_json(written), durable=True)
        except (OSError, LockBusy) as error:
            raise FabricError(f"it is unknown whether {self._folder.status} was written: {error}") from error
        return written

    def record(self, events: Sequence[Event]) -> None:
        """Appends events, each one line of JSON."""
        now = time.time()
        lines = [
            json.dumps({"at": now, "reason": e.reason, "message": e.message, "warning": e.warning}) + "\n"
            for e in events
        ]
        try:
            with open(self._folder.events, "a", encoding="utf-8", opener=open_private) as file:
                file.write("".join(lines))
        except OSError as error:
            raise FabricError(f"{self._folder.events} cannot be written: {error}") from error
