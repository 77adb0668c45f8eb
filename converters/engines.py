"""Tasks, the engines that run them, and the progress of the work."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait as wait_for_end
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, TypeVar, cast

from zb_hdf5 import ArgumentError, UnavailableError, ZbError, console
from zb_hdf5.errors import Remedy
from zb_hdf5.files.paths import head_of, on_failure
from zb_hdf5.files.publishing import fresh_file
from zb_hdf5.signals import POLL_S, deferred_signals, deliver_signals

#: Is called with the amount that was done since the last call: tokens, or bytes of documents.
OnProgress = Callable[[int], None]
_Result = TypeVar("_Result")
#: Bytes of a number in a note, at most.
NOTED_BYTES: Final = 20
#: Begins the names of worker processes.
WORKER_NAME: Final = "zb-convert-worker-"
#: Exit code of a worker that was about to convert while it imported the main module.
UNGUARDED_MAIN: Final = 79


def no_progress(amount: int) -> None:
    """Show nothing, as in a worker, whose progress is seen from its files."""


class ProgressCalls:
    """Calls a function with the tokens that are written, and shows nothing: see `console.Progress`."""

    def __init__(self, progress: OnProgress | None = None) -> None:
        self._progress = progress or no_progress
        self._unit = "tok"

    def begin(self, label: str, total: int, unit: str = "tok") -> None:
        self._unit = unit

    def advance(self, amount: int) -> None:
        if self._unit == "tok":
            self._progress(amount)

    def keep(self, amount: int) -> None:
        """Do nothing: an earlier run has written them."""


class EngineTask(Protocol):
    """The work of one process."""

    @property
    def amount(self) -> int:
        """All of it, in the unit of the progress."""

    def amount_done(self) -> int:
        """Return the part that is done, as any other process can see it."""


class CountedWork:
    """Counts the work of a task: for the process that does it, and in a note for the one that waits for it.

    Parameters
    ----------
    amount
        All of the work.
    progress
        Called with the work that was done since the last call.
    note
        The file of the note; None: nobody else waits.
    """

    def __init__(self, amount: int, progress: OnProgress, note: Path | None) -> None:
        self._amount = amount
        self._progress = progress
        self._note = note
        self._done = 0
        self._noted_s = time.monotonic()

    def reach(self, share: float) -> None:
        """Note the share of the work that is done."""
        done = int(share * self._amount)
        now_s = time.monotonic()
        self._progress(done - self._done)
        self._done = done
        if self._note is not None and now_s - self._noted_s >= POLL_S:
            with open(fresh_file(self._note), "w", encoding="ascii") as note:
                note.write(str(done))
            self._noted_s = now_s


def work_noted_in(note: Path) -> int:
    """Return the work that another process has noted."""
    with contextlib.suppress(OSError, ValueError):
        return int(head_of(note, NOTED_BYTES)[0])
    return 0


class Engine:
    """Runs tasks one after the other. Subclasses use processes or MPI ranks, and write the same bytes."""

    workers: int = 1  # how many run at the same time
    workers_per_node: int = 1  # how many of them share the memory of one node, at most

    def run(
        self, function: Callable[[Any, OnProgress], _Result], tasks: Iterable[EngineTask], progress: OnProgress
    ) -> Generator[tuple[int, _Result]]:
        """Yield (number of the task, its result) as they finish; an exception or closing early ends the tasks."""
        for number, task in enumerate(tasks):
            deliver_signals()
            yield number, function(task, progress)


class Workers(NamedTuple):
    """Who does the work of a conversion: an engine, the threads of each process, and who shows the progress."""

    engine: Engine
    num_threads: int
    shown: ProgressCalls | console.Progress


class Pooled(Engine):
    """Runs tasks on an executor; no more are handed over than `workers` can soon begin.

    Parameters
    ----------
    executor
        Runs them.
    workers
        How many run at the same time.
    started
        The processes of the executor, which are ended with all tasks at once; None: tasks that have begun run to
        their end.
    """

    def __init__(self, executor: Executor, workers: int, started: StartedProcesses | None = None) -> None:
        self._executor = executor
        self._started = started
        self.workers = workers
        self.workers_per_node = workers

    def run(
        self, function: Callable[[Any, OnProgress], _Result], tasks: Iterable[EngineTask], progress: OnProgress
    ) -> Generator[tuple[int, _Result]]:
        waiting = enumerate(tasks)
        running: dict[Future[_Result], tuple[int, EngineTask]] = {}
        seen: dict[int, int] = {}
        with deferred_signals():
            try:
                while True:
                    deliver_signals()
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
            except BrokenProcessPool:
                time.sleep(POLL_S)  # a signal to all processes reaches this one last
                deliver_signals()
                raise self._death() from None
            finally:
                self._end(running)

    def _end(self, running: Collection[Future[Any]]) -> None:
        """Wait until no task is at work: its files may be removed then."""
        if self._started is None:
            running = [future for future in running if not future.cancel()]
        elif running:
            # none is cancelled: a pool whose processes are gone fails at one that is, and never ends the others
            self._started.kill()
        wait(running)

    def _death(self) -> ZbError:
        """Return the error for a worker that has died."""
        if self._started is not None and self._started.imported_unguarded_main():
            script = getattr(sys.modules["__main__"], "__file__", "the script")
            return ArgumentError(
                f"{script}: converts again when a worker process imports it, as each does: put its work below the line "
                'if __name__ == "__main__": or convert with workers=1'
            )
        return UnavailableError(
            "a worker process died, perhaps killed for its memory; finished shards are kept",
            remedy=Remedy.FEWER_WORKERS,
        )


class StartedProcesses(ForkServerContext):
    """The way to start worker processes, which keeps each of them. Their names tell a worker what it is."""

    def __init__(self) -> None:
        super().__init__()
        self._processes: list[BaseProcess] = []

    def Process(self, *args: Any, **kwargs: Any) -> BaseProcess:  # type: ignore[override]
        process = super().Process(*args, **{**kwargs, "name": f"{WORKER_NAME}{len(self._processes)}"})
        self._processes.append(process)
        return process

    def kill(self) -> None:
        """End all processes; a pool gives up every task when the first is gone."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()

    def imported_unguarded_main(self) -> bool:
        """Return whether a process has ended because the main module converts when it is imported."""
        return any(process.exitcode == UNGUARDED_MAIN for process in self._processes)


def end_unguarded_worker() -> None:
    """End a worker process that imports the main module, which begins a conversion of its own meanwhile.

    The process that has started this one reports it; a traceback of each worker would hide that message.
    """
    if multiprocessing.current_process().name.startswith(WORKER_NAME):
        os._exit(UNGUARDED_MAIN)


@contextlib.contextmanager
def open_engine(executor: str, workers: int, preload: Sequence[str] = ()) -> Generator[Engine | None]:
    """Open the engine; None in an MPI rank that has run its tasks for others and is done.

    Signals are kept to the end of the block: whoever has work of some length in it calls `deliver_signals` meanwhile.
    """
    with deferred_signals():
        if executor == "mpi":
            yield from _open_mpi()
        elif workers == 1:
            yield Engine()
        else:
            yield from _open_processes(workers, preload)


def _open_processes(workers: int, preload: Sequence[str]) -> Iterator[Engine]:
    sys.warnoptions.append("ignore:resource_tracker")  # a killed pool leaves semaphores, which the tracker removes
    resource_tracker.ensure_running()  # starting it would unblock SIGINT again, and starting a forkserver starts it
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # workers inherit it until they can ignore it
    sys.warnoptions.pop()
    context = StartedProcesses()  # by a forkserver: this process has threads
    context.set_forkserver_preload(list(preload))
    forkserver.ensure_running()
    signal.pthread_sigmask(signal.SIG_SETMASK, previous)
    with ProcessPoolExecutor(workers, context, initializer=_begin_worker) as executor, on_failure(context.kill):
        yield Pooled(executor, workers, context)


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
    except (ImportError, RuntimeError) as error:  # no mpi4py, or no MPI library for it
        raise UnavailableError(
            f"executor mpi needs mpi4py and an MPI library: {error}; pip install 'zb_hdf5[mpi]', and load your "
            "site's MPI module",
            options=["executor"],
        ) from None
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
            f"executor mpi: srun has started {tasks} tasks, but each of them is an MPI world of one rank",
            remedy=Remedy.MPI_WORLD,
            options=["executor"],
        )


def default_workers() -> int:
    """Return the cores that this process may use: the cores of its Slurm step, not of the node."""
    return len(os.sched_getaffinity(0))
