"""The loader of documents: whole ones, of variable length, padded or packed, for training after pre-training."""

from __future__ import annotations

import os
from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import nullcontext
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

import numpy as np
import numpy.typing as npt

from zb_hdf5.documents import pieces as views
from zb_hdf5.documents.metadata import WantedSpans
from zb_hdf5.documents.pieces import Pieces, ends_of, spans_of_pieces
from zb_hdf5.errors import ArgumentError, counted, positive, require_choice, whole_number
from zb_hdf5.field import LOSS_MASK
from zb_hdf5.files.file_systems import is_on_network
from zb_hdf5.files.named_splits import AUTO_SPLIT
from zb_hdf5.files.paths import on_failure
from zb_hdf5.files.tokens import Tokens
from zb_hdf5.formats.access import Verify
from zb_hdf5.formats.batches import Batches
from zb_hdf5.formats.corpus import Corpus
from zb_hdf5.loaders.ahead import cuda_device, depth_of, hint_ahead, hinted_steps, read_to, require_prefetch
from zb_hdf5.loaders.document_order import Documents, LengthOrder, packed_steps
from zb_hdf5.loaders.loader_options import Collate, DocumentShuffle, TooLong
from zb_hdf5.loaders.order import (
    GlobalOrder,
    IndexArray,
    Order,
    SequentialOrder,
    Skip,
    StepPlan,
    resolve_rank,
    whole_seed,
    with_companion,
)
from zb_hdf5.loaders.step_field import (
    OF_DOCUMENTS,
    OF_RECORDS,
    OF_TOKENS,
    StepField,
    as_tensor,
    value_count,
    value_shape,
)
from zb_hdf5.loaders.step_values import WantedFields, require_masked, wanted_fields
from zb_hdf5.loaders.steps import may_overflow, numpy_dtype, require_no_overflow
from zb_hdf5.loaders.stored_targets import StoredTargets, has_targets
from zb_hdf5.loaders.token_loader import EpochLoader
from zb_hdf5.packages import LaterModule
from zb_hdf5.read_as import AS_STORED, ReadAs
from zb_hdf5.spec import NO_DOCUMENT, TokenArray
from zb_hdf5.store.cache import Cache, num_fetched
from zb_hdf5.store.opening import open_for_loader
from zb_hdf5.store.store_corpus import StoreCorpus
from zb_hdf5.text.tokenizers import Tokenizer, require_tokenizer

if TYPE_CHECKING:
    import torch
else:
    torch = LaterModule("torch", "torch")

#: The batches of a bucket of documents of similar length, unless another number is given.
BUCKET_BATCHES: Final = 100


def pieces_of_documents(
    starts: npt.NDArray[np.uint64],
    lengths: npt.NDArray[np.int64],
    multiple: int,
    *,
    packed: bool,
) -> Pieces:
    """Return the pieces of documents, each of them in a record of its own, or all in one.

    Parameters
    ----------
    starts, lengths
        The offset of the first token of each document, and its tokens.
    multiple
        The records are filled up to a multiple of so many tokens.
    packed
        All documents are in one record.
    """
    ends = ends_of(lengths)
    filled = ends[-1:] if packed else lengths
    seq_len = -(-int(filled.max()) // multiple) * multiple
    is_short = filled < seq_len
    edges = ends_of(is_short + (len(lengths) if packed else 1))
    columns = np.zeros(edges[-1], np.uint32)
    columns[edges[1:][is_short] - 1] = filled[is_short]
    offsets = np.full(edges[-1], NO_DOCUMENT, np.uint64)
    if packed:
        columns[: len(starts)] = ends[:-1]
        offsets[: len(starts)] = starts
    else:
        offsets[edges[:-1]] = starts
    return Pieces(edges, columns, offsets, seq_len)


def gather(column: Batches, pieces: Pieces, fill: Any = 0, dtype: Any = None) -> npt.NDArray[Any]:
    """Return the values of the tokens in some pieces, shape (records, tokens of a record, ...).

    Parameters
    ----------
    column
        The tokens, or a field.
    pieces
        The pieces of the records.
    fill
        The value of padding.
    dtype
        The dtype of the result; None: as stored.
    """
    shape = value_shape(column)
    size = value_count(column)
    values = np.zeros(pieces.num_tokens * size, dtype or column.dtype)
    if fill:  # only then: filling bytes with 0 gives the text "0"
        values.fill(fill)
    is_stored = pieces.offsets != NO_DOCUMENT
    starts = (pieces.offsets[is_stored].astype(np.int64) * size).tolist()
    counts = (pieces.lengths[is_stored].astype(np.int64) * size).tolist()
    places = (pieces.starts[is_stored].astype(np.int64) * size).tolist()
    column.tokens.pages.residency.watch_some(_fill, values, places, _parts(column.tokens, starts, counts))
    return values.reshape(-1, pieces.seq_len, *shape)


def _fill(values: npt.NDArray[Any], places: list[int], parts: list[TokenArray]) -> None:
    for place, part in zip(places, parts, strict=True):
        values[place : place + len(part)] = part


def _parts(tokens: Tokens, starts: list[int], counts: list[int]) -> list[TokenArray]:
    """Return tokens from some positions on: views of a mapping where they are in memory, else read together."""
    tokens.pages.expect(starts, counts)
    # this asks for the size of each file once; a view of a file asks for its size at each document
    flat = tokens.flat() if len(tokens.files.starts) <= len(starts) + 1 else None
    if flat is not None:
        return [flat[start : start + count] for start, count in zip(starts, counts, strict=True)]
    parts = [np.empty(count, tokens.dtype) for count in counts]
    tokens.read(zip(starts, parts, strict=True))
    return parts


class DocumentLoader(EpochLoader[dict[str, Any]]):
    """Iterates over the documents of a token stream: one epoch per `iter`, as dictionaries of tensors.

    Parameters
    ----------
    source
        A path for `open_corpus`, or a corpus that is a token stream, such as `open_corpus(path, access="pread")`.
        The loader closes what it has opened itself.
    collate
        "pad": `batch_size` documents, each in a row of its own, all rows as long as the longest. "pack": documents one
        after the other in one dimension, as many as fit into `max_tokens`. `("pad", 64)` and `("pack", 64)` fill rows,
        or the batch, up to a multiple of 64. With `max_tokens` all batches then have one shape.
    batch_size
        Documents of a batch on each rank; for "pad" only.
    max_tokens
        The longest row of "pad" (None: any), the longest batch of "pack". A stream with longer documents is refused;
        `(8192, "truncate")` keeps their first 8,192 tokens, and `(8192, "drop")` leaves them out. The attribute
        `documents` counts them.
    pad_token_id
        The token of padding. It is never a target.
    shuffle
        "global": a uniform permutation of all documents. "lengths": the same in buckets of 100 batches, in which
        documents of similar length share a batch, so that "pad" fills up little; `("lengths", 50)` has buckets of
        another size. "sequential": as stored.
    targets
        True: add the token that follows each one, and -100 for the last one of a document and for padding.
        Fields `labels` and `loss_mask` are used as `Loader` does. The name of another field takes that one in place of
        `loss_mask`: where it is 0 for the token that follows, the target is -100. The field is yielded only if it is
        one of `fields`.
    labels
        As for `Loader`.
    fields
        As for `Loader`: those of a field set with a value for each document have one for each of `documents`; those
        with a value for each window of a stream have none here. Padding has the `fill` of a field, else 0.
    seed, spans, drop_last, rank, world_size, device, prefetch, skip, mask_documents, tokenizer, split
        As for `Loader`; positions count documents. "pack" fills up the last step with batches from the start of the
        order.
    dtype
        Type of `tokens`: `torch.int64` or `torch.int32`. Targets are int64.
    read_as, cache, verify
        As for `open_corpus`, for a path alone; the cache is for the tokens.

    Attributes
    ----------
    corpus
        The token stream.
    documents
        `count`, and the losses to `max_tokens` in each epoch: `truncated_documents`, `truncated_tokens`,
        `dropped_documents`. Empty documents are left out.

    Raises
    ------
    ArgumentError
        If the arguments contradict each other, a document is too long, there are too few for one step, or a field is
        not there.

    Notes
    -----
    A batch holds `tokens` (int64, shape (batch_size, longest), or (tokens,) if packed), `documents` (int64, their
    numbers in the stream), `seq_lens` (int32, the tokens of each), and by request `targets` (as `tokens`), the fields
    by their names (0 for padding), `spans` and `span_index`. A packed one also has `cu_seqlens` (int32) and
    `max_seqlen` (int) as flash-attention takes them, padding being a segment of its own (its document is -1), and
    `position_ids` (int32), which begin with 0 in each document.

    A new iteration starts the epoch again, except the first one after `load_state_dict`; the second one over a whole
    shuffled epoch gives one `UserWarning`. A state is valid for any other
    `batch_size` (but with `shuffle="lengths"`), `max_tokens` (but with "drop") and `collate`. Not
    thread-safe; picklable. The offsets of all documents are in memory, 8 bytes each.

    Examples
    --------
    >>> loader = DocumentLoader("chats.h5", collate="pack", max_tokens=8192, targets=True)     # doctest: +SKIP
    >>> for batch in loader:                                                                   # doctest: +SKIP
    ...     train(batch["tokens"], batch["targets"], batch["cu_seqlens"], batch["max_seqlen"])
    """

    _counts = "documents"
    _changed_by_state: ClassVar[tuple[str, ...]] = (*EpochLoader._changed_by_state, "_masked")

    def __init__(
        self,
        source: str | os.PathLike[str] | Corpus,
        *,
        collate: Collate | tuple[Collate, int],
        batch_size: int | None = None,
        max_tokens: int | tuple[int, TooLong] | None = None,
        pad_token_id: int = 0,
        shuffle: DocumentShuffle | tuple[Literal["lengths"], int] = "global",
        seed: int = 42,
        targets: bool | str = False,
        labels: str | None = None,
        fields: WantedFields = (),
        spans: WantedSpans = False,
        drop_last: bool = True,
        rank: int | None = None,
        world_size: int | None = None,
        dtype: torch.dtype | None = None,
        device: str | torch.device | None = None,
        prefetch: int | str = "auto",
        skip: Collection[tuple[int, int, int]] = (),
        mask_documents: Collection[int] = (),
        tokenizer: str | Tokenizer | None = None,
        split: str | None = AUTO_SPLIT,
        read_as: ReadAs = AS_STORED,
        cache: str | os.PathLike[str] | Cache | None = None,
        verify: Verify = "auto",
    ) -> None:
        self.collate, self._multiple = with_companion("collate", collate, 1)
        self.max_tokens, self.too_long = with_companion("max_tokens", max_tokens, "refuse")
        self.shuffle, self.bucket_batches = with_companion("shuffle", shuffle, BUCKET_BATCHES)
        self.batch_size = batch_size
        self._require_words(shuffle)
        self._require_sizes()
        require_prefetch(prefetch)
        pad_token_id = whole_number("pad_token_id", pad_token_id)
        found, self._closes = open_for_loader(source, 1, 1, split=split, verify=verify, read_as=read_as, cache=cache)
        with on_failure(found.close) if self._closes else nullcontext():
            corpus = found.corpus
            self.path = corpus.path
            if not (isinstance(corpus, StoreCorpus) and corpus.is_stream):
                raise ArgumentError(f"{self.path}: not a token stream: expected documents, found batches")
            self.corpus = corpus
            self._tokens = found  # each token is a record
            if tokenizer is not None:
                require_tokenizer(corpus.meta.tokenizer, tokenizer, self.path)
            self.seed = whole_seed(seed)
            self.drop_last = drop_last
            self.targets = bool(targets)
            self._prefetch = prefetch
            self._device = cuda_device(device)
            self._loss_mask = targets if isinstance(targets, str) else None
            self._spans = spans
            self._pad_token_id = pad_token_id
            self._dtype = numpy_dtype(dtype)
            self._may_overflow = pad_token_id >= 0 and may_overflow(found, self._dtype)
            self.rank, self.world_size = resolve_rank(rank, world_size)
            self.documents = Documents(corpus.doc_offsets, self.max_tokens, self.too_long, self.path)
            asked = {name: self._opened(stored) for name, stored in wanted_fields(fields).items()}
            self._fields = {name: field for name, field in asked.items() if field.unit == OF_TOKENS}
            self._of_documents = {name: field for name, field in asked.items() if field.unit == OF_DOCUMENTS}
            self._kinds = {name: field.kind for name, field in asked.items()}
            self._fills = {field.name: field.fill for field in self._fields.values()}
            self._columns = self._open_columns()
            self._stored_targets = self._targets_of(labels)
            self._fingerprint = corpus.known_as.of_documents(corpus.doc_offsets)
            self._counted: tuple[StepPlan | None, int] = (None, 0)
            self._begin_with(skip, mask_documents)

    def _require_words(self, shuffle: Any) -> None:
        """Raise `ArgumentError` unless each word is one that a `DocumentLoader` takes."""
        require_choice("collate", self.collate, ("pad", "pack"))
        require_choice("the second value of max_tokens", self.too_long, ("refuse", "truncate", "drop"))
        require_choice("shuffle", self.shuffle, ("global", "lengths", "sequential"))
        if isinstance(shuffle, tuple | list) and self.shuffle != "lengths":
            raise ArgumentError(f'shuffle: "lengths" alone takes a number, the batches of a bucket, found {shuffle!r}')

    def _require_sizes(self) -> None:
        """Raise `ArgumentError` for sizes that this way to collate does not have, or that contradict each other."""
        batch_size = self.batch_size = positive("batch_size", self.batch_size)
        max_tokens = self.max_tokens = positive("max_tokens", self.max_tokens)
        multiple = self._multiple = positive("the multiple of collate", self._multiple)
        self.bucket_batches = positive("bucket_batches", self.bucket_batches)
        if self.collate == "pad" and batch_size is None:
            raise ArgumentError('collate="pad" needs batch_size, the documents of a batch')
        is_packed = self.collate == "pack"
        if is_packed and (max_tokens is None or batch_size is not None or self.shuffle == "lengths"):
            raise ArgumentError(
                'collate="pack" needs max_tokens, the longest batch, and takes neither batch_size nor '
                f'shuffle="lengths", it has no rows to fill up; found max_tokens={max_tokens}, '
                f"batch_size={batch_size}, shuffle={self.shuffle!r}"
            )
        if max_tokens is not None and max_tokens % multiple:
            raise ArgumentError(f"max_tokens must be a multiple of {multiple}, as collate has it, found {max_tokens}")

    def __repr__(self) -> str:
        sizes = f"collate={self.collate!r}, batch_size={self.batch_size}, max_tokens={self.max_tokens}"
        order = f"shuffle={self.shuffle!r}, seed={self.seed}, epoch={self.epoch}"
        where = f"rank={self.rank}, world_size={self.world_size}"
        return f"{type(self).__name__}({str(self.path)!r}, {sizes}, {order}, {where})"

    def _opened(self, stored: str) -> StepField:
        """Open a field; `ArgumentError` if it is not there, or no document has values of it."""
        found = StepField(self._tokens, stored, 1, 1, has_targets=self.targets)
        if found.unit == OF_RECORDS:
            raise ArgumentError(
                f"{self.path}: {stored} has a value for each window of the stream, and documents are none: a Loader "
                "with these windows gives it"
            )
        return found

    def _open_columns(self) -> dict[str, Batches]:
        """Open the values of tokens that are read; `ArgumentError` if a field cannot be a mask."""
        mask = self._loss_mask
        if self.collate == "pack" and "position_ids" in self._fields:
            raise ArgumentError(f"{self.path}: collate='pack' gives position_ids of its own: leave the field out")
        columns = {field.name: self._tokens.field(field.name) for field in self._fields.values()}
        if mask is None:
            return columns
        column = self._tokens.field(mask)
        if value_shape(column) or column.dtype.kind not in "biuf":
            raise ArgumentError(
                f"{self.path}: expected targets to name a field of one number for each token, found {mask!r}, "
                f"{column.dtype} of shape {value_shape(column)}"
            )
        return columns

    def _targets_of(self, labels: str | None) -> StoredTargets | None:
        """Return the targets of the fields of the stream, which become columns; None: there are none."""
        if not self.targets or (self._loss_mask is None and not has_targets(self._tokens)):
            return None
        found = StoredTargets(self._tokens, labels, self._loss_mask or LOSS_MASK)
        self._columns |= {name: self._tokens.field(name) for name in found.names}
        return found

    def plan_of_epoch(self, epoch: int) -> StepPlan:
        """Return the documents that this rank reads at each step of an epoch; packed, their order only."""
        count = self.documents.count
        size = self.batch_size or 1
        order: Order
        if self.shuffle == "sequential":
            order = SequentialOrder(count)
        elif self.shuffle == "lengths":  # with "pad" only, which has a batch size
            options = {"seed": self.seed, "epoch": epoch, "version": self._version_of(epoch)}
            order = LengthOrder(self.documents, size, self.bucket_batches, **options)
        else:
            order = GlobalOrder(count, self.seed, epoch, self._version_of(epoch))
        plan = StepPlan(
            order,
            size,
            self.rank,
            self.world_size,
            "drop" if self.drop_last else "fill",
            records_per_batch=size,
            scattered=True,
            whole_records=True,
            skip=Skip.of(self.skip, epoch, count),
        )
        if next(self._steps(plan, 0), None) is None:
            raise ArgumentError(
                f"{self.path}: {count:,} documents are too few for a step of {counted(self.world_size, 'rank')}; "
                "pass a smaller batch_size or max_tokens, or drop_last=False"
            )
        return plan

    def _mask(self) -> None:
        masked = np.array(self.mask_documents, np.int64)
        offsets = self.corpus.doc_offsets
        if len(masked):
            require_masked(self.path, self.mask_documents, len(offsets) - 1, self.targets)
        # an empty document has the offset of the next one that has tokens
        self._masked = offsets[masked[offsets[masked] < offsets[masked + 1]]]

    def _steps(self, plan: StepPlan, position: int) -> Iterator[tuple[Any, int]]:
        """Yield the documents of each step from a position on, and the position after it."""
        if self.batch_size is not None:
            return zip(plan.requests_from(position), plan.positions_from(position), strict=False)
        return packed_steps(plan, self.documents, position, self.max_tokens or 0)

    def __len__(self) -> int:
        """Steps of this epoch. Packed, each epoch has its own number, found from the lengths of all documents."""
        if self.batch_size is not None:
            return self.plan.steps_from(0)
        if self._counted[0] is not self.plan:
            self._counted = self.plan, sum(1 for _ in self._steps(self.plan, 0))
        return self._counted[1]

    def _read_from(self, position: int) -> Generator[tuple[dict[str, Any], int]]:
        store = self._tokens
        read = copy(self)._read  # threads that read ahead do not refer to the loader
        mean = max(1, self.corpus.num_tokens // self.documents.count)
        reads = self.batch_size or -(-(self.max_tokens or 1) // mean)
        step_bytes = reads * mean * store.dtype.itemsize
        on_network = partial(is_on_network, store.path)
        depth, threads = depth_of(self._prefetch, store.tokens, on_network, self._device, step_bytes, reads)
        steps = self._steps(self.plan, position)
        if self._prefetch == "auto" and not depth:
            columns = (store, *self._columns.values())
            step_bytes = reads * mean * sum(value_count(each) * each.dtype.itemsize for each in columns)
            hinted = hinted_steps(reads, step_bytes)
            return hint_ahead(lambda step: (read(step[0]), step[1]), self._announce, steps, hinted)
        return read_to(self._device, lambda step: (read(step[0]), step[1]), steps, depth, threads)

    def _announce(self, steps: Sequence[tuple[IndexArray, int]]) -> None:
        """Announce the documents of some steps, unless their tokens are in memory."""
        documents = np.concatenate([step[0] for step in steps])
        starts = self.documents.starts(documents).astype(np.int64)
        lengths = self.documents.lengths(documents).astype(np.int64)
        for column in (self._tokens, *self._columns.values()):
            size = value_count(column)
            column.tokens.pages.announce((starts * size).tolist(), (lengths * size).tolist())

    def _read(self, documents: IndexArray) -> dict[str, Any]:
        """Return the batch of these documents, numbered as in `Documents`."""
        starts = self.documents.starts(documents)
        lengths = self.documents.lengths(documents)
        packed = self.collate == "pack"
        pieces = pieces_of_documents(starts, lengths, self._multiple, packed=packed)
        read = {name: gather(column, pieces, self._fills.get(name, 0)) for name, column in self._columns.items()}
        values = {"tokens": gather(self._tokens, pieces, self._pad_token_id, self._dtype)}
        if self._may_overflow:
            require_no_overflow(self._tokens, values["tokens"])
        if self.targets:
            values["targets"] = views.targets(values["tokens"], pieces)
            if self._stored_targets is not None:
                self._stored_targets.put_into(values["targets"], read.__getitem__)
            if len(self._masked):
                views.ignore(values["targets"], pieces, np.isin(pieces.offsets, self._masked))
        values |= {name: field.in_documents(read[field.name], pieces) for name, field in self._fields.items()}
        others: dict[str, Any] = {}
        if self._spans:
            spans_of = partial(self.corpus.require_documents().spans_of, codec=self._spans)
            others["spans"], values["span_index"] = spans_of_pieces(pieces, spans_of)
        if packed:
            values["position_ids"] = views.position_ids(pieces)
            values = {name: rows[0] for name, rows in values.items()} | {"cu_seqlens": views.cu_seqlens(pieces)}
            others["max_seqlen"] = views.max_seqlen(pieces)
            lengths = pieces.lengths
        values["documents"] = np.full(len(lengths), views.PADDING_ID)
        values["documents"][: len(documents)] = self.documents.numbers(documents)
        values["seq_lens"] = lengths.astype(np.int32)
        values |= {name: field.of_numbers(values["documents"]) for name, field in self._of_documents.items()}
        return {name: as_tensor(array, self._kinds.get(name, "")) for name, array in values.items()} | others

    def identity(self) -> dict[str, Any]:
        """Return the fields that must agree for a position to mean the same document."""
        by_length = self.shuffle == "lengths"
        return {
            "version": self.plan.order.version,
            "kind": "documents",
            "fingerprint": self._fingerprint,
            "shuffle": self.shuffle,
            "seed": int(self.seed),
            "batch_size": self.batch_size if by_length else None,
            "bucket_batches": self.bucket_batches if by_length else None,
            "longest": self.max_tokens if self.too_long == "drop" else None,
        }

    def _num_fetched(self) -> int | None:
        return num_fetched(self.corpus)

    def close(self) -> None:
        """End the reading threads, and close the corpus if this loader has opened it."""
        super().close()
        if self._closes:
            self.corpus.close()
