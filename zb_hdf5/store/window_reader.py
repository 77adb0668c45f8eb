"""A token stream, in one file or many, as batches of windows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import ArgumentError
from zb_hdf5.files.paths import on_failure
from zb_hdf5.files.tokens import Tokens
from zb_hdf5.formats.batch_reader import BatchReader
from zb_hdf5.formats.flat_tokens import FlatTokens
from zb_hdf5.formats.row_documents import stream_field
from zb_hdf5.formats.windows import Windows
from zb_hdf5.read_as import AS_STORED, ReadAs
from zb_hdf5.spec import NOT_COUNTED, NOT_KNOWN, StoreMeta
from zb_hdf5.store.cut_reader import CutReader
from zb_hdf5.store.index import ShardIndex
from zb_hdf5.store.shards import ReadOptions, Sharded
from zb_hdf5.store.store_documents import StreamDocuments

if TYPE_CHECKING:  # h5py, which a store with an index does not need
    from zb_hdf5.formats.h5_column import Column


class WindowReader(CutReader):
    """Reads a token stream as batches of its windows. See `BatchReader`.

    Windows after the last whole batch are records as well. Windows are less than a chunk: `verify="auto"` compares
    nothing, and "batch" reads whole chunks.

    Parameters
    ----------
    path
        The file, the folder of the files, or their `shards.json`.
    index
        The files that are read.
    windows
        The records and batches.
    access, verify, read_as, found
        As for `StoreReader`.
    """

    def __init__(
        self,
        path: Path,
        index: ShardIndex,
        windows: Windows,
        *,
        access: str = "auto",
        verify: str = "auto",
        read_as: ReadAs = AS_STORED,
        found: Mapping[int, Column | FlatTokens] | None = None,
    ) -> None:
        how = ReadOptions(access=access, verify=verify, read_as=read_as)
        super().__init__(path, index, found=found, **how)
        with on_failure(self.close):
            self.cut(windows)

    def cut(self, windows: Windows) -> None:
        """Cut the stream into other windows; `ArgumentError` if no store may have batches of their shape."""
        stream = self.index.meta
        self.num_batches, self.rest = windows.cut(self.num_tokens)
        self.windows = windows
        self.meta = StoreMeta(
            windows.size,
            windows.length,
            stream.dtype,
            total_records=self.num_batches * windows.size,
            vocab_size=stream.vocab_size,
            tokenizer=stream.tokenizer,
            fields=stream.fields,
            field=stream.field,
            unfit=stream.unfit,
        )
        self._fingerprint = None
        self._fields = {}
        if stream.field is None:
            self.record_documents = self._documents_of(self.index, windows)

    def follow(self, index: ShardIndex, found: Mapping[int, Column | FlatTokens]) -> None:
        """Read the files of a newer index of the same stream, which has as many tokens or more.

        Other threads may read meanwhile: they see tokens before the documents of these, and documents before the
        numbers of both. A file that was open closes when no thread reads from it any more.

        Parameters
        ----------
        found
            As for `StoreReader`.
        """
        tokens = self._shards.reopened(index, found)
        _ = tokens.access  # as in `StoreReader`: an error changes nothing
        self._shards = tokens
        self.tokens = tokens
        self.record_documents = self._documents_of(index, self.windows)
        self.index = index
        self.max_token = index.max_token
        self.cut(self.windows)

    def _documents_of(self, index: ShardIndex, windows: Windows) -> StreamDocuments:
        return StreamDocuments(
            self.path,
            self._shards.folder,
            index,
            self._shards.starts,
            self._shards.identities,
            self._reads,
            self._shards.asked,
            windows,
            self._shards.found,
            self._positions_of(index),
        )

    def _positions_of(self, index: ShardIndex) -> Tokens | None:
        """Return the values that tell the documents of a stream of another program apart; None: none do."""
        name = _told_by(index)
        if not name:
            return None
        known = self._shards
        positions = Sharded(known.folder, index.of_field(name), known.asked, "none", known.read_as)
        positions.identities = known.identities
        return positions

    @property
    def num_tokens(self) -> int:
        """Tokens of all files: the padding of the last chunk of one is never shown."""
        return self.tokens.num_tokens

    @property
    def dropped_tokens(self) -> int:
        """Tokens after the last whole batch."""
        return self.num_tokens - self.windows.overlap - self.num_batches * self.windows.batch_stride

    def _field_reader(self, name: str) -> BatchReader:
        values = self.meta.of_field(name).seq_len // self.seq_len
        return WindowReader(self.path, self.index.of_field(name), self.windows.widened(values), **self._options)

    @property
    def token_fingerprint(self) -> str:
        if not self.index.has_digests:
            return self._sample()
        return f"tokens:{self.index.sha256}:{self.dtype.name}"

    def _compute_fingerprint(self) -> str:
        return f"{self.token_fingerprint}:{self.windows.in_text}"

    @property
    def has_documents(self) -> bool:
        """Whether it is stored where the documents of a stream begin; else each file counts as one."""
        return bool((self.index.table.values["document_count"] != NOT_KNOWN).all())

    @property
    def told_by(self) -> str:
        """The field that tells the documents of a stream apart; "": their ends are stored, or nothing tells them."""
        return _told_by(self.index)

    @property
    def document_count(self) -> int:
        """Documents of a stream; of OLMo files, the `.csv.gz` of each is read for it at the first call."""
        documents = self.record_documents
        if not isinstance(documents, StreamDocuments):  # the values of a field
            documents = self._documents_of(self.index, self.windows)
        return int(documents.counts().sum())

    @property
    def doc_offsets(self) -> npt.NDArray[np.uint64]:
        """The start of each document of a stream and the end of the last one, in its tokens, shape (D + 1,).

        Read from all files at the first call, and kept: 8 bytes for each. `.npy` files have no documents: each counts
        as one.
        """
        if not isinstance(self.record_documents, StreamDocuments):
            raise ArgumentError(f"{self.path}: expected tokens, found the values of a field")
        return self.record_documents.edges()


def _told_by(index: ShardIndex) -> str:
    """Return the field that tells the documents of a stream apart. See `WindowReader.told_by`."""
    is_told = bool((index.table.values["document_count"] == NOT_COUNTED).all())
    return stream_field(index.meta.fields) if is_told else ""
