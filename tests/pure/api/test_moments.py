"""One reader of times for a status, for Kubernetes' objects and for the command line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.protocol.codec import Misfit
from surefoot_operator.api.status import moment, moment_seconds
from surefoot_operator.api.status_json import with_seconds
from surefoot_operator.platforms.kubernetes.views.observations import created_seconds

TIMES = {
    "1970-01-01T00:16:40Z": 1000.0,
    "1970-01-01T00:16:40.000000Z": 1000.0,
    "1970-01-01T00:16:40.25Z": 1000.25,
    "1970-01-01T00:16:40.123456789Z": 1000.123456,  # as Go writes nanoseconds
    "1970-01-01T01:16:40+01:00": 1000.0,
    "1969-12-31T23:16:40-01:00": 1000.0,
    "1970-01-01t00:16:40z": 1000.0,
}
OTHERS = [
    None, 3, 1000.0, True, "", "yesterday", "1970-01-01", "1970-01-01T00:16:40", "1970-01-01 00:16:40Z", "19700101T001640Z",
    "1970-W01-4T00:16:40Z", "1970-02-31T00:16:40Z", "1970-01-01T24:16:40Z", "1970-01-01T00:16Z", "1970-01-01T00:16:40Z ",
    "\u0661970-01-01T00:16:40Z", "1970-01-01T00:16:40." + "1" * 100 + "Z",
]  # fmt: skip


@pytest.mark.parametrize(("text", "seconds"), TIMES.items())
def test_a_time_is_the_same_moment_wherever_it_is_read(text: str, seconds: float) -> None:
    assert moment_seconds(text) == pytest.approx(seconds, abs=1e-6)
    assert created_seconds({"creationTimestamp": text}) == moment_seconds(text)
    assert with_seconds({"sinceTime": text}) == {"sinceSeconds": moment_seconds(text)}


@pytest.mark.parametrize("text", OTHERS)
def test_what_is_no_time_is_none_wherever_it_is_read(text: object) -> None:
    assert moment_seconds(text) is None
    assert created_seconds({"creationTimestamp": text}) == 0.0
    if text is not None:  # null is no moment yet
        with pytest.raises(Misfit, match="sinceTime"):
            with_seconds({"sinceTime": text})


@given(st.floats(0, 4e9))
def test_a_written_moment_is_read_back_to_the_microsecond(seconds: float) -> None:
    assert moment_seconds(moment(seconds)) == pytest.approx(seconds, abs=2e-6)
