"""Numbered shards over HTTP: resumed where they stopped, checked, and whole before they have their names.

A download fills `<name>.partial` under a lock. Beside it, `<name>.partial.etag` says which version of the file its
bytes are of. A partial file is kept only if the server still has that version (`If-Range`), so two versions are never
glued together. Every failure that may pass is tried again. Attempts and runs keep the bytes that have arrived.
"""

from __future__ import annotations

import email.utils
import hashlib
import http.client
import os
import random
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from zb_hdf5.errors import ArgumentError, ChecksumError, FormatError, IncompleteError, UnavailableError, ZbError
from zb_hdf5.files.paths import local_path
from zb_hdf5.files.publishing import ResumedFile, write_fully

ATTEMPTS: Final = 5
#: A server that sends nothing for so long is tried again.
READ_TIMEOUT_S: Final = 30.0
READ_BYTES: Final = 1 << 20
FIRST_DELAY_S: Final = 1.0
#: The longest wait that a server's Retry-After may ask for.
MAX_DELAY_S: Final = 300.0
ETAG_SUFFIX: Final = ".etag"
#: Answers besides 5xx that may be another one later: timeout, range beyond the end, too early, too many requests.
PASSING: Final = frozenset({408, 416, 425, 429})
_DIGEST_LINE: Final = re.compile(r"([0-9a-fA-F]{64}) [ *](.+)")
_CONTENT_RANGE: Final = re.compile(r"bytes (\d+)-\d+/(\d+)")


@dataclass
class FetchReport:
    """The outcome of one shard.

    Attributes
    ----------
    byte_count
        Size of the file; 0 if it failed.
    fetched
        False if the file was there already, or failed.
    problem
        Why it failed, or None.
    """

    url: str
    path: str
    byte_count: int = 0
    fetched: bool = False
    problem: ZbError | None = None


class _Passing(Exception):
    """A failure that may be gone at the next attempt."""

    def __init__(self, problem: ZbError, delay_s: float = 0.0) -> None:
        super().__init__(str(problem))
        self.problem, self.delay_s = problem, delay_s


def fetch_shards(
    template: str,
    count: int,
    folder: str | os.PathLike[str] = ".",
    *,
    first: int = 0,
    workers: int = 4,
    sha256: Mapping[str, str] | None = None,
    timeout_s: float = READ_TIMEOUT_S,
    progress: Callable[[int, int], None] = lambda received, expected: None,
    wait: Callable[[float], object] | None = None,
) -> list[FetchReport]:
    """Download numbered files, several at a time; those that have their final name already are left alone.

    Parameters
    ----------
    template
        URL with a format field for the number: `https://host/shard_{:05d}.parquet`, or `{index:05d}`.
    count, first
        Numbers `first` to `first + count - 1`.
    sha256
        File name -> hexadecimal digest, as `read_digests` returns it. None: only sizes are checked.
    timeout_s
        A server that sends nothing for so long has failed an attempt; there are 5.
    progress
        Called from any thread with the bytes received since the last call, and how many all files may have together.
    wait
        What to do with the seconds between two attempts, instead of waiting.

    Returns
    -------
    list of FetchReport
        One per file, in order. A file that failed is a report with a `problem`, and does not stop the others.

    Raises
    ------
    ArgumentError
        If the template does not make `count` different HTTP URLs and names, or `sha256` lacks one of the names.
    OSError
        If files cannot be written here: no space, no permission. Bytes that arrived are kept for the next run.
    """
    folder = local_path(folder)
    jobs = _jobs(template, range(first, first + count), folder, sha256)
    folder.mkdir(parents=True, exist_ok=True)
    fetcher = _Fetcher(len(jobs), timeout_s, progress, wait)
    with ThreadPoolExecutor(workers, thread_name_prefix="zb-fetch") as pool:
        try:
            return list(pool.map(fetcher.fetch, jobs))
        except BaseException:  # Ctrl+C as well: the threads end after their current read
            fetcher.stopped.set()
            raise


def read_digests(path: str | os.PathLike[str]) -> dict[str, str]:
    """Read a list as `sha256sum` writes it: file name -> hexadecimal digest.

    Raises
    ------
    FormatError
        If a line is no such line.
    """
    path = Path(path)
    digests = {}
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="surrogateescape").splitlines(), 1):
        match = _DIGEST_LINE.fullmatch(line)
        if match is None:
            raise FormatError(f"{path}: line {number}: expected a line of sha256sum, found {line[:80]!r}")
        digests[Path(match[2]).name] = match[1].lower()
    return digests


@dataclass
class _Job:
    url: str
    path: Path
    sha256: str | None


def _jobs(template: str, numbers: range, folder: Path, sha256: Mapping[str, str] | None) -> list[_Job]:
    jobs = []
    for number in numbers:
        try:
            url = template.format(number, index=number)
        except (LookupError, ValueError, AttributeError, TypeError) as error:
            raise ArgumentError(f"{template}: expected one field such as {{:05d}} or {{index:05d}}: {error}") from error
        name = _name_of(url)
        if sha256 is not None and name not in sha256:
            raise ArgumentError(f"{name}: the list of digests has no line for it")
        jobs.append(_Job(url, folder / name, None if sha256 is None else sha256[name]))
    if len({job.path for job in jobs}) != len(jobs):
        raise ArgumentError(f"{template}: expected a field such as {{:05d}} in the file name: the names must differ")
    return jobs


def _name_of(url: str) -> str:
    """Return the file name at the end of a URL that `urlopen` can take."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.port != 0 and (parts.hostname or "").encode("idna")
    except ValueError:  # of the port, of a bracket, of a part of the host's name
        usable = False
    name = unquote(parts.path).rpartition("/")[2] if usable else ""
    if name in ("", ".", "..") or "\0" in name or not re.fullmatch(r"[!-~]+", url):
        raise ArgumentError(f"expected an http or https URL that ends in a file name, percent-encoded, found {url!r}")
    return name


class _Fetcher:
    """Shared by all downloads: when to stop, how long to wait, how far all of them are. Thread-safe."""

    def __init__(
        self,
        count: int,
        timeout_s: float,
        progress: Callable[[int, int], None],
        wait: Callable[[float], object] | None,
    ) -> None:
        self.stopped = threading.Event()
        self._count, self._timeout_s, self._progress = count, timeout_s, progress
        self._wait = wait or self.stopped.wait
        self._sizes: dict[str, int] = {}

    def fetch(self, job: _Job) -> FetchReport:
        """Fetch one file; only what concerns this machine, such as a full disk, is raised."""
        report = FetchReport(job.url, str(job.path))
        try:
            if not job.path.is_file():
                self._try_often(job)
                report.fetched = True
            report.byte_count = job.path.stat().st_size
        except ZbError as error:
            report.problem = error
        except BaseException:
            self.stopped.set()
            raise
        return report

    def _try_often(self, job: _Job) -> None:
        file = ResumedFile(job.path)
        try:
            for attempt in range(1, ATTEMPTS + 1):
                try:
                    self._refuse_if_stopped(job)
                    self._receive(job, file)
                    break
                except _Passing as failure:
                    if attempt == ATTEMPTS:
                        raise type(failure.problem)(f"{failure.problem} (attempt {attempt} of {ATTEMPTS})") from failure
                    backoff_s = FIRST_DELAY_S * 2 ** (attempt - 1) * random.uniform(0.5, 1.5)
                    self._wait(max(backoff_s, failure.delay_s))
            file.publish()
        except BaseException:
            _leave(file)
            raise
        _etag_path(file).unlink(missing_ok=True)

    def _receive(self, job: _Job, file: ResumedFile) -> None:
        """Make one attempt to complete the file."""
        with _open(job.url, file, self._timeout_s) as reply:
            byte_offset, size = _begin(job, file, reply)
            expected = self._estimate(job, size)
            for data in _read(job.url, reply):
                self._refuse_if_stopped(job)
                write_fully(file.fd, data, byte_offset)
                byte_offset += len(data)
                self._progress(len(data), expected)
        if size is not None and byte_offset != size:
            raise _Passing(IncompleteError(f"{job.url}: expected {size:,} bytes, found {byte_offset:,}"))
        _check_digest(job, file)

    def _refuse_if_stopped(self, job: _Job) -> None:
        if self.stopped.is_set():
            raise UnavailableError(f"{job.url}: stopped, because another file failed or the program ends")

    def _estimate(self, job: _Job, size: int | None) -> int:
        """Return how many bytes all files may have together, if the others are like those whose sizes are known."""
        if size is not None:
            self._sizes[job.url] = size
        sizes = list(self._sizes.values())
        return sum(sizes) * self._count // max(1, len(sizes))


def _leave(file: ResumedFile) -> None:
    """Keep the bytes that have arrived for the next run."""
    if os.fstat(file.fd).st_size:
        file.keep()
    else:
        _etag_path(file).unlink(missing_ok=True)
        file.discard()


def _resume_point(file: ResumedFile) -> tuple[int, str]:
    """Return how many bytes are there, and of which version; none if that is not known."""
    try:
        version = _etag_path(file).read_text(encoding="latin-1")
    except FileNotFoundError:
        version = ""
    return (os.fstat(file.fd).st_size if version else 0), version


def _open(url: str, file: ResumedFile, timeout_s: float) -> http.client.HTTPResponse:
    """Ask for the bytes that are missing, or for all of them if the file is no longer the version that is here."""
    headers = {"User-Agent": "zb_hdf5"}
    byte_offset, version = _resume_point(file)
    if byte_offset:
        headers |= {"Range": f"bytes={byte_offset}-", "If-Range": version}
    try:
        reply: http.client.HTTPResponse = urllib.request.urlopen(
            urllib.request.Request(url, headers=headers), timeout=timeout_s
        )
    except urllib.error.HTTPError as error:
        error.close()
        problem = UnavailableError(f"{url}: expected 200 OK, found {error.code} {error.reason}")
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            os.ftruncate(file.fd, 0)  # as many bytes as the file has, or more: next time, all of it
        if error.code >= 500 or error.code in PASSING:
            raise _Passing(problem, _retry_after_s(error.headers.get("Retry-After"))) from error
        raise problem from error
    except (OSError, http.client.HTTPException, UnicodeError) as error:  # the last one: of the host of a redirect
        raise _Passing(UnavailableError(f"{url}: {error or type(error).__name__}")) from error
    return reply


def _begin(job: _Job, file: ResumedFile, reply: http.client.HTTPResponse) -> tuple[int, int | None]:
    """Return where the answer's bytes belong and how long the file will be; drop the bytes of another version."""
    kept, version = _resume_point(file)
    if reply.status == http.HTTPStatus.PARTIAL_CONTENT and _version(reply) in (version, ""):
        match = _CONTENT_RANGE.fullmatch(reply.headers.get("Content-Range", ""))
        if match and int(match[1]) == kept:
            return kept, int(match[2])
    os.ftruncate(file.fd, 0)
    _etag_path(file).write_text(_version(reply), encoding="latin-1")
    if reply.status != http.HTTPStatus.OK:
        found = f"{reply.status} {reply.reason}, {reply.headers.get('Content-Range')}"
        raise _Passing(UnavailableError(f"{job.url}: expected version {version} from byte {kept:,} on, found {found}"))
    if reply.length is None and not reply.chunked and job.sha256 is None:
        raise IncompleteError(
            f"{job.url}: the server does not say how long the file is; pass --sha256-file to check it"
        )
    return 0, reply.length


def _version(reply: http.client.HTTPResponse) -> str:
    """Return what `If-Range` may name: a strong ETag, or the time of the last change; empty if there is neither."""
    etag: str = reply.headers.get("ETag", "")
    return etag if etag.startswith('"') else reply.headers.get("Last-Modified", "")


def _read(url: str, reply: http.client.HTTPResponse) -> Iterator[bytes]:
    """Yield bytes as they arrive, so that a failure loses none of them."""
    while True:
        try:
            data = reply.read1(READ_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise _Passing(UnavailableError(f"{url}: {error or type(error).__name__}")) from error
        if not data:
            return
        yield data


def _check_digest(job: _Job, file: ResumedFile) -> None:
    if job.sha256 is None:
        return
    with open(file.fd, "rb", closefd=False) as complete:
        complete.seek(0)
        found = hashlib.file_digest(complete, "sha256").hexdigest()
    if found != job.sha256:
        os.ftruncate(file.fd, 0)
        raise _Passing(ChecksumError(f"{job.url}: expected sha256 {job.sha256}, found {found}"))


def _etag_path(file: ResumedFile) -> Path:
    return file.partial_path.with_name(file.partial_path.name + ETAG_SUFFIX)


def _retry_after_s(value: str | None) -> float:
    """Return the seconds of a Retry-After header: a number, or a date."""
    if value is None:
        return 0.0
    try:
        date = None if value.isdecimal() else email.utils.parsedate_to_datetime(value)
    except ValueError:
        return 0.0
    delay_s = float(value) if date is None else date.timestamp() - time.time()
    return min(max(0.0, delay_s), MAX_DELAY_S)
