"""Token values: their limits, and their stored form."""

from __future__ import annotations

from typing import Any

import numpy as np

from zb_hdf5.errors import ConvertError
from zb_hdf5.spec import StoreMeta, TokenArray


def token_limit(dtype: np.dtype[Any], vocab_size: int) -> int:
    """Largest token id that may be stored."""
    limit = int(np.iinfo(dtype).max)
    return min(limit, vocab_size - 1) if vocab_size else limit


def find_bad_token(tokens: TokenArray, limit: int) -> int | None:
    """Return the flat index of the first token below 0 or above `limit`, or None.

    Types that cannot hold a bad value are not scanned.
    """
    if tokens.size == 0:
        return None
    bounds = np.iinfo(tokens.dtype)
    too_low = bounds.min < 0 and int(tokens.min()) < 0
    too_high = bounds.max > limit and int(tokens.max()) > limit
    if not (too_low or too_high):
        return None
    bad = tokens > limit
    if bounds.min < 0:
        bad |= tokens < 0
    return int(bad.reshape(-1).argmax())


def require_integers(tokens: TokenArray, what: object) -> None:
    """Raise `ConvertError` unless `tokens` has an integer dtype."""
    if tokens.dtype.kind not in "iu":
        raise ConvertError(f"{what}: expected token ids of an integer dtype, found {tokens.dtype}")


def signed(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the signed dtype of the same size."""
    return np.dtype(f"<i{dtype.itemsize}")


def as_stored(tokens: TokenArray, meta: StoreMeta, what: object) -> TokenArray:
    """Return `tokens` as a C-contiguous array of the stored dtype, checked against its range and the vocabulary.

    Raises
    ------
    ConvertError
        If the dtype is not an integer or an id is negative, too large for the stored dtype, or at or above
        `vocab_size`; the message names the flat index and the value.
    """
    require_integers(tokens, what)
    limit = token_limit(meta.dtype, meta.vocab_size)
    bad = find_bad_token(tokens, limit)
    if bad is not None:
        raise ConvertError(bad_token_message(what, f"index {bad:,}", tokens.reshape(-1)[bad], meta))
    return np.ascontiguousarray(tokens, dtype=meta.dtype)


def bad_token_message(what: object, where: str, value: object, meta: StoreMeta) -> str:
    """Return the message for a token that cannot be stored."""
    limit = token_limit(meta.dtype, meta.vocab_size)
    reason = f"vocab_size {meta.vocab_size:,}" if limit == meta.vocab_size - 1 else f"dtype {meta.dtype.name}"
    return f"{what}: token id {value} at {where} is outside 0..{limit:,} ({reason})"
