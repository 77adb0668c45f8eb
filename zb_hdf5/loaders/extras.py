"""What a step carries besides its tokens: targets, fields, documents and spans. All follow from what is stored."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from operator import index
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from zb_hdf5.documents import segments as views
from zb_hdf5.documents.pieces import Pieces
from zb_hdf5.documents.spans import WantedSpans, reading, spans_of_pieces
from zb_hdf5.errors import ArgumentError
from zb_hdf5.formats.batch_reader import BatchReader, from_numpy, require_choice
from zb_hdf5.loaders.steps import Request

if TYPE_CHECKING:
    import torch

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


@dataclass(frozen=True)
class ExtraOptions:
    """What a loader is asked for besides tokens. See `Loader`."""

    fields: tuple[str, ...] = ()
    documents: tuple[str, ...] = ()
    spans: WantedSpans = False
    cu_seqlens_capacity: int | None = None
    mask_documents: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        fields: Sequence[str],
        documents: bool | Collection[str],
        spans: WantedSpans,
        cu_seqlens_capacity: int | None,
        mask_documents: Collection[int],
    ) -> ExtraOptions:
        """Check what a call asks for.

        Raises
        ------
        ArgumentError
            If a name is unknown.
        """
        if isinstance(documents, str) or not isinstance(documents, (bool, Collection)):
            names = ", ".join((*DOCUMENT_VALUES, DOCUMENTS))
            raise ArgumentError(f"documents must be True or names of {names}, found {documents!r}")
        wanted = (("cu_seqlens",) if documents else ()) if isinstance(documents, bool) else tuple(documents)
        for name in wanted:
            require_choice("documents", name, (*DOCUMENT_VALUES, DOCUMENTS))
        if isinstance(fields, str):
            raise ArgumentError(f"fields must be names of fields, such as ({fields!r},), found {fields!r}")
        if cu_seqlens_capacity is not None and "cu_seqlens" not in wanted:
            raise ArgumentError("cu_seqlens_capacity needs documents=True, or 'cu_seqlens' in documents")
        return cls(tuple(fields), wanted, spans, cu_seqlens_capacity, masked_numbers(mask_documents))

    @property
    def as_dict(self) -> bool:
        """Whether steps are dictionaries."""
        return bool(self.fields or self.documents or self.spans)


def masked_numbers(mask_documents: Collection[int]) -> tuple[int, ...]:
    """Return numbers of documents, ascending.

    Raises
    ------
    ArgumentError
        If one is no number.
    """
    try:
        return tuple(sorted({index(number) for number in mask_documents}))
    except TypeError:
        raise ArgumentError(
            f"mask_documents: expected numbers of documents, as in 'documents', found {mask_documents!r:.80}"
        ) from None


class Extras:
    """Reads what a step carries besides its tokens. As thread-safe as the reader; picklable.

    Parameters
    ----------
    reader, seq_len
        Of the loader.
    inputs
        Columns of the inputs: one less than `seq_len` where the last token of a record is a target only.
    targets
        Whether targets are asked for.

    Raises
    ------
    ArgumentError, BackendError
        If the store has no such field, or no documents.
    """

    def __init__(self, reader: BatchReader, seq_len: int, inputs: int, options: ExtraOptions, *, targets: bool) -> None:
        self._reader, self._seq_len, self._inputs, self._targets = reader, seq_len, inputs, targets
        self._options = options
        for name in options.fields:
            reader.field(name)
        asks = bool(options.documents or options.spans or options.mask_documents)
        if asks and not reader.has_pieces:
            reader.read_pieces(np.empty(0, np.int64))  # says what is missing
        self._needs_pieces = asks or (targets and reader.has_padding)
        self._ends_documents = bool(options.documents or options.spans)
        numbered = DOCUMENTS in options.documents or options.mask_documents or options.spans
        if numbered and reader.documents is None:
            raise ArgumentError(f"{reader.path}: holds pieces, and no table of the documents; restore it")
        if options.mask_documents and not targets:
            raise ArgumentError("mask_documents gives tokens the target -100: it needs targets=True")
        if options.mask_documents and reader.documents is not None:
            _require_documents(options.mask_documents, len(reader.documents), reader)
        self._cut, self._looks_up = inputs < seq_len, DOCUMENTS in options.documents or bool(options.spans)
        values = DOCUMENT_VALUES | {"cu_seqlens": partial(views.cu_seqlens, capacity=options.cu_seqlens_capacity)}
        self._values = [(name, values[name]) for name in options.documents if name in values]

    def add_to(self, step: dict[str, Any], request: Request, tokens: npt.NDArray[Any] | None) -> None:
        """Add the values of one step but its tokens, as tensors where torch has their dtype.

        Parameters
        ----------
        tokens
            What was read, shape (B, seq_len), where targets are asked for.
        """
        pieces = self.pieces(request) if self._needs_pieces else None
        if tokens is not None and self._targets:
            step["targets"] = as_tensor(self.targets(tokens, pieces))
        for name in self._options.fields:
            step[name] = as_tensor(self._field(name, request))
        if pieces is None:
            return
        pieces = pieces.first_columns(self._inputs) if self._cut else pieces
        for name, value_of in self._values:
            found = value_of(pieces)
            step[name] = found if type(found) is int else from_numpy()(found)
        if self._looks_up:
            self._add_looked_up(step, pieces)

    def pieces(self, request: Request) -> Pieces:
        """Return the pieces of the records of a request, all columns."""
        if isinstance(request, int):
            return self._reader.read_batch_pieces(request)
        return self._reader.read_pieces(request, self._seq_len)

    def targets(self, tokens: npt.NDArray[Any], pieces: Pieces | None) -> npt.NDArray[np.int64]:
        """Return the next token of each input, or -100: shape (B, inputs)."""
        if pieces is not None and self._ends_documents:
            found = views.targets(tokens, pieces)
        else:
            found = views.next_tokens(tokens, pieces)
        if pieces is not None and self._options.mask_documents:
            masked = np.isin(self._numbers_of(pieces.offsets), self._options.mask_documents)
            views.ignore(found, pieces, masked)
        return found[:, : self._inputs]

    def _numbers_of(self, offsets: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        table = self._reader.documents
        if table is None:
            raise ArgumentError(f"{self._reader.path}: holds no table of documents any more")
        return table.number_of(offsets)

    def _field(self, name: str, request: Request) -> npt.NDArray[Any]:
        values = self._reader.field(name)
        field = values.meta.field
        size, shape = (1, ()) if field is None else (field.size, field.shape)
        count = self._reader.meta.batch_size if isinstance(request, int) else len(request)
        out = np.empty((count, self._seq_len * size), values.dtype)
        if isinstance(request, int):
            values.read_into(request, out)
        else:
            values.read_records_into(request, out)
        return out.reshape(count, self._seq_len, *shape)[:, : self._inputs]

    def _add_looked_up(self, step: dict[str, Any], pieces: Pieces) -> None:
        """Add what the table of the documents says."""
        options = self._options
        if DOCUMENTS in options.documents:
            step[DOCUMENTS] = as_tensor(self._numbers_of(pieces.offsets))
        if options.spans and self._reader.documents is not None:
            step["spans"], index = spans_of_pieces(pieces, reading(self._reader.documents, options.spans))
            step["span_index"] = from_numpy()(index)


def _require_documents(numbers: tuple[int, ...], count: int, reader: BatchReader) -> None:
    unknown = [number for number in numbers if not 0 <= number < count]
    if unknown:
        raise ArgumentError(
            f"{reader.path}: mask_documents: expected numbers in 0..{count - 1:,}, found {unknown[0]:,}"
        )


def as_tensor(values: npt.NDArray[Any]) -> torch.Tensor | npt.NDArray[Any]:
    """Return a tensor; the array itself where torch has no such dtype (structured values, bytes)."""
    if values.dtype.kind == "u" and values.dtype.itemsize > 1:
        values = values.astype(_SIGNED[values.dtype.itemsize])
    return from_numpy()(values) if values.dtype.kind in "biufc" else values
