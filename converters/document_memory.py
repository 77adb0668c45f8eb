"""The memory of a conversion of documents: counted before its work, and compared with the bound that was given."""

from __future__ import annotations

from typing import Final, NamedTuple, Self

from zb_hdf5 import StoreMeta
from zb_hdf5.console import counted, format_bytes
from zb_hdf5.converters.batch_source import GROUPS, batch_bytes
from zb_hdf5.converters.batch_target import MOVED_TOKENS
from zb_hdf5.converters.settings import Settings
from zb_hdf5.converters.stream_source import StreamSource
from zb_hdf5.documents.document_table import TEXTS_AT_ONCE
from zb_hdf5.errors import ArgumentError
from zb_hdf5.files.checked import GROUP_BYTES
from zb_hdf5.store.format_list import document_targets

#: A process that reads and writes documents, besides its blocks: Python, numpy and h5py, and the buffers of a writer.
OWN_BYTES: Final = 64 << 20
#: The process that starts the others: of several workers none is the first process.
STARTER_BYTES: Final = 32 << 20
#: A document, and a piece of one, while rows are packed.
PACKED_DOCUMENT_BYTES: Final = 32
PACKED_PIECE_BYTES: Final = 48
#: A piece on its way to the table of pieces of a shard.
MOVED_PIECE_BYTES: Final = 60
#: A document of an open file of another trainer, which has lengths that become offsets, in each process.
OPEN_DOCUMENT_BYTES: Final = 32
#: A document in the index of a file of another trainer that is written.
WRITTEN_DOCUMENT_BYTES: Final = 24
#: An id that is compared with all others.
ID_BYTES: Final = 32
#: Copies of a block of documents: as it is read, its chosen documents, and those in the stored dtype.
COPIES: Final = 3
_MIB: Final = 1 << 20


class DocumentMemory(NamedTuple):
    """The memory that the documents of a conversion take, besides that of the processes themselves.

    Attributes
    ----------
    num_documents
        The documents.
    of_any
        The bytes of any process.
    of_first
        The bytes of the process that plans.
    of_each
        The bytes of each process that reads and writes.
    """

    num_documents: int
    of_any: int
    of_first: int
    of_each: int

    @classmethod
    def of_rows(cls, num_documents: int, num_tokens: int, meta: StoreMeta, packing: str) -> Self:
        """Return the memory in which the documents of a stream become batches of rows."""
        num_pieces = 0 if packing == "pad" else num_tokens // meta.seq_len
        if packing != "concat":
            num_pieces += num_documents
        # twice the mean: small documents are packed together
        share = min(1.0, 2 * num_documents / max(1, num_tokens))
        moved = share * min(max(MOVED_TOKENS, meta.batch_tokens), num_tokens)
        plan = PACKED_DOCUMENT_BYTES * num_documents + PACKED_PIECE_BYTES * num_pieces
        groups = GROUPS * max(GROUP_BYTES, batch_bytes(meta))
        return cls(num_documents, 0, plan, groups + int(moved) * MOVED_PIECE_BYTES)

    @classmethod
    def of_source(cls, source: StreamSource, settings: Settings) -> Self:
        """Return the memory in which documents are kept, or staged and packed."""
        target = settings.target
        count = source.num_documents
        opened = OPEN_DOCUMENT_BYTES * count if source.has_offsets_in_memory else 0
        written = WRITTEN_DOCUMENT_BYTES * count if target.format in document_targets() else 0
        ids = ID_BYTES * count if source.has_ids else 0
        texts = COPIES * TEXTS_AT_ONCE if source.has_ids or source.has_metadata else 0
        found = cls(count, opened, ids, written + texts + COPIES * source.block_bytes)
        if target.is_stream:
            return found
        options = settings.layout
        meta = StoreMeta(options.batch_rows, options.row_tokens, source.dtype, fields=tuple(source.fields))
        rows = cls.of_rows(count, source.num_tokens or 0, meta, options.packing)
        return cls(count, opened, max(found.of_first, rows.of_first), max(found.of_each, rows.of_each))

    def needed(self, workers: int) -> int:
        """Return the bytes of all processes of a node, in whole MiB."""
        own = OWN_BYTES + self.of_any
        found = own + self.of_first
        if workers == 1:
            found += self.of_each
        else:
            found += STARTER_BYTES + workers * (own + self.of_each)
        return -(-found // _MIB) * _MIB

    def workers_within(self, bound: int, most: int) -> int:
        """Return the number of processes that stay within a bound; 1 if none does."""
        return max((count for count in range(2, most + 1) if self.needed(count) <= bound), default=1)

    def require(self, bound: int, workers: int) -> None:
        """Raise `ArgumentError` if some processes take more than the bound."""
        needed = self.needed(workers)
        if needed <= bound:
            return
        cure = f"pass memory='{needed // _MIB}MiB' or more"
        if workers > 1:
            cure += f", or fewer workers: one takes memory='{self.needed(1) // _MIB}MiB'"
        raise ArgumentError(
            f"memory: {format_bytes(bound)} is too little for {counted(workers, 'process', 'processes')} and "
            f"{counted(self.num_documents, 'document')}: it takes {format_bytes(needed)}; {cure}",
            options=["memory", "workers"],
        )
