"""Reads the steps of a loader: at once, after hints to the kernel, in threads, or to a device.

Whole stored batches of plain local files are read without another layer: one check and one widening each.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterator
from itertools import chain, groupby, islice, repeat, takewhile
from operator import getitem
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import ArgumentError, ZbError
from zb_hdf5.files.checked import crc32_of
from zb_hdf5.files.ranges import network_file_system
from zb_hdf5.files.tokens import PlainFile, Wait
from zb_hdf5.formats.batch_reader import BatchReader, from_numpy
from zb_hdf5.loaders.extras import Extras
from zb_hdf5.loaders.prefetch import Hints, depth_of, hint_ahead, read_ahead
from zb_hdf5.loaders.steps import Request, StepPlan, requests_in
from zb_hdf5.spec import NO_CODEC

if TYPE_CHECKING:
    import torch

#: Tokens, `(x, y)`, or a dictionary of tensors.
Step: TypeAlias = "torch.Tensor | tuple[torch.Tensor, torch.Tensor] | dict[str, Any]"

HINTED_STEPS: Final = 64
#: Steps of a block from a server, and blocks under way.
FAR_STEPS, FAR_BLOCKS = 64, 4
#: An error that took longer is not waited for again.
REREAD_S: Final = 5.0
#: Single batches for which one sample of the store holds, and its size; those for which the size of a file holds.
SINGLE_READS, SINGLE_SAMPLE, MET_READS = 4096, 32, 64
#: Files whose mapping a block keeps at hand. Each of them stays open for as long.
MAX_MET: Final = 32

#: The batches of a file as an array (count, B, S), their crc32 by number, and the file if it is not mapped. None: the
#: batches are read by position or by the reader, and not checked.
Met: TypeAlias = tuple[npt.NDArray[Any] | None, Callable[[int], int] | None, PlainFile | None]
#: Steps of a block, at most, that are looked up in the page cache; one in `SAMPLED_ONE_IN`, but at least 4.
MAX_SAMPLE, SAMPLED_ONE_IN = 32, 16


def numpy_dtype(dtype: torch.dtype | None) -> np.dtype[Any]:
    """Return the dtype of tokens as numpy has it, int64 for None; `ArgumentError` unless it is int64 or int32."""
    import torch

    found = {None: np.int64, torch.int64: np.int64, torch.int32: np.int32}.get(dtype)
    if found is None:
        raise ArgumentError(f"dtype must be torch.int64 or torch.int32, found {dtype}")
    return np.dtype(found)


class WholeBatches:
    """Widens stored batches of plain local files, from their mappings or by one positioned read each.

    The reader reads those of other files, and those whose crc32 differs: it raises the errors. The size of a mapped
    file is asked for once in a block: a file that is cut short inside it is a bus error.
    """

    def __init__(self, reader: BatchReader, narrow: bool) -> None:
        self._reader = reader
        self._read = reader.read_batch_int32 if narrow else reader.read_batch_torch
        self._dtype, self._shape = np.dtype(np.int32 if narrow else np.int64), (-1, *reader.meta.shape)
        self._is_view = narrow and reader.dtype == np.uint32
        self._checks = reader.verified == "all reads" or not self._is_view or reader.in_front is not None
        self._is_ready, self._met = False, dict[int, Met]()
        self._reads_left = self._looks_left = 0
        self._unit, self._starts = reader.meta.batch_tokens, reader.tokens.starts

    @staticmethod
    def serves(reader: BatchReader) -> bool:
        """Return whether batches are stored one by one in plain local files that do not grow, or in a cache."""
        tokens, unit = reader.tokens, reader.meta.batch_tokens
        is_local = tokens.wait is Wait.LOCAL and tokens.access in ("auto", "mmap", "pread")
        if not reader.complete or not (is_local or reader.in_front is not None):
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
            views: dict[int, Any] = {file: self._meet(file, int(starts[file]))[0] for file in known}
            if all(view is not None for view in views.values()):  # a loop of Python takes half as long as such a batch
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
            self._is_ready = all(map(self._reader.is_cached, sample))
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
        tokens: torch.Tensor = from_numpy()(batch if self._is_view else batch.astype(self._dtype))
        return tokens

    def _meet(self, file: int, number: int) -> Met:
        """Open a file of which a batch is about to be read, and ask for its size."""
        tokens = self._reader.tokens
        known = tokens.known.get(file) or tokens.open_file(file, number * self._unit)
        plain = known.plain
        if plain is None or (self._is_view and not plain.file.maps):
            return None, None, None
        rows = plain.rows if self._checks else None
        view = None if rows is None else rows.view
        crc32 = None if rows is None else rows.__getitem__ if view is None else view.item
        if not plain.file.maps:
            return None, crc32, plain
        plain.file.require_whole()
        return plain.units(self._is_view).reshape(self._shape), crc32, None

    def _filled(self, plain: PlainFile, index: int) -> npt.NDArray[Any] | None:
        """Read a batch by its position; None where the reader has the words for what went wrong."""
        batch = np.empty(self._shape[1:], self._reader.dtype)
        try:
            read = os.preadv(plain.fd, (batch,), plain.base + index * plain.stride)
        except OSError:
            return None
        return batch if read == plain.unit_bytes else None

    def close(self) -> None:
        """Let go of the files of the last single batches."""
        self._met, self._reads_left, self._looks_left = {}, 0, 0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_met": {}, "_reads_left": 0, "_looks_left": 0}


class StepReader:
    """Reads a request as tokens, two views of them (`splits`), or a dictionary. As thread-safe as the reader."""

    def __init__(
        self, extras: Extras, prefetch: int | str, device: torch.device | None, dtype: torch.dtype | None, splits: bool
    ) -> None:
        reader, self._dtype = extras.reader, numpy_dtype(dtype)
        narrow = self._dtype == np.int32
        self._reader, self._seq_len, self.as_dict = reader, extras.seq_len, extras.as_dict
        self._extras = extras if extras.needed else None
        self._splits = splits and not extras.needed
        self._prefetch, self._device = prefetch, device
        self._read_batch = reader.read_batch_int32 if narrow else reader.read_batch_torch
        self._whole = WholeBatches(reader, narrow) if WholeBatches.serves(reader) else None

    def read(self, request: Request) -> Step:
        """Read one step on the CPU: a stored batch by its number, or any records by theirs."""
        whole = self._whole
        tokens = whole.read(request) if whole is not None and isinstance(request, int) else self._tokens(request)
        return (tokens[:, :-1], tokens[:, 1:]) if self._splits else self._step(request, tokens)

    def _read_by_position(self, request: Request) -> Any:
        return self._step(request, self._tokens(request))

    def _tokens(self, request: Request) -> torch.Tensor:
        if isinstance(request, int):
            return self._read_batch(request)
        return self._reader.read_records_torch(request, self._seq_len, self._dtype)

    def _step(self, request: Request, tokens: torch.Tensor) -> Any:
        """Return a step but for the pairs that are two views of the tokens: these are made on the device."""
        return tokens if self._extras is None else self._extras.step(request, tokens)

    def read_all(self, plan: StepPlan, position: int) -> Generator[Step]:
        """Yield the steps of a plan from a position on."""
        steps = self._read_blocks(plan, plan.blocks_from(position))
        return ((tokens[:, :-1], tokens[:, 1:]) for tokens in steps) if self._splits else steps

    def _read_blocks(self, plan: StepPlan, blocks: Iterator[npt.NDArray[np.int64]]) -> Generator[Any]:
        """Read what is in the page cache one block after the other, and the rest as its disk or server is fastest."""
        at_once = self._device is None and self._prefetch in ("auto", 0)
        for (is_ready, axes), group in groupby(blocks, lambda block: (self._is_ready(plan, block), block.ndim)):
            if is_ready and at_once:
                for block in group:
                    yield from self._read_ready(block)
            else:
                yield from self._read_waiting(plan, group, is_ready, axes == 1)

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
        if block.ndim == 2:
            tokens = self._gathered(requests)
        else:
            tokens = map(self._tokens, requests) if self._whole is None else self._whole.read_all(block)
        return tokens if self._extras is None else map(self._step, requests, tokens)

    def _gathered(self, requests: list[Any]) -> Iterator[torch.Tensor]:
        """Read records from one mapping of all, where there is one; the sizes of its files are asked for once."""
        reader, dtype = self._reader, self._dtype
        flat = reader.tokens.flat() if reader.stride == reader.seq_len else None
        if flat is None or len(flat) % self._seq_len:
            return map(self._tokens, requests)
        take = flat.reshape(-1, self._seq_len).take
        scratch = np.empty((len(requests[0]), self._seq_len), reader.dtype)
        # "clip": numpy fills `scratch` without a buffer of its own
        return (from_numpy()(take(rows, axis=0, out=scratch, mode="clip").astype(dtype)) for rows in requests)

    def _read_waiting(
        self, plan: StepPlan, blocks: Iterator[npt.NDArray[np.int64]], is_ready: bool, is_whole: bool
    ) -> Generator[Any] | Iterator[Any]:
        requests = chain.from_iterable(map(requests_in, blocks))
        on_cpu, is_local = self._device is None, self._reader.tokens.wait is Wait.LOCAL
        if on_cpu and self._prefetch == 0:
            return map(self._read_by_position, requests)
        if on_cpu and self._prefetch == "auto" and is_local and network_file_system(self._reader.path) is None:
            hints = Hints(self._reader.will_need, plan.records_per_batch)
            return hint_ahead(self._read_by_position, hints, requests, HINTED_STEPS)
        depth, threads = self.depth(plan)
        reader = self._reader
        is_plain = reader.tokens.wait is Wait.FAR and reader.meta.codec == NO_CODEC and reader.overlap == 0
        if is_plain and is_whole and on_cpu and self._prefetch == "auto" and self._extras is None:
            return self._read_far(requests, depth)
        # reads that do not wait only take the interpreter lock from each other
        threads = 1 if is_ready else threads
        return read_ahead(self._read_by_position, requests, depth, threads=threads, device=self._device)

    def _read_far(self, requests: Iterator[Request], depth: int) -> Generator[torch.Tensor]:
        """Read blocks of steps, each in one thread and by one call; an error is raised at its own step."""
        most = max(1, min(FAR_STEPS, depth // FAR_BLOCKS))
        sizes = chain((most // 8, most // 4, most // 2), repeat(most))  # the first step does not wait for many others
        blocks = (list(islice(requests, max(1, size))) for size in sizes)
        filled = takewhile(len, blocks)
        for block, tokens in read_ahead(self._read_block, filled, FAR_BLOCKS, threads=FAR_BLOCKS + 1):
            if tokens is None:
                yield from map(self._tokens, block)
            else:
                yield from (from_numpy()(batch.astype(self._dtype)) for batch in tokens)

    def _read_block(self, block: list[Request]) -> tuple[list[Request], npt.NDArray[Any] | None]:
        """Return the tokens of whole batches; None for them if one cannot be read, and nobody has waited for it."""
        reader, begun_s = self._reader, time.monotonic()
        tokens = np.empty((len(block), *reader.meta.shape), reader.dtype)
        starts = (np.array(block) * reader.meta.batch_tokens).tolist()
        try:
            reader.tokens.read(zip(starts, tokens.reshape(len(block), -1), strict=True))
        except (ZbError, OSError):
            if time.monotonic() - begun_s > REREAD_S:
                raise
            return block, None
        return block, tokens

    def depth(self, plan: StepPlan) -> tuple[int, int]:
        """Return how many steps to read ahead, and in how many threads."""
        step_bytes = plan.batch_size * self._seq_len * self._reader.dtype.itemsize
        step_reads = plan.batch_size if plan.scattered else 1
        return depth_of(self._prefetch, self._reader.in_flight, step_bytes, step_reads)

    def close(self) -> None:
        """Let go of what is kept between single steps."""
        if self._whole is not None:
            self._whole.close()
