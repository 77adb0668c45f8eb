"""A token stream as one long sequence of tokens, with its documents."""

from __future__ import annotations

import os

from zb_hdf5.documents.document_table import DocumentTable
from zb_hdf5.errors import BatchIndexError, FormatError, counted
from zb_hdf5.field import Field
from zb_hdf5.files.named_splits import AUTO_SPLIT
from zb_hdf5.formats.windows import Windows
from zb_hdf5.read_as import AS_STORED, ReadAs
from zb_hdf5.spec import TokenArray
from zb_hdf5.store.found_path import found_at
from zb_hdf5.store.found_reader import compare_digests, stream_index
from zb_hdf5.store.shards import ReadOptions
from zb_hdf5.store.window_reader import WindowReader


class TokenStream(WindowReader):
    """One long sequence of tokens over the files of a stream, which may grow, and its documents.

    Thread-safe, usable after fork, picklable. Files are opened when they are first read, and as many of them stay open
    as the process may have. It is a reader whose batches are single tokens: `len` counts tokens. The arguments are
    those of `open_stream`.

    Attributes
    ----------
    has_documents
        Whether it is stored where documents begin; else each file counts as one.
    num_tokens
        Up to `token_count` of each file: the padding of its last chunk is never shown.
    """

    documents: DocumentTable  # each stream has them

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        split: str | None = AUTO_SPLIT,
        access: str = "auto",
        verify: str = "auto",
        read_as: ReadAs = AS_STORED,
    ) -> None:
        how = ReadOptions(access=access, verify=verify, read_as=read_as)
        found = found_at(path, split=split, **how)
        index = stream_index(found)
        compare_digests(found)
        super().__init__(
            found.path,
            index,
            Windows.of(1, 1),
            found=found.known,
            **how,
        )
        self._split = split

    @property
    def boundary_token_id(self) -> int:
        """The token between documents, as stored; -1: not known."""
        return self.index.meta.boundary_token_id

    @property
    def vocab_size(self) -> int:
        """The size of the vocabulary, as stored; 0: not known."""
        return self.index.meta.vocab_size

    @property
    def tokenizer(self) -> str:
        """The name of the tokenizer, as stored; "": not known."""
        return self.index.meta.tokenizer

    @property
    def fields(self) -> tuple[Field, ...]:
        """The fields of the tokens."""
        return self.index.meta.fields

    def document(self, number: int) -> TokenArray:
        """Return the tokens of one document, its boundary token included."""
        if not 0 <= number < self.document_count:
            raise BatchIndexError(f"{self.path}: no document {number:,}: it has {self.document_count:,}")
        start, stop = self.doc_offsets[number : number + 2].tolist()
        return self.get_slice(start, stop)

    def __repr__(self) -> str:
        files = counted(len(self.paths), "file")
        facts = f"{self.num_tokens} tokens of {self.dtype.name} in {files}, access={self.access!r}"
        return f"{type(self).__name__}({str(self.path)!r}, {facts})"

    def refresh(self) -> int:
        """See the tokens that were committed since the stream was opened.

        Any thread may call it while others read.

        Returns
        -------
        int
            `num_tokens`, which never become fewer.

        Raises
        ------
        FormatError
            If this is another stream now.
        """
        with self._changing:
            found = found_at(self.path, split=self._split, **self._options)
            index = stream_index(found)
            compare_digests(found)
            if index.token_count < self.num_tokens:
                raise FormatError(
                    f"{self.path}: was replaced: expected at least {self.num_tokens:,} tokens, found "
                    f"{index.token_count:,}; open it again"
                )
            self.follow(index, found.known)
        return self.num_tokens
