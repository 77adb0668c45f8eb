"""Reading ahead in threads or by hints to the kernel, and moving batches to a device during the computation."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import ArgumentError, UnavailableError

if TYPE_CHECKING:
    import torch

Request = TypeVar("Request")
Result = TypeVar("Result")

#: More threads than this do not make one process read faster: the calls between the reads hold the interpreter lock.
MAX_THREADS: Final = 4
#: Steps that prefetch="auto" reads ahead where a read may wait.
AUTO_PREFETCH: Final = 8
#: Batches of a run that are hinted at together.
RUN_HINTS: Final = 16
#: Batches that a hint is remembered for: of 64 KiB each these are 4 GiB, which a page cache keeps.
REMEMBERED_HINTS: Final = 65_536
#: Copies to the device that may be under way.
COPIES: Final = 2


def read_ahead(
    read: Callable[[Request], Result], requests: Iterator[Request], depth: int, *, threads: int = MAX_THREADS
) -> Generator[Result]:
    """Yield `read(request)` for each request, in order, with up to `depth` of them read ahead in threads.

    With `depth` 0 each is read when it is asked for, in the caller's thread.

    An error of `read` is raised here, in the place of its result. The threads end when the iterator ends, is closed, or
    is dropped (an early `break`, an exception, Ctrl+C): a read that has begun is waited for, the others are not begun,
    nor is any after one that failed, which may have waited for a server.
    """
    if not depth:
        yield from map(read, requests)
        return
    failed = threading.Event()

    def read_unless_failed(request: Request) -> Result:
        if failed.is_set():
            raise CancelledError
        try:
            return read(request)
        except BaseException:
            failed.set()
            raise

    pool = ThreadPoolExecutor(min(depth, threads), thread_name_prefix="zb-prefetch")
    pending: deque[Future[Result]] = deque()
    try:
        for request in requests:
            pending.append(pool.submit(read_unless_failed, request))
            if len(pending) > depth:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def require_prefetch(prefetch: int | str, least: int = 0) -> None:
    """Raise `ArgumentError` unless it is "auto" or a number of batches."""
    if prefetch != "auto" and (not isinstance(prefetch, int) or prefetch < least):
        raise ArgumentError(f'prefetch must be "auto" or at least {least}, found {prefetch!r}')


def steps_in_flight(in_flight: tuple[int, int], step_bytes: int, reads: int) -> int:
    """Return the number of steps that the bytes and reads in flight of a server allow, from those of one step."""
    most_bytes, most_reads = in_flight
    return max(1, min(most_bytes // step_bytes, most_reads // reads))


def hint_ahead(
    read: Callable[[Request], Result], hint: Callable[[Request], None], requests: Iterator[Request], depth: int
) -> Iterator[Result]:
    """Yield `read(request)` for each request, in order; `hint` gets each one `depth` reads before its turn.

    64 KiB reads in random order from a cold disk ran at 0.9 of its sequential bandwidth; with 4 threads at 0.65.
    """
    coming: deque[Request] = deque()
    for request in requests:
        hint(request)
        coming.append(request)
        if len(coming) > depth:
            yield read(coming.popleft())
    while coming:
        yield read(coming.popleft())


class RunHints:
    """Hints about batches by their numbers; about those that follow each other, `RUN_HINTS` of them at once.

    Hints of one batch each made a cold epoch in stored order slower, and took twice the processor time.
    """

    def __init__(self, hint: Callable[[int, int], None]) -> None:
        self._hint = hint
        self._first = self._next = -1  # of the run, what is not hinted at yet

    def __call__(self, number: int) -> None:
        if number == self._next - 1:
            return
        if number != self._next:
            if self._first < self._next:
                self._hint(self._first, self._next - self._first)
            self._hint(number, 1)  # a run may be of one batch
            self._first = number + 1
        elif number + 1 - self._first == RUN_HINTS:
            self._hint(self._first, RUN_HINTS)
            self._first = number + 1
        self._next = number + 1


class FirstHints:
    """Hints about batches that it has not hinted at lately: shuffled records come back to each again and again."""

    def __init__(self, hint: Callable[[int], None]) -> None:
        self._hint, self._heard = hint, set[int]()

    def __call__(self, number: int) -> None:
        if number not in self._heard:
            if len(self._heard) == REMEMBERED_HINTS:
                self._heard.clear()
            self._heard.add(number)
            self._hint(number)


def cuda_device(device: str | torch.device | None) -> torch.device | None:
    """Return the CUDA device that is meant, or None for the CPU.

    Raises
    ------
    ArgumentError
        If it is another kind of device.
    UnavailableError
        If this machine has none.
    """
    import torch

    found = None if device is None or torch.device(device).type == "cpu" else torch.device(device)
    if found is not None and found.type != "cuda":
        raise ArgumentError(f"device must be a CUDA device or the CPU, found {device}")
    if found is not None and not torch.cuda.is_available():
        raise UnavailableError(f"device={device}: this PyTorch finds no CUDA device")
    return found


class DeviceRing:
    """Pinned buffers on their way to a CUDA device.

    A buffer is used again only after the event of its copy. Taking one never waits: a new one is made if none is free,
    and there are never more than the reads under way and `COPIES` copies need. Ids cross the bus as they are stored and
    are widened to `dtype` on the device.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        import torch

        self._torch, self._dtype = torch, dtype
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._device = self._stream.device  # "cuda" without a number means another one after set_device
        self._free: deque[torch.Tensor] = deque()
        self._copying: deque[tuple[Any, torch.Tensor]] = deque()

    def fill(
        self, shape: tuple[int, ...], stored: np.dtype[Any], read: Callable[[npt.NDArray[Any]], None]
    ) -> torch.Tensor:
        """Take a buffer and let `read` fill it. Called by the reading threads."""
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = None
        if buffer is None or buffer.shape != shape:
            signed = {2: self._torch.int16, 4: self._torch.int32}[stored.itemsize]
            buffer = self._torch.empty(shape, dtype=signed, pin_memory=True)
        read(buffer.numpy().view(stored))
        return buffer

    def send(self, buffer: torch.Tensor) -> torch.Tensor:
        """Start the copy, and return the tensor that the current stream may use. Called by the consumer."""
        cuda: Any = self._torch.cuda
        with cuda.stream(self._stream):
            tokens = buffer.to(self._device, non_blocking=True).to(self._dtype)
            if tokens.element_size() > buffer.element_size():  # signed on the bus, unsigned in the store
                tokens.bitwise_and_(0xFFFF if buffer.element_size() == 2 else 0xFFFFFFFF)
            event = cuda.Event()
            event.record(self._stream)
        current = cuda.current_stream(self._device)
        current.wait_event(event)
        tokens.record_stream(current)
        self._copying.append((event, buffer))
        if len(self._copying) > COPIES:
            event, buffer = self._copying.popleft()
            event.synchronize()
            self._free.append(buffer)
        return tokens


def pinned(value: Any) -> Any:
    """Pin a tensor, so that its copy to a device does not wait; other values stay as they are."""
    return value.pin_memory() if hasattr(value, "pin_memory") else value


def moved(value: Any, device: torch.device) -> Any:
    """Start the copy of a pinned tensor to a device, on the current stream; other values stay as they are."""
    return value.to(device, non_blocking=True) if hasattr(value, "pin_memory") else value
