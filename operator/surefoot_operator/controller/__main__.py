"""Starts `surefoot-operator`, the operator of a cluster.

Exits with 0 after SIGTERM or SIGINT, with 1 and a message if it cannot run, with 2 for a setting that is not allowed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import sys
from collections.abc import Sequence

from surefoot_operator.errors import OperatorError
from surefoot_operator.optional_dependencies import needing

with needing("surefoot-operator", "operator"):
    from surefoot.errors import ConfigurationError
    from surefoot_operator.controller.cluster_operator import ClusterOperator
    from surefoot_operator.controller.cluster_settings import (
        NAMESPACE_FILE,
        BadSetting,
        ClusterSettings,
        cluster_settings,
    )
    from surefoot_operator.controller.process_setup import begin_collector, begin_logs
    from surefoot_operator.platforms.kubernetes.api_client import connect

log = logging.getLogger("surefoot_operator.controller")


async def run(settings: ClusterSettings) -> None:
    """Runs until SIGTERM or SIGINT."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    api = await connect(settings.kubeconfig)
    try:
        await ClusterOperator(api, settings).run(ended)
    finally:
        await api.close()


def main(arguments: Sequence[str] | None = None) -> int:
    here = NAMESPACE_FILE.read_text(encoding="utf-8").strip() if NAMESPACE_FILE.exists() else ""
    try:
        given = sys.argv[1:] if arguments is None else arguments
        settings = cluster_settings(os.environ, given, here, secrets.token_hex(3))
        begin_logs(settings.log_level, settings.log_format)
    except (BadSetting, ConfigurationError) as error:
        sys.stderr.write(f"surefoot-operator: {error}\n")
        return 2
    begin_collector()
    try:
        asyncio.run(run(settings))
    except (OperatorError, OSError) as error:
        log.error("the operator cannot run: %s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
