"""Each option of torchtitan's checkpoint manager is honoured, or refused by name with what does it instead."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from types import ModuleType
from typing import Any

import pytest

from surefoot.errors import ConfigurationError

MODULE = "surefoot.integrations.torchtitan_checkpoints"


class StandIn:
    """torchtitan's manager, as far as its options go, with one of a later release."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        enable: bool = False
        folder: str = "checkpoint"
        interval: int = 500
        initial_load_path: str | None = None
        initial_load_model_only: bool = True
        initial_load_in_hf: bool = False
        initial_load_in_hf_quantized: bool = False
        last_save_model_only: bool = True
        last_save_in_hf: bool = False
        export_dtype: str = "float32"
        keep_latest_k: int = 10
        load_step: int = -1
        exclude_from_loading: list[str] = field(default_factory=list)
        enable_first_step_checkpoint: bool = False
        create_seed_checkpoint: bool = False
        load_only: bool = False
        of_a_later_release: str = "off"


CHANGED: dict[str, Any] = {
    "initial_load_path": "/weights",
    "initial_load_in_hf": True,
    "initial_load_in_hf_quantized": True,
    "last_save_model_only": True,
    "last_save_in_hf": True,
    "export_dtype": "bfloat16",
    "exclude_from_loading": ["optimizer"],
    "create_seed_checkpoint": True,
    "load_only": True,
    "initial_load_model_only": True,
}


@pytest.fixture
def integration(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    base, filesystem = ModuleType("torchtitan.components.checkpointer.base"), ModuleType("torchtitan.tools.filesystem")
    base.__dict__["BaseCheckpointManager"] = StandIn
    tools = ModuleType("torchtitan.tools")
    tools.__dict__["filesystem"] = filesystem
    for name in ("torchtitan", "torchtitan.components", "torchtitan.components.checkpointer"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for module in (base, filesystem, tools):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    yield importlib.import_module(MODULE)
    sys.modules.pop(MODULE, None)


def test_defaults_and_honoured_options_are_taken(integration: Any) -> None:
    config = integration.SurefootCheckpoints.Config
    integration._refuse_others(config())
    integration._refuse_others(
        config(
            enable=True,
            folder="x",
            interval=1,
            keep_latest_k=0,
            enable_first_step_checkpoint=True,
            reset_on_resize=("loader",),
        )
    )


@pytest.mark.parametrize("name", CHANGED)
def test_an_option_without_a_meaning_is_refused_with_what_does_it(name: str, integration: Any) -> None:
    config = integration.SurefootCheckpoints.Config(**{name: CHANGED[name]})
    with pytest.raises(ConfigurationError, match=rf"checkpoint\.{name} has no meaning") as refused:
        integration._refuse_others(config)
    assert "leave it at its default" not in str(refused.value)


def test_an_option_of_a_later_release_is_refused_by_name(integration: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"of_a_later_release .* leave it at its default"):
        integration._refuse_others(integration.SurefootCheckpoints.Config(of_a_later_release="on"))


def test_every_option_is_in_one_list(integration: Any) -> None:
    options = {option.name for option in fields(integration.SurefootCheckpoints.Config)} - {"of_a_later_release"}
    assert integration._HONOURED.isdisjoint(integration._REJECTED)
    assert integration._HONOURED | set(integration._REJECTED) == options


@pytest.mark.nightly
def test_torchtitan_s_own_options_are_those_lists() -> None:
    pytest.importorskip("torchtitan", reason="torchtitan is not installed: python -m bench frameworks")
    module = importlib.import_module(MODULE)
    options = {option.name for option in fields(module.SurefootCheckpoints.Config)}
    assert module._HONOURED | set(module._REJECTED) == options
