"""The emulator's process: forked, so that it shares the arena and the C library; ended by a crash
or its time limit.

One process serves every emulated device, one launch at a time. After its death the next launch
starts another: device memory outlives it.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from kernelseam.contract import LaunchConfig
from kernelseam.errors import DeviceError
from kernelseam.exchange import Answers, Requests
from kernelseam.forking import new_lock
from kernelseam_rocm import worker

from kernelseam_rocm_emulator.checkout import Checkout
from kernelseam_rocm_emulator.counting.instructions import Access
from kernelseam_rocm_emulator.counting.recorder import Recorder, Tally
from kernelseam_rocm_emulator.faults import describe, on_fault
from kernelseam_rocm_emulator.memory import Arena, protect

if TYPE_CHECKING:
    from kernelseam_rocm_emulator.counting.recording import Recording

TIME_LIMIT = 900
"""Time limit of one launch in seconds, after which the process ends itself (SIGALRM)."""

_LOG_LINES = 40
DONE, FAILED, FAULT = "done", "failed", "fault"
"""Kinds of answers: a value; an error after which the process goes on; an error with which it
ends."""


@dataclass(frozen=True)
class Request:
    """One launch. ``elf`` is there where the process has not seen the code object yet."""

    digest: str
    elf: bytes | None
    arch: str
    kernel: str
    launch: LaunchConfig
    arguments: bytes
    live: tuple[tuple[int, int], ...]
    """Device memory that may be touched: first address and bytes of its pages."""
    accesses: Mapping[int, Access] | None = None
    """The kernel's memory instructions by address, where the launch is to be counted."""


@dataclass(frozen=True)
class TestRequest:
    """Run the self-test's kernels."""

    elf: bytes
    arch: str


class Emulator:
    """The worker's owner: starts it, sends it launches, and reports how it ended."""

    def __init__(
        self, checkout: Checkout, arena: Arena, folder: Callable[[], Path], limit: int = TIME_LIMIT
    ) -> None:
        """``folder``: makes and returns the folder for what the emulator keeps."""
        self.checkout, self.arena, self.limit = checkout, arena, limit
        self.folder = folder
        self._lock = new_lock()
        self._requests: Requests | None = None
        self._pid = self._owner = 0
        self._log = -1
        self._sent: set[str] = set()
        self.recording: Recording | None = None
        """Where launches are counted; `emulation.recorded` sets it."""

    def launch(
        self,
        digest: str,
        elf: bytes,
        arch: str,
        kernel: str,
        launch: LaunchConfig,
        arguments: bytes,
    ) -> int:
        """Run a kernel; returns the number of instructions that its waves executed. Raises
        DeviceError."""
        recording = self.recording
        accesses = None if recording is None else recording.accesses(elf, arch, kernel)
        with self._lock:
            self._start()
            missing = None if digest in self._sent else elf
            live = self.arena.live()
            request = Request(digest, missing, arch, kernel, launch, arguments, live, accesses)
            executed: int
            tallies: Mapping[int, Tally]
            executed, tallies = self._ask(request, f"kernel {kernel} on {arch}, emulated,")
            self._sent.add(digest)
        if recording is not None:
            recording.add(elf, arch, kernel, launch, tallies)
        return executed

    def test(self, elf: bytes, arch: str) -> list[str]:
        """Run the self-test; returns a message about what failed. Raises DeviceError."""
        with self._lock:
            self._start()
            failures: list[str] = self._ask(
                TestRequest(elf, arch), f"the self-test of the emulator for {arch}"
            )
            return failures

    def _ask(self, request: object, what: str) -> Any:
        assert self._requests is not None
        try:
            kind, value = pickle.loads(self._requests.ask(pickle.dumps(request)))
        except (EOFError, OSError):
            raise DeviceError(f"{what} ended the emulator's process: {self._bury()}") from None
        except BaseException:  # interrupted: the answer is no longer read
            self._bury()
            raise
        if kind == DONE:
            return value
        if kind == FAULT:
            self._bury()
        raise DeviceError(f"{what} failed: {value}")

    def _start(self) -> None:
        # A forked copy of this process must not share the connection, nor does it share new memory
        # with the worker.
        if self._alive():
            return
        mine, theirs = Pipe()
        self._log = os.memfd_create("emulation")
        owner, cache = os.getpid(), self.folder()
        with warnings.catch_warnings():
            # Python warns of forking beside threads; the child takes no lock that one of them could
            # hold.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            _serve(theirs, owner, self.checkout, self.arena, cache, self._log, self.limit)
        theirs.close()
        self._requests, self._pid, self._owner, self._sent = Requests(mine), pid, owner, set()

    def _alive(self) -> bool:
        """Whether a worker process is running."""
        return (
            self._requests is not None and not self._requests.closed and self._owner == os.getpid()
        )

    def _bury(self) -> str:
        """End the process if it is still running; returns why it ended, and the end of its
        output."""
        assert self._requests is not None
        self._requests.close()
        os.kill(self._pid, signal.SIGKILL)
        _, status = os.waitpid(self._pid, 0)
        with open(self._log, "rb") as log:
            log.seek(0)
            lines = log.read().decode(errors="replace").splitlines()[-_LOG_LINES:]
        output = "\n".join(["", "Its output:", *lines]) if lines else ""
        if not os.WIFSIGNALED(status):
            return f"exit status {os.WEXITSTATUS(status)}.{output}"
        name = signal.Signals(os.WTERMSIG(status)).name
        limit = f" after its time limit of {self.limit} s" if name == "SIGALRM" else ""
        return f"{name}{limit}.{output}"

    def stop(self) -> None:
        """End the process, if there is one."""
        with self._lock:
            if self._alive():
                self._bury()


def _serve(
    connection: Connection[Any, Any],
    owner: int,
    checkout: Checkout,
    arena: Arena,
    cache: Path,
    log: int,
    limit: int,
) -> NoReturn:
    """The process's main loop, until its owner has ended."""
    try:
        worker.detach(connection.fileno(), log)
        for standard in (1, 2):
            os.dup2(log, standard)
        # The owner's own streams may write anywhere.
        sys.stdout, sys.stderr = (open(n, "w", buffering=1, closefd=False) for n in (1, 2))  # noqa: SIM115
        warnings.resetwarnings()  # the owner may raise them; NaN from inf - inf is a result here
        answers = Answers(connection)
        service = _Service(checkout, arena, cache, answers)
        while True:
            while not answers.poll(1.0):
                if os.getppid() != owner:
                    os._exit(0)
            request = pickle.loads(answers.next())
            os.ftruncate(1, 0)
            os.lseek(1, 0, os.SEEK_SET)
            signal.alarm(limit)
            answer = service.answer(request)
            signal.alarm(0)
            answers.answer(pickle.dumps(answer))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(1)


class _Service:
    """The process's work: tests and launches."""

    def __init__(self, checkout: Checkout, arena: Arena, cache: Path, answers: Answers) -> None:
        # Imported only here, because it imports the emulator.
        from kernelseam_rocm_emulator import interpreter

        protect(arena.start, arena.capacity, False)
        interpreter.prepare(checkout.compiler, cache)
        self._interpreter = interpreter.Interpreter(str(checkout.folder))
        self._modules: dict[str, interpreter.Module] = {}
        self._live: frozenset[tuple[int, int]] = frozenset()
        self._answers = answers
        on_fault(self._fault)

    def answer(self, request: Request | TestRequest) -> tuple[str, Any]:
        try:
            if isinstance(request, TestRequest):
                from kernelseam_rocm_emulator import selftest

                return DONE, selftest.run(self._interpreter, request.elf, request.arch)
            return DONE, self._launch(request)
        except DeviceError as e:
            return FAILED, str(e)
        except Exception as e:  # whatever the emulator raises
            traceback.print_exc()
            return FAILED, f"{type(e).__name__}: {e} ({self._interpreter.where})"

    def _launch(self, request: Request) -> tuple[int, Mapping[int, Tally]]:
        live = frozenset(request.live)
        for change, accessible in ((self._live - live, False), (live - self._live, True)):
            for start, size in change:
                protect(start, size, accessible)
        self._live = live
        if request.elf is not None:
            self._modules[request.digest] = self._interpreter.load(request.elf, request.arch)
        before = self._interpreter.executed
        counted = None if request.accesses is None else Recorder(request.arch, request.accesses)
        self._interpreter.run(
            self._modules[request.digest],
            request.kernel,
            request.launch,
            request.arguments,
            counted,
        )
        return self._interpreter.executed - before, counted.tallies if counted else {}

    def _fault(self, address: int) -> None:
        """Report a fault's address to the owner. The process ends then: its state is undefined."""
        where = self._interpreter.where
        places = [
            (f"an allocation of device memory ({size} bytes of pages)", s, s + size)
            for s, size in self._live
        ]
        places += [(what, r.address, r.address + r.size) for what, r in where.regions.items()]
        guards = [(f"{what} of {r.size} bytes", *r.guards) for what, r in where.regions.items()]
        message = f"access out of bounds, {describe(address, places, guards)} ({where})"
        self._answers.answer(pickle.dumps((FAULT, message)))
