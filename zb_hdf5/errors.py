"""Every error this package raises on purpose.

::

    ZbError                    exit code 1
    ├── ArgumentError    (ValueError)   2  an argument that is not possible
    ├── FormatError      (ValueError)   1  malformed bytes: wrong magic, header, index, layout
    │   └── IncompleteError             4  truncated, or its writer has not finished
    ├── ChecksumError    (ValueError)   3  the bytes are not the ones that were written
    ├── StateError       (ValueError)   1  a checkpoint of another dataset, seed or order
    ├── BackendError     (ValueError)   1  the backend or access asked for cannot serve this file
    │   ├── UnavailableError            5  this machine lacks something: a lock, a filter, a package,
    │   │                               a server that answers
    │   └── UnverifiableError           6  nothing is stored that the bytes could be compared with
    ├── ConvertError     (ValueError)   1  a source cannot be converted as asked
    │   └── ExistsError  (FileExistsError)  1  the destination exists already
    ├── BatchIndexError  (IndexError)   1  no batch has this index
    └── ClosedError      (ValueError)   1  the reader or writer was closed

Each message states the path, the expected and the found value and, where one exists, the command that helps.
`OSError` passes through unchanged. The command line exits with `exit_code`.
"""

from __future__ import annotations

from typing import ClassVar


class ZbError(Exception):
    """Base of every error raised on purpose."""

    exit_code: ClassVar[int] = 1


class ArgumentError(ZbError, ValueError):
    """An argument is not possible."""

    exit_code = 2


class FormatError(ZbError, ValueError):
    """The bytes on disk do not follow the format."""


class IncompleteError(FormatError):
    """The file or store is truncated, or its writer has not finished."""

    exit_code = 4


class ChecksumError(ZbError, ValueError):
    """The bytes on disk are not the bytes that were written."""

    exit_code = 3


class StateError(ZbError, ValueError):
    """A loader state belongs to another dataset, seed or order."""


class BackendError(ZbError, ValueError):
    """The backend or access that was asked for cannot serve this file."""


class UnavailableError(BackendError):
    """This machine lacks something the file needs: a lock, an HDF5 filter, a package, a server."""

    exit_code = 5


class UnverifiableError(BackendError):
    """Nothing is stored that the bytes could be compared with."""

    exit_code = 6


class ConvertError(ZbError, ValueError):
    """A source cannot be converted as asked."""


class ExistsError(ConvertError, FileExistsError):
    """The destination exists already."""


class BatchIndexError(ZbError, IndexError):
    """No batch has this index."""


class ClosedError(ZbError, ValueError):
    """The reader or writer was used after `close`."""
