"""Reads the documents of a step and lays them into one batch: tokens, targets, fields, boundaries, spans."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from zb_hdf5.documents.segments import PADDING_ID, cu_seqlens, ignore, max_seqlen, position_ids, targets
from zb_hdf5.documents.spans import WantedSpans, reading, spans_of_pieces
from zb_hdf5.errors import ArgumentError
from zb_hdf5.loaders.document_batches import Documents, FieldColumn, gather, packed_pieces, padded_pieces
from zb_hdf5.loaders.extras import as_tensor
from zb_hdf5.loaders.order import IndexArray
from zb_hdf5.store.stream_documents import MmapTokenStore


class Collation(NamedTuple):
    """How documents become a batch: see `DocumentLoader`."""

    collate: str
    multiple: int
    pad_token_id: int
    targets: bool
    loss_mask: str | None
    fields: tuple[str, ...]
    spans: WantedSpans
    dtype: np.dtype[Any]
    #: Offsets of the documents whose tokens are no targets.
    masked: npt.NDArray[np.uint64]


class DocumentBatches(NamedTuple):
    """Reads batches. Knows no loader, so that threads that read ahead end with it. Thread-safe."""

    store: MmapTokenStore
    columns: dict[str, FieldColumn]
    documents: Documents
    how: Collation

    def read(self, documents: IndexArray) -> dict[str, Any]:
        """Return the batch of these documents, numbered as in `Documents`."""
        starts, lengths = self.documents.starts(documents), self.documents.lengths(documents)
        packed = self.how.collate == "pack"
        pieces = (packed_pieces if packed else padded_pieces)(starts, lengths, self.how.multiple)
        read = {name: gather(column, pieces) for name, column in self.columns.items()}
        values = {"tokens": gather(self.store, pieces, self.how.pad_token_id, self.how.dtype)}
        if self.how.targets:
            mask = None if self.how.loss_mask is None else read[self.how.loss_mask]
            values["targets"] = targets(values["tokens"], pieces, mask)
            if len(self.how.masked):
                ignore(values["targets"], pieces, np.isin(pieces.offsets, self.how.masked))
        values |= {name: read[name] for name in self.how.fields}
        others: dict[str, Any] = {}
        if self.how.spans:
            read_spans = reading(self.store.documents, self.how.spans)
            others["spans"], values["span_index"] = spans_of_pieces(pieces, read_spans)
        if packed:
            values["position_ids"] = position_ids(pieces)
            values = {name: rows[0] for name, rows in values.items()} | {"cu_seqlens": cu_seqlens(pieces)}
            others["max_seqlen"] = max_seqlen(pieces)
            lengths = pieces.lengths
        padding = np.full(len(lengths) - len(documents), PADDING_ID)
        values["documents"] = np.concatenate([self.documents.numbers(documents), padding])
        values["seq_lens"] = lengths.astype(np.int32)
        return {name: as_tensor(array) for name, array in values.items()} | others

    def close(self) -> None:
        for store in (self.store, *(column.values for column in self.columns.values())):
            store.close()


def open_batches(store: MmapTokenStore, documents: Documents, how: Collation) -> DocumentBatches:
    """Return what reads the batches.

    Raises
    ------
    ArgumentError
        If a field is not there, or is no mask.
    """
    if how.loss_mask is not None and not how.targets:
        raise ArgumentError(f"loss_mask={how.loss_mask!r} says which targets count; pass targets=True too")
    masks = () if how.loss_mask is None else (how.loss_mask,)
    shapes = {field.name: field.shape for field in store.fields}
    columns = {}
    for name in dict.fromkeys((*how.fields, *masks)):
        columns[name] = FieldColumn(store.field(name), shapes[name])
        if name in masks and (columns[name].shape or columns[name].values.dtype.kind not in "biuf"):
            raise ArgumentError(
                f"{store.path}: expected loss_mask to name a field of one number for each token, found {name!r}, "
                f"{columns[name].values.dtype} of shape {columns[name].shape}"
            )
    return DocumentBatches(store, columns, documents, how)
