"""What a step carries besides its tokens: targets, fields, documents and spans. All follow from what is stored."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from operator import index
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from zb_hdf5.documents import segments as views
from zb_hdf5.documents.pieces import Pieces
from zb_hdf5.documents.spans import WantedSpans, spans_of_pieces
from zb_hdf5.errors import ArgumentError
from zb_hdf5.formats.batch_reader import BatchReader, from_numpy, require_choice
from zb_hdf5.loaders.steps import Request

if TYPE_CHECKING:
    import torch

    from zb_hdf5.documents.document_table import DocumentTable

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
    """Reads what a step carries besides its tokens. As thread-safe as the reader; picklable.

    `inputs` are the columns of the inputs: one less than `seq_len` where the last token of a record is a target only.
    """

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
        self.reader, self.seq_len, self.inputs = reader, seq_len, seq_len - reader.overlap if targets else seq_len
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
            reader.read_pieces(np.empty(0, np.int64))  # says what is missing
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
