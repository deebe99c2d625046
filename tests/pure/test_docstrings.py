"""What others call or implement is described: each argument of the Python API, each method of a protocol."""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import surefoot


@pytest.mark.parametrize("name", ["Checkpointer", "ElasticLoader", "ElasticSampler", "ElasticStream"])
def test_every_argument_that_a_script_gives_is_described(name: str) -> None:
    public_class: type[Any] = getattr(surefoot, name)
    text = inspect.getdoc(public_class) or ""
    assert "Raises:" in text
    described = text.partition("Args:")[2].partition("Raises:")[0]
    arguments = set(inspect.signature(public_class.__init__).parameters) - {"self", "link", "objects"}
    assert {argument for argument in arguments if not re.search(rf"\b{argument}\b", described)} == set()


@pytest.mark.parametrize("place", ["surefoot.tiers.tier:Tier", "surefoot_operator.platforms.interface:Platform"])
def test_every_method_that_others_implement_is_described(place: str) -> None:
    module, _, name = place.partition(":")
    methods = {
        name: method
        for name, method in vars(getattr(importlib.import_module(module), name)).items()
        if inspect.isfunction(method) and not name.startswith("_")
    }
    assert methods
    assert [name for name, method in methods.items() if not method.__doc__] == []


_OPTION = re.compile(r"(?<![\w.$-])([a-z][a-z_]+)=(?!=)")
_OPTIONS_OF_OTHERS = frozenset(
    {
        "optimizer",
        "gradient_accumulation_steps",
        "num_replicas",
        "rank",
        "buffer_size",
        "use_stateful_dataloader",
        "dataset",
        "num_shards",
        "index",
        "strict",
        "dim",
        "device",
    }
)
"""Options of others' calls that messages name, and names of objects that scripts give."""


def _public_options() -> set[str]:
    """Lists the parameters of the Python API: its classes, their methods, data sources and integrations."""
    options: set[str] = set()
    for value in (getattr(surefoot, name) for name in surefoot.__all__):  # vars() has only what was imported so far
        for call in [value, *vars(value).values()] if inspect.isclass(value) else [value]:
            if inspect.isroutine(call) or inspect.isclass(call):
                with contextlib.suppress(ValueError, TypeError):
                    options |= set(inspect.signature(call).parameters)
    package = Path(surefoot.__file__).parent
    for path in (*(package / "integrations").glob("*.py"), *(package / "data/sources").glob("*.py")):
        # parsed, as frameworks of integrations may be missing
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and (node.name == "__init__" or not node.name.startswith("_")):
                options |= {argument.arg for argument in [*node.args.args, *node.args.kwonlyargs]}
    return options


@pytest.mark.parametrize("package", ["checkpointer", "data", "integrations", "state"])
def test_every_option_that_a_message_names_exists(package: str) -> None:
    """A message that names a former option sends its reader to a second error."""
    known = _public_options() | _OPTIONS_OF_OTHERS
    folder = Path(surefoot.__file__).parent / package
    unknown = [
        f"{path.relative_to(folder)}:{node.lineno}: {name}="
        for path in sorted(folder.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Raise)
        for text in ast.walk(node)
        if isinstance(text, ast.Constant) and isinstance(text.value, str)
        for name in _OPTION.findall(text.value)
        if name not in known
    ]
    assert not unknown, "\n".join(unknown)
