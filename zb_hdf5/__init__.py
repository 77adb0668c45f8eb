"""Pre-formed token batches in HDF5, served to language-model training at the speed of a raw file.

Names are imported when they are first used: `import zb_hdf5` loads neither torch nor h5py nor click.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zb_hdf5.datasetloader import DatasetLoader
    from zb_hdf5.datasets import BatchDataset, RecordDataset
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
    from zb_hdf5.fetch import FetchReport, fetch_shards
    from zb_hdf5.follow import FollowingLoader, LiveReader
    from zb_hdf5.h5read import HDF5BatchReader
    from zb_hdf5.h5write import HDF5BatchWriter
    from zb_hdf5.index import ShardEntry, ShardIndex
    from zb_hdf5.livestore import LiveStoreWriter
    from zb_hdf5.loader import Loader
    from zb_hdf5.mixture import MixedLoader
    from zb_hdf5.native import BatchFileReader, BatchFileWriter
    from zb_hdf5.reader import BatchReader
    from zb_hdf5.shards import ShardedReader
    from zb_hdf5.spec import StoreMeta
    from zb_hdf5.store import BACKENDS, open_reader, open_writer
    from zb_hdf5.streamindex import StreamEntry, StreamIndex
    from zb_hdf5.streamwrite import HDF5ShardWriter, StreamInfo
    from zb_hdf5.textloader import TextLoader
    from zb_hdf5.tokenizer import Tokenizer, load_tokenizer
    from zb_hdf5.tokenstore import MmapTokenStore
    from zb_hdf5.verify import verify_store
    from zb_hdf5.verifystream import ShardReport
    from zb_hdf5.windows import SlidingWindowDataloader, WindowReader
    from zb_hdf5.writer import BatchWriter, ShardInfo
    from zb_hdf5.zerobatch import BatchNativeLoader, write_batch_dataset, write_batch_file

__version__ = "0.1.0"

_HOME = {
    "errors": (
        "ArgumentError", "BackendError", "BatchIndexError", "ChecksumError", "ClosedError", "ConvertError",
        "ExistsError", "FormatError", "IncompleteError", "StateError", "UnavailableError", "UnverifiableError",
        "ZbError",
    ),
    "datasetloader": ("DatasetLoader",),
    "datasets": ("BatchDataset", "RecordDataset"),
    "fetch": ("FetchReport", "fetch_shards"),
    "follow": ("FollowingLoader", "LiveReader"),
    "h5read": ("HDF5BatchReader",),
    "h5write": ("HDF5BatchWriter",),
    "index": ("ShardEntry", "ShardIndex"),
    "livestore": ("LiveStoreWriter",),
    "loader": ("Loader",),
    "mixture": ("MixedLoader",),
    "native": ("BatchFileReader", "BatchFileWriter"),
    "reader": ("BatchReader",),
    "shards": ("ShardedReader",),
    "spec": ("StoreMeta",),
    "store": ("BACKENDS", "open_reader", "open_writer"),
    "textloader": ("TextLoader",),
    "tokenizer": ("Tokenizer", "load_tokenizer"),
    "streamindex": ("StreamEntry", "StreamIndex"),
    "streamwrite": ("HDF5ShardWriter", "StreamInfo"),
    "tokenstore": ("MmapTokenStore",),
    "verify": ("verify_store",),
    "verifystream": ("ShardReport",),
    "windows": ("SlidingWindowDataloader", "WindowReader"),
    "writer": ("BatchWriter", "ShardInfo"),
    "zerobatch": ("BatchNativeLoader", "write_batch_dataset", "write_batch_file"),
}  # fmt: skip
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
