"""Flat files as a source of documents: cut at a boundary token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from zb_hdf5.converters.conversion import InputOptions
from zb_hdf5.converters.least_dtype import NOT_NAMED
from zb_hdf5.files.field_files import require_one_dtype
from zb_hdf5.formats.document_source import DocumentFilter, DocumentGroup, DocumentSource, TokenizedDocuments
from zb_hdf5.formats.flat import open_ids
from zb_hdf5.formats.flat_facts import FlatFacts
from zb_hdf5.spec import TokenArray, fitting_dtype, stored_dtype

#: Tokens in which boundary tokens are looked for at once; documents that end in them are written together.
BLOCK_TOKENS: Final = 1 << 22
#: Tokens of a part of a file whose documents are a group.
PART_TOKENS: Final = 1 << 26


class _Part(NamedTuple):
    """A part of a file: the documents that begin in it are a group."""

    start: int
    stop: int
    row: int  # of the first document that begins in it, counted from 1


class CutSource(DocumentSource):
    """Flat files, cut into documents at a boundary token, which is the last one of each, or the first one.

    Tokens before the first boundary token, or after the last one, are a document without one.

    Parameters
    ----------
    files
        The facts of the files.
    name
        Their format.
    options
        The boundary token, its side, the size of the vocabulary, and the ids of files without a header.
    dtype
        The dtype; "auto": the smallest one that the files or the size of the vocabulary prove to hold all ids, and that
        holds the boundary token; "keep": the smallest one that the files prove.
    """

    tokenizer = ""
    has_ids = False

    def __init__(self, files: Sequence[FlatFacts], name: str, options: InputOptions, dtype: str = "auto") -> None:
        self.paths = [file.path for file in files]
        self._files = list(files)
        self._boundary = options.boundary
        self.boundary_token_id = options.boundary_token_id or 0
        self.vocab_size = options.vocab_size
        require_one_dtype([(file.path, file.dtype) for file in files], self.paths)
        num_added = self.boundary_token_id + 1
        proving_size = 0 if dtype == "keep" else self.vocab_size
        fitting = fitting_dtype((file.dtype for file in files), proving_size, num_added)
        self.dtype = fitting if dtype in NOT_NAMED else stored_dtype(dtype)
        self._parts = [self._parts_of(number) for number in range(len(self._files))]
        self.groups = [
            DocumentGroup(number, group, size, size)
            for number, parts in enumerate(self._parts)
            for group, part in enumerate(parts)
            for size in [(part.stop - part.start) * self._files[number].dtype.itemsize]
        ]
        self.description = {
            "format": name,
            "files": [str(path) for path in self.paths],
            "boundary_token_id": self.boundary_token_id,
            "boundary": self._boundary,
            **options.headerless,
        }
        self.suspects = options.suspects
        self.identity: dict[str, Any] = {"dtype": self.dtype.name, "vocab_size": self.vocab_size}

    def _parts_of(self, number: int) -> list[_Part]:
        """Cut a file into groups. A large one is read for it: documents are known by their rows in the file."""
        num_tokens = self._files[number].num_tokens
        parts: list[_Part] = []
        row = 1
        for start in range(0, max(1, num_tokens), PART_TOKENS):
            parts.append(_Part(start, min(start + PART_TOKENS, num_tokens), row))
            if parts[-1].stop < num_tokens:
                row += sum(map(len, self._starts(number, start, parts[-1].stop)))
        return parts

    def _starts(self, number: int, start: int, stop: int) -> Iterator[npt.NDArray[np.int64]]:
        """Yield the first tokens of the documents that begin in a part of a file, all of a block at once."""
        tokens = _mapped(self._files[number])
        shift = int(self._boundary == "after")
        for block in range(start, stop, BLOCK_TOKENS):
            first = max(block, 1)  # token 0 begins a document, whatever it is
            end = min(block + BLOCK_TOKENS, stop)
            found = np.flatnonzero(tokens[first - shift : end - shift] == self.boundary_token_id) + first
            yield found if block else np.concatenate([[0], found])

    def read(
        self, group: DocumentGroup, choose: DocumentFilter | None, num_threads: int
    ) -> Iterator[TokenizedDocuments]:
        file = self._files[group.file_number]
        part = self._parts[group.file_number][group.number]
        tokens = _mapped(file)
        first = part.row
        for edges in self._edges(group.file_number, part):
            start = int(edges[0])
            stop = int(edges[-1])
            lengths = np.diff(edges)
            rows = np.arange(first, first + len(lengths), dtype=np.uint64)
            first += len(lengths)
            chosen = tokens[start:stop]
            if choose is not None:
                wanted = choose(len(lengths))
                chosen = chosen[np.repeat(wanted, lengths)]
                lengths = lengths[wanted]
                rows = rows[wanted]
            yield TokenizedDocuments(
                chosen, lengths, str(file.path), rows, read=(stop - part.start) * file.dtype.itemsize
            )

    def _edges(self, number: int, part: _Part) -> Iterator[npt.NDArray[np.int64]]:
        """Yield the starts of documents that begin in a part and end in one block, and the end of the last of them."""
        begun = np.empty(0, np.int64)
        for starts in self._starts(number, part.start, part.stop):
            edges = np.concatenate([begun, starts])
            if len(edges) > 1:
                yield edges
            begun = edges[-1:]
        if len(begun):
            num_tokens = self._files[number].num_tokens
            later = (int(starts[0]) for starts in self._starts(number, part.stop, num_tokens) if len(starts))
            yield np.append(begun, next(later, num_tokens))


def _mapped(file: FlatFacts) -> TokenArray:
    """Map the tokens of a file, of the dtype that they have in it."""
    view = open_ids(file.path, file, "mmap").view(0, file.num_tokens) if file.num_tokens else None
    return np.empty(0, file.dtype) if view is None else view
