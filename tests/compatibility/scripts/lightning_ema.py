"""Lightning's WeightAveraging, with validation after every step: it swaps weights through `.data` around it."""

import lightning
import torch
from lightning.pytorch.callbacks import WeightAveraging
from tell import FOLDER, STEPS, tell
from torch.optim.swa_utils import get_ema_avg_fn

import surefoot

WIDTH, LAYERS = 512, 12
SAMPLES = torch.randn(100, WIDTH, generator=torch.Generator().manual_seed(0))


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])

    def training_step(self, batch, _):
        return self.net(batch).square().mean() + sum(p.square().mean() for p in self.parameters())

    def validation_step(self, batch, _):
        return self.net(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 10.0, momentum=0.9)


class Surefoot(lightning.Callback):
    def on_fit_start(self, trainer, module):
        named = {"optimizer": trainer.optimizers[0], "loader": loader, "ema": averaging._average_model}
        self.checkpointer = surefoot.Checkpointer(model=module, **named, folder=FOLDER, interval_steps=1)
        self.checkpointer.restore()

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        step = self.checkpointer.step(outputs["loss"])
        tell(step, outputs["loss"])
        trainer.should_stop = step >= STEPS


class Batches:
    def __iter__(self):
        return (batch.data for batch in loader)


loader = surefoot.ElasticLoader(SAMPLES, 4, seed=1, batches_per_step=1)
averaging = WeightAveraging(avg_fn=get_ema_avg_fn(0.9))
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
often = {"val_check_interval": 1, "limit_val_batches": 1, "num_sanity_val_steps": 0}
trainer = lightning.Trainer(
    max_steps=10**6, accelerator="cpu", devices=1, callbacks=[averaging, Surefoot()], **quiet, **often
)
trainer.fit(Regression(), Batches(), torch.utils.data.DataLoader(SAMPLES, batch_size=4))
