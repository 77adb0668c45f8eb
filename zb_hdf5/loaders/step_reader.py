"""Reads the steps of a loader: at once, after hints to the kernel, in threads, or to a device."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from functools import partial
from itertools import chain, groupby, islice, repeat, takewhile
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from zb_hdf5.columns.reader import BatchReader, from_numpy
from zb_hdf5.errors import ArgumentError, ZbError
from zb_hdf5.files.ranges import network_file_system
from zb_hdf5.files.tokens import Wait
from zb_hdf5.loaders.extras import ExtraOptions, Extras
from zb_hdf5.loaders.prefetch import (
    AUTO_PREFETCH,
    MAX_THREADS,
    DeviceRing,
    FirstHints,
    RunHints,
    hint_ahead,
    moved,
    pinned,
    read_ahead,
    steps_in_flight,
)
from zb_hdf5.loaders.steps import Request, StepPlan
from zb_hdf5.loaders.whole_batches import WholeBatches
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
#: Batches that "auto" looks up in the page cache before it decides.
CACHE_SAMPLE: Final = 4


def numpy_dtype(dtype: torch.dtype | None) -> np.dtype[Any]:
    """Return the dtype of tokens as numpy has it; None: int64.

    Raises
    ------
    ArgumentError
        If it is neither int64 nor int32.
    """
    import torch

    found = {None: np.int64, torch.int64: np.int64, torch.int32: np.int32}.get(dtype)
    if found is None:
        raise ArgumentError(f"dtype must be torch.int64 or torch.int32, found {dtype}")
    return np.dtype(found)


class StepReader:
    """Reads a request as one step: tokens, with `targets` the pair `(x, y)`, or a dictionary with extras.

    `read` is as thread-safe as the reader; picklable.
    """

    def __init__(
        self,
        reader: BatchReader,
        seq_len: int,
        *,
        prefetch: int | str,
        device: torch.device | None,
        dtype: torch.dtype | None,
        targets: bool,
        extras: ExtraOptions,
    ) -> None:
        import torch

        self._numpy_dtype = numpy_dtype(dtype)
        dtype, narrow = dtype or torch.int64, self._numpy_dtype == np.int32
        self._reader, self._seq_len, self._targets = reader, seq_len, targets
        self._inputs = seq_len - reader.overlap if targets else seq_len
        needed = extras.as_dict or extras.mask_documents or (targets and reader.has_padding)
        self._extras = Extras(reader, seq_len, self._inputs, extras, targets=targets) if needed else None
        self._as_dict = extras.as_dict
        self._prefetch, self._device, self._dtype = prefetch, device, dtype
        self._read_batch = reader.read_batch_int32 if narrow else reader.read_batch_torch
        self._whole = WholeBatches(reader, narrow) if WholeBatches.serves(reader) else None
        self._ring: DeviceRing | None = None

    def read(self, request: Request) -> Step:
        """Read one step on the CPU: a stored batch by its number, or any records by theirs."""
        if isinstance(request, int) and self._whole is not None:
            return self._step(request, self._whole.read(request))
        return self._read_by_position(request)

    def _read_by_position(self, request: Request) -> Step:
        if isinstance(request, int):
            return self._step(request, self._read_batch(request))
        return self._step(request, self._reader.read_records_torch(request, self._seq_len, self._numpy_dtype))

    def _step(self, request: Request, tokens: torch.Tensor) -> Step:
        if self._extras is None:
            return (tokens[:, :-1], tokens[:, 1:]) if self._targets else tokens
        beside: dict[str, Any] = {}
        if self._as_dict:
            beside["tokens"] = tokens if self._inputs == self._seq_len else tokens[:, : self._inputs]
        self._extras.add_to(beside, request, tokens.numpy() if self._targets else None)
        return beside if self._as_dict else self._pair(tokens, beside)

    @staticmethod
    def _pair(tokens: torch.Tensor, beside: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        return tokens[:, :-1], beside["targets"][:, : tokens.shape[1] - 1]

    def read_all(self, plan: StepPlan, position: int, requests: Iterator[Request] | None = None) -> Generator[Step]:
        """Yield the steps of a plan from a position on, or those of `requests`, which it has from there on."""
        is_whole = requests is None and plan.is_whole and not position % plan.batch_size
        in_this_thread = self._device is None and self._prefetch in ("auto", 0)
        if is_whole and in_this_thread and self._whole and network_file_system(self._reader.path) is None:
            return self._read_whole(self._whole, plan, position)
        return self._read_requests(plan, position, requests or plan.requests_from(position))

    def _read_whole(self, whole: WholeBatches, plan: StepPlan, position: int) -> Generator[Step]:
        """Read from the mapping what is in the page cache, one block of steps after the other, and tell of the rest."""
        plainly = self._extras is None and not self._targets
        for is_ready, blocks in groupby(plan.batches_from(position), whole.is_ready):
            if is_ready:
                for block in blocks:
                    batches = whole.read_all(block)
                    yield from batches if plainly else map(self._step, block.tolist(), batches)
                continue
            requests = chain.from_iterable(block.tolist() for block in blocks)
            if self._prefetch == 0:
                yield from map(self._read_by_position, requests)
            else:
                yield from hint_ahead(self._read_by_position, self._hint_of(plan), requests, HINTED_STEPS)

    def _read_requests(self, plan: StepPlan, position: int, requests: Iterator[Request]) -> Generator[Step]:
        depth, threads = self.depth(plan)
        on_disk = self._reader.in_flight is None and not self._reader.wants_threads
        warm = depth > 0 and (on_disk or self._reader.in_front is not None) and self._is_warm(plan, position)
        if warm:  # reads that do not wait only take the interpreter lock from each other
            threads = 1
        if self._device is not None:
            ring = self._ring = self._ring or DeviceRing(self._device, self._dtype)
            read_pinned = partial(self._read_pinned, ring)
            for buffer, beside in read_ahead(read_pinned, requests, max(1, depth), threads=threads):
                yield self._sent(ring, buffer, beside)
        elif depth == 0 or (warm and self._prefetch == "auto"):
            yield from map(self._read_by_position, requests)
        elif on_disk and self._prefetch == "auto" and network_file_system(self._reader.path) is None:
            yield from hint_ahead(self._read_by_position, self._hint_of(plan), requests, HINTED_STEPS)
        elif self._reads_blocks(plan, position):
            yield from self._read_blocks(requests, depth)
        else:
            yield from read_ahead(self._read_by_position, requests, depth, threads=threads)

    def _reads_blocks(self, plan: StepPlan, position: int) -> bool:
        """Return whether whole batches of objects are read, as they are stored and with nothing else."""
        reader = self._reader
        plain = reader.tokens.wait is Wait.FAR and reader.meta.codec == NO_CODEC and reader.overlap == 0
        whole = plan.is_whole and not position % plan.batch_size
        return plain and whole and self._prefetch == "auto" and self._extras is None

    def _read_blocks(self, requests: Iterator[Request], depth: int) -> Generator[Step]:
        """Read blocks of steps, each in one thread and by one call; an error is raised at its own step."""
        most = max(1, min(FAR_STEPS, depth // FAR_BLOCKS))
        sizes = chain((most // 8, most // 4, most // 2), repeat(most))  # the first step does not wait for many others
        blocks = (list(islice(requests, max(1, size))) for size in sizes)
        filled = takewhile(len, blocks)
        for block, tokens in read_ahead(self._read_block, filled, FAR_BLOCKS, threads=FAR_BLOCKS + 1):
            if tokens is None:
                yield from map(self.read, block)
            else:
                rows = (from_numpy()(batch.astype(self._numpy_dtype)) for batch in tokens)
                yield from map(self._step, block, rows)

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
        in_flight = self._reader.in_flight
        if self._prefetch != "auto":
            depth = int(self._prefetch)
        elif in_flight is None:
            depth = AUTO_PREFETCH
        else:
            step_bytes = plan.batch_size * self._seq_len * self._reader.dtype.itemsize
            depth = steps_in_flight(in_flight, step_bytes, plan.batch_size if plan.scattered else 1)
        return depth, MAX_THREADS if in_flight is None else max(1, depth)

    def _is_warm(self, plan: StepPlan, position: int) -> bool:
        """Look up some of this rank's next batches in the page cache, far apart: opening a file reads its first."""
        steps = np.arange(CACHE_SAMPLE) * plan.steps_from(position) // CACHE_SAMPLE
        positions = position + steps * plan.step + plan.rank * plan.batch_size
        batches = plan.order.indices(positions % plan.order.n) // plan.records_per_batch
        return all(self._reader.is_cached(batch) for batch in set(batches.tolist()))

    def _hint_of(self, plan: StepPlan) -> Callable[[Request], None]:
        """Return the function that announces the batches of a request to the kernel."""
        # records are gathered from here and there, also where their batches follow each other
        hint = (FirstHints if plan.scattered else RunHints)(self._reader.will_need)

        def hint_of(request: Request) -> None:
            if isinstance(request, int):
                hint(request)
            else:
                for batch in np.unique(request // plan.records_per_batch).tolist():
                    hint(batch)

        return hint_of

    def _read_pinned(self, ring: DeviceRing, request: Request) -> tuple[torch.Tensor, dict[str, Any] | None]:
        """Read the tokens of a step into a pinned buffer, and its other values."""
        reader = self._reader
        if isinstance(request, int):
            buffer = ring.fill(reader.meta.shape, reader.dtype, lambda out: reader.read_into(request, out))
        else:
            shape = (len(request), self._seq_len)
            buffer = ring.fill(shape, reader.dtype, lambda out: reader.read_records_into(request, out))
        if self._extras is None:
            return buffer, None
        beside: dict[str, Any] = {}
        self._extras.add_to(beside, request, buffer.numpy().view(reader.dtype))
        return buffer, {name: pinned(value) for name, value in beside.items()}

    def _sent(self, ring: DeviceRing, buffer: torch.Tensor, beside: dict[str, Any] | None) -> Step:
        """Start the copies of a step to the device."""
        tokens = ring.send(buffer)
        if beside is None:
            return (tokens[:, :-1], tokens[:, 1:]) if self._targets else tokens
        beside = {name: moved(value, tokens.device) for name, value in beside.items()}
        return {"tokens": tokens[:, : self._inputs], **beside} if self._as_dict else self._pair(tokens, beside)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ring": None}
