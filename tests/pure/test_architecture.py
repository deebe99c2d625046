"""Rules of the house that import-linter cannot say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

WITHOUT_TORCH = """
import importlib, pkgutil, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name == "torch" or name.startswith("torch."):
            raise ImportError(f"{name} must not be imported here")
sys.meta_path.insert(0, Refuse())
for name in sys.argv[1:]:
    package = importlib.import_module(name)
    if name == "surefoot":
        continue  # the whole runtime: it loads lazily, and some of its rooms are made of torch
    for module in pkgutil.walk_packages(getattr(package, "__path__", []), name + "."):
        if module.name.rsplit(".", 1)[-1] != "__main__":
            importlib.import_module(module.name)
"""


def test_operator_folder_is_no_package() -> None:
    """An __init__.py there would shadow the standard library's `operator` for every command run from the root."""
    assert not (ROOT / "operator" / "__init__.py").exists()
    assert not list(ROOT.glob("tests/**/operator/__init__.py"))


@pytest.mark.gate_only
@pytest.mark.parametrize(
    "packages",
    [
        ["surefoot_operator"],
        [
            "surefoot.protocol",
            "surefoot.geometry",
            "surefoot.memory_server",
            "surefoot.tiers",
            "surefoot.format",
            "surefoot.flush",
        ],
        ["surefoot.agent.__main__", "surefoot"],
    ],
    ids=["operator", "what both share", "agent"],
)
def test_imports_without_torch(packages: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *packages],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_no_file_answers_more_than_one_question() -> None:
    """150 to 600 lines tell one story; above 800 a second question has moved in."""
    large = {
        str(path.relative_to(ROOT)): count
        for folder in ("runtime", "operator", "tests", "examples")
        for path in (ROOT / folder).rglob("*.py")
        if (count := len(path.read_text().splitlines())) > 800
    }
    assert not large
