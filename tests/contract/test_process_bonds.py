"""A process of the fabric ends with the one that made it, also where that one ends before the bond is made."""

from __future__ import annotations

import subprocess
import sys
import textwrap

ORPHAN = textwrap.dedent(
    """
    import os, signal, sys
    from surefoot.linux_process import die_with_parent

    parent, gone = os.getpid(), os.pipe()
    if os.fork() == 0:
        os.close(gone[1])
        os.read(gone[0], 1)  # until the parent has ended
        while os.getppid() == parent:
            pass
        die_with_parent(parent)
        sys.stdout.write("outlived")
        sys.stdout.flush()
        os._exit(0)
    os._exit(0)
    """
)


def test_a_process_whose_parent_ended_before_the_bond_was_made_ends() -> None:
    """Its output ends without a word: whoever holds the pipe has ended."""
    found = subprocess.run([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, timeout=30, check=True)
    assert found.stdout == b""


def test_a_process_whose_parent_lives_goes_on() -> None:
    code = "import os; from surefoot.linux_process import die_with_parent; die_with_parent(os.getppid())"
    subprocess.run([sys.executable, "-c", code], timeout=30, check=True)
