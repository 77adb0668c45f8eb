"""Loads `obstore`, which does the transfers, also after a fork; and keeps its connections. See `core/objects.py`."""

from __future__ import annotations

import ctypes
import os
import shutil
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from typing import Any, Final

from zb_hdf5.errors import UnavailableError

#: Reads that are under way for one call, at most.
MAX_READS: Final = 256
#: Passed to `obstore` as `retry_config`; empty: its own, 10 retries within 3 minutes.
RETRIES: dict[str, Any] = {}

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
    """The connection to one folder of URLs, shared by its objects; closed with the last of them."""

    def __init__(self, url: str) -> None:
        self.library = _load_library()
        options = {"client_options": {"allow_http": True}} if url.startswith("http://") else {}
        try:
            self.store = self.library._store.from_url(url, retry_config=RETRIES or None, **options)
        except (ValueError, self.library.exceptions.BaseError) as error:
            raise UnavailableError(f"{url}: cannot be opened: {first_line(error)}") from error
        self._pool: ThreadPoolExecutor | None = None

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


def first_line(error: BaseException) -> str:
    """Return what an error of the library says, without what its programmers add."""
    return str(error).partition("\n\nDebug source")[0].strip().replace("\n", " ")
