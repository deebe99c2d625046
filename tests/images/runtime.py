"""runc where root may not raise limits: containers, privileged ones too, are begun without what needs CAP_SYS_RESOURCE.

Sandboxes often take that capability away; docker then refuses every privileged container, and with it kind's nodes.
"""

from __future__ import annotations

import sys
from pathlib import Path

NAME = "without-limits"
CAPABILITY = "CAP_SYS_RESOURCE"
BIT = 24
PROGRAM = """#!{python} -SEI
import json, os, sys


def lessen(process):
    process.pop("oomScoreAdj", None)
    process.pop("rlimits", None)
    for kept in (process.get("capabilities") or {{}}).values():
        if "{capability}" in kept:
            kept.remove("{capability}")


def rewrite(path, of):
    with open(path, encoding="utf-8") as file:
        told = json.load(file)
    lessen(of(told))
    with open(path, "w", encoding="utf-8") as file:
        json.dump(told, file)


for word, value in zip(sys.argv, sys.argv[1:]):
    if word == "--bundle" and ("create" in sys.argv or "run" in sys.argv):
        rewrite(os.path.join(value, "config.json"), lambda told: told.get("process") or {{}})
    elif word == "--process":
        rewrite(value, lambda told: told)
os.execv("{runc}", ["{runc}", *sys.argv[1:]])
"""


def is_lacking(status: str) -> bool:
    """Whether the bounding set of a /proc/PID/status is without the capability. Pure."""
    line = next(line for line in status.splitlines() if line.startswith("CapBnd:"))
    return not int(line.split()[1], 16) >> BIT & 1


def arguments(runc: Path, program: Path) -> list[str]:
    """Of a docker daemon on this machine; writes the runtime to `program` where it is needed."""
    if not is_lacking(Path("/proc/self/status").read_text()):
        return []
    program.write_text(PROGRAM.format(python=sys.executable, capability=CAPABILITY, runc=runc))
    program.chmod(0o755)
    return ["--add-runtime", f"{NAME}={program}", "--default-runtime", NAME]
