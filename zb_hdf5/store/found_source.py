"""The source that a conversion finds at a path, of all formats: also rows and text, which are read once, in order."""

from __future__ import annotations

from typing import Final

from zb_hdf5.errors import FormatError, ZbError
from zb_hdf5.files.line_file import JSON_SUFFIX
from zb_hdf5.files.listing import is_lone_json, kept_listings, listed
from zb_hdf5.files.look import Look
from zb_hdf5.formats.format import NOT_IN_PLACE, Found
from zb_hdf5.read_as import AS_STORED, ReadAs
from zb_hdf5.store.format_list import FORMATS, HDF5, batch_formats, format_named
from zb_hdf5.store.found_path import found_at
from zb_hdf5.store.found_store import stores_at
from zb_hdf5.store.recognition import (
    backend_in,
    ends_so,
    installed_name_of,
    is_store,
    name_by_ending,
    source_name_of,
)

#: The formats that an option tells to look for: documents in HDF5 files, and rows of ids.
_RAGGED: Final = "ragged"
_HF: Final = "hf"
#: The kind of JSON lines of text.
_LINES: Final = "jsonl"


@kept_listings()
def found_source(
    look: Look,
    read_as: ReadAs = AS_STORED,
    *,
    tokenizer: str | None = None,
    ids_column: str | None = None,
    offsets: str | None = None,
) -> Found:
    """Return what a conversion finds at a path, in the order that stands beside `FORMATS`.

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
    rows = _name_of_rows(look, read_as, ids_column, offsets)
    if read_as.lacks_header and not (rows and "source_dtype" in format_named(rows).options):
        return found_at(look.path, read_as=read_as, split=None, look=look)
    name = rows if rows and tokenizer is None else name_by_ending(look) or rows
    if name:
        return Found(look.path, name, NOT_IN_PLACE)
    found = _or_foreign(look, in_place or _tried(look, read_as))
    if isinstance(found, ZbError) and read_as.dataset is None and read_as != AS_STORED:
        found = _tried(look, AS_STORED)  # the options that it has no use for are refused by their names
    return found if isinstance(found, Found) else _read_once(look, ids_column, found)


def _tried(look: Look, read_as: ReadAs) -> Found | ZbError:
    """Return what is read in place at a path, or the error of it."""
    try:
        return found_at(look.path, read_as=read_as, split=None, look=look)
    except ZbError as error:
        return error


def _or_foreign(look: Look, found: Found | ZbError) -> Found | ZbError:
    """Return what was found; in place of an error HDF5 files of another program, each of which is opened by itself."""
    is_foreign = isinstance(found, ZbError) and _has_foreign_hdf5(look)
    return Found(look.path, HDF5, NOT_IN_PLACE) if is_foreign else found


def _has_foreign_hdf5(look: Look) -> bool:
    """Return whether a path is an HDF5 file of another program, or a folder of them that is not a store."""
    from zb_hdf5.formats.inspection import is_ours  # with h5py

    path = look.path
    if not look.is_dir:
        return backend_in(look) == HDF5 and not is_ours(look)
    if look.is_far or stores_at(path):
        return False
    found = listed(path, *FORMATS[HDF5].file_suffixes).files
    return bool(found) and not is_ours(look.of(found[0]))


def _may_be_ours(look: Look) -> bool:
    """Return whether a path is a store, or a file that may be ours: no other file is opened for this."""
    endings = [ending for row in batch_formats().values() if row.holds_batches for ending in row.file_suffixes]
    is_named = look.is_dir or look.path.name.endswith((".json", *endings))
    return is_named and is_store(look)


def _name_of_rows(look: Look, read_as: ReadAs, ids_column: str | None, offsets: str | None) -> str:
    """Return the name of the format of another trainer whose documents a path has as rows; "": it has others."""
    if offsets is not None and _has_foreign_hdf5(look):
        return _RAGGED  # lengths of documents are taken where they are named
    name = source_name_of(look)
    if name == _RAGGED and read_as.dataset is not None:
        from zb_hdf5.trainers.ragged import names_documents  # with h5py

        return name if names_documents(look, read_as.dataset) else ""  # a dataset of ids has records, or a stream
    if not name and ids_column is not None and ends_so(look, format_named(_HF).suffixes):
        return _HF  # a column of ids is named: its rows are not text
    return name


def _read_once(look: Look, ids_column: str | None, error: ZbError) -> Found:
    """Return a path that is not read in place: of a package, or lines in a plain `.json`. Else raise an error."""
    if not isinstance(error, FormatError) or is_store(look):
        raise error
    name = installed_name_of(look, [])
    if not name and _has_plain_json(look):
        name = _LINES if ids_column is None else _HF
    if not name:
        raise error
    return Found(look.path, name, NOT_IN_PLACE)


def _has_plain_json(look: Look) -> bool:
    """Return whether a path is a `.json` that is not one of facts, or a folder that has one."""
    path = look.path
    return bool(listed(path, JSON_SUFFIX).names) if look.is_dir else path.is_file() and is_lone_json(path.name)
