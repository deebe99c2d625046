"""A run that has finished, and is started again, changes nothing: not the step, not the weights."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LOOPS = {
    "steps": "",
    "epochs": "",
    "accelerate": "accelerate",
    "transformers-steps": "transformers",
    "transformers-epochs": "transformers",
    "lightning-steps": "lightning",
    "lightning-epochs": "lightning",
}
FRAMEWORKS = ("transformers", "lightning")
"""What `make setup` leaves out: `python -m bench frameworks` brings these and runs their rows."""
PROGRAM = """
import hashlib, json, sys
import torch, surefoot

kind, folder = sys.argv[1:]
torch.manual_seed(7)
samples = torch.randn(50, 4)
data = torch.utils.data.TensorDataset(samples)
model = torch.nn.Linear(4, 1)

def told(step, model):
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    print(json.dumps([int(step), digest]))

if kind in ("steps", "epochs", "accelerate"):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if kind == "accelerate":
        from accelerate import Accelerator
        model, optimizer = Accelerator(cpu=True).prepare(model, optimizer)
    loader = surefoot.ElasticLoader(data, 8, seed=7, by_epoch=kind == "epochs")
    with surefoot.Checkpointer(model=model, optimizer=optimizer, loader=loader, folder=folder, interval_steps=4) as c:
        step = c.restore()
        def train(batch):
            loss = model(batch.data[0]).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return c.step(loss)
        if kind == "epochs":
            for _ in range(loader.epoch, 2):
                for batch in loader:
                    step = train(batch)
        else:
            for _, batch in zip(range(step, 10), loader):
                step = train(batch)
    told(step, model)
elif kind.startswith("lightning"):
    import lightning
    from surefoot.integrations.lightning_callback import SurefootCallback
    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = model
        def training_step(self, batch, index):
            return self.net(batch[0]).square().mean()
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)
    protection = SurefootCallback(surefoot.ElasticLoader(data, 8, by_epoch=True, seed=3), folder=folder, interval_steps=4)
    limit = {"max_epochs": 2} if kind.endswith("epochs") else {"max_steps": 10}
    trainer = lightning.Trainer(accelerator="cpu", callbacks=[protection], logger=False, enable_progress_bar=False,
                                enable_model_summary=False, use_distributed_sampler=False, **limit)
    module = Module()
    trainer.fit(module, protection.batches)
    told(trainer.global_step, module)
else:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
    from surefoot.integrations.hugging_face_trainer import protect_trainer
    rows = torch.randint(0, 64, (48, 16))
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    limit = {"num_train_epochs": 2} if kind.endswith("epochs") else {"max_steps": 10}
    args = TrainingArguments(folder + "/out", save_strategy="no", report_to=[], use_cpu=True, seed=7, disable_tqdm=True,
                             learning_rate=1e-2, lr_scheduler_type="constant", **limit)
    trainer = Trainer(model=GPT2LMHeadModel(config), args=args,
                      train_dataset=[{"input_ids": row, "labels": row} for row in rows])
    protect_trainer(trainer, global_batch_size=8, folder=folder, interval_steps=4)
    trainer.train()
    told(trainer.state.global_step, trainer.model)
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.nightly if module in FRAMEWORKS else ()) for kind, module in LOOPS.items()],
)
def test_a_finished_run_that_is_started_again_changes_nothing(kind: str, tmp_path: Path) -> None:
    if LOOPS[kind] and importlib.util.find_spec(LOOPS[kind]) is None:
        pytest.skip(f"{LOOPS[kind]} is not installed: python -m bench frameworks")
    ends = []
    for _ in range(3):
        command = [sys.executable, "-W", "ignore", "-c", PROGRAM, kind, str(tmp_path)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert ended.returncode == 0, ended.stderr[-3000:]
        ends.append(json.loads(ended.stdout.splitlines()[-1]))
    assert ends[0][0] > 0
    assert ends[1:] == [ends[0], ends[0]]


TRAINER = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from surefoot.integrations.hugging_face_trainer import protect_trainer

torch.manual_seed(7)
rows = torch.randint(0, 64, (512, 16))
config = GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
args = TrainingArguments("out", max_steps=30, save_strategy="no", report_to=[], use_cpu=True, seed=7, disable_tqdm=True,
                         learning_rate=1e-2, lr_scheduler_type="constant")
trainer = Trainer(model=GPT2LMHeadModel(config), args=args,
                  train_dataset=[{"input_ids": row, "labels": row} for row in rows])
protect_trainer(trainer, global_batch_size=16)
trainer.train()
"""
JOB = """
apiVersion: surefoot.dev/v1alpha1
kind: TrainingJob
metadata: {name: hfend}
spec:
  replicas: 1
  checkpoint: {memory: {intervalSteps: 5, replicas: 1}}
  template:
    spec:
      containers:
        - {name: trainer, command: [python, train.py]}
"""


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_trainer_killed_behind_its_last_step_makes_none_more(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: python -m bench frameworks")
    (tmp_path / "train.py").write_text(TRAINER, encoding="utf-8")
    (tmp_path / "job.yaml").write_text(JOB, encoding="utf-8")
    command = [str(Path(sys.executable).with_name("surefoot")), "local", "-f", "job.yaml", "--nodes", "1"]
    command += ["--fault", "trainer:0@step=30", "--compare", "--plain", "--report", "report.json"]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert report["max_parameter_difference"] == 0
    assert report["steps"] == 30
    assert [incident["kind"] for incident in report["incidents"]] == ["trainer-failed"]
