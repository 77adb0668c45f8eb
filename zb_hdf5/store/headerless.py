"""The format of files without a header, whose ids the user names; files that have one are refused."""

from __future__ import annotations

from zb_hdf5.errors import ArgumentError, BackendError, conversion_call
from zb_hdf5.files.look import Look
from zb_hdf5.formats.registry import backend_in
from zb_hdf5.read_as import AS_STORED, ReadAs
from zb_hdf5.spec import STREAM_LAYOUT
from zb_hdf5.store.both_formats import stores_by_format
from zb_hdf5.store.index import find_index
from zb_hdf5.trainers.trainer_formats import (
    TRAINER_FORMATS,
    flat_name_in,
    flat_name_of,
    headerless_name_of,
    source_name_of,
)


def headerless_name(look: Look, backend: str = "auto") -> str:
    """Return the name of the format of files without a header at a path.

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
    path = look.path
    if look.is_far:
        raise BackendError(f"{path}: source_dtype needs files of this machine, found a URL", options=["source_dtype"])
    if look.is_dir:
        known = "store" if find_index(path) or stores_by_format(path) else flat_name_of(look)
    else:
        known = backend_in(look) or flat_name_in(look)
    line = ""
    if not known and (known := source_name_of(look)):
        line = f", and convert it: {conversion_call(path, STREAM_LAYOUT)}"
    if known:
        raise ArgumentError(
            f"{path}: source_dtype is for files without a header, found {known!r}: leave it out{line}",
            options=["source_dtype"],
        )
    name = headerless_name_of(look) if backend == "auto" else backend
    if name not in TRAINER_FORMATS or not TRAINER_FORMATS[name].lacks_header:
        raise BackendError(
            f"{path}: asked for backend {backend!r}, whose files have a header: leave out source_dtype",
            options=["source_dtype"],
        )
    return name


def flat_name(look: Look, read_as: ReadAs = AS_STORED) -> str:
    """Return the name of the flat format that a path holds; "": none. Raises as `headerless_name`."""
    return headerless_name(look) if read_as.lacks_header else flat_name_of(look)
