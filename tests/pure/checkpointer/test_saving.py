"""Whatever a program does to its tensors between two saves, what is sealed is what each tensor holds, copied alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from support.saved_streams import saved
from surefoot.checkpointer.saving import Saver
from surefoot.ipc.trainer_messages import Staged
from surefoot.state import Program

SLOTS = 2


class Memory:
    """Staging memory of two slots, each free again at once."""

    def __init__(self) -> None:
        self.sealed: list[Staged] = []
        self._memory, self._slot_bytes, self._next = bytearray(), 0, 0

    def request_arena(self, slot_bytes: int) -> tuple[memoryview, int, int]:
        self._memory, self._slot_bytes = bytearray(SLOTS * slot_bytes), slot_bytes
        return memoryview(self._memory), SLOTS, slot_bytes

    def wait_for_free_slot(self, wait_seconds: float) -> int | None:
        self._next = (self._next + 1) % SLOTS
        return self._next

    def hand_over_slot(self, message: Staged) -> None:
        self.sealed.append(message)

    def wait_for_flush(self, seconds: float) -> bool:
        return True

    def report_notice(self, reason: str, text: str) -> None:
        raise AssertionError(f"{reason}: {text}")

    def stream(self) -> bytes:
        begin = self.sealed[-1].slot * self._slot_bytes
        return bytes(self._memory[begin : begin + self.sealed[-1].stream_bytes])


class Training:
    """Parameters of every kind that is copied in its own way, buffers, AdamW."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(9, 7), nn.BatchNorm1d(7), nn.Linear(7, 300), nn.Embedding(80, 300))
        self.model.register_parameter("scale", nn.Parameter(torch.ones(())))
        self.model.register_parameter("none", nn.Parameter(torch.ones(0, 3)))
        self.model.register_parameter("turned", nn.Parameter(torch.randn(5, 6).t()))
        self.model.register_parameter("small", nn.Parameter(torch.randn(33, dtype=torch.bfloat16)))
        self.model.register_parameter("aliased", nn.Parameter(self.model[0].weight.detach()[2]))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.train()

    def train(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()

    def replace_memory(self) -> None:
        for parameter in list(self.model.parameters())[::2]:
            parameter.data = parameter.data + 1

    def swap_memory(self) -> None:
        first, second = self.model[0].bias, self.model[1].weight
        first.data, second.data = second.data, first.data

    def turn(self) -> None:
        turned = self.model.turned
        turned.data = turned.data.contiguous() if not turned.is_contiguous() else turned.data.t().contiguous().t()

    def replace_buffer(self) -> None:
        self.model[1].running_mean = torch.full((7,), float(self.model[1].running_mean[0]) + 1)

    def replace_state(self) -> None:
        state = self.optimizer.state[self.model[2].bias]
        state["exp_avg"] = state["exp_avg"] * 2

    def add_group(self) -> None:
        name = f"added{len(self.optimizer.param_groups)}"
        self.model.register_parameter(name, nn.Parameter(torch.full((4,), 7.0)))
        self.optimizer.add_param_group({"params": [self.model.get_parameter(name)]})

    def in_place(self) -> None:
        with torch.no_grad():
            torch._foreach_mul_(list(self.model.parameters()), 1.5)


CHANGES: dict[str, Callable[[Training], None]] = {
    name: getattr(Training, name)
    for name in (
        "train",
        "replace_memory",
        "swap_memory",
        "turn",
        "replace_buffer",
        "replace_state",
        "add_group",
        "in_place",
    )
}


@pytest.mark.gate_only
@pytest.mark.parametrize("prepared", [True, False])
@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from(sorted(CHANGES)), max_size=8))
def test_every_save_has_what_the_tensors_hold(prepared: bool, changes: list[str]) -> None:
    training, memory = Training(), Memory()
    program = Program({"model": training.model, "optimizer": training.optimizer}, (0, 1))
    saver = Saver(program, memory, 0)  # type: ignore[arg-type]  # as much of a backend as saving asks
    if prepared:
        saver.prepare()
    for step, change in enumerate(["in_place", *changes], start=1):
        CHANGES[change](training)
        assert saver.save(step, 1.0) == "staged"
        saver.wait()
        assert memory.sealed[-1].step == step
        assert memory.stream() == saved(program, 0, step).data
    saver.close()
