"""The console scripts `zb` and `convert`: Ctrl+C ends them with exit code 130, SIGTERM with 143, also in imports."""

import atexit
import io
import os
import signal
import stat
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from zb_hdf5.signals import EXIT_OF_SIGNAL, end_now


class Pipe(io.FileIO):
    """Standard output that is a pipe: what its reader no longer takes is dropped.

    So `zb info x | head -1` ends with the exit code of `zb info x`, and a script with `set -o pipefail` goes on.
    """

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            return memoryview(data).nbytes


def handle_signals() -> None:
    """Give signals their exit codes, until the interpreter is taken down: the work is done then."""
    for number in EXIT_OF_SIGNAL:
        signal.signal(number, end_now)
    atexit.register(_ignore_signals)


def open_outputs() -> None:
    """Let any text be printed: to nowhere if an output is closed, with "?" for characters that a terminal lacks."""
    with suppress(OSError):
        while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:  # else the next file that is opened would be an output
            os.set_inheritable(fd, True)
        os.close(fd)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - until the process ends
        elif isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")
    if stat.S_ISFIFO(os.fstat(1).st_mode) and isinstance(sys.stdout, io.TextIOWrapper):
        pipe = io.BufferedWriter(Pipe(1, "w", closefd=False))
        sys.stdout = io.TextIOWrapper(pipe, sys.stdout.encoding, "replace", line_buffering=sys.stdout.line_buffering)


def _ignore_signals() -> None:
    for number in EXIT_OF_SIGNAL:
        signal.signal(number, signal.SIG_IGN)


def zb() -> None:
    handle_signals()
    open_outputs()
    from zb_hdf5.commands.zb import zb as command

    command(prog_name="zb")


def convert() -> None:
    handle_signals()
    open_outputs()
    from zb_hdf5.converters.cli import convert_commands as command

    command(prog_name="convert")


if __name__ == "__main__":
    zb()
