"""`surefoot.data` supplies samples once a pass, at any world size.

The elastic order, loader, sampler and stream over it, sources, and which batches were trained on. A state of iterators,
one for each rank, would lose or repeat samples when ranks come and go.
"""

from surefoot.data.data_source import BadSample as BadSample
from surefoot.data.data_source import DataError as DataError
from surefoot.data.data_source import DataShard as DataShard
from surefoot.data.data_source import DataSource as DataSource
from surefoot.data.loader import Batch as Batch
from surefoot.data.loader import ElasticLoader as ElasticLoader
from surefoot.data.sample_order import rank_range as rank_range
from surefoot.data.sample_order import sample_at as sample_at
from surefoot.data.sample_order import sample_generator as sample_generator
from surefoot.data.sample_order import sample_seed as sample_seed
from surefoot.data.sampler import ElasticSampler as ElasticSampler
from surefoot.data.stream import ElasticStream as ElasticStream

__all__ = [
    "BadSample",
    "Batch",
    "DataError",
    "DataShard",
    "DataSource",
    "ElasticLoader",
    "ElasticSampler",
    "ElasticStream",
    "rank_range",
    "sample_at",
    "sample_generator",
    "sample_seed",
]
