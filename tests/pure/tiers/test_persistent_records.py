"""Parts of the persistent tier: where chunks lie in them, what waits for the rest of one, bodies read without joining."""

from __future__ import annotations

from base64 import b64encode
from zlib import crc32

from hypothesis import given
from hypothesis import strategies as st

from surefoot.protocol.identities import Checkpoint, RankSave
from surefoot.tiers import persistent_records
from surefoot.tiers.persistent_records import PART_CHUNKS, ChunkMap, PartBuffer, part_lengths
from surefoot.tiers.tier import RequestBody

SAVE, OTHER = RankSave(1, 10, 0), RankSave(1, 20, 0)


@given(st.lists(st.integers(1, 50), max_size=20))
def test_every_chunk_is_found_where_its_part_has_it(lengths: list[int]) -> None:
    chunks = [bytes([number]) * length for number, length in enumerate(lengths)]
    starts = tuple(sum(lengths[:number]) for number in range(len(lengths)))
    cut = ChunkMap(starts, sum(lengths))
    sizes = part_lengths(lengths)
    parts = [b"".join(chunks[at : at + PART_CHUNKS]) for at in range(0, len(chunks), PART_CHUNKS)]
    assert sizes == tuple(map(len, parts)) == tuple(cut.part_bytes(part) for part in range(len(parts)))
    for index, chunk in enumerate(chunks):
        place = cut.locate_chunk(index)
        assert place is not None
        part, offset, size = place
        assert parts[part][offset : offset + size] == chunk
    assert cut.locate_chunk(len(lengths)) is None
    assert cut.locate_chunk(-1) is None


def test_chunks_wait_for_the_rest_of_their_part_and_no_longer() -> None:
    gathered = PartBuffer()
    data = bytearray(b"0")
    assert gathered.add_chunk(SAVE, 0, memoryview(data)) is None
    data[:] = b"x"  # whoever gave it may use its memory again
    for index in (1, 2):
        assert gathered.add_chunk(SAVE, index, memoryview(b"%d" % index)) is None
    assert gathered.add_chunk(SAVE, 3, memoryview(b"3")) == [b"0", b"1", b"2", b"3"]
    assert gathered.buffered_sizes(SAVE) == {}
    gathered.add_chunk(SAVE, 4, memoryview(b"44"))
    gathered.add_chunk(OTHER, 0, memoryview(b"other"))
    assert gathered.buffered_sizes(SAVE) == {4: 2}
    gathered.add_chunk(SAVE, 0, memoryview(b"again"))
    assert gathered.buffered_sizes(SAVE) == {0: 5}, "a writer that begins again has left the other part"
    for step in range(100):
        gathered.add_chunk(RankSave(1, step, 1), 0, memoryview(b"given up"))
    assert gathered.buffered_sizes(SAVE) == {}, "what waits is bounded"


@given(st.lists(st.binary(max_size=20), max_size=5))
def test_a_body_is_its_pieces_as_often_as_it_is_read(pieces: list[bytes]) -> None:
    body, whole = RequestBody(pieces), b"".join(pieces)
    assert len(body) == len(whole)
    assert body.checksum() == b64encode(crc32(whole).to_bytes(4, "big")).decode()
    for start in range(len(whole) + 1):
        assert body.seek(start) == start
        found = b""
        while piece := body.read(7):
            found += piece
        assert found == whole[start:]
        assert body.tell() == len(whole)


def test_the_record_of_the_newest_only_grows_and_a_damaged_one_is_replaced() -> None:
    first = persistent_records.update_newest_record(None, Checkpoint(2, 20), 4)
    assert persistent_records.read_newest_record(first) == (Checkpoint(2, 20), 4)
    assert persistent_records.update_newest_record(first, Checkpoint(2, 20), 4) is None
    assert persistent_records.update_newest_record(first, Checkpoint(1, 900), 4) is None, (
        "an older epoch's, promoted late"
    )
    assert persistent_records.read_newest_record(
        persistent_records.update_newest_record(first, Checkpoint(3, 10), 2)
    ) == (Checkpoint(3, 10), 2)
    for damaged in (
        None,
        b"",
        b"{}",
        b'{"format":2,"generation":1,"step":1,"world_size":1}',
        b'{"format":1,"generation":1}',
        b"[]",
    ):
        assert persistent_records.read_newest_record(damaged) is None
        assert persistent_records.update_newest_record(damaged, Checkpoint(1, 10), 1) is not None
