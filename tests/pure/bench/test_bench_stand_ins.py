"""What the bench of lines puts in place of the memory tier is called as the reconciler calls the real one."""

from __future__ import annotations

import inspect

import pytest
from bench.scale_lines import InstantHolders

from surefoot_operator.memory import JobMemoryServers

CALLED = [
    name for name, call in vars(InstantHolders).items() if inspect.isfunction(call) and hasattr(JobMemoryServers, name)
]


@pytest.mark.parametrize("name", [name for name in CALLED if not name.startswith("_")])
def test_a_stand_in_takes_what_the_real_one_is_given(name: str) -> None:
    real, own = (inspect.signature(getattr(cls, name)) for cls in (JobMemoryServers, InstantHolders))
    own.bind(*([None] * len(real.parameters)))
