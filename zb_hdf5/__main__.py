"""The console scripts `zb` and `convert`: Ctrl+C ends them with exit code 130, also while they import."""

import os
import signal
import sys
from types import FrameType
from typing import NoReturn


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """Raise `KeyboardInterrupt`; inside an import end the process: numpy cannot be imported a second time."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os.write(sys.stderr.fileno(), b"Error: interrupted; nothing unfinished was left under its final name\n")
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


def zb() -> None:
    signal.signal(signal.SIGINT, _interrupt)
    from zb_hdf5.commands.zb import zb as command

    command(prog_name="zb")


def convert() -> None:
    signal.signal(signal.SIGINT, _interrupt)
    from zb_hdf5.converters.cli import convert as command

    command(prog_name="convert")


if __name__ == "__main__":
    zb()
