"""The crc32 rows of a file that has no place for them: raw uint32 in `<file>.crc32`, which a store keeps beside it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import FormatError, Remedy, UnverifiableError
from zb_hdf5.files.checked import Crc32Rows
from zb_hdf5.files.digests import batch_crc32s, crc32_array
from zb_hdf5.files.identity import handle_of, open_file, regular, size_of
from zb_hdf5.files.open_files import open_with_room
from zb_hdf5.files.publishing import PARTIAL_SUFFIX, write_atomically
from zb_hdf5.formats.batch_reader import BatchReader
from zb_hdf5.spec import CRC32_SUFFIX


def crc32_path(path: Path) -> Path:
    """Return where a store keeps the crc32 rows of a file."""
    return path.with_name(path.name + CRC32_SUFFIX)


def no_crc32_file(path: Path) -> str:
    """Say what a file needs to be verified, and how to get it."""
    return f"{crc32_path(path).name} is not beside it; {Remedy.CRC32}"


def read_crc32_file(path: Path, num_batches: int) -> npt.NDArray[np.uint32]:
    """Return the crc32 of each batch from `<path>.crc32`.

    Raises
    ------
    UnverifiableError
        If the file is missing.
    FormatError
        If it has another length.
    """
    rows = np.empty(num_batches, "<u4")
    _read_rows(path, num_batches, 0, rows)
    return rows


def sidecar_rows(path: Path, num_batches: int) -> Crc32Rows:
    """Return the rows of `<path>.crc32`, read when they are needed. Raises as `read_crc32_file`, when it reads."""
    return Crc32Rows(num_batches, partial(_read_rows, path, num_batches))


def _read_rows(path: Path, num_batches: int, start: int, out: npt.NDArray[np.uint32]) -> None:
    place = crc32_path(path)
    try:
        with open_with_room(partial(open_file, place)) as file:  # for 4,096 batches at once: it is not kept open
            size = size_of(handle_of(file))
            if size != 4 * num_batches:
                raise FormatError(f"{place}: expected {4 * num_batches:,} bytes, found {size:,}")
            file.seek(4 * start)
            out[...] = np.frombuffer(file.read(out.nbytes), "<u4")
    except FileNotFoundError as error:
        raise UnverifiableError(
            f"{path}: cannot be verified: {place.name} is not beside it", remedy=Remedy.CRC32, at=path
        ) from error


def read_any_crc32_file(path: Path) -> npt.NDArray[np.uint32] | None:
    """Return as many whole rows as lie beside a damaged or unfinished file, or None if there is no such file."""
    final = path.with_name(path.name.removesuffix(PARTIAL_SUFFIX))
    for place in (path, final):
        beside = crc32_path(place)
        if beside.exists() and (place == path or not final.exists()):  # else they are those of the older file
            with open(beside, "rb", opener=regular) as file:
                data = file.read()
            return np.frombuffer(data[: len(data) // 4 * 4], dtype="<u4")
    return None


def ensure_crc32_file(reader: BatchReader) -> Path | None:
    """Write the `<path>.crc32` of a file that has none, and return where it is if it was written."""
    beside = crc32_path(reader.path)
    if beside.exists():
        return None
    rows = [crc for batch in reader for crc in batch_crc32s(batch[np.newaxis])]
    write_atomically(beside, crc32_array(rows).tobytes())
    return beside
