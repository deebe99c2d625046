"""Follows worker pods' output while they come and go.

Touches the network. Each pod has a stream of its own; all share one bounded queue, so that a slow terminal slows the streams and fills
no memory. A stream that breaks goes on behind its last stamp; a pod that replaces another is followed as soon as it is listed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from surefoot_operator.cli.cluster_access import OpenCluster
from surefoot_operator.cli.cluster_refusals import ClusterRefused, Right, refused
from surefoot_operator.cli.follow_logs import ranked_line, stamp_order
from surefoot_operator.cli.followed_logs import (
    FollowChoice,
    WorkerNow,
    followed_line,
    whole_lines,
    worker_changes,
    workers_now,
)
from surefoot_operator.cli.jobs.cluster_reads import read_job, read_worker_pods, workers_of
from surefoot_operator.errors import FabricError
from surefoot_operator.platforms.kubernetes import api_objects
from surefoot_operator.platforms.kubernetes.api_errors import ApiRefused, ApiSilent
from surefoot_operator.platforms.kubernetes.views import observations

MOST_PODS = 64
"""Each is a connection to the API server and one of its to a kubelet."""
_WAITING_LINES = 2000
_BATCH_LINES = 500
_SILENCE_SECONDS = 300.0
"""A log may be silent; a connection that was cut is too."""
_OVER = ("Complete", "Failed")
_LAST_LOOKS = 5
"""At a job that is over and has no further line: a node that is gone ends no stream."""
_SERVER = "the API server"

Print = Callable[[Sequence[str]], None]
Object = dict[str, Any]


@dataclass(slots=True)
class PodFollower:
    """Follows one job until it is over.

    Raises ClusterRefused where a right is missing or the job is gone.
    """

    cluster: OpenCluster
    job: str
    choice: FollowChoice
    show: Print
    look_seconds: float = 2.0
    _lines: asyncio.Queue[str] = field(default_factory=lambda: asyncio.Queue(_WAITING_LINES))
    _streams: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _workers: dict[int, WorkerNow] = field(default_factory=dict)
    _said: set[str] = field(default_factory=set)
    """What was noted, once each: of whom."""

    async def run(self) -> str:
        """Follows, and returns the job's last phase."""
        try:
            last_looks = _LAST_LOOKS
            while True:
                phase = await self._look()
                printed = await self._print_for(self.look_seconds)
                last_looks = last_looks - 1 if phase in _OVER and not printed else _LAST_LOOKS
                going = [task for task in self._streams.values() if not _ended_well(task)]
                if phase in _OVER and (not going or last_looks <= 0):
                    while not self._lines.empty():
                        await self._print()
                    return phase
        finally:
            for task in self._streams.values():
                task.cancel()
            await asyncio.gather(*self._streams.values(), return_exceptions=True)

    async def _look(self) -> str:
        """Looks for new pods; an API server that does not answer is waited for."""
        try:
            stored = await read_job(self.cluster, self.job)
            pods = await read_worker_pods(self.cluster, stored)
        except ClusterRefused as error:
            if not _passing(error.__cause__):
                raise
            self._once(_SERVER, f"== {error}; asked again until it answers")
            return ""
        self._said.discard(_SERVER)
        notes: list[str] = []
        now = workers_now(workers_of(pods, notes), self.choice.worker)
        for sentence in (*worker_changes(self._workers, now), *notes):
            await self._put(sentence)
        self._workers = now
        self._follow([pod for pod in pods if self._wants(pod)])
        return stored.phase

    def _wants(self, pod: Object) -> bool:
        return self.choice.worker is None or _number(pod, api_objects.WORKER_INDEX) == self.choice.worker

    def _follow(self, pods: Sequence[Object]) -> None:
        uids = {pod["metadata"]["uid"] for pod in pods}
        for uid in [uid for uid, task in self._streams.items() if uid not in uids and task.done()]:
            del self._streams[uid]
        for pod in pods:
            uid = pod["metadata"]["uid"]
            if uid in self._streams:
                continue
            if sum(not task.done() for task in self._streams.values()) >= MOST_PODS:
                self._once(
                    "many",
                    f"== {len(pods)} pods have logs and {MOST_PODS} are followed: choose with --worker or --rank",
                )
                return
            self._streams[uid] = asyncio.create_task(self._stream(pod), name=f"log of {pod['metadata']['name']}")

    async def _stream(self, pod: Object) -> None:
        """One pod's lines until its container has ended or it is gone."""
        worker, attempt = _number(pod, api_objects.WORKER_INDEX), _number(pod, api_objects.ATTEMPT)
        last = ""
        while True:
            rest = b""
            try:
                async for chunk in self.cluster.api.stream(_path(pod), self._query(last), _SILENCE_SECONDS):
                    lines, rest = whole_lines(rest, chunk)
                    for text in lines:
                        last = await self._take(worker, attempt, text, last)
                last = await self._take(worker, attempt, rest.decode(errors="replace"), last) if rest else last
                if await self._ended(pod):
                    return
            except ApiRefused as error:
                if error.code == 404 or (error.code == 400 and await self._ended(pod)):
                    return
                if error.code != 400 and error.code < 500:
                    needed = Right("get", "pods/log", pod["metadata"]["namespace"])
                    raise refused(error, needed, self.cluster.server) from error
            except ApiSilent as error:
                name = pod["metadata"]["name"]
                self._once(name, f"== the log of {name} broke off and is asked for again: {error}")
            await asyncio.sleep(self.look_seconds / 2)

    def _query(self, last: str) -> dict[str, str | int]:
        since: dict[str, str | int] = {"sinceTime": last} if last else {"tailLines": self.choice.tail}
        return {"container": api_objects.TRAINER, "timestamps": "true", "follow": "true", **since}

    async def _take(self, worker: int, attempt: int, text: str, last: str) -> str:
        """Queues a line unless it was shown before the stream broke; returns the newest stamp."""
        rank, line = ranked_line(text)
        if line.at and last and stamp_order(line.at) <= stamp_order(last):
            return last
        if self.choice.takes(rank):
            await self._put(followed_line(worker, attempt, rank, line.text))
        return line.at or last

    async def _ended(self, pod: Object) -> bool:
        metadata = pod["metadata"]
        try:
            found = await self.cluster.api.get(api_objects.core_path(metadata["namespace"], "pods", metadata["name"]))
            return (
                observations.worker(found).phase in ("Succeeded", "Failed")
                or found["metadata"]["uid"] != metadata["uid"]
            )
        except ApiRefused as error:
            return error.code == 404
        except FabricError:
            return False

    # ---- the way to the terminal ----------------------------------------------------------------------------------------

    async def _put(self, line: str) -> None:
        """Waits where the terminal is behind: then the streams wait too."""
        while self._lines.full() and asyncio.current_task() not in self._streams.values():
            await self._print()  # the one who prints must not wait for itself
        await self._lines.put(line)

    def _once(self, whose: str, note: str) -> None:
        if whose not in self._said and not self._lines.full():
            self._said.add(whose)
            self._lines.put_nowait(note)

    async def _print_for(self, seconds: float) -> int:
        """Prints what comes within so many seconds; returns how many times."""
        times = 0
        until = asyncio.get_running_loop().time() + seconds
        while (left := until - asyncio.get_running_loop().time()) > 0:
            try:
                first = await asyncio.wait_for(self._lines.get(), left)
            except TimeoutError:
                break
            await self._print(first)
            times += 1
        return times

    async def _print(self, *first: str) -> None:
        batch = list(first)
        while len(batch) < _BATCH_LINES and not self._lines.empty():
            batch.append(self._lines.get_nowait())
        if batch:
            await asyncio.to_thread(self.show, batch)


def _ended_well(task: asyncio.Task[None]) -> bool:
    """Whether a stream has ended; one that a missing right ended ends the command."""
    if task.done():
        task.result()
    return task.done()


def _path(pod: Object) -> str:
    return api_objects.core_path(pod["metadata"]["namespace"], "pods", pod["metadata"]["name"]) + "/log"


def _number(pod: Object, label: str) -> int:
    text = str(pod["metadata"].get("labels", {}).get(label, ""))
    return int(text) if text.isdecimal() else -1


def _passing(error: BaseException | None) -> bool:
    """Whether a refusal may be another answer in a moment: none came, or the server has a trouble of its own."""
    code = getattr(error, "code", None)
    return code is None or code >= 500 or code == 429
