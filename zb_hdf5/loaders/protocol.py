"""The base of every loader, that of those with epochs, and the checks of their states."""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Iterator, Mapping
from operator import index
from typing import Any, Final, Generic, Self, TypeVar

from zb_hdf5.errors import ArgumentError, Remedy, StateError, ZbError
from zb_hdf5.loaders.order import StepPlan, checked_skip

BatchT = TypeVar("BatchT")

#: The version of every state, whatever its kind.
STATE_VERSION: Final = 2
#: Epochs and batches of an endless loader: every sum that is made of them fits into 64 bits.
MAX_COUNT: Final = 2**62
#: Characters of a value that a message shows.
SHOWN_CHARACTERS: Final = 120


class TokenLoader(ABC, Generic[BatchT]):
    """Gives batches, and counts those that it gave. A loader with epochs has a length too; an endless one has none.

    Notes
    -----
    `iter(loader)` yields one epoch, or, without epochs, all that follows. `next(loader)` and `get_batch()` give the
    next batch without it; all share one position. A change of the epoch, the position or the shape holds from the next
    batch on. Not thread-safe. A pickled loader reads nothing: its copy continues at the same position.
    """

    # A reading is a generator of batches, each with the position behind it: a state counts yielded batches, never those
    # that were read ahead.

    path: str | os.PathLike[str]
    epoch: int
    _position: Any
    _reading: Generator[tuple[BatchT, Any]] | None = None
    #: The next iteration continues at the position.
    _resumed = False
    _closed = False
    _endless = False

    @abstractmethod
    def _read_from(self, position: Any) -> Generator[tuple[BatchT, Any]]:
        """Return a reading, which does not refer to the loader if it has threads: they end with the loader."""

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Return the fields that must agree for a position to mean the same."""

    @abstractmethod
    def _place(self) -> dict[str, Any]:
        """Return the other fields of a state."""

    @abstractmethod
    def _take_over(self, state: dict[str, Any], force: bool) -> None:
        """Go to the place in a state of this kind, or raise an error."""

    @abstractmethod
    def _start(self, epoch: int) -> Any:
        """Prepare an epoch, and return its first position."""

    def __iter__(self) -> Iterator[BatchT]:
        """Yield the batches of one epoch; those of an endless loader from the current position on."""
        if not self._resumed and not self._endless:
            self._go_to(0)
        reading = None
        try:
            while True:
                reading = self._reading or self._begin()
                for batch, self._position in reading:
                    yield batch
                    if self._reading is not reading:  # a change, or another iteration
                        if self._closed:
                            return
                        break
                else:
                    return
        finally:
            if self._reading is reading:
                self._stop_reading()

    def __next__(self) -> BatchT:
        """Return the next batch, as `get_batch` does."""
        return self.get_batch()

    def get_batch(self) -> BatchT:
        """Return the next batch, for ever: after the last one of an epoch comes the first one of the next epoch."""
        while (batch := self._next_of_epoch()) is None:
            self.set_epoch(self.epoch + 1)
        return batch

    def _next_of_epoch(self) -> BatchT | None:
        """Return the next batch, or None at the end of the epoch. After an error the next call tries again."""
        reading = self._reading or self._begin()
        try:
            batch, self._position = next(reading)
        except BaseException as error:
            self._reading = None
            if isinstance(error, StopIteration):
                return None
            raise
        return batch

    def _begin(self) -> Generator[tuple[BatchT, Any]]:
        reading = self._reading = self._read_from(self._position)
        self._resumed = False
        return reading

    def _go_to(self, position: Any, *, resumed: bool = False) -> None:
        """Continue at a position with the next batch."""
        self._stop_reading()
        self._position, self._resumed = position, resumed

    def _stop_reading(self) -> None:
        """End the reading threads, and drop what was read ahead."""
        if self._reading is not None:
            self._reading.close()
        self._reading = None

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch to iterate over. A position in this epoch is kept."""
        if not 0 <= epoch <= MAX_COUNT:
            raise ArgumentError(f"epoch must be in 0..{MAX_COUNT:,}, found {epoch}")
        if epoch != self.epoch:
            self._go_to(self._start(epoch))

    def state_dict(self) -> dict[str, Any]:
        """Return where training stands: it counts what was yielded, never what was read ahead.

        Plain JSON values, under 1 KB, the same on every rank after the same step, but of a `TextLoader` each rank has
        one of its own. `kind` names the loader that takes it. `position` counts records, documents or batches of all
        ranks, in this epoch if there are epochs, so that it is valid for any other world size and batch size; those
        that filled up the last step (`drop_last=False`) are not counted again.
        """
        return {**self.identity(), **self._place()}

    def load_state_dict(self, state_dict: dict[str, Any], *, force: bool = False) -> None:
        """Continue exactly where `state_dict` was taken, whatever the ranks, batch size or backend were then.

        Only the ranks of a `TextLoader` must be as many: each of them stands at a place of its own. It reads one row
        group up to its document; the others continue in O(1).

        Parameters
        ----------
        force
            Take the place even if it is of other data, another seed or another order.

        Raises
        ------
        StateError
            If the state is of other data, another seed or another order, of another kind of loader, or no state at
            all; the message names the field. Nothing is taken over then.
        """
        before = dict(self.__dict__)
        try:
            self._take_over(dict(require_kind(self.path, state_dict, self.identity()["kind"])), force)
        except ZbError as error:  # such as documents to mask that are not there
            self.__dict__.update(before, _reading=self._reading)
            if isinstance(error, StateError):
                raise
            raise StateError(f"{self.path}: state: {error}") from error

    def close(self) -> None:
        """End the reading threads, and close what is read."""
        self._closed = True
        self._stop_reading()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reading": None, "_resumed": self._resumed or self._reading is not None}


def with_positions(reading: Generator[BatchT], positions: Iterator[int]) -> Generator[tuple[BatchT, int]]:
    """Yield the batches of a reading, each with the position behind it; the reading ends with this."""
    with contextlib.closing(reading):
        yield from zip(reading, positions, strict=False)


class EpochLoader(TokenLoader[BatchT]):
    """A loader of epochs. A position counts what all ranks together have consumed in the epoch: records, documents."""

    plan: StepPlan
    skip: tuple[tuple[int, int, int], ...]
    mask_documents: tuple[int, ...]
    _last_epoch = MAX_COUNT
    _counts = "records"

    @abstractmethod
    def plan_of_epoch(self, epoch: int) -> StepPlan:
        """Return what this rank reads at each step of an epoch. `plan` is that of the current one."""

    @abstractmethod
    def _mask(self) -> None:
        """Take over `mask_documents`."""

    def _end_of_epoch(self, epoch: int) -> int:
        return self.plan.num_records

    def _start(self, epoch: int) -> Any:
        self.epoch, self.plan = epoch, self.plan_of_epoch(epoch)
        return 0

    def _place(self) -> dict[str, Any]:
        chosen = {"skip": [[*triple] for triple in self.skip], "mask_documents": [*self.mask_documents]}
        place = {"epoch": self.epoch, "position": min(self._position, self._end_of_epoch(self.epoch))}
        return place | {name: values for name, values in chosen.items() if values}

    def _take_over(self, state: dict[str, Any], force: bool) -> None:
        skip = (*self.skip, *checked_skip(state.pop("skip", ())))
        masked = (*self.mask_documents, *masked_numbers(state.pop("mask_documents", ())))
        if not force:
            require_fields(self.path, state, self.identity(), ("epoch", "position"), Remedy.FORCE)
        epoch = require_count(self.path, state, "epoch", self._last_epoch)
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


def masked_numbers(mask_documents: Collection[int]) -> tuple[int, ...]:
    """Return numbers of documents, ascending; raise `ArgumentError` if one is no number."""
    try:
        return tuple(sorted({index(number) for number in mask_documents}))
    except TypeError:
        raise ArgumentError(
            f"mask_documents: expected numbers of documents, as in 'documents', found {mask_documents!r:.80}"
        ) from None


# --- states -----------------------------------------------------------------------------------------------------


def require_kind(where: object, state: object, kind: str | None) -> Mapping[str, Any]:
    """Return `state`, or raise `StateError` if it is of another kind of loader, or no dict."""
    if not isinstance(state, Mapping):
        raise StateError(f"{where}: state: expected a dict, as state_dict() gives, found {shown(state)}")
    if state.get("kind") != kind:
        raise StateError(f"{where}: state: expected kind {kind!r}, found {shown(state.get('kind'))}")
    return state


def require_fields(
    where: object,
    state: object,
    identity: Mapping[str, Any],
    names: Collection[str],
    remedy: Remedy | None = None,
) -> Mapping[str, Any]:
    """Return a dict of `names` and the fields of `identity`, with the same values and types there, and of no others."""
    fields = require_kind(where, state, identity.get("kind"))
    expected = [*identity, *names]
    for name in expected:
        if name not in fields:
            raise StateError(f"{where}: state: expected a field {name!r}, found none")
    for name in fields:
        if name not in expected:
            raise StateError(f"{where}: state: expected {', '.join(expected)}, found a field {shown(name)} too")
    for name, value in identity.items():
        if type(fields[name]) is not type(value) or fields[name] != value:
            facts = f"state has {name} {shown(fields[name])}, this loader {shown(value)}"
            if name == "fingerprint" and "'sampled:" in facts:
                facts += "; open both with verify='store'"
            raise StateError(f"{where}: {facts}", remedy=remedy, at=where)
    return fields


def require_count(where: object, state: Mapping[str, Any], name: str, stop: int = MAX_COUNT, what: str = "") -> int:
    """Return a field, or raise `StateError` unless it is an integer of `0..stop`, which is `what`."""
    value = state.get(name)
    if type(value) is not int or not 0 <= value <= stop:
        reason = f", {what}" if what else ""
        raise StateError(f"{where}: state: expected {name} in 0..{stop:,}{reason}, found {shown(value)}")
    return value


def shown(value: object) -> str:
    """Return a value for a message, however large it is."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to write integers of thousands of digits
        text = f"a {type(value).__name__} that is too long to show"
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."
