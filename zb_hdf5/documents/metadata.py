"""The facts of a document and the spans in it, wherever they are stored, and their bytes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import date, time
from decimal import Decimal
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from zb_hdf5.errors import ArgumentError, BackendError, ConvertError
from zb_hdf5.files.line_file import JSON_SUFFIX, SUFFIXES_OF_JSON_LINES

if TYPE_CHECKING:  # the command line names kinds of text files without numpy
    import numpy as np
    import numpy.typing as npt


#: The source of a document whose source is not known.
NO_SOURCE: Final = 2**32 - 1
#: The columns of texts that a document may have.
TEXT_COLUMNS: Final = ("ids", "metadata")


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


class DocumentRows(NamedTuple):
    """The facts of consecutive documents, for a `DocumentsWriter`.

    Attributes
    ----------
    names, sources, rows
        Names of files, which of them each document is from (`NO_SOURCE`: not known), and its row there, counted from 1.
    ids, metadata
        UTF-8 of each id, and the text of a JSON object for each; None: they have none.
    spans
        Spans of all documents, counted from the first token of the first one, with encoded values.
    """

    names: Sequence[str] = ()
    sources: npt.NDArray[np.uint32] | None = None
    rows: npt.NDArray[np.uint64] | None = None
    ids: Sequence[bytes] | None = None
    metadata: Sequence[bytes] | None = None
    spans: Spans | None = None


class TableInfo(NamedTuple):
    """A table file: its size, and the digest that covers all of it."""

    num_bytes: int
    sha256: str


def row_of_source(source: str | os.PathLike[str] | None, row: int | None) -> str:
    """Return "line 18 of a.jsonl", or "row 18 of a.parquet"; the number counts from 1, as it is stored."""
    endings = {each.lower() for each in Path(source or "").suffixes}
    unit = "line" if endings & {*SUFFIXES_OF_JSON_LINES, JSON_SUFFIX, ".txt"} else "row"
    return f"{unit} {row or 0:,} of {source}"


def id_bytes(value: object, where: str) -> bytes:
    """Return an id as it is stored; `ConvertError` unless it is a text or a whole number."""
    if isinstance(value, bool) or not isinstance(value, (str, Integral)) or value == "":
        raise ConvertError(f"{where}: expected an id, a text or a whole number, found {value!r}")
    try:
        return str(value).encode("utf-8")
    except UnicodeEncodeError as error:  # half of a surrogate pair, which JSON can name
        raise ConvertError(f"{where}: the id {value!r} is not valid Unicode") from error


def metadata_bytes(value: Mapping[str, Any], where: str) -> bytes:
    """Return the text of a JSON object; `ConvertError` names the first value that JSON lacks.

    Scalars of numpy are numbers or truth values, dates and times are texts as ISO 8601 has them, and decimal numbers
    are texts with all of their digits. A key that is not text is refused at any depth.
    """
    if not isinstance(value, Mapping):
        raise ConvertError(f"{where}: expected metadata in a dict, found {type(value).__name__} {value!r:.80}")
    try:
        _require_text_keys(value)
        return _METADATA.encode(dict(value)).encode("ascii")
    except _NOT_JSON:
        for key, each in value.items():
            _require_json(key, each, where)
        raise


def _require_json(key: str, value: Any, where: str) -> None:
    """Raise `ConvertError` unless JSON has a value of metadata."""
    try:
        _require_text_keys({key: value})
        _METADATA.encode({key: value})
    except _NOT_JSON as error:
        raise ConvertError(
            f"{where}: metadata {key!r}: expected metadata that JSON can hold, found {type(value).__name__} "
            f"{_shown(value)}: {error}"
        ) from error


def _require_text_keys(value: object) -> None:
    """Raise `TypeError` if a key is not text: an encoder writes 1 and "1" as one key, a reader keeps one."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r} is not text")
            _require_text_keys(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            _require_text_keys(inner)


def _shown(value: object) -> str:
    try:
        return f"{value!r:.80}"
    except RecursionError:
        return "that is too deep"


def _json_form(value: Any) -> Any:
    """Return a value as JSON has it; `TypeError` if it has no such form."""
    import numpy as np

    if isinstance(value, (date, time)) and value == value:
        return value.isoformat()
    if isinstance(value, Decimal) and value.is_finite():
        return str(value)
    is_scalar = isinstance(value, (np.bool_, np.integer, np.floating)) and not isinstance(value, np.timedelta64)
    found = value.item() if is_scalar else value
    if not isinstance(found, (bool, int, float)):
        raise TypeError(f"{type(value).__name__} has no form in JSON")
    return found


#: The errors of values that JSON lacks.
_NOT_JSON: Final = (TypeError, ValueError, RecursionError)
_METADATA: Final = json.JSONEncoder(separators=(",", ":"), allow_nan=False, default=_json_form)


# --- the values of spans ------------------------------------------------------------------------------------------

EncodeValue: TypeAlias = Callable[[Any], bytes]
DecodeValue: TypeAlias = Callable[[bytes], Any]
EncodeValues: TypeAlias = Callable[[Sequence[Any]], list[bytes]]
#: Whether spans are wanted; a function also decodes their values, which are JSON otherwise.
WantedSpans: TypeAlias = bool | DecodeValue
#: The stored name of the caller's own functions.
CUSTOM: Final = "custom"
JSON: Final = "json"


def value_decoder(stored: str, codec: WantedSpans | None, where: str) -> Callable[[Sequence[bytes]], list[Any]]:
    """Return the function that decodes any number of values.

    Parameters
    ----------
    stored
        The stored name of their encoding.
    codec
        Decodes one value; None or True: values are decoded by the stored name.
    where
        Begins the message of an error.

    Raises
    ------
    ArgumentError
        If `codec` is not a function.
    BackendError
        If the values were encoded by a function of the user, and there is none to decode them.
    """
    if callable(codec):
        return lambda values: list(map(codec, values))
    if codec is not None and codec is not True:
        raise ArgumentError(f"{where}: expected a function that decodes the values of spans, found {codec!r}")
    if stored != JSON:
        raise BackendError(
            f"{where}: the spans were encoded by a function ({stored!r}): pass the function that decodes them, as "
            "codec, or to a loader as spans"
        )
    return _json_values


def first_refused(code: Callable[[list[Any]], object], values: Sequence[Any]) -> int:
    """Return the number of the first value that an encoder or a decoder refuses; 0 where it takes each one alone."""
    for number, value in enumerate(values):
        try:
            code([value])
        except Exception:  # whatever a function of the user raises
            return number
    return 0


def _json_values(texts: Sequence[bytes]) -> list[Any]:
    """Decode many values in one call: a fifth of the time of a call for each."""
    values: list[Any] = json.loads(b"[%s]" % b",".join(texts))
    if len(values) != len(texts):
        raise ValueError(f"expected {len(texts):,} values, found {len(values):,}")
    return values
