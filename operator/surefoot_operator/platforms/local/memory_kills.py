"""Has the kernel's OOM killer end single processes.

Touches cgroups (Linux, both versions); called by `local_nodes`. Each is moved into a memory group of its own, which may use none: the
first page that it needs from then on is refused, and the kernel ends it as it ends any that is beyond its limit. The machine's
memory is never used up. Where no group can be made, or the process needs nothing, SIGKILL stands in, and whoever tells of the end
says so.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from surefoot.linux_process import ProcessIdentity, is_alive, send
from surefoot_operator.platforms.local.run_folder import write_json

_NEEDS_SECONDS = 5.0
"""A trainer that makes steps needs a page at once; one that waits for so long may never."""

_TOLD_SECONDS = 10.0
"""So long its agent may take to see its end, and to read the group's counters."""


@dataclass(slots=True)
class _Confined:
    process: ProcessIdentity
    group: Path
    word: Path
    until: float
    ended: bool = False


class MemoryKills:
    """Strikes processes; `look` often, and `close` at the end."""

    def __init__(self, groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> None:
        self._groups, self._own = groups, own
        self._confined: list[_Confined] = []

    def strike(self, process: ProcessIdentity, word: Path) -> None:
        """Confines a process; `word` tells its agent how it ends."""
        name = f"surefoot-oom-{process.pid}-{process.ticks}"
        try:
            group = _made(self._groups, self._own, name)
        except OSError as error:
            _stand_in(process, word, f"no memory group can be made: {error.strerror or error}")
            return
        write_json(word, {"group": str(group), "stands_in": ""}, durable=False)
        self._confined.append(_Confined(process, group, word, time.monotonic() + _NEEDS_SECONDS))
        try:
            (group / "cgroup.procs").write_text(str(process.pid))
        except OSError as error:
            _stand_in(process, word, f"it cannot be moved into a memory group: {error.strerror or error}")

    def look(self) -> None:
        """Removes groups whose end was told; ends what did not end there."""
        now = time.monotonic()
        for one in tuple(self._confined):
            if is_alive(one.process):
                if now > one.until:
                    _stand_in(one.process, one.word, "it needed no memory in the group that it was put into")
                continue
            if not one.ended:
                one.ended, one.until = True, now + _TOLD_SECONDS
            if not one.word.exists() or now > one.until:
                one.word.unlink(missing_ok=True)  # else the next death there would be taken for it
                with contextlib.suppress(OSError):  # its last thread is still going: asked again
                    one.group.rmdir()
                    self._confined.remove(one)

    def close(self) -> None:
        """Removes the groups; nothing is left running in them."""
        for one in self._confined:
            with contextlib.suppress(OSError):
                one.group.rmdir()
        self._confined.clear()


def _made(groups: Path, own: Path, name: str) -> Path:
    """Makes a group that may use no memory. Raises OSError."""
    for parent, limit in _places(groups, own):
        if not (parent / "cgroup.procs").exists():
            continue
        group = parent / name
        group.mkdir()
        try:
            (group / limit).write_text("0")
        except OSError:
            group.rmdir()
            raise
        return group
    raise FileNotFoundError(None, "this machine has no memory controller that may be used")


def _places(groups: Path, own: Path) -> Iterator[tuple[Path, str]]:
    """Where a group may be made, the nearest first, and the file of its limit.

    Version 1 below this process' own group. Version 2 allows it only below one whose children have a memory controller.
    """
    lines = [line.split(":", 2) for line in own.read_text().splitlines()]
    of = {names: path.strip("/") for _, names, path in lines}
    version_1 = next((path for names, path in of.items() if "memory" in names.split(",")), None)
    if version_1 is not None:
        yield groups / "memory" / version_1, "memory.limit_in_bytes"
        yield groups / "memory", "memory.limit_in_bytes"
        return
    here = groups / of.get("", "")
    for parent in (here, *here.parents):
        if not parent.is_relative_to(groups):
            return
        with contextlib.suppress(OSError):
            if "memory" in (parent / "cgroup.subtree_control").read_text().split():
                yield parent, "memory.max"


def _stand_in(process: ProcessIdentity, word: Path, why: str) -> None:
    write_json(word, {"group": "", "stands_in": why}, durable=False)
    send(process, signal.SIGKILL)
