"""Runs each program that it is sent in a fork of itself, which has imported the package.

    python fork_for_each.py [MODULE ...]

It imports these modules, too. Its standard input is a socket. A message has the JSON of a program, and four
descriptors: its standard streams, and a pipe for its process id and, in the end, its exit code. A program ends as in
an interpreter of its own.
"""

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from types import ModuleType

#: What programs use, without torch: it takes longer to import than all of these.
PRELOADED = (
    "zb_hdf5.__main__",
    "zb_hdf5.commands.zb",
    "zb_hdf5.commands.zb_verify",
    "zb_hdf5.converters.cli",
    "zb_hdf5.converters.run",
    "zb_hdf5.converters.source_records",
    "zb_hdf5.converters.store_source",
    "zb_hdf5.formats.h5_writer",
    "zb_hdf5.formats.native",
    "zb_hdf5.formats.stream_writer",
    "zb_hdf5.store.verify",
    "numbered",
)
MOST_BYTES = 1 << 20


class Asked:
    """The messages of the process that wants programs run, and the children that run them."""

    def __init__(self, connection):
        self._connection = connection
        self._reports = {}  # of each child: the descriptor of the process -> (process id, pipe)

    def program(self):
        """Return the program of a message, in the child that is to run it; None in this process, at the end."""
        while True:
            events = select.poll()
            for descriptor in (self._connection.fileno(), *self._reports):
                events.register(descriptor, select.POLLIN)
            for descriptor, _ in events.poll():
                if descriptor in self._reports:
                    self._report(descriptor)
                    continue
                message, given, _, _ = socket.recv_fds(self._connection, MOST_BYTES, 4)
                if not message:
                    return None
                *streams, pipe = given
                if self._begins(pipe):
                    self._connection.close()
                    for number, stream in enumerate(streams):
                        os.dup2(stream, number)
                        os.close(stream)
                    return json.loads(message)
                for stream in streams:
                    os.close(stream)

    def _begins(self, pipe):
        """Fork; return whether this is the child."""
        child = os.fork()
        if child == 0:
            for descriptor, (_, other) in self._reports.items():
                os.close(descriptor)
                os.close(other)
            os.close(pipe)
            return True
        os.write(pipe, b"%d\n" % child)
        self._reports[os.pidfd_open(child)] = child, pipe
        return False

    def _report(self, descriptor):
        child, pipe = self._reports.pop(descriptor)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with contextlib.suppress(BrokenPipeError):  # nobody waits for it
            os.write(pipe, b"%d\n" % code)
        os.close(pipe)
        os.close(descriptor)

    def kill(self):
        """End the children: whoever would wait for them has ended."""
        for child, _ in self._reports.values():
            os.kill(child, signal.SIGKILL)


def begun(program):
    """Make this process look as if the program was all that its interpreter had been given; return its code."""
    if program["new_session"]:
        os.setsid()
    os.chdir(program["folder"])
    os.environ.clear()
    os.environ.update(program["environment"])
    sys.argv = [program["path"] or "-c", *program["arguments"]]
    sys.path[0] = os.path.dirname(program["path"])
    main = ModuleType("__main__")
    if program["path"]:
        main.__file__ = program["path"]
    sys.modules["__main__"] = main
    return compile(program["code"], program["path"] or "<string>", "exec"), main.__dict__


connection = socket.socket(fileno=os.dup(0))
if not connection.recv(1, socket.MSG_PEEK):  # wait for a message: many sessions run no program
    sys.exit()
for module in (*PRELOADED, *sys.argv[1:]):
    importlib.import_module(module)
gc.collect()
gc.freeze()  # a collection in a child would write to, and so copy, each page of what is imported
asked = Asked(connection)
found = asked.program()
if found is None:
    asked.kill()
    sys.exit()
del asked, connection
exec(*begun(found))
