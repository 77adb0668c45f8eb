"""Sends a signal to each of some forks, which run a command of `zb`, at a random moment.

    python signal_forks.py SEED TRIALS OUT LONGEST_S COMMAND...

One interpreter has imported everything, and each fork runs the command. Prints a line of JSON for each: signal, exit
code or "hangs", seconds from the signal to the end, whether OUT is there, stderr. OUT is then renamed to "done-N".
"""

import faulthandler
import importlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import zb_hdf5.__main__ as scripts

#: Loaded before the forks, which then have nothing to import.
PRELOADED = (
    "zb_hdf5.commands.zb",
    "zb_hdf5.converters.run",
    "zb_hdf5.formats.h5_writer",
    "zb_hdf5.store.verify",
)
PATIENCE_S = 30


def begun(command, errors):
    """Start the command in a fork, whose stderr is a file; return its process id."""
    child = os.fork()
    if child == 0:
        os.dup2(os.open(errors, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644), 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        faulthandler.register(signal.SIGUSR1)
        sys.argv = ["zb", *command]
        scripts.zb()
    return child


def end_of(child):
    """Return the exit code of a fork, or "hangs": it has then written its stack and is killed."""
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(child, signal.SIGUSR1)
    time.sleep(0.5)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "hangs"


def main(seed, trials, out, longest_s, *command):
    for module in PRELOADED:
        importlib.import_module(module)
    scripts.handle_signals()  # as a script begins: a fork has them from its first moment
    out = Path(out)
    errors = out.with_name("errors")
    chance = random.Random(int(seed))
    for number in range(int(trials)):
        sent = chance.choice([signal.SIGTERM, signal.SIGTERM, signal.SIGINT])
        child = begun(command, errors)
        time.sleep(chance.uniform(0, float(longest_s)))
        os.kill(child, sent)
        sent_s = time.monotonic()
        code = end_of(child)
        print(json.dumps([int(sent), code, time.monotonic() - sent_s, out.exists(), errors.read_text()]), flush=True)
        if code == "hangs":
            break
        if out.exists():
            out.rename(out.with_name(f"done-{number}"))


if __name__ == "__main__":  # the workers of a conversion import this file
    main(*sys.argv[1:])
