"""Loaders of every kind: what a rank draws after the kill is what it would have drawn."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

import surefoot
from compatibility.case import Case, Context, Training, Unrun
from support.streamed_files import streamed

GLOBAL_BATCH, SIZE = 6, 100
Draw = Callable[[], Iterator[list[int]]]
"""Batches of sample numbers, for one rank, from where the loader stands."""


def _training(loader: Any, batches: Draw, world: int, per_step: int = 1, **options: Any) -> Training:
    """Fits one number to what was drawn; every rank has the same weight, as DDP would keep it."""
    weight = torch.nn.Linear(1, 1, bias=False).double()
    optimizer = torch.optim.SGD(weight.parameters(), 1e-3, momentum=0.9)
    drawing: list[Iterator[list[int]]] = []
    drawn: list[int] = []

    def advance(step: int) -> float:
        if not drawing:
            drawing.append(batches())  # behind the restore, as scripts do
        drawn.clear()
        for _ in range(per_step):
            drawn.extend(next(drawing[0]))
        summed = torch.tensor([sum(drawn), len(drawn)], dtype=torch.float64)
        if world > 1:
            dist.all_reduce(summed)
        loss = (weight(summed[:1] / summed[1]) - 1.0).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    objects = {"model": weight, "optimizer": optimizer, "loader": loader}
    return Training(objects, advance, picture=dict, samples=lambda: list(drawn), options=options)


def _elastic(workers: int = 0, per_step: int = 1, ahead: bool = False, **told: int) -> Callable[[Context], Training]:
    def build(context: Context) -> Training:
        loader = surefoot.ElasticLoader(list(range(SIZE)), GLOBAL_BATCH, seed=3, workers=workers, **told)

        def batches() -> Iterator[list[int]]:
            found = (batch.data.tolist() if batch.weight else [] for batch in loader)
            if not ahead:
                yield from found
            waiting = [next(found), next(found)]  # as a prefetcher has them
            while True:
                yield waiting.pop(0)
                waiting.append(next(found))

        return _training(loader, batches, context.world, per_step)

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

        return _training(sampler, batches, context.world)

    return build


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


def _per_rank(context: Context) -> int:
    return GLOBAL_BATCH // context.world


def _stateful_stream(workers: int) -> Callable[[Context], Training]:
    def build(context: Context) -> Training:
        from torchdata.stateful_dataloader import StatefulDataLoader

        loader = StatefulDataLoader(Stream(context.rank), batch_size=_per_rank(context), num_workers=workers)
        return _training(loader, _of_tensors(loader), context.world)

    return build


def _stateful_sampler(
    workers: int, ahead: bool = False, per_step: int = 1, told: bool = False
) -> Callable[[Context], Training]:
    def build(context: Context) -> Training:
        from torch.utils.data.distributed import DistributedSampler
        from torchdata.stateful_dataloader import StatefulDataLoader

        numbers: Any = list(range(SIZE))
        sampler = DistributedSampler(numbers, num_replicas=context.world, rank=context.rank, shuffle=True, seed=1)
        loader = StatefulDataLoader(numbers, batch_size=_per_rank(context), sampler=sampler, num_workers=workers)
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

        return _training(loader, taken_ahead if ahead else batches, context.world, per_step)

    return build


def _plain_loader(context: Context) -> Training:
    from torch.utils.data import DataLoader
    from torch.utils.data.distributed import DistributedSampler

    numbers: Any = list(range(SIZE))
    sampler = DistributedSampler(numbers, num_replicas=context.world, rank=context.rank, seed=1)
    loader: Any = DataLoader(numbers, batch_size=_per_rank(context), sampler=sampler)
    return _training(loader, _of_tensors(loader), context.world)


def _plain_stream(context: Context) -> Training:
    from torch.utils.data import DataLoader

    loader: Any = DataLoader(Stream(context.rank), batch_size=_per_rank(context))
    return _training(loader, _of_tensors(loader), context.world)


def _elastic_over_loader(context: Context) -> Training:
    from torch.utils.data import DataLoader

    numbers: Any = list(range(SIZE))
    return _training(surefoot.ElasticLoader(DataLoader(numbers, batch_size=3), GLOBAL_BATCH), iter, context.world)


def _elastic_over_stream(context: Context) -> Training:
    return _training(surefoot.ElasticLoader(Stream(0), GLOBAL_BATCH), iter, context.world)


def _nodes(context: Context) -> Training:
    """torchdata's graph of nodes, of which the loader tells the state."""
    from torch.utils.data.distributed import DistributedSampler
    from torchdata.nodes import Batcher, Loader, SamplerWrapper

    numbers: Any = list(range(SIZE))
    sampler: Any = DistributedSampler(numbers, num_replicas=context.world, rank=context.rank, shuffle=True, seed=1)
    loader: Any = Loader(Batcher(SamplerWrapper(sampler), _per_rank(context)))

    def batches() -> Iterator[list[int]]:
        while True:
            yield from loader

    return _training(loader, batches, context.world)


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
        loader: Any = _FabricDataLoader(kind(numbers, batch_size=_per_rank(context), sampler=sampler))
        return _training(loader, _of_tensors(loader), context.world)

    return build


def _hugging_face_rows(streamed_too: bool, **options: Any) -> Callable[[Context], Training]:
    """A data set with numbered rows, through our loader or our stream."""

    def build(context: Context) -> Training:
        import datasets

        from surefoot.data.sources import HuggingFaceStream

        datasets.disable_progress_bars()
        rows: Any = datasets.Dataset.from_dict({"number": list(range(SIZE))})
        made: Any
        if streamed_too:
            source = HuggingFaceStream(rows.to_iterable_dataset(num_shards=12))
            made = surefoot.ElasticStream(source, GLOBAL_BATCH, seed=3, **options)
        else:
            made = surefoot.ElasticLoader(rows, GLOBAL_BATCH, seed=3, **options)

        def batches() -> Iterator[list[int]]:
            return (batch.data["number"].tolist() if batch.weight else [] for batch in made)

        return _training(made, batches, context.world)

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
    loader = webdataset.WebLoader(read, batch_size=_per_rank(context), num_workers=0)
    return _training(loader, lambda: ([int(text) for text in batch[0]] for batch in loader), context.world)


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
                while batch := list(itertools.islice(numbers, _per_rank(context))):
                    yield batch

        return _training(rows, batches, context.world)

    return build


def _hugging_face_stateful(buffer: int = 0) -> Callable[[Context], Training]:
    def build(context: Context) -> Training:
        from torchdata.stateful_dataloader import StatefulDataLoader

        loader = StatefulDataLoader(_hugging_face(context, buffer), batch_size=_per_rank(context))
        return _training(loader, lambda: (batch["number"].tolist() for batch in loader), context.world)

    return build


def _elastic_stream(kind: str, **told: Any) -> Callable[[Context], Training]:
    """What each sample says of itself stands for its number."""

    def build(context: Context) -> Training:
        folder = context.scratch / f"data-{context.rank}"
        folder.mkdir(exist_ok=True)
        source, number = streamed(kind, folder, SIZE)
        options: dict[str, Any] = {"global_batch": GLOBAL_BATCH, "window": 4, "seed": 3, "collate": list, **told}
        stream = surefoot.ElasticStream(source, **options)

        def batches() -> Iterator[list[int]]:
            return ([number(sample) for sample in batch.data] if batch.weight else [] for batch in stream)

        return _training(stream, batches, context.world)

    return build


def _cases(name: str, build: Callable[[Context], Training], quick: bool = False) -> tuple[Case, ...]:
    """As many ranks, and two changes of the world each way; in the quick part one change."""
    found = (
        Case("loader", name, build, ranks=2, resumed=2),
        Case("loader", name, build, ranks=3, resumed=2, again=3),
        Case("loader", name, build, ranks=4, resumed=1, again=4),
    )
    return (*found, Case("loader", name, build, ranks=2, resumed=3, quick=True)) if quick else found


STREAMED = (
    *_cases("ElasticStream over text lines", _elastic_stream("text"), quick=True),
    *_cases("ElasticStream over JSONL, two worker processes", _elastic_stream("json lines", workers=2)),
    *_cases("ElasticStream over nanoGPT's tokens", _elastic_stream("tokens")),
    *_cases("ElasticStream over Megatron's documents", _elastic_stream("megatron")),
    *_cases("ElasticStream over Parquet", _elastic_stream("parquet")),
    *_cases("ElasticStream over webdataset's tars", _elastic_stream("tars")),
    *_cases("ElasticStream over MDS", _elastic_stream("mosaic")),
    *_cases("ElasticStream over Hugging Face streaming", _hugging_face_rows(True)),
)

CASES = (
    *STREAMED,
    *_cases("ElasticLoader", _elastic(), quick=True),
    *_cases("ElasticLoader, two worker processes", _elastic(workers=2)),
    *_cases("ElasticLoader over a Hugging Face data set", _hugging_face_rows(False)),
    *_cases("ElasticLoader behind a prefetcher", _elastic(ahead=True), quick=True),
    *_cases("ElasticLoader behind a prefetcher, told so", _elastic(ahead=True, batches_per_step=1)),
    *_cases("ElasticLoader, three batches a step", _elastic(per_step=3), quick=True),
    *_cases("ElasticLoader, three batches a step, told so", _elastic(per_step=3, batches_per_step=3)),
    *_cases("DataLoader over ElasticSampler", _elastic_sampler(0)),
    *_cases(
        "DataLoader over ElasticSampler, two worker processes that persist",
        _elastic_sampler(2, persistent_workers=True),
    ),
    *_cases("StatefulDataLoader, a stream a rank", _stateful_stream(0)),
    *_cases("StatefulDataLoader, a stream a rank, two worker processes", _stateful_stream(2)),
    *_cases("StatefulDataLoader with DistributedSampler", _stateful_sampler(0)),
    *_cases("StatefulDataLoader with DistributedSampler, two worker processes", _stateful_sampler(2)),
    *_cases("StatefulDataLoader with DistributedSampler, behind a prefetcher", _stateful_sampler(0, ahead=True)),
    *_cases("StatefulDataLoader with DistributedSampler, two batches a step", _stateful_sampler(0, per_step=2)),
    *_cases(
        "StatefulDataLoader with DistributedSampler, two batches a step, told so",
        _stateful_sampler(0, per_step=2, told=True),
    ),
    *_cases("StatefulDataLoader over Hugging Face streaming, no shuffle buffer", _hugging_face_stateful()),
    *_cases("StatefulDataLoader over Hugging Face streaming, a shuffle buffer of 10 rows", _hugging_face_stateful(10)),
    *_cases("Hugging Face streaming data set, no shuffle buffer", _hugging_face_stream()),
    *_cases("Hugging Face streaming data set, shards shuffled alone", _hugging_face_stream(1)),
    *_cases("Hugging Face streaming data set, a shuffle buffer of 10 rows", _hugging_face_stream(10)),
    *_cases("DataLoader with DistributedSampler", _plain_loader),
    *_cases("DataLoader of an IterableDataset", _plain_stream),
    *_cases("torchdata.nodes with DistributedSampler", _nodes),
    *_cases("DataLoader prepared by Lightning's Fabric", _fabric(False)),
    *_cases("StatefulDataLoader prepared by Lightning's Fabric", _fabric(True)),
    *_cases("WebDataset", _web),
    Unrun(
        "loader",
        "Ray Data's iterator of a rank",
        "not run: it has no state_dict and is refused like a DataLoader without one. Write the data set with"
        " write_parquet and give ElasticStream its ParquetRows",
    ),
    Unrun(
        "loader",
        "MosaicML's StreamingDataset",
        "not run. Give ElasticStream its folder, MosaicShards, which is exact at any world size",
    ),
    Case("loader", "ElasticLoader given a DataLoader", _elastic_over_loader, quick=True),
    Case("loader", "ElasticLoader given an IterableDataset", _elastic_over_stream, quick=True),
)
