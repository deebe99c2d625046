"""`HuggingFaceStream` reads Hugging Face's streaming data sets, shard by shard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from surefoot.checkpointer.foreign_loaders import buffered_rows
from surefoot.data.data_source import DataShard
from surefoot.errors import ConfigurationError


class HuggingFaceStream:
    """`HuggingFaceStream` reads the rows of a `datasets.IterableDataset`.

    From `load_dataset(..., streaming=True)` or `to_iterable_dataset`. A shard's length is not known before it is read.
    Order and shares are the stream's: a data set that shuffles in a buffer would lose that buffer's rows at each
    restart. A map-style data set goes into `Items`, or to `ElasticLoader`.

    Args:
        dataset: unshuffled, and not split by node.

    Raises:
        ConfigurationError: it is no streaming data set, shuffles by itself, or is split by node.
    """

    def __init__(self, dataset: Any) -> None:
        kind = type(dataset).__name__
        if not (callable(getattr(dataset, "shard", None)) and isinstance(getattr(dataset, "num_shards", None), int)):
            raise ConfigurationError(f"HuggingFaceStream was given a {kind}, which is no streaming data set in shards")
        if buffered_rows(dataset):
            raise ConfigurationError(
                f"the {kind} shuffles by itself: give it without shuffle(), and ElasticStream a window= to shuffle in"
            )
        if getattr(dataset, "_distributed", None) is not None:
            raise ConfigurationError(
                f"the {kind} was split by node: give all of it, as the stream divides it among ranks"
            )
        self._dataset = dataset

    def shards(self) -> Sequence[DataShard]:
        count, info = self._dataset.num_shards, getattr(self._dataset, "info", None)
        mark = f"{getattr(info, 'dataset_name', '')} {getattr(info, 'version', '')} {count}"
        return [DataShard(f"shard {number} of {count}", None, mark) for number in range(count)]

    def open(self, shard: int, start: int) -> Iterator[Any]:
        found = self._dataset.shard(num_shards=self._dataset.num_shards, index=shard)
        return iter(found.skip(start) if start else found)
