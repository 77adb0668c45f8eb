"""The formats of the list at a path, by its name and its content: each question is asked of one look."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from zb_hdf5.errors import ArgumentError, BackendError, FormatError, Remedy, conversion_call
from zb_hdf5.files.line_file import JSON_SUFFIX
from zb_hdf5.files.look import Look
from zb_hdf5.files.paths import RemotePath
from zb_hdf5.formats.format_row import FormatRow
from zb_hdf5.read_as import AS_STORED, ReadAs
from zb_hdf5.store.format_list import (
    FORMATS,
    INSTALLED,
    add_installed,
    backends,
    batch_formats,
    flat_format,
    flat_formats,
    load_format,
    row_named,
)
from zb_hdf5.trainers.installed_formats import first_of

if TYPE_CHECKING:
    from zb_hdf5.formats.format import Format, Found

# numpy, and whatever else the help of the commands does not need, is imported where it is used

#: The endings of ids and of their documents, of formats whose own programs leave them out of a path.
PREFIX_ENDINGS: Final = ((".bin", ".idx"), (".ds", ".ds.index"))


def may_hold(row: FormatRow, look: Look, backend: str = "auto") -> bool:
    """Return whether a path ends or begins as the paths of a format do, so that its code is asked.

    Parameters
    ----------
    backend
        The format that is asked for, or "auto": a folder may be said to have files of a format.
    """
    if row.is_flat or row.is_of_rows:
        is_asked_for = row.is_flat and backend == row.name and look.is_dir
        return is_asked_for or _has_suffix(look, row.suffixes)
    if not look.is_dir:
        return row.has_magic(look)
    from zb_hdf5.files.listing import listed

    return bool(row.place) and not look.is_far and bool(listed(look, *row.file_suffixes).files)


def _has_suffix(look: Look, suffixes: tuple[str, ...]) -> bool:
    """Return whether a file ends in one of the suffixes, or a folder has files that do, in or below it.

    A hidden file in a folder that has such a name marks it, as `.zarray` does.
    """
    path = look.path
    if look.is_far:
        return False
    if look.is_dir:
        from zb_hdf5.files.listing import listed

        return bool(listed(look, *suffixes).names) or any((path / suffix).exists() for suffix in suffixes)
    return path.name.lower().endswith(suffixes)


# --- files of batches ----------------------------------------------------------------------------------------------


def backend_in(look: Look) -> str:
    """Return the name of the first backend whose magic bytes a file carries; "": none."""
    return next((name for name, row in backends().items() if row.has_magic(look)), "")


def detect_backend(look: Look) -> str:
    """Return the name of the first backend whose magic bytes a file carries."""
    if name := backend_in(look):
        return name
    raise no_known_file(look)


def no_known_file(look: Look) -> FormatError:
    """Return the error of a file that carries the magic bytes of no backend."""
    path = look.path
    head = look.start[:8]
    known = ", ".join(f"{row.file_noun} (magic {row.magic_bytes()!r})" for row in backends().values())
    ours = {".partial", *(suffix for row in batch_formats().values() for suffix in row.file_suffixes)}
    remedy = None if path.suffix in ours else Remedy.CONVERT
    facts = (
        f"{path}: no known file: expected a store, a stream, {known}, found {repr(head) if head else 'an empty file'}"
    )
    return FormatError(facts, remedy=remedy, at=path)


def format_of(look: Look) -> FormatRow:
    """Return the format of a file: by its magic bytes, or by the suffix of a format without batches."""
    rows = batch_formats().values()
    plain = (row for row in rows if not row.holds_batches and row.suffix == look.path.suffix)
    return next(plain, None) or FORMATS[detect_backend(look)]


def require_datasets(look: Look, read_as: ReadAs) -> None:
    """Raise `BackendError` if a dataset, or its axes, are named of files that have none, or that are in a store."""
    if not read_as.names_dataset:
        return
    from zb_hdf5.files.listing import listed
    from zb_hdf5.spec import INDEX_NAME

    path = look.path
    name, value = next(iter(read_as.given.items()))
    kinds = [row for row in batch_formats().values() if row.has_axes and not (read_as.needs_hdf5 and row.tokens_only)]
    facts = f"{path}: {name}={value!r} needs {' or '.join(row.file_noun for row in kinds)}"
    if look.is_dir or path.name == INDEX_NAME:
        is_local = look.is_dir and not look.is_far
        suffixes = [suffix for row in kinds for suffix in row.file_suffixes]
        if not is_local or (path / INDEX_NAME).exists() or not listed(look, *suffixes).files:
            raise BackendError(f"{facts}, found a folder", options=[name])
        return
    found = format_of(look)
    if found not in kinds:
        raise BackendError(f"{facts}, found a {found.name!r} file", options=[name])


# --- files that are read in place ----------------------------------------------------------------------------------


class FilesInPlace(NamedTuple):
    """The files at a path that are read in place and are in no store.

    Attributes
    ----------
    code
        Their format, which has how they are read.
    files
        The files of ids, in the order of the stream.
    """

    code: Format
    files: list[str]


def formats_at(
    look: Look, read_as: ReadAs = AS_STORED, backend: str = "auto", notes: list[str] | None = None
) -> Iterator[Format]:
    """Yield the formats that are read in place and that a path may be of, in the order in which they are asked.

    Parameters
    ----------
    look
        A look at the path.
    read_as
        How the files are read.
    backend
        The format that is asked for, or "auto".
    notes
        Gets a note for each package whose format fails; None: nobody reads them.

    Raises
    ------
    ArgumentError
        If files have a header, and are to be read as files without one.
    BackendError
        If the files of `backend` have a header, and are to be read as files without one.
    """
    if read_as.lacks_header:
        yield load_format(FORMATS[headerless_name(look, backend)], read_as)
        return
    for row in FORMATS.values():
        if not row.is_of_rows and may_hold(row, look, backend):
            yield load_format(row, read_as)
    if is_store(look):
        return
    name = backend
    if backend == "auto":
        name = installed_name_of(look, [] if notes is None else notes)
    row_of_package = None if name in FORMATS else row_named(name)
    if row_of_package is not None and row_of_package.is_flat and may_hold(row_of_package, look, backend):
        yield load_format(row_of_package)


def files_in_place(look: Look, read_as: ReadAs = AS_STORED) -> FilesInPlace | None:
    """Return the files at a path that are read in place and are in no store; None if it has others.

    Whoever compares or digests files asks here: no facts are read, so that damaged files are found too.

    Parameters
    ----------
    look
        A look at the path.
    read_as
        How the files are read.

    Raises
    ------
    ArgumentError
        If they have a header, and are to be read as files without one.
    FormatError
        If a folder has no files without a header, and such are asked for.
    """
    for code in formats_at(look, read_as):
        if files := code.files(look):
            return FilesInPlace(code, files)
        if read_as.lacks_header and look.is_dir:
            raise code.none_in(look.path)
    return None


def flat_files(name: str, look: Look) -> list[str]:
    """Return the paths of the files at a path that are a stream of a flat format, by their names and their content.

    Parameters
    ----------
    name
        The format.
    look
        A look at a file, or at a folder of files.
    """
    row = row_named(name)
    if row is None or not row.is_flat or look.is_far:
        return []
    code = flat_format(name) if may_hold(row, look) else None
    return [] if code is None else code.files(look)


def flat_at(look: Look) -> FilesInPlace | None:
    """Return the files at a path that are of a flat format; None if it has others."""
    found = files_in_place(look)
    return found if found is not None and found.code.row.is_flat else None


def is_store(look: Look) -> bool:
    """Return whether a path is a store, or a file with the magic bytes of one. No package reads a URL."""
    from zb_hdf5.spec import INDEX_NAME

    path = look.path
    if look.is_far:
        return True
    return (path / INDEX_NAME).exists() if look.is_dir else path.name == INDEX_NAME or bool(backend_in(look))


def headerless_name(look: Look, backend: str = "auto") -> str:
    """Return the name of the format of files without a header at a path; files that have one are refused.

    Parameters
    ----------
    backend
        The format that is asked for, or "auto".

    Raises
    ------
    ArgumentError
        If they have a header, by which their dtype is known.
    BackendError
        If they are not of this machine, or the files of `backend` have a header.
    """
    from zb_hdf5.spec import STREAM_LAYOUT
    from zb_hdf5.store.found_store import stores_at

    path = look.path
    if look.is_far:
        raise BackendError(f"{path}: source_dtype needs files of this machine, found a URL", options=["source_dtype"])
    if look.is_dir:
        known = "store" if stores_at(path) else ""
        if not known and (flat := flat_at(look)):
            known = flat.code.name
    else:
        known = backend_in(look) or _flat_name_in(look)
    line = ""
    if not known and (rows := rows_at(look)):
        known = rows.backend
        line = f", and convert it: {conversion_call(path, STREAM_LAYOUT)}"
    if known:
        raise ArgumentError(
            f"{path}: source_dtype is for files without a header, found {known!r}: leave it out{line}",
            options=["source_dtype"],
        )
    name = headerless_name_of(look) if backend == "auto" else backend
    if name not in FORMATS or not FORMATS[name].lacks_header:
        raise BackendError(
            f"{path}: asked for backend {backend!r}, whose files have a header: leave out source_dtype",
            options=["source_dtype"],
        )
    return name


def _flat_name_in(look: Look) -> str:
    """Return the name of the flat format of a file with a header, whatever its suffix is; "": none."""
    return next((name for name in flat_formats() if (each := flat_format(name)) and each.fits(look)), "")


def headerless_name_of(look: Look) -> str:
    """Return the name of the format of files without a header: by their suffix, or by those in a folder."""
    names = [name for name, row in FORMATS.items() if row.lacks_header]
    return next((name for name in names if _has_suffix(look, FORMATS[name].suffixes)), names[-1])


def named_by_prefix(path: Path) -> Path:
    """Return the file of ids that a path without an ending stands for, as `--data-path` of Megatron takes it.

    That is `corpus.bin` beside `corpus.idx`, or `corpus.ds` beside `corpus.ds.index`; any other path is returned.
    """
    if isinstance(path, RemotePath) or not path.name or path.exists():
        return path
    for ids, documents in PREFIX_ENDINGS:
        found = path.with_name(path.name + ids)
        if found.is_file() and path.with_name(path.name + documents).is_file():
            return found
    return path


# --- files of rows, and files of packages --------------------------------------------------------------------------


def rows_at(look: Look) -> Found | None:
    """Return the findings at a path of our formats whose documents are read once; None: it has others."""
    return next(filter(None, (found_rows(row, look) for row in FORMATS.values())), None)


def found_rows(row: FormatRow, look: Look, read_as: ReadAs = AS_STORED) -> Found | None:
    """Return the findings at a path whose documents are read once by one format; None: it has others."""
    return load_format(row, read_as).recognise(look) if row.is_of_rows and may_hold(row, look) else None


def ends_so(look: Look, suffixes: tuple[str, ...]) -> bool:
    """Return whether a path, or a file in or below a folder, has one of the suffixes; a plain `.json` may be anything.

    Files in a store do not count.
    """
    from zb_hdf5.files.listing import listed

    known = tuple(suffix for suffix in suffixes if suffix != JSON_SUFFIX)
    if look.path.name.lower().endswith(known):
        return True
    return look.is_dir and bool(listed(look, *known).names)


def installed_name_of(look: Look, notes: list[str]) -> str:
    """Return the name of the format of an installed package that a path holds; "": none. Those that fail add notes."""
    add_installed()
    notes += INSTALLED.notes
    rows = INSTALLED.rows
    return first_of(rows, lambda name: bool(flat_files(name, look)) or found_rows(rows[name], look) is not None, notes)
