"""Files that are named as fields of ids, or as facts about their documents: `loss_mask.npy` holds no ids.

Neither does a file of another dtype than the rest.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from zb_hdf5.errors import FormatError
from zb_hdf5.files.named_splits import AnyPath, telling_parts

#: The words of fields, and of the lengths of documents, in the name of a file, or of a folder; `_`, `-`, `.` or nothing
#: stands between two of them.
_FIELD: Final = re.compile(
    r"""(?<![^\W\d_])(
        labels?                                               # also labels_mask
        | ((labels?|loss|attention|attn|pad|padding)[\W_]?)?masks?
        | ((loss|sample|token)[\W_]?)?weights
        | loss[\W_]?weight
        | positions?[\W_]?ids?
        | (token[\W_]?type|segment|doc|document)[\W_]?ids?
        | ((doc|document|seq|sequence|sample)[\W_]?)?(offsets|lengths|lens)
        | cu[\W_]?seqlens
        | targets
    )(?![^\W\d_])""",
    re.IGNORECASE | re.VERBOSE,
)


#: Each field has one of these in it.
_PARTS: Final = ("label", "mask", "weight", "position", "type", "segment", "doc", "offset", "len", "targets")


def is_named_as_field(name: str) -> bool:
    """Return whether a name has the words of a field, each parted from the next by anything but letters."""
    text = name.lower()
    return any(part in text for part in _PARTS) and _FIELD.search(text) is not None


def ids_among(files: Sequence[AnyPath], paths: Sequence[str | os.PathLike[str]]) -> list[AnyPath]:
    """Return the files that are not named as fields; all, if each one was named by the user, and is a field.

    Parameters
    ----------
    files
        The files.
    paths
        The paths, as the user has named them, which stand for the files.
    """
    parts = telling_parts(files, paths)
    if not is_named_as_field("/".join(parts)):  # the usual case, of all names at once
        return list(files)
    found = [file for file, part in zip(files, parts, strict=True) if not is_named_as_field(part)]
    return found or (list(files) if {*map(str, files)} <= {*map(str, paths)} else [])


def require_no_fields(files: Sequence[AnyPath], ids: Sequence[AnyPath], paired: Iterable[AnyPath] = ()) -> None:
    """Raise `FormatError` for a file that is named as a field, and that no file of ids has beside it.

    Parameters
    ----------
    files
        All files.
    ids
        Those of ids.
    paired
        The files of fields that belong to one of ids.
    """
    if len(ids) == len(files):  # the usual case: to hash thousands of paths takes as long as to list them
        return
    known = {*ids, *paired}
    for file in files:
        if file not in known:
            such = f", such as {ids[0]}" if ids else ""
            raise FormatError(
                f"{file}: is named as a field, and its values are not ids: name the files of ids{such}, or move it to "
                "another folder"
            )


def ids_at(files: Sequence[Path], paths: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """Return the files of ids, of a format that has no place for fields in other files. Raises `require_no_fields`."""
    ids = ids_among(files, [Path(path) for path in paths])
    require_no_fields(files, ids)
    return ids


def require_one_dtype(
    files: Iterable[tuple[str | os.PathLike[str], np.dtype[Any]]], named: Sequence[str | os.PathLike[str]] = ()
) -> None:
    """Raise `FormatError` for a file whose values have another dtype than the ids of the rest: they are a field.

    Files that the user has named, each by itself, may have ids of several dtypes; one of a byte for each id beside
    wider ones is a mask even then.

    Parameters
    ----------
    files
        Each file, and its dtype.
    named
        The paths, as the user has named them.
    """
    known = [*files]
    native = {dtype: dtype.newbyteorder("=") for dtype in {dtype for _, dtype in known}}  # of thousands of files
    if len({*native.values()}) < 2:
        return
    known = [(path, native[dtype]) for path, dtype in known]
    counts = Counter(dtype for _, dtype in known)
    usual = max(counts, key=lambda dtype: (dtype.itemsize > 1, counts[dtype]))
    of_ids = next(path for path, dtype in known if dtype == usual)
    told = {os.fspath(path) for path in named}
    for path, dtype in known:
        is_mask = dtype.itemsize == 1
        if dtype != usual and (is_mask or os.fspath(path) not in told):
            words = ", as a mask has" if is_mask else ", as a field, or another corpus, has"
            raise FormatError(
                f"{os.fspath(path)}: expected ids of {usual}, as {os.path.basename(of_ids)} has them, found {dtype}"
                f"{words}: name the files of ids, such as {os.fspath(of_ids)}, or move it to another folder"
            )
