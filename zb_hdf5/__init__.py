"""Pre-formed token batches in HDF5, served to language-model training at the speed of a raw file.

Names are imported when they are first used: `import zb_hdf5` loads neither torch nor h5py nor click.
"""

from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zb_hdf5.version import __version__

if TYPE_CHECKING:  # the one table of public names: type checkers read it here, `_modules` reads its lines
    from zb_hdf5.compat import BatchFileReader as BatchFileReader
    from zb_hdf5.compat import BatchNativeLoader as BatchNativeLoader
    from zb_hdf5.compat import DatasetLoader as DatasetLoader
    from zb_hdf5.compat import MmapTokenStore as MmapTokenStore
    from zb_hdf5.compat import ShardedTokenizationPipeline as ShardedTokenizationPipeline
    from zb_hdf5.compat import SlidingWindowDataloader as SlidingWindowDataloader
    from zb_hdf5.compat import write_batch_dataset as write_batch_dataset
    from zb_hdf5.compat import write_batch_file as write_batch_file
    from zb_hdf5.converters.run import convert as convert
    from zb_hdf5.errors import ArgumentError as ArgumentError
    from zb_hdf5.errors import BackendError as BackendError
    from zb_hdf5.errors import BatchIndexError as BatchIndexError
    from zb_hdf5.errors import ChecksumError as ChecksumError
    from zb_hdf5.errors import ClosedError as ClosedError
    from zb_hdf5.errors import ConvertError as ConvertError
    from zb_hdf5.errors import ExistsError as ExistsError
    from zb_hdf5.errors import FormatError as FormatError
    from zb_hdf5.errors import IncompleteError as IncompleteError
    from zb_hdf5.errors import StateError as StateError
    from zb_hdf5.errors import UnavailableError as UnavailableError
    from zb_hdf5.errors import UnverifiableError as UnverifiableError
    from zb_hdf5.errors import ZbError as ZbError
    from zb_hdf5.formats.batch_reader import BatchReader as BatchReader
    from zb_hdf5.formats.batch_writer import BatchWriter as BatchWriter
    from zb_hdf5.formats.hdf5.stream_writer import HDF5ShardWriter as HDF5ShardWriter
    from zb_hdf5.loaders.document_loader import DocumentLoader as DocumentLoader
    from zb_hdf5.loaders.loader import FollowingLoader as FollowingLoader
    from zb_hdf5.loaders.loader import Loader as Loader
    from zb_hdf5.loaders.loader import TokenLoader as TokenLoader
    from zb_hdf5.loaders.mixture import MixedLoader as MixedLoader
    from zb_hdf5.loaders.text_loader import TextLoader as TextLoader
    from zb_hdf5.spec import StoreMeta as StoreMeta
    from zb_hdf5.store.index import ShardEntry as ShardEntry
    from zb_hdf5.store.index import ShardIndex as ShardIndex
    from zb_hdf5.store.opening import open_reader as open_reader
    from zb_hdf5.store.opening import open_writer as open_writer
    from zb_hdf5.store.rebuild import rebuild_index as rebuild_index
    from zb_hdf5.store.repair import repair as repair
    from zb_hdf5.store.verify import verify_store as verify_store
    from zb_hdf5.text.tokenizers import Tokenizer as Tokenizer
    from zb_hdf5.text.tokenizers import load_tokenizer as load_tokenizer
    from zb_hdf5.text.training import train_tokenizer as train_tokenizer


@cache
def _modules() -> dict[str, str]:
    """Return public name -> module."""
    lines = map(str.split, Path(__file__).read_text(encoding="utf-8").splitlines())
    return {line[5]: line[1] for line in lines if line[:1] == ["from"] and line[4:] == ["as", line[3]]}


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return sorted(_modules())
    if name not in _modules():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_modules()[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_modules()]
