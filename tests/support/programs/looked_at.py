"""A process that looks at itself two thousand times a second, and ends in the way that it is told."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import torch

from surefoot.checkpointer import activity_monitor


def main(way: str) -> None:
    activity_monitor.POLL_SECONDS = 0.0005
    pace = activity_monitor.ActivityMonitor([torch.nn.Linear(2, 2)], 0, 3)
    pace.end_step(1)
    data = torch.randn(64, 64, requires_grad=True)
    for _ in range(20):
        (data @ data).sum().backward()
    match way:
        case "closes":
            pace.close()
        case "raises":
            raise RuntimeError("as it was told")
        case "exits":
            sys.exit(3)
        case "exits at once":
            os._exit(0)
        case "leaves a thread":
            threading.Thread(target=lambda: time.sleep(0.02)).start()
        case "is interrupted":
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(10)
        case "forks":
            child = os.fork()
            if child:
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            else:
                pace.disable_after_fork()


if __name__ == "__main__":
    main(sys.argv[1])
