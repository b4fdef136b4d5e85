"""A pool of worker processes that can neither stop this process nor outlive it."""

from __future__ import annotations

import math
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, TypeVar

from kernelseam.exchange import Answers, Requests
from kernelseam.forking import new_lock

T = TypeVar("T")

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
"""Environment variables by which array libraries limit the threads of a product; read when they are
loaded."""
QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""The cgroup's CPU quota: microseconds of CPU time per period, and the period."""


def cores() -> int:
    """CPU cores that this process may use: a container often sees all of the machine's cores, but
    has a quota of a few."""
    seen = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):
        time, period = QUOTA.read_text(encoding="ascii").split()
        return max(1, min(seen, math.ceil(int(time) / int(period))))
    return seen


class WorkerFailed(Exception):
    """A task that no worker finished."""


class _ProcessEnded(Exception):
    """A worker ended without a result; says why."""


class Workers:
    """``count`` processes, each a new interpreter whose array library has one thread.

    Each has its own thread of this process and its own pipe, and shares nothing with the others: in
    ``ProcessPoolExecutor`` and in pebble's ``ProcessPool``, a process that is killed while it sends
    leaves the pool waiting for the rest of its message. (Pebble pools of one process each lose the
    exit status of a process that ends at once, and have no time limit for one that is stopped
    before it takes its task.) A task whose process ends, or is killed after ``limit`` seconds
    without an answer, is given to a new process; if that ends too, the future raises WorkerFailed.
    """

    def __init__(self, count: int, limit: float) -> None:
        self._limit, self._threads, self._own = limit, ThreadPoolExecutor(count), threading.local()
        self._lock, self._processes, self._closed = new_lock(), list[SpawnProcess](), False

    def start(self, work: Callable[..., T], *arguments: Any) -> Future[T]:
        """Start ``work(*arguments)``. ``work`` must be a module's function; arguments, result and
        exceptions must be picklable. The future gives what the work returned, or raises what it
        raised, or WorkerFailed."""
        return self._threads.submit(self._do, work, arguments)

    def close(self) -> None:
        """Kill the processes, whatever they are doing."""
        with self._lock:
            self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.kill()
        self._threads.shutdown()
        for process in self._processes:
            process.join()

    def _do(self, work: Callable[..., T], arguments: tuple[Any, ...]) -> T:
        reason = ""
        for _ in range(2):
            try:
                return self._ask(work, arguments)
            except _ProcessEnded as e:
                reason = str(e)
        raise WorkerFailed(f"{reason}; so did the one before it")

    def _ask(self, work: Callable[..., T], arguments: tuple[Any, ...]) -> T:
        request = pickle.dumps((work, arguments))
        process, requests = self._worker()
        timer = threading.Timer(self._limit, process.kill)
        timer.daemon = True
        timer.start()
        try:
            answer = requests.ask(request)
        except (EOFError, OSError):
            if timer.finished.is_set():
                raise _ProcessEnded(
                    f"its process gave no answer within {self._limit:g} s"
                ) from None
            process.join(10)
            raise _ProcessEnded(f"its process ended with status {process.exitcode}") from None
        except BaseException:  # interrupted: the answer is no longer wanted
            process.kill()
            raise
        finally:
            timer.cancel()
        returned, value = pickle.loads(answer)
        if not returned:
            raise value
        result: T = value
        return result

    def _worker(self) -> tuple[SpawnProcess, Requests]:
        """This thread's process (a new one where the last exchange failed) and the pipe to it."""
        if not hasattr(self._own, "worker") or self._own.worker[1].closed:
            with self._lock:
                if self._closed:
                    raise WorkerFailed("the pool was closed")
                spawn = get_context("spawn")
                pipe, child_end = spawn.Pipe()
                process = spawn.Process(target=_serve, args=(child_end,), daemon=True)
                with _one_thread():
                    process.start()
                # only the child holds it then, so that the pipe ends with the child
                child_end.close()
                self._processes.append(process)
                self._own.worker = process, Requests(pipe)
        worker: tuple[SpawnProcess, Requests] = self._own.worker
        return worker


@contextmanager
def _one_thread() -> Iterator[None]:
    """Within the block, new processes see each of THREADS as 1 unless the user set it: there is one
    process per core already."""
    missing = [name for name in THREADS if name not in os.environ]
    os.environ.update(dict.fromkeys(missing, "1"))
    try:
        yield
    finally:
        for name in missing:
            del os.environ[name]


def _serve(pipe: Connection) -> None:
    """A worker's main loop. It ends with the pipe, which ends with the parent: an orphan would keep
    the inherited stdout open, and its reader waiting."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    answers = Answers(pipe)
    while True:
        try:
            work, arguments = pickle.loads(answers.next())
        except EOFError:
            return
        try:
            answer = True, work(*arguments)
        except Exception as e:
            answer = False, e
        try:
            pickled = pickle.dumps(answer)
        except Exception as e:
            pickled = pickle.dumps((False, TypeError(f"its result cannot be sent: {e}")))
        try:
            answers.answer(pickled)
        except OSError:
            return
