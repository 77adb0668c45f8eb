"""The one look at a path: the formats of the list are asked for it in their order, and one of them has it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

from zb_hdf5.errors import ArgumentError, FormatError, Remedy, require_choice
from zb_hdf5.files.look import Look
from zb_hdf5.files.named_splits import AUTO_SPLIT
from zb_hdf5.files.paths import any_path, local_path, require_remote_access
from zb_hdf5.files.publishing import require_present
from zb_hdf5.formats.access import require_options
from zb_hdf5.formats.format import Found
from zb_hdf5.read_as import AS_STORED, ReadAs, require_read_as
from zb_hdf5.spec import DEFAULT_SPLIT
from zb_hdf5.store.digests import needs_no_digests
from zb_hdf5.store.format_list import (
    INSTALLED,
    batch_formats,
    flat_format,
    flat_formats,
    format_without_digests,
)
from zb_hdf5.store.found_store import FoundStore, store_at
from zb_hdf5.store.lost_index import no_index
from zb_hdf5.store.recognition import (
    formats_at,
    named_by_prefix,
    no_known_file,
    require_datasets,
)
from zb_hdf5.store.way_in import not_in_place, way_of_documents
from zb_hdf5.trainers.installed_formats import with_notes


def look_of(path: str | os.PathLike[str]) -> Look:
    """Return a look at a path, or at the file of ids that it stands for. Nothing is opened yet."""
    return Look(named_by_prefix(any_path(path)))


def found_at(
    path: str | os.PathLike[str],
    *,
    backend: str = "auto",
    access: str = "auto",
    verify: str = "auto",
    read_as: ReadAs = AS_STORED,
    split: str | None = AUTO_SPLIT,
    look: Look | None = None,
) -> Found:
    """Look at a path once, and return what is there. It takes the arguments of `open_reader`.

    Parameters
    ----------
    look
        A look at the path that somebody has begun, and ends; None: begin one.

    Raises
    ------
    ArgumentError
        If an argument is not possible, axes are named of a stream, or `source_dtype` of files with a header.
    BackendError
        If the files have another format than `backend`, a dataset is named of anything but an HDF5 file, or digests of
        files that have their own.
    FormatError
        If it is neither a known file nor a store, or its tokens are damaged.
    NotFoundError
        If there is no such file or folder.
    """
    path = named_by_prefix(any_path(path)) if look is None else look.path
    require_options(access, verify)
    _require_backend_name(backend)
    require_read_as(read_as)
    require_remote_access(path, access)
    require_present(path)
    with Look(path) if look is None else nullcontext(look) as look:
        require_datasets(look, read_as)
        found = _found_in(look, backend, read_as, split)
        if read_as.digests is not None:
            if not found.takes_digests:
                raise needs_no_digests(path, read_as.digests)
            local_path(read_as.digests)
            found = _without_digests(look, found, read_as)
    if isinstance(found, FoundStore) and split == AUTO_SPLIT:
        split = None
    return replace(found, access=access, verify=verify, read_as=read_as, split=split)


def _require_backend_name(backend: str) -> None:
    """Raise `ArgumentError` for a backend that neither we nor an installed package have."""
    if backend == "auto":
        return
    ours = tuple(dict.fromkeys(("auto", *batch_formats(), *flat_formats())))
    if backend in ours or flat_format(backend) is not None:
        return
    try:
        require_choice("backend", backend, ours)
    except ArgumentError as error:
        raise with_notes(error, INSTALLED.notes) from None


def _found_in(look: Look, backend: str, read_as: ReadAs, split: str | None) -> Found:
    """Ask for a store, our formats, and those of packages, in this order: a store has files that others would take."""
    store = None if read_as.lacks_header else store_at(look.path, backend)
    if store is not None:
        return store
    notes: list[str] = []
    with _noting_documents(look, read_as):
        for code in formats_at(look, read_as, backend, notes):
            found = code.recognise(look, code.name if read_as.lacks_header else backend, split)
            if found is not None:
                return found
    raise with_notes(_unknown(look), notes)


@contextmanager
def _noting_documents(look: Look, read_as: ReadAs) -> Iterator[None]:
    """Add a note to the error of HDF5 files whose tokens are not told: the line for documents that are converted."""
    try:
        yield
    except FormatError as error:
        is_not_told = error.remedy in (Remedy.DATASET, Remedy.CONVERT) and not read_as.names_dataset
        if is_not_told and (documents := way_of_documents(look)):
            error.add_note(str(documents))
        raise


def _unknown(look: Look) -> FormatError:
    """Return the error of a path that no format has."""
    return not_in_place(look) or (no_index(look.path) if look.is_dir else no_known_file(look))


def _without_digests(look: Look, found: Found, read_as: ReadAs) -> Found:
    """Return a path whose files hold no digests as files that are compared with those that were made."""
    flat = None if found.column is None else format_without_digests(found.backend, read_as)
    if flat is None:
        return found
    files = (os.fspath(found.path),)
    facts = flat.facts_of(look, files)  # looks at its axes, too
    return replace(found, column=None, files=files, facts=facts, splits=(DEFAULT_SPLIT,) * len(facts))
