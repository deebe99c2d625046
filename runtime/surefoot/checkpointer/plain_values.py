"""Saves plain values by name, and generators as they are: a counter or the best loss needs no class for it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch

from surefoot.errors import ConfigurationError


class PlainValues:
    """Saves a dict of the script's, and updates it at a restore.

    Args:
        values: Numbers, texts, tensors, and containers of them; a generator keeps its identity and gets its state back.

    Raises:
        ConfigurationError: It is no dict, or its keys are no texts.
    """

    def __init__(self, values: Any) -> None:
        if not isinstance(values, MutableMapping) or not all(isinstance(key, str) for key in values):
            raise ConfigurationError(
                f"values= is a {type(values).__name__}: give a dict of names and values, such as values={{'best_loss': 1.0}};"
                " restore() updates it"
            )
        self._values = values

    def state_dict(self) -> dict[str, Any]:
        return {name: generator_state(value) if is_generator(value) else value for name, value in self._values.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            current = self._values.get(name)
            if is_generator(current):
                load_generator(current, value)
            else:
                self._values[name] = value


class SavedGenerator:
    """Saves a generator of torch's or numpy's under its own name."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator

    def state_dict(self) -> dict[str, Any]:
        return {"state": generator_state(self._generator)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        load_generator(self._generator, state["state"])


def is_generator(value: Any) -> bool:
    """Returns whether a value is a generator of random numbers of torch's or numpy's."""
    numpy = sys.modules.get("numpy")
    return isinstance(value, torch.Generator) or (numpy is not None and isinstance(value, numpy.random.Generator))


def generator_state(generator: Any) -> Any:
    """Returns a generator's state as a tensor or plain values."""
    return generator.get_state() if isinstance(generator, torch.Generator) else generator.bit_generator.state


def load_generator(generator: Any, state: Any) -> None:
    """Sets a generator's state."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state
