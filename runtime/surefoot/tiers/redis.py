"""Implements `Tier` over one holder's client.

Made by the drain and by restore, one per stream.
"""

from __future__ import annotations

from surefoot.holder.client import HolderClient
from surefoot.holder.connection import Credentials
from surefoot.protocol.identities import HolderEndpoint, RankSave
from surefoot.protocol.records import RankManifest


class RedisTier:
    """One job on one holder."""

    def __init__(self, client: HolderClient) -> None:
        self._client = client
        self._damaged: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"memory:{self._client.endpoint.holder.node}"

    def put_layout(self, digest: str, text: str) -> None:
        self._client.put_layout(digest, text)

    def put_chunk(self, save: RankSave, index: int, data: memoryview) -> None:
        self._client.put_chunk(save, index, data)

    def send_chunk(self, save: RankSave, index: int, data: memoryview) -> None:
        self._client.send_chunk(save, index, data)

    def settle(self) -> None:
        self._client.settle()

    def put_values(self, save: RankSave, data: bytes) -> None:
        self._client.put_values(save, data)

    def put_digests(self, save: RankSave, data: bytes) -> None:
        self._client.put_digests(save, data)

    def commit(self, manifest: RankManifest, writer_epoch: int, chunk_lengths: tuple[int, ...]) -> None:
        self._client.commit(manifest, writer_epoch, chunk_lengths)

    def manifests(self) -> tuple[RankManifest, ...]:
        index = self._client.index()
        self._damaged = index.damaged
        return index.manifests

    def damaged(self) -> tuple[str, ...]:
        return self._damaged

    def read_layout(self, digest: str) -> str:
        return self._client.read_layout(digest)

    def read_values(self, save: RankSave) -> bytes:
        return self._client.read_values(save)

    def read_digests(self, save: RankSave, offset: int, length: int) -> bytes:
        return self._client.read_digests(save, offset, length)

    def read_chunk(self, save: RankSave, index: int, offset: int, length: int) -> bytes | memoryview:
        return self._client.read_chunk(save, index, offset, length)

    def ask_chunk(self, save: RankSave, index: int, offset: int, length: int) -> None:
        self._client.ask_chunk(save, index, offset, length)

    def take_chunk(self, save: RankSave, index: int, into: memoryview) -> None:
        self._client.take_chunk(save, index, into)

    def drop(self, save: RankSave, writer_epoch: int, chunks: int) -> None:
        self._client.drop(save, writer_epoch, chunks)

    def close(self) -> None:
        self._client.close()


def open_holder(endpoint: HolderEndpoint, job: str, account: Credentials, call_seconds: float = 1.0) -> RedisTier:
    """A tier over one holder with a connection of its own, which opens at the first call."""
    return RedisTier(HolderClient(endpoint, job, account, call_seconds))
