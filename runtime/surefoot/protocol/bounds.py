"""Bounds every number and size of a foreign record before anything is sized by it.

Pure. A record of Redis, of a bucket or of an agent is its writer's word: whoever may write a job's keys can claim a
world of a billion ranks in 300 bytes. A number that is used before it was compared ends the reader, and with the
operator all jobs. Each bound stands here once, with its reason, far above what a large job needs.
"""

from __future__ import annotations

from collections.abc import Collection

from surefoot.errors import OutOfBounds
from surefoot.protocol.text import short_repr

MAX_RANKS = 1 << 20
"""Ranks of one world: ten times the largest training that is known."""
MAX_COUNT = 1 << 53
"""Steps, epochs and offsets: what JSON keeps exactly, and far from any 64-bit counter's end."""
MAX_RANK_BYTES = 1 << 40
"""One rank's save: a GPU has 200 GB. It bounds the chunks of a save, whose keys are listed to drop it."""
MAX_PART_BYTES = 1 << 29
"""A digest table, or values: Redis stores no longer string."""
MAX_NAME_CHARACTERS = 1024
"""A digest, an incarnation, the name of an object."""
MAX_OBJECTS = 4096
"""Objects beside modules and optimizers that one rank saves."""
MAX_MANIFEST_BYTES = 1 << 19
"""A manifest has some 400 bytes; one with `MAX_OBJECTS` a few hundred thousand."""
MAX_MANIFEST_VALUES = 1 << 14

MAX_LAYOUT_BYTES = 1 << 25
"""A layout record: 50,000 parameters with two moments each are 25 MiB."""
MAX_LAYOUT_VALUES = 1 << 22
"""Its numbers, texts and lists: those 150,000 tensors have 3.5 million. Each is 30 to 60 bytes once it is read."""
MAX_DIMENSIONS = 64
"""PyTorch's own bound."""
MAX_COVERAGE_CORNERS = 1 << 22
"""Corners of one tensor's pieces: a million ranks that cut along two dimensions. Seconds of one thread."""

MAX_SMALL_BYTES = 1 << 16
"""`newest.json`, the record of an epoch, the head of a list: some hundred bytes."""
MAX_SMALL_VALUES = 1 << 10
MAX_KEY_BYTES = 64
"""A holder's fence, watermark and instance."""

MAX_INDEX_ENTRIES = 1 << 13
"""Of one job on one server: its node's ranks, and those of a few peers, times a handful of checkpoints."""
MAX_INDEX_BYTES = 1 << 24
MAX_LEFTOVER_KEYS = 100_000
"""Keys without an entry that one look at a server collects; the next look finds the others."""
MAX_REPLY_BYTES = 1 << 26
"""One reply of a server: four times the longest index."""
MAX_REPLY_SECONDS = 30.0
"""One reply, however steadily it trickles."""

MAX_PAGE_CHARACTERS = 5 << 23
"""One page of a listing: a mebibyte, or one layout record with its quotes escaped."""
MAX_PAGE_TEXTS = 1 << 16
"""Texts of one page: a mebibyte of manifests are some 3,000, and a thousand records may be left out."""
MAX_MESSAGE_VALUES = 1 << 18
"""Numbers, texts and lists of a message that is read by Python's parser, because it is not as our own agents write it."""
MAX_PAGES = 1 << 16
"""Pages of one answer, repetitions included."""
MAX_CAUSE_CHARACTERS = 1024
"""Why a trainer ended, in one line: agents send 400."""
MAX_DETAIL_CHARACTERS = 1 << 14
"""Where each rank stood: agents send less, and the status keeps the beginning."""

_JOB_RECORDS, _RECORDS_OF_RANK = 1 << 15, 256


def max_records(ranks: int) -> int:
    """How many manifests of one job the operator keeps per tier: what it may take grows with what it runs."""
    return _JOB_RECORDS + _RECORDS_OF_RANK * ranks


def max_layout_bytes(records: int) -> int:
    """How many bytes of layout records one listing may bring, beside so many manifests."""
    return 2 * MAX_LAYOUT_BYTES + 4096 * records


def max_layout_values(ranks: int) -> int:
    """How many values of layout records the operator keeps for one job: the longest record of each rank."""
    return MAX_LAYOUT_VALUES * max(1, ranks)


def check(record: str, field: str, value: int | float, most: int, least: int = 0) -> None:
    """Raises OutOfBounds unless `least` ≤ value ≤ `most`."""
    if not least <= value <= most:  # what is no number (NaN) compares as false
        raise OutOfBounds(record, field, short_repr(value), f"{least} to {most}")


def check_text(record: str, field: str, text: str, most: int = MAX_NAME_CHARACTERS) -> None:
    """Raises OutOfBounds for a text of more than `most` characters."""
    if len(text) > most:
        raise OutOfBounds(record, f"the length of {field}", str(len(text)), f"0 to {most}")


def check_json(record: str, text: str | bytes, max_bytes: int, max_values: int) -> None:
    """Raises OutOfBounds before a JSON text is read that is too long, or would become too many values.

    `[[],[],…` becomes thirty times its length in memory. Each value follows a comma or opens its container: commas and
    opening brackets in texts are counted too, and the bounds leave room for them.
    """
    if len(text) > max_bytes:
        raise OutOfBounds(record, "its length", str(len(text)), f"0 to {max_bytes}")
    values = values_of(text)
    if values > max_values:
        raise OutOfBounds(record, "the number of its values", str(values), f"0 to {max_values}")


def values_of(text: str | bytes) -> int:
    """At least as many values as this JSON text has, counted without reading it."""
    if isinstance(text, str):
        return text.count(",") + text.count("[") + text.count("{")
    return text.count(b",") + text.count(b"[") + text.count(b"{")


def has_every_rank(ranks: Collection[int], world: int) -> bool:
    """Whether these distinct ranks are 0 to `world` - 1, without counting up to a foreign number."""
    return len(ranks) == world and bool(ranks) and min(ranks) == 0 and max(ranks) == world - 1


def shorten_text(text: str, most: int) -> str:
    """The beginning of a text that is longer than `most` characters."""
    return text if len(text) <= most else f"{text[: most - 1]}…"
