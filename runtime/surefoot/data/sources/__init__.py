"""Sources read files, or other libraries' data sets, for `ElasticStream`."""

from surefoot.data.sources.file_formats import JsonLines as JsonLines
from surefoot.data.sources.file_formats import TextLines as TextLines
from surefoot.data.sources.hugging_face import HuggingFaceStream as HuggingFaceStream
from surefoot.data.sources.items import Items as Items
from surefoot.data.sources.mds import MosaicShards as MosaicShards
from surefoot.data.sources.parquet import ParquetRows as ParquetRows
from surefoot.data.sources.tars import TarSamples as TarSamples
from surefoot.data.sources.tokens import MegatronDocuments as MegatronDocuments
from surefoot.data.sources.tokens import TokenFile as TokenFile
