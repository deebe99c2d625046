"""Orders and follows log lines of ranks and agents, from worker pods or from files of a local run.

Called by `logs`. Touches the network and files, except where a section says otherwise. In a failure most ranks log only
that they lost a connection to another rank; so the lines of the rank to blame come first.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surefoot_operator.api.status import Incident
from surefoot_operator.cli.cluster_access import ClusterRefused, OpenCluster, Right, refused
from surefoot_operator.cli.command_base import StopRequest
from surefoot_operator.cli.jobs.read_jobs import JobView, read_job, read_run, read_worker_pods, workers_of
from surefoot_operator.errors import FabricError
from surefoot_operator.job_snapshot import WorkerSeen
from surefoot_operator.platforms.kubernetes import api_objects
from surefoot_operator.platforms.kubernetes.api_objects import ApiRefused, ApiSilent
from surefoot_operator.platforms.kubernetes.views import observations
from surefoot_operator.platforms.local.run_folder import RunFolder

_STAMPED = re.compile(r"(\d{4}-\d\d-\d\dT\S+) (.*)", re.DOTALL)
_RANK_PREFIX = re.compile(r"\[rank (\d+)\] ?(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line, and when it was written where that is known."""

    text: str
    at: str = ""
    """RFC 3339, as the kubelet stamped it; of a run folder's files empty."""


@dataclass(frozen=True, slots=True)
class LogPart:
    """The lines of one rank of one attempt, or of its agent."""

    worker: int
    attempt: int
    rank: int | None
    """None: the agent's own words."""
    lines: tuple[LogLine, ...]
    epoch: int | None = None
    """None: of all epochs that this attempt took part in."""
    blamed: str = ""
    """Why this one is blamed; empty: it is not."""


def parts_of_pod(worker: int, attempt: int, text: str) -> list[LogPart]:
    """Parts a container's stamped output by the rank that each line names."""
    found: dict[int | None, list[LogLine]] = {}
    for text_line in text.splitlines():
        rank, line = ranked_line(text_line)
        found.setdefault(rank, []).append(line)
    return [LogPart(worker, attempt, rank, tuple(lines)) for rank, lines in found.items()]


def ranked_line(text: str) -> tuple[int | None, LogLine]:
    """Reads one stamped line: whose it is (None: the agent's), and what it says."""
    stamped = _STAMPED.fullmatch(text)
    at, said = (stamped[1], stamped[2]) if stamped else ("", text)
    ranked = _RANK_PREFIX.fullmatch(said)
    rank, said = (int(ranked[1]), ranked[2]) if ranked else (None, said)
    return rank, LogLine(said, at)


def stamp_order(at: str) -> tuple[str, str]:
    """Orders stamps of one kubelet, which leaves out a fraction's last zeros.

    As text `…02.5Z` would come after `…02.51Z`.
    """
    return at[:19], at[19:].lstrip(".").rstrip("Z").ljust(9, "0")


def blamed_incident(incidents: Sequence[Incident]) -> Incident | None:
    """The newest incident that names somebody; None: nobody is blamed."""
    named = (one for one in reversed(incidents) if one.kind != "planned" and (one.rank, one.worker) != (None, None))
    return next(named, None)


def in_order(parts: Iterable[LogPart], blamed: Incident | None) -> list[LogPart]:
    """Puts the blamed part first, then ranks, then agents."""
    parts = list(parts)
    attempts = frozenset[int]() if blamed is None else _attempts(parts, blamed)
    marked = [_marked(part, blamed, attempts) for part in parts]
    return sorted(
        marked,
        key=lambda part: (
            not part.blamed,
            part.rank is None,
            part.rank or 0,
            part.worker,
            part.attempt,
            part.epoch or 0,
        ),
    )


def _attempts(parts: Sequence[LogPart], blamed: Incident) -> frozenset[int]:
    """Attempts of the blamed worker whose agent began the epoch that failed; none where no line is left to tell."""
    began = f"epoch {blamed.epoch}: starting "
    agents = (part for part in parts if part.worker == blamed.worker and part.rank is None)
    return frozenset(part.attempt for part in agents if any(began in line.text for line in part.lines))


def _marked(part: LogPart, blamed: Incident | None, attempts: frozenset[int]) -> LogPart:
    if blamed is None or part.worker != blamed.worker or part.rank != blamed.rank:
        return part
    if attempts and part.attempt not in attempts:
        return part  # it came after the failure, or ended before
    if part.epoch is not None and part.epoch != blamed.epoch:
        return part
    return LogPart(part.worker, part.attempt, part.rank, part.lines, part.epoch, blamed.reason)


def part_lines(parts: Sequence[LogPart], most: int) -> list[str]:
    """Renders each part under a heading, its last `most` lines."""
    lines: list[str] = []
    for part in parts:
        left_out = len(part.lines) - most
        before = [f"({left_out} lines before)"] if left_out > 0 else []
        lines += ["", heading(part), *before, *(one.text for one in part.lines[-most:])]
    return lines[1:]


def heading(part: LogPart) -> str:
    """`== rank 1, worker 1 (attempt 1), epoch 2`, and why it is blamed."""
    who = "agent" if part.rank is None else f"rank {part.rank}"
    epoch = "" if part.epoch is None else f", epoch {part.epoch}"
    blame = f", blamed: {part.blamed}" if part.blamed else ""
    return f"== {who}, worker {part.worker} (attempt {part.attempt}){epoch}{blame}"


def by_time(parts: Iterable[LogPart], most: int) -> list[str]:
    """Renders the newest `most` lines in the order of their stamps."""
    lines = [(line.at, _who(part), line.text) for part in parts for line in part.lines]
    return [f"{at}  {who}  {text}" for at, who, text in sorted(lines, key=lambda one: stamp_order(one[0]))[-most:]]


def _who(part: LogPart) -> str:
    return f"worker {part.worker}.{part.attempt} " + ("agent" if part.rank is None else f"rank {part.rank}")


# ---- pod logs --------------------------------------------------------------------------------------------------------
# Reads the output of worker pods from an API server. Touches the network. A container that has not started, or whose
# pod has just gone, is a note; a missing right ends the command.

_MOST_BYTES = 8 << 20


async def read_pod_log(cluster: OpenCluster, pod: dict[str, Any], most_lines: int, notes: list[str]) -> str:
    """Reads the newest lines of a worker's trainer container, stamped. Raises ClusterRefused."""
    metadata = pod["metadata"]
    path = api_objects.core_path(metadata["namespace"], "pods", metadata["name"]) + "/log"
    query: dict[str, str | int] = {
        "container": api_objects.TRAINER,
        "timestamps": "true",
        "tailLines": most_lines,
        "limitBytes": _MOST_BYTES,
    }
    try:
        return await cluster.api.text(path, query)
    except FabricError as error:
        if isinstance(error, ApiRefused) and error.code in (400, 404):
            notes.append(f"{metadata['name']} has no log: {error}")
            return ""
        raise refused(error, Right("get", "pods/log", metadata["namespace"]), cluster.server) from error


# ---- choice of what is followed --------------------------------------------------------------------------------------
# Decides what a follower of logs shows. A line without an end, or of megabytes, must not fill the memory of who
# watches; a worker that was replaced must not look like one that fell silent.

MOST_LINE_BYTES = 16 << 10
"""A longer line is shown in pieces."""


@dataclass(frozen=True, slots=True)
class FollowChoice:
    """Whose lines are wanted, and how many old ones of each."""

    rank: int | None = None
    worker: int | None = None
    tail: int = 20

    def takes(self, rank: int | None) -> bool:
        return self.rank in (None, rank)


@dataclass(frozen=True, slots=True)
class WorkerNow:
    """One worker as a follower last saw it."""

    attempt: int
    node: str
    over: str = ""
    """How it ended; empty: it has not."""


def whole_lines(rest: bytes, chunk: bytes) -> tuple[list[str], bytes]:
    """Splits what has come into lines, and what waits for its end."""
    *lines, left = (rest + chunk).split(b"\n")
    while len(left) > MOST_LINE_BYTES:
        lines.append(left[:MOST_LINE_BYTES])
        left = left[MOST_LINE_BYTES:]
    return [line.decode(errors="replace") for line in lines], left


def followed_line(worker: int, attempt: int, rank: int | None, text: str) -> str:
    """Renders one line: `1.2 rank 1 | words`; worker 1, attempt 2."""
    who = "agent" if rank is None else f"rank {rank}"
    return f"{worker}.{attempt} {who:<8} | {text}"


def workers_now(workers: Iterable[WorkerSeen], only: int | None) -> dict[int, WorkerNow]:
    """Maps each worker to its newest attempt."""
    found: dict[int, WorkerNow] = {}
    for one in workers:
        known = found.get(one.index)
        if only in (None, one.index) and (known is None or known.attempt < one.attempt):
            ended = one.phase in ("Succeeded", "Failed")
            code = "" if one.exit_code is None else f" with exit code {one.exit_code}"
            found[one.index] = WorkerNow(one.attempt, one.node or "", f"{one.phase}{code}" if ended else "")
    return found


def worker_changes(before: Mapping[int, WorkerNow], now: Mapping[int, WorkerNow]) -> list[str]:
    """Words what became of workers since the last look, in their order."""
    said = []
    for index in sorted(before.keys() | now.keys()):
        old, new = before.get(index), now.get(index)
        if new is None:
            if old is not None and not old.over:
                said.append(f"== worker {index} (attempt {old.attempt}) is gone")
        elif old is None:
            said.append(f"== worker {index} (attempt {new.attempt}){_on(new)}")
        elif old.attempt != new.attempt:
            where = f", which was on {old.node}" if old.node and old.node != new.node else ""
            successor = f"attempt {new.attempt}{_on(new)}" if new.node else f"attempt {new.attempt}, which{_on(new)},"
            said.append(f"== worker {index} is replaced: {successor} follows attempt {old.attempt}{where}")
        elif new.node != old.node:
            said.append(f"== worker {index} (attempt {new.attempt}){_on(new)}")
        if new is not None and new.over and (old is None or old.attempt != new.attempt or old.over != new.over):
            said.append(f"== worker {index} (attempt {new.attempt}) ended: {new.over}")
    return said


def _on(worker: WorkerNow) -> str:
    return f" on {worker.node}" if worker.node else " waits for a node"


# ---- follow pods -----------------------------------------------------------------------------------------------------
# Follows worker pods' output while they come and go. Touches the network. Each pod has a stream of its own; all share
# one bounded queue, so that a slow terminal slows the streams and fills no memory. A stream that breaks goes on behind
# its last stamp; a pod that replaces another is followed as soon as it is listed.

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
                observations.observe_worker(found).phase in ("Succeeded", "Failed")
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


# ---- follow files ----------------------------------------------------------------------------------------------------
# Follows the log files of a run of `surefoot local`. Touches files; reads of each what has come since the last look,
# and of a file that grew by megabytes a bounded part at a time.

_READ_BYTES = 1 << 20
_WORKER = re.compile(r"worker-(\d+)-(\d+)")
_RANK_IN_NAME = re.compile(r"rank-(\d+)")


@dataclass(slots=True)
class _FileTail:
    path: Path
    worker: int
    attempt: int
    rank: int | None
    offset: int = 0
    rest: bytes = b""

    def read(self, first_lines: int | None = None) -> list[str]:
        """What has come since; with `first_lines` no more than the newest so many."""
        with open(self.path, "rb") as file:
            if first_lines is not None:
                self.offset = max(0, os.fstat(file.fileno()).st_size - _READ_BYTES)
            file.seek(self.offset)
            chunk = file.read(_READ_BYTES)
        self.offset += len(chunk)
        lines, self.rest = whole_lines(self.rest, chunk)
        # what an agent passes on of its ranks stands in their own files
        own = [line for line in lines if self.rank is not None or not line.startswith("[rank ")]
        shown = own if first_lines is None else list(deque(own, maxlen=first_lines))
        return [followed_line(self.worker, self.attempt, self.rank, line) for line in shown]


@dataclass(slots=True)
class FileFollower:
    """Follows one run until it is over, or its processes are gone."""

    root: Path
    choice: FollowChoice
    show: Print
    stop: StopRequest
    look_seconds: float = 0.5
    _tails: dict[Path, _FileTail] = field(default_factory=dict)
    _workers: dict[int, WorkerNow] = field(default_factory=dict)

    def run(self) -> str:
        """Follows, and returns the run's last phase."""
        while True:
            view = read_run(self.root)
            over = view.stored.phase in ("Complete", "Failed")
            abandoned = not over and _abandoned(view)
            now = workers_now(view.workers, self.choice.worker)
            lines = worker_changes(self._workers, now)
            first = not self._workers and not self._tails
            self._workers = now
            self.show([*lines, *self._new_lines(first)])
            if over or abandoned:
                self._show_rest()
                if abandoned:
                    self.show([f"== the processes of the run in {self.root} are gone: it ended before the job did"])
                return view.stored.phase
            self.stop.wait(self.look_seconds)
            self.stop.raise_if_requested()

    def _new_lines(self, first: bool) -> list[str]:
        found: list[str] = []
        for worker, attempt, rank, path in self._files():
            tail = self._tails.get(path)
            if tail is None:
                tail = self._tails[path] = _FileTail(path, worker, attempt, rank)
                found += tail.read(self.choice.tail if first else None)
            else:
                found += tail.read()
        return found

    def _show_rest(self) -> None:
        while lines := self._new_lines(False):
            self.show(lines)

    def _files(self) -> Iterator[tuple[int, int, int | None, Path]]:
        for folder in sorted(RunFolder(self.root).logs.glob("worker-*")):
            match = _WORKER.fullmatch(folder.name)
            if match is None or self.choice.worker not in (None, int(match[1])):
                continue
            worker, attempt = int(match[1]), int(match[2])
            for path in sorted(folder.glob("epoch-*/rank-*.log")):
                rank = _RANK_IN_NAME.fullmatch(path.stem)
                if rank is not None and self.choice.takes(int(rank[1])):
                    yield worker, attempt, int(rank[1]), path
            if self.choice.takes(None) and (folder / "agent.log").exists():
                yield worker, attempt, None, folder / "agent.log"


def _abandoned(view: JobView) -> bool:
    """No node's process is there, though some were: nobody will finish the job."""
    return bool(view.nodes) and not any(node.ready for node in view.nodes or ())
