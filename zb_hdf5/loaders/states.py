"""States of loaders: every field is there, of its type and in its range, and nothing else."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from zb_hdf5.errors import ArgumentError, StateError
from zb_hdf5.loaders.steps import checked_skip

#: The version of every state, whatever its kind.
STATE_VERSION: Final = 2
#: The kind of a state -> the loader that gives and takes such states.
KINDS: Final = {
    "loader": "a Loader",
    "mixture": "a MixedLoader",
    "text": "a TextLoader",
    "documents": "a DocumentLoader",
    "batches": "the dataset() of a Loader",
    "steps": "the sampler of a dataset()",
    "windows": "a SlidingWindowDataloader",
}
#: Epochs and batches of an endless loader: every sum that is made of them fits into 64 bits.
MAX_COUNT: Final = 2**62
#: Characters of a value that a message shows.
SHOWN_CHARACTERS: Final = 120


def require_kind(where: object, state: object, kind: str) -> Mapping[str, Any]:
    """Return `state`, or raise `StateError` if it is of another kind of loader or of an early build, or no dict."""
    fields = _mapping(where, state)
    found = fields.get("kind", kind)
    if found != kind:
        taker = KINDS.get(found) if isinstance(found, str) else None
        theirs = f"the state of {taker}; load it there" if taker else f"kind {shown(found)}"
        raise StateError(f"{where}: state: expected kind {kind!r}, the state of {KINDS[kind]}, found {theirs}")
    if "kind" not in fields and fields.get("version") == 1:
        raise StateError(
            f"{where}: state: expected version {STATE_VERSION}, found version 1, written by an early build: start the "
            "epoch anew"
        )
    return fields


def _mapping(where: object, state: object) -> Mapping[str, Any]:
    if not isinstance(state, Mapping):
        raise StateError(f"{where}: state: expected a dict, as state_dict() gives, found {shown(state)}")
    return state


def require_fields(
    where: object, state: object, identity: Mapping[str, Any], names: Collection[str], remedies: Mapping[str, str] = {}
) -> Mapping[str, Any]:
    """Return a dict of `names` and the fields of `identity`, with the same values and types there, and of no others."""
    fields = _mapping(where, state)
    expected = [*identity, *names]
    for name in expected:
        if name not in fields:
            raise StateError(f"{where}: state: expected a field {name!r}, found none")
    for name in fields:
        if name not in expected:
            raise StateError(f"{where}: state: expected {', '.join(expected)}, found a field {shown(name)} too")
    for name, value in identity.items():
        if type(fields[name]) is not type(value) or fields[name] != value:
            remedy = remedies.get(name, "")
            raise StateError(f"{where}: state has {name} {shown(fields[name])}, this loader {shown(value)}{remedy}")
    return fields


def require_state(
    where: object,
    state: object,
    identity: Mapping[str, Any],
    names: Collection[str],
    remedies: Mapping[str, str],
    force: bool = False,
) -> Mapping[str, Any]:
    """Return a state of the kind of `identity`; without `force` its fields are as `require_fields` wants them."""
    fields = require_kind(where, state, identity["kind"])
    return fields if force else require_fields(where, fields, identity, names, remedies)


def require_count(where: object, state: Mapping[str, Any], name: str, stop: int = MAX_COUNT, what: str = "") -> int:
    """Return a field, or raise `StateError` unless it is an integer of `0..stop`, which is `what`."""
    value = state.get(name)
    if type(value) is not int or not 0 <= value <= stop:
        reason = f", {what}" if what else ""
        raise StateError(f"{where}: state: expected {name} in 0..{stop:,}{reason}, found {shown(value)}")
    return value


def require_epoch(epoch: int) -> None:
    """Raise `ArgumentError` unless a state can hold the number of the epoch."""
    if not 0 <= epoch <= MAX_COUNT:
        raise ArgumentError(f"epoch must be in 0..{MAX_COUNT:,}, found {epoch}")


def shown(value: object) -> str:
    """Return a value for a message, however large it is."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to write integers of thousands of digits
        text = f"a {type(value).__name__} that is too long to show"
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


def chosen(skip: Collection[tuple[int, int, int]], mask_documents: Collection[int]) -> dict[str, Any]:
    """Return the entries of a state for `skip` and `mask_documents`, of those where something was chosen."""
    entries = {"skip": [list(triple) for triple in skip], "mask_documents": list(mask_documents)}
    return {name: entry for name, entry in entries.items() if entry}


def chosen_in(where: object, state: dict[str, Any]) -> tuple[tuple[tuple[int, int, int], ...], list[int]]:
    """Take `skip` and `mask_documents` out of a state, which has them where something was chosen."""
    try:
        return checked_skip(state.pop("skip", ())), [int(number) for number in state.pop("mask_documents", ())]
    except (ArgumentError, TypeError, ValueError) as error:
        raise StateError(f"{where}: state: skip and mask_documents: {error}") from error
