"""Work in processes of their own: programs in a new interpreter, and functions in a fork of this one."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

TESTS = Path(__file__).parent
#: Programs of more than a few lines; each says in its docstring which arguments it takes.
PROGRAMS = TESTS / "programs"


def environment(**variables):
    """Return the environment of a process that can import these helpers."""
    paths = [str(TESTS), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **variables}


def command_of(program, *arguments):
    """Return the command that runs a program in a new interpreter: code, or the path of a file."""
    chosen = [str(program)] if isinstance(program, Path) else ["-c", program]
    return [sys.executable, *chosen, *map(str, arguments)]


def started(program, *arguments, **options):
    """Start a program with pipes to its streams of text."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    how = {"text": True, "env": environment(), **pipes, **options}
    return subprocess.Popen(command_of(program, *arguments), **how)


@contextlib.contextmanager
def running(*processes):
    """Return one process or several, and see that they end."""
    with contextlib.ExitStack() as stack:
        for process in processes:
            stack.enter_context(process)
            stack.callback(process.kill)
        yield processes if len(processes) > 1 else processes[0]


def python(program, *arguments, **options):
    """Run a program to its end."""
    how = {"capture_output": True, "text": True, "timeout": 120, "env": environment(), **options}
    return subprocess.run(command_of(program, *arguments), **how)


def killed(lines):
    """Run lines, and end as a killed program does: without its last words."""
    python(f"import os\nimport numpy as np\nfrom zb_hdf5 import *\n{lines}\nos._exit(9)")


def output_of(process):
    """Wait for the end of a process, which must succeed; return its output."""
    with process:
        out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    return out


def anonymous_bytes(session):
    """Return the memory of all processes of a session without pages of files; pages that they share count once."""
    found = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if os.getsid(int(folder.name)) == session:
                found += int((folder / "smaps_rollup").read_text().split("Pss_Anon:")[1].split()[0]) * 1024
    return found


def wait_until(condition, process, step_s=0.001):
    """Wait for what a process will do."""
    end = time.monotonic() + 60
    while not condition():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < end
        time.sleep(step_s)


@contextlib.contextmanager
def forked(function):
    """Call a function in a fork, while this process goes on; it must return what is true."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 and threads: of torch, idle here
        child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if function() else 2
        finally:
            os._exit(code)
    yield
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def in_forks(*functions, limit_s=60):
    """Call functions in forks, all at the same moment; return what each returns, or "died of" and a signal."""
    starting, start = os.pipe()
    children = []
    for function in functions:
        receiving, sending = os.pipe()
        child = os.fork()
        code = 1
        if child == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process even inside a library
            signal.alarm(limit_s)
            try:
                os.close(start)
                os.read(starting, 1)  # until the parent closes the other end
                os.write(sending, json.dumps(function()).encode())
                code = 0
            finally:
                os._exit(code)
        os.close(sending)
        children.append((child, receiving))
    os.close(start)
    os.close(starting)
    return [_result_of(*child) for child in children]


def killed_after(function):
    """Call a function in a fork that is then killed: nothing that it holds is closed or finished."""
    assert in_forks(lambda: [function(), os.kill(os.getpid(), signal.SIGKILL)]) == ["died of SIGKILL"]


def killed_when(condition, function):
    """Call a function in a fork that is killed as soon as a condition holds."""
    child = os.fork()
    if child == 0:
        try:
            function()
        finally:
            os._exit(1)
    while not condition():
        assert os.waitpid(child, os.WNOHANG)[0] == 0, "it has ended"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def _result_of(child, receiving):
    with open(receiving, "rb") as file:
        data = file.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code <= 0
    return f"died of {signal.Signals(-code).name}" if code else json.loads(data)
