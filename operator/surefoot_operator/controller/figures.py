"""What the process itself is worth: how late its loop wakes up, and where its metrics are served on one machine.

Used by the composition roots. A cluster's operator serves `/metrics` beside its health; `served` is the local one's.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prometheus_client import start_http_server

from surefoot_operator import metrics
from surefoot_operator.fabric.processes.folder import RunFolder

LAG_SECONDS = 0.5
HOST = "127.0.0.1"


async def measure_loop_lag() -> None:
    """Until cancelled: sleeps, and counts how much longer that took than it was asked to."""
    while True:
        began = time.monotonic()
        await asyncio.sleep(LAG_SECONDS)
        metrics.loop_lag_seconds.observe(max(0.0, time.monotonic() - began - LAG_SECONDS))


@contextmanager
def served(root: Path) -> Iterator[None]:
    """Serves this process' metrics on a free port, which the run folder tells in the form of Prometheus' file_sd."""
    server, thread = start_http_server(0, addr=HOST)
    told = RunFolder(root).metrics / "operator.json"
    scratch = told.with_name(f".{told.name}")
    scratch.write_text(json.dumps([{"targets": [f"{HOST}:{server.server_port}"]}]), encoding="ascii")
    scratch.rename(told)
    try:
        yield
    finally:
        told.unlink(missing_ok=True)
        server.shutdown()
        server.server_close()
        thread.join()
