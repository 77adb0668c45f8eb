"""The records of a store by their numbers, each a dictionary of NumPy arrays: a random-access data source of grain."""

from __future__ import annotations

import operator
import os
from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Any, Final, Self, SupportsIndex, overload

import numpy as np
import numpy.typing as npt

from zb_hdf5.documents.pieces import IGNORED_TARGET, Pieces, document_ids, position_ids, ranges
from zb_hdf5.errors import ArgumentError, BatchIndexError, positive, require_choice
from zb_hdf5.files.named_splits import AUTO_SPLIT
from zb_hdf5.files.paths import on_failure
from zb_hdf5.formats.batches import Batches
from zb_hdf5.formats.corpus import Corpus
from zb_hdf5.loaders.loader_options import LabelsWay
from zb_hdf5.loaders.step_field import OF_DOCUMENTS, OF_RECORDS, StepField
from zb_hdf5.loaders.step_values import WantedFields, wanted_fields
from zb_hdf5.loaders.stored_targets import StoredTargets, has_targets, values_of
from zb_hdf5.read_as import AS_STORED, ReadAs
from zb_hdf5.store.opening import open_for_loader

#: The arrays about the documents of a record that have a value for each token.
POSITION_IDS: Final = "position_ids"
DOCUMENT_IDS: Final = "document_ids"
DOCUMENT_ARRAYS: Final = (POSITION_IDS, DOCUMENT_IDS)


class RecordValues:
    """The values of records of a store, gathered by the numbers of the records. As thread-safe as the reader.

    Parameters
    ----------
    reader
        The store.
    fields, documents, metadata, labels
        As for `StoreRecords`.
    """

    def __init__(
        self,
        reader: Batches,
        *,
        fields: WantedFields = (),
        documents: bool | Collection[str] = False,
        metadata: bool = False,
        labels: str | None = None,
    ) -> None:
        self.reader = reader
        self._documents = _names_of_documents(documents)
        self._metadata = metadata
        self._targets = StoredTargets(reader, labels) if has_targets(reader) else None
        self._fields = {name: self._opened(stored) for name, stored in wanted_fields(fields).items()}
        if self._documents or metadata:
            reader.read_pieces(np.empty(0, np.int64))  # names what is missing
        if metadata:
            reader.corpus.require_documents()

    def of(self, numbers: npt.NDArray[np.int64]) -> dict[str, Any]:
        """Return the values of some records by their names, each with a value or row for each record."""
        reader = self.reader
        tokens = values_of(reader, numbers).astype(np.int64)
        labels = tokens.copy()
        if self._targets is not None:
            labels = self._targets.labels_of(tokens, lambda name: values_of(reader.field(name), numbers))
        if reader.num_context:
            labels[numbers > 0, : reader.overlap] = IGNORED_TARGET  # they are labels of the record before
        found: dict[str, Any] = {"input_ids": tokens, "labels": labels}
        for name, field in self._fields.items():
            read = field.of_records if field.unit == OF_RECORDS else field.of_all
            found[name] = read(numbers, len(numbers))
        if self._documents or self._metadata or reader.has_padding:
            self._add_documents(found, reader.read_pieces(numbers))
        return found

    def _opened(self, stored: str) -> StepField:
        """Open a field; `ArgumentError` if it is not there, or records have no values of it."""
        reader = self.reader
        field = StepField(reader, stored, reader.seq_len, reader.seq_len, has_targets=False)
        if field.unit == OF_RECORDS:
            field.require_fit()
        elif field.unit == OF_DOCUMENTS:
            raise ArgumentError(f"{reader.path}: {stored} has a value for each document, and a record has none")
        return field

    def _add_documents(self, found: dict[str, Any], pieces: Pieces) -> None:
        """Add the values of documents, and take labels away where nothing is learned."""
        padding = pieces.is_padding
        flat = found["labels"].reshape(-1)
        flat[ranges(pieces.starts[padding], pieces.lengths[padding])] = IGNORED_TARGET
        if self._documents:
            flat[pieces.starts] = IGNORED_TARGET
        if POSITION_IDS in self._documents:
            found[POSITION_IDS] = position_ids(pieces).astype(np.int64)
        if DOCUMENT_IDS in self._documents:
            found[DOCUMENT_IDS] = _numbers_in_records(pieces)
        if self._metadata:
            found["metadata"] = self._metadata_of(pieces)

    def _metadata_of(self, pieces: Pieces) -> list[list[dict[str, Any]]]:
        """Return the metadata of the document of each piece of each record."""
        table = self.reader.corpus.require_documents()
        numbers = table.number_of(pieces.offsets).tolist()
        known: dict[int, dict[str, Any]] = {-1: {}}
        for number in numbers:
            if number not in known:
                known[number] = table.document(number).metadata
        edges = pairwise(pieces.ends.tolist())
        return [[known[number] for number in numbers[first:last]] for first, last in edges]


def _numbers_in_records(pieces: Pieces) -> npt.NDArray[np.int64]:
    """Return the number of the piece of each token in its record, from 0; -1 for padding."""
    found = document_ids(pieces).astype(np.int64)
    return np.where(found < 0, found, found - pieces.ends[:-1, np.newaxis])


def _names_of_documents(documents: bool | Collection[str]) -> tuple[str, ...]:
    if isinstance(documents, bool):
        return DOCUMENT_ARRAYS if documents else ()
    if isinstance(documents, str) or not isinstance(documents, Collection):
        raise ArgumentError(f"documents must be True or names of {', '.join(DOCUMENT_ARRAYS)}, found {documents!r}")
    for name in documents:
        require_choice("documents", name, DOCUMENT_ARRAYS)
    return tuple(documents)


class StoreRecords(Sequence[dict[str, Any]]):
    """All records of a store, by their numbers in stored order: a data source for `grain.MapDataset.source` and others.

    A record is a dictionary of arrays: `input_ids` and `labels`, int64 of shape (seq_len,), and others that are asked
    for. It is for libraries that choose the order themselves, and needs no torch; `Loader.records` gives tensors.
    Thread-safe, usable after fork, picklable (a copy reopens the files by their paths).

    Labels are the tokens, as models take them that shift the labels, or the fields `labels` and `loss_mask` of the
    store. They are -100 for tokens that teach nothing; so is padding, in stores that keep which columns are padding.

    Parameters
    ----------
    source
        A path for `open_corpus`, a corpus, or batches of one. The source closes what it has opened itself.
    seq_len
        Tokens of a record of a token stream. Records of a store have the length that they are stored with.
    fields
        Names of fields, or the name of each in a record and that of the field: their values are added by these names,
        as they are stored, shape (seq_len, ...); a field set with one value for each record gives shape (...).
    documents
        Names of arrays to add about the parts of documents in the record, or True for both: `position_ids`, from 0 in
        each part, and `document_ids`, which count the parts of the record from 0 and are -1 for padding; int64, shape
        (seq_len,). With any of them the first token of each part has the label -100, as no token before it is of its
        document.
    metadata
        True: add `metadata`, a list with the metadata of the document of each part, {} for padding.
    labels, split
        As for `Loader`.
    read_as
        As for `open_corpus`, for a path alone.

    Raises
    ------
    ArgumentError
        If a token stream comes without `seq_len`, a store with another one than its own, or no such field is stored.
    BackendError
        If documents are asked for, and none are stored.

    Examples
    --------
    >>> source = StoreRecords("data/train", fields=("loss_mask",))              # doctest: +SKIP
    >>> batches = grain.MapDataset.source(source).shuffle(seed=1).batch(8)      # doctest: +SKIP
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | Corpus | Batches,
        *,
        seq_len: int | None = None,
        fields: WantedFields = (),
        documents: bool | Collection[str] = False,
        metadata: bool = False,
        labels: LabelsWay | None = None,
        split: str | None = AUTO_SPLIT,
        read_as: ReadAs = AS_STORED,
    ) -> None:
        batches, self._closes = open_for_loader(source, 1, seq_len, split=split, read_as=read_as)
        self.batches: Batches = batches
        with on_failure(self.close):
            if positive("seq_len", seq_len) not in (None, batches.seq_len):
                raise ArgumentError(
                    f"{batches.path}: expected seq_len={batches.seq_len}, as its records are stored, found {seq_len}"
                )
            self._values = RecordValues(batches, fields=fields, documents=documents, metadata=metadata, labels=labels)

    def __len__(self) -> int:
        """Return the number of records."""
        return self.batches.num_records

    @overload
    def __getitem__(self, number: SupportsIndex) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, number: slice) -> list[dict[str, Any]]: ...

    def __getitem__(self, number: SupportsIndex | slice) -> dict[str, Any] | list[dict[str, Any]]:
        """Return a record, or some in a list; negative numbers count from the end.

        Raises
        ------
        BatchIndexError
            If no record has this number.
        """
        if isinstance(number, slice):
            return self._getitems(range(*number.indices(len(self))))
        wanted = operator.index(number)
        place = wanted + len(self) if wanted < 0 else wanted
        if not 0 <= place < len(self):
            raise BatchIndexError(f"{self.batches.path}: no record {wanted:,}: it has {len(self):,}, counted from 0")
        return self._getitems([place])[0]

    def _getitems(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """Return several records, gathered at once: grain asks for some together by this name."""
        values = self._values.of(np.fromiter(numbers, np.int64, len(numbers)))
        return [{name: each[place] for name, each in values.items()} for place in range(len(numbers))]

    def close(self) -> None:
        """Close the corpus, if this source has opened it."""
        if self._closes:
            self.batches.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({str(self.batches.path)!r}, {len(self):,} records of {self.batches.seq_len} tokens)"
        )
