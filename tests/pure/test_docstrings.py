"""What others call or implement is described: each argument of the Python API, each method of a protocol."""

from __future__ import annotations

import importlib
import inspect
import re
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
