"""Stops in the middle of work: of an engine, a writer of a stream, a repair."""

import contextlib
import os

import pytest

from zb_hdf5.converters.engines import Engine


def failing(number):
    """Return a function that fails as a call of the system does."""

    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    return fail


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
