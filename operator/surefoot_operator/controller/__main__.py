"""`surefoot-operator`: the operator of a cluster, in its pod or, with `--kubeconfig`, on a desk.

Ends with 0 after SIGTERM or SIGINT, with 1 and a sentence if it cannot run.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence

from surefoot_operator.controller.cluster import ClusterOperator
from surefoot_operator.controller.configuration import NAMESPACE_FILE, BadSetting, ClusterSettings, cluster_settings
from surefoot_operator.errors import OperatorError

log = logging.getLogger(__name__)


async def run(settings: ClusterSettings) -> None:
    """Runs until SIGTERM or SIGINT."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    await ClusterOperator(settings).run(ended)


def main(arguments: Sequence[str] | None = None) -> int:
    here = NAMESPACE_FILE.read_text(encoding="utf-8").strip() if NAMESPACE_FILE.exists() else ""
    try:
        settings = cluster_settings(os.environ, sys.argv[1:] if arguments is None else arguments, here)
    except BadSetting as error:
        sys.stderr.write(f"surefoot-operator: {error}\n")
        return 2
    logging.basicConfig(
        stream=sys.stderr,
        level=settings.log_level,
        format="%(asctime)s.%(msecs)03d %(levelname)s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
    )
    try:
        asyncio.run(run(settings))
    except (OperatorError, OSError) as error:
        log.error("the operator cannot run: %s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
