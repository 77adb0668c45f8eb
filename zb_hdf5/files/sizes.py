"""Numbers as people write them: of bytes, and of things."""

from __future__ import annotations

import re
from typing import Final

from zb_hdf5.errors import ArgumentError

_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*((?:[kmgt]i?)?)b?\s*", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Return a number of bytes, at least 1: "4096", "64k", "512MB" (10**6), "1GiB" (2**30)."""
    match = _SIZE.fullmatch(text)
    size = int(float(match[1]) * _unit(match[2])) if match else 0
    if size < 1:
        raise ArgumentError(f"{text!r} is not a size such as 512MB or 1GiB")
    return size


def _unit(prefix: str) -> int:
    """Return 1000 for "k", 1024 for "Ki", and so on; 1 for no prefix."""
    base = 1024 if prefix[1:] else 1000
    return int(base ** " kmgt".index(prefix[:1].lower() or " "))


def counted(count: int, one: str, many: str | None = None) -> str:
    """Return "1 batch" or "1,234 batches"; by default many of one have an "s", or "es" behind "ch"."""
    return f"{count:,} {one if count == 1 else many or one + ('es' if one.endswith('ch') else 's')}"


def format_bytes(value: float) -> str:
    """Return a number of bytes with a binary prefix: "1.5 GiB"."""
    for limit, prefix in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= limit:
            return f"{value / limit:.1f} {prefix}"
    return f"{value:.0f} bytes"
