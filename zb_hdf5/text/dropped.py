"""The lines, rows and files of text that give no document: each is counted by its reason, and the first are named."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final

from zb_hdf5.documents.metadata import row_of_source
from zb_hdf5.errors import ConvertError
from zb_hdf5.files.line_file import rewriting_line

#: How many dropped documents are remembered with file and line.
FIRST_DROPPED: Final = 5
#: The share of the lines, rows or files of text that may be dropped, unless another one is given.
DEFAULT_MAX_DROPPED: Final = 0.5


class Reason(StrEnum):
    """The reason why a line, row or file gives no document."""

    BAD_JSON = "bad JSON"
    IN_ARRAY = "in a JSON array"
    SPREAD = "of JSON over several lines"
    SEVERAL = "with several JSON objects"
    NO_OBJECT = "without a JSON object"  # a number, a string
    UTF_16 = "of UTF-16"
    ZEROS = "of zero bytes"  # of a file that was torn
    MISSING = "no text"  # no such key, or null
    NOT_TEXT = "not text"  # a number, a list
    NOT_UTF8 = "not UTF-8"
    EMPTY = "empty"
    REFUSED = "refused by the tokenizer"


#: The query of jq that writes one object in each line, by the reason why its lines were dropped.
WHOLE_JSON: Final = {Reason.IN_ARRAY: ".[]", Reason.SPREAD: ".", Reason.SEVERAL: "."}


@dataclass
class Dropped:
    """How many texts were dropped, by reason, and the lines of the first ones."""

    counts: dict[str, int] = field(default_factory=dict)
    first: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, reason: Reason, path: Path, rows: Sequence[int]) -> Dropped:
        """Return the drops of some rows of a file, for one reason."""
        first = [f"{row_of_source(path, row)}: {reason}" for row in rows[:FIRST_DROPPED]]
        return cls({reason.value: len(rows)} if rows else {}, first)

    def merge(self, later: Dropped) -> None:
        """Add the drops of a later part."""
        for reason, count in later.counts.items():
            self.counts[reason] = self.counts.get(reason, 0) + count
        self.first = [*self.first, *later.first][:FIRST_DROPPED]

    @property
    def reasons(self) -> str:
        """The count of each reason, in words; "": nothing was dropped."""
        return ", ".join(f"{count:,} {reason}" for reason, count in self.counts.items())

    def lines(self) -> list[tuple[str, str]]:
        """Return the lines of a report: none if nothing was dropped."""
        return [("dropped", self.reasons), *(("", where) for where in self.first)] if self.counts else []

    def require_few(self, documents: int, most: float, path: Path) -> None:
        """Raise `ConvertError` if more than a share of all lines, rows or files were dropped.

        Parameters
        ----------
        documents
            How many of them were documents.
        most
            The share.
        path
            The first file, for messages.
        """
        dropped = sum(self.counts.values())
        total = dropped + documents
        if dropped > most * total:
            enough = math.ceil(100 * dropped / total) / 100
            raise ConvertError(
                f"{path}: expected at most {most:.0%} of the lines, rows or files to be dropped, found {dropped:,} of "
                f"{total:,} ({self.reasons}){self.cure(path)}; if it is right, pass max_dropped {enough:g}",
                options=["max_dropped"],
            )

    def cure(self, path: Path) -> str:
        """Return the words of a message with the command that makes good lines of JSON; "": no command does."""
        whole = next((query for reason, query in WHOLE_JSON.items() if reason.value in self.counts), "")
        if not whole:
            return ""
        command = f"jq -c {shlex.quote(whole)}"
        return f"; expected one JSON object in each line, which this writes: {rewriting_line(path, command, 'lines')}"
