"""Prefetch: how far to read ahead, hints to the kernel, pinned memory, and the copy of a batch to a device.

The threads are in `read_ahead` of `files/threads.py`: conversions use them too, without torch or a loader.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from zb_hdf5.errors import ArgumentError, UnavailableError
from zb_hdf5.files.memory_limit import memory_limit
from zb_hdf5.files.objects import MAX_READS
from zb_hdf5.files.threads import MAX_THREADS, read_ahead
from zb_hdf5.files.tokens import Tokens, Wait
from zb_hdf5.loaders.order import StoredRequest
from zb_hdf5.packages import require_package

if TYPE_CHECKING:
    import torch

_Key = TypeVar("_Key")
_Result = TypeVar("_Result")
#: Steps that prefetch="auto" reads ahead if a read may wait.
AUTO_PREFETCH: Final = 8
#: Bytes that are kept under way to fill a long line: 32 MiB at 20 ms are 1.6 GB/s.
IN_FLIGHT_BYTES: Final = 32 << 20
#: Steps that are hinted at together.
HINTED_TOGETHER: Final = 16
#: Steps between a hint and its read.
HINTED_AHEAD: Final = 64
#: Reads of scattered rows between a hint and its read, about: a disk then has enough to do.
HINTED_READS: Final = 1024
#: Bytes between a hint and its read, about, and the share of memory for them: more would push each other out of it.
HINTED_BYTES: Final = 64 << 20
HINTED_SHARE: Final = 8
#: Batches that a hint is remembered for: of 64 KiB each these are 4 GiB, which a page cache keeps.
REMEMBERED_HINTS: Final = 65_536


class Depth(NamedTuple):
    """How far to read ahead."""

    steps: int  # 0: nothing is read ahead
    threads: int


def require_prefetch(prefetch: int | str, least: int = 0) -> None:
    """Raise `ArgumentError` unless it is "auto" or a number of batches."""
    if prefetch != "auto" and (not isinstance(prefetch, int) or prefetch < least):
        raise ArgumentError(f'prefetch must be "auto" or at least {least}, found {prefetch!r}')


def depth_of(
    prefetch: int | str,
    tokens: Tokens,
    is_on_network: Callable[[], bool],
    device: torch.device | None,
    step_bytes: int,
    step_reads: int,
) -> Depth:
    """Return how many steps to read ahead, and in how many threads.

    Parameters
    ----------
    prefetch
        The number of steps. "auto": as many as fill the line to a server, a few if a read may wait, else none.
    tokens
        The tokens that are read.
    is_on_network
        Whether their files come over a network; called if nothing else tells that a read waits.
    device
        The device that the steps are copied to.
    step_bytes, step_reads
        The bytes of a step, and the reads that it takes.
    """
    is_far = tokens.wait is Wait.FAR
    if prefetch != "auto":
        depth = int(prefetch)
    elif is_far:
        depth = max(1, min(IN_FLIGHT_BYTES // step_bytes, MAX_READS // step_reads))
    elif device is not None or tokens.wait is not Wait.LOCAL or is_on_network():
        depth = AUTO_PREFETCH
    else:
        depth = 0
    return Depth(depth, max(1, depth) if is_far else MAX_THREADS)


# --- reading in threads, to a device ---------------------------------------------------------------------------------


def read_to(
    device: torch.device | None,
    read: Callable[[_Key], _Result],
    requests: Iterator[_Key],
    depth: int,
    threads: int,
) -> Generator[_Result]:
    """Yield `read(request)` for each request, in order, with later ones read ahead in threads.

    With a device at least one thread reads, and pins the tensors; the caller then starts their copies to the device.

    Parameters
    ----------
    device
        None: the steps stay on the CPU.
    read, requests, depth, threads
        As for `read_ahead`.
    """
    if device is None:
        return read_ahead(read, requests, depth, threads=threads)
    steps = read_ahead(lambda key: _with_tensors(read(key), pinned), requests, max(1, depth), threads=threads)
    return _moved_to(device, steps)


def _moved_to(device: torch.device, steps: Generator[_Result]) -> Generator[_Result]:
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


def cuda_device(device: str | torch.device | None) -> torch.device | None:
    """Return a CUDA device, or None for the CPU; raise an error if it is another kind, or is not there."""
    library = require_package("torch", "torch")
    found: torch.device | None = None
    if device is not None and library.device(device).type != "cpu":
        found = library.device(device)
    if found is not None and found.type != "cuda":
        raise ArgumentError(f"device must be a CUDA device or the CPU, found {device}")
    if found is not None and not library.cuda.is_available():
        raise UnavailableError(f"device={device}: this PyTorch finds no CUDA device")
    return found


# --- hints to the kernel ---------------------------------------------------------------------------------------------


class BatchHints:
    """Announces stored batches to the kernel: each once, although shuffled records come back to it.

    64 KiB reads in random order from a cold disk then ran at 0.9 of its sequential bandwidth, in 4 threads at 0.65.
    Neighbours are announced together: with one call each, a cold epoch in stored order took twice the processor time.

    Parameters
    ----------
    will_need
        Each announces consecutive batches: the number of the first one, and how many they are.
    records_per_batch
        Records of a stored batch.
    """

    def __init__(self, will_need: Sequence[Callable[[int, int], None]], records_per_batch: int) -> None:
        self._will_need = will_need
        self._records_per_batch = records_per_batch
        self._announced = set[int]()

    def announce(self, requests: Sequence[StoredRequest]) -> None:
        """Announce the batches of requests, which are numbers of batches, or arrays of the numbers of records."""
        batches = set[int]()
        for one in requests:
            batches.update((one,) if isinstance(one, int) else (one // self._records_per_batch).tolist())
        new = sorted(batches - self._announced)
        if len(self._announced) + len(new) > REMEMBERED_HINTS:
            self._announced.clear()
        self._announced.update(new)
        for _, run in groupby(
            enumerate(new), lambda pair: pair[1] - pair[0]
        ):  # the same as long as they are neighbours
            found = [number for _, number in run]
            for will_need in self._will_need:
                will_need(found[0], len(found))


def hint_ahead(
    read: Callable[[_Key], _Result],
    announce: Callable[[list[_Key]], None],
    requests: Iterator[_Key],
    depth: int = HINTED_AHEAD,
) -> Generator[_Result]:
    """Yield `read(request)` for each request, in order; the kernel gets hints of later ones.

    Parameters
    ----------
    read
        Reads one request.
    announce
        Announces several requests.
    requests
        The requests.
    depth
        Requests between a hint and its read, about.
    """
    coming = deque[_Key]()
    while group := list(islice(requests, min(depth, HINTED_TOGETHER))):
        announce(group)
        coming.extend(group)
        while len(coming) > depth:
            yield read(coming.popleft())
    yield from map(read, coming)


def hinted_steps(reads: int, step_bytes: int) -> int:
    """Return how many steps of so many scattered reads each, and bytes, are announced ahead."""
    most_bytes = min(HINTED_BYTES, memory_limit() // HINTED_SHARE)
    return max(1, min(HINTED_AHEAD, HINTED_READS // reads, most_bytes // step_bytes))
