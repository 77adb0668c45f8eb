"""Zarr arrays of token ids: 1-D arrays of integers in uncompressed chunks, of version 2 or 3 of the format.

Each chunk is a file whose ids follow each other, so that they are read in place. The entry point in `pyproject.toml`
makes the format known to zb_hdf5 where this package is installed. Source: the specifications of Zarr 2 and 3.
"""

import json
import os
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np

from zb_hdf5 import FormatError, IncompleteError
from zb_hdf5.files.look import Look
from zb_hdf5.formats.flat import FlatFormat
from zb_hdf5.formats.flat_facts import FlatFacts
from zb_hdf5.formats.format_row import FormatRow

#: The files that describe an array, of version 2 and of version 3.
METADATA: Final = (".zarray", "zarr.json")
#: Longer ones describe no array of one axis.
MAX_METADATA_BYTES: Final = 1 << 20


class Array(NamedTuple):
    """An array: its length, the ids in each chunk, their dtype, and the name of a chunk before its number."""

    folder: Path
    length: int
    chunk: int
    dtype: np.dtype[Any]
    prefix: str

    def chunks(self) -> list[Path]:
        """Return the file of each chunk. Raises `IncompleteError` if one is missing."""
        count = -(-self.length // self.chunk)
        first = self.folder / f"{self.prefix}0"
        found = sum(name.rpartition(".")[2].isdecimal() for name in os.listdir(first.parent))
        if found < count:  # a length is believed only as far as there are files
            raise IncompleteError(
                f"{self.folder}: expected {count:,} chunks, found {found:,}: chunks of fill values are not read"
            )
        return [self.folder / f"{self.prefix}{number}" for number in range(count)]


def array_at(folder: Path) -> Array | None:
    """Return the array in a folder; None if there is none.

    Raises
    ------
    FormatError
        If it is not of one axis, not of integers, or not in uncompressed chunks.
    """
    for name in METADATA:
        path = folder / name
        if path.is_file():
            return read_metadata(path)
    return None


def read_metadata(path: Path) -> Array | None:
    """Return the array that a file describes; None if it describes another thing, such as a group."""
    with open(path, "rb") as file:
        text = file.read(MAX_METADATA_BYTES)
    try:
        found = json.loads(text)
        if found.get("node_type", "array") != "array":
            return None
        array = {2: of_version_2, 3: of_version_3}[found["zarr_format"]](path.parent, found)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise FormatError(f"{path}: expected a 1-D array of integers in uncompressed chunks, found {error}") from error
    if array.length < 0 or array.chunk < 1 or array.dtype.kind not in "iu":
        raise FormatError(f"{path}: expected a 1-D array of integers, found {array.length} of {array.dtype}")
    return array


def of_version_2(folder: Path, found: dict[str, Any]) -> Array:
    if found["compressor"] is not None or found.get("filters"):
        raise ValueError(f"compressor {found['compressor']} and filters {found.get('filters')}")
    (length,) = found["shape"]
    (chunk,) = found["chunks"]
    return Array(folder, int(length), int(chunk), np.dtype(found["dtype"]), "")


def of_version_3(folder: Path, found: dict[str, Any]) -> Array:
    codecs = found["codecs"]
    grid = found["chunk_grid"]
    if [codec["name"] for codec in codecs] != ["bytes"] or grid["name"] != "regular":
        raise ValueError(f"codecs {[codec['name'] for codec in codecs]} and grid {grid['name']}")
    order = codecs[0].get("configuration", {}).get("endian", "little")
    (length,) = found["shape"]
    (chunk,) = grid["configuration"]["chunk_shape"]
    dtype = np.dtype(found["data_type"]).newbyteorder("<" if order == "little" else ">")
    key = found["chunk_key_encoding"]
    separator = key.get("configuration", {}).get("separator", "/" if key["name"] == "default" else ".")
    return Array(folder, int(length), int(chunk), dtype, f"c{separator}" if key["name"] == "default" else "")


class ZarrArrays(FlatFormat):
    """The chunks of an array, in order. The path is the folder of the array."""

    sign: ClassVar = "a .zarray or zarr.json that describes a 1-D array"

    def files(self, look: Look) -> list[str]:
        array = array_at(look.path) if look.is_dir else None
        return [] if array is None else [*map(str, array.chunks())]

    def fits(self, look: Look) -> bool:
        return look.is_dir and array_at(look.path) is not None

    def facts(self, look: Look) -> FlatFacts:
        path = look.path
        folder = path.parent.parent if path.parent.name == "c" else path.parent
        array = array_at(folder)
        if array is None:
            raise FormatError(f"{path}: expected a chunk of an array, found no {' or '.join(METADATA)} in {folder}")
        if not path.is_file():
            raise IncompleteError(f"{path}: is not there: a chunk of fill values is not read; restore it")
        start = int(path.name.rpartition(".")[2]) * array.chunk
        size = look.num_bytes
        expected = array.chunk * array.dtype.itemsize  # also of the last one, which is padded
        if size != expected:
            raise IncompleteError(f"{path}: expected {expected:,} bytes for {array.chunk:,} ids, found {size:,}")
        return FlatFacts(look.text, min(array.chunk, array.length - start), array.dtype, identity=look.identity)


ROW: Final = FormatRow(
    name="zarr",
    noun="Zarr arrays of ids",
    suffixes=METADATA,
    place="format_zarr:ZarrArrays",
    is_flat=True,
    holds_documents=False,
)
