"""A token stream as one long sequence of tokens, with its documents."""

from __future__ import annotations

import os
from typing import Self

from zb_hdf5.documents.document_table import DocumentTable
from zb_hdf5.errors import BatchIndexError, FormatError
from zb_hdf5.formats.windows import Windows
from zb_hdf5.spec import TokenArray
from zb_hdf5.store.holders import look
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
    boundary_token_id, vocab_size, tokenizer
        As stored; -1, 0 and "" where unknown.
    """

    documents: DocumentTable  # each stream has them

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        split: str | None = None,
        access: str = "auto",
        verify: str = "auto",
        dataset: str | None = None,
    ) -> None:
        opening = look(path, split=split, access=access, verify=verify, dataset=dataset)
        index = opening.stream_index()
        if verify == "store":
            opening.compare_digests()
        super().__init__(
            opening.path,
            index,
            Windows.of(1, 1),
            access=access,
            verify=verify,
            dataset=dataset,
            columns=opening.columns,
        )
        self._split = split
        self.boundary_token_id = index.meta.boundary_token_id
        self.vocab_size = index.meta.vocab_size
        self.tokenizer = index.meta.tokenizer
        self.fields = index.meta.fields

    def document(self, number: int) -> TokenArray:
        """Return the tokens of one document, its boundary token included."""
        if not 0 <= number < self.document_count:
            raise BatchIndexError(f"{self.path}: no document {number:,}: it has {self.document_count:,}")
        start, stop = self.doc_offsets[number : number + 2].tolist()
        return self.get_slice(start, stop)

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
            fresh = type(self)(self.path, split=self._split, **self._options)
            if fresh.num_tokens < self.num_tokens:
                raise FormatError(
                    f"{self.path}: was replaced: expected at least {self.num_tokens:,} tokens, found "
                    f"{fresh.num_tokens:,}; open it again"
                )
            self._follow(fresh)
        return self.num_tokens

    def _follow(self, fresh: Self) -> None:
        """See what another look at the same stream has found."""
        # the tokens before the counts: a thread that reads meanwhile never counts tokens that its files do not have;
        # the files of before close when the last thread that reads from them has finished
        self._shards = fresh._shards
        self.tokens = fresh.tokens
        self.record_documents = fresh.record_documents
        self._fields = {}
        self.index = fresh.index
        self.meta = fresh.meta
        self._fingerprint = None
        self.complete = fresh.complete
        self.max_token = fresh.max_token
        self.num_batches = fresh.num_batches
