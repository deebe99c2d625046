"""Tries to reach addresses from where it runs.

The doctor sends its text into a worker. Standard library alone, and of any Python 3: the worker's image is its owner's. Prints a JSON list of the targets with what came of each:
`seconds`, or `problem` and the `step` that failed.
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
    """Where this worker's agent finds its operator, by its own environment."""
    url = urlsplit(os.environ.get("SUREFOOT_COORDINATOR_URL", ""))
    secure = url.scheme == "wss"
    port = url.port or (443 if secure else 80)
    return {"kind": "coordinator", "node": "", "host": url.hostname or "", "port": port, "tls": secure}


def reached(target: dict[str, Any]) -> dict[str, Any]:
    """One target with how long it took, or what failed."""
    began = time.monotonic()
    step = "resolve"
    try:
        if not target["host"]:
            raise OSError("SUREFOOT_COORDINATOR_URL is not set here")
        socket.getaddrinfo(target["host"], target["port"], type=socket.SOCK_STREAM)
        step = "connect"
        with socket.create_connection((target["host"], target["port"]), SECONDS) as line:
            if target.get("tls"):
                step = "verify"
                trusted = ssl.create_default_context(cadata=os.environ.get("SUREFOOT_COORDINATOR_CA") or None)
                with trusted.wrap_socket(line, server_hostname=target["host"]):
                    pass
    except ConnectionRefusedError as error:
        if target["kind"] != "worker":
            return dict(target, step=step, problem=str(error))
        # nobody listens there, which the worker's machine itself has said: the way is open
    except OSError as error:
        return dict(target, step=step, problem=str(error) or type(error).__name__)
    return dict(target, seconds=round(time.monotonic() - began, 4))


def main(targets: list[dict[str, Any]]) -> None:
    with ThreadPoolExecutor(AT_ONCE) as threads:
        sys.stdout.write(json.dumps(list(threads.map(reached, [coordinator(), *targets]))) + "\n")
