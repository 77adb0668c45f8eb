"""Groups of documents, by their sources or by the words of a field set, and the tokens of each group in records.

All follows from columns of the documents and the pieces of records: no token is read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from zb_hdf5.commands.rows import RECORDS_AT_ONCE
from zb_hdf5.console import Progress
from zb_hdf5.errors import ArgumentError
from zb_hdf5.field import UNITS
from zb_hdf5.formats.batches import Batches
from zb_hdf5.formats.corpus import Corpus
from zb_hdf5.loaders.order import IndexArray
from zb_hdf5.loaders.step_values import META, META_MARK, code_field

#: Documents whose groups are looked up at once.
DOCUMENTS_AT_ONCE: Final = 1 << 18
#: Records whose pieces may stay in mapped files, whose pages count as memory.
RECORDS_KEPT: Final = 1 << 18


class GroupCounts(NamedTuple):
    """The tokens and the documents of each group; of documents in no group, and of padding as one, at the end."""

    tokens: IndexArray
    documents: IndexArray


class DocumentGroups(NamedTuple):
    """The groups of the documents of a corpus, in columns: 12 bytes for each document.

    Attributes
    ----------
    names
        The names of the groups.
    edges
        The start of each document, and the end of the last one.
    groups
        The group of each document, by the place of its name: that after all names for a document in no group. The last
        one is that of padding, after both.
    """

    names: list[str]
    edges: npt.NDArray[np.uint64]
    groups: npt.NDArray[np.int32]

    @classmethod
    def of(cls, corpus: Corpus, by: str) -> Self:
        """Return the groups of the documents of a corpus: "source", or "meta:<field set>" for the words of one.

        Raises
        ------
        ArgumentError
            If the documents name no sources, or the field set has no words of documents.
        BackendError
            If no documents are stored.
        NotFoundError
            If there is no such field set.
        """
        table = corpus.require_documents()
        kind, _, name = by.partition(META_MARK)
        names, group_of = _words(corpus, name) if kind == META else _sources(corpus)
        groups = np.empty(len(table) + 1, np.int32)
        for start in range(0, len(table), DOCUMENTS_AT_ONCE):
            stop = min(start + DOCUMENTS_AT_ONCE, len(table))
            found = group_of(start, stop)
            groups[start:stop] = np.where(found < 0, len(names), found)
        groups[-1] = len(names) + 1
        edges = table.offsets
        table.close()  # pages of its mapped files count as memory
        return cls(names, edges, groups)

    def counts_of_all(self) -> GroupCounts:
        """Count the tokens and documents of each group in the document stream."""
        tokens = np.zeros(len(self.names) + 2, np.int64)
        for start in range(0, len(self.groups) - 1, DOCUMENTS_AT_ONCE):
            edges = self.edges[start : start + DOCUMENTS_AT_ONCE + 1].view(np.int64)
            lengths = edges[1:] - edges[:-1]
            tokens += self._sums(self.groups[start : start + len(lengths)], lengths)
        return GroupCounts(tokens, self._documents(np.ones(len(self.groups), np.bool_)))

    def counts_in(
        self, batches: Batches, times: npt.NDArray[np.uint32], seq_len: int, progress: Progress
    ) -> tuple[GroupCounts, IndexArray]:
        """Count the tokens and documents of each group in records, and its tokens in all: of stored records, or of a
        stream.

        Parameters
        ----------
        batches
            The batches that have the records.
        times
            How often each record of `seq_len` tokens is counted.
        seq_len
            As for `Batches.read_pieces`.
        progress
            Shows how far it is.
        """
        is_stream = batches.corpus.is_stream
        records = np.flatnonzero(times) if is_stream else np.arange(len(times))
        tokens = np.zeros(len(self.names) + 2, np.int64)
        whole = self.counts_of_all().tokens if is_stream else np.zeros_like(tokens)
        is_seen = np.zeros(len(self.groups), np.bool_)
        documents = None if is_stream else batches.corpus.record_documents
        progress.begin("count", len(records), "records")
        for start in range(0, len(records), RECORDS_AT_ONCE):
            some = records[start : start + RECORDS_AT_ONCE]
            pieces = batches.read_pieces(some, seq_len)
            if batches.overlap:  # the last token of windows that share some is a target only
                pieces = pieces.first_columns(seq_len - 1)
            order = pieces.offsets.argsort()  # a search for ascending numbers takes a tenth of the time
            # padding has the largest offset of all, and so the number after that of the last document
            numbers = self.edges.searchsorted(pieces.offsets[order], side="right") - 1
            groups = self.groups[numbers]
            lengths = pieces.lengths[order]
            taken = times[some][pieces.rows[order]]
            tokens += self._sums(groups, lengths * taken)
            is_seen[numbers[taken > 0]] = True
            if not is_stream:
                whole += self._sums(groups, lengths)
            if documents is not None and start % RECORDS_KEPT == 0:
                documents.close()  # they are opened again
            progress.advance(len(some))
        return GroupCounts(tokens, self._documents(is_seen)), whole

    def _documents(self, is_seen: npt.NDArray[np.bool_]) -> IndexArray:
        """Return the documents of each group that were seen."""
        found = np.zeros(len(self.names) + 2, np.int64)
        for start in range(0, len(is_seen), DOCUMENTS_AT_ONCE):
            here = slice(start, start + DOCUMENTS_AT_ONCE)
            found += self._sums(self.groups[here][is_seen[here]])
        return found

    def _sums(self, groups: npt.NDArray[np.int32], weights: IndexArray | None = None) -> IndexArray:
        """Return the sum of the weights in each group; without weights how many there are."""
        return np.bincount(groups, weights, len(self.names) + 2).astype(np.int64)


#: Returns the places of the groups of documents, from one number to another; -1: in none.
GroupOf = Callable[[int, int], npt.NDArray[Any]]


def _sources(corpus: Corpus) -> tuple[list[str], GroupOf]:
    """Return the names of the sources of documents, and the source of each document."""
    table = corpus.require_documents()
    names = table.sources
    if not names:
        raise ArgumentError(f"{corpus.path}: its documents name no sources")
    return names, lambda start, stop: table.source_of(np.arange(start, stop))


def _words(corpus: Corpus, name: str) -> tuple[list[str], GroupOf]:
    """Return the words of a field set, and the word of each document."""
    values = corpus.field(code_field(name))
    field = values.meta.field
    if field is None or field.unit != UNITS[2] or not values.words:
        raise ArgumentError(f"{corpus.path}: the field set {name!r} has no words of documents")
    words = values.words
    padding = field.padding

    def group_of(start: int, stop: int) -> npt.NDArray[Any]:
        codes = np.empty(stop - start, values.dtype)
        values.tokens.read([(start, codes)])
        return np.where((codes == padding) | (codes >= len(words)), -1, codes.astype(np.int32))

    return [*words], group_of
