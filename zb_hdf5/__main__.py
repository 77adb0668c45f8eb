"""The console scripts `zb` and `convert`: Ctrl+C ends them with exit code 130, SIGTERM with 143, also in imports."""

import atexit
import signal

from zb_hdf5.signals import END_OF, end_now


def handle_signals() -> None:
    """Give signals their exit codes, until the interpreter is taken down: the work is done then."""
    for number in END_OF:
        signal.signal(number, end_now)
    atexit.register(_ignore_signals)


def _ignore_signals() -> None:
    for number in END_OF:
        signal.signal(number, signal.SIG_IGN)


def zb() -> None:
    handle_signals()
    from zb_hdf5.commands.zb import zb as command

    command(prog_name="zb")


def convert() -> None:
    handle_signals()
    from zb_hdf5.converters.cli import convert_commands as command

    command(prog_name="convert")


if __name__ == "__main__":
    zb()
