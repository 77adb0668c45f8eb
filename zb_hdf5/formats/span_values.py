"""Values of spans as bytes: what turns a value into bytes when it is written, and back when it is read."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, Final, TypeAlias

import numpy as np

from zb_hdf5.errors import ArgumentError, BackendError, UnavailableError

Encode: TypeAlias = Callable[[Any], bytes]
Decode: TypeAlias = Callable[[bytes], Any]
EncodeAll: TypeAlias = Callable[[Sequence[Any]], list[bytes]]
DecodeAll: TypeAlias = Callable[[Sequence[bytes]], list[Any]]
#: The stored name of a function of the user.
CUSTOM: Final = "custom"
JSON: Final = "json"
#: What runs code when it reads: never without being asked for by name.
PICKLE: Final = "pickle"

_JSON_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), check_circular=False)
#: Stands between values that are encoded together. Where it is in one of them too, each is encoded alone.
_BETWEEN: Final = "\x1e"
_BETWEEN_TEXT: Final = b',"\\u001e",'


def encoder(codec: str | Encode) -> tuple[str, EncodeAll]:
    """Return the name under which a way to encode is stored, and what encodes values, any number of them at once.

    Parameters
    ----------
    codec
        A name in `ENCODINGS`, or a function that returns bytes; "custom" for values that are bytes already.

    Raises
    ------
    ArgumentError
        If there is none of this name.
    UnavailableError
        If its package is not installed.
    """
    if callable(codec):
        return CUSTOM, _each(codec)
    return codec, _each(bytes) if codec == CUSTOM else _named(codec)[0]


def decoder(stored: str, codec: str | Decode | None, where: str) -> DecodeAll:
    """Return what decodes values, any number of them at once, that were stored under a name.

    Parameters
    ----------
    codec
        None: by the stored name; "pickle" must be named, and a function of the user given.
    where
        The path, for messages.

    Raises
    ------
    BackendError
        If the values are pickled and `codec` does not say so, or were encoded by a function that is not given.
    ArgumentError, UnavailableError
        As `encoder`.
    """
    if callable(codec):
        return _each(codec)
    if stored == CUSTOM:
        raise BackendError(
            f"{where}: the spans were encoded by a function: pass the one that decodes them, as codec, or to a loader "
            "as spans"
        )
    if stored == PICKLE != codec:
        raise BackendError(
            f"{where}: the spans are pickled, and reading them runs code: pass codec='pickle', or to a loader "
            "spans='pickle', if you trust the file"
        )
    if codec not in (None, stored):
        raise ArgumentError(f"{where}: expected codec {stored!r}, with which the spans were written, found {codec!r}")
    return _named(stored)[1]


def first_refused(code: Callable[[list[Any]], object], values: Sequence[Any]) -> int:
    """Return the place of the first value that an encoder or a decoder refuses; 0 where it takes each one alone."""
    for place, value in enumerate(values):
        try:
            code([value])
        except Exception:  # whatever a function of the user raises
            return place
    return 0


def _named(name: str) -> tuple[EncodeAll, DecodeAll]:
    if name not in ENCODINGS:
        raise ArgumentError(f"spans_codec must be one of {', '.join(ENCODINGS)} or a function, found {name!r}")
    return ENCODINGS[name]()


def _each(function: Callable[[Any], Any]) -> Callable[[Sequence[Any]], list[Any]]:
    return lambda values: list(map(function, values))


def _json_texts(values: Sequence[Any]) -> list[bytes]:
    """Encode many values in one call: half the time that a call for each takes."""
    encode = _JSON_ENCODER.encode
    among: list[Any] = [_BETWEEN] * (2 * len(values) - 1)
    among[::2] = values
    texts = encode(among).encode("utf-8")[1:-1].split(_BETWEEN_TEXT)
    return texts if len(texts) == len(values) else [encode(value).encode("utf-8") for value in values]


def _json_values(texts: Sequence[bytes]) -> list[Any]:
    """Decode many values in one call: a fifth of the time that a call for each takes."""
    values: list[Any] = json.loads(b"[%s]" % b",".join(texts))
    if len(values) != len(texts):
        raise ValueError(f"expected {len(texts):,} values, found {len(values):,}")
    return values


def _texts_bytes(values: Sequence[Any]) -> list[bytes]:
    try:
        return list(map(str.encode, values))  # a function of our own takes four times as long
    except TypeError:
        other = next(value for value in values if not isinstance(value, str))
        raise TypeError(f"expected a str, found {type(other).__name__}") from None


def _array_bytes(value: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, np.asarray(value), allow_pickle=False)
    return file.getvalue()


def _array(data: bytes) -> Any:
    return np.load(io.BytesIO(data), allow_pickle=False)


def _msgpack() -> tuple[EncodeAll, DecodeAll]:
    try:
        msgpack = import_module("msgpack")
    except ImportError as error:
        raise UnavailableError("spans_codec='msgpack' needs the package msgpack: pip install msgpack") from error
    return _each(msgpack.packb), _each(msgpack.unpackb)


#: Name -> what gives the two functions, which take whole lists.
ENCODINGS: Final[dict[str, Callable[[], tuple[EncodeAll, DecodeAll]]]] = {
    JSON: lambda: (_json_texts, _json_values),
    "str": lambda: (_texts_bytes, _each(bytes.decode)),
    "numpy": lambda: (_each(_array_bytes), _each(_array)),
    "msgpack": _msgpack,
    PICKLE: lambda: (_each(pickle.dumps), _each(pickle.loads)),
}
