"""A claim on a part of a field set: a file beside it that one job has, so that two do not write the same part.

Locks alone do not do on clusters: `flock` is absent on some mounts, and on others each node has its own. A claim is a
file that gets its name by link(2), whole, so that it always names its owner, also of a process that was killed while it
made it. The owner touches it and looks whether it is still there at each commit. One whose owner is dead, or has not
touched it for half an hour by the clock of the file server, is taken over by a rename.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import socket
from pathlib import Path
from typing import Final, NamedTuple, Self

from zb_hdf5.errors import UnavailableError
from zb_hdf5.files.paths import on_failure, read_whole
from zb_hdf5.files.publishing import NO_LOCKS, disk_errors, fsync_directory, is_at, write_fully
from zb_hdf5.files.this_host import boot
from zb_hdf5.spec import CLAIM_SUFFIX

#: Seconds after which a claim that nobody has touched is taken over.
STALE_S: Final = 1800.0
#: The content of a claim that was let go by hand: whoever takes the part next compares its values first.
_NOBODY: Final = b"{}"
#: The job of this process, by the variables of schedulers.
_JOB_VARIABLES: Final = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID")


class Owner(NamedTuple):
    """The owner of a claim.

    Attributes
    ----------
    host, boot
        The name of its host, and the identity of the boot of the host.
    pid, started
        Its process, and the moment when this began, in ticks since the boot: a later process may have the same number.
    job
        Its job, as the scheduler names it; "": none.
    token
        A random text, which no other claim has.
    """

    host: str
    boot: str
    pid: int
    started: str
    job: str
    token: str

    @classmethod
    def me(cls) -> Self:
        """Return this process, with a random text."""
        pid = os.getpid()
        job = next((os.environ[name] for name in _JOB_VARIABLES if os.environ.get(name)), "")
        return cls(socket.gethostname(), boot(), pid, _start_of(pid), job, secrets.token_hex(8))

    @property
    def is_dead(self) -> bool:
        """Whether this host has no such process any more; of another host nothing is known."""
        return (self.host, self.boot) == (socket.gethostname(), boot()) and _start_of(self.pid) != self.started

    def __str__(self) -> str:
        job = f" of job {self.job}" if self.job else ""
        return f"process {self.pid}{job} on {self.host}"


def _start_of(pid: int) -> str:
    """Return the moment when a process of this host began; "": there is no such process."""
    try:
        # the name of the program, in brackets, may have spaces
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def claim_path(part: Path) -> Path:
    """Return the path of the claim on a part."""
    return part.with_name(part.name + CLAIM_SUFFIX)


def owner_of_claim(claim: Path) -> Owner | None:
    """Return the owner of a claim; None if there is none, or it names none."""
    try:
        found = json.loads(read_whole(claim))
        texts = {key: str(found[key]) for key in ("host", "boot", "started", "job", "token")}
        return Owner(pid=int(found["pid"]), **texts)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def age_s(path: Path) -> float:
    """Return the seconds since a file was touched, by the clock of the file server: that of a file made now."""
    probe = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
    try:
        return probe.stat().st_mtime - path.stat().st_mtime
    finally:
        probe.unlink()


class PartClaim:
    """The claim of this process on one part. `take` makes it. Not thread-safe.

    Attributes
    ----------
    path
        The path of the claim.
    is_taken_over
        Whether another owner had the part, and did not end its claim: marks may be ahead of values.
    """

    def __init__(self, path: Path, fd: int, *, is_taken_over: bool) -> None:
        self.path = path
        self.is_taken_over = is_taken_over
        self._fd = fd

    @classmethod
    def take(cls, part: Path, stale_s: float = STALE_S) -> Self | None:
        """Claim a part; None if another one has it.

        Parameters
        ----------
        part
            The path of the part, which need not exist.
        stale_s
            Seconds after which a claim that nobody touched counts for nothing.
        """
        path = claim_path(part)
        if path.exists():
            return cls._taken_over(path, stale_s)
        aside = _own_path(path)
        fd = _made(aside)
        with on_failure(lambda: os.close(fd)):
            try:
                with contextlib.suppress(FileExistsError):  # another one was faster
                    os.link(aside, path)
                is_ours = is_at(fd, path)
                if is_ours:
                    fsync_directory(path.parent)  # without its claim, the marks of a host that failed would count
            finally:
                aside.unlink()
        if is_ours:
            return cls(path, fd, is_taken_over=False)
        os.close(fd)
        return None

    @classmethod
    def _taken_over(cls, path: Path, stale_s: float) -> Self | None:
        try:
            before = path.stat()
            owner = owner_of_claim(path)
            is_free = age_s(path) > stale_s or (owner is not None and owner.is_dead and not _is_locked(path))
        except FileNotFoundError:  # released meanwhile: the next look claims it
            return None
        if not is_free:
            return None
        aside = _own_path(path)
        fd = _made(aside)
        with on_failure(lambda: os.close(fd)):
            with contextlib.suppress(FileNotFoundError):
                now = path.stat()
                if (now.st_ino, now.st_mtime_ns) == (before.st_ino, before.st_mtime_ns):
                    os.rename(aside, path)
                    if is_at(fd, path):
                        return cls(path, fd, is_taken_over=True)
            aside.unlink(missing_ok=True)
        os.close(fd)
        return None

    def hold(self) -> None:
        """Touch the claim. Raises `UnavailableError` if another process has taken it over."""
        if not is_at(self._fd, self.path):
            owner = owner_of_claim(self.path)
            raise UnavailableError(
                f"{self.path}: was taken over by {owner or 'another process'}, since this one had not touched it for "
                "long; its last values are missing, and a new run writes them"
            )
        os.utime(self._fd)

    def let_go(self) -> None:
        """Leave the claim to whoever takes the part next, and compares its values first."""
        if is_at(self._fd, self.path):
            _let_go(self.path)

    def release(self) -> None:
        """End the claim, if it is still ours; a second call does nothing."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            try:
                if is_at(fd, self.path):
                    self.path.unlink()
            finally:
                os.close(fd)


def _own_path(path: Path) -> Path:
    """Return a name beside that of a claim, which no other process has."""
    return path.with_name(f"{path.name}.{secrets.token_hex(4)}")


def _made(path: Path) -> int:
    """Make a claim of this process beside its name, and lock it where there are locks."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    with on_failure(lambda: os.close(fd)), on_failure(path.unlink), disk_errors(path):
        write_fully(fd, json.dumps(Owner.me()._asdict()).encode(), 0)
        os.fsync(fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in {*NO_LOCKS, errno.EWOULDBLOCK}:
                raise
    return fd


def _is_locked(path: Path) -> bool:
    """Return whether a process holds the lock of a claim: in another container its number tells nothing."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno == errno.EWOULDBLOCK
    finally:
        os.close(fd)
    return False


def drop_leftovers(folder: Path, stale_s: float = STALE_S) -> None:
    """Remove claims beside their names, of processes that were killed while they made them, once they are old."""
    for path in folder.glob(f"*{CLAIM_SUFFIX}.*"):
        with contextlib.suppress(FileNotFoundError):
            if age_s(path) > stale_s:
                path.unlink()


def release_by_hand(part: Path) -> Owner | None:
    """Let the claim on a part go, whoever has it; return its owner, or None if nobody has it.

    A writer that is still at work on it ends at its next commit. Whoever takes the part next compares all marked values
    with their crc32 first: of a host that failed, marks may be ahead of values.
    """
    claim = claim_path(part)
    owner = owner_of_claim(claim)
    if claim.exists() and read_whole(claim) != _NOBODY:
        _let_go(claim)
    return owner


def _let_go(claim: Path) -> None:
    """Replace a claim by one of nobody, which is so old that anybody takes it over."""
    aside = _own_path(claim)
    aside.write_bytes(_NOBODY)
    with on_failure(aside.unlink):
        os.utime(aside, (0, 0))
        os.rename(aside, claim)
