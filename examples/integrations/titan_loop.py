"""torchtitan's containers and its loop around a checkpoint manager, with FSDP2, at any world size and without a GPU.

    python examples/integrations/titan_loop.py                                     one process
    surefoot local -f examples/integrations/titan_loop.yaml --nodes 3              nodes that may die

torchtitan's own trainer asks for a GPU; there the one line is `config.checkpoint = SurefootCheckpoints.Config(enable=True)`.
What stands here calls the manager as that trainer does.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torchtitan.components.optimizer import LRSchedulersContainer
from torchtitan.components.optimizer.optimizer import default_adamw

import surefoot
from surefoot.integrations.torchtitan_checkpoints import SurefootCheckpoints


class TrainState:
    """What torchtitan's trainer saves of itself."""

    step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--checkpoints", default="build/titan", help="folder, when no surefoot agent is there")
    options = parser.parse_args()

    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)).double()
    fully_shard(model)
    optimizers = default_adamw(lr=1e-2).build(model_parts=[model])
    schedulers = LRSchedulersContainer.Config(warmup_steps=4).build(optimizers=optimizers, training_steps=options.steps)
    points = torch.randn(256, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    data = torch.utils.data.TensorDataset(points, points.sum(dim=1, keepdim=True))
    loader = surefoot.ElasticLoader(data, 12, seed=7)
    state = TrainState()

    manager = SurefootCheckpoints.Config(enable=True, folder=options.checkpoints, interval=5).build(
        dataloader=loader,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states={"train_state": state},
    )
    manager.load()
    for batch in loader:
        state.step += 1
        loss = torch.nn.functional.mse_loss(model(batch.data[0]), batch.data[1]) * batch.weight
        loss.backward()
        manager.maybe_wait_for_staging()
        optimizers.step()
        schedulers.step()
        optimizers.zero_grad()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(f"step {state.step}  world {dist.get_world_size()}  loss {float(mean):.12f}", flush=True)
        manager.save(state.step, last_step=state.step == options.steps)
        if state.step == options.steps:
            break
    manager.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
