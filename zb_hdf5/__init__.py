"""Token batches in HDF5 for language-model training: checked, shuffled, and resumed exactly after a crash.

Names are imported when they are first used: `import zb_hdf5` loads neither torch nor h5py nor click.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from zb_hdf5.version import __version__

_SYSTEM: str = sys.platform  # by itself it would have type checkers elsewhere skip all that follows
if _SYSTEM != "linux":
    raise ImportError(
        f"zb_hdf5 runs on Linux only, found {_SYSTEM}: its reads and writes are system calls that others lack; "
        "use a Linux machine or a container, or read the HDF5 files with h5py"
    )

if TYPE_CHECKING:  # for type checkers, which do not read the table; a test compares both
    from zb_hdf5.compat import BatchFileReader as BatchFileReader
    from zb_hdf5.compat import BatchNativeLoader as BatchNativeLoader
    from zb_hdf5.compat import DatasetLoader as DatasetLoader
    from zb_hdf5.compat import MmapTokenStore as MmapTokenStore
    from zb_hdf5.compat import ShardedTokenizationPipeline as ShardedTokenizationPipeline
    from zb_hdf5.compat import SlidingWindowDataloader as SlidingWindowDataloader
    from zb_hdf5.compat import write_batch_dataset as write_batch_dataset
    from zb_hdf5.compat import write_batch_file as write_batch_file
    from zb_hdf5.converters.arguments import convert as convert
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
    from zb_hdf5.field import Field as Field
    from zb_hdf5.field_sets.asked_set import open_field_set as open_field_set
    from zb_hdf5.field_sets.asked_set import plan_field_set as plan_field_set
    from zb_hdf5.field_sets.field_set import FieldSet as FieldSet
    from zb_hdf5.field_sets.set_plan import FieldSetPlan as FieldSetPlan
    from zb_hdf5.formats.batch_writer import BatchWriter as BatchWriter
    from zb_hdf5.formats.batches import Batches as Batches
    from zb_hdf5.formats.corpus import Corpus as Corpus
    from zb_hdf5.formats.stream_writer import HDF5ShardWriter as HDF5ShardWriter
    from zb_hdf5.loaders.document_loader import DocumentLoader as DocumentLoader
    from zb_hdf5.loaders.following import FollowingLoader as FollowingLoader
    from zb_hdf5.loaders.loader import Loader as Loader
    from zb_hdf5.loaders.loader_options import LoaderOptions as LoaderOptions
    from zb_hdf5.loaders.made_up_corpus import made_up_corpus as made_up_corpus
    from zb_hdf5.loaders.mixture import MixedLoader as MixedLoader
    from zb_hdf5.loaders.order import resolve_rank as resolve_rank
    from zb_hdf5.loaders.store_records import StoreRecords as StoreRecords
    from zb_hdf5.loaders.text_loader import TextLoader as TextLoader
    from zb_hdf5.loaders.token_loader import TokenLoader as TokenLoader
    from zb_hdf5.read_as import ReadAs as ReadAs
    from zb_hdf5.spec import StoreMeta as StoreMeta
    from zb_hdf5.store.cache import Cache as Cache
    from zb_hdf5.store.digests import write_digests as write_digests
    from zb_hdf5.store.index import ShardIndex as ShardIndex
    from zb_hdf5.store.opening import open_corpus as open_corpus
    from zb_hdf5.store.opening import open_reader as open_reader
    from zb_hdf5.store.opening import open_writer as open_writer
    from zb_hdf5.store.rebuild import rebuild_index as rebuild_index
    from zb_hdf5.store.repair import repair as repair
    from zb_hdf5.store.shard_table import ShardEntry as ShardEntry
    from zb_hdf5.store.verify import verify_store as verify_store
    from zb_hdf5.text.tokenizers import Tokenizer as Tokenizer
    from zb_hdf5.text.tokenizers import load_tokenizer as load_tokenizer
    from zb_hdf5.text.training import train_tokenizer as train_tokenizer

#: Public name -> module.
_MODULES: Final = {
    "BatchFileReader": "zb_hdf5.compat",
    "BatchNativeLoader": "zb_hdf5.compat",
    "DatasetLoader": "zb_hdf5.compat",
    "MmapTokenStore": "zb_hdf5.compat",
    "ShardedTokenizationPipeline": "zb_hdf5.compat",
    "SlidingWindowDataloader": "zb_hdf5.compat",
    "write_batch_dataset": "zb_hdf5.compat",
    "write_batch_file": "zb_hdf5.compat",
    "convert": "zb_hdf5.converters.arguments",
    "ArgumentError": "zb_hdf5.errors",
    "BackendError": "zb_hdf5.errors",
    "BatchIndexError": "zb_hdf5.errors",
    "ChecksumError": "zb_hdf5.errors",
    "ClosedError": "zb_hdf5.errors",
    "ConvertError": "zb_hdf5.errors",
    "ExistsError": "zb_hdf5.errors",
    "FormatError": "zb_hdf5.errors",
    "IncompleteError": "zb_hdf5.errors",
    "StateError": "zb_hdf5.errors",
    "UnavailableError": "zb_hdf5.errors",
    "UnverifiableError": "zb_hdf5.errors",
    "ZbError": "zb_hdf5.errors",
    "Field": "zb_hdf5.field",
    "open_field_set": "zb_hdf5.field_sets.asked_set",
    "plan_field_set": "zb_hdf5.field_sets.asked_set",
    "FieldSet": "zb_hdf5.field_sets.field_set",
    "FieldSetPlan": "zb_hdf5.field_sets.set_plan",
    "BatchWriter": "zb_hdf5.formats.batch_writer",
    "Batches": "zb_hdf5.formats.batches",
    "Corpus": "zb_hdf5.formats.corpus",
    "HDF5ShardWriter": "zb_hdf5.formats.stream_writer",
    "DocumentLoader": "zb_hdf5.loaders.document_loader",
    "FollowingLoader": "zb_hdf5.loaders.following",
    "Loader": "zb_hdf5.loaders.loader",
    "LoaderOptions": "zb_hdf5.loaders.loader_options",
    "made_up_corpus": "zb_hdf5.loaders.made_up_corpus",
    "MixedLoader": "zb_hdf5.loaders.mixture",
    "resolve_rank": "zb_hdf5.loaders.order",
    "StoreRecords": "zb_hdf5.loaders.store_records",
    "TextLoader": "zb_hdf5.loaders.text_loader",
    "TokenLoader": "zb_hdf5.loaders.token_loader",
    "ReadAs": "zb_hdf5.read_as",
    "StoreMeta": "zb_hdf5.spec",
    "Cache": "zb_hdf5.store.cache",
    "write_digests": "zb_hdf5.store.digests",
    "ShardIndex": "zb_hdf5.store.index",
    "open_corpus": "zb_hdf5.store.opening",
    "open_reader": "zb_hdf5.store.opening",
    "open_writer": "zb_hdf5.store.opening",
    "rebuild_index": "zb_hdf5.store.rebuild",
    "repair": "zb_hdf5.store.repair",
    "ShardEntry": "zb_hdf5.store.shard_table",
    "verify_store": "zb_hdf5.store.verify",
    "Tokenizer": "zb_hdf5.text.tokenizers",
    "load_tokenizer": "zb_hdf5.text.tokenizers",
    "train_tokenizer": "zb_hdf5.text.training",
}


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return sorted(_MODULES)
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*_MODULES, *(name for name in globals() if name.startswith("__"))})
