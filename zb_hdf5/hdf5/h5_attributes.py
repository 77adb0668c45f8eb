"""The attributes of our HDF5 files: the root group's, and the commit marker."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import FormatError
from zb_hdf5.packages import h5py
from zb_hdf5.spec import (
    BATCHES_ATTRIBUTES,
    DESCRIPTIONS,
    HDF5_FORMAT,
    HDF5_VERSION,
    MAX_SOURCE_CHARS,
    NO_SHA256,
    OPTIONAL_ATTRIBUTES,
    STREAM_FORMAT,
    STREAM_LAYOUT,
    TOKENS_ATTRIBUTES,
    StoreMeta,
    is_sha256,
)
from zb_hdf5.version import __version__

#: Optional root attributes that are numbers.
OPTIONAL_NUMBERS: Final = tuple(name for name in OPTIONAL_ATTRIBUTES if name != "tokenizer")

_SCALAR: Final = h5py.h5s.create(h5py.h5s.SCALAR)

CREATOR: Final = f"zb_hdf5 {__version__} (h5py {h5py.__version__}, HDF5 {h5py.version.hdf5_version})"


def attribute(owner: h5py.File | h5py.Group | h5py.Dataset, name: str) -> Any:
    """Return the value of an attribute, as `owner.attrs.get(name)` does; None: there is none.

    A number and a text of fixed length take two thirds of the time, and a file half of it: `attrs` of a file looks up
    its root group each time. Twenty are read of a stream that is opened.
    """
    key = name.encode()
    if not h5py.h5a.exists(owner.id, key):
        return None
    found = h5py.h5a.open(owner.id, key)
    dtype = found.dtype
    if found.shape != () or dtype.kind not in "iuS":
        return owner.attrs[name]
    value = np.empty((), dtype)
    found.read(value, mtype=h5py.h5t.py_create(dtype) if dtype.kind == "S" else _type_of_number(dtype))
    return value[()]


@cache  # dtypes of texts are equal that differ in their encoding
def _type_of_number(dtype: np.dtype[Any]) -> Any:
    """Return the type of HDF5 that a number of this dtype has in memory."""
    return h5py.h5t.py_create(dtype)


def text_attribute(owner: h5py.File | h5py.Group | h5py.Dataset, name: str) -> str:
    """Return the text of an attribute; "": there is none."""
    found = attribute(owner, name)
    return "" if found is None else str(text_of(found))


def require_version(h5: h5py.File, expected: int, path: Path) -> None:
    """Raise `FormatError` unless a file is of this version of its format."""
    found = attribute(h5, "format_version")
    if np.ndim(found) != 0 or found != expected:
        raise FormatError(f"{path}: expected format_version {expected}, found {found}")


def text_of(value: object) -> object:
    """Decode a fixed-length text; leave anything else as it is."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def stored_sha256(value: object, where: object) -> str:
    """Return the digest in an attribute; `FormatError` if it is none."""
    sha256 = str(text_of(value))
    if not is_sha256(sha256):
        raise FormatError(f"{where}: expected 64 hexadecimal digits in sha256, found {sha256!r}")
    return sha256


def create_attribute(owner: h5py.Group | h5py.Dataset, name: str, value: object, dtype: npt.DTypeLike) -> None:
    """Create an attribute of one value, as `owner.attrs.create` does in three times the time.

    A small file has twenty attributes; they take half of the time in which it is written.

    Parameters
    ----------
    owner
        A dataset, or a group: of a file, its root group.
    name
        A name that `owner` does not have yet.
    """
    kind = np.dtype(dtype)
    attribute = h5py.h5a.create(owner.id, name.encode(), h5py.h5t.py_create(kind, logical=True), _SCALAR)
    attribute.write(np.asarray(value, kind), mtype=h5py.h5t.py_create(kind))


def create_texts(root: h5py.Group, **texts: str) -> None:
    """Create attributes of fixed length.

    The heap of other texts has no checksum: one flipped bit there can send HDF5 2.0 into an endless loop.
    """
    for name, text in texts.items():
        data = text.encode("utf-8", "replace")
        create_attribute(root, name, data, h5py.string_dtype("utf-8", max(1, len(data))))


def create_root(h5: h5py.File, meta: StoreMeta, origin: Mapping[str, Any]) -> None:
    """Create the attributes of the root group.

    Parameters
    ----------
    meta
        Shape, dtype and origin of the tokens.
    origin
        "source", "shuffle" and "split" of the tokens, as far as they are known.
    """
    is_stream = meta.layout == STREAM_LAYOUT
    source = dict(origin.get("source") or {})
    texts = {
        "shuffle": origin.get("shuffle"),
        "split": origin.get("split"),
        "source": _source_text(source),
        "packing": source.get("packing"),
        "tokenizer": meta.tokenizer,
    }
    root = h5["/"]  # once: h5py looks it up for each use of `h5.attrs`
    create_texts(
        root,
        format=STREAM_FORMAT if is_stream else HDF5_FORMAT,
        description=DESCRIPTIONS[meta.layout],
        creator=CREATOR,
        **{name: str(text) for name, text in texts.items() if text},
    )
    create_attribute(root, "format_version", HDF5_VERSION, "<u4")
    numbers = {name: getattr(meta, name) or None for name in OPTIONAL_NUMBERS}
    if not is_stream:  # the marker of a stream has its shape, its boundary and the number of its documents
        numbers |= {"batch_size": meta.batch_size, "seq_len": meta.seq_len}
        numbers |= {name: source.get(name) for name in ("boundary_token_id", "pad_id")}
    for name, number in numbers.items():
        if isinstance(number, (int, np.integer)) and 0 <= number < 2**64:
            create_attribute(root, name, number, "<u8")


def _source_text(source: Mapping[str, Any]) -> str:
    """Return the JSON text of a source; of a long one, lists are replaced by their lengths."""
    text = json.dumps(source) if source else ""
    if len(text) <= MAX_SOURCE_CHARS:
        return text
    short = json.dumps({key: f"{len(v):,} in all" if isinstance(v, list) else v for key, v in source.items()})
    return short if len(short) <= MAX_SOURCE_CHARS else ""


def read_root(h5: h5py.File) -> dict[str, Any]:
    """Return the optional root attributes that describe all tokens of a file, as `StoreMeta` has them."""
    numbers = {name: attribute(h5, name) for name in OPTIONAL_NUMBERS}
    found: dict[str, Any] = {name: 0 if number is None else int(number) for name, number in numbers.items()}
    return found | {"tokenizer": text_attribute(h5, "tokenizer")}


def read_origin(h5: h5py.File) -> dict[str, Any]:
    """Return the origin of the tokens that `create_root` was given, as far as it can be read."""
    values = {name: attribute(h5, name) for name in ("source", "shuffle", "split")}
    texts = {name: str(text_of(value)) for name, value in values.items() if value is not None}
    try:
        source = json.loads(texts.pop("source", "{}"))
    except ValueError:
        return texts
    return texts | ({"source": source} if source and isinstance(source, dict) else {})


def read_marker(stored: h5py.Dataset, path: Path) -> dict[str, Any]:
    """Return the attributes of a dataset of tokens: its commit marker, and facts. "sha256": or None."""
    found: dict[str, Any] = {}
    for name, dtype in (BATCHES_ATTRIBUTES if stored.ndim == 3 else TOKENS_ATTRIBUTES).items():
        value = attribute(stored, name)
        if value is None or np.asarray(value).dtype.kind != dtype.kind or np.ndim(value) != 0:
            raise FormatError(f"{path}: {stored.name}: expected attribute {name!r} of {dtype}, found {value!r}")
        found[name] = value if dtype.kind == "S" else int(value)
    sha256 = stored_sha256(found["sha256"], f"{path}: {stored.name}")
    return found | {"sha256": sha256 if found["complete"] and sha256 != NO_SHA256 else None}
