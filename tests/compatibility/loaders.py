"""Loaders of every kind: what a rank draws after the kill is what it would have drawn."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

import surefoot
from compatibility.case import Case, Context, Training
from compatibility.elastic_streams import STREAMED, hugging_face_rows
from compatibility.loader_cases import GLOBAL_BATCH, SIZE, Draw, cases_of, per_rank, training_of


def _elastic(workers: int = 0, per_step: int = 1, ahead: bool = False, **told: int) -> Callable[[Context], Training]:
    def build(context: Context) -> Training:
        loader = surefoot.ElasticLoader(list(range(SIZE)), GLOBAL_BATCH, seed=3, num_workers=workers, **told)

        def batches() -> Iterator[list[int]]:
            found = (batch.data.tolist() if batch.weight else [] for batch in loader)
            if not ahead:
                yield from found
            waiting = [next(found), next(found)]  # as a prefetcher has them
            while True:
                yield waiting.pop(0)
                waiting.append(next(found))

        return training_of(loader, batches, context.world, per_step)

    return build


def _elastic_sampler(workers: int, **options: Any) -> Callable[[Context], Training]:
    """Torch's own DataLoader, epoch by epoch; the sampler is what is given to Checkpointer."""

    def build(context: Context) -> Training:
        from torch.utils.data import DataLoader

        numbers: Any = list(range(SIZE))
        sampler: Any = surefoot.ElasticSampler(SIZE, 2 * GLOBAL_BATCH, seed=3, by_epoch=True, batches_per_step=1)
        loader: Any = DataLoader(numbers, batch_sampler=sampler, num_workers=workers, **options)

        def batches() -> Iterator[list[int]]:
            while True:
                yield from (batch.tolist() for batch in loader)

        return training_of(sampler, batches, context.world)

    return build


def _batch_sampler(context: Context) -> Training:
    """Torch's batch sampler over an order of seed and epoch: the loader divides each of its lists."""
    from torch.utils.data import BatchSampler
    from torch.utils.data.distributed import DistributedSampler

    numbers: Any = list(range(SIZE))
    sampler = BatchSampler(DistributedSampler(numbers, num_replicas=1, rank=0, seed=3), GLOBAL_BATCH, drop_last=False)
    loader = surefoot.ElasticLoader(numbers, batch_sampler=sampler)

    def batches() -> Iterator[list[int]]:
        return (batch.data.tolist() if batch.weight else [] for batch in loader)

    return training_of(loader, batches, context.world)


def _drawn_anew(context: Context) -> Training:
    from torch.utils.data import BatchSampler, RandomSampler

    numbers: Any = list(range(SIZE))
    sampler = BatchSampler(RandomSampler(numbers), GLOBAL_BATCH, drop_last=False)
    return training_of(surefoot.ElasticLoader(numbers, batch_sampler=sampler), iter, context.world)


class Stream(torch.utils.data.IterableDataset[int]):
    """Each rank's own, with a state, as shards on the web have."""

    def __init__(self, rank: int) -> None:
        self.rank, self.at = rank, 0

    def __iter__(self) -> Iterator[int]:
        while True:
            self.at += self.rank + 1
            yield self.rank * 1000 + self.at

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def _of_tensors(loader: Any) -> Draw:
    return lambda: (batch.tolist() for batch in loader)


def _stateful_stream(workers: int) -> Callable[[Context], Training]:
    def build(context: Context) -> Training:
        from torchdata.stateful_dataloader import StatefulDataLoader

        loader = StatefulDataLoader(Stream(context.rank), batch_size=per_rank(context), num_workers=workers)
        return training_of(loader, _of_tensors(loader), context.world)

    return build


def _stateful_sampler(
    workers: int, ahead: bool = False, per_step: int = 1, told: bool = False, **options: Any
) -> Callable[[Context], Training]:
    def build(context: Context) -> Training:
        from torch.utils.data.distributed import DistributedSampler
        from torchdata.stateful_dataloader import StatefulDataLoader

        numbers: Any = list(range(SIZE))
        sampler = DistributedSampler(numbers, num_replicas=context.world, rank=context.rank, shuffle=True, seed=1)
        loader = StatefulDataLoader(
            numbers, batch_size=per_rank(context), sampler=sampler, num_workers=workers, **options
        )
        if told:
            loader.batches_per_step = per_step

        def batches() -> Iterator[list[int]]:
            while True:  # one epoch after another
                yield from _of_tensors(loader)()

        def taken_ahead() -> Iterator[list[int]]:
            found = batches()
            waiting = next(found)
            while True:
                following = next(found)
                yield waiting
                waiting = following

        return training_of(loader, taken_ahead if ahead else batches, context.world, per_step)

    return build


def _plain_loader(context: Context) -> Training:
    from torch.utils.data import DataLoader
    from torch.utils.data.distributed import DistributedSampler

    numbers: Any = list(range(SIZE))
    sampler = DistributedSampler(numbers, num_replicas=context.world, rank=context.rank, seed=1)
    loader: Any = DataLoader(numbers, batch_size=per_rank(context), sampler=sampler)
    return training_of(loader, _of_tensors(loader), context.world)


def _plain_stream(context: Context) -> Training:
    from torch.utils.data import DataLoader

    loader: Any = DataLoader(Stream(context.rank), batch_size=per_rank(context))
    return training_of(loader, _of_tensors(loader), context.world)


def _elastic_over_loader(context: Context) -> Training:
    from torch.utils.data import DataLoader

    numbers: Any = list(range(SIZE))
    return training_of(surefoot.ElasticLoader(DataLoader(numbers, batch_size=3), GLOBAL_BATCH), iter, context.world)


def _elastic_over_stream(context: Context) -> Training:
    return training_of(surefoot.ElasticLoader(Stream(0), GLOBAL_BATCH), iter, context.world)


def _nodes(context: Context) -> Training:
    """torchdata's graph of nodes, of which the loader tells the state."""
    from torch.utils.data.distributed import DistributedSampler
    from torchdata.nodes import Batcher, Loader, SamplerWrapper

    numbers: Any = list(range(SIZE))
    sampler: Any = DistributedSampler(numbers, num_replicas=context.world, rank=context.rank, shuffle=True, seed=1)
    loader: Any = Loader(Batcher(SamplerWrapper(sampler), per_rank(context)))

    def batches() -> Iterator[list[int]]:
        while True:
            yield from loader

    return training_of(loader, batches, context.world)


def _fabric(stateful: bool) -> Callable[[Context], Training]:
    """A loader that Lightning's Fabric prepared, in a group that is there already."""

    def build(context: Context) -> Training:
        from lightning.fabric.wrappers import _FabricDataLoader
        from torch.utils.data import DataLoader
        from torch.utils.data.distributed import DistributedSampler
        from torchdata.stateful_dataloader import StatefulDataLoader

        numbers: Any = list(range(SIZE))
        sampler = DistributedSampler(numbers, num_replicas=context.world, rank=context.rank, shuffle=True, seed=1)
        kind: Any = StatefulDataLoader if stateful else DataLoader
        loader: Any = _FabricDataLoader(kind(numbers, batch_size=per_rank(context), sampler=sampler))
        return training_of(loader, _of_tensors(loader), context.world)

    return build


def _accelerate(stateful: bool) -> Callable[[Context], Training]:
    """A loader that Accelerate prepared, which takes one batch ahead and says it does."""

    def build(context: Context) -> Training:
        from accelerate.data_loader import prepare_data_loader
        from torch.utils.data import DataLoader

        numbers: Any = list(range(SIZE))
        loader: Any = prepare_data_loader(
            DataLoader(numbers, batch_size=per_rank(context)),
            num_processes=context.world,
            process_index=context.rank,
            use_stateful_dataloader=stateful,
        )

        def batches() -> Iterator[list[int]]:
            while True:
                yield from _of_tensors(loader)()

        return training_of(loader, batches, context.world)

    return build


def _web(context: Context) -> Training:
    """WebDataset's own loader over shards that it reads from tar files."""
    import io
    import tarfile

    import webdataset

    for shard in range(4):
        path = context.scratch / f"{shard}-{context.rank}.tar"
        with tarfile.open(path, "w") as tar:
            for number in range(25):
                text = str(shard * 25 + number).encode()
                info = tarfile.TarInfo(f"{number:03}.txt")
                info.size = len(text)
                tar.addfile(info, io.BytesIO(text))
    urls = [str(context.scratch / f"{shard}-{context.rank}.tar") for shard in range(4)]
    read = webdataset.WebDataset(urls, shardshuffle=False, nodesplitter=lambda found: found).decode().to_tuple("txt")
    loader = webdataset.WebLoader(read, batch_size=per_rank(context), num_workers=0)
    return training_of(loader, lambda: ([int(text) for text in batch[0]] for batch in loader), context.world)


def _hugging_face(context: Context, buffer: int = 0) -> Any:
    import datasets

    datasets.disable_progress_bars()
    rows = datasets.Dataset.from_dict({"number": list(range(SIZE))}).to_iterable_dataset(num_shards=4)
    found = rows.shuffle(seed=1, buffer_size=buffer) if buffer else rows
    if context.world > 1:
        from datasets.distributed import split_dataset_by_node

        found = split_dataset_by_node(found, context.rank, context.world)
    return found


def _hugging_face_stream(buffer: int = 0) -> Callable[[Context], Training]:
    """A streaming data set named as it is: it tells its state itself."""

    def build(context: Context) -> Training:
        rows = _hugging_face(context, buffer)

        def batches() -> Iterator[list[int]]:
            while True:
                numbers = (row["number"] for row in rows)
                while batch := list(itertools.islice(numbers, per_rank(context))):
                    yield batch

        return training_of(rows, batches, context.world)

    return build


def _hugging_face_stateful(buffer: int = 0) -> Callable[[Context], Training]:
    def build(context: Context) -> Training:
        from torchdata.stateful_dataloader import StatefulDataLoader

        loader = StatefulDataLoader(_hugging_face(context, buffer), batch_size=per_rank(context))
        return training_of(loader, lambda: (batch["number"].tolist() for batch in loader), context.world)

    return build


CASES = (
    *STREAMED,
    *cases_of("ElasticLoader", _elastic(), quick=True),
    *cases_of("ElasticLoader, two worker processes", _elastic(workers=2)),
    *cases_of("ElasticLoader over a Hugging Face data set", hugging_face_rows(False)),
    *cases_of("ElasticLoader with a prefetcher", _elastic(ahead=True), quick=True),
    *cases_of("ElasticLoader with a prefetcher, batches_per_step=1", _elastic(ahead=True, batches_per_step=1)),
    *cases_of("ElasticLoader, three batches per step", _elastic(per_step=3), quick=True),
    *cases_of("ElasticLoader, batches_per_step=3", _elastic(per_step=3, batches_per_step=3)),
    *cases_of("ElasticLoader over a batch sampler", _batch_sampler),
    *cases_of("DataLoader over ElasticSampler", _elastic_sampler(0)),
    *cases_of(
        "DataLoader over ElasticSampler, two worker processes that persist",
        _elastic_sampler(2, persistent_workers=True),
    ),
    *cases_of("StatefulDataLoader, a stream a rank", _stateful_stream(0)),
    *cases_of("StatefulDataLoader, a stream a rank, two worker processes", _stateful_stream(2)),
    *cases_of("StatefulDataLoader with DistributedSampler", _stateful_sampler(0)),
    *cases_of("StatefulDataLoader with DistributedSampler, two worker processes", _stateful_sampler(2)),
    *cases_of(
        "StatefulDataLoader with DistributedSampler, two worker processes, a snapshot every four batches",
        _stateful_sampler(2, snapshot_every_n_steps=4),
    ),
    *cases_of("DataLoader prepared by Accelerate", _accelerate(False)),
    *cases_of("StatefulDataLoader prepared by Accelerate", _accelerate(True)),
    *cases_of("StatefulDataLoader with DistributedSampler and a prefetcher", _stateful_sampler(0, ahead=True)),
    *cases_of("StatefulDataLoader with DistributedSampler, two batches a step", _stateful_sampler(0, per_step=2)),
    *cases_of(
        "StatefulDataLoader with DistributedSampler, batches_per_step=2",
        _stateful_sampler(0, per_step=2, told=True),
    ),
    *cases_of("StatefulDataLoader over Hugging Face streaming, no shuffle buffer", _hugging_face_stateful()),
    *cases_of(
        "StatefulDataLoader over Hugging Face streaming, a shuffle buffer of 10 rows", _hugging_face_stateful(10)
    ),
    *cases_of("Hugging Face streaming data set, no shuffle buffer", _hugging_face_stream()),
    *cases_of("Hugging Face streaming data set, shards shuffled alone", _hugging_face_stream(1)),
    *cases_of("Hugging Face streaming data set, a shuffle buffer of 10 rows", _hugging_face_stream(10)),
    *cases_of("DataLoader with DistributedSampler", _plain_loader),
    *cases_of("DataLoader of an IterableDataset", _plain_stream),
    *cases_of("torchdata.nodes with DistributedSampler", _nodes),
    *cases_of("DataLoader prepared by Lightning's Fabric", _fabric(False)),
    *cases_of("StatefulDataLoader prepared by Lightning's Fabric", _fabric(True)),
    *cases_of("WebDataset", _web),
    Case("loader", "ElasticLoader over a batch sampler that gives other lists each time", _drawn_anew),
    Case("loader", "ElasticLoader given a DataLoader", _elastic_over_loader, quick=True),
    Case("loader", "ElasticLoader given an IterableDataset", _elastic_over_stream, quick=True),
)
