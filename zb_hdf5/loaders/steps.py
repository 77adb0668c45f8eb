"""Reads the steps of a loader: at once, after hints to the kernel, in threads, or to a device.

Whole stored batches of plain local files are read without another layer: one check and one widening each. The values
besides the tokens (targets, fields, documents, spans) follow from pieces, and nothing from ids.
"""

from __future__ import annotations

import contextlib
import os
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, groupby, islice, repeat
from math import prod
from operator import getitem
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from zb_hdf5.documents import pieces as views
from zb_hdf5.documents.metadata import WantedSpans
from zb_hdf5.documents.pieces import Pieces, spans_of_pieces
from zb_hdf5.errors import ArgumentError, UnavailableError, ZbError
from zb_hdf5.files.checked import crc32_of
from zb_hdf5.files.objects import MAX_READS, reads_at_once
from zb_hdf5.files.ranges import MAX_THREADS, Key, Result, network_file_system, read_ahead
from zb_hdf5.files.tokens import FileTokens, Tokens, Wait
from zb_hdf5.formats.batch_reader import BatchReader, from_numpy, require_choice
from zb_hdf5.loaders.order import STEPS_AT_ONCE, PaddedRecords, Request, StepPlan, StoredRequest, requests_in
from zb_hdf5.packages import require_package
from zb_hdf5.spec import NO_CODEC

if TYPE_CHECKING:
    import torch

    from zb_hdf5.documents.document_table import DocumentTable

#: Steps that prefetch="auto" reads ahead where a read may wait.
AUTO_PREFETCH: Final = 8
#: Steps that are hinted at together.
HINTED_TOGETHER: Final = 16
#: Batches that a hint is remembered for: of 64 KiB each these are 4 GiB, which a page cache keeps.
REMEMBERED_HINTS: Final = 65_536
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
#: Tokens, `(x, y)`, or a dictionary of tensors.
Step: TypeAlias = "torch.Tensor | tuple[torch.Tensor, torch.Tensor] | dict[str, Any]"
#: Steps read ahead from a server are at least so many requests, and at least so many turns of all threads.
FAR_PARTS, FAR_TURNS = 16, 8
#: Bytes that are kept under way to fill a long line: 32 MiB at 20 ms are 1.6 GB/s.
IN_FLIGHT_BYTES: Final = 32 << 20
#: An error that took longer is not waited for again.
REREAD_S: Final = 5.0
#: Single batches for which one sample of the store holds, and its size; those for which the size of a file holds.
SINGLE_READS, SINGLE_SAMPLE, MET_READS = 4096, 32, 64
#: Files whose mapping a block keeps at hand. Each of them stays open for as long.
MAX_MET: Final = 32
#: The batches of a file as an array (count, B, S), their crc32 by number, and the file if it is not mapped. None: the
#: batches are read by position or by the reader, and not checked.
Met: TypeAlias = tuple[npt.NDArray[Any] | None, Callable[[int], int] | None, FileTokens | None]
#: Steps of a block, at most, that are looked up in the page cache; one in `SAMPLED_ONE_IN`, but at least 4.
MAX_SAMPLE, SAMPLED_ONE_IN = 32, 16
#: Steps whose pieces are read together at first, and then about so many pieces: 80 bytes for each.
FIRST_STEPS, MAX_PIECES = 4, 8192


def read_to(
    device: torch.device | None, read: Callable[[Key], Result], requests: Iterator[Key], depth: int, threads: int
) -> Generator[Result]:
    """Yield as `read_ahead` does; with a device its threads, at least one, pin tensors, and the caller copies them."""
    if device is None:
        return read_ahead(read, requests, depth, threads=threads)
    ahead = read_ahead(lambda key: _with_tensors(read(key), pinned), requests, max(1, depth), threads=threads)
    return _moved_to(device, ahead)


def _moved_to(device: torch.device, steps: Generator[Result]) -> Generator[Result]:
    with contextlib.closing(steps):
        yield from (_with_tensors(step, lambda tensor: moved(tensor, device)) for step in steps)


def _with_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Change each tensor in a step, which may be a tensor, a tuple or a dictionary."""
    if isinstance(value, dict):
        return {name: _with_tensors(part, change) for name, part in value.items()}
    if type(value) is tuple:
        return tuple(_with_tensors(part, change) for part in value)
    return change(value) if hasattr(value, "pin_memory") else value


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Pin a tensor, so that its copy to a device does not wait."""
    return tensor.pin_memory()


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Start the copy of a pinned tensor to a device, on the current stream."""
    return tensor.to(device, non_blocking=True)


def require_prefetch(prefetch: int | str, least: int = 0) -> None:
    """Raise `ArgumentError` unless it is "auto" or a number of batches."""
    if prefetch != "auto" and (not isinstance(prefetch, int) or prefetch < least):
        raise ArgumentError(f'prefetch must be "auto" or at least {least}, found {prefetch!r}')


def depth_of(
    prefetch: int | str, tokens: Tokens, path: Path, device: torch.device | None, step_bytes: int, step_reads: int
) -> tuple[int, int]:
    """Return how many steps to read ahead, and in how many threads; none by "auto" where no read waits."""
    is_far = tokens.wait is Wait.FAR
    if prefetch != "auto":
        depth = int(prefetch)
    elif is_far:
        depth = max(1, min(IN_FLIGHT_BYTES // step_bytes, MAX_READS // step_reads))
    else:
        waits = device is not None or tokens.wait is not Wait.LOCAL or network_file_system(path) is not None
        depth = AUTO_PREFETCH if waits else 0
    return depth, max(1, depth) if is_far else MAX_THREADS


def hint_ahead(
    read: Callable[[StoredRequest], Result],
    will_need: Callable[[int, int], None],
    requests: Iterator[StoredRequest],
    records_per_batch: int,
    depth: int = 64,
) -> Iterator[Result]:
    """Yield `read(request)` for each request, in order; the kernel gets hints of batches about `depth` reads ahead."""
    # Each batch is announced once, although shuffled records come back to it: 64 KiB reads in random order from a cold
    # disk then ran at 0.9 of its sequential bandwidth, in 4 threads at 0.65. Neighbours are announced together: with
    # one call each, a cold epoch in stored order took twice the processor time.
    coming, announced = deque[StoredRequest](), set[int]()
    while group := list(islice(requests, HINTED_TOGETHER)):
        parts = [np.array([one]) if isinstance(one, int) else one // records_per_batch for one in group]
        new = np.array(sorted(set(np.concatenate(parts).tolist()) - announced), np.int64)
        if len(announced) + len(new) > REMEMBERED_HINTS:
            announced.clear()
        announced.update(new.tolist())
        for run in np.split(new, np.flatnonzero(np.diff(new) != 1) + 1) if len(new) else ():
            will_need(int(run[0]), len(run))
        coming.extend(group)
        while len(coming) > depth:
            yield read(coming.popleft())
    yield from map(read, coming)


def cuda_device(device: str | torch.device | None) -> torch.device | None:
    """Return the CUDA device that is meant, or None for the CPU; raise if it is another kind, or is not there."""
    library = require_package("torch", "torch")
    found: torch.device | None = None
    if device is not None and library.device(device).type != "cpu":
        found = library.device(device)
    if found is not None and found.type != "cuda":
        raise ArgumentError(f"device must be a CUDA device or the CPU, found {device}")
    if found is not None and not library.cuda.is_available():
        raise UnavailableError(f"device={device}: this PyTorch finds no CUDA device")
    return found


def _document_values(documents: bool | Collection[str]) -> tuple[str, ...]:
    """Return the names of the arrays of documents that are asked for."""
    names = (*DOCUMENT_VALUES, DOCUMENTS)
    if isinstance(documents, bool):
        return ("cu_seqlens",) if documents else ()
    if isinstance(documents, str) or not isinstance(documents, Collection):
        raise ArgumentError(f"documents must be True or names of {', '.join(names)}, found {documents!r}")
    for name in documents:
        require_choice("documents", name, names)
    return tuple(documents)


def require_masked(path: object, numbers: tuple[int, ...], count: int, targets: bool) -> None:
    """Raise `ArgumentError` unless there are targets, and documents with these numbers, ascending, among `count`."""
    if not targets:
        raise ArgumentError("mask_documents gives tokens the target -100: it needs targets=True")
    if not 0 <= numbers[0] <= numbers[-1] < count:
        unknown = numbers[0] if numbers[0] < 0 else numbers[-1]
        raise ArgumentError(f"{path}: mask_documents: expected numbers in 0..{count - 1:,}, found {unknown:,}")


def value_shape(values: BatchReader) -> tuple[int, ...]:
    """Return the shape of the values of one token: of a field, or () of tokens."""
    return () if values.meta.field is None else values.meta.field.shape


def as_tensor(values: npt.NDArray[Any]) -> torch.Tensor | npt.NDArray[Any]:
    """Return a tensor; the array itself where torch has no such dtype (structured values, bytes)."""
    if values.dtype.kind == "u" and values.dtype.itemsize > 1:
        values = values.astype(_SIGNED[values.dtype.itemsize])
    return from_numpy()(values) if values.dtype.kind in "biufc" else values


def numpy_dtype(dtype: torch.dtype | None) -> np.dtype[Any]:
    """Return the dtype of tokens as numpy has it, int64 for None; `ArgumentError` unless it is int64 or int32."""
    library = require_package("torch", "torch")
    found = {None: np.int64, library.int64: np.int64, library.int32: np.int32}.get(dtype)
    if found is None:
        raise ArgumentError(f"dtype must be torch.int64 or torch.int32, found {dtype}")
    return np.dtype(found)


class WholeBatches:
    """Widens stored batches of plain files, from their mappings, or by one positioned read or request each.

    The reader reads those of other files, and those whose crc32 differs: it raises the errors. The size of a mapped
    file is asked for once in a block: a file that is cut short inside it is a bus error.
    """

    def __init__(self, reader: BatchReader, narrow: bool) -> None:
        self._reader = reader
        self._read = reader.read_batch_int32 if narrow else reader.read_batch_torch
        self._dtype, self._shape = np.dtype(np.int32 if narrow else np.int64), (-1, *reader.meta.shape)
        self._is_far = reader.tokens.wait is Wait.FAR and reader.in_front is None
        self._is_view = narrow and reader.dtype == np.uint32 and not self._is_far
        self._checks = reader.verified == "all reads" or not self._is_view or reader.in_front is not None
        self._is_ready, self._met = False, dict[int, Met]()
        self._reads_left = self._looks_left = 0
        self._unit, self._starts = reader.meta.batch_tokens, reader.tokens.starts

    @staticmethod
    def serves(reader: BatchReader) -> bool:
        """Return whether batches are stored one by one in plain files that do not grow, or in a cache."""
        tokens, unit = reader.tokens, reader.meta.batch_tokens
        is_plain = tokens.wait is not Wait.DECODE and tokens.access in ("auto", "mmap", "pread", "remote")
        if not reader.complete or not (is_plain or reader.in_front is not None):
            return False
        follow = tokens.unit == unit and reader.stride == reader.seq_len
        return follow and not any(start % unit for start in tokens.starts[:-1])

    def read_all(self, batches: npt.NDArray[np.int64]) -> Iterator[torch.Tensor]:
        """Yield each of some batches, in order. They are in the page cache."""
        starts = np.array(self._starts) // self._unit
        numbers = starts[1:].searchsorted(batches, side="right")
        files, indices = numbers.tolist(), (batches - starts[numbers]).tolist()
        known = dict.fromkeys(files)
        if self._is_view and not self._checks and len(known) <= MAX_MET:
            with contextlib.suppress(ZbError, OSError):  # raised again at its own step
                views: dict[int, Any] = {file: self._meet(file, int(starts[file]))[0] for file in known}
                if all(view is not None for view in views.values()):  # a loop of Python takes half as long as a batch
                    return map(from_numpy(), map(getitem, map(views.__getitem__, files), indices))
        return map(self._read_at, batches.tolist(), files, indices, repeat({}))

    def read(self, number: int) -> torch.Tensor:
        """Return one batch, in any order of the numbers."""
        if self._reads_left <= 0:  # below 0 where threads meet
            self._look()
        self._reads_left -= 1
        if not self._is_ready:
            return self._read(number)
        file = bisect_right(self._starts, number * self._unit) - 1
        return self._read_at(number, file, number - self._starts[file] // self._unit, self._met)

    def _look(self) -> None:
        """Ask again for the sizes of files that single batches are read from, and sometimes for the page cache."""
        self._met, self._reads_left = {}, MET_READS
        if self._looks_left <= 0:
            self._looks_left = SINGLE_READS // MET_READS
            sample = np.linspace(0, self._reader.num_batches - 1, SINGLE_SAMPLE).astype(int).tolist()
            self._is_ready = self._is_far or all(map(self._reader.is_cached, sample))
        self._looks_left -= 1

    def _read_at(self, number: int, file: int, index: int, met: dict[int, Met]) -> torch.Tensor:
        """Return a batch, which is one of those of a file; `met` keeps the files for the next ones."""
        known = met.get(file)
        if known is None:
            if len(met) == MAX_MET:
                met.clear()
            known = met[file] = self._meet(file, number)
        views, crc32, plain = known
        batch = views[index] if views is not None else None if plain is None else self._filled(plain, index)
        if batch is None or (crc32 is not None and crc32_of(batch) != crc32(index)):
            return self._read(number)
        return from_numpy()(batch if self._is_view else batch.astype(self._dtype))

    def _meet(self, file: int, number: int) -> Met:
        """Open a file of which a batch is about to be read, and ask for its size."""
        tokens = self._reader.tokens
        known = tokens.known.get(file) or tokens.open_file(file, number * self._unit)
        plain = known.plain
        if plain is None:
            return None, None, None
        views, crc32, _, _ = plain.at_hand(self._is_view, self._checks)
        if views is None:
            return None, crc32, None if self._is_view else plain
        return views.reshape(self._shape), crc32, None

    def _filled(self, plain: FileTokens, index: int) -> npt.NDArray[Any] | None:
        """Read a batch by its position; None where the read failed, and the reader has the message."""
        if self._is_far:
            return plain.unit_of_object(index).reshape(self._shape[1:])
        batch, run = np.empty(self._shape[1:], self._reader.dtype), plain.extents.runs[0]
        try:
            read = os.preadv(plain.file.fd, (batch,), run.base + index * run.stride)
        except OSError:
            return None
        return batch if read == batch.nbytes else None

    def close(self) -> None:
        """Let go of the files of the last single batches."""
        self._met, self._reads_left, self._looks_left = {}, 0, 0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_met": {}, "_reads_left": 0, "_looks_left": 0}


def _parts(numbers: Iterable[int], least: int, most: int) -> Iterator[list[int]]:
    """Yield numbers in order, `least` of them together, and up to `most` that follow each other."""
    part: list[int] = []
    for number in numbers:
        if len(part) >= (most if part and number == part[-1] + 1 else least):
            yield part
            part = []
        part.append(number)
    if part:
        yield part


class StepReader:
    """Reads a request as tokens, two views of them, or a dictionary with more values. As thread-safe as the reader."""

    def __init__(
        self,
        reader: BatchReader,
        seq_len: int,
        *,
        targets: bool,
        mask_documents: tuple[int, ...],
        prefetch: int | str,
        device: torch.device | None,
        dtype: torch.dtype | None,
        fields: Sequence[str],
        documents: bool | Collection[str],
        cu_seqlens_capacity: int | None,
        spans: WantedSpans,
    ) -> None:
        require_prefetch(prefetch)
        if isinstance(fields, str):
            raise ArgumentError(f"fields must be names of fields, such as ({fields!r},), found {fields!r}")
        self._reader, self._seq_len, self._prefetch, self._device = reader, seq_len, prefetch, device
        self._inputs = seq_len - reader.overlap if targets else seq_len  # the last token may be a target only
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
        self._is_plain = not (self.as_dict or self._needs_pieces)  # steps are tokens, or two views of them
        self._splits = targets and self._is_plain
        self._require_stored()
        self._dtype = numpy_dtype(dtype)
        narrow = self._dtype == np.int32
        self._read_batch = reader.read_batch_int32 if narrow else reader.read_batch_torch
        self._whole = WholeBatches(reader, narrow) if WholeBatches.serves(reader) else None

    def _require_stored(self) -> None:
        """Raise `ArgumentError` or `BackendError` if the store has no such field, or no documents."""
        reader, masked = self._reader, self._masked
        for name in self._fields:
            reader.field(name)
        if (self._ends_documents or masked) and not reader.has_pieces:
            reader.read_pieces(np.empty(0, np.int64))  # names what is missing
        if (DOCUMENTS in self._documents or masked or self._spans) and reader.documents is None:
            raise ArgumentError(f"{reader.path}: holds pieces, and no table of the documents; restore it")
        if masked:
            require_masked(reader.path, masked, len(self._table), self._targets)

    def _with_values(self, request: StoredRequest, tokens: torch.Tensor, pieces: Pieces | None) -> Any:
        """Return the step of a request: a dictionary with its tokens, (B, seq_len), or the pair (x, y).

        There may be more tokens than records are requested: rows of padding.
        """
        step: dict[str, Any] = {"tokens": tokens if self._inputs == self._seq_len else tokens[:, : self._inputs]}
        if self._targets:
            step["targets"] = as_tensor(self._targets_of(tokens.numpy(), pieces))
        if not self.as_dict:
            return tokens[:, :-1], step["targets"][:, : tokens.shape[1] - 1]
        for name in self._fields:
            step[name] = as_tensor(self._field(name, request, len(tokens)))
        if pieces is None or not self._ends_documents:
            return step
        pieces = pieces.first_columns(self._inputs) if self._inputs < self._seq_len else pieces
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
        if self._reader.documents is None:
            raise ArgumentError(f"{self._reader.path}: holds no table of documents any more")
        return self._reader.documents

    def _pieces(self, request: StoredRequest) -> Pieces:
        if isinstance(request, int):
            return self._reader.read_batch_pieces(request)
        return self._reader.read_pieces(request, self._seq_len)

    def _pieces_in(self, block: npt.NDArray[np.int64]) -> Iterator[Pieces]:
        """Yield the pieces of each step of a block: those of some steps are read together, but never many pieces."""
        size, start, count = self._reader.meta.batch_size, 0, FIRST_STEPS
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
                yield from map(self._pieces, requests_in(part))
            else:
                yield from found.split(records.shape[1])
                count = max(1, min(STEPS_AT_ONCE, MAX_PIECES * len(part) // len(found.columns)))

    def _targets_of(self, tokens: npt.NDArray[Any], pieces: Pieces | None) -> npt.NDArray[np.int64]:
        """Return the next token of each input, or -100: shape (B, inputs)."""
        found = (
            views.targets(tokens, pieces)
            if pieces is not None and self._ends_documents
            else views.next_tokens(tokens, pieces)
        )
        if pieces is not None and self._masked:
            views.ignore(found, pieces, np.isin(self._table.number_of(pieces.offsets), self._masked))
        return found[:, : self._inputs]

    def _field(self, name: str, request: StoredRequest, num_rows: int) -> npt.NDArray[Any]:
        """Return the values of the records of a request, and 0 in the rows behind them."""
        values = self._reader.field(name)
        shape = value_shape(values)
        if isinstance(request, int):
            out = np.empty((num_rows, self._seq_len * prod(shape)), values.dtype)
            values.read_into(request, out)
        else:
            out = np.zeros((num_rows, self._seq_len * prod(shape)), values.dtype)
            values.read_records_into(request, out[: len(request)])
        return out.reshape(num_rows, self._seq_len, *shape)[:, : self._inputs]

    def read(self, request: Request) -> Step:
        """Read one step on the CPU: a stored batch by its number, or any records by theirs."""
        if isinstance(request, PaddedRecords):
            return self._read_padded(request)
        whole = self._whole
        tokens = whole.read(request) if whole is not None and isinstance(request, int) else self._tokens(request)
        return (tokens[:, :-1], tokens[:, 1:]) if self._splits else self._step(request, tokens)

    def _read_padded(self, request: PaddedRecords) -> Step:
        """Read records, and put rows of padding behind them, whose tokens are 0 and no targets."""
        records, num_rows = request
        stored = self._tokens(records)
        tokens = stored.new_zeros((num_rows, self._seq_len))
        tokens[: len(records)] = stored
        if self._is_plain:
            inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
            targets[len(records) :] = views.IGNORED_TARGET
            return inputs, targets
        pieces = None
        if self._needs_pieces:
            pieces = views.concatenate([self._pieces(records), views.padding(num_rows - len(records), self._seq_len)])
        step: Any = self._with_values(records, tokens, pieces)
        targets = step["targets"] if self.as_dict else step[1]
        targets[len(records) :] = views.IGNORED_TARGET
        return cast("Step", step)

    def _read_by_position(self, request: StoredRequest) -> Any:
        return self._step(request, self._tokens(request))

    def _tokens(self, request: StoredRequest) -> torch.Tensor:
        if isinstance(request, int):
            return self._read_batch(request)
        return self._reader.read_records_torch(request, self._seq_len, self._dtype)

    def _step(self, request: StoredRequest, tokens: torch.Tensor) -> Any:
        """Return a step but for the pairs that are two views of the tokens: these are made on the device."""
        if self._is_plain:
            return tokens
        return self._with_values(request, tokens, self._pieces(request) if self._needs_pieces else None)

    def read_all(self, plan: StepPlan, position: int) -> Generator[Step]:
        """Yield the steps of a plan from a position on."""
        blocks = self._read_blocks(plan, plan.blocks_from(position))
        steps = ((tokens[:, :-1], tokens[:, 1:]) for tokens in blocks) if self._splits else blocks
        last = plan.last_from(position)
        return self._and_last(steps, last) if last else steps

    def _and_last(self, steps: Generator[Step], last: list[Request]) -> Generator[Step]:
        """Yield steps, and then the one that is read by itself: it may have fewer rows, or rows of padding."""
        with contextlib.closing(steps):
            yield from steps
        yield from read_to(self._device, self.read, iter(last), 0, threads=1)

    def _read_blocks(self, plan: StepPlan, blocks: Iterator[npt.NDArray[np.int64]]) -> Generator[Any]:
        """Read blocks in the page cache one after the other, and the rest as is fastest for its disk or server."""
        at_once = self._device is None and self._prefetch in ("auto", 0)
        for (is_ready, axes), group in groupby(blocks, lambda block: (self._is_ready(plan, block), block.ndim)):
            if is_ready and at_once:
                for block in group:
                    yield from self._read_ready(block)
            elif is_ready:  # in one thread: reads that do not wait only take the interpreter lock from each other
                steps = chain.from_iterable(repeat(self._read_ready(block), len(block)) for block in group)
                yield from read_to(self._device, next, steps, self.depth(plan)[0], threads=1)
            else:
                yield from self._read_waiting(plan, group, axes == 1)

    def _is_ready(self, plan: StepPlan, block: npt.NDArray[np.int64]) -> bool:
        """Return whether a sample of some steps, spread evenly, is in the page cache."""
        reader = self._reader
        if reader.in_front is None and reader.tokens.wait is not Wait.LOCAL:
            return False
        count = min(len(block), MAX_SAMPLE, max(4, len(block) // SAMPLED_ONE_IN))
        sample = block[np.arange(count) * len(block) // count]
        batches = sample if block.ndim == 1 else sample[:, 0] // plan.records_per_batch
        return all(map(reader.is_cached, batches.tolist()))

    def _read_ready(self, block: npt.NDArray[np.int64]) -> Iterator[Any]:
        requests = requests_in(block)
        whole = self._whole if block.ndim == 1 else None
        tokens = self._from_map(requests) if whole is None else whole.read_all(block)
        if self._is_plain:
            return tokens
        return map(self._with_values, requests, tokens, self._pieces_in(block) if self._needs_pieces else repeat(None))

    def _from_map(self, requests: list[Any]) -> Iterator[torch.Tensor]:
        """Read records or windows from one mapping of all, where there is one; its files' sizes are asked for once."""
        reader, dtype, flat = self._reader, self._dtype, self._reader.tokens.flat()
        is_batch = isinstance(requests[0], int)
        if is_batch and flat is not None and reader.backend == "stream" and flat.itemsize < dtype.itemsize:
            strides = [count * flat.itemsize for count in (reader.batch_size * reader.stride, reader.stride, 1)]
            windows = np.ndarray((reader.num_batches, *reader.meta.shape), flat.dtype, flat, 0, strides)
            return (from_numpy()(windows[number].astype(dtype)) for number in requests)
        if is_batch or flat is None or len(flat) % self._seq_len or reader.overlap:
            return map(self._tokens, requests)
        take = flat.reshape(-1, self._seq_len).take
        scratch = np.empty((len(requests[0]), self._seq_len), reader.dtype)
        # "clip": numpy fills `scratch` without a buffer of its own
        return (from_numpy()(take(rows, axis=0, out=scratch, mode="clip").astype(dtype)) for rows in requests)

    def _read_waiting(
        self, plan: StepPlan, blocks: Iterator[npt.NDArray[np.int64]], is_whole: bool
    ) -> Generator[Any] | Iterator[Any]:
        requests = chain.from_iterable(map(requests_in, blocks))
        reader, is_auto, (depth, threads) = self._reader, self._prefetch == "auto", self.depth(plan)
        if is_auto and not depth:
            return hint_ahead(self._read_by_position, reader.will_need, requests, plan.records_per_batch)
        is_plain = reader.tokens.wait is Wait.FAR and reader.meta.codec == NO_CODEC and reader.overlap == 0
        if is_plain and is_whole and is_auto and self._device is None and self._is_plain:
            return self._read_far(chain.from_iterable(block.tolist() for block in blocks), depth)
        return read_to(self._device, self._read_by_position, requests, depth, threads)

    def _read_far(self, numbers: Iterator[int], depth: int) -> Generator[torch.Tensor]:
        """Read parts of the steps, each in one thread; an error is raised at its own step."""
        reader, first = self._reader, next(numbers)
        start = first * reader.meta.batch_tokens
        reader.tokens.open_file(bisect_right(reader.tokens.starts, start) - 1, start)  # and time an answer
        threads = reads_at_once(str(reader.path))
        parts = _parts(chain([first], numbers), max(1, depth // FAR_TURNS // threads), max(1, depth // FAR_PARTS))
        for part, tokens in read_ahead(self._read_part, parts, depth, threads=threads, size=len):
            yield from map(self._tokens, part) if tokens is None else tokens

    def _read_part(self, part: list[int]) -> tuple[list[int], list[torch.Tensor] | None]:
        """Return some batches; None for them if one cannot be read, and nobody has waited for it."""
        begun_s, reader, unit = time.monotonic(), self._reader, self._reader.meta.batch_tokens
        try:
            if len(part) == 1 or part != [*range(part[0], part[0] + len(part))]:
                return part, [*map(self._read_batch if self._whole is None else self._whole.read, part)]
            tokens = np.empty((len(part), *reader.meta.shape), reader.dtype)
            starts = range(part[0] * unit, (part[-1] + 1) * unit, unit)
            reader.tokens.read(zip(starts, tokens.reshape(len(part), -1), strict=True))
        except (ZbError, OSError):
            if time.monotonic() - begun_s > REREAD_S:
                raise
            return part, None
        return part, [from_numpy()(batch.astype(self._dtype)) for batch in tokens]

    def depth(self, plan: StepPlan) -> tuple[int, int]:
        """Return how many steps to read ahead, and in how many threads."""
        reader, step_reads = self._reader, plan.batch_size if plan.scattered else 1
        step_bytes = plan.batch_size * self._seq_len * reader.dtype.itemsize
        return depth_of(self._prefetch, reader.tokens, reader.path, self._device, step_bytes, step_reads)

    def close(self) -> None:
        """Drop the arrays that are kept between single steps."""
        if self._whole is not None:
            self._whole.close()
