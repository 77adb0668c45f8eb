"""Datasets of ids in types that are not read, and the way of each to `.npy`: odd integers, tables and arrays."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any, Final

from zb_hdf5.files.ways import array_line, quoted, statements_line
from zb_hdf5.packages import h5py

#: The sizes of integers that numpy has.
SIZES: Final = (1, 2, 4, 8)
#: Names in the root that are looked at.
MAX_NAMES: Final = 64


def way_of_odd_types(h5: h5py.File, path: Path) -> str:
    """Return the words for the first dataset of the root in such a type, with the line that saves it; "": none is."""
    for name in islice(h5, MAX_NAMES):
        is_inside = isinstance(h5.get(name, getlink=True), h5py.HardLink)
        if is_inside and h5.get(name, getclass=True) is h5py.Dataset:
            way = _way_of(path, name, h5[name].id.get_type())
            if way:
                return way
    return ""


def _way_of(path: Path, name: str, kind: Any) -> str:
    """Return the words for a dataset of a type; "" if that is read, or has no integers."""
    stored = f"h5py.File({quoted(path)})[{quoted(name)}]"
    if isinstance(kind, h5py.h5t.TypeIntegerID) and kind.get_size() not in SIZES:
        line = statements_line(
            "import h5py, numpy",
            f"d = {stored}",
            'ids = numpy.empty(d.shape, "i8")',
            "d.id.read(h5py.h5s.ALL, h5py.h5s.ALL, ids, mtype=h5py.h5t.NATIVE_INT64)",
            f"numpy.save({quoted(f'{path}.npy')}, ids)",
        )
        return f"{name} has integers of {8 * kind.get_size()} bits; save them as .npy: {line}"
    if isinstance(kind, h5py.h5t.TypeArrayID) and isinstance(kind.get_super(), h5py.h5t.TypeIntegerID):
        line = array_line(path, f"{stored}[...]", "h5py, numpy")
        return f"{name} has an array in each item; save them as .npy: {line}"
    return _way_of_table(path, name, kind, stored) if isinstance(kind, h5py.h5t.TypeCompoundID) else ""


def _way_of_table(path: Path, name: str, kind: Any, stored: str) -> str:
    """Return the words for a table with a column of integers; "": it has none."""
    members = {kind.get_member_name(k).decode(): kind.get_member_type(k) for k in range(kind.get_nmembers())}
    ids = next((each for each, its in members.items() if isinstance(its, h5py.h5t.TypeIntegerID)), "")
    if not ids:
        return ""
    line = array_line(path, f"{stored}[{quoted(ids)}]", "h5py, numpy")
    return f"{name} is a table with the columns {', '.join(members)}; save that of the ids as .npy: {line}"
