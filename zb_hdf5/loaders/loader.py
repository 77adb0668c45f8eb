"""The loader: batches, an order, a rank and a position.

A position counts the records that all ranks together have consumed in the epoch. A step takes the next
`batch_size * world_size` of them, rank r the r-th part: a checkpoint fits any number of ranks and any batch size.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Generator, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from math import isqrt
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, NoReturn, Self, TypeAlias, Unpack, overload

from zb_hdf5.documents.metadata import DecodeValue, WantedSpans
from zb_hdf5.errors import ArgumentError, counted, positive, require_choice, whole_number
from zb_hdf5.files.named_splits import AUTO_SPLIT
from zb_hdf5.files.paths import on_failure
from zb_hdf5.files.urls import without_secrets
from zb_hdf5.formats.access import Access, Verify
from zb_hdf5.formats.batches import Batches
from zb_hdf5.formats.corpus import Corpus
from zb_hdf5.formats.fingerprint import FINGERPRINT_SAMPLES
from zb_hdf5.formats.windows import Windows
from zb_hdf5.loaders.ahead import cuda_device
from zb_hdf5.loaders.loader_options import (
    DocumentName,
    DocumentStep,
    LoaderOptions,
    PairBatch,
    TokenBatch,
    WantedDocuments,
)
from zb_hdf5.loaders.order import LASTS, Skip, StepPlan, block_shuffle, make_order, resolve_rank, whole_seed
from zb_hdf5.loaders.state import short_repr
from zb_hdf5.loaders.step_values import WantedFields, code_field
from zb_hdf5.loaders.steps import BatchT, StepReader
from zb_hdf5.loaders.token_loader import EpochLoader, with_positions
from zb_hdf5.packages import LaterModule
from zb_hdf5.read_as import AS_STORED, ReadAs
from zb_hdf5.spec import DTYPE_BY_NAME, LIVE_PREFIX
from zb_hdf5.store.cache import Cache, num_fetched
from zb_hdf5.store.opening import open_for_loader
from zb_hdf5.text.tokenizers import Tokenizer, require_tokenizer

if TYPE_CHECKING:
    import torch

    from zb_hdf5.loaders import datasets
else:
    torch = LaterModule("torch", "torch")
    datasets = LaterModule("zb_hdf5.loaders.datasets", "torch")

#: Bytes of the largest batch that is read to find the size of batches that a state was taken with.
MOST_TRIED_BYTES: Final = 64 << 20
#: Bytes that are read for it in all: some seconds. It is the time that a state of other data takes to be refused.
MOST_READ_BYTES: Final = 4 << 30
#: A path for `open_corpus`, a corpus, or batches.
StoreOrPath: TypeAlias = str | os.PathLike[str] | Corpus | Batches


def _last_step(last: str | None, drop_last: bool, targets: bool) -> str:
    """Return the value of `last`; if none is given, the one that `drop_last` stands for."""
    if last is None:
        return "drop" if drop_last else "fill"
    require_choice("last", last, LASTS)
    if last == "masked" and not targets:
        raise ArgumentError('last="masked" gives rows of padding the target -100: it needs targets=True')
    return last


def _require_divisor(batches: Batches, seq_len: int) -> None:
    """Raise `ArgumentError` unless the records of a loader are whole parts of those that are stored."""
    if seq_len < 1 or batches.seq_len % seq_len:
        raise ArgumentError(f"{batches.path}: seq_len must divide the stored {batches.seq_len}, found {seq_len}")


def _require_one_store(source: object) -> None:
    """Raise `ArgumentError` for several stores."""
    if isinstance(source, list | tuple):
        found = without_secrets(repr(source))
        raise ArgumentError(f"a Loader reads one store, found {found:.80}; a MixedLoader reads several stores")


def _require_fixed_order(batches: Batches, shuffle: str) -> None:
    """Raise `ArgumentError` if a store that grows would be shuffled: its order would change with each batch."""
    if shuffle != "sequential" and not batches.complete and batches.fingerprint.startswith(LIVE_PREFIX):
        raise ArgumentError(
            f'{batches.path}: still grows: shuffle must be "sequential" until it is complete, found {shuffle!r}; '
            "a FollowingLoader waits for new batches"
        )


def batches_of_state(batches: Batches, state: Mapping[str, Any]) -> Batches:
    """Return the same records in batches of the size that a state was taken with, if its fingerprint is of such."""
    fingerprint = state.get("fingerprint")
    if fingerprint == batches.fingerprint:
        return batches
    for size in _sizes_of_state(batches, fingerprint, state.get("position")):
        try:
            other = batches.resized(size)
        except ArgumentError:  # no stream has batches of that size
            continue
        if other.num_records and other.fingerprint == fingerprint:
            return other
    return batches


def _sizes_of_state(batches: Batches, fingerprint: object, position: object) -> Iterator[int]:
    """Yield the sizes of batches that a state may have been taken with.

    The fingerprint of windows has it. That of a lone file of another program is one hash of a sample, in which the size
    of the batches counts: each size is tried. Those that divide the position come first, since most states follow a
    number of whole steps: the others take as long as their samples are read.
    """
    try:
        yield Windows.in_fingerprint(fingerprint).size
        return
    except ArgumentError:
        pass
    if not batches.corpus.joins_records or not isinstance(fingerprint, str) or ":" not in fingerprint:
        return
    record_bytes = batches.seq_len * batches.dtype.itemsize
    most = min(batches.num_records, MOST_TRIED_BYTES // record_bytes)
    powers = (1 << power for power in range(most.bit_length()))
    tried: set[int] = set()
    left = MOST_READ_BYTES
    for size in chain(_divisors(position, most), powers, range(1, most + 1)):
        if size in tried:
            continue
        tried.add(size)
        left -= min(FINGERPRINT_SAMPLES, batches.num_records // size) * size * record_bytes
        if left < 0:
            return
        yield size


def _divisors(number: object, most: int) -> list[int]:
    """Return the divisors of a positive whole number up to a largest one, in order; of anything else none."""
    if type(number) is not int or number < 1:
        return []
    small = [each for each in range(1, min(isqrt(number), most) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small if number // each <= most)})


class Loader(EpochLoader[BatchT]):
    """Iterates over the batches of a store: one epoch per `iter`, as tensors of shape (batch_size, seq_len).

    Parameters
    ----------
    source
        A path for `open_corpus`, a corpus, or batches of one. The loader closes what it has opened itself.
    batch_size, seq_len
        Shape of the tensors; default: as stored. Any `batch_size`; a `seq_len` that divides the stored one. A token
        stream (see `open_reader`) needs both: they are the shape of its windows, and x and y of `targets` have all of
        `seq_len`.
    shuffle
        "global": a uniform permutation of all stored batches. "records": a uniform permutation of all records, so that
        no record keeps its batch-mates; random reads of one record each. "block": ZeroBatch's shuffle of blocks of
        256 consecutive batches; `("block", 64)` has blocks of another size. "sequential": as stored.
    seed
        The order depends on it and on the epoch only, and is the same in every backend. `set_epoch` chooses the epoch.
    targets
        True: yield `(x, y)`, the records without their last and without their first token: views of one tensor. Where
        it is stored which parts of the records are padding, y is -100 there, and with `documents` or `spans` also where
        the next token belongs to another document.
        A store that has a field `labels` gives these as y: each of its own token, or of the token after it, whichever
        the labels are, and -100 for a negative one. If it has a field `loss_mask`, y is -100 for a value of 0: that
        of the token that y is, or that of the labels. Each has one number for each token, labels whole ones of any
        dtype; a field of these names that has others is refused.
    labels
        "own": the label of a token is the token itself. "next": it is the one after it. None: the labels tell which,
        and where they do not, it has to be given.
    documents
        True for `cu_seqlens` and `max_seqlen`, or the names of arrays to add about the documents of the batch:
        `cu_seqlens` (int32: where each segment of the whole batch begins and the last one ends, as flash-attention's
        variable-length functions take it), `max_seqlen` (int: the tokens of the longest segment), `seq_lens` (int32),
        `position_ids` (int32, (batch_size, seq_len), from 0 in each segment), `document_ids` (int32, the same shape:
        the number of the segment in the batch, -1 for padding), `documents` (int64: the store's number of the document
        of each segment, -1 for padding) and `sources` (int64: the place in `Loader.sources` of the file that this
        document came from, -1 where it is not known). A segment is a part of one document in one row, or padding: all
        follow from the stored pieces, and nothing from token ids.
        `("cu_seqlens", 4096)` among the names fills it up to this length, for `torch.compile` and CUDA graphs.
        `"meta:lang"`, or `("meta", "lang")`, gives "meta:lang" (int64): the code of the document of each segment in
        `Loader.words("lang")`, -1 where it has none. `zb fields make` makes these codes.
    fields
        Names of fields: their values come with the tokens, shape (batch_size, seq_len, ...). "teacher/logprobs" is a
        field of the field set "teacher" (`open_field_set`): of a field of records the shape is (batch_size, ...), of
        documents each segment has a value. `{"ref": "teacher/logprobs"}` gives it another name. See the notes.
    spans
        True: add `spans`, the list of the values of the spans in the batch, and `span_index` (int32, (batch_size,
        seq_len)): the place in it of the span of each token, -1 for none. Where
        a function has encoded the values, give the one that decodes them.
    drop_last
        True stands for `last="drop"`, False for `last="fill"`; without effect where `last` is given.
    last
        The last step of an epoch, if fewer records are left than all ranks take in a step. Every rank makes the same
        number of steps in any case. "drop": these records are left out, and the step with them. "fill": the step is
        filled up with records from the start of the order, which come twice. "short": its batches have fewer rows, and
        none on a rank for which no record is left. "masked": its batches have all of their rows; rows for which no
        record is left hold token 0, the target -100, fields of 0, and no document or span (needs `targets`). An
        evaluation with "short" or "masked" counts each record once. A state does not have it, and fits any other.
    rank, world_size
        Which share of each epoch this process takes. None: from `torch.distributed` if initialised, else the variables
        RANK and WORLD_SIZE, else as `srun` has started the task, else 0 of 1. Ranks that must see the same data
        (tensor or pipeline parallel) pass their data-parallel rank.
    dtype
        `torch.int64`, or `torch.int32`: half the memory; a mapped uint32 store then needs no copy
        (see `Batches.read_batch_int32` for writing into it). Ids from 2**31 on are refused when they are met.
    device
        A CUDA device: at least one thread reads batches and pins them, and their copies do not wait.
    prefetch
        Batches to read ahead in background threads; in one thread while the data are in the page cache. 0: none, which
        is fastest then.
        "auto": 32 MiB of a store at a URL; 8 with a `device` or on a network file system; else none, but if the
        coming batches are not in the page cache the kernel gets a hint of each of them 64 batches ahead, or reads them
        past the page cache if they are whole and memory cannot hold half of the store.
    skip
        (epoch, start, stop): jump over these positions of an epoch, for example bad data that made the loss jump.
    mask_documents
        Numbers of documents whose tokens get the target -100. Shapes and positions stay.
    tokenizer
        As for `load_tokenizer`, or a tokenizer: refuse a store whose tokens another one has made.
    split
        The split to read of a store with several, or of a folder of files whose names tell them: "train", "val" or
        "test". "auto": that for training, or the only one of such a folder. None or "all": all.
    read_as, cache, verify, access, backend
        As for `open_corpus`, for a path alone: an open corpus has fixed them.

    Raises
    ------
    ArgumentError
        If the arguments contradict each other, or the store has too few records for one step.

    Notes
    -----
    A `FollowingLoader` waits for the batches of a live writer, a `DocumentLoader` gives whole documents of a stream, a
    `MixedLoader` mixes stores, and a `TextLoader` tokenizes text.

    A new iteration starts the epoch again, except the first one after `load_state_dict`, which goes on where the state
    was taken. The second iteration over a whole shuffled epoch gives one `UserWarning`: call `set_epoch` between them.
    `next(loader)` and `get_batch()` need no iteration, and go on from epoch to epoch. Not thread-safe;
    picklable. `DataLoader` and trainers take `dataset()` or `records()`.

    With `fields`, `documents` or `spans` each step is a dictionary: "tokens", "targets" if asked for (of the same
    shape, -100 where there is none), and the other values by their names. `skip` and `mask_documents` are kept in the
    state: a loader that resumes has both, its own and the ones in the state.

    Examples
    --------
    >>> loader = Loader("data/train", seed=42)                          # doctest: +SKIP
    >>> for epoch in range(3):                                          # doctest: +SKIP
    ...     loader.set_epoch(epoch)
    ...     for batch in loader:
    ...         train(batch)
    """

    _shared_epoch: datasets.SharedEpoch | None = None
    _least_steps = 1
    _changed_by_state: ClassVar[tuple[str, ...]] = (
        *EpochLoader._changed_by_state,
        "batches",
        "steps",
        "batch_size",
        "_fingerprint",
    )

    @overload
    def __init__(
        self: Loader[TokenBatch],
        source: StoreOrPath,
        *,
        targets: Literal[False] = ...,
        fields: tuple[()] = ...,
        documents: Literal[False] = ...,
        spans: Literal[False] = ...,
        **options: Unpack[LoaderOptions],
    ) -> None: ...

    @overload
    def __init__(
        self: Loader[PairBatch],
        source: StoreOrPath,
        *,
        targets: Literal[True],
        fields: tuple[()] = ...,
        documents: Literal[False] = ...,
        spans: Literal[False] = ...,
        **options: Unpack[LoaderOptions],
    ) -> None: ...

    @overload
    def __init__(
        self: Loader[dict[str, Any]],
        source: StoreOrPath,
        *,
        targets: bool = ...,
        fields: WantedFields,
        documents: WantedDocuments = ...,
        spans: WantedSpans = ...,
        **options: Unpack[LoaderOptions],
    ) -> None: ...

    @overload
    def __init__(
        self: Loader[DocumentStep],
        source: StoreOrPath,
        *,
        targets: bool = ...,
        fields: tuple[()] = ...,
        documents: Literal[True] | Collection[DocumentName],
        spans: WantedSpans = ...,
        **options: Unpack[LoaderOptions],
    ) -> None: ...

    @overload
    def __init__(
        self: Loader[DocumentStep],
        source: StoreOrPath,
        *,
        targets: bool = ...,
        fields: tuple[()] = ...,
        documents: WantedDocuments = ...,
        spans: Literal[True] | DecodeValue,
        **options: Unpack[LoaderOptions],
    ) -> None: ...

    @overload
    def __init__(
        self: Loader[Any],
        source: StoreOrPath,
        *,
        targets: bool = ...,
        fields: WantedFields = ...,
        documents: WantedDocuments = ...,
        spans: WantedSpans = ...,
        **options: Unpack[LoaderOptions],
    ) -> None: ...

    def __init__(
        self,
        source: StoreOrPath,
        *,
        batch_size: int | None = None,
        seq_len: int | None = None,
        shuffle: str | tuple[str, int] = "global",
        seed: int = 42,
        targets: bool = False,
        labels: str | None = None,
        documents: bool | Collection[Any] = False,
        fields: WantedFields = (),
        spans: WantedSpans = False,
        drop_last: bool = True,
        last: str | None = None,
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
        access: Access = "auto",
        backend: str = "auto",
    ) -> None:
        device = cuda_device(device)  # names a missing torch before any file is open
        _require_one_store(source)
        self.seed = whole_seed(seed)
        batch_size = None if batch_size is None else whole_number("batch_size", batch_size)
        seq_len = None if seq_len is None else whole_number("seq_len", seq_len)
        batches, self._closes = open_for_loader(
            source,
            batch_size,
            seq_len,
            int(targets),
            backend=backend,
            access=access,
            verify=verify,
            read_as=read_as,
            split=split,
            cache=cache,
        )
        if batches.corpus.is_stream and not isinstance(source, Batches):
            batch_size = seq_len = None  # the windows have both
        elif isinstance(source, Batches) and seq_len == source.seq_len:
            seq_len = None  # a token more is read for targets
        with on_failure(batches.close) if self._closes else nullcontext():
            self.batches: Batches = batches
            self.path = batches.path
            if tokenizer is not None:
                require_tokenizer(batches.meta.tokenizer, tokenizer, batches.path)
            self.shuffle, self.block_size = block_shuffle(shuffle)
            _require_fixed_order(batches, self.shuffle)
            self._fingerprint = batches.fingerprint  # now: a checkpoint must not depend on reading the file again
            self.rank, self.world_size = resolve_rank(rank, world_size)
            self.last = _last_step(last, drop_last, targets)
            self.targets = targets
            self.batch_size = batches.batch_size if batch_size is None else batch_size
            self._length = batches.seq_len if seq_len is None else seq_len
            _require_divisor(batches, self._length)
            self._options: dict[str, Any] = {
                "prefetch": prefetch,
                "device": device,
                "dtype": dtype,
                "fields": fields,
                "documents": documents,
                "spans": spans,
                "labels": labels,
            }
            self._begin_with(skip, mask_documents)
            self.set_batch_size(self.batch_size)

    def _mask(self) -> None:
        self.steps = StepReader(
            self.batches, self._length, targets=self.targets, mask_documents=self.mask_documents, **self._options
        )

    # --- position ------------------------------------------------------------------------------------------------

    @property
    def seq_len(self) -> int:
        """Tokens of a record; of windows with targets one more than `x` and `y` have."""
        return self._length

    @property
    def sources(self) -> list[str]:
        """The names of the files that the documents came from; `documents=["sources"]` gives places in this list.

        Raises
        ------
        BackendError
            If the store holds no documents.
        """
        return self.batches.corpus.require_documents().sources

    def words(self, name: str) -> list[str]:
        """Return the words of the codes of a field set; `documents=["meta:<name>"]` gives places in this list.

        Raises
        ------
        NotFoundError
            If there is no such field set.
        """
        return list(self.batches.corpus.field(code_field(name)).words)

    @property
    def num_records(self) -> int:
        """Records of `seq_len` tokens in the epoch, counted when the epoch was chosen."""
        return self.plan.num_records

    def _start(self, epoch: int) -> int:
        super()._start(epoch)
        if self._shared_epoch is not None:
            self._shared_epoch.share(epoch)
        return 0

    def plan_of_epoch(self, epoch: int) -> StepPlan:
        """Return the records that this rank reads at each step of an epoch. `plan` has the current epoch."""
        batches = self.batches
        parts = batches.seq_len // self._length
        records_per_batch = batches.batch_size * parts
        order = make_order(
            self.shuffle,
            batches.num_batches,
            seed=self.seed,
            epoch=epoch,
            block_size=self.block_size,
            records_per_batch=records_per_batch,
            version=self._version_of(epoch),
        )
        return StepPlan(
            order,
            self.batch_size,
            self.rank,
            self.world_size,
            self.last,
            records_per_batch,
            scattered=self.shuffle == "records",
            whole_records=self._length == batches.seq_len,
            skip=Skip.of(self.skip, epoch, batches.num_records * parts),
            rest=batches.rest * parts,
        )

    def set_batch_size(self, batch_size: int) -> None:
        """Change the batch size from the next step on, also in the middle of an iteration: nothing is skipped."""
        batch_size = positive("batch_size", batch_size)
        plan = replace(self.plan, batch_size=batch_size)
        if plan.steps_from(0) < self._least_steps:
            raise ArgumentError(
                f"{self.path}: {self.num_records:,} records are too few for {counted(self.world_size, 'rank')} with "
                f"batches of {batch_size:,}; pass a smaller batch_size, or drop_last=False"
            )
        if batch_size != self.batch_size:
            self.batch_size = batch_size
            self.plan = plan
            # the position is after the end of the epoch if the last step was filled up
            self._go_to(min(self._position, self._end_of_epoch(self.epoch)), resumed=self._resumed)

    def __len__(self) -> int:
        """Steps of a whole epoch: the number of batches that this rank, like every rank, yields."""
        return self.plan.steps_from(0)

    @property
    def sampler(self) -> Self:
        """This loader: Lightning calls `set_epoch` of the object under this name."""
        return self

    @property
    def batch_sampler(self) -> None:
        """None: Lightning asks whatever has a `sampler` for this too, of a loader for validation."""
        return None

    def __getitem__(self, index: object) -> NoReturn:
        # not a ZbError but the error that Python raises for an object without items, with a remedy
        raise TypeError(
            f"{self.path}: a Loader is iterated over and has no items: DataLoader and StatefulDataLoader take "
            "loader.dataset() with batch_size=None"
        )

    # --- iteration -----------------------------------------------------------------------------------------------

    @property
    def _has_equal_batches(self) -> bool:
        return self.last != "short" and self.steps.of_one_shape

    def _read_from(self, position: int) -> Generator[tuple[Any, int]]:
        return with_positions(self.steps.read_all(self.plan, position), self.plan.positions_from(position))

    # --- state ---------------------------------------------------------------------------------------------------

    def _take_over(self, state: dict[str, Any], force: bool) -> None:
        batches = self.batches if force else batches_of_state(self.batches, state)
        if batches is not self.batches:  # the same content under another fingerprint
            self.batches = batches
            self._fingerprint = batches.fingerprint
            self._mask()
            self.plan = self.plan_of_epoch(self.epoch)
            self.set_batch_size(self.batch_size)
        super()._take_over(state, force)

    def identity(self) -> dict[str, Any]:
        """Return the fields that must agree for a position to mean the same records."""
        return {
            "version": self.plan.order.version,
            "kind": "loader",
            "dtype": self.batches.dtype.name,
            "fingerprint": self._fingerprint,
            "shuffle": self.shuffle,
            "block_size": int(self.block_size) if self.shuffle == "block" else None,
            "seed": int(self.seed),
            "seq_len": int(self._length),
        }

    def identity_as(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields that must agree with a state.

        Files of other programs with ids of one byte were read as larger ones before: a state of the same fingerprint
        may have the dtype of these.
        """
        found = super().identity_as(state)
        is_of_bytes = self.batches.dtype.itemsize == 1 and state.get("fingerprint") == self._fingerprint
        if is_of_bytes and state.get("dtype") in [*DTYPE_BY_NAME]:  # a list: a state may have any value
            found["dtype"] = state["dtype"]
        return found

    def dataset(self) -> datasets.BatchDataset[BatchT]:
        """Return this rank's batches of the current epoch as a map-style `torch.utils.data.Dataset`."""
        self._shared_epoch = self._shared_epoch or datasets.SharedEpoch(self.epoch)
        return datasets.BatchDataset(self, self._shared_epoch)

    def records(self) -> datasets.RecordDataset:
        """Return all records as a map-style dataset of `{"input_ids", "labels"}`, as trainers expect them.

        With `documents` they have `position_ids` too, and no label at the beginning of a document. The values of
        `fields` are aligned with the input ids.
        """
        if self._length != self.batches.seq_len:
            raise ArgumentError(
                f"{self.path}: records() gives records as they are stored, of {self.batches.seq_len:,} tokens; "
                f"make the loader without seq_len={self._length:,}"
            )
        options = self._options
        return datasets.RecordDataset(
            self.batches,
            documents=bool(options["documents"] or options["spans"]),
            labels=options["labels"],
            fields=options["fields"],
        )

    def _num_fetched(self) -> int | None:
        return num_fetched(self.batches.corpus)

    def __repr__(self) -> str:
        # of windows with targets, the tokens of x and of y, as they are asked for
        seq_len = self._length - int(self.targets and self.batches.corpus.is_stream)
        shuffle = (self.shuffle, self.block_size) if self.shuffle == "block" else self.shuffle
        shape = f"batch_size={self.batch_size}, seq_len={seq_len}, shuffle={shuffle!r}, seed={self.seed}"
        where = f"epoch={self.epoch}, position={self._position}, rank={self.rank}, world_size={self.world_size}"
        records = f"num_records={self.num_records}, last={self.last!r}, left_out={self.plan.num_left_out}"
        values = {name: self._options[name] for name in ("documents", "fields", "spans")}
        more = {"targets": self.targets, **values, "skip": self.skip, "mask_documents": self.mask_documents}
        given = "".join(f", {name}={short_repr(value)}" for name, value in more.items() if value)
        return f"{type(self).__name__}({str(self.path)!r}, {shape}{given}, {where}, {records})"

    def close(self) -> None:
        """End the reading threads, and close the corpus if this loader has opened it."""
        super().close()
        if self._shared_epoch is not None:
            self._shared_epoch.close()
        self.steps.close()
        if self._closes:
            self.batches.close()
