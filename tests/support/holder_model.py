"""The holder's scripts in plain Python: the specification the simulator runs, held equal to the Lua by a contract test.

Pure. One job on one holder; results are the scripts' own words. `full` makes it a server over its limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from surefoot.memory_server import scripts
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.identities import RankSave

Result = tuple[str, ...]
OK: Result = ("ok",)


@dataclass(slots=True)
class HolderModel:
    """State of one job on one instance. A restart is a new model."""

    job: str
    instance: str
    fence: int = -1
    watermark: str = ""
    index: dict[str, str] = field(default_factory=dict)
    data: dict[str, bytes] = field(default_factory=dict)
    full: bool = False

    def put(self, key: str, value: bytes) -> Result:
        """SET: refused only when full; no epoch guards it, since data without an index entry is never read."""
        if self.full:
            return ("full",)
        self.data[key] = value
        return OK

    def seal(self, writer_epoch: int, instance: str) -> Result:
        refusal = self._guard(writer_epoch, instance)
        if refusal is None:
            self.fence = writer_epoch
        return refusal or OK

    def commit(
        self, manifest: RankManifest, writer_epoch: int, instance: str, lengths: Mapping[str, int], replaces: str = ""
    ) -> Result:
        """`lengths`: data key to the bytes that must be there, in the order of `keys.data_of`."""
        refusal = self._guard(writer_epoch, instance)
        if refusal is not None:
            return refusal
        for key, wanted in lengths.items():
            found = len(self.data.get(key, b""))
            if found != wanted:
                return ("missing", key, str(found))
        layout = scripts.layout_key(self.job, manifest.layout)
        if not self.data.get(layout):
            return ("missing", layout, "0")
        name, text = scripts.index_field(manifest.save), manifest.to_json()
        before = self.index.get(name)
        if before is not None and before not in (text, replaces):
            return ("conflict", before)
        self.fence = writer_epoch
        self.index[name] = text
        return OK

    def drop(self, save: RankSave, writer_epoch: int, instance: str, chunks: int) -> Result:
        refusal = self._guard(writer_epoch, instance)
        if refusal is None:
            self.index.pop(scripts.index_field(save), None)
            for key in scripts.list_data_keys(self.job, save, chunks):
                self.data.pop(key, None)
        return refusal or OK

    def sweep(self, save: RankSave, writer_epoch: int, instance: str, names: Iterable[str]) -> Result:
        refusal = self._guard(writer_epoch, instance)
        if refusal is None and scripts.index_field(save) in self.index:
            return ("indexed",)
        if refusal is None:
            for key in names:
                self.data.pop(key, None)
        return refusal or OK

    def mark(self, watermark: str, writer_epoch: int, instance: str) -> Result:
        refusal = self._guard(writer_epoch, instance)
        if refusal is None:
            self.watermark = watermark
        return refusal or OK

    def _guard(self, writer_epoch: int, instance: str) -> Result | None:
        if instance != self.instance:
            return ("replaced",)
        return ("fenced", str(self.fence)) if writer_epoch < self.fence else None
