"""Spans: their values as bytes, and the labels of the tokens of records."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from zb_hdf5.documents.document import Spans
from zb_hdf5.documents.pieces import Pieces, ranges
from zb_hdf5.errors import ArgumentError, BackendError

Encode: TypeAlias = Callable[[Any], bytes]
Decode: TypeAlias = Callable[[bytes], Any]
EncodeAll: TypeAlias = Callable[[Sequence[Any]], list[bytes]]
DecodeAll: TypeAlias = Callable[[Sequence[bytes]], list[Any]]
#: `(starts, stops)` -> the spans that have a token in some ranges of the document stream.
ReadSpans: TypeAlias = Callable[[npt.NDArray[np.uint64], npt.NDArray[np.uint64]], Spans]
#: Whether spans are wanted; a function also decodes their values, which else are JSON.
WantedSpans: TypeAlias = bool | Decode
#: The stored name of the caller's own functions.
CUSTOM: Final = "custom"
JSON: Final = "json"

_JSON_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), check_circular=False)
#: Stands between values that are encoded together. If it is in one of them too, each is encoded alone.
_BETWEEN: Final = "\x1e"
_BETWEEN_TEXT: Final = b',"\\u001e",'


def encoder(codec: str | Encode) -> tuple[str, EncodeAll]:
    """Return the stored name of an encoding, "json" or "custom", and the function that encodes any number of values."""
    if callable(codec):
        return CUSTOM, lambda values: list(map(codec, values))
    if codec not in (JSON, CUSTOM):
        raise ArgumentError(f"spans_codec must be 'json' or a function that returns bytes, found {codec!r}")
    return codec, _json_texts if codec == JSON else list


def decoder(stored: str, codec: WantedSpans | None, where: str) -> DecodeAll:
    """Return the function that decodes any number of values: by `codec`; None: by the stored name of their encoding."""
    if callable(codec):
        return lambda values: list(map(codec, values))
    if codec is not None and codec is not True:
        raise ArgumentError(f"{where}: expected a function that decodes the values of spans, found {codec!r}")
    if stored != JSON:
        raise BackendError(
            f"{where}: the spans were encoded by a function ({stored!r}): pass the one that decodes them, as codec, or "
            "to a loader as spans"
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


def _json_texts(values: Sequence[Any]) -> list[bytes]:
    """Encode many values in one call: half the time of a call for each."""
    encode = _JSON_ENCODER.encode
    among: list[Any] = [_BETWEEN] * (2 * len(values) - 1)
    among[::2] = values
    texts = encode(among).encode("utf-8")[1:-1].split(_BETWEEN_TEXT)
    return texts if len(texts) == len(values) else [encode(value).encode("utf-8") for value in values]


def _json_values(texts: Sequence[bytes]) -> list[Any]:
    """Decode many values in one call: a fifth of the time of a call for each."""
    values: list[Any] = json.loads(b"[%s]" % b",".join(texts))
    if len(values) != len(texts):
        raise ValueError(f"expected {len(texts):,} values, found {len(values):,}")
    return values


# --- labels of tokens ---------------------------------------------------------------------------------------------


def spans_of_pieces(pieces: Pieces, read: ReadSpans) -> tuple[list[Any], npt.NDArray[np.int32]]:
    """Return the values of the spans in some records, each once, and for each token its index in them or -1."""
    real = ~pieces.is_padding
    offsets, starts, lengths = pieces.offsets[real].view(np.int64), pieces.starts[real], pieces.lengths[real]
    found = read(*_joined_ranges(offsets, lengths))
    span_starts, span_stops = found.starts.view(np.int64), found.stops.view(np.int64)
    firsts = span_stops.searchsorted(offsets, side="right")
    counts = span_starts.searchsorted(offsets + lengths) - firsts
    numbers = ranges(firsts, counts)
    # their first and last tokens in the records, joined; a span may reach over both ends of a piece
    moved, low, high = (values.repeat(counts) for values in (starts - offsets, starts, starts + lengths))
    edges, names = np.empty(2 * len(numbers) + 2, np.int64), np.full(2 * len(numbers) + 1, -1, np.int32)
    edges[0], edges[-1], names[1::2] = 0, pieces.num_tokens, numbers
    edges[1:-1:2] = np.maximum(span_starts[numbers] + moved, low)
    edges[2:-1:2] = np.minimum(span_stops[numbers] + moved, high)
    return found.values, names.repeat(edges[1:] - edges[:-1]).reshape(-1, pieces.seq_len)


def _joined_ranges(
    offsets: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Return the ranges of the stream that pieces cover, joined where they touch or overlap."""
    order = offsets.argsort(kind="stable")
    starts = offsets[order]
    stops = np.maximum.accumulate(starts + lengths[order])
    is_first, is_last = np.ones(len(order), np.bool_), np.ones(len(order), np.bool_)
    is_first[1:] = is_last[:-1] = starts[1:] > stops[:-1]
    return starts[is_first].view(np.uint64), stops[is_last].view(np.uint64)
