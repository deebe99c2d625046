"""Names the keys on a holder, all below `sf:{job uid}:`.

A job's account reaches nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from surefoot.protocol.bounds import MAX_KEY_BYTES
from surefoot.protocol.identities import RankSave

PREFIX = "sf:"
FILL = "surefoot-fill:"
"""Values that only touch memory; gone when that is done."""
FILLING = "surefoot-filling"
"""There while a new server's memory is touched, for seconds: it is nobody's holder yet."""


def of_job(job: str) -> str:
    """The prefix of all the job's keys."""
    return f"{PREFIX}{job}:"


def fence(job: str) -> str:
    """String: the newest epoch that sealed or committed; older writers are refused."""
    return f"{of_job(job)}fence"


def instance(job: str) -> str:
    """String: which run of the server the job was provisioned on.

    It tells a holder that restarted from the one before.
    """
    return f"{of_job(job)}instance"


def index(job: str) -> str:
    """Hash: `epoch:step:rank` to the rank manifest.

    An entry means that the whole rank save is here.
    """
    return f"{of_job(job)}index"


def watermark(job: str) -> str:
    """String: `epoch:step` of the newest checkpoint known to be on enough holders."""
    return f"{of_job(job)}watermark"


def absent(job: str) -> str:
    """A key that is never written, for scripts to unlink first.

    A full server lets a script write once it has unlinked.
    """
    return f"{of_job(job)}absent"


def layout(job: str, digest: str) -> str:
    """String: the layout record of that digest."""
    return f"{of_job(job)}layout:{digest}"


def chunk(job: str, save: RankSave, number: int) -> str:
    return f"{_of_save(job, save)}c{number}"


def digests(job: str, save: RankSave) -> str:
    return f"{_of_save(job, save)}d"


def values(job: str, save: RankSave) -> str:
    return f"{_of_save(job, save)}v"


def data_of(job: str, save: RankSave, chunks: int) -> list[str]:
    """Lists the data keys of a rank save: digests, values, chunks."""
    return list(names_of(job, save, chunks))


def names_of(job: str, save: RankSave, chunks: int) -> Iterator[str]:
    """Yields what `data_of` lists: of a large save they are some hundred thousand."""
    yield digests(job, save)
    yield values(job, save)
    yield from (chunk(job, save, number) for number in range(chunks))


def is_data_of(name: str, chunks: int) -> bool:
    """Whether the last part of a key's name is that of data of a save with so many chunks."""
    if name in ("d", "v"):
        return True
    return name[:1] == "c" and name[1:].isdecimal() and len(name) < 12 and int(name[1:]) < chunks


def field(save: RankSave) -> str:
    """The rank save's field in the index."""
    return f"{save.epoch}:{save.step}:{save.rank}"


def save_of(field_text: str) -> RankSave | None:
    """The inverse of `field`; None where it is not one."""
    parts = field_text.split(":") if len(field_text) <= MAX_KEY_BYTES else []
    return RankSave(*map(int, parts)) if len(parts) == 3 and all(p.isdecimal() for p in parts) else None


def jobs_of(names: Iterable[str]) -> set[str]:
    """Job uids that these key names belong to."""
    return {name.split(":")[1] for name in names if name.startswith(PREFIX) and name.count(":") > 1}


def _of_save(job: str, save: RankSave) -> str:
    return f"{of_job(job)}{save.epoch}:{save.step}:{save.rank}:"


def literal(text: str) -> str:
    """`text` as a pattern that matches itself alone."""
    return "".join(f"\\{c}" if c in "*?[]\\^-" else c for c in text)
