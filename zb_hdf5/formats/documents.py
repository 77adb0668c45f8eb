"""The documents of a store, a split, a stream or a lone file: which they are, where they came from, the spans in them.

The document stream of a split is its documents one after the other, in the order of their source, before packing and
shuffling. The offset of a token in it names the token and its document, whatever was shuffled later.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from zb_hdf5.documents.document import Document, Spans
from zb_hdf5.documents.pieces import ranges
from zb_hdf5.errors import BatchIndexError, FormatError
from zb_hdf5.files.open_files import OpenFiles
from zb_hdf5.files.paths import RemotePath, any_path
from zb_hdf5.formats.document_file import DocumentFile, DocumentPart, documents_path, joined_spans, no_spans
from zb_hdf5.formats.span_values import Decode
from zb_hdf5.spec import NO_DOCUMENT


class DocumentTable:
    """The documents of a store, a split of it, a stream or a lone file, by their numbers and by the offsets of tokens.

    Thread-safe, usable after fork, picklable; a file is opened when it is needed, and as many are open as the process
    has room for. Numbers and offsets count over all files: where several splits are read together, over the one split
    and then the next.

    Parameters
    ----------
    folder
        Where the files are.
    parts
        The files, ascending by their first token.
    verify
        As for `TablesFile`.
    """

    def __init__(self, folder: str | os.PathLike[str], parts: Sequence[DocumentPart], verify: str = "auto") -> None:
        self._folder, self.parts, self._verify = any_path(folder), tuple(parts), verify
        self._first_tokens = np.array([part.first_token for part in self.parts], np.uint64)
        self._first_documents = np.array([part.first_document for part in self.parts], np.int64)
        self._reset()

    def _reset(self) -> None:
        self._files: OpenFiles[DocumentFile] = OpenFiles("auto", far=isinstance(self._folder, RemotePath))

    @classmethod
    def beside(cls, path: Path, tokens_sha256: str | None = None, verify: str = "auto") -> Self | None:
        """Return the table of a lone file or a stream, if one lies beside it.

        Raises
        ------
        FormatError
            If it is damaged, or belongs to other tokens.
        """
        if not documents_path(path).exists():
            return None
        file = DocumentFile(documents_path(path), verify=verify)
        known = file.tokens_sha256
        if tokens_sha256 and known != tokens_sha256:
            file.close()
            raise FormatError(
                f"{documents_path(path)}: belongs to another file: expected sha256 of the tokens {tokens_sha256}, "
                f"found {known or 'none'}; restore it"
            )
        table = cls(path.parent, [file.part()], verify)
        table._files.open(0, lambda place: file)
        return table

    def __len__(self) -> int:
        """Return how many documents there are."""
        return self.parts[-1].first_document + self.parts[-1].document_count if self.parts else 0

    @property
    def token_count(self) -> int:
        """Tokens of the document stream."""
        return self.parts[-1].first_token + self.parts[-1].token_count if self.parts else 0

    @property
    def offsets(self) -> npt.NDArray[np.uint64]:
        """Where each document begins and the last one ends, of all files: shape (D + 1,)."""
        ends = [self.file(k).offsets[1:] + np.uint64(part.first_token) for k, part in enumerate(self.parts)]
        return np.concatenate([np.zeros(1, np.uint64), *ends])

    def number_of(self, offsets: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Return the numbers of the documents of tokens, of any shape; -1 for `NO_DOCUMENT`.

        Raises
        ------
        BatchIndexError
            If there is no such token.
        """
        wanted = np.asarray(offsets, np.uint64)
        numbers = np.full(wanted.shape, -1, np.int64)
        real = wanted != np.uint64(NO_DOCUMENT)
        asked = wanted[real]
        if len(asked) and int(asked.max()) >= self.token_count:
            raise BatchIndexError(
                f"{self._folder}: no token {int(asked.max()):,}: its documents have {self.token_count:,}"
            )
        places = self._first_tokens.searchsorted(asked, side="right") - 1
        found = np.empty(len(asked), np.int64)
        for place in np.unique(places).tolist():
            here, part = places == place, self.parts[place]
            local = self.file(place).number_of(asked[here] - np.uint64(part.first_token))
            found[here] = np.where(local < 0, local, local + part.first_document)
        numbers[real] = found
        return numbers

    def document(self, number: int) -> Document:
        """Return what is known of one document.

        Raises
        ------
        BatchIndexError
            If there is none of this number.
        """
        if not 0 <= number < len(self):
            raise BatchIndexError(f"{self._folder}: no document {number:,}: it has {len(self):,}")
        place = int(self._first_documents.searchsorted(number, side="right")) - 1
        part = self.parts[place]
        found = self.file(place).document(number - part.first_document)
        return found._replace(number=number, offset=found.offset + part.first_token)

    def spans(self, start: int, stop: int, codec: str | Decode | None = None) -> Spans:
        """Return the spans that have a token in `start` to `stop` of the document stream: whole, and in order.

        Parameters
        ----------
        codec
            What decodes the values: None: as stored. "pickle" must be named, and a function given for values that one
            has encoded.

        Raises
        ------
        BackendError
            If the values cannot be decoded without `codec`.
        FormatError
            If a value cannot be decoded.
        """
        start, stop = max(start, 0), min(stop, self.token_count)
        if start >= stop:
            return no_spans()
        return self.spans_of(np.array([start], np.uint64), np.array([stop], np.uint64), codec)

    def spans_of(
        self, starts: npt.NDArray[np.uint64], stops: npt.NDArray[np.uint64], codec: str | Decode | None = None
    ) -> Spans:
        """Return the spans that have a token in some stretches, as `spans` does: each once, and in order.

        Parameters
        ----------
        starts, stops
            The stretches, uint64: none is empty, they ascend, and no two share a token.

        Raises
        ------
        BackendError, FormatError
            As `spans`, and if the spans do not ascend.
        """
        if len(self.parts) == 1 and not self.parts[0].first_token:
            return self.file(0).spans(starts, stops, codec)
        firsts = np.maximum(self._first_tokens.searchsorted(starts, side="right") - 1, 0)
        ends = self._first_tokens.searchsorted(stops)
        found = []
        for place in np.unique(ranges(firsts, ends - firsts)).tolist():
            base = np.uint64(self.parts[place].first_token)
            first, end = int(ends.searchsorted(place, side="right")), int(firsts.searchsorted(place, side="right"))
            begins = np.maximum(starts[first:end], base) - base
            here = self.file(place).spans(begins, stops[first:end] - base, codec)
            found.append(Spans(here.starts + base, here.stops + base, here.values))
        return joined_spans(found)

    def file(self, place: int) -> DocumentFile:
        """Return the file of one part."""
        return self._files.known.get(place) or self._files.open(place, self._open)

    def _open(self, place: int) -> DocumentFile:
        part = self.parts[place]
        return DocumentFile(self._folder / part.path, part, self._verify)

    def open_files(self) -> Iterator[DocumentFile]:
        """Open the files one after the other, for who closes each of them."""
        return map(self._open, range(len(self.parts)))

    def close(self) -> None:
        for file in self._files.files().values():
            file.close()
        self._reset()

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_files"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()
