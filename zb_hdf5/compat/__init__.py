"""The names from other projects, with their arguments, on top of this package.

ZeroBatch v2, the `.npy` DatasetLoader, the tokenized-corpus lesson and the streaming pipeline. docs/names.md lists
the differences on purpose.
"""

from zb_hdf5.commands.downloads import fetch_shards
from zb_hdf5.compat.npy_folder import DatasetLoader as DatasetLoader
from zb_hdf5.compat.text_pipeline import BASE_URL, data_folder
from zb_hdf5.compat.text_pipeline import TokenizingLoader as TokenizingLoader
from zb_hdf5.compat.text_pipeline import get_dist_info as get_dist_info
from zb_hdf5.compat.text_pipeline import get_tokenizer as get_tokenizer
from zb_hdf5.compat.text_pipeline import list_parquet_files as list_parquet_files
from zb_hdf5.compat.text_pipeline import parquets_iter_batched as parquets_iter_batched
from zb_hdf5.compat.text_pipeline import tokenizing_distributed_data_loader as tokenizing_distributed_data_loader
from zb_hdf5.compat.tokenized_corpus import MmapTokenStore as MmapTokenStore
from zb_hdf5.compat.tokenized_corpus import RustBPETokenizer as RustBPETokenizer
from zb_hdf5.compat.tokenized_corpus import ShardedTokenizationPipeline as ShardedTokenizationPipeline
from zb_hdf5.compat.tokenized_corpus import SlidingWindowDataloader as SlidingWindowDataloader
from zb_hdf5.compat.tokenized_corpus import Tokenizer as Tokenizer
from zb_hdf5.compat.zero_batch import BatchFileReader as BatchFileReader
from zb_hdf5.compat.zero_batch import BatchNativeLoader as BatchNativeLoader
from zb_hdf5.compat.zero_batch import write_batch_dataset as write_batch_dataset
from zb_hdf5.compat.zero_batch import write_batch_file as write_batch_file
from zb_hdf5.formats.stream_writer import HDF5ShardWriter as HDF5ShardWriter


def download_single_file(index: int) -> bool:
    """Download file number `index` of the corpus into `base_data`, unless it is there. Return whether it is."""
    [report] = fetch_shards(f"{BASE_URL}/shard_{{:05d}}.parquet", 1, data_folder(), first=index)
    return report.problem is None
