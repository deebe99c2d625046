"""A small real trainer for the agent's tests: gloo all-reduce a step, every step reported to the agent.

argv: the number of steps, the pause between them in seconds. What goes wrong in an epoch stands in the folder that
FAULTS names, in a file of the epoch's number: `{"fault": "raise", "rank": 1, "steps": 20}`, each field optional.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from surefoot.ipc.agent_client import AgentBackend
from surefoot.ipc.trainer_messages import StepReport
from surefoot.protocol.progress import Progress


def main() -> None:
    link = AgentBackend.connect()
    orders = Path(os.environ.get("FAULTS", "/nonexistent")) / str(link.attached.generation)
    order = json.loads(orders.read_text()) if orders.exists() else {}
    steps, pause = order.get("steps", int(sys.argv[1])), float(sys.argv[2])
    fault, where = order.get("fault"), order.get("rank")
    dist.init_process_group("gloo")
    rank, epoch = dist.get_rank(), link.attached.generation
    print(f"pid {os.getpid()} rank {rank} of {dist.get_world_size()} epoch {epoch} argv {sys.argv[1:]}")
    print(f"main {__name__} folder {sys.path[0]} threads {torch.get_num_threads()}")
    link.report_restore(0, "none", 0, 0.0)
    for step in range(1, steps + 1):
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == dist.get_world_size()
        if step == 5 and rank == where and fault == "raise":
            raise ValueError("the data is bad\nin more than one line")
        if step == 5 and rank == where and fault == "exit":
            sys.exit(7)
        if step == 5 and rank == where and fault == "hang":
            time.sleep(1000)
        link.report_step(StepReport(Progress(step, 1.0 / step, pause), ((step, step + 1),), skipped=False))
        if link.is_barrier_at(step):
            link.wait_at_barrier(step)
        time.sleep(pause)
    link.close(steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
