"""The columns of a file of rows: whether it has ids or text is decided here, by their names and their kinds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from zb_hdf5.errors import ZbError
from zb_hdf5.files.look import Look
from zb_hdf5.text.lacking_text import CHAT_KINDS, IDS_COLUMNS
from zb_hdf5.trainers.id_tables import kind_of_file

#: The column by which a file of text is known.
TEXT_COLUMN: Final = "text"
#: The types of text in Arrow and in JSON.
TEXT_KINDS: Final = ("str", "string", "large_string", "string_view")


@dataclass(frozen=True)
class RowColumns:
    """The columns of a file of Parquet, Arrow or JSON lines.

    Attributes
    ----------
    kinds
        The kind of each: the dtype of the numbers in lists, or another type in words. Empty: it has no such columns.
    """

    kinds: Mapping[str, np.dtype[Any] | str]

    @classmethod
    def of(cls, look: Look) -> RowColumns:
        """Find the columns of a file of rows; none in a damaged one, or in another file."""
        try:
            _ = look.identity  # with which the file is compared once the source is open
            return cls(kind_of_file(look).kinds(look))
        except (OSError, ZbError):
            return cls({})

    @property
    def are_ids(self) -> bool:
        """Whether its rows are ids, and no text: so that nothing but the path has to be named."""
        return TEXT_COLUMN not in self.kinds and any(isinstance(self.kinds.get(name), np.dtype) for name in IDS_COLUMNS)

    @property
    def ids(self) -> str:
        """The column of lists of ids, one of a known name or the only one; "": there are others, or none."""
        lists = [name for name, kind in self.kinds.items() if isinstance(kind, np.dtype) and kind.kind in "iu"]
        return _known_or_only(IDS_COLUMNS, lists)

    @property
    def text(self) -> str:
        """The column of text, that of the known name or the only one; "": there are others, or none."""
        return _known_or_only((TEXT_COLUMN,), [name for name, kind in self.kinds.items() if kind in TEXT_KINDS])

    @property
    def chats(self) -> str:
        """The first column of lists of messages; "": there is none."""
        return next((name for name, kind in self.kinds.items() if str(kind).startswith(CHAT_KINDS)), "")


def _known_or_only(known: Sequence[str], found: Sequence[str]) -> str:
    """Return the first known name that was found; else the only one that was found; "": there are others."""
    only = found[0] if len(found) == 1 else ""
    return next((name for name in known if name in found), only)
