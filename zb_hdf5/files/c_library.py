"""The C library of this process."""

from __future__ import annotations

import ctypes
from functools import cache


@cache
def libc() -> ctypes.CDLL:
    """Return the C library of this process, for the calls that Python lacks."""
    return ctypes.CDLL(None, use_errno=True)
