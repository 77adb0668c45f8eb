"""Objects in buckets and behind HTTP, read by ranges: bounded answers, one time limit for each read, our errors.

`obstore` does the requests. It is loaded when it is first used, again after a fork, and one client serves each folder.
"""

from __future__ import annotations

import base64
import ctypes
import io
import os
import random
import re
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar
from urllib.parse import unquote

from zb_hdf5.errors import ArgumentError, ExistsError, FormatError, IncompleteError, UnavailableError, ZbError
from zb_hdf5.files.threads import CancellableWork, RequestPool, in_reader, pause, raise_if_cancelled, request_here
from zb_hdf5.files.urls import split_user, without_secrets
from zb_hdf5.packages import no_package
from zb_hdf5.signals import run_in_thread

if TYPE_CHECKING:  # the command line imports this module, and reads nothing for most of its commands
    import numpy as np
    import numpy.typing as npt

_Result = TypeVar("_Result")
#: The facts by which a server tells the versions of an object apart: its ETag, its generation.
Version: TypeAlias = dict[str, str]
#: Ranges that touch or overlap, ascending: one request reads them.
_Group: TypeAlias = "list[tuple[int, npt.NDArray[np.uint8]]]"

#: Reads under way for one call, at most.
MAX_READS: Final = 256
#: Reads under way for one call at least, if the answers come without delay.
LEAST_READS: Final = 4
#: Seconds of a core that one request takes.
REQUEST_CORE_S: Final = 150e-6
#: Names the seconds that one read may take, over all of its attempts.
LIMIT_VARIABLE: Final = "ZB_REMOTE_TIMEOUT"
LIMIT_S: Final = 180.0
#: Requests that one after the other fit into the limit: none takes longer than its sixth part.
REQUESTS_IN_LIMIT: Final = 6
#: Options of the client that each service takes from its variables, such as AWS_ALLOW_HTTP.
PREFIXES: Final = {"s3": "AWS_", "s3a": "AWS_", "gs": "GOOGLE_", "http": "", "https": ""}
_CLIENT_OPTIONS: Final = (
    "allow_http",
    "allow_invalid_certificates",
    "connect_timeout",
    "http1_only",
    "http2_only",
    "pool_idle_timeout",
    "pool_max_idle_per_host",
    "proxy_ca_certificate",
    "proxy_excludes",
    "proxy_url",
    "root_certificate",
    "user_agent",
)
SCHEMES: Final = ("s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss", "http", "https")
#: Those of web servers, which a user and a password may stand in front of.
WEB_SCHEMES: Final = ("http", "https")
#: Bytes of a block of a file-like object, and the blocks that it keeps: the metadata of HDF5 are at its beginning.
BLOCK_BYTES: Final = 256 << 10
MAX_BLOCKS: Final = 64
#: Bytes of one request for a large object, and of one part of an upload: 30 s are enough for them at 280 kB/s.
PART_BYTES: Final = 8 << 20
#: Attempts of one read. The pauses between them double, from the first to the longest share of the time limit.
ATTEMPTS: Final = 10
FIRST_PAUSE: Final = 1 / 1800
LONGEST_PAUSE: Final = 1 / 12
_STATUS: Final = re.compile(r"status code: (\d{3})")
#: Statuses besides 5xx that may be another one later: timeout, too early, too many requests.
_PASSING: Final = frozenset({408, 425, 429})
#: Addresses of the machine's own provider: a library asks them for credentials last.
_ASKS_MACHINE: Final = re.compile("/latest/(api/token|meta-data)|/computeMetadata/|/metadata/identity")

_library: Any = None
_used_by_parent = False
_lock = threading.Lock()
_folders: weakref.WeakValueDictionary[str, Folder] = weakref.WeakValueDictionary()


def _load_library() -> Any:
    """Return the extension module of `obstore`, which has all that is needed here."""
    global _library
    with _lock:
        if _library is None:
            try:
                from obstore import _obstore
            except ImportError as error:
                missing = "reading URLs needs obstore: pip install 'zb_hdf5[remote]'"
                raise no_package("obstore", missing, error) from None
            _library = _load_again(_obstore.__file__) if _used_by_parent else _obstore
        return _library


def _load_again(file: str) -> Any:
    """Load a second copy of the extension, with a runtime of its own.

    The threads of the first one did not come along with the fork: each call of it would wait for ever, and its sockets
    are registered with the parent's epoll. A new store does not help: the runtime belongs to the library.
    """
    fd = os.memfd_create("obstore", os.MFD_CLOEXEC)
    try:
        with open(file, "rb") as source, open(fd, "wb", closefd=False) as copy:
            shutil.copyfileobj(source, copy, 1 << 20)
        # a name of its own: under a known one the system would find the first copy again
        loader = ExtensionFileLoader("obstore._obstore", f"/proc/{os.getpid()}/fd/{fd}")
        module = module_from_spec(spec_from_loader(loader.name, loader))  # type: ignore[arg-type]
        loader.exec_module(module)
        return module
    except (ImportError, OSError) as error:
        raise UnavailableError(
            "obstore cannot be loaded again after a fork: make the workers with "
            f"multiprocessing_context='forkserver' ({error})"
        ) from error
    finally:
        os.close(fd)


def _forget_after_fork() -> None:
    global _library, _used_by_parent, _lock, _folders
    for folder in list(_folders.values()):
        # never freed here: the end of a store would take the parent's sockets from the parent's epoll
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(folder))
    _used_by_parent = _used_by_parent or _library is not None
    _library = None
    _lock = threading.Lock()
    _folders = weakref.WeakValueDictionary()


os.register_at_fork(after_in_child=_forget_after_fork)


class Folder:
    """The connection to one folder of URLs, shared by its objects; closed with the last of them."""

    def __init__(self, url: str) -> None:
        self.library = _load_library()
        self._url = url
        self.limit_s = _limit_s()
        self.request_s = self.limit_s / REQUESTS_IN_LIMIT
        self.answer_s = self.limit_s  # the shortest answer
        self.store = self.connect({"max_retries": 0})  # `RemoteObject` tries again: one limit for all attempts
        self.threads = RequestPool(MAX_READS)
        weakref.finalize(self, self.threads.close)

    @property
    def reads_at_once(self) -> int:
        """The number of requests that keep one core busy during the shortest answer."""
        return min(MAX_READS, max(LEAST_READS, int(self.answer_s / REQUEST_CORE_S)))

    def connect(self, retries: dict[str, Any] | None = None) -> Any:
        """Return a client; its own retries cover the parts of an upload."""
        scheme = self._url.partition("://")[0]
        options: dict[str, Any] = {"allow_http": "true"} if scheme == "http" else {}
        if prefix := PREFIXES.get(scheme, "AZURE_"):
            options = {key: found for key in _CLIENT_OPTIONS if (found := os.environ.get(prefix + key.upper()))}
        options["timeout"] = f"{int(self.request_s * 1000)}ms"
        url = self._url
        if scheme in WEB_SCHEMES:
            url, user = split_user(url)
            options |= {"default_headers": basic_authorization(user)} if user else {}
        try:
            return self.library._store.from_url(url, retry_config=retries, client_options=options)
        except (ValueError, self.library.exceptions.BaseError) as error:
            raise UnavailableError(f"{without_secrets(self._url)}: cannot be opened: {_first_line(error)}") from error


def basic_authorization(user: str) -> dict[str, str]:
    """Return the header that has a user and a password: the library does not send the ones in a URL."""
    text = user if ":" in user else f"{user}:"
    return {"Authorization": f"Basic {base64.b64encode(text.encode()).decode()}"}


def _folder_of(url: str) -> Folder:
    """Return the connection to a folder, which its objects share; make it if there is none."""
    folder = _folders.get(url)
    if folder is None:
        made = Folder(url)
        with _lock:
            folder = _folders.setdefault(url, made)
    return folder


def reads_at_once(url: str) -> int:
    """Return how many threads read whole batches of a store or an object at the same time."""
    folder = _folders.get(url) or _folders.get(url.rpartition("/")[0])
    return MAX_READS // 4 if folder is None else folder.reads_at_once


def _limit_s() -> float:
    """Return the seconds that one read of an object may take: ZB_REMOTE_TIMEOUT, or 180."""
    text = os.environ.get(LIMIT_VARIABLE, "")
    try:
        found = float(text or LIMIT_S)
    except ValueError:
        found = 0.0
    if not 1 <= found < 1e6:
        raise ArgumentError(f"{LIMIT_VARIABLE}: expected a number of seconds, at least 1, found {text!r}")
    return found


def _first_line(error: BaseException) -> str:
    """Return the message of an error of the library, without secrets and the page that the server sent with it."""
    return without_secrets(re.split(r"\n|:? <", str(error), maxsplit=1)[0].strip())


def _without_secrets(error: Exception) -> Exception | None:
    """Return an error of the library as the cause of ours, whose text a traceback shows; None if it has a password."""
    text = str(error)
    return error if without_secrets(text) == text else None


def _needed_by(name: str) -> str:
    """Return the words for what a server asks for before it gives an object."""
    if name.startswith("http"):
        return "a user and a password that may read it, before the host in the URL, percent-encoded"
    return "credentials with the right to read (s3:GetObject)"


class RemoteObject:
    """The bytes of one object, which never change under the reader: its size and ETag identify it.

    Thread-safe; usable after fork; picklable (a copy refuses another object). Each read is a ranged `get` on condition
    of the first ETag; without one, or with a weak one, the answers are compared. No answer takes more memory than its
    range. All attempts of one read together take at most the seconds of ZB_REMOTE_TIMEOUT (180).

    Parameters
    ----------
    url
        The URL of the object.
    identity
        (bytes, ETag) that it must have; None: as in the first answer.
    num_bytes
        The size that it must have; None: any.
    """

    access = "remote"
    fd = -1  # there is no descriptor
    maps = False

    def __init__(self, url: str, identity: tuple[Any, ...] | None = None, num_bytes: int | None = None) -> None:
        self.name = without_secrets(url)
        self._known = identity
        self._expected = num_bytes
        self._folder_url, _, key = url.rpartition("/")
        self._key = unquote(key) if url.startswith("http") else key
        if "://" not in self._folder_url or not key or self._folder_url.endswith(":/"):
            raise ArgumentError(f"{self.name}: expected the URL of an object, such as s3://bucket/folder/name")
        self._folder: Folder | None = None

    def _connection(self) -> Folder:
        folder = self._folder
        if folder is None or folder.library is not _library:  # also after a fork
            folder = self._folder = _folder_of(self._folder_url)
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
        return int(self.identity[0])

    def read(
        self,
        start: int,
        stop: int,
        *,
        whole: bool = True,
        begun_s: float | None = None,
        alone: bool = False,
    ) -> memoryview:
        """Return some bytes, read-only, by one request.

        Parameters
        ----------
        start, stop
            The first byte, and the byte after the last one.
        whole
            All of them are needed; else they may be fewer at the end of the object.
        begun_s
            The time by `time.monotonic` from which the limit counts; None: now.
        alone
            The thread holds no lock: one of `ReadPool` makes the request itself.
        """
        wanted = f"bytes {start:,} to {stop:,}"
        data = self._patiently(wanted, lambda folder: self._get(folder, start, stop, wanted), begun_s, alone)
        if whole and len(data) < stop - start:
            raise IncompleteError(
                f"{self.name}: expected {wanted}, found {len(data):,} bytes of them: the object has "
                f"{self.num_bytes:,}; restore it"
            )
        return data

    def parts(self, start: int = 0, max_bytes: int | None = None) -> Iterator[memoryview]:
        """Yield all bytes from `start` on, 8 MiB at a time; `FormatError` if the object has more than `max_bytes`."""
        while self._known is None or start < self.num_bytes:
            part = self.read(start, start + PART_BYTES, whole=False)
            if max_bytes is not None and self.num_bytes > max_bytes:
                raise FormatError(f"{self.name}: expected at most {max_bytes:,} bytes, found {self.num_bytes:,}")
            yield part
            start += len(part)

    def mapping(self, private: bool = False) -> None:
        """Return None: nothing is mapped."""

    def require_whole(self) -> None:
        """Do nothing: each read compares the size."""

    def read_ranges(self, ranges: Iterable[tuple[int, npt.NDArray[Any]]]) -> None:
        """Fill each array with the bytes from its offset on: one request for ranges that touch, all at once."""
        read_objects([(self, ranges)])

    def _get(self, folder: Folder, start: int, stop: int, wanted: str) -> memoryview:
        """Make one request for a range, and take no more of the answer."""
        options: dict[str, Any] = {"range": (start, stop)}
        tag = self._known[1] if self._known else None
        if tag and tag.startswith('"'):  # a weak one never matches
            options["if_match"] = tag
        asked_s = time.monotonic()
        answer = folder.library.get(folder.store, self._key, options=options)
        folder.answer_s = min(folder.answer_s, time.monotonic() - asked_s)
        self._take(answer.meta)
        expected = start, min(stop, self.num_bytes)
        if tuple(answer.range) != expected:
            raise FormatError(
                f"{self.name}: expected {wanted}, the server sent {answer.range[0]:,} to {answer.range[1]:,}"
            )
        count = expected[1] - start
        data = next(iter(answer.stream(count)), b"")  # `count` bytes with the rest of their packet, or all there are
        if len(data) > count:
            raise FormatError(f"{self.name}: expected {wanted}, the server sends more than these {count:,} bytes")
        if len(data) < count:
            raise _CutBody("the answer was cut short on its way, the object may be whole; try again")
        return memoryview(data)

    def _take(self, meta: Mapping[str, Any]) -> None:
        """Note the identity of the object that has answered, or compare it with the first one."""
        found = (int(meta["size"]), meta["e_tag"] or str(meta["last_modified"]))
        if self._expected not in (None, found[0]):
            kind = IncompleteError if found[0] < (self._expected or 0) else FormatError
            raise kind(f"{self.name}: expected {self._expected:,} bytes, found {found[0]:,}; restore it")
        self._known = self._known or found
        if found != self._known:
            raise self._changed(f"found {found}")

    def _changed(self, found: str) -> FormatError:
        return FormatError(
            f"{self.name}: changed since it was opened: expected (bytes, ETag) {self._known}, {found}; open it again"
        )

    def _patiently(
        self,
        wanted: str,
        ask: Callable[[Folder], _Result],
        begun_s: float | None = None,
        alone: bool = False,
    ) -> _Result:
        """Return the answer of a server, asked again after failures that may pass until the time limit.

        Parameters
        ----------
        wanted
            The wanted thing, for messages.
        ask
            Makes one request.
        begun_s, alone
            As for `read`.
        """
        folder = self._connection()
        attempt = 0
        start_s = begun_s or time.monotonic()
        pause_s = folder.limit_s * FIRST_PAUSE
        while True:
            attempt += 1
            raise_if_cancelled()
            try:
                if alone and in_reader():
                    return request_here(lambda: ask(folder))
                return folder.threads.run(lambda _: ask(folder))[0]
            except ZbError:
                raise
            except Exception as error:
                problem = self._translated(error, wanted)
                left_s = folder.limit_s - (time.monotonic() - start_s) - 1.5 * pause_s
                if not _may_pass(error, folder):
                    raise problem from _without_secrets(error)
                if attempt == ATTEMPTS or left_s < folder.request_s:
                    spent = f"{attempt} attempts within {folder.limit_s:g} s ({LIMIT_VARIABLE})"
                    raise type(problem)(f"{problem} ({spent})") from _without_secrets(error)
            pause(pause_s * random.uniform(0.5, 1.5))
            pause_s = min(2 * pause_s, folder.limit_s * LONGEST_PAUSE)

    def _translated(self, error: Exception, wanted: str) -> Exception:
        """Return our error for one of `obstore`: by its class, and by its status where the class is general."""
        name = self.name
        text = _first_line(error)
        status = _status(error)
        kind = type(error).__name__
        if isinstance(error, FileNotFoundError):
            if "NoSuchBucket" in str(error) or "ContainerNotFound" in str(error):
                return UnavailableError(f"{name}: its bucket does not exist")
            return FileNotFoundError(2, "no such object", name)
        if status == 404:  # of a listing: an object that is not there is a `FileNotFoundError`
            return UnavailableError(f"{name}: its bucket does not exist")
        if kind == "PreconditionError":
            return self._changed("found another one")
        if _is_denied(error):
            return _DeniedError(f"{name}: access denied: expected {_needed_by(name)}, found: {text}")
        if status == 416:
            return IncompleteError(f"{name}: expected {wanted}, the object ends before: it was cut short; restore it")
        if kind == "NotSupportedError":
            return UnavailableError(f"{name}: expected a server that answers ranged reads, found: {text}")
        prefix = PREFIXES.get(name.partition("://")[0], "AZURE_")
        if "builder error" in text:
            return _refused_url(name, prefix)
        if _ASKS_MACHINE.search(text):
            known = ", such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" if prefix == "AWS_" else ""
            return UnavailableError(f"{name}: expected credentials in {prefix}... variables{known}, found none")
        return UnavailableError(f"{name}: expected {wanted}, found: {text}")

    def close(self) -> None:
        self._folder = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_folder": None}


def _refused_url(name: str, prefix: str) -> UnavailableError:
    """Return the error of a URL that the client refuses: its own, or that of an answer which names another place."""
    if name.startswith("http"):
        return UnavailableError(
            f"{name}: expected an object, found an answer that sends readers on to a URL that is refused, such as ftp://"
        )
    return UnavailableError(f"{name}: its server has no TLS: export {prefix}ALLOW_HTTP=true to read it so")


class _DeniedError(UnavailableError):
    """The object, if it is there, may not be read."""


class _CutBody(Exception):
    """A body that ended before its range."""


def _status(error: BaseException | None) -> int:
    found = _STATUS.search(str(error))
    return int(found[1]) if found else 0


def _may_pass(error: Exception, folder: Folder) -> bool:
    """Return whether the same request may succeed later."""
    status = _status(error)
    text = str(error)
    if _ASKS_MACHINE.search(text):  # a machine whose credentials have worked gives new ones now and then
        return folder.answer_s < folder.limit_s
    if type(error).__name__ not in ("GenericError", "_CutBody") or "builder error" in text:
        return False
    return status == 0 or status >= 500 or status in _PASSING


def read_objects(reads: Sequence[tuple[RemoteObject, Iterable[tuple[int, npt.NDArray[Any]]]]]) -> None:
    """Read ranges of several objects, all at the same time and within one limit. See `RemoteObject.read_ranges`."""
    begun_s = time.monotonic()
    todo = [(source, group) for source, ranges in reads for group in _merged(ranges)]
    if len(todo) <= 1:
        for source, group in todo:
            _fill(group, _read(source, group, begun_s))
        return
    folder = todo[0][0]._connection()
    left = iter(todo)  # threads take from one iterator, each several in turn

    def read(work: CancellableWork) -> None:
        try:
            for source, group in left:
                if time.monotonic() - begun_s > folder.limit_s:
                    raise UnavailableError(f"{source.name}: not read within {folder.limit_s:g} s ({LIMIT_VARIABLE})")
                found = _read(source, group, begun_s)
                with work:  # once it is left, the arrays are the caller's again
                    _fill(group, found)
        except BaseException:
            list(left)  # the others end after their current read
            raise

    folder.threads.run(read, min(folder.reads_at_once, len(todo)))


def _merged(ranges: Iterable[tuple[int, npt.NDArray[Any]]]) -> Iterator[_Group]:
    """Yield groups of ranges that touch or overlap, as arrays of bytes."""
    group: _Group = []
    end = -1
    for offset, out in sorted((each for each in ranges if each[1].size), key=lambda each: each[0]):
        if group and offset > end:
            yield group
            group = []
        group.append((offset, out.reshape(-1).view("u1")))
        end = max(end, offset + out.nbytes)
    if group:
        yield group


def _read(source: RemoteObject, group: _Group, begun_s: float) -> memoryview:
    """Return the bytes of a group of ranges, by one request."""
    return source.read(group[0][0], max(offset + len(out) for offset, out in group), begun_s=begun_s)


def _fill(group: _Group, found: memoryview) -> None:
    """Fill a group of ranges with its bytes."""
    start = group[0][0]
    for offset, out in group:
        out.data[:] = found[offset - start : offset - start + len(out)]


def _is_denied(error: BaseException | None) -> bool:
    by_class = type(error).__name__ in ("UnauthenticatedError", "PermissionDeniedError")
    return by_class or (_status(error) in (401, 403) and not _ASKS_MACHINE.search(str(error)))


def object_exists(url: str) -> bool:
    """Return whether there is an object that may be read."""
    try:
        return object_size(url) is not None
    except _DeniedError:
        return False


def object_size(url: str) -> int | None:
    """Return the size of an object, or None if there is none."""
    try:
        return RemoteObject(url).num_bytes
    except FileNotFoundError:
        return None


def object_version(url: str) -> Version | None:
    """Return the facts by which its server identifies an object now, or None if there is none."""
    target = RemoteObject(url)
    try:
        meta = target._patiently("an answer", lambda folder: folder.library.head(folder.store, target._key))
    except FileNotFoundError:
        return None
    return {key: meta[key] for key in ("e_tag", "version") if meta[key] is not None}


def list_objects(url: str) -> dict[str, int]:
    """Return the size of each object that is directly in a folder, by name."""
    target = RemoteObject(f"{url}/*")
    found = target._patiently("a listing", lambda folder: folder.library.list_with_delimiter(folder.store))
    return {each["path"]: int(each["size"]) for each in found["objects"]}


def names_below(url: str) -> list[str] | None:
    """Return the names of objects and folders in a folder of a bucket; None where the server lists nothing."""
    if url.startswith("http"):
        return None
    target = RemoteObject(f"{url}/*")
    try:
        found = target._patiently("a listing", lambda folder: folder.library.list_with_delimiter(folder.store))
    except (UnavailableError, FileNotFoundError):
        return None
    return sorted([each["path"] for each in found["objects"]] + [f"{name}/" for name in found["common_prefixes"]])


def put_object(url: str, content: Path | bytes, *, instead_of: Version | EllipsisType | None = ...) -> None:
    """Upload a file in parts, or some bytes, which are there when all of them are.

    Parameters
    ----------
    url
        The URL of the object.
    content
        The file, or the bytes.
    instead_of
        The version of the object that may be replaced; None: there must be none; `...`: any may be replaced.

    Raises
    ------
    ExistsError
        If there is another version than `instead_of`.
    """
    target = RemoteObject(url)
    folder = target._connection()
    how: dict[str, Any] = {"chunk_size": PART_BYTES}
    if instead_of is not ...:
        how = {"mode": instead_of or "create"}
    try:  # the library looks at no signal before an upload is done
        run_in_thread(lambda: folder.library.put(folder.connect(), target._key, content, **how))
    except Exception as error:
        if type(error).__name__ in ("AlreadyExistsError", "PreconditionError"):
            raise ExistsError(f"{target.name}: was written by another process meanwhile") from error
        raise target._translated(error, "to write it") from _without_secrets(error)


def delete_objects(url: str, names: Sequence[str]) -> None:
    """Delete those objects of a folder that exist."""
    target = RemoteObject(f"{url}/*")
    if names:
        target._patiently("to delete objects", lambda folder: folder.library.delete(folder.store, list(names)))


class ObjectFile(io.RawIOBase):
    """An object as a file for h5py and others, which reads whole blocks and keeps some of them."""

    def __init__(self, source: RemoteObject) -> None:
        self.source = source
        self._at = 0
        self._block = lru_cache(MAX_BLOCKS)(  # without `self`, which would be a circle
            lambda number: source.read(number * BLOCK_BYTES, (number + 1) * BLOCK_BYTES, whole=False)
        )

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at}.get(whence)
        self._at = (self._size() if start is None else start) + offset
        return self._at

    def _size(self) -> int:
        self._block(0)  # it is wanted next, and its answer has the size
        return self.source.num_bytes

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        stop = min(self._size(), self._at + len(view))
        count = max(0, stop - self._at)
        if count > BLOCK_BYTES:
            view[:count] = self.source.read(self._at, stop)
            self._at = stop
        while self._at < stop:
            number, within = divmod(self._at, BLOCK_BYTES)
            part = self._block(number)[within : within + stop - self._at]
            done = count - (stop - self._at)
            view[done : done + len(part)] = part
            self._at += len(part)
        return count

    def close(self) -> None:
        self.source.close()
        super().close()
