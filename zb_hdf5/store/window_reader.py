"""A token stream, in one file or many, as batches of windows."""

from __future__ import annotations

import copy
import hashlib
from bisect import bisect_right
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import ArgumentError, UnverifiableError
from zb_hdf5.files.paths import on_failure
from zb_hdf5.files.tokens import Tokens
from zb_hdf5.formats.batch_reader import BatchReader
from zb_hdf5.formats.windows import Windows
from zb_hdf5.spec import NOT_KNOWN, StoreMeta
from zb_hdf5.store.index import ShardIndex
from zb_hdf5.store.shards import Sharded, StoreReader
from zb_hdf5.store.store_documents import StreamDocuments

if TYPE_CHECKING:  # h5py, which a store with an index does not need
    from zb_hdf5.formats.h5_column import Column

#: Places that a sampled fingerprint covers, evenly over all tokens.
FINGERPRINT_PLACES: Final = 16
#: Tokens that it covers at each place.
TOKENS_OF_A_PLACE: Final = 4096
#: Files whose ends it covers too.
FINGERPRINT_FILES: Final = 64
#: The key of the stored dtype in the source of an index that is made of flat files.
FLAT_DTYPE: Final = "dtype"


class WindowReader(StoreReader):
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
    access, verify, dataset, columns
        As for `StoreReader`.
    """

    _auto_compares: ClassVar[bool] = False

    def __init__(
        self,
        path: Path,
        index: ShardIndex,
        windows: Windows,
        *,
        access: str = "auto",
        verify: str = "auto",
        dataset: str | None = None,
        columns: Mapping[int, Column] | None = None,
    ) -> None:
        super().__init__(path, index, access=access, verify=verify, dataset=dataset, columns=columns)
        with on_failure(self.close):
            self.cut(windows)

    def _require_crc32(self) -> None:
        if self.index.without_crc32():
            self._shards.open_file(0, 0)  # names what is missing

    def _attach(self, index: ShardIndex) -> None:
        """Do nothing: the documents follow from the windows, and a digest of all tokens is none of the windows."""

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
        )
        self._fingerprint = None
        self._fields = {}
        if stream.field is None:
            self.record_documents = self._documents_of(self.index, windows)

    def follow(self, index: ShardIndex, columns: Mapping[int, Column]) -> None:
        """Read the files of a newer index of the same stream, which has as many tokens or more.

        Other threads may read meanwhile: they see tokens before the documents of these, and documents before the
        numbers of both. A file that was open closes when no thread reads from it any more.

        Parameters
        ----------
        columns
            As for `StoreReader`.
        """
        tokens = self._shards.reopened(index, columns)
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
        )

    @property
    def num_tokens(self) -> int:
        """Tokens of all files: the padding of the last chunk of one is never shown."""
        return self.tokens.num_tokens

    @property
    def dropped_tokens(self) -> int:
        """Tokens after the last whole batch."""
        return self.num_tokens - self.windows.overlap - self.num_batches * self.windows.batch_stride

    def compared_tokens(self) -> Tokens | None:
        if self.verify != "auto":
            return super().compared_tokens()
        known = self._shards
        tokens = Sharded(known.folder, self.index, known.asked, "batch", known.dataset)
        tokens.identities = known.identities
        try:
            tokens.open_file(0, 0)
        except UnverifiableError:
            return None
        return tokens

    def _field_reader(self, name: str) -> BatchReader:
        values = self.meta.of_field(name).seq_len // self.seq_len
        return WindowReader(self.path, self.index.of_field(name), self.windows.widened(values), **self._options)

    @property
    def token_fingerprint(self) -> str:
        if not self.index.has_digests:
            return f"sampled:{self._sample().hexdigest()}"
        return f"tokens:{self.index.sha256}:{self.dtype.name}"

    def _sample(self) -> Any:
        """Return the digest of all sizes and some of the tokens: evenly over all, and the ends of some of the files."""
        starts = self._shards.starts
        last_file = len(starts) - 2
        last = max(0, self.num_tokens - TOKENS_OF_A_PLACE)
        places = {last * k // (FINGERPRINT_PLACES - 1) for k in range(FINGERPRINT_PLACES)}
        for file in {last_file * k // (FINGERPRINT_FILES - 1) for k in range(FINGERPRINT_FILES)}:
            places |= {starts[file], max(starts[file], starts[file + 1] - TOKENS_OF_A_PLACE)}
        dtype = np.dtype(self.index.source.get(FLAT_DTYPE, self.dtype.str))
        digest = hashlib.sha256(f"{starts}:{dtype.str}".encode())
        for start in sorted(place for place in places if place < self.num_tokens):
            stop = min(start + TOKENS_OF_A_PLACE, starts[bisect_right(starts, start)])
            part = np.empty(stop - start, self.dtype)
            self.tokens.read([(start, part)])  # by position: to map a file takes longer than to read so little of it
            digest.update(np.ascontiguousarray(part, dtype))
        return digest

    def _compute_fingerprint(self) -> str:
        return f"{self.token_fingerprint}:{self.windows.in_text}"

    def serving(self, fingerprint: object) -> BatchReader:
        """Return a reader of the same windows in batches of another size, if the fingerprint is of such."""
        if fingerprint == self.fingerprint:
            return self
        other = copy.copy(self)
        try:
            other.cut(self.windows.resized(Windows.in_fingerprint(fingerprint).size))
        except ArgumentError:  # no stream has batches of that size
            return self
        return other if other.num_records and other.fingerprint == fingerprint else self

    @property
    def has_documents(self) -> bool:
        """Whether it is stored where the documents of a stream begin; else each file counts as one."""
        return bool((self.index.table.values["document_count"] != NOT_KNOWN).all())

    @property
    def document_count(self) -> int:
        """Documents of a stream."""
        return int(np.abs(self.index.table.values["document_count"]).sum())  # NOT_KNOWN is -1: one document

    @property
    def doc_offsets(self) -> npt.NDArray[np.uint64]:
        """The start of each document of a stream and the end of the last one, in its tokens, shape (D + 1,).

        Read from all files at the first call, and kept: 8 bytes for each. `.npy` files have no documents: each counts
        as one.
        """
        if not isinstance(self.record_documents, StreamDocuments):
            raise ArgumentError(f"{self.path}: expected tokens, found the values of a field")
        return self.record_documents.edges()
