"""Lightning's Trainer with a scheduler and a callback for Surefoot."""

import lightning
import torch
from tell import FOLDER, STEPS, tell

import surefoot

SAMPLES = torch.randn(100, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, 1).double()

    def training_step(self, batch, _):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Surefoot(lightning.Callback):
    def on_fit_start(self, trainer, module):
        named = {"optimizer": trainer.optimizers[0], "scheduler": trainer.lr_scheduler_configs[0].scheduler}
        self.checkpointer = surefoot.Checkpointer(model=module, **named, loader=loader, folder=FOLDER, interval_steps=1)
        self.checkpointer.restore()

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        step = self.checkpointer.step(outputs["loss"])
        tell(step, outputs["loss"])
        trainer.should_stop = step >= STEPS


class Batches:
    def __iter__(self):
        return (batch.data for batch in loader)


loader = surefoot.ElasticLoader(SAMPLES, 12, seed=1, batches_per_step=1)
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
trainer = lightning.Trainer(max_steps=10**6, accelerator="cpu", devices=1, callbacks=[Surefoot()], **quiet)
trainer.fit(Regression(), Batches())
