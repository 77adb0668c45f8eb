"""The resume state of a loader: how it is made, how a loader takes it, its version, and the checks of its fields.

A state is the identity of the data and their order, and a place in them. Each kind of loader has its own of both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from os import PathLike
from typing import Any, ClassVar, Final

from zb_hdf5.errors import Remedy, StateError, ZbError

#: The version of every state, whatever its kind.
STATE_VERSION: Final = 2
#: Epochs and batches of an endless loader: every sum that is made of them fits into 64 bits.
MAX_COUNT: Final = 2**62
#: Characters of a value that a message shows.
SHOWN_CHARACTERS: Final = 120
_OTHER_DATA: Final = "other data (another store or split, or windows of another shape)"
_OTHER_ORDER: Final = "another order"
#: The thing that a state is of if it has another value of a field, in words.
_OTHER: Final = {
    "dtype": _OTHER_DATA,
    "fingerprint": _OTHER_DATA,
    "shuffle": _OTHER_ORDER,
    "block_size": _OTHER_ORDER,
    "seed": _OTHER_ORDER,
    "tokenizer": "another tokenizer",
}


class Resumable(ABC):
    """Has a state of plain JSON values, from which another object of its kind continues."""

    path: str | PathLike[str]
    #: The attributes that `_take_over` may change before it raises an error: they get their values back.
    _changed_by_state: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Return the fields that must agree for a position to mean the same."""

    @abstractmethod
    def _place(self) -> dict[str, Any]:
        """Return the other fields of a state."""

    @abstractmethod
    def _take_over(self, state: dict[str, Any], force: bool) -> None:
        """Go to the place in a state of this kind, or raise an error."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position of training: it counts the steps that were yielded, and no step that was read ahead.

        Plain JSON values, under 1 KB, the same on every rank after the same step; a `TextLoader` has a state of its own
        on each rank. `kind` names the loader that takes it. `position` counts records, documents or batches of all
        ranks, in this epoch if there are epochs, so that it is valid for any other world size and batch size;
        records that filled up the last step (`drop_last=False`) are not counted again.
        """
        return {**self.identity(), **self._place()}

    def load_state_dict(self, state_dict: dict[str, Any], *, force: bool = False) -> None:
        """Continue exactly where `state_dict` was taken, whatever the ranks, batch size or backend were then.

        Only the ranks of a `TextLoader` must be as many: each of them is at a place of its own. It reads one row group
        up to its document; the others continue in O(1).

        Parameters
        ----------
        state_dict
            As `state_dict()` has returned it.
        force
            Take the place even if it is of other data, another seed or another order.

        Raises
        ------
        StateError
            If the state is of other data, another seed or another order, of another kind of loader, or no state at
            all; the message names the field. Nothing is taken over then.
        """
        state = dict(require_kind(self.path, state_dict, self.identity()["kind"]))
        before = {name: getattr(self, name) for name in self._changed_by_state}
        try:
            self._take_over(state, force)
        except ZbError as error:
            for name, value in before.items():
                setattr(self, name, value)
            if isinstance(error, StateError):
                raise
            raise StateError(f"{self.path}: state: {error}") from error  # such as documents to mask that are not there


def require_kind(where: object, state: object, kind: str | None) -> Mapping[str, Any]:
    """Return `state`, or raise `StateError` if it is of another kind of loader, or no dict."""
    if not isinstance(state, Mapping):
        raise StateError(f"{where}: state: expected a dict, as state_dict() gives, found {short_repr(state)}")
    if state.get("kind") != kind:
        raise StateError(f"{where}: state: expected kind {kind!r}, found {short_repr(state.get('kind'))}")
    return state


def require_fields(
    where: object,
    state: object,
    identity: Mapping[str, Any],
    names: Collection[str],
    remedy: Remedy | None = None,
) -> Mapping[str, Any]:
    """Return a state, or raise `StateError` unless it has the expected fields, and no others.

    Parameters
    ----------
    where
        The store or the loader, for messages.
    state
        The state, which may be anything.
    identity
        The fields whose values and types must be the same.
    names
        The other fields.
    remedy
        The cure of a value that differs.
    """
    fields = require_kind(where, state, identity.get("kind"))
    expected = [*identity, *names]
    for name in expected:
        if name not in fields:
            raise StateError(f"{where}: state: expected a field {name!r}, found none")
    for name in fields:
        if name not in expected:
            raise StateError(f"{where}: state: expected {', '.join(expected)}, found a field {short_repr(name)} too")
    for name, value in identity.items():
        if type(fields[name]) is not type(value) or fields[name] != value:
            facts = f"state has {name} {short_repr(fields[name])}, this loader {short_repr(value)}"
            if name in _OTHER:
                facts = f"the state is of {_OTHER[name]}: {facts}"
            if name == "fingerprint" and "'sampled:" in facts:
                facts += "; open both with verify='store'"
            raise StateError(f"{where}: {facts}", remedy=remedy, at=where)
    return fields


def require_count(where: object, state: Mapping[str, Any], name: str, stop: int = MAX_COUNT, what: str = "") -> int:
    """Return a field of a state, or raise `StateError` unless it is an integer of `0..stop`.

    Parameters
    ----------
    where
        The store or the loader, for messages.
    state, name
        The state, and its field.
    stop, what
        The largest value, and the things that it is the number of, for messages.
    """
    value = state.get(name)
    if type(value) is not int or not 0 <= value <= stop:
        reason = f", {what}" if what else ""
        raise StateError(f"{where}: state: expected {name} in 0..{stop:,}{reason}, found {short_repr(value)}")
    return value


def short_repr(value: object) -> str:
    """Return a value for a message, however large it is."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to write integers of thousands of digits
        text = f"a {type(value).__name__} that is too long to show"
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."
