"""Reads the command line of torchrun and its like.

Pure. In a TrainingJob the agent starts each rank; a launcher inside of a rank would start a world of its own.
Options are those of torch.distributed.run of torch 2.15 and of SageMaker HyperPod's elastic agent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from surefoot_operator.convert.conversion_errors import NotConvertible

LAUNCHERS = ("torchrun", "hyperpodrun")
MODULES = ("torch.distributed.run", "torch.distributed.launch")
OTHERS = ("accelerate", "deepspeed", "mpirun", "mpiexec", "horovodrun", "srun", "composer", "ray")
"""Launchers whose options are no torchrun's."""

_FLAGS = ("standalone", "run-path", "use-env", "virtual-local-rank", "deprecated-pre-train", "inprocess-restart")
_VALUED = (
    *("rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "monitor-interval", "start-method", "role"),
    *("event-log-handler", "log-dir", "redirects", "tee", "local-ranks-filter", "node-rank", "master-addr"),
    *("master-port", "local-addr", "logs-specs", "numa-binding", "signals-to-handle", "shutdown-timeout"),
    *("duplicate-stdout-filters", "duplicate-stderr-filters", "r", "t"),
    *("server-host", "server-port", "server-log-level", "server-shutdown-timeout", "pre-train-script"),
    *("pre-train-args", "post-train-script", "post-train-args", "tracer"),
)


@dataclass(frozen=True, slots=True)
class Launch:
    """What a launcher's command line says; empty where it says nothing."""

    program: tuple[str, ...]
    """Each rank's command."""
    nodes: str = ""
    """`2`, or `1:4`."""
    ranks: str = ""
    """A number of each node, or `auto`, `gpu`, `cpu`."""
    restarts: str = ""
    dropped: tuple[str, ...] = ()
    """Options that a TrainingJob has no use for."""


def read_launch(words: Sequence[str]) -> Launch | None:
    """Reads a command line; None where it starts no launcher.

    Raises:
        NotConvertible: another system's launcher, an option that is not known, or no program.
    """
    name, at = _launcher(words)
    if not name:
        return None
    if name in OTHERS:
        raise NotConvertible(f"`{name}` starts the ranks: write each rank's own command; the agent starts the ranks")
    known: dict[str, str] = {}
    dropped: list[str] = []
    while at < len(words) and words[at].startswith("-"):
        option, equals, value = words[at].lstrip("-").partition("=")
        option, at = option.replace("_", "-"), at + 1
        if option in ("m", "module", "no-python"):
            known[option] = "yes"
            continue
        flag = option in _FLAGS
        if not equals and not flag:
            if option not in (*_VALUED, "nnodes", "nproc-per-node", "max-restarts") or at == len(words):
                raise NotConvertible(f"{name} has no option --{option} that is known here: write each rank's command")
            value, at = words[at], at + 1
        if option in ("nnodes", "nproc-per-node", "max-restarts"):
            known[option] = value
        else:
            dropped.append(f"--{option}")
    program = tuple(words[at:])
    if not program:
        raise NotConvertible(f"{name} starts no program")
    if "no-python" not in known:
        program = ("python", "-m", *program) if {"m", "module"} & known.keys() else ("python", *program)
    return Launch(
        program, known.get("nnodes", ""), known.get("nproc-per-node", ""), known.get("max-restarts", ""), tuple(dropped)
    )


def starts_ranks(word: str) -> bool:
    """Whether a word of a command line names a launcher of torch."""
    return PurePosixPath(word).name in LAUNCHERS or word in MODULES


def _launcher(words: Sequence[str]) -> tuple[str, int]:
    """Its name, and where its options begin; empty where there is none."""
    if not words:
        return "", 0
    first = PurePosixPath(words[0]).name
    if first in LAUNCHERS or first in OTHERS:
        return first, 1
    if first.startswith("python"):
        for at, word in enumerate(words[1:], 1):
            if word == "-m" and at + 1 < len(words) and words[at + 1] in MODULES:
                return words[at + 1], at + 2
            if not word.startswith("-") or word in ("-m", "-c"):
                break
    return "", 0
