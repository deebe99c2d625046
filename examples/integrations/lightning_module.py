"""A small regression under Lightning's Trainer, with epochs, a scheduler, validation and averaged weights, at any world size.

    python examples/integrations/lightning_module.py                                     one process
    surefoot local -f examples/integrations/lightning_module.yaml --nodes 3              nodes that may die

What Surefoot adds to it are its import, the callback, and `protection.batches` in place of a DataLoader.
"""

from __future__ import annotations

import argparse
import os

import lightning
import torch
from lightning.pytorch.callbacks import WeightAveraging
from torch.optim.swa_utils import get_ema_avg_fn

import surefoot
from surefoot.integrations.lightning_callback import SurefootCallback


class Regression(lightning.LightningModule):
    """Learns a linear map."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)).double()

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.log("val_loss", torch.nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=60)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_batch_end(self, outputs: dict[str, torch.Tensor], batch: list[torch.Tensor], batch_idx: int) -> None:
        if self.trainer.is_global_zero:
            where = f"epoch {self.current_epoch}  world {self.trainer.world_size}"
            print(f"step {self.global_step}  {where}  loss {float(outputs['loss']):.12f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--checkpoints", default="build/lightning", help="folder, when no surefoot agent is there")
    options = parser.parse_args()

    torch.manual_seed(7)
    points = torch.randn(256, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    data = torch.utils.data.TensorDataset(points, points.sum(dim=1, keepdim=True))
    loader = surefoot.ElasticLoader(data, 12, seed=7, by_epoch=True, batches_per_step=1)
    protection = SurefootCallback(loader, folder=options.checkpoints, interval_steps=5)
    trainer = lightning.Trainer(
        max_steps=options.steps,
        max_epochs=-1,
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        callbacks=[protection, WeightAveraging(avg_fn=get_ema_avg_fn(0.9))],
        use_distributed_sampler=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(Regression(), protection.batches, torch.utils.data.DataLoader(data, batch_size=64))


if __name__ == "__main__":
    main()
