"""Lightning epochs of uneven lengths: a life that begins within one trains on what an undisturbed run trains on.

400 samples in batches of 32 are epochs of 13 and 12 batches by turns.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import json, sys
import torch, lightning, surefoot
from surefoot.integrations.lightning_callback import SurefootCallback

folder, accumulated, epochs, last, cut = sys.argv[1], *map(int, sys.argv[2:])
data = torch.utils.data.TensorDataset(torch.randn(400, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)),
                                      torch.arange(400))

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.samples = torch.nn.Linear(4, 1).double(), {}
    def training_step(self, batch, index):
        x, places = batch
        self.samples.setdefault(self.global_step + 1, []).extend(places.tolist())
        return (self.net(x) - 1).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

def fit(name, until):
    torch.manual_seed(0)
    module = Module()
    loader = surefoot.ElasticLoader(data, 32, by_epoch=True, batches_per_step=accumulated, seed=3)
    protection = SurefootCallback(loader, folder=folder + name, interval_steps=1)
    trainer = lightning.Trainer(accelerator="cpu", callbacks=[protection], max_steps=until, max_epochs=epochs, logger=False,
                                accumulate_grad_batches=accumulated, enable_progress_bar=False,
                                enable_model_summary=False, use_distributed_sampler=False)
    trainer.fit(module, protection.batches)
    weights = torch.cat([p.detach().flatten() for p in module.parameters()]).tolist()
    return {"samples": module.samples, "weights": weights, "end": [trainer.current_epoch, trainer.global_step]}

print(json.dumps([fit("/undisturbed", last), fit("/cut", cut), fit("/cut", last)]))
"""


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("accumulated", "epochs", "last", "cut"),
    [(1, 4, 100, 15), (1, -1, 40, 25), (2, -1, 40, 10), (2, -1, 40, 25)],
    ids=["within a short epoch", "at an epoch's end", "accumulating", "accumulating, at another epoch"],
)
def test_every_step_trains_on_the_same_samples(
    accumulated: int, epochs: int, last: int, cut: int, tmp_path: Path
) -> None:
    pytest.importorskip("lightning", reason="lightning is not installed: python -m bench frameworks")
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        PROGRAM,
        str(tmp_path),
        *map(str, (accumulated, epochs, last, cut)),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    undisturbed, before, after = json.loads(ended.stdout.splitlines()[-1])
    assert before["end"][1] == cut
    assert len(undisturbed["samples"]) > cut
    assert before["samples"] | after["samples"] == undisturbed["samples"]
    assert (after["end"], after["weights"]) == (undisturbed["end"], undisturbed["weights"])
