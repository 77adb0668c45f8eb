"""Pre-formed token batches in HDF5, served to language-model training at the speed of a raw file.

Names are imported when they are first used: `import zb_hdf5` loads neither torch nor h5py nor click.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zb_hdf5.columns.reader import BatchReader
    from zb_hdf5.columns.writer import BatchWriter, ShardInfo
    from zb_hdf5.commands.fetch import FetchReport, fetch_shards
    from zb_hdf5.compat.dataset_loader import DatasetLoader
    from zb_hdf5.compat.tokenized_corpus import (
        MmapTokenStore,
        ShardedTokenizationPipeline,
        SlidingWindowDataloader,
    )
    from zb_hdf5.compat.zerobatch import BatchNativeLoader, write_batch_dataset, write_batch_file
    from zb_hdf5.converters.conversion import convert
    from zb_hdf5.converters.npy_streams import npy_to_stream
    from zb_hdf5.errors import (
        ArgumentError,
        BackendError,
        BatchIndexError,
        ChecksumError,
        ClosedError,
        ConvertError,
        ExistsError,
        FormatError,
        IncompleteError,
        StateError,
        UnavailableError,
        UnverifiableError,
        ZbError,
    )
    from zb_hdf5.formats.hdf5.reader import HDF5BatchReader
    from zb_hdf5.formats.hdf5.stream_writer import HDF5ShardWriter
    from zb_hdf5.formats.hdf5.writer import HDF5BatchWriter
    from zb_hdf5.formats.native import BatchFileReader, BatchFileWriter
    from zb_hdf5.formats.registry import BACKENDS
    from zb_hdf5.loaders.datasets import BatchDataset, RecordDataset
    from zb_hdf5.loaders.document_loader import DocumentLoader
    from zb_hdf5.loaders.following import FollowingLoader
    from zb_hdf5.loaders.loader import Loader
    from zb_hdf5.loaders.mixture import MixedLoader
    from zb_hdf5.loaders.protocol import TokenLoader
    from zb_hdf5.loaders.text_loader import TextLoader
    from zb_hdf5.spec import StoreMeta
    from zb_hdf5.store.index import ShardIndex
    from zb_hdf5.store.live import LiveStoreWriter
    from zb_hdf5.store.live_reader import LiveReader
    from zb_hdf5.store.opening import open_reader, open_writer
    from zb_hdf5.store.rebuild import rebuild_index
    from zb_hdf5.store.repair import repair
    from zb_hdf5.store.shards import ShardedReader
    from zb_hdf5.store.table import ShardEntry
    from zb_hdf5.store.verify import verify_store
    from zb_hdf5.store.verify_report import ShardReport
    from zb_hdf5.store.windows import WindowReader
    from zb_hdf5.text.tokenizers import Tokenizer, load_tokenizer
    from zb_hdf5.text.training import train_tokenizer

__version__ = "0.1.0"

_HOME = {
    "columns.reader": ("BatchReader",),
    "columns.writer": ("BatchWriter", "ShardInfo"),
    "commands.fetch": ("FetchReport", "fetch_shards"),
    "compat.dataset_loader": ("DatasetLoader",),
    "compat.tokenized_corpus": ("MmapTokenStore", "ShardedTokenizationPipeline", "SlidingWindowDataloader"),
    "compat.zerobatch": ("BatchNativeLoader", "write_batch_dataset", "write_batch_file"),
    "converters.conversion": ("convert",),
    "converters.npy_streams": ("npy_to_stream",),
    "errors": (
        "ArgumentError", "BackendError", "BatchIndexError", "ChecksumError", "ClosedError", "ConvertError",
        "ExistsError", "FormatError", "IncompleteError", "StateError", "UnavailableError",
        "UnverifiableError", "ZbError",
    ),
    "formats.hdf5.reader": ("HDF5BatchReader",),
    "formats.hdf5.stream_writer": ("HDF5ShardWriter",),
    "formats.hdf5.writer": ("HDF5BatchWriter",),
    "formats.native": ("BatchFileReader", "BatchFileWriter"),
    "formats.registry": ("BACKENDS",),
    "loaders.datasets": ("BatchDataset", "RecordDataset"),
    "loaders.document_loader": ("DocumentLoader",),
    "loaders.following": ("FollowingLoader",),
    "loaders.loader": ("Loader",),
    "loaders.mixture": ("MixedLoader",),
    "loaders.protocol": ("TokenLoader",),
    "loaders.text_loader": ("TextLoader",),
    "store.rebuild": ("rebuild_index",),
    "store.repair": ("repair",),
    "store.opening": ("open_reader", "open_writer"),
    "spec": ("StoreMeta",),
    "store.index": ("ShardIndex",),
    "store.live": ("LiveStoreWriter",),
    "store.live_reader": ("LiveReader",),
    "store.verify_report": ("ShardReport",),
    "store.shards": ("ShardedReader",),
    "store.table": ("ShardEntry",),
    "store.verify": ("verify_store",),
    "text.tokenizers": ("Tokenizer", "load_tokenizer"),
    "text.training": ("train_tokenizer",),
    "store.windows": ("WindowReader",),
}  # fmt: skip
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}
__all__ = [  # written out: type checkers take what it names for what this package offers
    "BACKENDS",
    "ArgumentError",
    "BackendError",
    "BatchDataset",
    "BatchFileReader",
    "BatchFileWriter",
    "BatchIndexError",
    "BatchNativeLoader",
    "BatchReader",
    "BatchWriter",
    "ChecksumError",
    "ClosedError",
    "ConvertError",
    "DatasetLoader",
    "DocumentLoader",
    "ExistsError",
    "FetchReport",
    "FollowingLoader",
    "FormatError",
    "HDF5BatchReader",
    "HDF5BatchWriter",
    "HDF5ShardWriter",
    "IncompleteError",
    "LiveReader",
    "LiveStoreWriter",
    "Loader",
    "MixedLoader",
    "MmapTokenStore",
    "RecordDataset",
    "ShardEntry",
    "ShardIndex",
    "ShardInfo",
    "ShardReport",
    "ShardedReader",
    "ShardedTokenizationPipeline",
    "SlidingWindowDataloader",
    "StateError",
    "StoreMeta",
    "TextLoader",
    "TokenLoader",
    "Tokenizer",
    "UnavailableError",
    "UnverifiableError",
    "WindowReader",
    "ZbError",
    "convert",
    "fetch_shards",
    "load_tokenizer",
    "npy_to_stream",
    "open_reader",
    "open_writer",
    "rebuild_index",
    "repair",
    "train_tokenizer",
    "verify_store",
    "write_batch_dataset",
    "write_batch_file",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
