"""The states of loaders: their version, and the checks of their fields."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from zb_hdf5.errors import Remedy, StateError

#: The version of every state, whatever its kind.
STATE_VERSION: Final = 2
#: Epochs and batches of an endless loader: every sum that is made of them fits into 64 bits.
MAX_COUNT: Final = 2**62
#: Characters of a value that a message shows.
SHOWN_CHARACTERS: Final = 120


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
