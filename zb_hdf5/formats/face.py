"""Whether a `.batch` file is an HDF5 file as well, and a sound one. h5py is imported only for a file that is."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from zb_hdf5.columns.reader import BatchReader
from zb_hdf5.errors import Remedy
from zb_hdf5.formats.native import Face, face_of

_LINES: Final[dict[str, list[tuple[str, str]]]] = {
    Face.NONE: [],
    Face.HDF5: [("face", "both .batch and HDF5: open_reader(..., backend='hdf5'), h5py and h5dump read it too")],
    Face.TORN: [("face", f"an interrupted stamp: whole as .batch; {Remedy.STAMP}")],
}


def check_face(reader: BatchReader) -> list[str]:
    """Compare the HDF5 face of a file, where it has one, with its header; return the names of the checks.

    Raises
    ------
    ChecksumError
        If the face is damaged, or contradicts the header.
    """
    if reader.sha256 is not None or face_of(reader.path) is Face.NONE:
        return []
    from zb_hdf5.formats.dual import check  # h5py, which a plain .batch does not need

    check(reader.path)
    return ["face"]


def is_stamped(path: Path) -> bool:
    """Return whether a `.batch` file is an HDF5 file as well."""
    return face_of(path) is Face.HDF5


def describe(path: Path) -> dict[str, Any]:
    """Return the face as JSON."""
    return {"face": str(face_of(path))}


def lines(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Say it to people."""
    return _LINES[facts["face"]]
