"""The old files of a result that has several: they are aside until the new ones have their names.

`D.bin` and `D.idx` are there when the file of the ids is, `D.bin`. The old files move into the folder
`.D.bin.replacing`, that of the ids first; the folder becomes `.D.bin.replaced` when it has all of them; the new files
get their names, that of the ids last; the folder goes. Each step is one rename. A kill between two of them leaves the
file of the ids with its own files, or no such file, and the name of the folder tells the next writer how far it came.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from zb_hdf5.errors import ConvertError
from zb_hdf5.files.paths import on_failure

REPLACING_SUFFIX: Final = ".replacing"
REPLACED_SUFFIX: Final = ".replaced"


class ReplacedFiles:
    """The old files of one result. Its writer holds the lock of the partial of the file of the ids.

    Parameters
    ----------
    path
        The file of the ids.
    sidecars
        All files that may belong to it.
    """

    def __init__(self, path: Path, sidecars: Iterable[Path]) -> None:
        self._path = path
        self._sidecars = tuple(sidecars)
        self._some = hidden_path(path, REPLACING_SUFFIX)
        self._all = hidden_path(path, REPLACED_SUFFIX)

    @property
    def has_sidecars(self) -> bool:
        """Whether there are files that belong to the one of the ids, or would belong to a new one."""
        return any(map(os.path.lexists, self._sidecars))

    @property
    def folders(self) -> tuple[Path, Path]:
        """The hidden folders in which the old files are: some of them, or all."""
        return self._some, self._all

    def move_aside(self) -> None:
        """Move the old files aside; there may be none."""
        self._some.mkdir()
        for file in (self._path, *self._sidecars):
            with suppress(FileNotFoundError):
                os.replace(file, self._some / file.name)
        os.replace(self._some, self._all)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Keep the old files aside inside the block, which moves the new ones in; put them back if it fails."""
        with on_failure(self.put_back):
            self.move_aside()
            yield
        self.remove()

    def put_back(self) -> bool:
        """Undo the work of a killed writer, and return whether new files were removed for it.

        Old files go where the new ones are whole. This may be killed as well: the file of the ids moves last, and the
        folder of all becomes one of some before.
        """
        is_begun = _is_there(self._all)
        if is_begun:
            if os.path.lexists(self._path):
                self.remove()
                return False
            for file in self._sidecars:  # of the new ones
                file.unlink(missing_ok=True)
            os.replace(self._all, self._some)
        if _is_there(self._some):
            for file in (*self._sidecars, self._path):
                with suppress(FileNotFoundError):
                    os.replace(self._some / file.name, file)
            self._some.rmdir()
        return is_begun

    def remove(self) -> None:
        """Remove the old files: the new ones have their names. A killed writer may have left them."""
        if _is_there(self._all):
            shutil.rmtree(self._all, ignore_errors=True)  # a process that is refused removes them, too


def hidden_path(path: Path, suffix: str) -> Path:
    """Return the path of a hidden folder beside a file or folder."""
    return path.with_name(f".{path.name}{suffix}")


def owner_of(name: str) -> str:
    """Return the name of the file whose old files a hidden folder has; any other name as it is."""
    for suffix in (REPLACING_SUFFIX, REPLACED_SUFFIX):
        if name.startswith(".") and name.endswith(suffix):
            return name[1:].removesuffix(suffix)
    return name


def _is_there(folder: Path) -> bool:
    """Return whether there is such a folder; `ConvertError` for a link, which may lead anywhere."""
    if folder.is_symlink():
        raise ConvertError(f"{folder}: expected the old files of a killed conversion, found a link; remove it")
    return folder.is_dir()
