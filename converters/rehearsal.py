"""A rehearsal: about a second of the work of a conversion, by which the time of the whole work is estimated."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Self

import numpy.typing as npt

from zb_hdf5.files.checked import crc32_of
from zb_hdf5.files.codecs import Encoder
from zb_hdf5.files.publishing import write_fully
from zb_hdf5.spec import NO_CODEC

#: Seconds of work that stand for the whole.
SAMPLE_S: Final = 1.0
#: Bytes of the file, which is written again from its start.
FILE_BYTES: Final = 64 << 20


class Rehearsal:
    """Hashes tokens and writes them to a file without a name, which is gone with the process. A context manager.

    Parameters
    ----------
    folder
        The place of the result. On a file system that has no files without a name nothing is written.
    codec
        The codec by which the tokens are packed too.
    """

    def __init__(self, folder: Path, codec: str = NO_CODEC) -> None:
        self._encoder = None if codec == NO_CODEC else Encoder(codec)
        try:
            self._fd = os.open(folder, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        except OSError:
            self._fd = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        self._place = 0
        self._num_bytes = 0
        self._written_s = 0.0
        self._begin_s = time.monotonic()
        self.seconds = 0.0

    @property
    def is_over(self) -> bool:
        """Whether the time for it is over."""
        return time.monotonic() - self._begin_s >= SAMPLE_S

    def write(self, batches: npt.NDArray[Any]) -> None:
        """Hash the tokens of batches, or of documents, and write them."""
        begin_s = time.monotonic()
        flat = batches.reshape(len(batches), -1)
        hashlib.sha256(flat).digest()
        crc32_of(flat)
        chunks: Iterable[tuple[Any, int]] = ((flat, 0),) if self._encoder is None else self._encoder(flat)
        for chunk, _ in chunks:
            self._put(chunk)
        self._num_bytes += flat.nbytes
        self._written_s += time.monotonic() - begin_s

    def _put(self, data: Any) -> None:
        if self._place > FILE_BYTES:
            self._place = 0
        with suppress(OSError):  # the disk is full, which the plan names
            write_fully(self._fd, data, self._place)
        self._place += memoryview(data).nbytes

    def seconds_of(self, share: float, more_bytes: int, workers: int) -> float:
        """Return about how long some processes take for all of the work.

        Parameters
        ----------
        share
            The part of all that was rehearsed.
        more_bytes
            Bytes that the conversion writes besides: temporary files.
        workers
            The processes, each as fast as this one.
        """
        again_s = more_bytes * self._written_s / self._num_bytes if self._num_bytes else 0.0
        return (self.seconds / share + again_s) / workers if share else 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        begin_s = time.monotonic()
        with suppress(OSError):
            os.fsync(self._fd)
        os.close(self._fd)
        if self._encoder is not None:
            self._encoder.close()
        end_s = time.monotonic()
        self._written_s += end_s - begin_s
        self.seconds = end_s - self._begin_s
