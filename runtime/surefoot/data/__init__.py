"""Training data: the elastic order, the loader over it, and what of its batches was trained on."""

from surefoot.data.loader import Batch as Batch
from surefoot.data.loader import ElasticLoader as ElasticLoader
from surefoot.data.order import ElasticSampler as ElasticSampler
from surefoot.data.order import sample_at as sample_at
from surefoot.data.order import sample_generator as sample_generator
from surefoot.data.order import sample_seed as sample_seed
from surefoot.data.order import share as share

__all__ = ["Batch", "ElasticLoader", "ElasticSampler", "sample_at", "sample_generator", "sample_seed", "share"]
