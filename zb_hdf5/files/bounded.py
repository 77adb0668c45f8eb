"""Text that is in memory as a whole, a line or a file: none of it takes more than a bound, whatever its file claims.

A file that was torn on a network disk is one line of zeros, and a few MB of gzip are a line of some GB.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import BinaryIO, Final

from zb_hdf5.errors import FormatError, Remedy, format_bytes

#: The largest size of a line, and of a file that is read whole, unless another is given: the index of a million shards
#: has 240 MB.
BOUND_BYTES: Final = 256 << 20
#: Bytes of a long line that are read together.
LINE_PART_BYTES: Final = 1 << 20


def lines_of(file: BinaryIO, path: object, most: int = BOUND_BYTES) -> Iterator[bytes | bytearray]:
    """Yield the lines from here on; `FormatError` for one that is too long, before it is in memory.

    A long one is a `bytearray`, which the caller may clear once its bytes are no longer needed.

    Parameters
    ----------
    file
        The open file.
    path
        Its path, for messages.
    most
        The bytes of the longest line.
    """
    first = min(LINE_PART_BYTES, most + 1)
    for line in iter(partial(file.readline, first), b""):
        yield line if len(line) < first or line[-1:] == b"\n" else _long_line(file, line, most, path)


def _long_line(file: BinaryIO, begin: bytes, most: int, path: object) -> bytearray:
    """Return a line in parts, with memory for it once: `readline` has the parts and the line at the same time."""
    line = bytearray(begin)
    while len(line) <= most:
        part = file.readline(min(LINE_PART_BYTES, most + 1 - len(line)))
        line += part
        if not part or line[-1:] == b"\n":
            break
    if len(line) > most:
        start = file.tell() - len(line)
        line.clear()  # the traceback of the error would hold it
        raise FormatError(
            f"{path}: expected a line to have at most {format_bytes(most)}, found a longer one from byte {start:,} on",
            remedy=Remedy.MAX_LINE,
        )
    return line


def whole_of(file: BinaryIO, path: object, most: int = BOUND_BYTES, remedy: Remedy | None = None) -> bytes:
    """Return all bytes of a file that was just opened; `FormatError` if there are more than `most`.

    Parameters
    ----------
    file, path
        As for `lines_of`.
    most
        The bytes of the longest file.
    remedy
        The cure of that error.
    """
    size = os.fstat(file.fileno()).st_size
    if size > most:
        raise FormatError(
            f"{path}: expected a file that is read whole to have at most {format_bytes(most)}, found {size:,} bytes",
            remedy=remedy,
        )
    return file.read(size)
