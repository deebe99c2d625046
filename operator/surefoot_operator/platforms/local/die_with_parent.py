"""Runs a module in a process that dies with its parent.

`python -m …bound PARENT_PID MODULE ARGUMENT…`. `local_nodes` starts programs through it. Setting PDEATHSIG before exec
would need a fork hook, which is unsafe once the starting process has a second thread.
"""

from __future__ import annotations

import runpy
import sys

from surefoot.linux_process import die_with_parent


def main() -> None:
    parent, module = int(sys.argv[1]), sys.argv[2]
    die_with_parent(parent)
    sys.argv = [module, *sys.argv[3:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
