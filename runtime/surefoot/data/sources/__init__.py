"""Sources read files, or other libraries' data sets, for `ElasticStream`."""

from surefoot.data.sources.file_formats import HuggingFaceStream as HuggingFaceStream
from surefoot.data.sources.file_formats import Items as Items
from surefoot.data.sources.file_formats import JsonLines as JsonLines
from surefoot.data.sources.file_formats import MegatronDocuments as MegatronDocuments
from surefoot.data.sources.file_formats import MosaicShards as MosaicShards
from surefoot.data.sources.file_formats import ParquetRows as ParquetRows
from surefoot.data.sources.file_formats import TarSamples as TarSamples
from surefoot.data.sources.file_formats import TextLines as TextLines
from surefoot.data.sources.file_formats import TokenFile as TokenFile
