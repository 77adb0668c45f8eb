"""Ctrl+C and SIGTERM, held back during work that must not be interrupted, and raised between two steps of it.

Python raises for a signal between any two steps of the main thread: also while it holds a lock, which is then held for
ever, inside a library, which makes another error of it, and inside a finalizer, which swallows it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, wait
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn, TypeVar

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

Handler = Callable[[int, FrameType | None], Any]
Result = TypeVar("Result")

#: How often a wait looks for signals.
POLL_S: Final = 0.2
#: Seconds that work beside the main thread may take to end by itself before a signal abandons it.
LEFT_BEHIND_S: Final = 1.0
#: How soon a signal is sent again whose exception was swallowed: the finalizer has ended by then.
AGAIN_S: Final = 0.05

#: Signals that another process or a timer sends; the signal of a fault meets the thread that has made it.
_SENT: Final = frozenset({signal.SIGALRM, signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2})

_keeping = False
_waiting: list[int] = []
_handlers: dict[int, Handler] = {}  # the handlers that `_keep` stands for


@contextlib.contextmanager
def deferred_signals() -> Generator[None]:
    """Keep Ctrl+C and SIGTERM until `deliver_signals`, or until the end of the block."""
    global _keeping
    if _keeping or threading.current_thread() is not threading.main_thread():  # no other thread may have handlers
        yield
        return
    for number in EXIT_OF_SIGNAL:
        handler = signal.getsignal(number)
        if callable(handler) and handler is not _keep:
            _handlers[number] = handler
            signal.signal(number, _keep)
    _keeping = True
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        _waiting.clear()  # the work ends by one of them already, whose exception has notes for the user
        raise
    finally:
        _keeping = False
        for number, handler in _handlers.items():
            signal.signal(number, handler)
        deliver_signals()  # instead of an error, too: processes that got the same signal look like processes that died


def _keep(number: int, frame: FrameType | None) -> None:
    if _keeping:
        _waiting.append(number)
    else:  # an exception has ended the lines that would have restored the handler
        _handlers[number](number, frame)


def deliver_signals() -> None:
    """Call the handler of a signal that was kept, which raises; only in the main thread."""
    if _waiting and threading.current_thread() is threading.main_thread():
        number = _waiting[0]
        _waiting.clear()
        _handlers[number](number, None)


def start_thread(thread: threading.Thread) -> None:
    """Start a thread, which meets no signal; one that comes meanwhile is met when the thread runs.

    Python waits for the thread with a lock, which would stay locked if a signal raised as it is taken.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SENT)
    try:
        thread.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def run_in_thread(work: Callable[[], Result], stop: Callable[[], object] = lambda: None) -> Result:
    """Do work of a library that looks at no signal in a thread: a signal calls `stop`, and soon abandons it."""
    done: Future[Result] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    with (
        deferred_signals()
    ):  # the wait takes a lock of the thread, which an exception at that moment would leave locked
        start_thread(threading.Thread(target=run, name="zb-beside", daemon=True))
        try:
            while not done.done():
                deliver_signals()
                wait([done], POLL_S)
        except BaseException:
            stop()
            # a thread of a library in Rust that comes back while the interpreter is taken down would abort the process
            wait([done], LEFT_BEHIND_S)
            raise
    return done.result()


class Terminated(SystemExit):
    """SIGTERM. Like Ctrl+C it unwinds, so that unfinished files are removed, and it carries notes for the user."""


def end_now(number: int, frame: FrameType | None) -> NoReturn:
    """End the process: the handler of a command while it begins and ends, when there is nothing to unwind."""
    os.write(2, f"Error: {EXIT_OF_SIGNAL[number].message}\n".encode())
    os._exit(EXIT_OF_SIGNAL[number].exit_code)


def _unwind(number: int, frame: FrameType | None) -> NoReturn:
    """Raise the exception of a signal; inside an import end the process: numpy cannot be imported a second time."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            end_now(number, frame)
        frame = frame.f_back
    raise EXIT_OF_SIGNAL[number].exception


class SignalExit(NamedTuple):
    """The end of a command by a signal."""

    exception: type[BaseException]
    word: str
    exit_code: int

    @property
    def message(self) -> str:
        return f"{self.word}; nothing unfinished was left under its final name"


EXIT_OF_SIGNAL: Final[dict[int, SignalExit]] = {
    signal.SIGINT: SignalExit(KeyboardInterrupt, "interrupted", 130),
    signal.SIGTERM: SignalExit(Terminated, "terminated", 143),
}


def _signal_of(error: BaseException | None) -> int | None:
    return next((number for number, end in EXIT_OF_SIGNAL.items() if isinstance(error, end.exception)), None)


def end_by(error: BaseException) -> SignalExit | None:
    """Return the end that an exception means, also if a library in C has turned it into a `SystemError`."""
    cause = error.__cause__ if isinstance(error, SystemError) else error
    number = _signal_of(cause)
    return None if number is None else EXIT_OF_SIGNAL[number]


def _send_after(is_over: threading.Event, number: int) -> None:
    """Send a signal to the main thread once more, after the hook that has asked for it, and its finalizer."""
    is_over.wait()
    time.sleep(AGAIN_S)
    main = threading.main_thread().ident
    if main is not None:
        signal.pthread_kill(main, number)


@contextlib.contextmanager
def unwinding_signals() -> Generator[None]:
    """Have Ctrl+C and SIGTERM raise in the main thread, also if a finalizer has swallowed their first exception."""
    if threading.current_thread() is not threading.main_thread():  # no other may have handlers
        yield
        return
    handlers = {number: signal.getsignal(number) for number in EXIT_OF_SIGNAL}
    hook = sys.unraisablehook

    def send_again(unraisable: UnraisableHookArgs) -> None:
        number = _signal_of(unraisable.exc_value)
        if number is None:
            hook(unraisable)
            return
        is_over = threading.Event()
        # from a thread: raised in here, it would be swallowed again
        threading.Thread(target=_send_after, args=(is_over, number), daemon=True).start()
        is_over.set()

    try:
        sys.unraisablehook = send_again
        for number in EXIT_OF_SIGNAL:
            signal.signal(number, _unwind)
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        sys.unraisablehook = hook
