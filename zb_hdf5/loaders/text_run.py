"""The endless run of tokens of one rank: row groups of text, tokenized one after the other, cut into equal runs.

A place in it is (epoch, row group, document, token), so that it names the next token exactly, however documents were
grouped for the tokenizer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import chain, count
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import FormatError, StateError
from zb_hdf5.text.corpus import ParquetFile
from zb_hdf5.text.tokenizers import Tokenizer, with_boundaries

#: Text that is tokenized at once: enough work for some threads, little memory.
PIECE_CHARACTERS: Final = 1 << 17


class Place(NamedTuple):
    """The next token of a rank: `token` counts the tokens of its document, the boundary token included, from 0."""

    epoch: int
    row_group: int
    document: int
    token: int


class Piece(NamedTuple):
    """Tokens of consecutive documents of one row group, the first of which is number `document`."""

    epoch: int
    row_group: int
    document: int
    tokens: npt.NDArray[np.uint32]
    ends: npt.NDArray[np.int64]

    def place(self, offset: int) -> Place:
        """Return the place of one of the tokens, or of what follows the last one."""
        number = int(np.searchsorted(self.ends, offset, side="right"))
        start = int(self.ends[number - 1]) if number else 0
        return Place(self.epoch, self.row_group, self.document + number, offset - start)


class TokenRun:
    """The endless run of tokens of one rank, for one thread at a time.

    `row_groups` maps the number among the row groups of all ranks to the file and the number in it, ascending.
    """

    def __init__(
        self,
        row_groups: dict[int, tuple[ParquetFile, int]],
        num_row_groups: int,
        tokenizer: Tokenizer,
        boundary_token_id: int,
        boundary_position: str,
        num_threads: int,
    ) -> None:
        self.row_groups, self.num_row_groups = row_groups, num_row_groups
        self.start = Place(0, min(row_groups, default=0), 0, 0)
        self._tokenizer, self._num_threads = tokenizer, num_threads
        self._boundary = (boundary_token_id, boundary_position)

    def batches(self, place: Place, tokens: int, overlap: int) -> Iterator[tuple[npt.NDArray[np.uint32], Place]]:
        """Return runs of `tokens + overlap` tokens, each `tokens` after the one before, and the place of the next.

        Raises
        ------
        StateError
            If there is no such place. What is checked here is not tokenized a second time.
        """
        pieces = self._pieces(place)
        first = next(pieces)
        if place.token and first.place(place.token) != place:
            raise StateError(
                f"{self.row_groups[place.row_group][0].path}: state: expected token within document "
                f"{place.document:,} of row group {place.row_group:,}, found {place.token:,}"
            )
        return self._cut(chain([first], pieces), place.token, tokens, overlap)

    @staticmethod
    def _cut(
        pieces: Iterator[Piece], offset: int, tokens: int, overlap: int
    ) -> Iterator[tuple[npt.NDArray[np.uint32], Place]]:
        waiting: deque[Piece] = deque()
        while True:
            while sum(len(piece.tokens) for piece in waiting) - offset < tokens + overlap:
                waiting.append(next(pieces))
            ready = np.concatenate([piece.tokens for piece in waiting]) if len(waiting) > 1 else waiting[0].tokens
            run = ready[offset : offset + tokens + overlap]
            offset += tokens
            while len(waiting) > 1 and offset >= len(waiting[0].tokens):
                offset -= len(waiting.popleft().tokens)
            yield run, waiting[0].place(offset)

    def _pieces(self, place: Place) -> Iterator[Piece]:
        """Yield all documents from that of `place` on, epoch after epoch."""
        for epoch in count(place.epoch):
            empty = True
            for number in self.row_groups:
                if (epoch, number) >= (place.epoch, place.row_group):
                    skip = place.document if (epoch, number) == (place.epoch, place.row_group) else 0
                    for piece in self._pieces_of_row_group(epoch, number, skip):
                        empty = False
                        yield piece
            if empty and epoch > place.epoch:
                file, _ = self.row_groups[self.start.row_group]
                raise FormatError(f"{file.path.parent}: no row group of rank {self.start.row_group} has a document")

    def _pieces_of_row_group(self, epoch: int, number: int, skip: int) -> Iterator[Piece]:
        file, number_in_file = self.row_groups[number]
        document = 0
        for block in file.row_group(number_in_file):
            texts = block.texts[max(0, skip - document) :]
            document += len(block.texts) - len(texts)
            for some in _runs(texts):
                tokens, lengths = self._tokenizer.encode(some, self._num_threads)
                tokens, lengths = with_boundaries(tokens, lengths, *self._boundary)
                yield Piece(epoch, number, document, tokens, np.cumsum(lengths))
                document += len(some)
        if document < skip:
            raise StateError(
                f"{file.path}: state: expected document in 0..{document:,}, the documents of row group {number:,}, "
                f"found {skip:,}"
            )


def _runs(texts: list[str]) -> Iterator[list[str]]:
    """Cut into runs that end with the text that reaches `PIECE_CHARACTERS`."""
    start = characters = 0
    for stop, text in enumerate(texts, 1):
        characters += len(text)
        if characters >= PIECE_CHARACTERS or stop == len(texts):
            yield texts[start:stop]
            start, characters = stop, 0
