"""Work in processes of their own: Python code in a new interpreter, and functions in a fork of this one."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import warnings


def started(code, *arguments, **options):
    """Start an interpreter with pipes to its streams of text."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], text=True, **{**pipes, **options})


@contextlib.contextmanager
def running(*processes):
    """Return one process or several, and see that they end."""
    with contextlib.ExitStack() as stack:
        for process in processes:
            stack.enter_context(process)
            stack.callback(process.kill)
        yield processes if len(processes) > 1 else processes[0]


def python(code, *arguments, **options):
    """Run code to its end."""
    how = {"capture_output": True, "text": True, "timeout": 120, **options}
    return subprocess.run([sys.executable, "-c", code, *map(str, arguments)], **how)


def output_of(process):
    """Wait for the end of a process, which must succeed; return its output."""
    with process:
        out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    return out


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
        child, code = os.fork(), 1
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
