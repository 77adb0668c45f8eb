"""Paths: of this machine, and no URLs."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from zb_hdf5.errors import ArgumentError

_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of a file or folder of this machine.

    Raises
    ------
    ArgumentError
        If it is a URL: a path would lose one of its slashes, and then not be found.
    """
    if _URL.match(os.fspath(path)):
        raise ArgumentError(f"{path}: is a URL: expected a file or folder of this machine")
    return Path(path)
