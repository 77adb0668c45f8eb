"""The facts of a document, and the spans in it, wherever they are stored."""

from __future__ import annotations

import json
from collections.abc import Mapping
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple

from zb_hdf5.errors import ConvertError

if TYPE_CHECKING:  # the command line names kinds of text files without numpy
    import numpy as np
    import numpy.typing as npt


class Document(NamedTuple):
    """The facts of one document.

    Attributes
    ----------
    number
        Its number in the store, from 0.
    offset, length
        Its first token in the document stream, and its tokens, the boundary token included.
    source, row
        Name of the file that it came from, and the line or row there, counted from 1; None where they are not known.
    id
        As given, as text; None: it has none.
    metadata
        As given; empty where there is none.
    """

    number: int
    offset: int
    length: int
    source: str | None
    row: int | None
    id: str | None
    metadata: dict[str, Any]


class Spans(NamedTuple):
    """Runs of tokens that have a value, ascending: uint64 offsets in the document stream, and the decoded values."""

    starts: npt.NDArray[np.uint64]
    stops: npt.NDArray[np.uint64]
    values: list[Any]


class TableInfo(NamedTuple):
    """A table file: its size, and the digest that covers all of it."""

    num_bytes: int
    sha256: str


def id_bytes(value: object, where: str) -> bytes:
    """Return an id as it is stored; `ConvertError` if it is no text and no whole number."""
    if isinstance(value, bool) or not isinstance(value, (str, Integral)) or value == "":
        raise ConvertError(f"{where}: expected an id, a text or a whole number, found {value!r}")
    try:
        return str(value).encode("utf-8")
    except UnicodeEncodeError as error:  # half of a surrogate pair, which JSON can name
        raise ConvertError(f"{where}: the id {value!r} is no Unicode text") from error


def metadata_bytes(value: Mapping[str, Any], where: str) -> bytes:
    """Return the text of a JSON object, in which other values are texts; `ConvertError` if it cannot be one."""
    try:
        return json.dumps(dict(value), separators=(",", ":"), default=str).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        raise ConvertError(f"{where}: expected metadata that JSON can hold, found {value!r}: {error}") from error
