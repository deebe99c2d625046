"""Whether a machine is quiet enough to be measured. Pure.

Beside other work a save shares its cores and its memory's bandwidth with it, each system to another degree: such figures
compare nothing.
"""

from __future__ import annotations

QUIET_LOAD = 0.5
"""Load average of one minute, whatever the cores: other work disturbs by memory bandwidth too."""


def refusal(load: float, although_busy: bool) -> str | None:
    """Why not to measure here now; None: go on."""
    if load <= QUIET_LOAD or although_busy:
        return None
    return (
        f"the load of this machine is {load:.1f}: other work runs, and figures beside it compare nothing. Close it and wait"
        f" until the load is below {QUIET_LOAD:g}, or measure with --although-busy, which the result says"
    )
