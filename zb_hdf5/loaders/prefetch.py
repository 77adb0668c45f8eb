"""Reading ahead: in threads, also on the way to a device, or by hints to the kernel."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from itertools import islice
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
#: Steps that are hinted at together.
HINTED_TOGETHER: Final = 16
#: Batches that a hint is remembered for: of 64 KiB each these are 4 GiB, which a page cache keeps.
REMEMBERED_HINTS: Final = 65_536


def read_ahead(
    read: Callable[[Request], Result],
    requests: Iterator[Request],
    depth: int,
    *,
    threads: int = MAX_THREADS,
    device: torch.device | None = None,
) -> Generator[Result]:
    """Yield `read(request)` for each request, in order, with up to `depth` of them read ahead in threads; 0: without.

    With a `device` the threads, of which there is at least one, pin the tensors that they read, and the caller's thread
    starts their copies. The threads end with the iterator: a read that has begun is waited for, no other one begins,
    nor does any after one that failed, which may have waited for a server.
    """
    if not depth and device is None:
        yield from map(read, requests)
        return
    failed, depth = threading.Event(), max(1, depth)

    def read_unless_failed(request: Request) -> Result:
        if failed.is_set():
            raise CancelledError
        try:
            return read(request) if device is None else _with_tensors(read(request), pinned)
        except BaseException:
            failed.set()
            raise

    def next_result() -> Result:
        result = pending.popleft().result()
        return result if device is None else _with_tensors(result, lambda tensor: moved(tensor, device))

    pool = ThreadPoolExecutor(min(depth, threads), thread_name_prefix="zb-prefetch")
    pending: deque[Future[Result]] = deque()
    try:
        for request in requests:
            pending.append(pool.submit(read_unless_failed, request))
            if len(pending) > depth:
                yield next_result()
        while pending:
            yield next_result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


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
    prefetch: int | str, in_flight: tuple[int, int] | None, step_bytes: int, step_reads: int
) -> tuple[int, int]:
    """Return how many steps to read ahead where reads wait, and in how many threads; `in_flight` None: of a disk."""
    if prefetch != "auto":
        depth = int(prefetch)
    elif in_flight is None:
        depth = AUTO_PREFETCH
    else:
        depth = max(1, min(in_flight[0] // step_bytes, in_flight[1] // step_reads))
    return depth, MAX_THREADS if in_flight is None else max(1, depth)


def hint_ahead(
    read: Callable[[Request], Result],
    hint: Callable[[Sequence[Request]], None],
    requests: Iterator[Request],
    depth: int,
) -> Iterator[Result]:
    """Yield `read(request)` for each request, in order; `hint` gets them in groups, about `depth` reads ahead."""
    # so 64 KiB reads in random order from a cold disk ran at 0.9 of its sequential bandwidth, in 4 threads at 0.65
    coming: deque[Request] = deque()
    while group := list(islice(requests, HINTED_TOGETHER)):
        hint(group)
        coming.extend(group)
        while len(coming) > depth:
            yield read(coming.popleft())
    yield from map(read, coming)


class Hints:
    """Tells the kernel of the batches of requests, but of none twice: shuffled records come back to each of them."""

    # neighbours are told together: with one hint each, a cold epoch in stored order took twice the processor time

    def __init__(self, will_need: Callable[[int, int], None], records_per_batch: int) -> None:
        self._will_need, self._records_per_batch = will_need, records_per_batch
        self._heard: set[int] = set()

    def __call__(self, requests: Sequence[int | npt.NDArray[np.int64]]) -> None:
        size = self._records_per_batch
        parts = [np.array([one]) if isinstance(one, int) else one // size for one in requests]
        new = np.array(sorted(set(np.concatenate(parts).tolist()) - self._heard), np.int64)
        if len(self._heard) + len(new) > REMEMBERED_HINTS:
            self._heard.clear()
        self._heard.update(new.tolist())
        for run in np.split(new, np.flatnonzero(np.diff(new) != 1) + 1) if len(new) else ():
            self._will_need(int(run[0]), len(run))


def cuda_device(device: str | torch.device | None) -> torch.device | None:
    """Return the CUDA device that is meant, or None for the CPU; raise if it is another kind, or is not there."""
    import torch

    found = None if device is None or torch.device(device).type == "cpu" else torch.device(device)
    if found is not None and found.type != "cuda":
        raise ArgumentError(f"device must be a CUDA device or the CPU, found {device}")
    if found is not None and not torch.cuda.is_available():
        raise UnavailableError(f"device={device}: this PyTorch finds no CUDA device")
    return found
