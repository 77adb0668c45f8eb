"""A small object as a local file: the tables beside the tokens are looked up again and again."""

from __future__ import annotations

import os
import shutil
import tempfile

from zb_hdf5.files.extent_file import ExtentFile
from zb_hdf5.files.identity import Identity
from zb_hdf5.files.objects import RemoteObject


class FetchedFile(ExtentFile):
    """An object that is fetched whole, when it is opened, into a temporary file without a name. See `ExtentFile`.

    A pickled copy fetches it again, and refuses another one.
    """

    def _descriptor(self) -> int:
        source, free = RemoteObject(str(self._path), self._known), shutil.disk_usage(tempfile.gettempdir()).free
        with tempfile.TemporaryFile(prefix="zb-") as file:
            for part in source.parts(max_bytes=free):
                file.write(part)
            file.flush()
            return os.dup(file.fileno())

    @property
    def identity(self) -> Identity:
        """Size and ETag of the object, which was compared when it was fetched."""
        assert self._known is not None
        return self._known

    def _require_identity(self) -> None:
        pass
