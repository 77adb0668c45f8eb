"""The source that a conversion finds at a path, of all formats: also rows and text, which are read once, in order."""

from __future__ import annotations

from typing import Final

from zb_hdf5.errors import FormatError, ZbError
from zb_hdf5.files.line_file import JSON_SUFFIX
from zb_hdf5.files.listing import is_lone_json, listed
from zb_hdf5.files.look import Look
from zb_hdf5.formats.format import NOT_IN_PLACE, Found
from zb_hdf5.formats.format_row import FormatRow
from zb_hdf5.read_as import AS_STORED, ReadAs
from zb_hdf5.store.format_list import FORMATS, HDF5, batch_formats, in_order_of_sources
from zb_hdf5.store.found_path import found_at
from zb_hdf5.store.found_store import stores_at
from zb_hdf5.store.recognition import (
    backend_in,
    ends_so,
    found_rows,
    installed_name_of,
    is_store,
)

#: The formats that an option tells to look for: documents in HDF5 files, and rows of ids.
_RAGGED: Final = "ragged"
_HF: Final = "hf"
#: The kind of JSON lines of text.
_LINES: Final = "jsonl"


def found_source(
    look: Look,
    read_as: ReadAs = AS_STORED,
    *,
    tokenizer: str | None = None,
    ids_column: str | None = None,
    offsets: str | None = None,
) -> Found:
    """Return what a conversion finds at a path, in the order of `in_order_of_sources`.

    Parameters
    ----------
    look
        A look at the path.
    read_as
        How files are read that do not tell it themselves. Files that have no use for it are found without it.
    tokenizer, ids_column, offsets
        The options of the conversion that ask for text, for rows of ids, and for documents in HDF5 files.

    Returns
    -------
    Found
        Of all splits. `NOT_IN_PLACE`: the conversion opens the files by the format alone. These are rows, text, plain
        arrays, and HDF5 files of another program that are not read in place as they are asked for.

    Raises
    ------
    ArgumentError, BackendError, FormatError, NotFoundError
        As `found_at`, if no conversion reads the path.
    """
    with look.keeping_handles():
        return _found(look, read_as, tokenizer, ids_column, offsets)


def found_hdf5(look: Look, read_as: ReadAs) -> Found:
    """Return what is found at a path where HDF5 files are asked for. Returns and raises as `found_source`."""
    with look.keeping_handles():
        found = _or_foreign(look, _tried(look, read_as))
    if isinstance(found, ZbError):
        raise found
    return found


def _found(look: Look, read_as: ReadAs, tokenizer: str | None, ids_column: str | None, offsets: str | None) -> Found:
    """Return what is found at a path, as `found_source`."""
    in_place = None
    if not read_as.lacks_header and _may_be_ours(look):
        in_place = _tried(look, read_as)
        if isinstance(in_place, Found) and in_place.foreign_dataset is None:
            return in_place
    if offsets is not None and not read_as.lacks_header and _has_foreign_hdf5(look):
        return _once(look, _RAGGED)  # lengths of documents are taken where they are named
    for row in in_order_of_sources(asks_for_text=tokenizer is not None):
        if not read_as.lacks_header or "source_dtype" in row.options:
            found = _read_by(row, look, read_as, ids_column)
            if found is not None:
                return found
    if read_as.lacks_header:
        return found_at(look.path, read_as=read_as, split=None, look=look)
    other = _or_foreign(look, in_place or _tried(look, read_as))
    if isinstance(other, ZbError) and read_as.dataset is None and read_as != AS_STORED:
        other = _tried(look, AS_STORED)  # the options that it has no use for are refused by their names
    return other if isinstance(other, Found) else _read_last(look, ids_column, other)


def _read_by(row: FormatRow, look: Look, read_as: ReadAs, ids_column: str | None) -> Found | None:
    """Return the findings at a path that a conversion reads by one format, and not in place; None: of other paths."""
    if row.is_by_ending:
        return _once(look, row.name) if ends_so(look, row.suffixes) else None
    if row.name == _HF and ids_column is not None and ends_so(look, row.suffixes):
        return _once(look, _HF)  # its rows are not text
    return found_rows(row, look, read_as)


def _once(look: Look, name: str) -> Found:
    """Return a path as that of a format by which a conversion reads it once, in order."""
    return Found(look.path, name, NOT_IN_PLACE, look=look)


def _tried(look: Look, read_as: ReadAs) -> Found | ZbError:
    """Return what is read in place at a path, or the error of it."""
    try:
        return found_at(look.path, read_as=read_as, split=None, look=look)
    except ZbError as error:
        return error


def _or_foreign(look: Look, found: Found | ZbError) -> Found | ZbError:
    """Return what was found; in place of an error HDF5 files of another program, each of which is opened by itself."""
    is_foreign = isinstance(found, ZbError) and _has_foreign_hdf5(look)
    return _once(look, HDF5) if is_foreign else found


def _has_foreign_hdf5(look: Look) -> bool:
    """Return whether a path is an HDF5 file of another program, or a folder of them that is not a store."""
    from zb_hdf5.formats.inspection import is_ours  # with h5py

    path = look.path
    if not look.is_dir:
        return backend_in(look) == HDF5 and not is_ours(look)
    if look.is_far or stores_at(path):
        return False
    found = listed(look, *FORMATS[HDF5].file_suffixes).files
    return bool(found) and not is_ours(look.of(found[0]))


def _may_be_ours(look: Look) -> bool:
    """Return whether a path is a store, or a file that may be ours: no other file is opened for this."""
    endings = [ending for row in batch_formats().values() if row.holds_batches for ending in row.file_suffixes]
    is_named = look.is_dir or look.path.name.endswith((".json", *endings))
    return is_named and is_store(look)


def _read_last(look: Look, ids_column: str | None, error: ZbError) -> Found:
    """Return a path that is not read in place: of a package, or lines in a plain `.json`. Else raise an error."""
    if not isinstance(error, FormatError) or is_store(look):
        raise error
    name = installed_name_of(look, [])
    if not name and _has_plain_json(look):
        name = _LINES if ids_column is None else _HF
    if not name:
        raise error
    return _once(look, name)


def _has_plain_json(look: Look) -> bool:
    """Return whether a path is a `.json` that is not one of facts, or a folder that has one."""
    path = look.path
    return bool(listed(look, JSON_SUFFIX).names) if look.is_dir else path.is_file() and is_lone_json(path.name)
