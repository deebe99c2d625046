"""Where tests of devices run: on the CPU everywhere, which exercises their bodies, and on CUDA where there is a device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

NO_DEVICE = "torch.cuda is not available here: run `pytest -m gpu tests/gpu` on a machine with a CUDA device"


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip(NO_DEVICE)
    yield torch.device(request.param)
    if request.param == "cuda":
        torch.cuda.synchronize()  # an error of a kernel belongs to the test that queued it


@pytest.fixture(autouse=True)
def job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUREFOOT_JOB_UID", "job")
