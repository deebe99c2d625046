"""Each Python and YAML block that a page shows is sound: it compiles, what it imports is there, and each job is a valid one.

tests/integration/test_documented_programs.py runs the programs; test_documented_commands.py has the commands.
"""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest
import yaml

from surefoot_operator.api.parse import parse_job

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(python|yaml|diff)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
GENERATED = re.compile(r"<!-- made from .*?<!-- end -->", re.DOTALL)
"""Signatures: tests/pure/test_python_reference.py compares them with the code."""

BLOCKS = [
    pytest.param(kind, text, id=f"{page.name}: {text.strip().splitlines()[0]}")
    for page in PAGES
    for kind, text in BLOCK.findall(GENERATED.sub("", page.read_text(encoding="utf-8")))
]
TRAINER = {"name": "trainer", "image": "my/training", "command": ["python", "train.py"]}


@pytest.mark.parametrize("text", [pytest.param(b.values[1], id=b.id) for b in BLOCKS if b.values[0] != "yaml"])
def test_a_program_compiles_and_its_imports_are_there(text: str) -> None:
    if re.search(r"^[+-]", text, re.MULTILINE):  # of a diff, whose context need not be whole, the imports alone
        text = "\n".join(re.findall(r"^\+((?:from|import) .*)$", text, re.MULTILINE))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("surefoot"):
            assert_there(node.module, [alias.name for alias in node.names])


def assert_there(module: str, names: list[str]) -> None:
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as missing:
        if str(missing.name).startswith("surefoot"):
            raise
        pytest.skip(f"{missing.name} is not installed here")
    assert [name for name in names if not hasattr(imported, name)] == []


@pytest.mark.parametrize("text", [pytest.param(b.values[1], id=b.id) for b in BLOCKS if b.values[0] == "yaml"])
def test_a_job_is_a_valid_one(text: str) -> None:
    [document] = yaml.safe_load_all(text)
    if "checkpoint" in document:
        document = {"spec": document}
    if document.get("kind", "TrainingJob") != "TrainingJob" or "spec" not in document:
        return  # values of the chart: tests/chart/test_install_commands.py renders them
    spec = {"template": {"spec": {"containers": [TRAINER]}}} | document["spec"]
    head = {"apiVersion": "surefoot.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "shown"}}
    parse_job(head | document | {"spec": spec})
