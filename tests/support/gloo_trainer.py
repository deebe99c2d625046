"""A small real trainer for the agent's tests: gloo all-reduce a step, every step reported to the agent.

argv: the number of steps, the pause between them in seconds, then what to do wrong (optional) and on which rank.
"""

import os
import sys
import time

import torch
import torch.distributed as dist

from surefoot.agent.line import Stepped
from surefoot.agent.trainer_link import AgentLink


def main() -> None:
    steps, pause = int(sys.argv[1]), float(sys.argv[2])
    fault, where = (sys.argv[3], int(sys.argv[4])) if len(sys.argv) > 4 else ("", -1)
    link = AgentLink.connect()
    dist.init_process_group("gloo")
    rank, epoch = dist.get_rank(), link.attached.epoch
    print(f"pid {os.getpid()} rank {rank} of {dist.get_world_size()} epoch {epoch} argv {sys.argv[1:]}")
    print(f"main {__name__} folder {sys.path[0]} threads {torch.get_num_threads()}")
    link.restored(0, "none", 0, 0.0)
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
        link.stepped(Stepped(step, 1.0 / step, pause, None, (step, step + 1), skipped=False, level=0))
        if link.held_at(step):
            link.wait_while_held(step)
        time.sleep(pause)
    link.close(steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
