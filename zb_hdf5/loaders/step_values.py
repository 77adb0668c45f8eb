"""The values of a step besides its tokens: targets, fields, cu_seqlens and others of documents, and spans.

All follow from the stored pieces of documents, and nothing from token ids.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from zb_hdf5.documents import pieces as views
from zb_hdf5.documents.metadata import WantedSpans
from zb_hdf5.documents.pieces import IGNORED_TARGET, Pieces, spans_of_pieces
from zb_hdf5.errors import ArgumentError, ZbError, require_choice, require_positive
from zb_hdf5.field import CODE, RESERVED_NAMES, SET_MARK
from zb_hdf5.formats.batches import Batches
from zb_hdf5.loaders.order import STEPS_AT_ONCE, StoredRequest, records_in, requests_in, with_companion
from zb_hdf5.loaders.step_field import OF_DOCUMENTS, OF_RECORDS, OF_TOKENS, StepField, as_tensor
from zb_hdf5.loaders.stored_targets import StoredTargets, has_targets
from zb_hdf5.packages import from_numpy

if TYPE_CHECKING:
    import torch

    from zb_hdf5.documents.document_table import DocumentTable

#: Names of fields; or the name of each in a step, and that of the field.
WantedFields: TypeAlias = Sequence[str] | Mapping[str, str]
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
        If it is not a name, or one that a loader gives to values of its own.
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
        self._spans = spans
        self._masked = mask_documents
        self._documents = _document_values(documents)
        capacity = self._documents.get("cu_seqlens")
        values = DOCUMENT_VALUES | {"cu_seqlens": partial(views.cu_seqlens, capacity=capacity)}
        self._stored_targets = StoredTargets(reader, labels) if targets and has_targets(reader) else None
        self._values = [(name, values[name]) for name in self._documents if name in values]
        asked = {name: self._opened(stored) for name, stored in wanted_fields(fields).items()}
        #: The fields of tokens and of records, and the fields of documents, by their names in a step.
        self._fields = {name: field for name, field in asked.items() if field.unit != OF_DOCUMENTS}
        self._of_documents = {name: field for name, field in asked.items() if field.unit == OF_DOCUMENTS}
        codes = [name for name in self._documents if name.startswith(f"{META}{META_MARK}")]
        self._codes = {name: self._opened(code_field(name.partition(META_MARK)[2])) for name in codes}
        named = self._stored_targets.names if self._stored_targets else ()
        self._fields_of_targets = {name: self._opened(name) for name in named}
        of_documents = bool(codes or self._of_documents)
        self._needs_numbers = of_documents or not self._documents.keys().isdisjoint(_OF_TABLE)
        self._num_context = reader.num_context if targets else 0
        self._ends_documents = bool(self._documents or spans)
        self.as_dict = bool(asked) or self._ends_documents
        self.needs_pieces = self._ends_documents or bool(mask_documents) or (targets and reader.has_padding)
        self.has_targets = self._stored_targets is not None
        self.has_context = self._num_context > 0
        self.of_one_shape = not spans and not of_documents and _OF_SEGMENTS.isdisjoint(self._documents)
        self._require_stored()

    def _opened(self, stored: str) -> StepField:
        return StepField(self._reader, stored, self._seq_len, self._num_inputs, has_targets=self._targets)

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
        for name, field in (self._fields | self._of_documents).items():
            if name in self._documents:
                raise ArgumentError(
                    f"{reader.path}: {name} is asked for as a field, and of the documents: leave out one of them"
                )
            if field.unit == OF_RECORDS:
                field.require_fit()
            if field.unit == OF_DOCUMENTS and not self._ends_documents:
                raise ArgumentError(
                    f"{reader.path}: {name} has a value for each document: a step has it beside its documents, such as "
                    "documents=('cu_seqlens',), and a record has none"
                )
        if (self._ends_documents or self._masked) and not reader.has_pieces:
            reader.read_pieces(np.empty(0, np.int64))  # its error names the thing that is missing
        needs_table = self._needs_numbers or self._masked or self._spans
        if needs_table and reader.corpus.document_table is None:
            raise ArgumentError(f"{reader.path}: holds pieces, and no table of the documents; restore it")
        if SOURCES in self._documents and not self._table.sources:
            raise ArgumentError(f"{reader.path}: its documents name no sources: leave {SOURCES!r} out of documents")
        if self._masked:
            require_masked(reader.path, self._masked, len(self._table), self._targets)

    @property
    def _table(self) -> DocumentTable:
        return self._reader.corpus.require_documents()

    @property
    def columns(self) -> list[Batches]:
        """The fields that are read at each step."""
        names = [field.name for field in self._fields.values() if field.unit == OF_TOKENS]
        names += self._fields_of_targets
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
        return self._step(request, tokens, pieces, self.fields_of(request, tokens.shape[0]).values())

    def steps_of(self, block: npt.NDArray[np.int64], tokens: Iterator[torch.Tensor]) -> Iterator[Any]:
        """Return the steps of a block in the page cache, in order, as `step_of` does.

        Parameters
        ----------
        block
            The requests.
        tokens
            The tokens of each.
        """
        pieces = self.pieces_in(block) if self.needs_pieces else repeat(None)
        fields = zip(*(field.read_all(block) for field in self._fields.values()), strict=False)
        return map(self._step, requests_in(block), tokens, pieces, fields if self._fields else repeat(()))

    def _step(
        self, request: StoredRequest, tokens: torch.Tensor, pieces: Pieces | None, fields: Iterable[Any]
    ) -> dict[str, Any] | tuple[torch.Tensor, torch.Tensor]:
        """Return the step of a request, with the values of its fields, which are read."""
        inputs = tokens if self._num_inputs == self._seq_len else tokens[:, : self._num_inputs]
        step: dict[str, Any] = {"tokens": inputs}
        if self._targets:
            step["targets"] = as_tensor(self._targets_of(tokens.numpy(), pieces, request))
        if not self.as_dict:
            return tokens[:, :-1], step["targets"][:, : tokens.shape[1] - 1]
        if self._fields:  # a step of small documents takes 15 us, and an empty update one of them
            step.update(zip(self._fields, fields, strict=True))
        if pieces is not None and self._ends_documents:
            self._add_documents(step, pieces)
        return step

    def fields_of(self, request: StoredRequest, num_rows: int) -> dict[str, Any]:
        """Return the values of the fields of tokens and of records in a request; rows after it are padding."""
        return {name: field.read(request, num_rows) for name, field in self._fields.items()}

    def _add_documents(self, step: dict[str, Any], pieces: Pieces) -> None:
        """Add the values of documents, and spans."""
        if self._num_inputs < self._seq_len:
            pieces = pieces.first_columns(self._num_inputs)
        for name, value_of in self._values:
            found = value_of(pieces)
            step[name] = found if type(found) is int else from_numpy()(found)
        if self._needs_numbers:
            numbers = self._table.number_of(pieces.offsets)
            for name, field in self._of_documents.items():
                step[name] = field.of_documents(numbers)
            for name, field in self._codes.items():
                codes = field.of_numbers(numbers).astype(np.int64)
                codes[codes == field.padding] = -1
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
            fields = self._fields_of_targets
            self._stored_targets.put_into(found, lambda name: fields[name].of_all(request, len(found)))
        if self._num_context:
            records = records_in(request, self._reader.batch_size)
            found[: len(records)][records > 0, : self._num_context] = IGNORED_TARGET
        if pieces is not None and self._masked:
            views.ignore(found, pieces, np.isin(self._table.number_of(pieces.offsets), self._masked))
        return found[:, : self._num_inputs]

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
