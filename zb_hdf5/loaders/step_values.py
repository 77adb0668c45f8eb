"""The values of a step besides its tokens: targets, fields, cu_seqlens and others of documents, and spans.

All follow from the stored pieces of documents, and nothing from token ids.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from zb_hdf5.documents import pieces as views
from zb_hdf5.documents.metadata import WantedSpans
from zb_hdf5.documents.pieces import IGNORED_TARGET, Pieces, spans_of_pieces
from zb_hdf5.errors import ArgumentError, ZbError, require_choice
from zb_hdf5.field import BFLOAT16, CODE, RESERVED_NAMES, SET_MARK, UNITS
from zb_hdf5.formats.corpus import Batches
from zb_hdf5.loaders.order import STEPS_AT_ONCE, StoredRequest, requests_in, require_positive, with_companion
from zb_hdf5.loaders.step_memory import StepMemory
from zb_hdf5.loaders.stored_targets import StoredTargets, has_targets
from zb_hdf5.packages import from_numpy, require_package
from zb_hdf5.spec import ABOUT

if TYPE_CHECKING:
    import torch

    from zb_hdf5.documents.document_table import DocumentTable

#: Names of fields; or the name of each in a step, and that of the field.
WantedFields: TypeAlias = "Sequence[str] | Mapping[str, str]"
#: Name of a value -> what computes it from the pieces of the inputs.
DOCUMENT_VALUES: Final[dict[str, Callable[[Pieces], Any]]] = {
    "cu_seqlens": views.cu_seqlens,
    "max_seqlen": views.max_seqlen,
    "seq_lens": views.seq_lens,
    "position_ids": views.position_ids,
    "document_ids": views.document_ids,
}
#: The value that has the number of the document of each segment.
DOCUMENT_NUMBERS: Final = "documents"
#: The value that has the place of the source of each segment among the names of all sources.
SOURCES: Final = "sources"
#: "meta:lang": the codes of a field set that `zb fields make` has made, for each segment.
META: Final = "meta"
META_MARK: Final = ":"
#: The values that follow from the table of the documents.
_OF_TABLE: Final = (DOCUMENT_NUMBERS, SOURCES)
#: The values that have an item for each segment of a document in the step.
_OF_SEGMENTS: Final = frozenset({"cu_seqlens", "seq_lens", *_OF_TABLE})
#: Bytes of an unsigned dtype that torch lacks -> the dtype of its tensors; 8 bytes hold values up to 2**63 - 1.
_SIGNED: Final = {2: np.int32, 4: np.int64, 8: np.int64}
#: Steps whose pieces are read together at first.
FIRST_STEPS: Final = 4
#: Pieces that are read together later, about: 80 bytes for each.
MAX_PIECES: Final = 8192
#: An error that took more seconds is not waited for again.
REREAD_S: Final = 5.0


def _document_values(documents: bool | Collection[Any]) -> dict[str, int | None]:
    """Return the names of the arrays of documents that are asked for, each with its length; None: any."""
    names = (*DOCUMENT_VALUES, *_OF_TABLE)
    if isinstance(documents, bool):
        return {"cu_seqlens": None, "max_seqlen": None} if documents else {}
    if isinstance(documents, str) or not isinstance(documents, Collection):
        raise ArgumentError(f"documents must be True or names of {', '.join(names)}, found {documents!r}")
    found: dict[str, int | None] = {}
    for each in documents:
        name, capacity = with_companion("documents", each)
        if name == META and isinstance(capacity, str):
            name, capacity = f"{META}{META_MARK}{capacity}", None
        if isinstance(name, str) and name.startswith(f"{META}{META_MARK}"):
            found[name] = None
            continue
        require_choice("documents", name, names)
        require_positive(**{f"the length of {name}": capacity})
        if capacity is not None and name != "cu_seqlens":
            raise ArgumentError(f"documents: cu_seqlens alone takes a length, found {each!r}")
        found[name] = capacity
    return found


def wanted_fields(fields: WantedFields) -> dict[str, str]:
    """Return the fields that are asked for: the name of each in a step, and the name of the field.

    Raises
    ------
    ArgumentError
        If it is no name, or one that a loader gives to values of its own.
    """
    if isinstance(fields, str):
        raise ArgumentError(f"fields must be names of fields, such as ({fields!r},), found {fields!r}")
    if not isinstance(fields, Mapping):
        return {name: name for name in fields}
    for name in fields:
        if name in RESERVED_NAMES:
            raise ArgumentError(f"fields: a loader gives {name} to values of its own: choose another name")
    return dict(fields)


def code_field(name: str) -> str:
    """Return the field that has the codes of a field set, for each document."""
    return f"{name}{SET_MARK}{CODE}"


def _unit_of(reader: Batches, stored: str) -> str:
    """Return the thing that has a value each of a field, which is opened; raises as `Batches.field`."""
    field = reader.corpus.field(stored).meta.field
    return UNITS[0] if field is None else field.unit


def require_field_names(fields: Sequence[str]) -> None:
    """Raise `ArgumentError` for one text in place of names of fields."""
    if isinstance(fields, str):
        raise ArgumentError(f"fields must be names of fields, such as ({fields!r},), found {fields!r}")


def require_masked(path: object, numbers: tuple[int, ...], count: int, targets: bool) -> None:
    """Raise `ArgumentError` unless documents can be masked.

    Parameters
    ----------
    path
        The store, for messages.
    numbers
        The documents to mask, ascending.
    count
        The documents that there are.
    targets
        The loader gives targets.
    """
    if not targets:
        raise ArgumentError("mask_documents gives tokens the target -100: it needs targets=True")
    if not 0 <= numbers[0] <= numbers[-1] < count:
        unknown = numbers[0] if numbers[0] < 0 else numbers[-1]
        raise ArgumentError(f"{path}: mask_documents: expected numbers in 0..{count - 1:,}, found {unknown:,}")


def value_shape(values: Batches) -> tuple[int, ...]:
    """Return the shape of the values of one token: of a field, or () of tokens."""
    return () if values.meta.field is None else values.meta.field.shape


def value_count(values: Batches) -> int:
    """Return the number of the values of one token."""
    return prod(value_shape(values))


def as_tensor(values: npt.NDArray[Any], kind: str = "") -> torch.Tensor | npt.NDArray[Any]:
    """Return a tensor; the array itself if torch has no such dtype (structured values, bytes).

    Parameters
    ----------
    values
        The values as they are stored.
    kind
        As `Field` has it.
    """
    if kind == BFLOAT16:
        return from_numpy()(values.view(np.int16)).view(require_package("torch", "torch").bfloat16)
    if values.dtype.kind == "u" and values.dtype.itemsize > 1:
        values = values.astype(_SIGNED[values.dtype.itemsize])
    return from_numpy()(values) if values.dtype.kind in "biufc" else values


class StepValues:
    """The values of each step of a loader, besides its tokens. As thread-safe as the reader.

    Parameters
    ----------
    reader
        The store.
    seq_len
        Tokens of a record, as the loader gives it.
    targets, fields, documents, spans, labels
        As for `Loader`.
    mask_documents
        Numbers of documents, ascending.

    Attributes
    ----------
    as_dict
        The steps are dictionaries; else they are tokens, or pairs (x, y).
    needs_pieces
        The values follow from the pieces of the records.
    has_targets
        The targets follow from fields of the store.
    has_context
        Some targets are targets of tokens that are context only.
    of_one_shape
        The values of steps of as many rows have the same shapes.
    """

    def __init__(
        self,
        reader: Batches,
        seq_len: int,
        *,
        targets: bool,
        mask_documents: tuple[int, ...],
        fields: WantedFields,
        documents: bool | Collection[Any],
        spans: WantedSpans,
        labels: str | None,
    ) -> None:
        self._reader = reader
        self._seq_len = seq_len
        # the last token of windows that overlap, however far they do, is a target only
        self._num_inputs = seq_len - 1 if targets and reader.overlap else seq_len
        self._targets = targets
        self._fields = wanted_fields(fields)
        self._spans = spans
        self._masked = mask_documents
        self._documents = _document_values(documents)
        capacity = self._documents.get("cu_seqlens")
        values = DOCUMENT_VALUES | {"cu_seqlens": partial(views.cu_seqlens, capacity=capacity)}
        self._stored_targets = StoredTargets(reader, labels) if targets and has_targets(reader) else None
        self._values = [(name, values[name]) for name in self._documents if name in values]
        self._units = {name: _unit_of(reader, stored) for name, stored in self._fields.items()}
        self._memory = {stored: StepMemory() for stored in self._fields.values()}
        codes = [name for name in self._documents if name.startswith(f"{META}{META_MARK}")]
        self._codes = {name: code_field(name.partition(META_MARK)[2]) for name in codes}
        of_documents = bool(codes) or UNITS[2] in self._units.values()
        self._needs_numbers = of_documents or not self._documents.keys().isdisjoint(_OF_TABLE)
        self._num_context = reader.num_context if targets else 0
        self._ends_documents = bool(self._documents or spans)
        self.as_dict = bool(fields) or self._ends_documents
        self.needs_pieces = self._ends_documents or bool(mask_documents) or (targets and reader.has_padding)
        self.has_targets = self._stored_targets is not None
        self.has_context = self._num_context > 0
        self.of_one_shape = not spans and not of_documents and _OF_SEGMENTS.isdisjoint(self._documents)
        self._require_stored()

    @classmethod
    def of_fields(cls, reader: Batches, fields: WantedFields) -> Self:
        """Return the values of fields alone, in records as they are stored."""
        return cls(
            reader,
            reader.seq_len,
            targets=False,
            mask_documents=(),
            fields=fields,
            documents=False,
            spans=False,
            labels=None,
        )

    def _require_stored(self) -> None:
        """Raise `ArgumentError` or `BackendError` if the store has no such field, or no documents."""
        reader = self._reader
        for name, unit in self._units.items():
            if name in self._documents:
                raise ArgumentError(
                    f"{reader.path}: {name} is asked for as a field, and of the documents: leave out one of them"
                )
            if unit == UNITS[1]:
                self._require_records(self._fields[name])
            if unit == UNITS[2] and not self._ends_documents:
                raise ArgumentError(
                    f"{reader.path}: {name} has a value for each document: ask for documents too, such as "
                    "documents=('cu_seqlens',)"
                )
        for stored in self._codes.values():
            reader.corpus.field(stored)
        if (self._ends_documents or self._masked) and not reader.has_pieces:
            reader.read_pieces(np.empty(0, np.int64))  # its error names the thing that is missing
        needs_table = self._needs_numbers or self._masked or self._spans
        if needs_table and reader.corpus.document_table is None:
            raise ArgumentError(f"{reader.path}: holds pieces, and no table of the documents; restore it")
        if SOURCES in self._documents and not self._table.sources:
            raise ArgumentError(f"{reader.path}: its documents name no sources: leave {SOURCES!r} out of documents")
        if self._masked:
            require_masked(reader.path, self._masked, len(self._table), self._targets)

    def _require_records(self, stored: str) -> None:
        """Raise `ArgumentError` if the records of a stream are other windows than those that a field has values of."""
        made = self._reader.corpus.field(stored).windows_of_set
        windows = self._reader.windows
        inputs = windows.length - (1 if self._num_inputs < self._seq_len else 0)
        if made is not None and (inputs, windows.stride) != (made.length, made.stride):
            raise ArgumentError(
                f"{self._reader.path}: {stored} has a value for each window of {made.length:,} tokens every "
                f"{made.stride:,}, found windows of {inputs:,} every {windows.stride:,}"
            )

    @property
    def _table(self) -> DocumentTable:
        return self._reader.corpus.require_documents()

    @property
    def columns(self) -> list[Batches]:
        """The fields that are read at each step."""
        of_tokens = [stored for name, stored in self._fields.items() if self._units[name] == UNITS[0]]
        names = [*of_tokens, *(self._stored_targets.names if self._stored_targets else ())]
        if self.needs_pieces:
            names.append(self._reader.documents_field)
        return [self._reader.field(name) for name in dict.fromkeys(names) if name]

    def step_of(self, request: StoredRequest, tokens: torch.Tensor, pieces: Pieces | None) -> Any:
        """Return the step of a request: a dictionary, or the pair (x, y).

        Parameters
        ----------
        request
            The number of a stored batch, or the numbers of records.
        tokens
            The tokens of the step, shape (rows, seq_len). Rows after the last record are padding.
        pieces
            The pieces of all rows, if the values need them.
        """
        inputs = tokens if self._num_inputs == self._seq_len else tokens[:, : self._num_inputs]
        step: dict[str, Any] = {"tokens": inputs}
        if self._targets:
            step["targets"] = as_tensor(self._targets_of(tokens.numpy(), pieces, request))
        if not self.as_dict:
            return tokens[:, :-1], step["targets"][:, : tokens.shape[1] - 1]
        if self._fields:
            step |= self.fields_of(request, len(tokens))
        if pieces is not None and self._ends_documents:
            self._add_documents(step, pieces)
        return step

    def fields_of(self, request: StoredRequest, num_rows: int) -> dict[str, Any]:
        """Return the values of the fields of tokens and of records in a request; rows after it are padding."""
        found = {}
        for name, stored in self._fields.items():
            if self._units[name] != UNITS[2]:
                read = self._field if self._units[name] == UNITS[0] else self._of_records
                found[name] = as_tensor(read(stored, request, num_rows), self._kind(stored))
        return found

    def _add_documents(self, step: dict[str, Any], pieces: Pieces) -> None:
        """Add the values of documents, and spans."""
        if self._num_inputs < self._seq_len:
            pieces = pieces.first_columns(self._num_inputs)
        for name, value_of in self._values:
            found = value_of(pieces)
            step[name] = found if type(found) is int else from_numpy()(found)
        if self._needs_numbers:
            numbers = self._table.number_of(pieces.offsets)
            for name, stored in self._fields.items():
                if self._units[name] == UNITS[2]:
                    step[name] = as_tensor(self._of_units(stored, numbers), self._kind(stored))
            for name, stored in self._codes.items():
                codes = self._of_units(stored, numbers).astype(np.int64)
                codes[codes == self._padding(stored)] = -1
                step[name] = from_numpy()(codes)
            if DOCUMENT_NUMBERS in self._documents:
                step[DOCUMENT_NUMBERS] = as_tensor(numbers)
            if SOURCES in self._documents:
                step[SOURCES] = as_tensor(self._table.source_of(numbers))
        if self._spans:
            spans, index = spans_of_pieces(pieces, partial(self._table.spans_of, codec=self._spans))
            step["spans"] = spans
            step["span_index"] = from_numpy()(index)

    def _targets_of(
        self, tokens: npt.NDArray[Any], pieces: Pieces | None, request: StoredRequest
    ) -> npt.NDArray[np.int64]:
        """Return the next token of each input, or -100: shape (rows, inputs)."""
        if pieces is not None and self._ends_documents:
            found = views.targets(tokens, pieces)
        else:
            found = views.next_tokens(tokens, pieces)
        if self._stored_targets is not None:
            self._stored_targets.put_into(found, partial(self._all_values, request=request, num_rows=len(found)))
        if self._num_context:
            records = self._records_of(request)
            found[: len(records)][records > 0, : self._num_context] = IGNORED_TARGET
        if pieces is not None and self._masked:
            views.ignore(found, pieces, np.isin(self._table.number_of(pieces.offsets), self._masked))
        return found[:, : self._num_inputs]

    def _records_of(self, request: StoredRequest) -> npt.NDArray[np.int64]:
        """Return the numbers of the records of a request."""
        size = self._reader.batch_size
        return np.arange(request * size, (request + 1) * size) if isinstance(request, int) else request

    def _kind(self, stored: str) -> str:
        """Return the kind of the numbers of a field. See `Field`."""
        field = self._reader.corpus.field(stored).meta.field
        return "" if field is None else field.kind

    def _field(self, stored: str, request: StoredRequest, num_rows: int) -> npt.NDArray[Any]:
        """Return the values of the inputs of a request; of a field set with targets, those about the targets."""
        values = self._all_values(stored, request, num_rows)
        if not self._targets or self._reader.corpus.field(stored).about != ABOUT[1]:
            return values[:, : self._num_inputs]
        about_targets = values[:, 1 : self._num_inputs + 1]
        lacking = self._num_inputs - about_targets.shape[1]
        if not lacking:
            return about_targets
        ends = np.broadcast_to(self._padding(stored), (num_rows, lacking, *values.shape[2:]))
        return np.concatenate([about_targets, ends], axis=1)

    def _padding(self, stored: str) -> npt.NDArray[Any]:
        """Return the value of a field where it has none."""
        field = self._reader.corpus.field(stored).meta.field
        return np.zeros((), np.int64) if field is None else field.padding

    def _of_records(self, stored: str, request: StoredRequest, num_rows: int) -> npt.NDArray[Any]:
        """Return a value for each record of a request, shape (num_rows, ...)."""
        parts = 1 if isinstance(request, int) else self._reader.seq_len // self._seq_len
        records = self._records_of(request) // parts
        found = self._of_units(stored, records + self._context_of(stored))
        lacking = np.broadcast_to(self._padding(stored), (num_rows - len(found), *found.shape[1:]))
        return np.concatenate([found, lacking]) if len(lacking) else found

    def _context_of(self, stored: str) -> int:
        """Return how many records of a field set are the context of a window of a stream."""
        made = self._reader.corpus.field(stored).windows_of_set
        return 0 if made is None else made.length // made.stride - 1

    def _of_units(self, stored: str, numbers: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """Return the values of records or documents by their numbers, and padding for those below 0."""
        values = self._reader.corpus.field(stored)
        field = values.meta.field
        shape = () if field is None else field.shape
        out = np.empty((len(numbers), prod(shape)), values.dtype)
        known = np.flatnonzero(numbers >= 0)
        if len(known) == len(numbers):
            values.tokens.gather(numbers * out.shape[1], out)
        else:
            out[...] = self._padding(stored)
            if len(known):
                rows = np.empty((len(known), out.shape[1]), values.dtype)
                values.tokens.gather(numbers[known] * out.shape[1], rows)
                out[known] = rows
        return out.reshape(len(numbers), *shape)

    def _all_values(self, name: str, request: StoredRequest, num_rows: int) -> npt.NDArray[Any]:
        """Return the values of the records of a request, and 0, or the fill value, in the rows after them."""
        values = self._reader.field(name)
        shape = value_shape(values)
        rows = (num_rows, self._seq_len * value_count(values))
        memory = self._memory.get(name)  # of fields alone: the targets of a store are few bytes
        out = np.empty(rows, values.dtype) if memory is None else memory.array(rows, values.dtype)
        if isinstance(request, int):
            values.read_into(request, out)
        else:
            field = values.meta.field
            out[len(request) :] = 0 if field is None or field.fill is None else field.padding
            values.read_records_into(request, out[: len(request)])
        return out.reshape(num_rows, self._seq_len, *shape)

    def pieces_of_request(self, request: StoredRequest) -> Pieces | None:
        """Return the pieces of a stored batch, or of records, if the values need them."""
        if not self.needs_pieces:
            return None
        if isinstance(request, int):
            return self._reader.read_batch_pieces(request)
        return self._reader.read_pieces(request, self._seq_len)

    def pieces_in(self, block: npt.NDArray[np.int64]) -> Iterator[Pieces | None]:
        """Yield the pieces of each step of a block: of several steps at once, but never very many pieces."""
        size = self._reader.meta.batch_size
        start = 0
        count = FIRST_STEPS
        while start < len(block):
            part = block[start : start + count]
            records = part if part.ndim == 2 else part[:, np.newaxis] * size + np.arange(size)
            start += count
            begun_s = time.monotonic()
            try:
                found = self._reader.read_pieces(records.reshape(-1), self._seq_len)
            except (ZbError, OSError):  # raised again at its own step
                if time.monotonic() - begun_s > REREAD_S:
                    raise
                yield from map(self.pieces_of_request, requests_in(part))
            else:
                yield from found.split(records.shape[1])
                count = max(1, min(STEPS_AT_ONCE, MAX_PIECES * len(part) // len(found.columns)))

    def pieces_with_padding(self, records: npt.NDArray[np.int64], num_rows: int) -> Pieces | None:
        """Return the pieces of records, and of rows of padding that follow them; `num_rows` in all."""
        pieces = self.pieces_of_request(records)
        if pieces is None:
            return None
        return views.concatenate([pieces, views.padding(num_rows - len(records), self._seq_len)])
