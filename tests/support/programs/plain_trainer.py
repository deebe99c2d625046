"""A program that knows nothing of surefoot: what torchrun starts. argv: steps, pause in seconds."""

import os
import sys
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
print(f"pid {os.getpid()} rank {dist.get_rank()} of {dist.get_world_size()}", flush=True)
for _ in range(int(sys.argv[1])):
    dist.all_reduce(torch.ones(1))
    time.sleep(float(sys.argv[2]))
dist.destroy_process_group()
print("done", flush=True)
