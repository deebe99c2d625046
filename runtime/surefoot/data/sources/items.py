"""`Items` reads map-style datasets, Hugging Face's among them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from surefoot.data.data_source import DataShard
from surefoot.data.loader import check_dataset


class Items:
    """`Items` serves a dataset with a length and samples by index.

    For one such dataset alone `ElasticLoader` shuffles better: it permutes samples, not shards.

    Args:
        dataset: map-style.
        shard_samples: how many neighbours are one shard.

    Raises:
        ConfigurationError: the dataset has no length or index.
    """

    def __init__(self, dataset: Any, shard_samples: int = 256) -> None:
        check_dataset(dataset)
        self._dataset, self._shard_samples = dataset, shard_samples

    def shards(self) -> Sequence[DataShard]:
        size = len(self._dataset)
        # what a Hugging Face dataset says of its content; of others there is only their length
        mark = str(getattr(self._dataset, "_fingerprint", ""))
        starts = range(0, size, self._shard_samples)
        return [DataShard(f"samples from {at}", min(self._shard_samples, size - at), mark) for at in starts]

    def open(self, shard: int, start: int) -> Iterator[Any]:
        first = shard * self._shard_samples
        stop = min(first + self._shard_samples, len(self._dataset))
        return (self._dataset[number] for number in range(first + start, stop))
