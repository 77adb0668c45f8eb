"""Files that are named as fields of ids are, such as `loss_mask.npy` beside `input_ids.npy`: they hold no ids."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from zb_hdf5.errors import FormatError
from zb_hdf5.files.named_splits import telling_parts

#: The words of fields in the name of a file, or of a folder; `_`, `-`, `.` or nothing stands between two of them.
_FIELD: Final = re.compile(
    r"""(?<![^\W\d_])(
        labels?                                               # also labels_mask
        | ((labels?|loss|attention|attn|pad|padding)[\W_]?)?masks?
        | loss[\W_]?weights?
        | positions?[\W_]?ids?
        | (token[\W_]?type|segment)[\W_]?ids?
        | targets
    )(?![^\W\d_])""",
    re.IGNORECASE | re.VERBOSE,
)


#: Each field has one of these in it.
_PARTS: Final = ("label", "mask", "weight", "position", "type", "segment", "targets")


def is_named_as_field(name: str) -> bool:
    """Return whether a name has the words of a field, each parted from others by anything that is no letter."""
    text = name.lower()
    return any(part in text for part in _PARTS) and _FIELD.search(text) is not None


def ids_among(files: Sequence[Path], paths: Sequence[Path]) -> list[Path]:
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
    return found or (list(files) if set(files) <= set(paths) else [])


def require_no_fields(files: Sequence[Path], ids: Sequence[Path], paired: Iterable[Path] = ()) -> None:
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
    known = {*ids, *paired}
    for file in files:
        if file not in known:
            such = f", such as {ids[0]}" if ids else ""
            raise FormatError(
                f"{file}: is named as a field, and its values are no ids: name the files of ids{such}, or move it to "
                "another folder"
            )


def ids_at(files: Sequence[Path], paths: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """Return the files of ids, of a format that has no place for fields in other files. Raises `require_no_fields`."""
    ids = ids_among(files, [Path(path) for path in paths])
    require_no_fields(files, ids)
    return ids


def require_no_masks(files: Iterable[tuple[str | os.PathLike[str], np.dtype[Any]]]) -> None:
    """Raise `FormatError` for a file with values of one byte beside files of wider ids: it is a mask.

    Parameters
    ----------
    files
        Each file, and its dtype.
    """
    known = list(files)
    wide = next((each for each in known if each[1].itemsize > 1), None)
    small = next((each for each in known if each[1].itemsize == 1), None)
    if wide is not None and small is not None:
        raise FormatError(
            f"{os.fspath(small[0])}: expected ids of more than one byte, as {os.path.basename(wide[0])} has them in "
            f"{wide[1]}, found {small[1]}, as a mask has: name the files of ids, such as {os.fspath(wide[0])}, or move "
            "it to another folder"
        )
