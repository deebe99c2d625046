"""Checks this machine: versions, extras, Redis, memory.

`look_here` touches the machine; what is judged of it is pure. A cluster's jobs need none of this but the command itself: what only
`surefoot local` needs is at most a warning.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from surefoot import __version__
from surefoot.errors import ConfigurationError
from surefoot.holder.server_process import find_program
from surefoot.protocol.plain import amount
from surefoot_operator.api.spec import TrainingJob
from surefoot_operator.cli.doctor_network import Finding
from surefoot_operator.optional_dependencies import lacking

_LEAST_BYTES = 2 << 30
"""torch alone takes half of it."""
_MEMINFO = Path("/proc/meminfo")
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_CGROUP_USED = Path("/sys/fs/cgroup/memory.current")


@dataclass(frozen=True, slots=True)
class MachineLook:
    """What this machine has."""

    surefoot: str
    python: str
    torch: str | None
    """Its version; None: not installed."""
    redis: str | None
    """The server's program; None: there is none."""
    redis_problem: str
    lacking: dict[str, str]
    """Extra -> what it lacks."""
    available_bytes: int | None


def look_here() -> MachineLook:
    """Looks at this machine; imports neither torch nor a client."""
    redis, problem = None, ""
    try:
        redis = find_program()
    except ConfigurationError as error:
        problem = str(error)
    missing = {extra: said for extra in ("cli", "runtime") if (said := lacking(extra)) is not None}
    return MachineLook(
        surefoot=__version__,
        python=platform.python_version(),
        torch=_version_of("torch"),
        redis=redis,
        redis_problem=problem,
        lacking=missing,
        available_bytes=available_bytes(_read(_MEMINFO), _read(_CGROUP_LIMIT), _read(_CGROUP_USED)),
    )


def machine_findings(look: MachineLook, job: TrainingJob | None) -> list[Finding]:
    """Judges this machine; `job`: of a file that was given."""
    runtime = look.lacking.get("runtime")
    return [
        Finding("surefoot", "ok", f"{look.surefoot} on Python {look.python}"),
        _extra("commands", look.lacking.get("cli"), "all that the commands for clusters import is installed"),
        Finding("torch", "ok", look.torch or "")
        if look.torch is not None and runtime is None
        else Finding("torch", "warning", f"surefoot local and checkpoints cannot run here: {runtime or 'no torch'}"),
        Finding("redis", "ok", look.redis)
        if look.redis is not None
        else Finding("redis", "warning", f"surefoot local cannot run here: {look.redis_problem}"),
        memory_finding(look.available_bytes, job),
    ]


def memory_finding(available: int | None, job: TrainingJob | None) -> Finding:
    """Judges the memory for staging and holders of `surefoot local`."""
    if available is None:
        return Finding("memory", "unknown", "this system does not say how much memory is available")
    said = f"{amount(available)} available here for trainers, staging and holders of surefoot local"
    limit = job.spec.checkpoint.memory.size_limit_bytes if job is not None else None
    if job is not None and limit is not None:
        nodes = job.spec.replicas + job.spec.spares
        said = f"{said}; the job's {nodes} holders may take {amount(limit)} each"
        if limit * nodes > available:
            remedy = "give surefoot local fewer --nodes, or lower checkpoint.memory.sizeLimit in a copy of the job"
            return Finding("memory", "warning", said, remedy)
    if available < _LEAST_BYTES:
        return Finding("memory", "warning", said, "end other programs, or run the job on a cluster")
    return Finding("memory", "ok", said)


def available_bytes(meminfo: str, limit: str, used: str) -> int | None:
    """The memory that machine and container leave to be taken."""
    found = None
    for line in meminfo.splitlines():
        name, _, rest = line.partition(":")
        parts = rest.split()
        if name == "MemAvailable" and parts and parts[0].isdigit():
            found = int(parts[0]) * 1024
    if limit.strip().isdigit() and used.strip().isdigit():
        left = max(0, int(limit) - int(used))
        found = left if found is None else min(found, left)
    return found


def _extra(check: str, missing: str | None, said: str) -> Finding:
    return (
        Finding(check, "ok", said)
        if missing is None
        else Finding(check, "warning", f"commands for clusters cannot run here: {missing}")
    )


def _version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, ValueError):
        return ""  # another system, or another cgroup version: `available_bytes` says what is not known
