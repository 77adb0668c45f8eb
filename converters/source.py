"""What a source offers to a conversion, and the counts of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

from zb_hdf5 import ArgumentError, BatchReader, ConvertError, StoreMeta
from zb_hdf5.documents.document_table import DocumentPart
from zb_hdf5.documents.pieces import Pieces
from zb_hdf5.loaders.order import GlobalOrder
from zb_hdf5.spec import TokenArray

#: The largest id of a store, in the `source` entry of its index: of no shard, and of no copy before it is written.
MAX_TOKEN: Final = "max_token"
#: What may become of records that do not fill the last batch.
REMAINDERS: Final = ("drop", "pad", "error")


@dataclass
class TokenCounts:
    """Counts of tokens: `tokens_in + padded == stored + dropped`, or the conversion is wrong.

    Attributes
    ----------
    padded
        Places without a token of the source.
    padding_rows
        Rows of nothing else, which fill the last batch.
    """

    tokens_in: int = 0
    padded: int = 0
    padding_rows: int = 0
    dropped: dict[str, int] = field(default_factory=dict)

    def drop(self, reason: str, tokens: int) -> None:
        """Count tokens that are not stored."""
        if tokens:
            self.dropped[reason] = self.dropped.get(reason, 0) + tokens

    def add(self, later: TokenCounts) -> None:
        """Add those of another file."""
        self.tokens_in += later.tokens_in
        self.padded += later.padded
        self.padding_rows += later.padding_rows
        for reason, tokens in later.dropped.items():
            self.drop(reason, tokens)

    def require_balance(self, stored: int) -> None:
        """Raise `ConvertError` unless the counts add up."""
        if self.tokens_in + self.padded != stored + sum(self.dropped.values()):
            raise ConvertError(
                f"internal error: {self.tokens_in:,} tokens in + {self.padded:,} padded != {stored:,} stored + "
                f"{self.dropped} dropped; please report this"
            )


@runtime_checkable
class Source(Protocol):
    """Batches to convert, in their final order. Picklable: other processes read their shards themselves.

    Attributes
    ----------
    meta
        Shape, dtype and origin of what will be stored.
    num_batches
        How many batches there are.
    shuffle
        Name of the record shuffle behind the order, or "none".
    shard_batches
        Batches per shard where the source has shards of its own, else empty.
    shard_splits
        The split that each of these shards belongs to.
    shard_records, shard_documents
        Of each of these shards, where it is known, else empty: its part of `total_records`, and how many documents have
        their first token in it.
    token_counts
        Complete before the first batch is read.
    description
        For the `source` entry of `shards.json`.
    paths
        The files and folders that are read; the destination may not replace them.
    reorders
        Whether records are shuffled as they are read: not in a copy, whatever `shuffle` was behind its source.
    order
        Stored record -> source record, if that can be said: then the source is a `ShuffledSource`.
    has_pieces
        Whether it is known which parts of documents lie in the records.
    document_files, document_parts
        The document tables, and what the index of a store of these batches says of them.
    origin
        The origin that a lone source file has stored; None: it follows from `description`, `shuffle` and the split.
    identity
        JSON of what decides the batches besides the bytes of `paths`: two sources of one identity give the same.
    """

    meta: StoreMeta
    num_batches: int
    shuffle: str
    reorders: bool
    shard_batches: list[int]
    shard_splits: list[str]
    shard_records: list[int]
    shard_documents: list[int | None]
    token_counts: TokenCounts
    description: dict[str, Any]
    paths: list[Path]
    identity: dict[str, Any]
    order: GlobalOrder | None
    origin: dict[str, Any] | None = None
    has_pieces: bool = False
    document_files: Sequence[Path] = ()
    document_parts: tuple[DocumentPart, ...] = ()

    def read_pieces(self, start: int, stop: int) -> Pieces:
        """Return the pieces of consecutive batches of one split, if `has_pieces`."""
        raise ConvertError(f"{self.paths[0]}: holds no documents")

    def read_into(self, start: int, out: TokenArray) -> None:
        """Fill `out`, shape `(count, B, S)` of the stored dtype, with consecutive batches."""

    def read_field_into(self, name: str, start: int, out: TokenArray) -> None:
        """Fill `out`, shape `(count, B, S, ...)`, with the values of a field of `meta.fields`."""
        raise ArgumentError(f"a source without fields has no {name!r}")

    def sha256_of(self, start: int, stop: int) -> str | None:
        """Return the digest that the source has stored for these batches; None: it has none."""
        return None

    def shard_of(self, start: int, stop: int) -> BatchReader | None:
        """Open the one file that holds exactly these batches; None: no file is just these."""
        return None

    def check_reads(self) -> None:
        """From now on compare each batch that is read with its own digest, where the source has one.

        Called where shards are not copied whole, so that no `sha256_of` covers what is read.
        """
        return


class ShuffledSource(Source, Protocol):
    """A source whose records can also be read in their own order, for a shuffle in two passes.

    Attributes
    ----------
    order
        Stored record -> source record.
    pad_id
        The token of the records behind the last one.
    cold
        Whether random reads wait for a disk: then they are announced to the kernel.
    """

    order: GlobalOrder
    pad_id: int
    cold: bool

    def read_records(self, first: int, rows: TokenArray) -> None:
        """Fill `rows`, shape `(count, S)` of the stored dtype, with consecutive records of the source."""

    def probe(self, record: int) -> float | None:
        """Return how many seconds a read of a source record took, or None if it came from the page cache."""
