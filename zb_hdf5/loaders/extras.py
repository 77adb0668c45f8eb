"""Values besides the tokens of a step: targets, fields, documents and spans; and batches of whole documents.

All follow from pieces, and nothing from ids.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from operator import index
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from zb_hdf5.documents import segments as views
from zb_hdf5.documents.pieces import Pieces, ends_of
from zb_hdf5.documents.spans import WantedSpans, spans_of_pieces
from zb_hdf5.errors import ArgumentError
from zb_hdf5.formats.batch_reader import BatchReader, from_numpy, require_choice
from zb_hdf5.loaders.order import Documents, IndexArray
from zb_hdf5.loaders.steps import Request
from zb_hdf5.spec import NO_DOCUMENT

if TYPE_CHECKING:
    import torch

    from zb_hdf5.documents.document_table import DocumentTable
    from zb_hdf5.store.stream_documents import MmapTokenStore
    from zb_hdf5.store.token_store import TokenStore

#: Name of a value -> what computes it from the pieces of the inputs.
DOCUMENT_VALUES: Final[dict[str, Callable[[Pieces], Any]]] = {
    "cu_seqlens": views.cu_seqlens,
    "max_seqlen": views.max_seqlen,
    "seq_lens": views.seq_lens,
    "position_ids": views.position_ids,
    "document_ids": views.document_ids,
}
DOCUMENTS: Final = "documents"
#: Unsigned dtypes that torch does not calculate with -> those that hold their values, of 8 bytes up to 2**63 - 1.
_SIGNED: Final = {2: np.int32, 4: np.int64, 8: np.int64}


class Extras:
    """Reads what a step carries besides its tokens. As thread-safe as the reader; picklable."""

    def __init__(
        self,
        reader: BatchReader,
        seq_len: int,
        *,
        targets: bool,
        fields: Sequence[str],
        documents: bool | Collection[str],
        spans: WantedSpans,
        cu_seqlens_capacity: int | None,
        mask_documents: tuple[int, ...],
    ) -> None:
        if isinstance(fields, str):
            raise ArgumentError(f"fields must be names of fields, such as ({fields!r},), found {fields!r}")
        self.reader, self.seq_len = reader, seq_len
        self.inputs = seq_len - reader.overlap if targets else seq_len  # the last token may be a target only
        self._targets, self._fields, self._spans, self._masked = targets, tuple(fields), spans, mask_documents
        self._documents = _document_values(documents)
        if cu_seqlens_capacity is not None and "cu_seqlens" not in self._documents:
            raise ArgumentError("cu_seqlens_capacity needs documents=True, or 'cu_seqlens' in documents")
        values = DOCUMENT_VALUES | {"cu_seqlens": partial(views.cu_seqlens, capacity=cu_seqlens_capacity)}
        self._values = [(name, values[name]) for name in self._documents if name in values]
        self._ends_documents = bool(self._documents or spans)
        #: Steps are dictionaries.
        self.as_dict = bool(fields) or self._ends_documents
        self._needs_pieces = self._ends_documents or bool(mask_documents) or (targets and reader.has_padding)
        #: Steps are more than tokens, or two views of them.
        self.needed = self.as_dict or self._needs_pieces
        self._require_stored()

    def _require_stored(self) -> None:
        """Raise `ArgumentError` or `BackendError` if the store has no such field, or no documents."""
        reader, masked = self.reader, self._masked
        for name in self._fields:
            reader.field(name)
        if (self._ends_documents or masked) and not reader.has_pieces:
            reader.read_pieces(np.empty(0, np.int64))  # names what is missing
        if (DOCUMENTS in self._documents or masked or self._spans) and reader.documents is None:
            raise ArgumentError(f"{reader.path}: holds pieces, and no table of the documents; restore it")
        if masked:
            require_masked(reader.path, masked, len(self._table), self._targets)

    def step(self, request: Request, tokens: torch.Tensor) -> Any:
        """Return the step of a request: a dictionary with its tokens, (B, seq_len), or the pair (x, y)."""
        step: dict[str, Any] = {"tokens": tokens if self.inputs == self.seq_len else tokens[:, : self.inputs]}
        pieces = self._pieces(request) if self._needs_pieces else None
        if self._targets:
            step["targets"] = as_tensor(self._targets_of(tokens.numpy(), pieces))
        if not self.as_dict:
            return tokens[:, :-1], step["targets"][:, : tokens.shape[1] - 1]
        for name in self._fields:
            step[name] = as_tensor(self._field(name, request))
        if pieces is None or not self._ends_documents:
            return step
        pieces = pieces.first_columns(self.inputs) if self.inputs < self.seq_len else pieces
        for name, value_of in self._values:
            found = value_of(pieces)
            step[name] = found if type(found) is int else from_numpy()(found)
        if DOCUMENTS in self._documents:
            step[DOCUMENTS] = as_tensor(self._table.number_of(pieces.offsets))
        if self._spans:
            step["spans"], index = spans_of_pieces(pieces, partial(self._table.spans_of, codec=self._spans))
            step["span_index"] = from_numpy()(index)
        return step

    @property
    def _table(self) -> DocumentTable:
        if self.reader.documents is None:
            raise ArgumentError(f"{self.reader.path}: holds no table of documents any more")
        return self.reader.documents

    def _pieces(self, request: Request) -> Pieces:
        if isinstance(request, int):
            return self.reader.read_batch_pieces(request)
        return self.reader.read_pieces(request, self.seq_len)

    def _targets_of(self, tokens: npt.NDArray[Any], pieces: Pieces | None) -> npt.NDArray[np.int64]:
        """Return the next token of each input, or -100: shape (B, inputs)."""
        if pieces is not None and self._ends_documents:
            found = views.targets(tokens, pieces)
        else:
            found = views.next_tokens(tokens, pieces)
        if pieces is not None and self._masked:
            views.ignore(found, pieces, np.isin(self._table.number_of(pieces.offsets), self._masked))
        return found[:, : self.inputs]

    def _field(self, name: str, request: Request) -> npt.NDArray[Any]:
        values = self.reader.field(name)
        field = values.meta.field
        size, shape = (1, ()) if field is None else (field.size, field.shape)
        count = self.reader.meta.batch_size if isinstance(request, int) else len(request)
        out = np.empty((count, self.seq_len * size), values.dtype)
        if isinstance(request, int):
            values.read_into(request, out)
        else:
            values.read_records_into(request, out)
        return out.reshape(count, self.seq_len, *shape)[:, : self.inputs]


def _document_values(documents: bool | Collection[str]) -> tuple[str, ...]:
    """Return the names of what is asked for of the documents."""
    names = (*DOCUMENT_VALUES, DOCUMENTS)
    if isinstance(documents, bool):
        return ("cu_seqlens",) if documents else ()
    if isinstance(documents, str) or not isinstance(documents, Collection):
        raise ArgumentError(f"documents must be True or names of {', '.join(names)}, found {documents!r}")
    for name in documents:
        require_choice("documents", name, names)
    return tuple(documents)


def masked_numbers(mask_documents: Collection[int]) -> tuple[int, ...]:
    """Return numbers of documents, ascending; raise `ArgumentError` if one is no number."""
    try:
        return tuple(sorted({index(number) for number in mask_documents}))
    except TypeError:
        raise ArgumentError(
            f"mask_documents: expected numbers of documents, as in 'documents', found {mask_documents!r:.80}"
        ) from None


def require_masked(path: object, numbers: tuple[int, ...], count: int, targets: bool) -> None:
    """Raise `ArgumentError` unless there are targets, and documents with these numbers, ascending, among `count`."""
    if not targets:
        raise ArgumentError("mask_documents gives tokens the target -100: it needs targets=True")
    if not 0 <= numbers[0] <= numbers[-1] < count:
        unknown = numbers[0] if numbers[0] < 0 else numbers[-1]
        raise ArgumentError(f"{path}: mask_documents: expected numbers in 0..{count - 1:,}, found {unknown:,}")


def as_tensor(values: npt.NDArray[Any]) -> torch.Tensor | npt.NDArray[Any]:
    """Return a tensor; the array itself where torch has no such dtype (structured values, bytes)."""
    if values.dtype.kind == "u" and values.dtype.itemsize > 1:
        values = values.astype(_SIGNED[values.dtype.itemsize])
    return from_numpy()(values) if values.dtype.kind in "biufc" else values


class FieldColumn(NamedTuple):
    """The values of a field, counted by tokens: `values` counts each value, `shape` is that of one token."""

    values: TokenStore
    shape: tuple[int, ...]

    def get_slice(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Return those of tokens `start` to `stop`, shape (stop - start, *shape)."""
        size = prod(self.shape)
        return self.values.get_slice(start * size, stop * size).reshape(stop - start, *self.shape)


def padded_pieces(starts: npt.NDArray[np.uint64], lengths: npt.NDArray[np.int64], multiple: int) -> Pieces:
    """Return the pieces of documents that have a record each, as long as the longest, rounded up to a multiple."""
    seq_len = _rounded_up(int(lengths.max()), multiple)
    is_short = lengths < seq_len
    ends = ends_of(1 + is_short)
    columns, offsets = np.zeros(ends[-1], np.uint32), np.full(ends[-1], NO_DOCUMENT, np.uint64)
    offsets[ends[:-1]] = starts
    columns[ends[1:][is_short] - 1] = lengths[is_short]
    return Pieces(ends, columns, offsets, seq_len)


def packed_pieces(starts: npt.NDArray[np.uint64], lengths: npt.NDArray[np.int64], multiple: int) -> Pieces:
    """Return the pieces of documents one after the other in one record, its length rounded up to a multiple."""
    columns = ends_of(lengths)
    seq_len = _rounded_up(int(columns[-1]), multiple)
    count = len(starts) + int(columns[-1] < seq_len)
    offsets = np.append(starts, np.uint64(NO_DOCUMENT))[:count]
    return Pieces(np.array([0, count]), columns[:count].astype(np.uint32), offsets, seq_len)


def _rounded_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def gather(column: TokenStore | FieldColumn, pieces: Pieces, fill: int = 0, dtype: Any = None) -> npt.NDArray[Any]:
    """Return the values of the tokens that lie in some pieces, and `fill` for padding, shape (R, S, ...)."""
    kind = column.get_slice(0, 0)
    values = np.zeros((pieces.num_tokens, *kind.shape[1:]), dtype or kind.dtype)
    if fill:  # only then: filling bytes with 0 gives the text "0"
        values.fill(fill)
    is_text = ~pieces.is_padding
    places = (part[is_text].tolist() for part in (pieces.starts, pieces.offsets, pieces.lengths))
    for place, offset, length in zip(*places, strict=True):
        values[place : place + length] = column.get_slice(offset, offset + length)
    return values.reshape(-1, pieces.seq_len, *kind.shape[1:])


@dataclass(frozen=True)
class DocumentBatches:
    """Reads the batches of a `DocumentLoader`. Threads that read ahead hold this, and no loader."""

    store: MmapTokenStore
    documents: Documents
    collate: str
    multiple: int
    pad_token_id: int
    targets: bool
    loss_mask: str | None
    fields: tuple[str, ...]
    spans: WantedSpans
    dtype: np.dtype[Any]
    #: Offsets of the documents whose tokens are no targets.
    masked: npt.NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))
    columns: dict[str, FieldColumn] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Open the fields; `ArgumentError` if one is not there, or is no mask."""
        mask = self.loss_mask
        if mask is not None and not self.targets:
            raise ArgumentError(f"loss_mask={mask!r} tells which targets count; pass targets=True too")
        shapes = {each.name: each.shape for each in self.store.fields}
        wanted = dict.fromkeys(self.fields if mask is None else (*self.fields, mask))
        for name in [name for name in wanted if name not in self.columns]:
            self.columns[name] = column = FieldColumn(self.store.field(name), shapes[name])
            if name == mask and (column.shape or column.values.dtype.kind not in "biuf"):
                raise ArgumentError(
                    f"{self.store.path}: expected loss_mask to name a field of one number for each token, found "
                    f"{name!r}, {column.values.dtype} of shape {column.shape}"
                )

    def read(self, documents: IndexArray) -> dict[str, Any]:
        """Return the batch of these documents, numbered as in `Documents`."""
        starts, lengths = self.documents.starts(documents), self.documents.lengths(documents)
        packed = self.collate == "pack"
        pieces = (packed_pieces if packed else padded_pieces)(starts, lengths, self.multiple)
        read = {name: gather(column, pieces) for name, column in self.columns.items()}
        values = {"tokens": gather(self.store, pieces, self.pad_token_id, self.dtype)}
        if self.targets:
            mask = None if self.loss_mask is None else read[self.loss_mask]
            values["targets"] = views.targets(values["tokens"], pieces, mask)
            if len(self.masked):
                views.ignore(values["targets"], pieces, np.isin(pieces.offsets, self.masked))
        values |= {name: read[name] for name in self.fields}
        others: dict[str, Any] = {}
        if self.spans:
            spans_of = partial(self.store.documents.spans_of, codec=self.spans)
            others["spans"], values["span_index"] = spans_of_pieces(pieces, spans_of)
        if packed:
            values["position_ids"] = views.position_ids(pieces)
            values = {name: rows[0] for name, rows in values.items()} | {"cu_seqlens": views.cu_seqlens(pieces)}
            others["max_seqlen"] = views.max_seqlen(pieces)
            lengths = pieces.lengths
        padding = np.full(len(lengths) - len(documents), views.PADDING_ID)
        values["documents"] = np.concatenate([self.documents.numbers(documents), padding])
        values["seq_lens"] = lengths.astype(np.int32)
        return {name: as_tensor(array) for name, array in values.items()} | others

    def close(self) -> None:
        """Release the files."""
        for store in (self.store, *(column.values for column in self.columns.values())):
            store.close()
