"""Text in UTF-8: it is read without its byte order marks, and other encodings are named."""

from __future__ import annotations

import codecs
from pathlib import Path
from typing import Final

from zb_hdf5.errors import FormatError
from zb_hdf5.files.line_file import rewriting_line
from zb_hdf5.text.dropped import Reason

#: The marks with which files of other encodings begin; the longer ones first, since they begin with shorter ones.
ENCODING_MARKS: Final = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
ENCODING_MARK_BYTES: Final = 4
#: Bytes of UTF-16 that is mostly ASCII: more than one of them is 0.
NUL_SHARE: Final = 4


def without_mark(data: bytes | bytearray) -> bytes | bytearray:
    """Return text without the byte order marks of UTF-8 that it begins with: files that are joined keep theirs."""
    while data.startswith(codecs.BOM_UTF8):
        data = data[len(codecs.BOM_UTF8) :]
    return data


def require_utf8(head: bytes, path: Path) -> None:
    """Raise `FormatError` if a file begins with the mark of another encoding."""
    for mark, encoding in ENCODING_MARKS.items():
        if head.startswith(mark):
            line = rewriting_line(path, f"iconv -f {encoding} -t UTF-8", "utf8")
            raise FormatError(f"{path}: expected UTF-8, found {encoding} by its first bytes; convert it: {line}")


def flaw_of_bytes(data: bytes | bytearray) -> Reason:
    """Return why bytes are not UTF-8."""
    return Reason.UTF_16 if data.count(0) > len(data) // NUL_SHARE else Reason.NOT_UTF8
