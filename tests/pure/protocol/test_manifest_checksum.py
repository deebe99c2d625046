"""A manifest's checksum is of what was written, and one flipped byte anywhere makes it no manifest."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.samples import sample
from surefoot.errors import ProtocolError
from surefoot.protocol.checkpoints.records import RankManifest

MANIFEST = sample(RankManifest)
TEXT = MANIFEST.to_json().encode()


@given(st.integers(0, len(TEXT) - 1), st.integers(1, 255))
def test_a_flipped_byte_is_found_wherever_it_is(place: int, flip: int) -> None:
    damaged = bytearray(TEXT)
    damaged[place] ^= flip
    with pytest.raises(ProtocolError):
        RankManifest.from_json(bytes(damaged))


def test_what_another_program_wrote_in_its_own_order_is_read() -> None:
    body = json.loads(TEXT)
    for text in (json.dumps(body, indent=1), json.dumps(dict(reversed(body.items())))):
        assert RankManifest.from_json(text) == RankManifest.from_json(text.encode()) == MANIFEST


def test_an_object_that_is_called_like_the_checksum_is_none() -> None:
    for value in ("1", '"crc32":1,'):
        named = replace(MANIFEST, objects=(("crc32", value),))
        text = named.to_json()
        assert RankManifest.from_json(text) == named
        with pytest.raises(ProtocolError, match="checksum"):
            RankManifest.from_json(text.replace(f'"crc32":{json.loads(text)["crc32"]},', '"crc32":5,'))
