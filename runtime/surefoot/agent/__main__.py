"""`python -m surefoot.agent -- COMMAND ARGS…` runs one worker's agent.

Its settings come from the environment.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence

from surefoot.agent import credentials as identity
from surefoot.agent.agent_process import AgentProcess
from surefoot.agent.scratch_dirs import own_scratch
from surefoot.errors import SurefootError
from surefoot.logs import begin_logs
from surefoot.settings import AgentSettings, agent_settings

_USAGE = "usage: surefoot-agent -- COMMAND [ARGUMENT…]   (its settings come from SUREFOOT_* in the environment)"
_BAD_USAGE = 2


def main(arguments: Sequence[str] | None = None) -> None:
    """Console entry; exits with the agent's code."""
    command = list(sys.argv[1:] if arguments is None else arguments)
    if command[:1] == ["--"]:
        command = command[1:]
    if not command:
        sys.stderr.write(f"{_USAGE}\n")
        sys.exit(_BAD_USAGE)
    try:
        settings = agent_settings()
        identity.trust(settings)
        identity.token(settings)  # mounted before this process starts, or never
        environment = own_scratch(os.environ, settings)
        _begin_logs(settings)
    except SurefootError as error:
        sys.stderr.write(f"surefoot-agent: {error}\n")
        sys.exit(_BAD_USAGE)
    sys.exit(asyncio.run(_live(settings, command, environment)))


def _begin_logs(settings: AgentSettings) -> None:
    keys = {
        "namespace": settings.job_namespace,
        "job": settings.job_name,
        "worker": settings.index,
        "node": settings.node,
    }
    begin_logs(os.environ, f"%(asctime)s worker {settings.index} %(levelname)s %(name)s: %(message)s", keys=keys)


async def _live(settings: AgentSettings, command: Sequence[str], environment: Mapping[str, str]) -> int:
    return await AgentProcess(settings, command, environment).run()


if __name__ == "__main__":
    main()
