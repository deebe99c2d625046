"""SIGTERM under other people's loops, without an agent: the step is saved, and the framework's own handler runs too."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

TRAINER = """
import sys, time
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from surefoot.integrations.hugging_face_trainer import protect_trainer

rows = torch.randint(0, 64, (48, 16))
config = GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
args = TrainingArguments(sys.argv[1] + "/out", save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
                         max_steps=10**5)

class Told(TrainerCallback):
    def on_step_begin(self, args, state, control, **_):
        if not hasattr(self, "from_step"):
            self.from_step = state.global_step
            print("from", self.from_step, flush=True)
        if state.global_step == self.from_step + 5:
            print("trains", flush=True)
        time.sleep(0.02)

trainer = Trainer(model=GPT2LMHeadModel(config), args=args, callbacks=[Told()],
                  train_dataset=[{"input_ids": row, "labels": row} for row in rows])
protect_trainer(trainer, global_batch_size=8, folder=sys.argv[1], interval_steps=10**6)
trainer.train()
"""
LIGHTNING = """
import signal, sys, time
import torch, lightning, surefoot
from surefoot.integrations.lightning_callback import SurefootCallback

if sys.argv[2:] == ["own"]:
    signal.signal(signal.SIGTERM, lambda *_: print("own handler", flush=True))

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)
    def training_step(self, batch, index):
        return self.net(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class Told(lightning.Callback):
    from_step = None
    def on_train_batch_start(self, trainer, module, batch, index):
        if self.from_step is None:
            self.from_step = trainer.global_step
            print("from", self.from_step, flush=True)
        if trainer.global_step == self.from_step + 5:
            print("trains", flush=True)
        time.sleep(0.02)
    def on_exception(self, trainer, module, exception):
        print("ended by", type(exception).__name__, flush=True)

data = torch.utils.data.TensorDataset(torch.randn(50, 4))
protection = SurefootCallback(surefoot.ElasticLoader(data, 8, by_epoch=True), folder=sys.argv[1], interval_steps=10**6)
trainer = lightning.Trainer(accelerator="cpu", callbacks=[Told(), protection], logger=False, enable_progress_bar=False,
                            enable_model_summary=False, use_distributed_sampler=False, max_steps=10**5)
trainer.fit(Module(), protection.batches)
"""


def life(program: str, folder: Path, *more: str) -> tuple[int, int, int, str]:
    """Asks it to end at the fifth step: where it began, the step that it saved, its exit code and its log."""
    start, lines = -1, []
    command = [sys.executable, "-W", "ignore", "-c", program, str(folder), *more]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if line.startswith("from "):
                start = int(line.split()[1])
            if line.startswith("trains"):
                os.kill(process.pid, signal.SIGTERM)
        code = process.wait(60)
    text = "".join(lines)
    saved = re.findall(r"SIGTERM: step (\d+) is saved", text)
    assert len(saved) == 1, text
    return start, int(saved[0]), code, text


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_trainer_saves_the_step_and_ends_as_sigterm_ends_it(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: python -m bench frameworks")
    start, saved, code, text = life(TRAINER, tmp_path)
    assert (start, code) == (0, -signal.SIGTERM), text
    assert saved >= 5
    start, again, _, text = life(TRAINER, tmp_path)
    assert start == saved, text
    assert again > saved


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("handler", ["none", "own"])
def test_lightning_saves_the_step_and_its_own_handler_runs(handler: str, tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="lightning is not installed: python -m bench frameworks")
    start, saved, _, text = life(LIGHTNING, tmp_path, handler)
    assert start == 0, text
    assert saved >= 5
    assert "ended by SIGTERMException" in text
    assert text.count("own handler") == (1 if handler == "own" else 0)
    start, again, _, text = life(LIGHTNING, tmp_path, handler)
    assert start == saved, text
    assert again > saved
