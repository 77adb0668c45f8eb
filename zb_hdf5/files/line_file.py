"""Files of JSON lines: their names, the bytes that a compressed one holds, and the line of a shell that rewrites one.

gzip may have several members, and zstd several frames.
"""

from __future__ import annotations

import gzip
import io
import shlex
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

from zb_hdf5.errors import FormatError
from zb_hdf5.files.look import Look
from zb_hdf5.packages import require_package

#: Endings of files of JSON lines.
SUFFIXES_OF_JSON_LINES: Final = (".jsonl", ".ndjson")
#: The ending of files of lines, of one value, or of facts about the files beside them.
JSON_SUFFIX: Final = ".json"
#: Endings of the names of compressed files that are read.
GZIP_SUFFIX: Final = ".gz"
ZSTD_SUFFIX: Final = ".zst"
#: All endings of files that may have JSON lines: as they are, and compressed.
LINE_SUFFIXES: Final = tuple(
    name + packed for name in (*SUFFIXES_OF_JSON_LINES, JSON_SUFFIX) for packed in ("", GZIP_SUFFIX, ZSTD_SUFFIX)
)
#: Bytes of zstd that are unpacked together: of zeros they become 64 MiB.
PACKED_BYTES: Final = 1 << 12
#: Bytes of a file that are read at a time.
_READ_BYTES: Final = 1 << 16
#: Bytes of a file of zstd that are read, and handed over, at a time.
_BUFFER_BYTES: Final = 1 << 18
#: The window that `zstd --long=31` needs, by which some corpora were written.
MAX_WINDOW_BYTES: Final = 1 << 31


def is_compressed(path: Path) -> bool:
    """Return whether a file is named as a compressed one that is read."""
    return path.suffix.lower() in (GZIP_SUFFIX, ZSTD_SUFFIX)


def rewriting_line(path: Path, command: str, prefix: str) -> str:
    """Return the line of a shell that writes a file, unpacked, through a command to a file beside it.

    Parameters
    ----------
    command
        Reads the lines and writes others.
    prefix
        Begins the name of the file that is written.
    """
    reader = {GZIP_SUFFIX: "zcat", ZSTD_SUFFIX: "zstdcat"}.get(path.suffix.lower(), "cat")
    written = path.with_name(f"{prefix}-{path.stem if is_compressed(path) else path.name}")
    return f"{reader} {shlex.quote(str(path))} | {command} > {shlex.quote(str(written))}"


@contextmanager
def unpacked(look: Look) -> Iterator[BinaryIO]:
    """Return the bytes that the file of a look holds; of one that is not named as a compressed file as they are.

    Raises
    ------
    FormatError
        If it is damaged or cut off, also when it is read.
    UnavailableError
        If the package that unpacks it is not installed.
    """
    path = look.path
    ending = path.suffix.lower()
    with io.BufferedReader(look.stream(), _READ_BYTES) as file:
        if ending == GZIP_SUFFIX:
            with gzip.open(file) as text, _named(path, gzip.BadGzipFile, EOFError, zlib.error):
                yield cast(BinaryIO, text)
        elif ending == ZSTD_SUFFIX:
            library = require_package("zstandard", "codecs")
            with _named(path, library.ZstdError, EOFError):
                yield cast(BinaryIO, io.BufferedReader(_ZstdFile(file, library), _BUFFER_BYTES))
        else:
            yield file


@contextmanager
def _named(path: Path, *damaged: type[Exception]) -> Iterator[None]:
    """Name the file in the errors of a damaged one."""
    try:
        yield
    except damaged as error:
        raise FormatError(f"{path}: damaged or cut off: {error}") from error


class _ZstdFile(io.RawIOBase):
    """The bytes in a file of zstd. The reader of its library takes one that was cut off for a whole one.

    Parameters
    ----------
    file
        The open file.
    library
        The library.
    """

    def __init__(self, file: BinaryIO, library: Any) -> None:
        self._file = file
        self._unpacker = library.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
        self._frame: Any = None
        self._packed = b""
        self._unpacked = memoryview(b"")
        self._position = 0

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def readinto(self, out: Any) -> int:
        while not self._unpacked:
            if not self._unpack():
                return 0
        count = min(len(out), len(self._unpacked))
        out[:count] = self._unpacked[:count]
        self._unpacked = self._unpacked[count:]
        self._position += count
        return count

    def _unpack(self) -> bool:
        """Unpack some more bytes; return whether there were any."""
        self._packed = self._packed or self._file.read(_BUFFER_BYTES)
        if not self._packed:
            if self._frame is not None:
                raise EOFError("its last frame has no end")
            return False
        if self._frame is None:
            self._frame = self._unpacker.decompressobj()
        part, self._packed = self._packed[:PACKED_BYTES], self._packed[PACKED_BYTES:]
        self._unpacked = memoryview(self._frame.decompress(part))
        if self._frame.eof:
            self._packed = self._frame.unused_data + self._packed
            self._frame = None
        return True
