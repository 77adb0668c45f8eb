"""Tokens to test with."""

from __future__ import annotations

import numpy as np

from zb_hdf5.spec import TokenArray


def random_tokens(num_batches: int, batch_size: int, seq_len: int, dtype: str = "uint32", seed: int = 0) -> TokenArray:
    """Return reproducible batches that hold the smallest and the largest id of `dtype`."""
    limit = int(np.iinfo(dtype).max)
    tokens: TokenArray = np.random.default_rng(seed).integers(
        0, limit, (num_batches, batch_size, seq_len), dtype, endpoint=True
    )
    if num_batches:
        tokens[0, 0, 0], tokens[-1, -1, -1] = 0, limit
    return tokens
