"""Downloads of numbered files from a web server or a bucket: resumed, checked, and named when they are whole.

A download fills `<name>.partial` under a lock; `<name>.partial.version` has the size and ETag of the object that its
bytes come from. Another version on the server is downloaded from its first byte, so two versions are never mixed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from zb_hdf5.errors import ArgumentError, ChecksumError, FormatError, UnavailableError, ZbError
from zb_hdf5.files.objects import SCHEMES, RemoteObject
from zb_hdf5.files.paths import local_path, on_failure, read_whole
from zb_hdf5.files.publishing import PartialFile, fresh_file, partial_path, write_fully
from zb_hdf5.files.threads import ReadPool
from zb_hdf5.files.urls import without_secrets

_DIGEST_LINE: Final = re.compile(r"([0-9a-fA-F]{64}) [ *](.+)")
#: A strong ETag, or a time of change as the client has it where there is none; 1970 stands for neither.
_VERSION: Final = re.compile(r'".*|(?!1970)\d{4}-.*')
Received = Callable[[str, int, int], None]  # URL, bytes received since the last call, bytes that are left


@dataclass
class FetchReport:
    """The outcome of one file: `fetched` is False if it failed (`byte_count` is 0), or was there already.

    Its URL has no password: see `without_secrets`.
    """

    url: str
    path: str
    byte_count: int = 0
    fetched: bool = False
    problem: ZbError | None = None


def fetch_shards(
    template: str,
    count: int,
    folder: str | os.PathLike[str] = ".",
    *,
    first: int = 0,
    workers: int = 4,
    sha256: Mapping[str, str] | None = None,
    progress: Callable[[int, int], None] = lambda received, expected: None,
) -> list[FetchReport]:
    """Download numbered files that lack their final name; one that fails stops no other.

    Parameters
    ----------
    template
        URL with one format field for the number, such as `{:05d}` or `{index:05d}`.
    count, first
        How many files, and the number of the first one.
    folder
        Folder for the files, which have the names at the ends of their URLs.
    workers
        Files that are downloaded at the same time.
    sha256
        File name -> hexadecimal digest, for all of the files; None: no digest is compared.
    progress
        Called with the bytes received since its last call, and all that are expected in this run.
    """
    folder = local_path(folder)
    reports = _reports(template, range(first, first + count), folder, sha256)
    folder.mkdir(parents=True, exist_ok=True)
    stopped = threading.Event()
    expected = _Expected(count)

    def advance(url: str, received: int, left: int) -> None:
        if stopped.is_set():
            raise UnavailableError(f"{without_secrets(url)}: stopped, because another file failed or the program ends")
        progress(received, expected.total(url, received, left))

    def fetch(url: str) -> None:
        report = reports[url]
        path = Path(report.path)
        with on_failure(stopped.set):  # no failure of the server: it ends all downloads
            try:
                if path.is_file():  # a run may have been killed right after the rename
                    _version_of(path).unlink(missing_ok=True)
                else:
                    _download(url, path, None if sha256 is None else sha256[path.name], advance)
                    report.fetched = True
                report.byte_count = path.stat().st_size
            except FileNotFoundError as error:
                report.problem = UnavailableError(f"{report.url}: {error.strerror}")
            except ZbError as error:
                report.problem = error
            progress(0, expected.total(url, 0, 0))  # it is there, or never comes

    with ReadPool(workers, "zb-fetch") as readers, on_failure(stopped.set):
        readers.map(fetch, reports)  # after Ctrl+C as well: the threads end before their next read
    return list(reports.values())


class _Expected:
    """The bytes that all downloads together receive, as far as it is known.

    Parameters
    ----------
    count
        The number of files.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._lock = threading.Lock()
        self._received = 0
        self._left: dict[str, int] = {}
        self._begun: dict[str, int] = {}

    def total(self, url: str, received: int, left: int) -> int:
        """Return it, after so many more bytes of a file were received, and so many are left."""
        with self._lock:
            self._received += received
            self._left[url] = left
            if received or left:
                self._begun.setdefault(url, received + left)
            if not self._begun:
                return 0
            alike = sum(self._begun.values()) // len(self._begun)  # the others are expected to be like these
            return self._received + sum(self._left.values()) + alike * (self._count - len(self._left))


def read_digests(path: Path) -> dict[str, str]:
    """Return file name -> hexadecimal digest, of a list as `sha256sum` writes it."""
    digests = {}
    for number, line in enumerate(read_whole(path).decode("utf-8", "surrogateescape").splitlines(), 1):
        match = _DIGEST_LINE.fullmatch(line)
        if match is None:
            raise FormatError(f"{path}: line {number}: expected a line of sha256sum, found {line[:80]!r}")
        digests[Path(match[2]).name] = match[1].lower()
    return digests


def _reports(template: str, numbers: range, folder: Path, sha256: Mapping[str, str] | None) -> dict[str, FetchReport]:
    """Return URL -> the report of its file, before anything is fetched."""
    try:
        urls = [template.format(number, index=number) for number in numbers]
    except (LookupError, ValueError, AttributeError, TypeError) as error:
        raise ArgumentError(
            f"{without_secrets(template)}: expected one field such as {{:05d}} or {{index:05d}}: {error}"
        ) from error
    names = list(map(_name_of, urls))
    if len(set(names)) != len(names):
        raise ArgumentError(
            f"{without_secrets(template)}: expected a field such as {{:05d}} in the file name: the names must differ"
        )
    if sha256 is not None and (unknown := sorted(set(names) - sha256.keys())):
        raise ArgumentError(f"{unknown[0]}: the list of digests has no line for it")
    return {url: FetchReport(without_secrets(url), str(folder / name)) for url, name in zip(urls, names, strict=True)}


def _name_of(url: str) -> str:
    """Return the file name at the end of a URL of an object."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in SCHEMES and parts.port != 0 and (parts.hostname or "").encode("idna")
    except ValueError:  # of the port, of a bracket, of a part of the host's name
        usable = False
    name = unquote(parts.path).rpartition("/")[2] if usable and not parts.query else ""
    if name in ("", ".", "..") or "\0" in name or not re.fullmatch(r"[!-~]+", url):
        schemes = f"expected a URL ({', '.join(SCHEMES)}) that ends in a file name, without a query, percent-encoded"
        raise ArgumentError(f"{schemes}, found {without_secrets(url)!r}")
    return name


def _version_of(path: Path) -> Path:
    """Return the file that names the version of the object whose bytes are in the partial file of a download."""
    partial = partial_path(path)
    return partial.with_name(f"{partial.name}.version")


def _download(url: str, path: Path, sha256: str | None, advance: Received) -> None:
    """Download one file, going on with the bytes of an earlier run that are of the version on the server."""
    file = PartialFile(path, resume=True)
    version = _version_of(path)

    def end() -> None:
        if version.exists() and file.partial_path.stat().st_size:
            file.keep()
        else:  # the server has sent nothing that a later run could go on with
            version.unlink(missing_ok=True)
            file.discard()

    with on_failure(end):
        try:
            _receive(url, file.fd, version, sha256, advance)
        except FormatError:  # it was replaced meanwhile
            _receive(url, file.fd, version, sha256, advance)
        with open(file.fd, "rb", closefd=False) as complete:
            if sha256 and (found := hashlib.file_digest(complete, "sha256").hexdigest()) != sha256:
                version.unlink()
                raise ChecksumError(f"{without_secrets(url)}: expected sha256 {sha256}, found {found}")
        file.publish()
    version.unlink(missing_ok=True)


def _receive(url: str, fd: int, version: Path, sha256: str | None, advance: Received) -> None:
    """Append the missing bytes to a partial file, which is emptied unless they are of the version on the server."""
    source = RemoteObject(url)
    size, tag = source.identity
    is_version = _VERSION.fullmatch(tag) is not None
    identity = json.dumps(source.identity)
    if not is_version and sha256 is None:
        raise UnavailableError(
            f"{source.name}: the server sends no strong ETag and no time of change; pass --sha256-file"
        )
    is_same = is_version and version.exists() and read_whole(version) == identity.encode()
    offset = min(size, os.fstat(fd).st_size) if is_same else 0
    os.ftruncate(fd, offset)
    with open(fresh_file(version), "wb") as note:
        note.write(identity.encode())
    advance(url, 0, size - offset)
    for part in source.parts(offset):
        write_fully(fd, part, offset)
        offset += len(part)
        advance(url, len(part), size - offset)
