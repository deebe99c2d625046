"""A program may set another default device: what the engine makes for itself stays on the host."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import surefoot
from surefoot.staging import device_copies

SOURCE = Path(surefoot.__file__).parent
FACTORY = re.compile(r"torch\.(?:empty|zeros|ones|arange|full|tensor|rand\w*|eye|linspace)")


@pytest.fixture
def other_default() -> Iterator[None]:
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


def test_every_tensor_that_is_made_names_its_device() -> None:
    calls_without_device = [
        f"{path.relative_to(SOURCE)}:{node.lineno}: {ast.unparse(node)}"
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and FACTORY.fullmatch(ast.unparse(node.func))
        and "device" not in {keyword.arg for keyword in node.keywords}
    ]
    assert not calls_without_device


def test_fingerprints_come_to_the_host(other_default: None) -> None:
    assert device_copies._to_host(torch.ones(3, device="cpu")).tolist() == [1.0, 1.0, 1.0]


def test_a_program_with_another_default_device_saves_and_restores(other_default: None, tmp_path: Path) -> None:
    for start in (0, 3):
        model = torch.nn.Linear(600, 600, device="cpu")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        with surefoot.Checkpointer(
            model=model, optimizer=optimizer, folder=str(tmp_path), interval_steps=1
        ) as checkpointer:
            assert checkpointer.restore() == start
            for _ in range(3):
                model(torch.ones(2, 600, device="cpu")).sum().backward()
                optimizer.step()
                checkpointer.step()
            weights = model.weight.detach().clone()
    again = torch.nn.Linear(600, 600, device="cpu")
    with surefoot.Checkpointer(model=again, folder=str(tmp_path)) as checkpointer:
        checkpointer.load_weights(again)
    assert torch.equal(again.weight, weights)
