"""Text that is in memory as a whole, a line or a file: none of it takes more than a bound, whatever its file claims.

A file that was torn on a network disk is one line of zeros, and a few MB of gzip are a line of some GB.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import BinaryIO, Final

from zb_hdf5.errors import ArgumentError, FormatError, Remedy, format_bytes, parse_size

#: The largest size of a line, and of a file that is read whole, unless another is given: the index of a million shards
#: has 240 MB.
BOUND_BYTES: Final = 256 << 20
#: The environment variable that has another size for all lines and files of a process, such as 1GiB.
BOUND_VARIABLE: Final = "ZB_MAX_LINE"
#: Bytes of a long line that are read together.
LINE_PART_BYTES: Final = 1 << 20


def bound_bytes() -> int:
    """Return the largest size of a line, and of a file that is read whole: `ZB_MAX_LINE`, or 256 MiB.

    Raises
    ------
    ArgumentError
        If the environment has a text that is not a size.
    """
    text = os.environ.get(BOUND_VARIABLE)
    if not text:
        return BOUND_BYTES
    try:
        return parse_size(text)
    except ArgumentError as error:
        raise ArgumentError(f"{BOUND_VARIABLE}: {error}") from error


def lines_of(file: BinaryIO, path: object, most: int | None = None) -> Iterator[bytes | bytearray]:
    """Yield the lines from here on; `FormatError` for one that is too long, before it is in memory.

    A long one is a `bytearray`, which the caller may clear once its bytes are no longer needed.

    Parameters
    ----------
    file
        The open file.
    path
        Its path, for messages.
    most
        The bytes of the longest line; None: `bound_bytes`.
    """
    most = bound_bytes() if most is None else most
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


def whole_of(file: BinaryIO, path: object, most: int | None = None, remedy: Remedy = Remedy.BOUND) -> bytes:
    """Return all bytes of a file that was just opened. Raises as `require_bounded`.

    Parameters
    ----------
    file, path
        As for `lines_of`.
    most, remedy
        As for `require_bounded`.
    """
    size = os.fstat(file.fileno()).st_size
    require_bounded(size, path, most, remedy)
    return file.read(size)


def require_bounded(size: int, path: object, most: int | None = None, remedy: Remedy = Remedy.BOUND) -> None:
    """Raise `FormatError` if a file that is read whole has too many bytes.

    Parameters
    ----------
    size
        Its bytes.
    path
        Its path, for messages.
    most
        The bytes of the longest file; None: `bound_bytes`.
    remedy
        The cure.
    """
    most = bound_bytes() if most is None else most
    if size > most:
        raise FormatError(
            f"{path}: expected a file that is read whole to have at most {format_bytes(most)}, found {size:,} bytes",
            remedy=remedy,
            at=f"{-(-size // 2**30)}GiB",
        )
