"""Imports the frameworks and the script's imports into the warm process.

Parsing is pure. An import that fails here is only noted: the script will show the error itself, in its own words.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

FRAMEWORKS = (
    "torch",
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch._dynamo",  # the first fully_shard imports it: half a second
    "numpy",
    "surefoot.checkpointer",
    "surefoot.ipc.agent_client",
)


@dataclass(frozen=True, slots=True)
class Preloaded:
    seconds: float
    failed: tuple[str, ...]
    """`module: error`, one an import that did not work."""


def top_level_imports(source: str) -> tuple[str, ...]:
    """Lists modules that the program imports unconditionally, in order.

    `a.b:c` where c may be a submodule of a.b.
    """
    names: list[str] = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module not in (None, "__future__"):
            names += [f"{node.module}:{alias.name}" for alias in node.names]
    return tuple(dict.fromkeys(names))


def program_source(script: str | None, module: str | None) -> Path | None:
    """The file whose imports matter; None if it cannot be found (starting it will say why)."""
    if script is not None:
        return Path(script)
    if module is None:
        return None
    for name in (f"{module}.__main__", module):
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError, AttributeError):
            continue
        if spec is not None and spec.origin is not None and spec.origin.endswith(".py"):
            return Path(spec.origin)
    return None


def preload(source: Path | None) -> Preloaded:
    """Imports the frameworks and the program's own imports."""
    began = time.monotonic()
    failed: list[str] = []
    wanted: list[str] = list(FRAMEWORKS)
    if source is not None:
        try:
            wanted += top_level_imports(source.read_text(encoding="utf-8"))
        except (OSError, SyntaxError, ValueError) as error:
            failed.append(f"{source}: {error}")
    failed += _import_all(wanted)
    return Preloaded(time.monotonic() - began, tuple(failed))


def _import_all(wanted: Iterable[str]) -> list[str]:
    failed: list[str] = []
    for entry in wanted:
        module, _, attribute = entry.partition(":")
        try:
            loaded = sys.modules.get(module) or importlib.import_module(module)
            if attribute and attribute != "*" and not hasattr(loaded, attribute) and hasattr(loaded, "__path__"):
                importlib.import_module(f"{module}.{attribute}")
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001  # a module may raise anything, SystemExit included
            failed.append(f"{entry}: {type(error).__name__}: {error}")
    return failed
