"""Connections to object stores: loads `obstore`, also after a fork, and shares one client for each folder of URLs."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from typing import Any, Final

from zb_hdf5.errors import ArgumentError, UnavailableError

#: Reads that are under way for one call, at most.
MAX_READS: Final = 256
#: Threads that wait for answers without delay, and the seconds of a core that one request takes there.
LEAST_READS: Final = 4
REQUEST_CORE_S: Final = 150e-6
#: Names the seconds that one read may take, over all of its attempts.
LIMIT_VARIABLE: Final = "ZB_REMOTE_TIMEOUT"
LIMIT_S: Final = 180.0
#: Requests that one after the other fit into the limit: none takes longer than its sixth part.
REQUESTS_IN_LIMIT: Final = 6
#: Options of the client that each service takes from its variables, such as AWS_ALLOW_HTTP.
PREFIXES: Final = {"s3": "AWS_", "s3a": "AWS_", "gs": "GOOGLE_", "http": "", "https": ""}
_CLIENT_OPTIONS: Final = (
    "allow_http", "allow_invalid_certificates", "connect_timeout", "http1_only", "http2_only", "pool_idle_timeout",
    "pool_max_idle_per_host", "proxy_ca_certificate", "proxy_excludes", "proxy_url", "root_certificate", "user_agent",
)  # fmt: skip

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
                raise UnavailableError("reading URLs needs obstore: pip install 'zb_hdf5[remote]'") from error
            _library = _load_again(_obstore.__file__) if _used_by_parent else _obstore
        return _library


def _load_again(file: str) -> Any:
    """Load a second copy of the extension, with a runtime of its own.

    The threads of the first one did not come along with the fork: each call of it would wait for ever, and its sockets
    are registered with the parent's epoll. A new store does not help, because the runtime belongs to the library.
    """
    fd = os.memfd_create("obstore", os.MFD_CLOEXEC)
    try:
        with open(file, "rb") as source, open(fd, "wb", closefd=False) as copy:
            shutil.copyfileobj(source, copy, 1 << 20)
        # a name of its own: under one that it knows the system would find the first copy again
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
    _library, _lock, _folders = None, threading.Lock(), weakref.WeakValueDictionary()


os.register_at_fork(after_in_child=_forget_after_fork)


class Folder:
    """The connection to one folder of URLs, shared by its objects; closed with the last of them.

    Attributes
    ----------
    limit_s
        Seconds that one read may take.
    request_s
        Seconds that one request of it may take.
    has_answered
        Whether its server has answered a read.
    num_threads
        Reads that are worth making at the same time: as many as keep one core busy during the shortest answer.
    """

    def __init__(self, url: str) -> None:
        self.library, self._url = _load_library(), url
        self.limit_s = limit_s()
        self.request_s = self.limit_s / REQUESTS_IN_LIMIT
        self._answer_s = self.limit_s
        self.store = self._connect({"max_retries": 0})  # `RemoteObject` tries again: one limit for all attempts
        self._pool: ThreadPoolExecutor | None = None

    def _connect(self, retries: dict[str, Any] | None) -> Any:
        scheme = self._url.partition("://")[0]
        options = {"allow_http": "true"} if scheme == "http" else {}
        if prefix := PREFIXES.get(scheme, "AZURE_"):
            names = {key: os.environ.get(prefix + key.upper()) for key in _CLIENT_OPTIONS}
            options = {key: value for key, value in names.items() if value}
        options["timeout"] = f"{int(self.request_s * 1000)}ms"
        try:
            return self.library._store.from_url(self._url, retry_config=retries, client_options=options)
        except (ValueError, self.library.exceptions.BaseError) as error:
            raise UnavailableError(f"{self._url}: cannot be opened: {first_line(error)}") from error

    def writing_store(self) -> Any:
        """Return a client whose own retries cover the parts of an upload."""
        return self._connect(None)

    def note_answer(self, duration_s: float) -> None:
        """Note the time that the server took for one answer."""
        self._answer_s = min(self._answer_s, duration_s)

    @property
    def has_answered(self) -> bool:
        return self._answer_s < self.limit_s

    @property
    def num_threads(self) -> int:
        return min(MAX_READS, max(LEAST_READS, int(self._answer_s / REQUEST_CORE_S)))

    @property
    def is_of_this_process(self) -> bool:
        """Whether it was not inherited by a fork."""
        return self.library is _library

    @property
    def pool(self) -> ThreadPoolExecutor:
        """Threads for the reads of one call; they end with this folder."""
        with _lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(MAX_READS, thread_name_prefix="zb-remote")
                weakref.finalize(self, self._pool.shutdown, wait=False)  # the last use may end in one of them
            return self._pool


def folder_of(url: str) -> Folder:
    """Return the connection to a folder: that of its other objects, or a new one."""
    folder = _folders.get(url)
    if folder is None:
        made = Folder(url)
        with _lock:
            folder = _folders.setdefault(url, made)
    return folder


def limit_s() -> float:
    """Return the seconds that one read of an object may take: those of ZB_REMOTE_TIMEOUT, else 180.

    Raises
    ------
    ArgumentError
        If the variable is not a number of at least 1.
    """
    text = os.environ.get(LIMIT_VARIABLE, "")
    try:
        found = float(text or LIMIT_S)
    except ValueError:
        found = 0.0
    if not 1 <= found < 1e6:
        raise ArgumentError(f"{LIMIT_VARIABLE}: expected a number of seconds, at least 1, found {text!r}")
    return found


def first_line(error: BaseException) -> str:
    """Return the message of an error of the library, without the page that the server sent with it."""
    return re.split(r"\n|:? <", str(error), maxsplit=1)[0].strip()
