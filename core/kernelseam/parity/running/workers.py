"""Processes that compute for this one, and can neither stop it nor outlive it."""

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
"""What array libraries read when they are loaded: how many threads a product may have."""
QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""Microseconds of processor time in a period, and the period."""


def cores() -> int:
    """How many this process may use: a container often sees all of the machine's, and is given a
    few."""
    seen = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):
        time, period = QUOTA.read_text(encoding="ascii").split()
        return max(1, min(seen, math.ceil(int(time) / int(period))))
    return seen


class Lost(Exception):
    """A task that no process finished."""


class _Gone(Exception):
    """Why a process will not bring a result."""


class Workers:
    """``count`` processes, each a new interpreter whose array library has one thread.

    Each has a thread of this process and a pipe of its own, and nothing that it shares with others:
    in ``ProcessPoolExecutor`` and in pebble's ``ProcessPool`` one that is killed while it sends
    leaves the pool waiting for the rest of its message. (Pools of pebble's with one process each
    lose the status of one that ends at once, and have no time limit for one that is stopped before
    it takes its task.) The task of a process that ends, or is killed since it gave no answer
    within ``limit`` seconds, is given to a new one; what ends that, too, is Lost.
    """

    def __init__(self, count: int, limit: float) -> None:
        self._limit, self._threads, self._own = limit, ThreadPoolExecutor(count), threading.local()
        self._lock, self._processes, self._closed = new_lock(), list[SpawnProcess](), False

    def start(self, work: Callable[..., T], *arguments: Any) -> Future[T]:
        """Begin ``work(*arguments)``: a function of a module, and what can be pickled, as must be
        what it returns or raises. The future's result is what it returned; it raises what the work
        raised, or Lost."""
        return self._threads.submit(self._do, work, arguments)

    def close(self) -> None:
        """End the processes, whatever they are at."""
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
            except _Gone as e:
                reason = str(e)
        raise Lost(f"{reason}; so did the one before it")

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
                raise _Gone(f"its process gave no answer within {self._limit:g} s") from None
            process.join(10)
            raise _Gone(f"its process ended with status {process.exitcode}") from None
        except BaseException:  # interrupted: nobody wants the answer any more
            process.kill()
            raise
        finally:
            timer.cancel()
        returned, found = pickle.loads(answer)
        if not returned:
            raise found
        result: T = found
        return result

    def _worker(self) -> tuple[SpawnProcess, Requests]:
        """This thread's process, a new one where the last exchange failed, and the way to ask
        it."""
        if not hasattr(self._own, "worker") or self._own.worker[1].closed:
            with self._lock:
                if self._closed:
                    raise Lost("nobody waits for it any more")
                spawn = get_context("spawn")
                pipe, its = spawn.Pipe()
                process = spawn.Process(target=_serve, args=(its,), daemon=True)
                with _one_thread():
                    process.start()
                its.close()  # so that the process alone has it, and the pipe ends with it
                self._processes.append(process)
                self._own.worker = process, Requests(pipe)
        found: tuple[SpawnProcess, Requests] = self._own.worker
        return found


@contextmanager
def _one_thread() -> Iterator[None]:
    """Within the block, new processes find THREADS set to 1, but where the user chose: there are as
    many processes as processors."""
    missing = [name for name in THREADS if name not in os.environ]
    os.environ.update(dict.fromkeys(missing, "1"))
    try:
        yield
    finally:
        for name in missing:
            del os.environ[name]


def _serve(pipe: Connection) -> None:
    """A worker's life. It ends with the pipe, which ends with the parent: an orphan would hold open
    the output that it shares, and keep whoever reads that waiting."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # that is for the parent to handle
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
            pickled = pickle.dumps((False, TypeError(f"what came of it cannot be sent: {e}")))
        try:
            answers.answer(pickled)
        except OSError:
            return
