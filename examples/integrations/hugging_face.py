"""A tiny GPT-2 under transformers' Trainer, with accumulation, warm-up, logging and evaluation, at any world size.

    python examples/integrations/hugging_face.py --steps 60                                    one process
    torchrun --nproc-per-node=3 examples/integrations/hugging_face.py --steps 60               three ranks, from the same checkpoints

What Surefoot adds to it are the two lines that name it.
"""

from __future__ import annotations

import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from surefoot.integrations.hugging_face_trainer import protect_trainer


class PrintSteps(TrainerCallback):
    """Prints each step."""

    def on_log(self, args, state, control, logs, **_):  # type: ignore[no-untyped-def]
        if state.is_world_process_zero and "loss" in logs:
            words = f"epoch {state.epoch:.3f}  rate {logs['learning_rate']:.3e}  loss {logs['loss']:.12f}"
            print(f"step {state.global_step}  world {args.world_size}  {words}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--checkpoints", default="build/hugging_face", help="folder, when no surefoot agent is there")
    options = parser.parse_args()

    torch.manual_seed(7)
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 101, "n_positions": 16}
    model = GPT2LMHeadModel(GPT2Config(**shape, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)).double()
    tokens = torch.randint(0, 101, (150, 16), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    args = TrainingArguments(
        output_dir=f"{options.checkpoints}-trainer",
        max_steps=options.steps,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        warmup_steps=4,
        logging_steps=1,
        eval_strategy="epoch",
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=args, train_dataset=data, eval_dataset=data[:12], callbacks=[PrintSteps()])
    protect_trainer(trainer, global_batch_size=12, folder=options.checkpoints, interval_steps=5)
    trainer.train()


if __name__ == "__main__":
    main()
