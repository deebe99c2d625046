"""Whether two programs hold the same training state, bit for bit. Used by tests of saving, exporting and restoring."""

from __future__ import annotations

from typing import Any

import torch


def assert_same(a: dict[str, Any], b: dict[str, Any]) -> None:
    for one, two in zip(a["model"].state_dict().items(), b["model"].state_dict().items(), strict=True):
        assert one[0] == two[0]
        assert torch.equal(one[1], two[1]), one[0]
    mine, theirs = a["optimizer"].state_dict(), b["optimizer"].state_dict()
    assert mine["param_groups"] == theirs["param_groups"]
    for index, state in mine["state"].items():
        for key, value in state.items():
            assert torch.equal(value, theirs["state"][index][key]), (index, key)
            assert value.dtype == theirs["state"][index][key].dtype
    assert a["scheduler"].state_dict() == b["scheduler"].state_dict()
