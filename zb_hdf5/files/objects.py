"""Objects in buckets and behind HTTP, read by ranges: bounded answers, one time limit for each read, our errors."""

from __future__ import annotations

import contextlib
import io
import os
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar
from urllib.parse import unquote

from zb_hdf5.errors import ArgumentError, ExistsError, FormatError, IncompleteError, UnavailableError, ZbError
from zb_hdf5.files.object_library import LIMIT_VARIABLE, MAX_READS, PREFIXES, Folder, first_line, folder_of

if TYPE_CHECKING:  # the command line imports this module, and reads nothing for most of its commands
    import numpy as np
    import numpy.typing as npt

Result = TypeVar("Result")
#: Ranges that touch or overlap, ascending.
Group: TypeAlias = "list[tuple[int, npt.NDArray[np.uint8]]]"

SCHEMES: Final = ("s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss", "http", "https")
#: Bytes and reads that are kept under way to fill a long line: 32 MiB at 20 ms are 1.6 GB/s.
IN_FLIGHT: Final = (32 << 20, MAX_READS)
#: Bytes that a file-like object reads at once: the metadata of an HDF5 file lie together in its head.
BLOCK_BYTES: Final = 256 << 10
#: Blocks that a file-like object keeps.
MAX_BLOCKS: Final = 64
#: Bytes of one request for a large object, and of one part of an upload: 30 s are enough for them at 280 kB/s.
PART_BYTES: Final = 8 << 20
#: The largest object that is read into memory whole: the index of a million shards has 240 MB.
MAX_WHOLE_BYTES: Final = 256 << 20
#: Attempts of one read; the pauses between them double, and take about 40 seconds of 180 in all.
ATTEMPTS: Final = 10
#: The first and the longest pause, as shares of the time limit.
FIRST_PAUSE, LONGEST_PAUSE = 1 / 1800, 1 / 12

_STATUS: Final = re.compile(r"status code: (\d{3})")
#: Statuses besides 5xx that may be another one later: timeout, too early, too many requests.
_PASSING: Final = frozenset({408, 425, 429})
#: Addresses that a library asks for credentials last: those of the machine's own provider.
_ASKS_MACHINE: Final = re.compile("/latest/(api/token|meta-data)|/computeMetadata/|/metadata/identity")


class RemoteObject:
    """The bytes of one object, which never change under the reader: its size and ETag identify it.

    Thread-safe; usable after fork; picklable (a copy refuses another object). Each read is a ranged `get` on condition
    of the ETag that was seen first; without one, or with a weak one, the answers are compared. No answer takes more
    memory than the range that was asked for. All attempts of one read together take at most the seconds of the variable
    ZB_REMOTE_TIMEOUT (180).

    Parameters
    ----------
    url
        Of the object.
    identity
        (num_bytes, ETag) of the object that was read before; None: the first answer identifies it.
    num_bytes
        The expected size; None: unknown.
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
        """(num_bytes, ETag); asked for unless a read has brought it."""
        if self._known is None:
            self._patiently("an answer", lambda folder: self._take(folder.library.head(folder.store, self._key)))
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
            If it is another object than at first, or the server sends another range or more than was asked for.
        UnavailableError
            If there are no credentials, no permission, or no server that answers within the time limit.
        FileNotFoundError
            If there is none.
        """
        return self._read(start, stop, time.monotonic(), whole=whole)

    def _read(self, start: int, stop: int, begun_s: float, *, whole: bool = True) -> memoryview:
        wanted = f"bytes {start:,} to {stop:,}"
        data = self._patiently(wanted, lambda folder: self._get(folder, start, stop, wanted), begun_s)
        if whole and len(data) < stop - start:
            raise IncompleteError(
                f"{self.name}: expected {wanted}, found {len(data):,} bytes of them: the object has "
                f"{self.num_bytes:,}; restore it"
            )
        return data

    def parts(self, start: int = 0, max_bytes: int | None = None) -> Iterator[memoryview]:
        """Yield all bytes from `start` on, 8 MiB at a time. Raises as `read`.

        Raises
        ------
        FormatError
            If the object has more than `max_bytes`.
        """
        while self._known is None or start < self.num_bytes:
            part = self.read(start, start + PART_BYTES, whole=False)
            if max_bytes is not None and self.num_bytes > max_bytes:
                raise FormatError(f"{self.name}: expected at most {max_bytes:,} bytes, found {self.num_bytes:,}")
            yield part
            start += len(part)

    def read_all(self) -> memoryview:
        """Return the whole object, of at most 256 MiB. Raises as `parts`."""
        parts = list(self.parts(max_bytes=MAX_WHOLE_BYTES))
        return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))

    def read_ranges(self, ranges: Sequence[tuple[int, npt.NDArray[Any]]]) -> None:
        """Fill each array with the bytes from its offset on: those that touch by one request, all at the same time."""
        read_objects([(self, ranges)])

    def fill(self, group: Group, begun_s: float) -> None:
        """Fill a group of ranges by one request."""
        import numpy as np

        start, stop = group[0][0], max(offset + len(out) for offset, out in group)
        found = np.frombuffer(self._read(start, stop, begun_s), np.uint8)
        for offset, out in group:
            out[...] = found[offset - start : offset - start + len(out)]

    def _get(self, folder: Folder, start: int, stop: int, wanted: str) -> memoryview:
        """Make one request for a range, and take no more of the answer."""
        options: dict[str, Any] = {"range": (start, stop)}
        tag = self._known[1] if self._known else None
        if tag and tag.startswith('"'):  # a weak one never matches
            options["if_match"] = tag
        asked_s = time.monotonic()
        answer = folder.library.get(folder.store, self._key, options=options)
        folder.note_answer(time.monotonic() - asked_s)
        self._take(answer.meta)
        expected = start, min(stop, self.num_bytes)
        if tuple(answer.range) != expected:
            raise FormatError(
                f"{self.name}: expected {wanted}, the server sent {answer.range[0]:,} to {answer.range[1]:,}"
            )
        count = expected[1] - start
        data = next(iter(answer.stream(count)), b"")  # `count` bytes and what came in the same packet, or all there are
        if len(data) > count:
            raise FormatError(f"{self.name}: expected {wanted}, the server sends more than these {count:,} bytes")
        if len(data) < count:
            raise _CutBody
        return memoryview(data)

    def _take(self, meta: Mapping[str, Any]) -> None:
        """Note the identity of the object that has answered, or compare it with the first one."""
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

    def _patiently(self, wanted: str, ask: Callable[[Folder], Result], begun_s: float | None = None) -> Result:
        """Return the answer of a server, asked again after failures that may pass until the time limit."""
        folder = self._connection()
        start_s = begun_s or time.monotonic()
        pause_s = folder.limit_s * FIRST_PAUSE
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return ask(folder)
            except ZbError:
                raise
            except Exception as error:
                problem = self._translated(error, wanted)
                left_s = folder.limit_s - (time.monotonic() - start_s) - 1.5 * pause_s
                if not _may_pass(error, folder):
                    raise problem from error
                if attempt == ATTEMPTS or left_s < folder.request_s:
                    spent = f"{attempt} attempts within {folder.limit_s:g} s ({LIMIT_VARIABLE})"
                    raise type(problem)(f"{problem} ({spent})") from error
            time.sleep(pause_s * random.uniform(0.5, 1.5))
            pause_s = min(2 * pause_s, folder.limit_s * LONGEST_PAUSE)
        raise AssertionError("the last attempt has returned, or raised")

    def _translated(self, error: Exception, wanted: str) -> Exception:
        """Return our error for one of `obstore`: by its class, and by its status where the class is general."""
        name, text, status = self.name, first_line(error), _status(error)
        kind = type(error).__name__
        if isinstance(error, FileNotFoundError):
            if "NoSuchBucket" in str(error) or "ContainerNotFound" in str(error):
                return UnavailableError(f"{name}: its bucket does not exist")
            return FileNotFoundError(2, "no such object", name)
        if kind == "PreconditionError":
            return self._changed("found another one")
        if _is_denied(error):
            return UnavailableError(
                f"{name}: access denied: expected credentials with the right to read (s3:GetObject), found: {text}"
            )
        if status == 416:
            return IncompleteError(f"{name}: expected {wanted}, the object ends before: it was cut short; restore it")
        if kind == "NotSupportedError":
            return UnavailableError(f"{name}: expected a server that answers ranged reads, found: {text}")
        prefix = PREFIXES.get(name.partition("://")[0], "AZURE_")
        if "builder error" in text and "http://" in text:
            return UnavailableError(f"{name}: its server has no TLS: export {prefix}ALLOW_HTTP=true to read it so")
        if _ASKS_MACHINE.search(text):
            known = ", such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" if prefix == "AWS_" else ""
            return UnavailableError(f"{name}: expected credentials in {prefix}... variables{known}, found none")
        return UnavailableError(f"{name}: expected {wanted}, found: {text}")

    def close(self) -> None:
        """Let go of the connection."""
        self._folder = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_folder": None}


class _CutBody(Exception):
    """A body that ended before its range."""

    def __str__(self) -> str:
        return "the answer was cut short on its way, the object may be whole; try again"


def _status(error: BaseException | None) -> int:
    found = _STATUS.search(str(error))
    return int(found[1]) if found else 0


def _may_pass(error: Exception, folder: Folder) -> bool:
    """Return whether the same request may succeed later."""
    status, text = _status(error), str(error)
    if _ASKS_MACHINE.search(text):  # a machine whose credentials have worked gives new ones now and then
        return folder.has_answered
    if type(error).__name__ not in ("GenericError", "_CutBody") or "builder error" in text:
        return False
    return status == 0 or status >= 500 or status in _PASSING


def read_objects(reads: Sequence[tuple[RemoteObject, Sequence[tuple[int, npt.NDArray[Any]]]]]) -> None:
    """Read ranges of several objects, all at the same time and within one limit. See `RemoteObject.read_ranges`."""
    begun_s = time.monotonic()
    todo = [(source, group) for source, ranges in reads for group in _merged(ranges)]
    if len(todo) <= 1:
        for source, group in todo:
            source.fill(group, begun_s)
        return
    folder, left = todo[0][0]._connection(), iter(todo)  # threads take from one iterator, each several in turn

    def work() -> None:
        try:
            for source, group in left:
                if time.monotonic() - begun_s > folder.limit_s:
                    raise UnavailableError(f"{source.name}: not read within {folder.limit_s:g} s ({LIMIT_VARIABLE})")
                source.fill(group, begun_s)
        except BaseException:
            list(left)  # the others end after their current read
            raise

    futures = [folder.pool.submit(work) for _ in range(min(len(todo), folder.num_threads))]
    wait(futures)  # also after an error: the arrays are the caller's again
    for future in futures:
        future.result()


def _is_denied(error: BaseException | None) -> bool:
    by_class = type(error).__name__ in ("UnauthenticatedError", "PermissionDeniedError")
    return by_class or (_status(error) in (401, 403) and not _ASKS_MACHINE.search(str(error)))


def object_exists(url: str) -> bool:
    """Return whether there is an object that may be read."""
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
        folder.library.put(folder.writing_store(), target._key, content, **how)
    except Exception as error:
        if type(error).__name__ == "AlreadyExistsError":
            raise ExistsError(f"{url}: exists already") from error
        raise target._translated(error, "to write it") from error


def delete_object(url: str) -> None:
    """Delete an object, if it is there. Raises as `put_object`."""
    target = RemoteObject(url)
    with contextlib.suppress(FileNotFoundError):
        target._patiently("to delete it", lambda folder: folder.library.delete(folder.store, target._key))


def _merged(ranges: Sequence[tuple[int, npt.NDArray[Any]]]) -> Iterator[Group]:
    """Yield groups of ranges that touch or overlap, as arrays of bytes."""
    group: Group = []
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
    """An object as a file for h5py and others, which reads whole blocks and keeps some of them."""

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
            self._block(0)  # it is wanted next, and its answer has the size
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
