"""A tiny GPT-2 under transformers' Trainer, two accumulated batches a step."""

import torch
from tell import FOLDER, STEPS, tell
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import surefoot

CONFIG = GPT2Config(
    n_layer=1, n_head=2, n_embd=16, vocab_size=101, n_positions=16, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
)
TOKENS = torch.randint(0, 101, (200, 16), generator=torch.Generator().manual_seed(0))
SAMPLES = [{"input_ids": row, "labels": row} for row in TOKENS]


class Elastic(Trainer):
    def get_train_dataloader(self):
        accumulated = self.args.gradient_accumulation_steps
        self.loader = surefoot.ElasticLoader(self.train_dataset, 6, seed=7, batches_per_step=accumulated)
        return Endless(self.loader)

    def compute_loss(self, model, inputs, **_):  # transformers' own goes through float32
        logits, wanted = model(inputs["input_ids"]).logits[:, :-1], inputs["labels"][:, 1:]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())

    def training_step(self, *given, **named):
        self.last = self.last + (loss := super().training_step(*given, **named))
        return loss


class Endless:
    def __init__(self, loader): self.loader = loader  # fmt: skip

    def __len__(self): return 10**6  # fmt: skip

    def __iter__(self): return (batch.data for batch in self.loader)  # fmt: skip


class Surefoot(TrainerCallback):
    def on_train_begin(self, args, state, control, model, optimizer, lr_scheduler, **_):
        objects = {"model": model, "optimizer": optimizer.optimizer, "scheduler": lr_scheduler}
        self.checkpointer = surefoot.Checkpointer(**objects, loader=trainer.loader, folder=FOLDER, interval_steps=1)
        state.global_step, trainer.last = self.checkpointer.restore(), 0.0

    def on_step_end(self, args, state, control, **_):
        self.checkpointer.step(trainer.last)
        tell(state.global_step, trainer.last)
        trainer.last = 0.0


how = {
    "learning_rate": 1e-2,
    "max_steps": STEPS,
    "gradient_accumulation_steps": 2,
    "use_cpu": True,
    "disable_tqdm": True,
}
args = TrainingArguments(output_dir=FOLDER + "-hf", save_strategy="no", report_to=[], max_grad_norm=1.0, **how)
trainer = Elastic(model=GPT2LMHeadModel(CONFIG).double(), args=args, train_dataset=SAMPLES, callbacks=[Surefoot()])
trainer.train()
