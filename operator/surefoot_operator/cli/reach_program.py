"""Tries to connect to a list of addresses from inside a worker.

The doctor runs the text of this file in the worker's image, which belongs to the user: it may use only the standard
library and must run on any Python 3. It prints the targets as a JSON list, each with `seconds`, or with `problem` and
the `step` that failed.
"""

from __future__ import annotations

import json
import os
import socket
import ssl
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

SECONDS = 3.0
AT_ONCE = 32


def coordinator() -> dict[str, Any]:
    """Returns the operator's address as a target, from the environment that this worker's agent uses too."""
    url = urlsplit(os.environ.get("SUREFOOT_COORDINATOR_URL", ""))
    is_tls = url.scheme == "wss"
    port = url.port or (443 if is_tls else 80)
    return {"kind": "coordinator", "node": "", "host": url.hostname or "", "port": port, "tls": is_tls}


def reached(target: dict[str, Any]) -> dict[str, Any]:
    """Tries a target; returns it with the seconds it took, or with the step that failed and the error."""
    start_seconds = time.monotonic()
    step = "resolve"
    try:
        if not target["host"]:
            raise OSError("SUREFOOT_COORDINATOR_URL is not set here")
        socket.getaddrinfo(target["host"], target["port"], type=socket.SOCK_STREAM)
        step = "connect"
        with socket.create_connection((target["host"], target["port"]), SECONDS) as connection:
            if target.get("tls"):
                step = "verify"
                tls_context = ssl.create_default_context(cadata=os.environ.get("SUREFOOT_COORDINATOR_CA") or None)
                with tls_context.wrap_socket(connection, server_hostname=target["host"]):
                    pass
    except ConnectionRefusedError as error:
        if target["kind"] != "worker":
            return dict(target, step=step, problem=str(error))
        # The worker's own machine rejected the connection because no process listens: the network path works.
    except OSError as error:
        return dict(target, step=step, problem=str(error) or type(error).__name__)
    return dict(target, seconds=round(time.monotonic() - start_seconds, 4))


def main(targets: list[dict[str, Any]]) -> None:
    """Tries the operator and all targets in parallel, and prints the results."""
    with ThreadPoolExecutor(AT_ONCE) as executor:
        sys.stdout.write(json.dumps(list(executor.map(reached, [coordinator(), *targets]))) + "\n")
