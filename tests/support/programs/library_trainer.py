"""A training of one process without an agent: FOLDER STEPS INTERVAL SECONDS-A-STEP KEEP, and how it ends.

Prints what it restored and each finished step. It ends after so many more steps, or once the file STOP of its
environment is there. `close` closes it, `with` by its block, `exit` leaves it to the interpreter.
"""

from __future__ import annotations

import logging
import os
import sys
import time

import torch

import surefoot

FOLDER, STEPS, INTERVAL, PACE, KEEP, END = sys.argv[1:7]


def main() -> None:
    logging.basicConfig(format="%(levelname)s %(message)s", level=logging.WARNING)
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    checkpointer = surefoot.Checkpointer(
        model=model, optimizer=optimizer, folder=FOLDER, interval_steps=int(INTERVAL), keep=int(KEEP)
    )

    def train() -> None:
        start = checkpointer.restore()
        print("restored", start, flush=True)
        for step in range(start + 1, start + int(STEPS) + 1):
            model(torch.full((1, 8), float(step))).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpointer.step()
            print("step", step, flush=True)
            time.sleep(float(PACE))
            if os.path.exists(os.environ.get("STOP", "")):
                break

    if END == "with":
        with checkpointer:
            train()
    else:
        train()
        if END == "close":
            checkpointer.close()


if __name__ == "__main__":
    main()
