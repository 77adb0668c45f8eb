"""Arrays of parsed JSON, with one value for each shard or file, and their checks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from zb_hdf5.errors import FormatError, Remedy
from zb_hdf5.spec import (
    SHA256_CHARS,
    is_file_name,
    is_hexadecimal,
    is_sha256,
)


def require_field(value: Any, key: str, kind: type[Any], where: str) -> Any:
    """Return a value of a JSON object; raise `FormatError` unless it is there and of its type."""
    if not isinstance(value, dict):
        raise FormatError(f"{where}: expected a JSON object, found {type(value).__name__}")
    if key not in value:
        raise FormatError(f"{where}: key {key!r} is missing")
    found = value[key]
    if not isinstance(found, kind) or (kind is int and isinstance(found, bool)):
        raise FormatError(f"{where}: {key}: expected {kind.__name__}, found {found!r}")
    return found


def require_arrays(value: Any, kinds: Mapping[str, type[Any]], where: str, length: int | None = None) -> dict[str, Any]:
    """Return the arrays of a JSON object; raise `FormatError` unless they are of their types and of one length."""
    values = {key: require_array(value, key, kind, where) for key, kind in kinds.items()}
    found = {len(array) for array in values.values()}
    if len(found) != 1 or length not in (None, *found):
        lengths = ", ".join(f"{key} {len(array):,}" for key, array in values.items())
        expected = "arrays of one length" if length is None else f"arrays of {length:,} elements"
        raise FormatError(f"{where}: expected {expected}, found {lengths}")
    return values


def require_array(value: Any, key: str, kind: type[Any], where: str) -> Any:
    """Return an array of a JSON object whose elements all have one type: of whole numbers as int64."""
    found: list[Any] = require_field(value, key, list, where)
    if set(map(type, found)) - {kind}:
        number = next(number for number, element in enumerate(found) if type(element) is not kind)
        raise FormatError(f"{where}: {key}[{number}]: expected {kind.__name__}, found {found[number]!r}")
    try:
        return np.array(found, np.int64) if kind is int else found
    except OverflowError as error:
        raise FormatError(f"{where}: {key}: {error}") from error


def require_paths(paths: list[str], where: str) -> None:
    """Raise `FormatError` if a path is not the name of a file, or leaves the folder of the store."""
    together = "/".join(paths)  # one look at all of them: there may be a hundred thousand
    is_suspect = ".." in together or "//" in f"/{together}/" or not is_file_name(together)
    if not is_suspect:
        return
    for path in paths:
        is_inside = set(path.split("/")).isdisjoint({"", ".."})
        if not is_inside or not is_file_name(path):
            raise FormatError(
                f"{where}: path {path!r} leaves the folder of the store, or is not the name of a file",
                remedy=Remedy.REBUILD,
            )


def require_sha256(digests: list[str], where: str) -> None:
    """Raise `FormatError` if a text is not a digest."""
    if set(map(len, digests)) - {SHA256_CHARS} or not is_hexadecimal("".join(digests)):
        bad = next((digest for digest in digests if not is_sha256(digest)), "")
        raise FormatError(f"{where}: expected {SHA256_CHARS} hexadecimal digits in sha256, found {bad!r}")


def plain_arrays(values: dict[str, Any]) -> dict[str, list[Any]]:
    """Return arrays as JSON has them."""
    return {key: array if isinstance(array, list) else array.tolist() for key, array in values.items()}
