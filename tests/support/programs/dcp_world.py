"""One rank that saves or loads an FSDP2 model through torch.distributed.checkpoint on the engine.

dcp_world.py FOLDER save|load OUT     RANK, WORLD_SIZE and GROUP (a file store) in the environment
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from support.gloo_world import leave
from surefoot.integrations.dcp import SurefootReader, SurefootWriter


def built(seed: int) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model: Any = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(4, 5) * torch.arange(4.0)[:, None]).sum().backward()
    optimizer.step()
    return model, optimizer


def main() -> None:
    folder, doing, out = sys.argv[1:]
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=os.environ["GROUP"], rank=rank, world_size=world)
    model, optimizer = built(1 if doing == "save" else 2)
    weights, states = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": states, "step": 7 if doing == "save" else 0}
    if doing == "save":
        writer = SurefootWriter(folder)
        dcp.save(state, storage_writer=writer, checkpoint_id="step-7")
        writer.close()
    else:
        dcp.load(state, storage_reader=SurefootReader(folder), checkpoint_id="step-7")
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    whole = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in model.state_dict().items()}
    for n, p in model.named_parameters():
        whole |= {
            f"{n}/{k}": v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in optimizer.state[p].items()
        }
    if rank == 0:
        torch.save({"whole": whole, "step": state["step"]}, Path(out))
    leave()


if __name__ == "__main__":
    main()
