"""The amount of tokens to check."""

from __future__ import annotations

import os
from pathlib import Path

from zb_hdf5.errors import ZbError
from zb_hdf5.opening import open_reader
from zb_hdf5.store.kinds import is_stream
from zb_hdf5.store.tokens import MmapTokenStore


def total_tokens(path: str | os.PathLike[str]) -> int:
    """Return how many tokens there are to check, or 0 where that cannot be told without opening a damaged file."""
    path = Path(path)
    try:
        if is_stream(path):
            with MmapTokenStore(path) as tokens:
                return tokens.num_tokens
        with open_reader(path) as reader:
            return reader.num_batches * reader.meta.batch_tokens
    except (ZbError, OSError):
        return 0
