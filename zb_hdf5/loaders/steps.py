"""The steps of a loader are read from the page cache, after hints to the kernel, in threads, or to a device.

Whole stored batches of plain local files are read without another layer: one check and one widening each.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from itertools import chain, groupby, islice, repeat
from operator import getitem
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from zb_hdf5.documents.metadata import WantedSpans
from zb_hdf5.documents.pieces import IGNORED_TARGET
from zb_hdf5.errors import ArgumentError, ZbError
from zb_hdf5.files.checked import crc32_of
from zb_hdf5.files.objects import reads_at_once
from zb_hdf5.files.paths import files_at_hand
from zb_hdf5.files.residency import WATCHED_ONE_IN
from zb_hdf5.files.threads import read_ahead
from zb_hdf5.files.tokens import FileTokens, StoredIds, Wait
from zb_hdf5.formats.batch_reader import BatchReader
from zb_hdf5.loaders.ahead import BatchHints, Depth, depth_of, hint_ahead, hinted_steps, read_to, require_prefetch
from zb_hdf5.loaders.mapped_windows import MappedWindows
from zb_hdf5.loaders.order import PaddedRecords, Request, StepPlan, StoredRequest, requests_in
from zb_hdf5.loaders.step_values import REREAD_S, StepValues, value_count
from zb_hdf5.loaders.stored_targets import has_targets
from zb_hdf5.packages import from_numpy, require_package
from zb_hdf5.spec import NO_CODEC, STREAM_LAYOUT

if TYPE_CHECKING:
    import torch
    from typing_extensions import TypeVar

    BatchT = TypeVar("BatchT", default=Any)  # so that `Loader` alone is a type, too
else:
    from typing import TypeVar

    BatchT = TypeVar("BatchT")

#: Tokens, `(x, y)`, or a dictionary of tensors.
Step: TypeAlias = "torch.Tensor | tuple[torch.Tensor, torch.Tensor] | dict[str, Any]"
#: Steps read ahead from a server are at least so many requests.
FAR_PARTS: Final = 16
#: Steps read ahead from a server are at least so many turns of all threads.
FAR_TURNS: Final = 8
#: Single batches for which one sample of the store holds.
SINGLE_READS: Final = 4096
#: Batches of that sample.
SINGLE_SAMPLE: Final = 32
#: Single batches for which the size of a file holds.
MET_READS: Final = 64
#: Files whose mapping a block keeps at hand, at most. Each of them stays open for as long.
MAX_MET: Final = 32
#: A file: its batches as an array (count, B, S); their crc32 by number; its tokens, if it is not mapped. Each may
#: be None. Without array and tokens, the reader reads the batches.
Met: TypeAlias = tuple[npt.NDArray[Any] | None, Callable[[int], int] | None, FileTokens | None]
#: Steps of a block, at most, that are looked up in the page cache; of scattered records, so many if there are.
MAX_SAMPLE: Final = 32
#: One step in so many of a block of whole batches is looked up, but at least 4.
SAMPLED_ONE_IN: Final = 16
_local = threading.local()


def numpy_dtype(dtype: torch.dtype | None) -> np.dtype[Any]:
    """Return the dtype of tokens as numpy has it, int64 for None; `ArgumentError` unless it is int64 or int32."""
    library = require_package("torch", "torch")
    found = {None: np.int64, library.int64: np.int64, library.int32: np.int32}.get(dtype)
    if found is None:
        raise ArgumentError(f"dtype must be torch.int64 or torch.int32, found {dtype}")
    return np.dtype(found)


def may_overflow(reader: BatchReader, dtype: np.dtype[Any]) -> bool:
    """Return whether a dtype of tokens may hold too few of the ids of a store, as far as its facts tell."""
    largest = reader.meta.vocab_size - 1 if reader.meta.vocab_size else reader.max_token
    limit = np.iinfo(dtype).max
    return np.iinfo(reader.dtype).max > limit and (largest is None or largest > limit)


def require_no_overflow(reader: BatchReader, tokens: npt.NDArray[Any]) -> None:
    """Raise `ArgumentError` if ids of a store became negative in int32, which holds ids below 2**31."""
    least = int(tokens.min(initial=0))
    if least < 0:
        raise ArgumentError(
            f"{reader.path}: expected ids below 2**31, which torch.int32 holds, found {least + 2**32:,}; pass "
            "dtype=torch.int64"
        )


class WholeBatches:
    """Widens stored batches of plain files, from their mappings, or by one positioned read or request each.

    The reader reads the batches of other files, and batches whose crc32 differs: it raises the errors. The size of a
    mapped file is asked for once in a block: a file that is cut short inside it is a bus error. With verify="batch"
    a batch is copied first, and the copy is compared: a file that changes meanwhile changes nothing that was compared.
    The file of a cache is not mapped.

    Parameters
    ----------
    reader
        A store that `serves`.
    narrow
        The tensors are of int32, else of int64.
    """

    def __init__(self, reader: BatchReader, narrow: bool) -> None:
        self._reader = reader
        self._read = reader.read_batch_int32 if narrow else reader.read_batch_torch
        self._dtype = np.dtype(np.int32 if narrow else np.int64)
        self._shape = (-1, *reader.meta.shape)
        self._is_far = reader.tokens.wait is Wait.FAR and reader.in_front is None
        is_plain_view = narrow and reader.dtype == np.uint32
        #: The dtype of a batch before it is widened; one that needs no more is given as it was read.
        self._stored = self._dtype if is_plain_view else reader.dtype
        self._copies = reader.verified == "all reads"
        #: The pages of a batch are touched by whoever uses it.
        self.gives_views = is_plain_view and not (self._copies or self._is_far or reader.in_front is not None)
        self._most_met = files_at_hand(MAX_MET)
        self._is_ready = False
        self._met: dict[int, Met] = {}
        self._reads_left = 0
        self._looks_left = 0
        self._unit = reader.meta.batch_tokens
        self._starts = reader.tokens.starts

    @staticmethod
    def serves(reader: BatchReader) -> bool:
        """Return whether batches are stored one by one in plain files that do not grow, or in a cache."""
        tokens = reader.tokens
        unit = reader.meta.batch_tokens
        is_plain = tokens.wait is not Wait.DECODE and tokens.access in ("auto", "mmap", "pread", "remote")
        if not reader.complete or not (is_plain or reader.in_front is not None):
            return False
        if any(file.unit != unit for file in tokens.known.values()):  # a file of another trainer is one unit
            return False
        follow = tokens.unit == unit and reader.windows.stride == reader.windows.length
        return follow and not any(start % unit for start in tokens.starts[:-1])

    def read_all(self, batches: npt.NDArray[np.int64]) -> Iterator[torch.Tensor]:
        """Yield each of some batches, in order. They are in the page cache."""
        starts = np.array(self._starts) // self._unit
        numbers = starts[1:].searchsorted(batches, side="right")
        files = numbers.tolist()
        indices = (batches - starts[numbers]).tolist()
        known = dict.fromkeys(files)
        if self.gives_views and len(known) <= self._most_met:
            with contextlib.suppress(ZbError, OSError):  # raised again at its own step
                views: dict[int, Any] = {file: self._meet(file, int(starts[file]))[0] for file in known}
                if all(view is not None for view in views.values()):  # a loop of Python takes half as long as a batch
                    return map(from_numpy(), map(getitem, map(views.__getitem__, files), indices))
        return map(self._read_at, batches.tolist(), files, indices, repeat({}))

    def read(self, number: int) -> torch.Tensor:
        """Return one batch, in any order of the numbers."""
        is_ready = self.is_ready()
        self._reads_left -= 1
        if not is_ready:
            return self._read(number)
        file = bisect_right(self._starts, number * self._unit) - 1
        return self._read_at(number, file, number - self._starts[file] // self._unit, self._met)

    def is_ready(self) -> bool:
        """Return whether single batches are in memory, as far as a sample of the store shows it."""
        if self._reads_left <= 0:  # below 0 where threads meet
            self._look()
        return self._is_ready

    def _look(self) -> None:
        """Ask again for the sizes of files that single batches are read from, and sometimes for the page cache."""
        self._met = {}
        self._reads_left = MET_READS
        if self._looks_left <= 0:
            self._looks_left = SINGLE_READS // MET_READS
            sample = np.linspace(0, self._reader.num_batches - 1, SINGLE_SAMPLE).astype(int).tolist()
            self._is_ready = self._is_far or all(map(self._reader.is_cached, sample))
        self._looks_left -= 1

    def _read_at(self, number: int, file: int, index: int, met: dict[int, Met]) -> torch.Tensor:
        """Return batch `number`, which is batch `index` of a file; `met` keeps the files for the next batches."""
        known = met.get(file)
        if known is None:
            if len(met) >= self._most_met:
                met.clear()
            known = met[file] = self._meet(file, number)
        views, crc32, plain = known
        expected = None if crc32 is None else crc32(index)
        if expected is not None and expected < 0:  # the cache lacks it
            return self._read(number)
        batch: npt.NDArray[Any] | None = None
        if views is not None:
            batch = self._copied(views[index]) if self._copies else views[index]
        elif plain is not None:
            batch = self._filled(plain, index)
        if batch is None or (expected is not None and crc32_of(batch) != expected):
            return self._read(number)
        return from_numpy()(batch.astype(self._dtype, copy=False))

    def _meet(self, file: int, number: int) -> Met:
        """Open the file of a batch that is about to be read, and ask for its size."""
        tokens = self._reader.tokens
        known = tokens.known.get(file) or tokens.open_file(file, number * self._unit)
        plain = known.plain
        if plain is None or plain.unit != self._unit:
            return None, None, None
        views, crc32, _, _ = plain.at_hand(self.gives_views)
        if views is None:
            return None, crc32, None if self.gives_views else plain
        return views.reshape(self._shape).view(self._stored), crc32, None

    def _buffer(self) -> npt.NDArray[Any]:
        """Return an array for a batch: one of this thread, which the next batch fills again, if it is widened then.

        A new array for each costs 24 page faults for 64 KiB: the C library gives its memory back in between.
        """
        shape = self._shape[1:]
        if self._stored == self._dtype:
            return np.empty(shape, self._dtype)
        found: npt.NDArray[Any] | None = getattr(_local, "batch", None)
        if found is None or found.shape != shape or found.dtype != self._stored:
            found = _local.batch = np.empty(shape, self._stored)
        return found

    def _copied(self, batch: npt.NDArray[Any]) -> npt.NDArray[Any]:
        copy = self._buffer()
        copy[...] = batch
        return copy

    def _filled(self, plain: FileTokens, index: int) -> npt.NDArray[Any] | None:
        """Read a batch by its position; None if the read failed: the reader has the message."""
        if self._is_far:
            return plain.unit_of_object(index).reshape(self._shape[1:])
        batch = self._buffer()
        run = plain.extents.runs[0]
        try:
            num_bytes = os.preadv(plain.file.fd, (batch,), run.base + index * run.stride)
        except OSError:
            return None
        return batch if num_bytes == batch.nbytes else None

    def close(self) -> None:
        """Let go of the files of the last single batches."""
        self._met = {}
        self._reads_left = 0
        self._looks_left = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_met": {}, "_reads_left": 0, "_looks_left": 0}


def _parts(numbers: Iterable[int], least: int, most: int) -> Iterator[list[int]]:
    """Yield numbers in order, `least` of them together, and up to `most` that follow each other."""
    part: list[int] = []
    for number in numbers:
        limit = most if part and number == part[-1] + 1 else least
        if len(part) >= limit:
            yield part
            part = []
        part.append(number)
    if part:
        yield part


class StepReader:
    """Reads a request as tokens, two views of them, or a dictionary with more values. As thread-safe as the reader.

    Parameters
    ----------
    reader
        The store.
    seq_len
        Tokens of a record, as the loader gives it.
    mask_documents
        Numbers of documents, ascending.
    device
        None: the steps stay on the CPU.
    targets, prefetch, dtype, fields, documents, spans, labels
        As for `Loader`.

    Attributes
    ----------
    as_dict
        The steps are dictionaries.
    of_one_shape
        Steps of as many records have the same shapes.

    Notes
    -----
    `read_all` takes the steps in blocks, and reads each in the way that is fastest for it:

    - in the page cache, whole stored batches: `WholeBatches.read_all`
    - in the page cache, records or windows: `_from_map`
    - on a local disk, with prefetch="auto": one after the other, after hints to the kernel (`hint_ahead`)
    - on a server, plain whole batches: several by one request (`_read_far`)
    - else, and always to a device: one by one, in threads (`read_to`)
    """

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
        documents: bool | Collection[Any],
        spans: WantedSpans,
        labels: str | None = None,
    ) -> None:
        require_prefetch(prefetch)
        self._reader = reader
        self._seq_len = seq_len
        self._prefetch = prefetch
        self._device = device
        self._values: StepValues | None = None  # the steps are tokens, or two views of them
        asked = (fields != (), documents is not False, spans, mask_documents)
        if any(asked) or (targets and (reader.has_padding or has_targets(reader))):
            values = StepValues(
                reader,
                seq_len,
                targets=targets,
                mask_documents=mask_documents,
                fields=fields,
                documents=documents,
                spans=spans,
                labels=labels,
            )
            if values.as_dict or values.needs_pieces or values.has_targets:
                self._values = values
        self.as_dict = self._values is not None and self._values.as_dict
        self.of_one_shape = self._values is None or self._values.of_one_shape
        self._splits = targets and self._values is None
        self._dtype = numpy_dtype(dtype)
        narrow = self._dtype == np.int32
        self._may_overflow = may_overflow(reader, self._dtype)
        self._read_batch = reader.read_batch_int32 if narrow else reader.read_batch_torch
        self._whole = WholeBatches(reader, narrow) if WholeBatches.serves(reader) else None
        is_stream = reader.layout == STREAM_LAYOUT
        self._windows = MappedWindows(reader, self._dtype, self._tokens) if is_stream else None

    # --- one step ------------------------------------------------------------------------------------------------

    def read(self, request: Request) -> Step:
        """Read one step on the CPU: a stored batch by its number, or any records by theirs."""
        if isinstance(request, PaddedRecords):
            return self._read_padded(request)
        whole = self._whole
        if whole is not None and isinstance(request, int):
            tokens = self._fitting(whole.read(request))
        else:
            tokens = self._tokens(request)
        return (tokens[:, :-1], tokens[:, 1:]) if self._splits else self._step(request, tokens)

    def _read_padded(self, request: PaddedRecords) -> Step:
        """Read records, and add rows of padding, whose tokens are 0 and no targets."""
        records, num_rows = request
        stored = self._tokens(records)
        tokens = stored.new_zeros((num_rows, self._seq_len))
        tokens[: len(records)] = stored
        if self._values is None:
            step: Any = (tokens[:, :-1], tokens[:, 1:].clone())
        else:
            pieces = self._values.pieces_with_padding(records, num_rows)
            step = self._values.step_of(records, tokens, pieces)
        targets = step["targets"] if self.as_dict else step[1]
        targets[len(records) :] = IGNORED_TARGET
        return cast("Step", step)

    def _read_by_position(self, request: StoredRequest) -> Any:
        return self._step(request, self._tokens(request))

    def _tokens(self, request: StoredRequest) -> torch.Tensor:
        if isinstance(request, int):
            return self._fitting(self._read_batch(request))
        return self._fitting(self._reader.read_records_torch(request, self._seq_len, self._dtype))

    def _fitting(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return tokens of the store, or raise `ArgumentError` if the dtype of the tensors does not hold their ids."""
        if self._may_overflow:
            require_no_overflow(self._reader, tokens.numpy())
        return tokens

    def _step(self, request: StoredRequest, tokens: torch.Tensor) -> Any:
        """Return a step but for the pairs that are two views of the tokens: these are made on the device."""
        if self._values is None:
            return tokens
        return self._values.step_of(request, tokens, self._values.pieces_of_request(request))

    # --- the steps of a plan -------------------------------------------------------------------------------------

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
                    yield from self._read_while_ready(plan, block)
            elif is_ready:  # in one thread: reads that do not wait only take the interpreter lock from each other
                steps = chain.from_iterable(repeat(self._read_while_ready(plan, block), len(block)) for block in group)
                yield from read_to(self._device, next, steps, self.depth(plan).steps, threads=1)
            else:
                yield from self._read_waiting(plan, group, axes == 1)

    def _is_ready(self, plan: StepPlan, block: npt.NDArray[np.int64]) -> bool:
        """Return whether a sample of some steps, spread evenly, is in the page cache."""
        reader = self._reader
        if reader.in_front is None and reader.tokens.wait is not Wait.LOCAL:
            return False
        wanted = MAX_SAMPLE if plan.scattered else max(4, len(block) // SAMPLED_ONE_IN)
        count = min(len(block), wanted, MAX_SAMPLE)
        sample = block[np.arange(count) * len(block) // count]
        if block.ndim == 1:
            return reader.are_cached(sample * reader.batch_size, self._seq_len)
        return reader.are_cached(sample[np.arange(count), np.arange(count) % sample.shape[1]], self._seq_len)

    def _read_while_ready(self, plan: StepPlan, block: npt.NDArray[np.int64]) -> Iterator[Any]:
        """Yield the steps of a block in the page cache; those after one that had to wait for a disk are hinted at."""
        return chain.from_iterable(self._groups_while_ready(plan, block))

    def _groups_while_ready(self, plan: StepPlan, block: npt.NDArray[np.int64]) -> Iterator[Iterable[Any]]:
        """Yield groups of these steps: a frame of Python for each step would take as long as a watched one in 32."""
        steps = self._read_ready(block)
        if block.ndim == 1 and self._whole is not None and self._whole.gives_views:  # their pages are not read here
            yield steps
            return
        residency = self._reader.tokens.residency
        for first in range(0, len(block), WATCHED_ONE_IN):
            waits = residency.waits
            yield (residency.watch(next, steps),)
            if residency.waits != waits:
                rest = iter(requests_in(block[first + 1 :]))
                yield map(self._read_by_position, rest) if self._prefetch == 0 else self._read_hinted(plan, rest)
                return
            yield islice(steps, WATCHED_ONE_IN - 1)

    def _read_ready(self, block: npt.NDArray[np.int64]) -> Iterator[Any]:
        """Yield the steps of a block in the page cache."""
        requests = requests_in(block)
        if self._whole is not None and block.ndim == 1:
            tokens = self._whole.read_all(block)
        else:
            tokens = self._from_map(requests)
        if self._may_overflow:
            tokens = map(self._fitting, tokens)
        values = self._values
        if values is None:
            return tokens
        return map(values.step_of, requests, tokens, values.pieces_in(block) if values.needs_pieces else repeat(None))

    def _from_map(self, requests: list[Any]) -> Iterator[torch.Tensor]:
        """Read records or windows from mappings, if there are any; the sizes of files are asked for once."""
        reader = self._reader
        if isinstance(requests[0], int):
            return self._windows.read_all(requests) if self._windows else map(self._tokens, requests)
        stored = reader.tokens.stored_ids()
        if stored is not None and len(stored.ids) % self._seq_len == 0 and not reader.overlap:
            return self._records_of(stored, requests)
        return map(self._tokens, requests)

    def _records_of(self, stored: StoredIds, requests: list[npt.NDArray[np.int64]]) -> Iterator[torch.Tensor]:
        """Yield steps of records from all tokens."""
        ids, limit = stored
        take = ids.reshape(-1, self._seq_len).take
        scratch = np.empty((len(requests[0]), self._seq_len), ids.dtype)
        for rows in requests:
            take(rows, axis=0, out=scratch, mode="clip")  # "clip": numpy fills `scratch` without a buffer of its own
            if limit is not None and scratch.max() > limit:
                yield self._tokens(rows)  # raises the error
                continue
            yield from_numpy()(scratch.astype(self._dtype))

    def _read_waiting(
        self,
        plan: StepPlan,
        blocks: Iterator[npt.NDArray[np.int64]],
        is_whole: bool,
    ) -> Generator[Any] | Iterator[Any]:
        """Read blocks that are not in the page cache."""
        reader = self._reader
        requests = chain.from_iterable(map(requests_in, blocks))
        is_auto = self._prefetch == "auto"
        depth, threads = self.depth(plan)
        if is_auto and not depth:
            return self._read_hinted(plan, requests)
        is_plain = reader.tokens.wait is Wait.FAR and reader.meta.codec == NO_CODEC and reader.overlap == 0
        if is_plain and is_whole and is_auto and self._device is None and self._values is None:
            return self._read_far(chain.from_iterable(block.tolist() for block in blocks), depth)
        return read_to(self._device, self._read_by_position, requests, depth, threads)

    def _read_hinted(self, plan: StepPlan, requests: Iterator[StoredRequest]) -> Iterator[Any]:
        """Read steps one after the other, with hints to the kernel."""
        if plan.scattered:
            return hint_ahead(self._read_by_position, self.announce, requests, hinted_steps(plan.batch_size))
        hints = BatchHints([column.will_need for column in self._columns], plan.records_per_batch)
        return hint_ahead(self._read_by_position, hints.announce, requests)

    @property
    def _columns(self) -> list[BatchReader]:
        """The tokens, and the fields that are read with them."""
        return [self._reader, *(self._values.columns if self._values else ())]

    def announce(self, requests: Sequence[Request]) -> None:
        """Announce the tokens and the fields of requests in any order, unless they are in memory."""
        batches = [one for one in requests if isinstance(one, int)]
        if batches and not (self._whole is not None and self._whole.is_ready()):
            for column in self._columns:
                for number in batches:
                    column.will_need(number)
        rows = [one.records if isinstance(one, PaddedRecords) else one for one in requests if not isinstance(one, int)]
        if rows:
            records = np.concatenate(rows)
            for column in self._columns:
                column.announce_records(records, self._seq_len * value_count(column))

    def _read_far(self, numbers: Iterator[int], depth: int) -> Generator[torch.Tensor]:
        """Read batches of a server, several by one request; an error is raised at its own step."""
        reader = self._reader
        first = next(numbers)
        start = first * reader.meta.batch_tokens
        reader.tokens.open_file(bisect_right(reader.tokens.starts, start) - 1, start)  # and time an answer
        threads = reads_at_once(os.fspath(reader.path))
        least = max(1, depth // FAR_TURNS // threads)
        most = max(1, depth // FAR_PARTS)
        parts = _parts(chain([first], numbers), least, most)
        for part, tokens in read_ahead(self._read_part, parts, depth, threads=threads, size=len):
            yield from map(self._tokens, part) if tokens is None else map(self._fitting, tokens)

    def _read_part(self, part: list[int]) -> tuple[list[int], list[torch.Tensor] | None]:
        """Return some batches with their numbers; None if one cannot be read, unless that took long."""
        begun_s = time.monotonic()
        reader = self._reader
        unit = reader.meta.batch_tokens
        try:
            if len(part) == 1 or part != [*range(part[0], part[0] + len(part))]:
                read = self._read_batch if self._whole is None else self._whole.read
                return part, [*map(read, part)]
            tokens = np.empty((len(part), *reader.meta.shape), reader.dtype)
            starts = range(part[0] * unit, (part[-1] + 1) * unit, unit)
            reader.tokens.read(zip(starts, tokens.reshape(len(part), -1), strict=True))
        except (ZbError, OSError):
            if time.monotonic() - begun_s > REREAD_S:
                raise
            return part, None
        return part, [from_numpy()(batch.astype(self._dtype)) for batch in tokens]

    def depth(self, plan: StepPlan) -> Depth:
        """Return how many steps to read ahead, and in how many threads."""
        reader = self._reader
        step_reads = plan.batch_size if plan.scattered else 1
        step_bytes = plan.batch_size * self._seq_len * reader.dtype.itemsize
        return depth_of(self._prefetch, reader.tokens, reader.path, self._device, step_bytes, step_reads)

    def close(self) -> None:
        """Drop the arrays that are kept between single steps."""
        if self._whole is not None:
            self._whole.close()
