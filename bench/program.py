"""The training program that every system saves: a small transformer with AdamW, in float32, on the CPU or a device.

Its state does not depend on the batch, so the batch is what makes a step as long as the measurement wants it.
"""

from __future__ import annotations

import torch
from torch import nn

CONTEXT = 64
VOCABULARY = 512


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mixed, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.mixed(self.before(x)).chunk(3, dim=-1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.narrow(nn.functional.gelu(self.wide(self.between(x))))


class Program:
    """Model, optimizer and a batch; `train` is forward and backward, `advance` the optimizer's step.

    With no sequences nothing is trained: it is there to be saved and restored.
    """

    def __init__(self, width: int, layers: int, sequences: int = 1, seed: int = 1, device: str = "cpu") -> None:
        torch.manual_seed(seed)
        self._device = device
        self.model = nn.Sequential(
            nn.Embedding(VOCABULARY, width), *(Block(width) for _ in range(layers)), nn.Linear(width, VOCABULARY)
        ).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.batch(sequences)
        if sequences:
            self.train()
            self.advance()
        else:
            self._moments()

    def batch(self, sequences: int) -> None:
        self._tokens = torch.randint(VOCABULARY, (sequences, CONTEXT + 1), device=self._device)

    def train(self) -> None:
        found = self.model(self._tokens[:, :-1]).flatten(0, 1)
        nn.functional.cross_entropy(found, self._tokens[:, 1:].flatten()).backward()

    def advance(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _moments(self) -> None:
        """What the optimizer would keep: other values in each, so that none is taken for another."""
        for parameter in self.model.parameters():
            with torch.no_grad():
                moments = {"exp_avg": parameter + 1, "exp_avg_sq": parameter + 2}
            self.optimizer.state[parameter] = {"step": torch.tensor(1.0), **moments}

    def state(self) -> dict[str, object]:
        """What peers are given, made anew for each save as their users do."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def tensors(self) -> list[torch.Tensor]:
        """Every tensor of the state."""
        kept = [self.optimizer.state[p] for p in self.model.parameters()]
        moments = [state[name] for state in kept for name in sorted(state)]
        return [*self.model.state_dict().values(), *moments]

    @property
    def size_bytes(self) -> int:
        return sum(t.nbytes for t in self.tensors())
