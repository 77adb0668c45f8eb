"""Objects in buckets and behind HTTP, read by ranges: what `obstore` answers, and what its errors mean."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

from zb_hdf5.errors import ArgumentError, ExistsError, FormatError, IncompleteError, UnavailableError
from zb_hdf5.files.object_library import MAX_READS, Folder, first_line, folder_of

if TYPE_CHECKING:  # numpy too is imported when it is needed: the command line knows of files before it reads one
    import numpy as np
    import numpy.typing as npt

SCHEMES: Final = ("s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss", "http", "https")
#: Bytes and reads that are kept under way to fill a long line: 32 MiB at 20 ms are 1.6 GB/s.
IN_FLIGHT: Final = (32 << 20, MAX_READS)
#: What a file-like object reads at once: the metadata of an HDF5 file lie together in its head.
BLOCK_BYTES: Final = 256 << 10
#: Blocks that a file-like object keeps.
MAX_BLOCKS: Final = 64
#: Parts of a multipart upload.
PART_BYTES: Final = 16 << 20
#: A body that was cut is asked for again: `obstore` retries requests, and not always what follows their headers.
BODY_ATTEMPTS: Final = 4

_STATUS: Final = re.compile(r"status code: (\d{3})")
#: Where a library looks for credentials last: what the provider of the machine knows.
_ASKS_MACHINE: Final = re.compile("/latest/(api/token|meta-data)|/computeMetadata/|/metadata/identity")


class RemoteObject:
    """The bytes of one object, which never change under the reader: it is known by its size and ETag.

    Thread-safe; usable after fork; picklable (a copy refuses another object). Each read is a ranged `get` on condition
    of the ETag that was seen first; without one, or with a weak one, the answers are compared.

    Parameters
    ----------
    url
        Of the object.
    identity
        (num_bytes, ETag) of the object that was looked at before; None: whatever is there now.
    num_bytes
        The size that it is expected to have; None: not known.
    """

    def __init__(self, url: str, identity: tuple[Any, ...] | None = None, num_bytes: int | None = None) -> None:
        self.name, self._known, self._expected = url, identity, num_bytes
        folder, _, key = url.rpartition("/")
        self._folder_url = folder
        self._key = unquote(key) if url.startswith("http") else key
        if "://" not in folder or not key or folder.endswith(":/"):
            raise ArgumentError(f"{url}: expected the URL of an object, such as s3://bucket/folder/name")
        self._folder: Folder | None = None

    def _connection(self) -> Folder:
        folder = self._folder
        if folder is None or not folder.is_of_this_process:  # also after a fork
            folder = self._folder = folder_of(self._folder_url)
        return folder

    @property
    def identity(self) -> tuple[Any, ...]:
        """(num_bytes, ETag); asked for where no read has told it yet."""
        if self._known is None:
            folder = self._connection()
            try:
                self._take(folder.library.head(folder.store, self._key))
            except Exception as error:
                raise self._translated(error, "") from error
        assert self._known is not None
        return self._known

    @property
    def num_bytes(self) -> int:
        """Size of the object."""
        return int(self.identity[0])

    def read(self, start: int, stop: int, *, whole: bool = True) -> memoryview:
        """Return some bytes, read-only, by one request.

        Parameters
        ----------
        whole
            False: fewer are returned where the object ends before `stop`.

        Raises
        ------
        IncompleteError
            If the object ends before `stop`.
        FormatError
            If it is another object than at first.
        UnavailableError
            If there are no credentials, no permission, or no server that answers.
        FileNotFoundError
            If there is none.
        """
        what = f"bytes {start:,} to {stop:,}"
        data = self._get({"range": (start, stop)}, what)
        if len(data) < min(stop, self.num_bytes) - start or (whole and len(data) < stop - start):
            raise IncompleteError(
                f"{self.name}: expected {what}, found {len(data):,} bytes of them: the object has {self.num_bytes:,}; "
                "restore it"
            )
        return data

    def read_all(self) -> memoryview:
        """Return the whole object, by one request. Raises as `read` does."""
        data = self._get({}, "the whole object")
        if len(data) != self.num_bytes:
            raise IncompleteError(f"{self.name}: expected {self.num_bytes:,} bytes, found {len(data):,}")
        return data

    def read_ranges(self, ranges: Sequence[tuple[int, npt.NDArray[Any]]]) -> None:
        """Fill each array with the bytes from its offset on: those that touch by one request, all at the same time."""
        read_objects([(self, ranges)])

    def _fill(self, group: list[tuple[int, npt.NDArray[np.uint8]]]) -> None:
        start, stop = group[0][0], max(offset + len(out) for offset, out in group)
        import numpy as np

        data = np.frombuffer(self.read(start, stop), np.uint8)
        for offset, out in group:
            out[...] = data[offset - start : offset - start + len(out)]

    def _get(self, options: dict[str, Any], what: str) -> memoryview:
        tag = self._known[1] if self._known else None
        if tag and tag.startswith('"'):  # a weak one never matches
            options["if_match"] = tag
        for attempt in range(BODY_ATTEMPTS):
            folder = self._connection()
            try:
                answer = folder.library.get(folder.store, self._key, options=options)
            except Exception as error:
                raise self._translated(error, what) from error
            self._take(answer.meta)
            start, stop = answer.range
            if (wanted := options.get("range")) and (start, min(stop, wanted[1])) != (wanted[0], stop):
                raise FormatError(f"{self.name}: expected {what}, the server sent {start:,} to {stop:,}")
            try:
                data = memoryview(answer.bytes())
            except Exception as error:
                if attempt + 1 == BODY_ATTEMPTS:
                    raise self._translated(error, what) from error
                continue
            if len(data) == stop - start:
                return data
        raise IncompleteError(f"{self.name}: expected {what}, found {len(data):,} bytes in the answer; try again")

    def _take(self, meta: Mapping[str, Any]) -> None:
        """Note which object has answered, or compare it with the first one."""
        found = (int(meta["size"]), meta["e_tag"] or str(meta["last_modified"]))
        if self._expected not in (None, found[0]):
            kind = IncompleteError if found[0] < (self._expected or 0) else FormatError
            raise kind(f"{self.name}: expected {self._expected:,} bytes, found {found[0]:,}; restore it")
        if self._known is None:
            self._known = found
        if found != self._known:
            raise self._changed(f"found {found}")

    def _changed(self, found: str) -> FormatError:
        return FormatError(
            f"{self.name}: changed since it was opened: expected (bytes, ETag) {self._known}, {found}; open it again"
        )

    def _translated(self, error: Exception, what: str) -> Exception:
        """Return our error for one of `obstore`: by its class, and by the status where the class says nothing."""
        name, text, found = self.name, first_line(error), _STATUS.search(str(error))
        status = int(found[1]) if found else 0
        kind = type(error).__name__
        if isinstance(error, FileNotFoundError):
            if "NoSuchBucket" in str(error) or "ContainerNotFound" in str(error):
                return UnavailableError(f"{name}: its bucket does not exist: {text}")
            return FileNotFoundError(2, "no such object", name)
        if kind == "PreconditionError":
            return self._changed("found another one")
        if _is_denied(error):
            return UnavailableError(f"{name}: access denied: expected credentials that allow it: {text}")
        if status == 416:
            return IncompleteError(f"{name}: expected {what}, the object ends before: it was cut short; restore it")
        if kind == "NotSupportedError":
            return UnavailableError(f"{name}: expected a server that answers ranged reads: {text}")
        if _ASKS_MACHINE.search(text):
            return UnavailableError(f"{name}: expected credentials in the variables of its store, found none: {text}")
        return UnavailableError(f"{name}: expected {what or 'an answer'}, found: {text}")

    def close(self) -> None:
        """Let go of the connection."""
        self._folder = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_folder": None}


def read_objects(reads: Sequence[tuple[RemoteObject, Sequence[tuple[int, npt.NDArray[Any]]]]]) -> None:
    """Read ranges of several objects, all at the same time. See `RemoteObject.read_ranges`."""
    jobs = [(source, group) for source, ranges in reads for group in _merged(ranges)]
    if len(jobs) == 1:
        jobs[0][0]._fill(jobs[0][1])
    elif jobs:
        pool = jobs[0][0]._connection().pool
        futures = [pool.submit(source._fill, group) for source, group in jobs]
        wait(futures)  # also after an error: the arrays are the caller's again
        for future in futures:
            future.result()


def _is_denied(error: BaseException | None) -> bool:
    found = _STATUS.search(str(error))
    by_class = type(error).__name__ in ("UnauthenticatedError", "PermissionDeniedError")
    return by_class or (found is not None and found[1] in ("401", "403"))


def object_exists(url: str) -> bool:
    """Return whether there is an object that may be looked at."""
    try:
        return object_size(url) is not None
    except UnavailableError as error:
        if _is_denied(error.__cause__):
            return False
        raise


def object_size(url: str) -> int | None:
    """Return the size of an object, or None if there is none."""
    try:
        return RemoteObject(url).num_bytes
    except FileNotFoundError:
        return None


def put_object(url: str, content: Path | bytes, *, new: bool = False) -> None:
    """Upload a file in parts, or some bytes.

    Raises
    ------
    ExistsError
        With `new`, if there is an object of this name already.
    UnavailableError
        If the server refuses, or does not answer.
    """
    target = RemoteObject(url)
    folder = target._connection()
    how = {"mode": "create"} if new else {"chunk_size": PART_BYTES}
    try:
        folder.library.put(folder.store, target._key, content, **how)
    except Exception as error:
        if type(error).__name__ == "AlreadyExistsError":
            raise ExistsError(f"{url}: exists already") from error
        raise target._translated(error, "to write it") from error


def delete_object(url: str) -> None:
    """Delete an object, if it is there. Raises as `put_object`."""
    target = RemoteObject(url)
    folder = target._connection()
    try:
        folder.library.delete(folder.store, target._key)
    except FileNotFoundError:
        pass
    except Exception as error:
        raise target._translated(error, "to delete it") from error


def _merged(ranges: Sequence[tuple[int, npt.NDArray[Any]]]) -> Iterator[list[tuple[int, npt.NDArray[np.uint8]]]]:
    """Yield groups of ranges that touch or overlap, as arrays of bytes."""
    group: list[tuple[int, npt.NDArray[np.uint8]]] = []
    end = -1
    for offset, out in sorted(ranges, key=lambda each: each[0]):
        if not out.size:
            continue
        if group and offset > end:
            yield group
            group = []
        group.append((offset, out.reshape(-1).view("u1")))
        end = max(end, offset + out.nbytes) if len(group) > 1 else offset + out.nbytes
    if group:
        yield group


class ObjectFile(io.RawIOBase):
    """An object as a file for h5py and others: whole blocks are read, and some of them kept."""

    def __init__(self, source: RemoteObject) -> None:
        self.source = source
        self._place = 0
        self._blocks: dict[int, memoryview] = {}

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._place}.get(whence)
        self._place = (self._size() if start is None else start) + offset
        return self._place

    def tell(self) -> int:
        return self._place

    def _size(self) -> int:
        if not self._blocks:
            self._block(0)  # it is wanted next, and tells the size
        return self.source.num_bytes

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        stop = min(self._size(), self._place + len(view))
        count = max(0, stop - self._place)
        if count > BLOCK_BYTES:
            view[:count] = self.source.read(self._place, stop)
            self._place = stop
        while self._place < stop:
            number, within = divmod(self._place, BLOCK_BYTES)
            part = self._block(number)[within : within + stop - self._place]
            done = count - (stop - self._place)
            view[done : done + len(part)] = part
            self._place += len(part)
        return count

    def _block(self, number: int) -> memoryview:
        data = self._blocks.get(number)
        if data is None:
            if len(self._blocks) == MAX_BLOCKS:
                self._blocks.pop(next(iter(self._blocks)))
            start = number * BLOCK_BYTES
            data = self._blocks[number] = self.source.read(start, start + BLOCK_BYTES, whole=False)
        return data

    def close(self) -> None:
        if not self.closed:
            self.source.close()
        super().close()
