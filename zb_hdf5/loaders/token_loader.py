"""The base of all loaders: iterations, a position, the epochs, and the batches that were given."""

from __future__ import annotations

import contextlib
import time
import warnings
from abc import abstractmethod
from collections.abc import Collection, Generator, Iterator, Mapping
from operator import index
from typing import Any, ClassVar, Generic, Self

from zb_hdf5.errors import ArgumentError, ClosedError, Remedy, ZbError, whole_number
from zb_hdf5.loaders.order import FIRST_VERSION, WIDE_VERSION, StepPlan, checked_skip
from zb_hdf5.loaders.state import MAX_COUNT, Resumable, require_count, require_fields
from zb_hdf5.loaders.stats import LoaderStats, bytes_of
from zb_hdf5.loaders.steps import BatchT


class TokenLoader(Resumable, Generic[BatchT]):
    """Gives batches, and counts the batches that it gave. A loader with epochs has a length; an endless one has none.

    Notes
    -----
    `iter(loader)` yields one epoch, or, without epochs, all that follows. `next(loader)` and `get_batch()` give the
    next batch without it; all share one position. A change of the epoch, the position or the shape holds from the next
    batch on. Not thread-safe. A pickled loader reads nothing: its copy continues at the same position.

    A reading is a generator of batches, each with the position after it: a state counts yielded batches, and no batch
    that was read ahead.
    """

    epoch: int
    _position: Any
    _reading: Generator[tuple[BatchT, Any]] | None = None
    #: The next iteration continues at the position.
    _resumed = False
    #: The epoch of the last iteration, if that went from its beginning to its end.
    _passed: int | None = None
    _closed = False
    _endless = False
    _num_given = 0
    _bytes_given = 0
    #: The bytes of each batch of the reading; 0: not known yet, or they differ.
    _equal_bytes = 0
    _waited_s = 0.0
    #: The time at which the first batch was asked for.
    _first_asked_s: float | None = None

    @abstractmethod
    def _read_from(self, position: Any) -> Generator[tuple[BatchT, Any]]:
        """Return a reading, which does not refer to the loader if it has threads: they end with the loader."""

    @abstractmethod
    def _start(self, epoch: int) -> Any:
        """Prepare an epoch, and return its first position."""

    def __iter__(self) -> Iterator[BatchT]:
        """Yield the batches of one epoch; for an endless loader, all from the current position on."""
        clock = time.perf_counter
        is_whole = self._begin_iteration()
        reading = None
        try:
            while reading is None or not self._closed:
                asked_s = self._ask()
                reading = self._reading or self._begin()
                try:
                    for batch, position in reading:
                        if self._reading is not reading:  # another thread has changed or closed it meanwhile
                            break
                        self._position = position
                        # as `_count`, without calls: a loop runs this for each batch
                        self._waited_s += clock() - asked_s
                        self._num_given += 1
                        self._bytes_given += self._equal_bytes or self._measure(batch)
                        yield batch
                        if self._reading is not reading:  # a change, or another iteration
                            break
                        asked_s = clock()
                    else:
                        if self._reading is reading:
                            self._passed = self.epoch if is_whole else None
                            return
                except ValueError as error:
                    if not self._is_ended_elsewhere(reading, error):
                        raise
                self._end(reading)
        except Exception as error:
            self._raise_met(error)
            raise
        finally:
            if self._reading is reading:
                self._stop_reading()

    def _begin_iteration(self) -> bool:
        """Go to the beginning of the epoch, unless it continues in the middle of one; return whether it begins."""
        is_whole = not self._resumed and not self._endless
        if is_whole:
            self._begin_pass()
            self._go_to(0)
        return is_whole

    def _begin_pass(self) -> None:
        """Called by the first `next` of an iteration over a whole epoch."""

    def __next__(self) -> BatchT:
        """Return the next batch, as `get_batch` does."""
        return self.get_batch()

    def get_batch(self) -> BatchT:
        """Return the next batch, endlessly: after the last one of an epoch comes the first one of the next epoch."""
        while (batch := self._next_of_epoch()) is None:
            self.set_epoch(self.epoch + 1)
        return batch

    def _next_of_epoch(self) -> BatchT | None:
        """Return the next batch, or None at the end of the epoch. After an error the next call tries again."""
        asked_s = self._ask()
        reading = self._reading or self._begin()
        try:
            batch, position = next(reading)
        except StopIteration:
            self._reading = None
            return None
        except BaseException as error:
            if self._is_ended_elsewhere(reading, error) and not self._closed:
                return self._next_of_epoch()
            self._reading = None
            self._raise_met(error)
            raise
        if self._reading is not reading:  # another thread has changed or closed it meanwhile
            self._end(reading)
            if self._closed:
                raise self._closed_meanwhile()
            return self._next_of_epoch()
        self._position = position
        self._count(batch, asked_s)
        return batch

    def _is_ended_elsewhere(self, reading: Generator[Any], error: BaseException) -> bool:
        """Return whether an error of a reading is that another thread is ending it, after a change or by `close`."""
        return self._reading is not reading and _is_executing(error)

    def _raise_met(self, error: BaseException) -> None:
        """Raise the error that names another thread, if that is the cause of an error of a reading."""
        if isinstance(error, ZbError) or not isinstance(error, Exception):
            return
        if self._closed:
            raise self._closed_meanwhile() from error
        if _is_executing(error):
            raise ArgumentError(
                f"{self.path}: two threads read this loader at once: give each a loader of its own"
            ) from error

    def _closed_meanwhile(self) -> ClosedError:
        return ClosedError(f"{self.path}: was closed by another thread while it was read")

    def _ask(self) -> float:
        """Return the time at which a batch is asked for, and keep that of the first one."""
        asked_s = time.perf_counter()
        if self._first_asked_s is None:
            self._first_asked_s = asked_s
        return asked_s

    def _count(self, batch: BatchT, asked_s: float) -> None:
        """Count a batch that the caller has asked for at a time, and now gets."""
        self._waited_s += time.perf_counter() - asked_s
        self._num_given += 1
        self._bytes_given += self._equal_bytes or self._measure(batch)

    def _measure(self, batch: BatchT) -> int:
        """Return the bytes of a batch, and keep them if each batch of the reading has as many."""
        num_bytes = bytes_of(batch)
        if self._has_equal_batches:
            self._equal_bytes = num_bytes
        return num_bytes

    @property
    def _has_equal_batches(self) -> bool:
        """Whether all batches of a reading have as many bytes as its first one: a third of a count is to ask each."""
        return False

    def stats(self) -> LoaderStats:
        """Return what was given so far, and how long the caller has waited for it.

        Batches that a `DataLoader` takes from `dataset()` or `records()` are not counted. A pickled copy begins anew.
        """
        elapsed_s = 0.0 if self._first_asked_s is None else time.perf_counter() - self._first_asked_s
        return LoaderStats(self._num_given, self._bytes_given, self._waited_s, elapsed_s, self._num_fetched())

    def _num_fetched(self) -> int | None:
        """Return the units that were fetched into a cache; None: there is no cache."""
        return None

    def _begin(self) -> Generator[tuple[BatchT, Any]]:
        reading = self._reading = self._read_from(self._position)
        self._equal_bytes = 0
        self._resumed = False
        return reading

    def _go_to(self, position: Any, *, resumed: bool = False) -> None:
        """Continue at a position with the next batch."""
        reading = self._reading
        self._reading = None
        self._position = position  # before the end of the reading, which takes a while: another thread may read on
        self._resumed = resumed
        if reading is not None:
            self._end(reading)

    def _stop_reading(self) -> None:
        """End the reading threads, and drop the steps that were read ahead.

        A thread that is reading them meanwhile ends them when it has its step.
        """
        reading = self._reading
        self._reading = None
        if reading is not None:
            self._end(reading)

    @staticmethod  # and no function of the module: when Python ends, the names of modules may be gone
    def _end(reading: Generator[Any]) -> None:
        """End a reading, unless another thread executes it: that one ends it when it has its step, or does already."""
        try:
            reading.close()
        except ValueError:
            return

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch to iterate over. A position in this epoch is kept."""
        if not 0 <= whole_number("epoch", epoch) <= MAX_COUNT:
            raise ArgumentError(f"epoch must be in 0..{MAX_COUNT:,}, found {epoch}")
        if epoch != self.epoch:
            self._go_to(self._start(epoch))

    def close(self) -> None:
        """End the reading threads, and close the readers."""
        self._closed = True
        self._stop_reading()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        resumed = self._resumed or self._reading is not None
        counted = {"_num_given": 0, "_bytes_given": 0, "_waited_s": 0.0, "_first_asked_s": None}
        return {**self.__dict__, "_reading": None, "_resumed": resumed, "_passed": None, **counted}


def _is_executing(error: BaseException) -> bool:
    """Return whether an error is that of a generator which another thread executes."""
    return isinstance(error, ValueError) and "already executing" in str(error)


def with_positions(reading: Generator[BatchT], positions: Iterator[int]) -> Generator[tuple[BatchT, int]]:
    """Yield the batches of a reading, each with the position after it; the reading ends with this."""
    with contextlib.closing(reading):
        yield from zip(reading, positions, strict=False)


class EpochLoader(TokenLoader[BatchT]):
    """A loader of epochs. A position counts the records or documents consumed by all ranks in the epoch."""

    plan: StepPlan
    shuffle: str
    skip: tuple[tuple[int, int, int], ...]
    mask_documents: tuple[int, ...]
    _changed_by_state: ClassVar[tuple[str, ...]] = (
        "epoch",
        "plan",
        "skip",
        "mask_documents",
        "_position",
        "_resumed",
        "_first_version_epoch",
    )
    _last_epoch = MAX_COUNT
    #: A state of the first version was taken in this epoch: its order holds up to the end of it.
    _first_version_epoch: int
    _counts = "records"
    #: Whether the warning of a repeated epoch has been given.
    _warned = False

    def _begin_pass(self) -> None:
        if self._passed != self.epoch or self.shuffle == "sequential" or self._warned:
            return
        self._warned = True
        warnings.warn(
            f"{self.path}: epoch {self.epoch:,} was read to its end, and is read again in the same order: call "
            "set_epoch(e) before each epoch, or take batches from get_batch(), which goes on to the next epoch",
            UserWarning,
            stacklevel=4,  # the loop that asks for the first batch
        )

    @abstractmethod
    def plan_of_epoch(self, epoch: int) -> StepPlan:
        """Return the reads of this rank at each step of an epoch. `plan` has the current epoch."""

    @abstractmethod
    def _mask(self) -> None:
        """Prepare the reads for the documents in `mask_documents`, or raise an error."""

    def _begin_with(self, skip: Collection[tuple[int, int, int]], mask_documents: Collection[int]) -> None:
        """Take the records that are left out and the documents that are not targets, and begin epoch 0."""
        self.skip = checked_skip(skip)
        self.mask_documents = masked_numbers(mask_documents)
        self._mask()
        self.epoch = self._first_version_epoch = -1  # none yet
        self.set_epoch(0)

    def _version_of(self, epoch: int) -> int:
        """Return the version of the order of an epoch."""
        return FIRST_VERSION if epoch <= self._first_version_epoch else WIDE_VERSION

    def identity_as(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields that must agree with a state, which may be of the first version in any order."""
        version = FIRST_VERSION
        if state.get("version") != FIRST_VERSION:
            version = self.plan_of_epoch(self._first_version_epoch + 1).order.version
        return {**self.identity(), "version": version}

    def keep_order(self, state: Mapping[str, Any]) -> None:
        """Take the order of the version of a state for the epoch of the state, and that of today for later ones."""
        self._first_version_epoch = state["epoch"] if state.get("version") == FIRST_VERSION else -1
        self.plan = self.plan_of_epoch(self.epoch)

    def _end_of_epoch(self, epoch: int) -> int:
        return self.plan.num_records

    def _start(self, epoch: int) -> Any:
        self.plan = self.plan_of_epoch(epoch)
        self.epoch = epoch
        return 0

    def _place(self) -> dict[str, Any]:
        place: dict[str, Any] = {
            "epoch": self.epoch,
            "position": min(self._position, self._end_of_epoch(self.epoch)),
        }
        if self.skip:
            place["skip"] = [[*triple] for triple in self.skip]
        if self.mask_documents:
            place["mask_documents"] = [*self.mask_documents]
        return place

    def _take_over(self, state: dict[str, Any], force: bool) -> None:
        skip = (*self.skip, *checked_skip(state.pop("skip", ())))
        masked = (*self.mask_documents, *masked_numbers(state.pop("mask_documents", ())))
        if not force:
            require_fields(self.path, state, self.identity_as(state), ("epoch", "position"), Remedy.FORCE)
        epoch = require_count(self.path, state, "epoch", self._last_epoch)
        self.keep_order(state)
        end = self._end_of_epoch(epoch)
        position = require_count(self.path, state, "position", end, f"the {self._counts} of an epoch")
        if skip != self.skip:
            self.skip = checked_skip(skip)
            self.plan = self.plan_of_epoch(self.epoch)
        if masked != self.mask_documents:
            self.mask_documents = masked_numbers(masked)
            self._mask()
        self.set_epoch(epoch)
        self._go_to(position, resumed=True)
        self._passed = None


def masked_numbers(mask_documents: Collection[int]) -> tuple[int, ...]:
    """Return numbers of documents, ascending; raise `ArgumentError` if one is not a number."""
    try:
        return tuple(sorted({index(number) for number in mask_documents}))
    except TypeError:
        raise ArgumentError(
            f"mask_documents: expected numbers of documents, as in 'documents', found {mask_documents!r:.80}"
        ) from None
