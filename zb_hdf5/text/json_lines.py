"""Documents in the objects of a file of JSON lines, by ranges of its bytes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any, Final

from zb_hdf5.files.bounded import lines_of
from zb_hdf5.files.forks import cached_per_process
from zb_hdf5.files.line_file import LINE_SUFFIXES, is_compressed, unpacked
from zb_hdf5.files.look import Look
from zb_hdf5.text.document_file import Block, DocumentFile, FoundText
from zb_hdf5.text.dropped import Reason
from zb_hdf5.text.utf8 import ENCODING_MARK_BYTES, NUL_SHARE, flaw_of_bytes, require_utf8, without_mark

#: Lines of a file of JSON lines in which a key is looked for.
SAMPLE_LINES: Final = 1000
#: Bytes of a file of JSON lines that one process reads at a time.
ROW_GROUP_BYTES: Final = 64 << 20


class JsonLinesFile(DocumentFile):
    """Documents in one field of the objects of a file of JSON lines, compressed (then one row group) or not."""

    suffixes = LINE_SUFFIXES
    noun = "JSON lines of text"
    example = "corpus.jsonl"
    documents = "Each line (.jsonl, .ndjson, .json, also .gz or .zst) is a document."

    def _read_head(self) -> None:
        self.num_row_groups = 1
        if not is_compressed(self.path):
            self.num_row_groups = max(1, -(-self.identity.num_bytes // ROW_GROUP_BYTES))
        require_lines(self.opened())

    def _row_group(self, number: int) -> Iterator[Block]:
        """Yield the documents of the lines that begin in one range of bytes."""
        yield from self._blocks(self.first_line(number), map(self._document, self.lines(number)))

    def first_line(self, number: int) -> int:
        """Return the number of the first line of a row group, counted from 1."""
        return self._groups[number][1]

    def lines(self, number: int) -> Iterator[bytes | bytearray]:
        """Yield the lines that begin in one range of bytes; `FormatError` for a damaged file."""
        stop = self._groups[number + 1][0] if number + 1 < self.num_row_groups else None
        with unpacked(self.opened()) as file:
            if number:
                file.seek(self._groups[number][0])
            yield from map(without_mark, _lines_until(lines_of(file, self.path, self.max_line), file.tell(), stop))

    def first_objects(self) -> Iterator[dict[str, Any]]:
        """Yield the object of each of the first lines that hold one."""
        return first_objects(self.opened(), self.max_line)

    def has_one(self, is_wanted: Callable[[Mapping[str, Any]], bool], max_bytes: int) -> bool | None:
        """Return whether one of the first lines has an object that is wanted; None: it has none, and more lines follow.

        Parameters
        ----------
        is_wanted
            Returns it for the object of a line.
        max_bytes
            The end of these lines.
        """
        with unpacked(self.opened()) as file:
            for line in lines_of(file, self.path, self.max_line):
                if file.tell() > max_bytes:
                    return None
                with suppress(ValueError, RecursionError):  # no JSON
                    found = parsed_json(without_mark(line))
                    if isinstance(found, dict) and is_wanted(found):
                        return True
        return False

    def may_have_text(self, found: Mapping[str, Any]) -> bool:
        """Return whether the object of a line has the key of the text, and no list in place of text."""
        return self.column in found and not isinstance(found[self.column], list)

    @cached_per_process
    def _groups(self) -> list[tuple[int, int]]:
        """The byte offset and the number of the first line of each row group: one pass over the file finds all."""
        groups = [(0, 1)]
        if self.num_row_groups == 1:
            return groups
        line = 1
        with unpacked(self.opened()) as file:
            for start in range(ROW_GROUP_BYTES, self.num_row_groups * ROW_GROUP_BYTES, ROW_GROUP_BYTES):
                while data := file.read(max(0, min(start - 1 - file.tell(), 1 << 20))):
                    line += data.count(b"\n")
                if file.tell() < start:  # else one line fills the group
                    line += next(lines_of(file, self.path, self.max_line), b"").count(b"\n")
                groups.append((file.tell(), line))
        return groups

    def __getstate__(self) -> dict[str, Any]:
        """Count the lines first: else each process that reads a part of the file would count them."""
        return self.__dict__ | {"_groups": self._groups}

    def _document(self, line: bytes | bytearray) -> FoundText:
        if not line or line.isspace():  # a mark alone is not a line
            return None
        try:
            text_of_line = line.decode("utf-8")
        except UnicodeDecodeError:
            return flaw_of_bytes(line), ()
        if isinstance(line, bytearray):
            line.clear()
        try:
            value = parsed_json(text_of_line)
        except (ValueError, RecursionError):
            return _flaw_of_line(text_of_line.strip()), ()
        if not isinstance(value, dict):
            return Reason.IN_ARRAY if isinstance(value, list) else Reason.NO_OBJECT, ()
        more = tuple(value.get(name) for name in self.more_columns)
        text = value.get(self.column)
        if text is None:
            return Reason.MISSING, more
        return text if isinstance(text, str) and not isinstance(text, Digits) else Reason.NOT_TEXT, more


def require_lines(look: Look) -> None:
    """Raise `FormatError` if a file of JSON lines is not UTF-8, by its first bytes, or is damaged there."""
    with unpacked(look) as file:
        require_utf8(file.read(ENCODING_MARK_BYTES), look.path)


def first_objects(look: Look, max_line: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the object of each of the first lines of a file that hold one.

    Parameters
    ----------
    look
        A look at the file.
    max_line
        The bytes of the longest line; None: `bound_bytes`.
    """
    with unpacked(look) as file:
        for line in islice(lines_of(file, look.path, max_line), SAMPLE_LINES):
            with suppress(ValueError, RecursionError):  # no JSON
                found = parsed_json(without_mark(line))
                if isinstance(found, dict):
                    yield found


class Digits(str):
    """A whole number with more digits than Python converts: its text."""


def parsed_json(text: str | bytes | bytearray) -> Any:
    """Return the value of a JSON text; a whole number of thousands of digits does not hide the text beside it."""
    try:
        return json.loads(text)
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except ValueError:  # the limit of Python
        return json.loads(text, parse_int=_whole_number)


def _whole_number(digits: str) -> int | Digits:
    try:
        return int(digits)
    except ValueError:
        return Digits(digits)


def _flaw_of_line(line: str) -> Reason:
    """Return why a line is not a JSON object."""
    if line.count("\0") > len(line) // NUL_SHARE:
        is_torn = len(line) >= ENCODING_MARK_BYTES and not line.strip("\0")  # an end of line of UTF-32 has fewer
        return Reason.ZEROS if is_torn else Reason.UTF_16
    if line == "]" or line.startswith("["):
        return Reason.IN_ARRAY
    if line in ("{", "}", "},", "],"):
        return Reason.SPREAD
    try:
        value, end = json.JSONDecoder(parse_int=_whole_number).raw_decode(line)
    except (ValueError, RecursionError):
        return Reason.BAD_JSON
    rest = line[end:].lstrip()
    if isinstance(value, dict) and rest == ",":
        return Reason.IN_ARRAY
    if isinstance(value, dict) and rest.startswith("{"):
        return Reason.SEVERAL
    is_key = isinstance(value, str) and rest.startswith(":")
    return Reason.SPREAD if is_key else Reason.BAD_JSON


def _lines_until(lines: Iterator[bytes | bytearray], byte_offset: int, stop: int | None) -> Iterator[bytes | bytearray]:
    """Yield the lines that begin from a byte on and before byte `stop`."""
    for line in lines:
        if stop is not None and byte_offset >= stop:
            return
        byte_offset += len(line)
        yield line
