"""The interface of a source of batches, the counts of its tokens, and reads of its files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from zb_hdf5 import ArgumentError, ConvertError, StoreMeta
from zb_hdf5.documents.document_table import DocumentPart
from zb_hdf5.documents.pieces import Pieces
from zb_hdf5.errors import Remedy
from zb_hdf5.files.checked import GROUP_BYTES
from zb_hdf5.files.threads import read_ahead
from zb_hdf5.loaders.order import Permutation
from zb_hdf5.signals import deliver_signals
from zb_hdf5.spec import DEFAULT_SPLIT, TokenArray, bad_token_message, token_limit
from zb_hdf5.text.dropped import Dropped

#: The words of `--note`, in the same entry.
NOTE: Final = "note"
#: Groups of batches on their way: one is read, one is written, and the sha256 of one is still to come.
GROUPS: Final = 3


@dataclass
class TokenCounts:
    """Counts of tokens: `tokens_in + padded == stored + dropped`, or the conversion is wrong; and of documents."""

    tokens_in: int = 0
    padded: int = 0  # positions without a token of the source
    padding_rows: int = 0  # rows of nothing else, which fill the last batch
    dropped: dict[str, int] = field(default_factory=dict)
    documents: int = 0  # of a conversion of documents, as all that follows
    documents_dropped: Dropped = field(default_factory=Dropped)
    documents_lossy: int = 0  # of which the tokenizer has lost characters
    characters_lost: int = 0

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """Return the counts that `dataclasses.asdict` was given."""
        return cls(**{**value, "documents_dropped": Dropped(**value["documents_dropped"])})

    def drop(self, reason: str, tokens: int) -> None:
        """Count tokens that are not stored."""
        if tokens:
            self.dropped[reason] = self.dropped.get(reason, 0) + tokens

    def add(self, later: TokenCounts) -> None:
        """Add the counts of another file."""
        for name in ("tokens_in", "padded", "padding_rows", "documents", "documents_lossy", "characters_lost"):
            setattr(self, name, getattr(self, name) + getattr(later, name))
        self.documents_dropped.merge(later.documents_dropped)
        for reason, tokens in later.dropped.items():
            self.drop(reason, tokens)

    def require_balance(self, stored: int) -> None:
        """Raise `ConvertError` unless the counts add up."""
        if self.tokens_in + self.padded != stored + sum(self.dropped.values()):
            raise ConvertError(
                f"internal error: {self.tokens_in:,} tokens in + {self.padded:,} padded != {stored:,} stored + "
                f"{self.dropped} dropped; please report this"
            )


def require_pad_id(pad_id: int, meta: StoreMeta) -> None:
    """Raise `ArgumentError` if a store cannot hold the token of the padding."""
    if not 0 <= pad_id <= token_limit(meta.dtype, meta.vocab_size):
        raise ArgumentError(bad_token_message("pad_id", "the padding", pad_id, meta))


def batches_of(records: int, meta: StoreMeta, remainder: str, noun: str = "records") -> tuple[int, int]:
    """Return how many batches some records fill, and how many are left over: of "pad", they are in the last batch."""
    num_batches, rest = divmod(records, meta.batch_size)
    if rest and remainder == "error":
        raise ConvertError(
            f"{records:,} {noun} are not a multiple of batch_size {meta.batch_size}: {rest} are left over",
            remedy=Remedy.REMAINDER,
        )
    num_batches += rest > 0 and remainder == "pad"
    if num_batches == 0:
        raise ConvertError(
            f"{records:,} {noun} of {meta.seq_len} tokens do not fill one batch of {meta.batch_size}",
            remedy=Remedy.FILL_A_BATCH,
        )
    return num_batches, rest


class SourceShard(NamedTuple):
    """A shard of a source, or of the store that it is converted to.

    Attributes
    ----------
    num_batches, split
        Its batches.
    records
        Its part of `total_records`; None: all, but for padding at the end of the source.
    documents
        The number of documents that begin in it; None: not known.
    """

    num_batches: int
    split: str = DEFAULT_SPLIT
    records: int | None = None
    documents: int | None = None


class BatchSource(ABC):
    """Batches to convert, in their final order. Picklable: other processes read their shards themselves.

    Attributes
    ----------
    meta
        The shape, the dtype and the origin of the batches that will be stored.
    num_batches
        The number of batches.
    counts
        The counts of the tokens, complete before the first batch is read.
    description
        The `source` entry of `shards.json`.
    identity
        JSON of all that decides the batches, besides the description and the bytes of `paths`.
    paths
        The files and folders that are read; the destination may not replace them.
    shuffle
        The shuffle of records that has made the order of the batches.
    reorders
        Whether this conversion shuffles the records, and not an earlier one.
    order
        Stored record -> source record, if the records can also be read in their own order, for two passes.
    pad_id
        The token of the records after the last one.
    lacks_vocab_size
        Whether a vocabulary size of at most 65,536 would have stored uint16 instead of uint32.
    suspects
        The options that an id outside of the range proves wrong.
    reads_alone
        Whether a record is read without others, such as the records of its compressed chunk.
    cold
        Whether random reads wait for a disk: then they are announced to the kernel.
    origin
        The origin of a lone file; None: it follows from the description, the shuffle and the split.
    shards
        The shards that the source has; (): none.
    is_cut
        Whether they are the shards that were asked for.
    keeps_records
        Whether the records are all records of its path, in their order.
    has_pieces
        Whether the parts of documents in the records are known.
    document_files, document_parts
        The document tables, and their entries of the index.
    """

    meta: StoreMeta
    num_batches: int
    counts: TokenCounts
    description: dict[str, Any]
    identity: dict[str, Any]
    paths: list[Path]
    shuffle: str = "none"
    reorders: bool = False
    order: Permutation | None = None
    pad_id: int = 0
    lacks_vocab_size: bool = False
    suspects: tuple[str, ...] = ()
    reads_alone: bool = True
    cold: bool = False
    origin: dict[str, Any] | None = None
    shards: Sequence[SourceShard] = ()
    is_cut: bool = False
    keeps_records: bool = False
    has_pieces: bool = False
    document_files: Sequence[Path] = ()
    document_parts: tuple[DocumentPart, ...] = ()

    @property
    def cuts(self) -> list[tuple[int, int]]:
        """The batches of each of its shards, (start, stop)."""
        return list(pairwise(accumulate((shard.num_batches for shard in self.shards), initial=0)))

    def with_codec(self, codec: str) -> Self:
        """Return a copy whose batches are stored with a codec."""
        other = copy(self)
        other.meta = replace(self.meta, codec=codec)
        return other

    def with_tokens_only(self) -> Self:
        """Return a copy without fields and documents."""
        other = copy(self)
        other.meta = replace(self.meta, fields=())
        other.has_pieces = False
        other.document_files = ()
        other.document_parts = ()
        return other

    @abstractmethod
    def read_into(self, start: int, out: TokenArray) -> None:
        """Fill `out`, shape `(count, B, S)` of the stored dtype, with consecutive batches."""

    def read_field_into(self, name: str, start: int, out: TokenArray) -> None:
        """Fill `out`, shape `(count, B, S, ...)`, with the values of a field of `meta.fields`."""
        raise ArgumentError(f"a source without fields has no {name!r}")

    def read_pieces(self, start: int, stop: int) -> Pieces:
        """Return the pieces of consecutive batches of one split, if `has_pieces`."""
        raise ConvertError(f"{self.paths[0]}: holds no documents")

    def read_batches(self, start: int, tokens: TokenArray, fields: Mapping[str, TokenArray]) -> None:
        """Fill `tokens` and the values of fields with consecutive batches, as the two methods above do."""
        self.read_into(start, tokens)
        for name, values in fields.items():
            self.read_field_into(name, start, values)

    def read_records(self, first: int, rows: TokenArray, name: str = "") -> None:
        """Fill `rows`, shape `(count, S)` of the stored dtype, with consecutive records, if it has an `order`.

        Parameters
        ----------
        first
            The number of the first record in the order of the source.
        name
            The field whose values are read; "": the tokens.
        """
        raise ConvertError(f"{self.paths[0]}: its records have no order")

    def probe(self, record: int) -> float | None:
        """Return how many seconds a read of a source record took, or None if it came from the page cache."""
        raise ConvertError(f"{self.paths[0]}: its records have no order")

    def file_of(self, start: int, stop: int) -> tuple[Path | None, str | None]:
        """Return the one file that holds exactly these batches, and their digest; None where there is none."""
        return None, None

    def crc32_of(self, start: int, stop: int) -> npt.NDArray[np.uint32] | None:
        """Return the crc32 of each of these batches, as the one file that holds exactly them has it; None: it has none.

        A file in a bucket is not asked.
        """
        return None

    def check_reads(self) -> None:
        """From now on compare each batch with its own digest: none of `file_of` covers the batches that are read."""
        return


def batch_bytes(meta: StoreMeta) -> int:
    """Return the bytes of a batch with the values of its fields."""
    return meta.batch_bytes + sum(meta.of_field(field.name).batch_bytes for field in meta.fields)


class BatchGroup:
    """Consecutive batches and the values of their fields, in buffers that are filled again and again.

    `tokens` and `fields` are valid until the next group is asked for. A caller that passes them on to a thread sets
    `in_use` to a function that waits for the thread; it is called before the buffers are filled again.

    Parameters
    ----------
    meta
        The shape and dtype of the batches, and their fields.
    num_batches
        The batches of a group, at most.
    """

    def __init__(self, meta: StoreMeta, num_batches: int) -> None:
        shape = (num_batches, *meta.shape)
        self._tokens = np.empty(shape, meta.dtype)
        self._fields = {f.name: np.empty((*shape, *f.shape), f.dtype) for f in meta.fields}
        self.in_use: Callable[[], None] = lambda: None

    def read(self, source: BatchSource, first: int, count: int) -> Self:
        """Fill the buffers with the batches from `first` on."""
        self.in_use()
        self.tokens = self._tokens[:count]
        self.fields = {name: values[:count] for name, values in self._fields.items()}
        source.read_batches(first, self.tokens, self.fields)
        return self


def read_groups(source: BatchSource, start: int, stop: int) -> Iterator[BatchGroup]:
    """Yield groups of batches: while one is written, those before it are hashed, and the next is read."""
    size = max(1, GROUP_BYTES // batch_bytes(source.meta))
    groups = [BatchGroup(source.meta, min(size, stop - start)) for _ in range(GROUPS)]

    def read(number: int) -> BatchGroup:
        first = start + number * size
        return groups[number % GROUPS].read(source, first, min(size, stop - first))

    for group in read_ahead(read, iter(range(-(-(stop - start) // size))), 1):
        deliver_signals()
        yield group


def out_of_range(message: str, suspects: Sequence[str]) -> ConvertError:
    """Return the error for an id outside of its range, with the options that it proves wrong, if there are any."""
    if not suspects:
        return ConvertError(message)
    return ConvertError(f"{message}: {' or '.join(suspects)} is another one", options=suspects)
