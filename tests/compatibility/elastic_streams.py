"""ElasticStream over every source, and ElasticLoader over rows of Hugging Face."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import surefoot
from compatibility.case import Context, Training
from compatibility.loader_cases import GLOBAL_BATCH, SIZE, cases_of, training_of
from support.streamed_files import streamed


def hugging_face_rows(streamed_too: bool, **options: Any) -> Callable[[Context], Training]:
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

        return training_of(made, batches, context.world)

    return build


def _elastic_stream(kind: str, **told: Any) -> Callable[[Context], Training]:
    """What each sample says of itself stands for its number."""

    def build(context: Context) -> Training:
        folder = context.scratch / f"data-{context.rank}"
        folder.mkdir(exist_ok=True)
        source, number = streamed(kind, folder, SIZE)
        options: dict[str, Any] = {
            "global_batch_size": GLOBAL_BATCH,
            "shuffle_window": 4,
            "seed": 3,
            "collate_fn": list,
            **told,
        }
        stream = surefoot.ElasticStream(source, **options)

        def batches() -> Iterator[list[int]]:
            return ([number(sample) for sample in batch.data] if batch.weight else [] for batch in stream)

        return training_of(stream, batches, context.world)

    return build


def _grouped_stream(context: Context) -> Training:
    """Lines in groups of similar length; a rank draws several of them in a step."""
    folder = context.scratch / f"data-{context.rank}"
    folder.mkdir(exist_ok=True)
    source, number = streamed("text", folder, SIZE)
    stream = surefoot.ElasticStream(source, 3, max_tokens=20, shuffle_window=10, seed=3, collate_fn=list)

    def batches() -> Iterator[list[int]]:
        groups = (batch.data if batch.weight else [] for batch in stream)
        return ([number(sample) for group in found for sample in group] for found in groups)

    return training_of(stream, batches, context.world)


STREAMED = (
    *cases_of("ElasticStream over text lines", _elastic_stream("text"), quick=True),
    *cases_of("ElasticStream over JSONL, two worker processes", _elastic_stream("json lines", num_workers=2)),
    *cases_of("ElasticStream over nanoGPT's tokens", _elastic_stream("tokens")),
    *cases_of("ElasticStream over Megatron's documents", _elastic_stream("megatron")),
    *cases_of("ElasticStream over Parquet", _elastic_stream("parquet")),
    *cases_of("ElasticStream over webdataset's tars", _elastic_stream("tars")),
    *cases_of("ElasticStream over MDS", _elastic_stream("mosaic")),
    *cases_of("ElasticStream over Hugging Face streaming", hugging_face_rows(True)),
    *cases_of("ElasticStream, groups of similar length", _grouped_stream),
)
