"""A dataset of an HDF5 file: found by its name without leaving the file, and as long as it claims to be."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from zb_hdf5.errors import FormatError
from zb_hdf5.files.paths import require_bytes
from zb_hdf5.hdf5.h5_attributes import require_version
from zb_hdf5.hdf5.h5_file import handle_of_h5
from zb_hdf5.packages import h5py
from zb_hdf5.spec import HDF5_VERSION, STREAM_LAYOUT, TOKEN_COLUMNS

#: The largest ratio by which zeros and ascending numbers shrink in the common filters.
FILTER_RATIO: Final = 4096


def require_stored(claimed_bytes: int, h5: h5py.File, stored: h5py.Dataset, path: Path) -> None:
    """Raise `IncompleteError` if a file is shorter than its data could be, by the ratio that a filter reaches."""
    filtered = stored.id.get_create_plist().get_nfilters() > 0
    claimed = claimed_bytes // FILTER_RATIO if filtered else claimed_bytes
    require_bytes(claimed, handle_of_h5(h5), path, f"{stored.name}")


def own_dataset(h5: h5py.File, path: Path, name: str) -> h5py.Dataset | None:
    """Return a dataset whose bytes are in this file, or None; `FormatError` if a link leads out of the file."""
    found = _follow(h5, path, name)  # other files were not opened by the user, and may be any that can be read
    if not isinstance(found, h5py.Dataset):
        return None
    if elsewhere := bytes_elsewhere(found):
        raise _leads_out(path, name, elsewhere)
    return found


def bytes_elsewhere(stored: h5py.Dataset) -> str:
    """Describe how the bytes of a dataset are kept in other files; "" if they are in its own."""
    creation: Any = stored.id.get_create_plist()
    if creation.get_layout() == h5py.h5d.VIRTUAL:
        return "is a virtual dataset"
    return "keeps its data in other files (external storage)" if creation.get_external_count() else ""


def is_plain(stored: h5py.Dataset) -> bool:
    """Return whether the bytes of a value in the file are those that numpy has for its dtype."""
    kind: Any = stored.id.get_type()
    found: bool = kind.equal(h5py.h5t.py_create(stored.dtype))  # numbers of 12 bits in 16 are not
    return found


def _follow(group: Any, path: Path, name: str, soft_links: int = 16) -> Any:
    """Return the object at the end of links that stay in the file, or None."""
    for part in (part for part in name.split("/") if part not in ("", ".")):
        key = part.encode()
        links = group.id.links if isinstance(group, h5py.Group) else None
        if links is None or not links.exists(key):
            return None
        kind = links.get_info(key).type
        if kind == h5py.h5l.TYPE_HARD:
            group = _object_at(group, part)
        elif kind == h5py.h5l.TYPE_SOFT and soft_links:
            target = links.get_val(key).decode("utf-8", "surrogateescape")
            group = _follow(group.file if target.startswith("/") else group, path, target, soft_links - 1)
        elif kind == h5py.h5l.TYPE_SOFT:
            raise _leads_out(path, part, "is a link to itself")
        elif kind == h5py.h5l.TYPE_EXTERNAL:
            file, _ = links.get_val(key)
            raise _leads_out(path, part, f"is a link to {file.decode('utf-8', 'surrogateescape')}")
        else:
            raise _leads_out(path, part, "is a user-defined link")
    return group


def _object_at(group: Any, name: str) -> Any:
    """Return `group[name]`.

    A dataset takes half of the time: h5py asks the file for its mode, to keep the shapes of those that cannot change.
    """
    found = h5py.h5o.open(group.id, name.encode())
    return h5py.Dataset(found) if isinstance(found, h5py.h5d.DatasetID) else group[name]


def _leads_out(path: Path, name: str, what: str) -> FormatError:
    return FormatError(
        f"{path}: {name!r} {what}; nothing outside of a file is followed: copy it into one file, as h5copy does"
    )


def require_rows(h5: h5py.File, path: Path, name: str, count: int) -> h5py.Dataset:
    """Return a 1-D dataset that has `count` rows, or more; `FormatError` if there is none."""
    stored = own_dataset(h5, path, name)
    if stored is None or stored.ndim != 1 or len(stored) < count:
        raise FormatError(f"{path}: expected a dataset {name!r} of {count:,} rows, found {stored!r}")
    require_stored(count * stored.dtype.itemsize, h5, stored, path)
    return stored


def our_tokens(h5: h5py.File, path: Path, layout: str) -> h5py.Dataset:
    """Return the dataset of the tokens of a file of ours; `FormatError` if it is of another version, or has none.

    Parameters
    ----------
    layout
        "batches" or "stream", as `StoreMeta` has it.
    """
    require_version(h5, HDF5_VERSION, path)
    name = TOKEN_COLUMNS[layout]
    axes = 1 if layout == STREAM_LAYOUT else 3
    stored = own_dataset(h5, path, name)
    if stored is None or stored.ndim != axes:
        raise FormatError(f"{path}: expected a {axes}-D dataset {name!r}, found {stored!r}")
    return stored
