"""What a save may be before any of it is written."""

from __future__ import annotations

import pytest

from support.saves import arrays, stream_of
from surefoot.errors import ProtocolError
from surefoot.flush.engine import SaveWork
from surefoot.flush.state_machine import SealedSave
from surefoot.geometry import Box
from surefoot.protocol.bounds import MAX_PART_BYTES
from surefoot.protocol.identities import RankSave


def test_values_that_no_reader_takes_are_refused_before_a_byte_is_written() -> None:
    stream, data = stream_of(arrays(1, {"w": (4,)}), {"w": (Box.whole((4,)),)})
    sealed = SealedSave(RankSave(1, 10, 0), 1, "me", stream.digest, len(data), MAX_PART_BYTES + 1)
    with pytest.raises(ProtocolError, match="keep large data in tensors"):
        SaveWork(sealed, stream, memoryview(data))
