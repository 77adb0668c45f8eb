"""An interpreter that has imported the package, and runs each program in a fork of itself.

The program is a process like any other, with files, streams, signals and an exit code of its own; it only begins
sooner. `processes.py` starts those for which the start of an interpreter matters, or what it imports.
"""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from processes import PROGRAMS, environment


class Running:
    """A program that runs: what is used here of `subprocess.Popen`, with streams of text.

    Parameters
    ----------
    stdin, stdout, stderr
        Descriptors of the pipes to its standard streams; None for an output that is not a pipe.
    report
        The descriptor of the pipe that has its process id, and later its exit code.
    """

    def __init__(self, stdin, stdout, stderr, report):
        self.stdin = os.fdopen(stdin, "w")
        self.stdout = None if stdout is None else os.fdopen(stdout)
        self.stderr = os.fdopen(stderr)
        self.returncode = None
        self._report = os.fdopen(report)
        self._reading = threading.Lock()  # several threads may wait for its end
        self.pid = int(self._report.readline())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for stream in filter(None, (self.stdin, self.stdout, self.stderr)):
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        self.wait()
        self._report.close()

    def poll(self):
        """Return the exit code; None: it has not ended."""
        with contextlib.suppress(TimeoutError):
            self.wait(0)
        return self.returncode

    def wait(self, timeout=None):
        """Wait for the end; return the exit code, or the negative number of the signal that has ended it."""
        if self.returncode is None:
            if not select.select([self._report], [], [], timeout)[0]:
                raise TimeoutError(f"process {self.pid} has not ended after {timeout} s")
            with self._reading:
                if self.returncode is None:
                    self.returncode = int(self._report.readline())
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(self.pid, number)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def communicate(self, text="", timeout=100):
        """Give it its last input, wait for its end, and return (output, errors); None for one that is not a pipe."""
        end_s = time.monotonic() + timeout
        found = {}
        reading = [threading.Thread(target=_read, args=(self, name, found), daemon=True) for name in OUTPUTS]
        for thread in reading:
            thread.start()
        with contextlib.suppress(BrokenPipeError):
            if not self.stdin.closed:
                self.stdin.write(text)
                self.stdin.close()
        for thread in reading:
            thread.join(max(0, end_s - time.monotonic()))
        if len(found) < len(OUTPUTS):
            raise TimeoutError(f"process {self.pid} still has its output open after {timeout} s")
        self.wait(max(0, end_s - time.monotonic()))
        return tuple(found[name] for name in OUTPUTS)


OUTPUTS = ("stdout", "stderr")


def _read(process, name, found):
    stream = getattr(process, name)
    found[name] = stream and stream.read()


class Interpreter:
    """An interpreter, which imports the package when its first program comes.

    Parameters
    ----------
    modules
        Modules that it imports besides.
    variables
        Of its environment, beside the variables of this process: `LD_PRELOAD`, say.
    """

    def __init__(self, *modules, **variables):
        self._variables = variables
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, str(PROGRAMS / "fork_for_each.py"), *modules]
        with theirs:
            # in a session of its own: Ctrl+C of the terminal is for the tests, and they end it
            how = {"start_new_session": True, "env": environment(**variables)}
            self._process = subprocess.Popen(command, stdin=theirs, **how)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        """End it, and all programs that still run."""
        self._connection.close()
        self._process.wait()

    def start(self, program, *arguments, folder=None, stdout=None, new_session=False, env=None):
        """Start a program; return what runs.

        Parameters
        ----------
        program
            Code, or the path of a file.
        folder
            In which it runs; None: that of this process.
        stdout
            The file that takes its output; None: a pipe.
        new_session
            Begin a session, and a group of processes, of its own.
        env
            All variables of its environment; None: those of this process.
        """
        path = str(program) if isinstance(program, Path) else ""
        message = {
            "code": program.read_text() if path else program,
            "path": path,
            "arguments": [str(argument) for argument in arguments],
            "folder": str(folder or Path.cwd()),
            "environment": environment(**self._variables) if env is None else env,
            "new_session": new_session,
        }
        with contextlib.ExitStack() as theirs:

            def pipe(end):
                """Return our end of a new pipe, of which the program gets the other: 0 to read, 1 to write."""
                both = os.pipe()
                theirs.callback(os.close, both[end])
                given.append(both[end])
                return both[1 - end]

            given = []
            stdin = pipe(0)
            if stdout is None:
                output = pipe(1)
            else:
                output = None
                given.append(stdout.fileno())
            stderr = pipe(1)
            report = pipe(1)
            socket.send_fds(self._connection, [json.dumps(message).encode()], given)
        return Running(stdin, output, stderr, report)

    def run(self, program, *arguments, timeout=120, **options):
        """Run a program to its end; return a `subprocess.CompletedProcess`."""
        with self.start(program, *arguments, **options) as process:
            try:
                found = process.communicate(timeout=timeout)
            finally:
                process.kill()
        return subprocess.CompletedProcess([program, *arguments], process.returncode, *found)


#: The imports of a program that trains: torch, and what its optimizers and checkpoints import when they are first used.
TRAINING = ("torch._dynamo", "torch.distributed.checkpoint", "zb_hdf5.loaders.loader")
_shared = []


@contextlib.contextmanager
def shared_interpreters():
    """Open those that all tests of this process share: one without torch, and one that has imported it."""
    with Interpreter() as plain, Interpreter(*TRAINING) as training:
        _shared[:] = plain, training
        try:
            yield
        finally:
            _shared.clear()


def start_program(program, *arguments, **options):
    """Start a program in the shared interpreter without torch: see `Interpreter.start`."""
    return _shared[0].start(program, *arguments, **options)


def run_program(program, *arguments, **options):
    """Run a program to its end in the shared interpreter without torch: see `Interpreter.run`."""
    return _shared[0].run(program, *arguments, **options)


def start_training(program, *arguments, **options):
    """Start a program in the shared interpreter with torch: see `Interpreter.start`."""
    return _shared[1].start(program, *arguments, **options)


def run_training(program, *arguments, **options):
    """Run a program to its end in the shared interpreter with torch: see `Interpreter.run`."""
    return _shared[1].run(program, *arguments, **options)
