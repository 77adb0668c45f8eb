"""splitmix64: the hash of a number of 64 bits that orders and made-up tokens are computed by."""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

Words: TypeAlias = npt.NDArray[np.uint64]
MASK64: Final = 2**64 - 1
GOLDEN: Final = 0x9E3779B97F4A7C15
_MIX1: Final = 0xBF58476D1CE4E5B9
_MIX2: Final = 0x94D049BB133111EB


def splitmix64(x: int) -> int:
    """Return the hash of one number."""
    z = (x + GOLDEN) & MASK64
    z = ((z ^ (z >> 30)) * _MIX1) & MASK64
    z = ((z ^ (z >> 27)) * _MIX2) & MASK64
    return z ^ (z >> 31)


def mix(words: Words, scratch: Words) -> None:
    """Replace each word by its hash; uint64 arithmetic wraps as the algorithm needs it."""
    words += np.uint64(GOLDEN)
    for bits, factor in ((30, _MIX1), (27, _MIX2)):
        np.right_shift(words, np.uint64(bits), out=scratch)
        words ^= scratch
        words *= np.uint64(factor)
    np.right_shift(words, np.uint64(31), out=scratch)
    words ^= scratch
