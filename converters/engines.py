"""Engines run the tasks: this process, local processes, or MPI ranks. The bytes are the same.

Every engine but the first is a `concurrent.futures.Executor`. It runs a module-level function of one picklable task,
and the result does not depend on where it ran.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait as wait_for_end
from types import FrameType
from typing import Any, Final, Self, cast

from zb_hdf5 import UnavailableError
from zb_hdf5.converters.task import Engine, Progress, Result, Task, no_progress

#: How often the progress of other processes is looked up.
POLL_S: Final = 0.5


class Inline:
    """Runs one task after the other in this process."""

    workers = workers_per_node = 1

    def run(
        self, function: Callable[[Any, Progress], Result], tasks: Iterable[Task], progress: Progress
    ) -> Generator[tuple[int, Result]]:
        for number, task in enumerate(tasks):
            yield number, function(task, progress)


class Pooled:
    """Runs tasks on an executor; no more are handed over than `workers` can soon begin.

    Parameters
    ----------
    executor, workers
        What runs them, and how many at the same time.
    interrupt
        Ends all tasks at once, with an error; None: those that have begun run to their end.
    """

    def __init__(self, executor: Executor, workers: int, interrupt: Callable[[], None] | None = None) -> None:
        self._executor, self.workers, self._interrupt = executor, workers, interrupt
        self.workers_per_node = workers

    def run(
        self, function: Callable[[Any, Progress], Result], tasks: Iterable[Task], progress: Progress
    ) -> Generator[tuple[int, Result]]:
        waiting = enumerate(tasks)
        running: dict[Future[Result], tuple[int, Task]] = {}
        seen: dict[int, int] = {}
        with _KeptSignals() as signals:
            try:
                while True:
                    signals.deliver()
                    for number, task in waiting:
                        running[self._executor.submit(function, task, no_progress)] = number, task
                        if len(running) > self.workers:
                            break
                    if not running:
                        return
                    finished, _ = wait(running, timeout=POLL_S, return_when=FIRST_COMPLETED)
                    for number, task in running.values():
                        done = max(task.amount_done(), seen.get(number, 0))
                        progress(done - seen.get(number, 0))
                        seen[number] = done
                    for future in finished:
                        number, task = running.pop(future)
                        result = future.result()
                        progress(max(0, task.amount - seen.get(number, 0)))
                        yield number, result
            except BrokenProcessPool as error:
                raise UnavailableError(
                    "a worker process died, perhaps killed for its memory; finished shards are kept: run the same "
                    "command with --resume, and perhaps fewer --workers"
                ) from error
            finally:
                self._end(running)

    def _end(self, running: Collection[Future[Any]]) -> None:
        """Wait until no task is at work: its files may be removed then."""
        if self._interrupt is None:
            running = [future for future in running if not future.cancel()]
        elif running:
            # none is cancelled: a pool whose processes are gone fails at one that is, and never ends the others
            self._interrupt()
        wait(running)


class _KeptSignals:
    """Keeps Ctrl+C and SIGTERM until `deliver`.

    What Python raises for them comes between any two steps of the main thread, also while it holds a lock of the pool,
    which would then wait for it for ever.
    """

    def __init__(self) -> None:
        self._previous: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._kept: list[int] = []

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # no other may have handlers
            for number in (signal.SIGINT, signal.SIGTERM):
                previous = signal.getsignal(number)
                if callable(previous):
                    self._previous[number] = previous
                    signal.signal(number, lambda number, frame: self._kept.append(number))
        return self

    def deliver(self) -> None:
        """Have the handlers called that were there before."""
        while self._kept:
            number = self._kept.pop(0)
            self._previous[number](number, None)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)
        self.deliver()  # instead of an error, too: workers that got the same signal look like workers that died


@contextlib.contextmanager
def open_engine(executor: str, workers: int) -> Generator[Engine | None]:
    """Open the engine; None in an MPI rank that has run its tasks for others and is done.

    Parameters
    ----------
    executor
        "local" or "mpi".
    workers
        Local processes; 1 is this process. MPI brings its own number.

    Raises
    ------
    UnavailableError
        If no MPI library is installed.
    """
    if executor == "mpi":
        yield from _open_mpi()
    elif workers == 1:
        yield Inline()
    else:
        yield from _open_processes(workers)


def _open_processes(workers: int) -> Iterator[Engine]:
    before = set(multiprocessing.active_children())
    resource_tracker.ensure_running()  # starting it would unblock SIGINT again, and starting a forkserver starts it
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # workers inherit it until they can ignore it
    context = multiprocessing.get_context("forkserver")  # this process has threads
    context.set_forkserver_preload(
        [
            "zb_hdf5.converters.shard",
            "zb_hdf5.converters.npy_source",
            "zb_hdf5.formats.hdf5.h5_writer",
            "zb_hdf5.store.shards",
        ]
    )
    forkserver.ensure_running()
    signal.pthread_sigmask(signal.SIG_SETMASK, previous)

    def interrupt() -> None:
        children = set(multiprocessing.active_children()) - before
        for child in children:
            child.kill()  # the process that handed out the work removes their files
        for child in children:
            wait_for_end([child.sentinel])  # the pool gives up every task when the first is gone

    with ProcessPoolExecutor(workers, context, initializer=_begin_worker) as executor:
        yield Pooled(executor, workers, interrupt)


def _begin_worker() -> None:
    """End with the parent, whatever ends it; leave Ctrl+C to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_end_with_parent, name="zb-convert-parent", daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait_for_end([parent.sentinel])
        os._exit(1)


def _open_mpi() -> Iterator[Engine | None]:
    try:
        from mpi4py import MPI
        from mpi4py.futures import MPICommExecutor
    except (ImportError, RuntimeError) as error:  # no mpi4py, or no MPI library behind it
        raise UnavailableError(
            f"--executor mpi needs mpi4py and an MPI library: {error}; pip install 'zb_hdf5[mpi]', and load your "
            "site's MPI module"
        ) from error
    world = MPI.COMM_WORLD
    require_one_world(world.Get_size())
    on_this_node = world.Split_type(MPI.COMM_TYPE_SHARED).Get_size()
    if world.Get_rank() != 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the first rank ends the others: one that leaves early hangs it
    with MPICommExecutor(world, root=0) as executor:
        engine = Pooled(cast(Executor, executor), max(1, world.Get_size() - 1))
        engine.workers_per_node = min(engine.workers, on_this_node)
        yield None if executor is None else engine


def require_one_world(size: int) -> None:
    """Raise `UnavailableError` if Slurm has started several tasks and each is an MPI world of its own."""
    tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS", 1))
    if size == 1 and tasks > 1:
        raise UnavailableError(
            f"--executor mpi: srun has started {tasks} tasks, but each of them is an MPI world of one rank: use srun "
            "--mpi=pmix or --mpi=pmi2, whichever this MPI library was built for (see 'srun --mpi=list')"
        )


def default_workers() -> int:
    """Return the cores that this process may use: those of its Slurm step, not of the node."""
    return len(os.sched_getaffinity(0))
