"""How many batches a worker's message has, and what an error in the middle of one does."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, cast

import numpy as np
import pytest
import torch

from surefoot.data.stream_workers import (
    MAX_STEPS,
    MESSAGE_SECONDS,
    MessageSize,
    Read,
    ReadRequest,
    StepReader,
    StepsOfWorker,
    WorkerBatches,
    is_plain,
)


def message(steps: int, seconds: float, plain: bool = True) -> WorkerBatches:
    return WorkerBatches([cast(Read, None)] * steps, seconds, plain)


def sizes_told(seconds_a_step: float, plain: bool = True) -> list[int]:
    size, found = MessageSize(2), []
    asked = iter(size)
    for one, other in zip(*[islice(asked, 40)] * 2, strict=True):
        assert (one.reader, other.reader) == (0, 1)
        assert one.steps == other.steps, "a reader that gets ahead of the others piles its batches up"
        found.append(one.steps)
        size.observe(message(one.steps, one.steps * seconds_a_step, plain))
    return found


def test_messages_of_quick_batches_grow_to_a_limit_and_begin_with_one() -> None:
    found = sizes_told(1e-6)
    assert found[0] == 1
    assert found == sorted(found)
    assert found[-1] == MAX_STEPS


def test_a_message_takes_no_longer_to_read_than_somebody_may_wait() -> None:
    assert sizes_told(MESSAGE_SECONDS / 5)[-1] == pytest.approx(5, abs=1)
    assert set(sizes_told(10 * MESSAGE_SECONDS)) == {1}


def test_batches_with_tensors_stay_one_to_a_message() -> None:
    assert set(sizes_told(1e-6, plain=False)) == {1}


@pytest.mark.parametrize("data", [None, "text", b"x", 3, {"a": [1, "b"]}, ("a", 2), np.zeros(3), [np.float32(1)]])
def test_text_numbers_and_arrays_are_plain(data: Any) -> None:
    assert is_plain(data)


@pytest.mark.parametrize("data", [torch.zeros(2), {"ids": torch.zeros(2)}, ["a", [torch.zeros(1)]], object()])
def test_what_has_a_tensor_is_not(data: Any) -> None:
    assert not is_plain(data)


class Reader:
    """Reads steps of which one cannot be read."""

    def __init__(self, bad: int) -> None:
        self.bad = bad

    def batches(self, first: int, every: int) -> Iterator[tuple[str, None, None]]:
        for step in range(first, 10_000, every):
            if step == self.bad:
                raise OSError(f"step {step}")
            yield f"step {step}", None, None


def test_an_error_comes_at_its_own_step_and_what_was_read_before_it_comes_first() -> None:
    worker = StepsOfWorker(cast(StepReader, Reader(bad=9)), first=4, readers=1)
    assert [read[0] for read in worker[ReadRequest(0, 2)].reads] == ["step 4", "step 5"]
    assert [read[0] for read in worker[ReadRequest(0, 64)].reads] == ["step 6", "step 7", "step 8"]
    with pytest.raises(OSError, match="step 9"):
        worker[ReadRequest(0, 64)]


def test_a_worker_reads_its_own_steps_alone() -> None:
    worker = StepsOfWorker(cast(StepReader, Reader(bad=-1)), first=4, readers=3)
    assert [read[0] for read in worker[ReadRequest(2, 3)].reads] == ["step 6", "step 9", "step 12"]
    with pytest.raises(AssertionError, match="reads for two"):
        worker[ReadRequest(1, 1)]
