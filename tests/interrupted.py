"""Stops in the middle of work: of an engine, a writer of a stream, a repair."""

import contextlib
import os

import pytest

from zb_hdf5.converters.engines import Engine
from zb_hdf5.files import replaced_folder
from zb_hdf5.signals import unwinding_signals


def failing(number):
    """Return a function that fails as a call of the system does."""

    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    return fail


#: The calls that change the names in a folder.
STEPS = [*((os, name) for name in ("replace", "mkdir", "rmdir", "unlink")), (replaced_folder, "exchanged")]


def ended_after(step, number, work):
    """Do work in a fork that gets a signal after one of its `STEPS`; return whether it had so many of them."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0
    code = 1
    try:
        left = step

        def counted(call):
            def do(*arguments, **options):
                nonlocal left
                found = call(*arguments, **options)
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), number)
                return found

            return do

        for module, name in STEPS:
            setattr(module, name, counted(getattr(module, name)))
        with unwinding_signals():
            work()
        code = 0
    finally:
        os._exit(code)


class Stops(Exception):
    """The error of an engine that stops."""


class Failing(Engine):
    """Runs some tasks, of all that it is given, and then fails."""

    def __init__(self, tasks):
        self.left = tasks

    def run(self, function, tasks, progress):
        for result in super().run(function, tasks, progress):
            if not self.left:
                raise Stops
            self.left -= 1
            yield result


class Recorded:
    """Keeps the phases of a conversion, and the amounts of each; what was kept counts as well."""

    def __init__(self):
        self.phases = []
        self.amounts = []

    def begin(self, label, total, unit="tok"):
        self.phases.append((label, total, unit))
        self.amounts.append([])

    def advance(self, amount):
        self.amounts[-1].append(amount)

    keep = advance


#: Writes documents into a stream until it is killed, and says how many tokens it has written.
STREAM_WRITER = """
import sys
import numpy as np
from zb_hdf5 import HDF5ShardWriter
writer = HDF5ShardWriter(sys.argv[1], chunk_tokens=512)
number = 0
while True:
    writer.write_document(np.arange(number, number + 100) % 60000)
    number += 100
    print(number, flush=True)
"""


@contextlib.contextmanager
def stopped_before_the_index(monkeypatch):
    """Interrupt what would save an index."""

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("zb_hdf5.store.index.ShardIndex.save", interrupt)
        with pytest.raises(KeyboardInterrupt):
            yield
