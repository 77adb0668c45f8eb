"""The loader of documents: whole ones, of variable length, padded or packed, for training after pre-training."""

from __future__ import annotations

import os
from collections.abc import Collection, Generator, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from zb_hdf5.documents.spans import WantedSpans
from zb_hdf5.errors import ArgumentError
from zb_hdf5.files.checked import crc32_of
from zb_hdf5.files.paths import any_path
from zb_hdf5.files.ranges import network_file_system
from zb_hdf5.formats.batch_reader import require_choice
from zb_hdf5.loaders.extras import DocumentBatches, masked_numbers, require_masked
from zb_hdf5.loaders.order import Documents, GlobalOrder, LengthOrder, Order, SequentialOrder
from zb_hdf5.loaders.prefetch import cuda_device, depth_of, read_ahead, require_prefetch
from zb_hdf5.loaders.protocol import STATE_VERSION, EpochLoader
from zb_hdf5.loaders.step_reader import numpy_dtype
from zb_hdf5.loaders.steps import Skip, StepPlan, checked_skip, packed_steps, resolve_rank
from zb_hdf5.spec import DEFAULT_SPLIT
from zb_hdf5.store.opening import is_stream, open_reader
from zb_hdf5.store.stream_documents import MmapTokenStore, WindowReader
from zb_hdf5.text.tokenizers import Tokenizer, require_tokenizer

if TYPE_CHECKING:
    import torch

COLLATES: Final = ("pad", "pack")
SHUFFLES: Final = ("global", "lengths", "sequential")
#: Tokens that a cache keeps together.
CACHED_TOKENS: Final = 1 << 16
#: The ways to treat a document that is longer than `max_tokens`.
TOO_LONG: Final = ("refuse", "truncate", "drop")


class DocumentLoader(EpochLoader[dict[str, Any]]):
    """Iterates over the documents of a token stream: one epoch per `iter`, as dictionaries of tensors.

    Parameters
    ----------
    source
        A path for `MmapTokenStore`, or one.
    collate
        "pad": `batch_size` documents, each in a row of its own, all rows as long as the longest. "pack": documents one
        after the other in one dimension, as many as fit into `max_tokens`.
    batch_size
        Documents of a batch on each rank; for "pad" only.
    max_tokens
        The longest row of "pad" (None: any), the longest batch of "pack".
    too_long
        Treatment of a longer document: "refuse" the stream, "truncate" it to its first `max_tokens` tokens, or
        "drop" it. The attribute `documents` counts them.
    pad_to_multiple_of
        Fill rows, or a packed batch, up to a multiple of this. With `max_tokens` all batches have one shape.
    pad_token_id
        The token of padding. It is never a target.
    targets
        True: add the token that follows each one, and -100 for the last one of a document and for padding.
    loss_mask
        The name of a field that is 0 for the tokens that nobody shall learn to write: where one of them follows, the
        target is -100. They are read all the same. It is yielded only if it is one of `fields`.
    shuffle
        "global": a uniform permutation of all documents. "lengths": the same in buckets of `bucket_batches` batches, in
        which documents of similar length share a batch, so that "pad" fills up little. "sequential": as stored.
    dtype
        Type of `tokens`: `torch.int64` or `torch.int32`. Targets are int64.
    fields, spans, seed, epoch, rank, world_size, drop_last, prefetch, device, skip, mask_documents, tokenizer
        As for `Loader`; positions count documents. "pack" fills up the last step with batches from the start of the
        order.
    split, access, verify
        As for `MmapTokenStore`.
    cache, cache_bytes
        As for `open_reader`, for the tokens.

    Attributes
    ----------
    store
        The tokens.
    documents
        `count`, and what is lost to `max_tokens` in each epoch: `truncated_documents`, `truncated_tokens`,
        `dropped_documents`. Empty documents are left out.

    Raises
    ------
    ArgumentError
        If the arguments contradict each other, a document is too long, there are too few for one step, or a field is
        not there.

    Notes
    -----
    A batch holds `tokens` (int64, shape (batch_size, longest), or (tokens,) if packed), `documents` (int64, their
    numbers in the stream), `seq_lens` (int32, the tokens of each), and what is asked for: `targets` (as `tokens`), the
    fields by their names (0 for padding), `spans` and `span_index`. A packed one also has `cu_seqlens` (int32) and
    `max_seqlen` (int) as flash-attention takes them, padding being a segment of its own (its document is -1), and
    `position_ids` (int32), which begin with 0 in each document.

    A new iteration starts the epoch again, except the first one after `load_state_dict`. A state is valid for any other
    `batch_size` (but with `shuffle="lengths"`), `max_tokens` (but with `too_long="drop"`) and `collate`. Not
    thread-safe; picklable. The offsets of all documents are in memory, 8 bytes each.

    Examples
    --------
    >>> loader = DocumentLoader("chats.h5", collate="pack", max_tokens=8192, targets=True)     # doctest: +SKIP
    >>> for batch in loader:                                                                   # doctest: +SKIP
    ...     train(batch["tokens"], batch["targets"], batch["cu_seqlens"], batch["max_seqlen"])
    """

    _counts = "documents"

    def __init__(
        self,
        source: str | os.PathLike[str] | MmapTokenStore,
        *,
        collate: str,
        batch_size: int | None = None,
        max_tokens: int | None = None,
        too_long: str = "refuse",
        pad_to_multiple_of: int = 1,
        pad_token_id: int = 0,
        targets: bool = False,
        loss_mask: str | None = None,
        fields: Sequence[str] = (),
        spans: WantedSpans = False,
        shuffle: str = "global",
        bucket_batches: int = 100,
        seed: int = 42,
        epoch: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        drop_last: bool = True,
        prefetch: int | str = "auto",
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        skip: Collection[tuple[int, int, int]] = (),
        mask_documents: Collection[int] = (),
        tokenizer: str | Tokenizer | None = None,
        split: str = DEFAULT_SPLIT,
        access: str = "auto",
        verify: str = "auto",
        cache: str | os.PathLike[str] | None = None,
        cache_bytes: int | str | None = None,
    ) -> None:
        require_choice("collate", collate, COLLATES)
        require_choice("too_long", too_long, TOO_LONG)
        require_choice("shuffle", shuffle, SHUFFLES)
        _require_sizes(collate, shuffle, batch_size, max_tokens, pad_to_multiple_of)
        require_prefetch(prefetch)
        if bucket_batches < 1:
            raise ArgumentError(f"bucket_batches must be at least 1, found {bucket_batches}")
        if isinstance(source, MmapTokenStore):
            self.store = source
        else:
            self.store = _open_stream(source, cache, cache_bytes, {"split": split, "access": access, "verify": verify})
        self.path = self.store.path
        if tokenizer is not None:
            require_tokenizer(self.store.tokenizer, tokenizer, self.path)
        self.collate, self.batch_size, self.max_tokens, self.too_long = collate, batch_size, max_tokens, too_long
        self.shuffle, self.bucket_batches, self.seed = shuffle, bucket_batches, seed
        self.drop_last, self._prefetch, self._device = drop_last, prefetch, cuda_device(device)
        self.rank, self.world_size = resolve_rank(rank, world_size)
        offsets = self.store.doc_offsets
        try:
            self.documents = Documents(offsets, max_tokens, too_long)
        except ArgumentError as error:
            raise ArgumentError(f"{self.path}: {error}") from None
        self._batches = DocumentBatches(
            self.store, self.documents, collate, pad_to_multiple_of, pad_token_id, targets, loss_mask, tuple(fields),
            spans, numpy_dtype(dtype),
        )  # fmt: skip
        self.skip, self.mask_documents = checked_skip(skip), masked_numbers(mask_documents)
        self._mask()
        # the same tokens with other boundaries are other documents
        self._fingerprint = f"{self.store.fingerprint}:{len(offsets) - 1}:{crc32_of(offsets.data):08x}"
        self.epoch = -1  # none yet
        self._counted: tuple[StepPlan | None, int] = None, 0
        self.set_epoch(epoch)

    def plan_of_epoch(self, epoch: int) -> StepPlan:
        """Return the documents that this rank reads at each step of an epoch; packed, their order only."""
        count, order = self.documents.count, self._order_of(epoch)
        size, skip = self.batch_size or 1, Skip.of(self.skip, epoch, count)
        plan = StepPlan(order, size, self.rank, self.world_size, self.drop_last, size, True, True, skip)
        if next(self._steps(plan, 0), None) is None:
            raise ArgumentError(
                f"{self.path}: {count:,} documents are too few for a step of {self.world_size:,} ranks; "
                "pass a smaller batch_size or max_tokens, or drop_last=False"
            )
        return plan

    def _order_of(self, epoch: int) -> Order:
        if self.shuffle == "lengths" and self.batch_size is not None:
            return LengthOrder(self.documents, self.batch_size, self.bucket_batches, seed=self.seed, epoch=epoch)
        count = self.documents.count
        return SequentialOrder(count) if self.shuffle == "sequential" else GlobalOrder(count, self.seed, epoch)

    def _mask(self) -> None:
        masked, offsets = self.mask_documents, self.store.doc_offsets
        if masked:
            require_masked(self.path, masked, len(offsets) - 1, self._batches.targets)
        self._batches = replace(self._batches, masked=offsets[list(masked)])

    def _steps(self, plan: StepPlan, position: int) -> Iterator[tuple[Any, int]]:
        """Yield the documents of each step from a position on, and the position behind it."""
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
        store, in_flight = self.store, self.store.in_flight
        mean = max(1, store.num_tokens // self.documents.count)
        reads = self.batch_size or -(-(self.max_tokens or 1) // mean)
        depth, threads = depth_of(self._prefetch, in_flight, reads * mean * store.dtype.itemsize, reads)
        if self._prefetch == "auto" and in_flight is None and network_file_system(store.path) is None:
            depth = 0
        return _read_all(self._batches, self._steps(self.plan, position), depth, threads, self._device)

    def identity(self) -> dict[str, Any]:
        """Return the fields that must agree for a position to mean the same document."""
        by_length = self.shuffle == "lengths"
        return {
            "version": STATE_VERSION,
            "kind": "documents",
            "fingerprint": self._fingerprint,
            "shuffle": self.shuffle,
            "seed": int(self.seed),
            "batch_size": self.batch_size if by_length else None,
            "bucket_batches": self.bucket_batches if by_length else None,
            "longest": self.max_tokens if self.too_long == "drop" else None,
        }

    def close(self) -> None:
        """End the reading threads, and close the files."""
        super().close()
        self._batches.close()


def _read_all(
    batches: DocumentBatches, steps: Iterator[tuple[Any, int]], depth: int, threads: int, device: torch.device | None
) -> Generator[tuple[dict[str, Any], int]]:
    """Yield batches, and the position behind each. Threads that read ahead do not refer to the loader."""

    def read(step: tuple[Any, int]) -> tuple[dict[str, Any], int]:
        documents, position = step
        return batches.read(documents), position

    return read_ahead(read, steps, depth, threads=threads, device=device)


def _open_stream(
    source: str | os.PathLike[str], cache: str | os.PathLike[str] | None, cache_bytes: Any, options: dict[str, Any]
) -> MmapTokenStore:
    path = any_path(source)
    if path.exists() and not is_stream(path):
        raise ArgumentError(
            f"{path}: expected a token stream, whose documents are whole, found none; convert text into a stream"
        )
    store = MmapTokenStore(path, **options)
    if cache is None and cache_bytes is None:
        return store
    store.close()
    seq_len = min(CACHED_TOKENS, store.num_tokens)
    reader = open_reader(path, batch_size=1, seq_len=seq_len, cache=cache, cache_bytes=cache_bytes, **options)
    if not isinstance(reader, WindowReader) or reader.dtype != store.dtype:
        raise ArgumentError(f"{path}: a cache keeps tokens of uint16 and uint32, found {store.dtype}; leave out cache")
    reader.store.tokens = reader.tokens
    return reader.store


def _require_sizes(
    collate: str, shuffle: str, batch_size: int | None, max_tokens: int | None, pad_to_multiple_of: int
) -> None:
    """Raise `ArgumentError` for sizes that this way to collate does not have, or that contradict each other."""
    if collate == "pad" and batch_size is None:
        raise ArgumentError('collate="pad" needs batch_size, the documents of a batch')
    if collate == "pack" and (max_tokens is None or batch_size is not None or shuffle == "lengths"):
        raise ArgumentError(
            'collate="pack" needs max_tokens, the longest batch, and takes neither batch_size nor shuffle="lengths", '
            f"it has no rows to fill up; found max_tokens={max_tokens}, batch_size={batch_size}, shuffle={shuffle!r}"
        )
    sizes = {"batch_size": batch_size, "max_tokens": max_tokens, "pad_to_multiple_of": pad_to_multiple_of}
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise ArgumentError(f"{name} must be at least 1, found {size}")
    if max_tokens is not None and max_tokens % pad_to_multiple_of:
        raise ArgumentError(
            f"max_tokens must be a multiple of {pad_to_multiple_of}, which is filled up to, found {max_tokens}"
        )
