"""The compile server: runs the vendor's compiler in child processes.

The compiler can end its process (an unknown arch or builtin). So a small server is forked before
the process has threads, and runs every request in a child of its own. It is a fork, not a new
interpreter, because the process may run under a C library other than the host's, which a new
program would not get.

Where ``KERNELSEAM_HIP`` names a folder that ``tools/get-hiprtc.sh`` made, the server is a new
interpreter after all: the folder's ``run`` starts it under the C library that hiprtc there needs.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from kernelseam.errors import InvalidValue, KernelSeamError
from kernelseam.exchange import Answers, Requests
from kernelseam.forking import new_lock

VARIABLE = "KERNELSEAM_HIP"
"""Names the folder of a hiprtc that needs a C library of its own."""
TIME_LIMIT = 900
"""Seconds that one request may take; the child ends itself then (SIGALRM)."""


class WorkerDied(KernelSeamError):
    """The child that served a request ended without an answer. ``signal`` is the signal's name or
    "", ``log`` what the child had written to its standard output and error."""

    def __init__(self, reason: str, signal: str, log: str) -> None:
        self.reason, self.signal, self.log = reason, signal, log
        super().__init__(reason)


@dataclass(frozen=True)
class _Answer:
    """A child's end: its pickled (succeeded, value), or None, with its exit status and output."""

    pickled: bytes | None
    status: int
    log: str


class CompileServer:
    """A forked process that runs functions in children of its own, one at a time."""

    def __init__(self) -> None:
        self._lock = new_lock()
        self._requests: Requests | None = None
        self._pid = self._owner = 0

    def start(self) -> None:
        """Fork the server now, if this process has none yet."""
        with self._lock:
            self._started()

    def run(self, function: Callable[..., Any], *arguments: object) -> Any:
        """``function(*arguments)`` in a fresh child: its value, or the exception it raised.

        Function, arguments and value travel by pickle. Raises WorkerDied where the child ended
        without an answer.
        """
        request = pickle.dumps((function, arguments))
        with self._lock:
            requests = self._started()
            try:
                answer: _Answer = pickle.loads(requests.ask(request))
            except (EOFError, OSError) as e:
                self._end()
                raise WorkerDied("the compile server was ended from outside", "", "") from e
            except BaseException:  # interrupted: the answer is no longer needed
                self._end()
                raise
        if answer.pickled is None:
            raise _death(answer)
        succeeded, value = pickle.loads(answer.pickled)
        if succeeded:
            return value
        raise value

    def _started(self) -> Requests:
        # A forked copy of this process must not share the connection: it starts a server of its
        # own.
        if self._requests is None or self._requests.closed or self._owner != os.getpid():
            parent_end, child_end = Pipe()
            owner = os.getpid()
            if program := launcher():
                pid = _spawn(program, child_end)
                child_end.close()
                self._requests, self._pid, self._owner = Requests(parent_end), pid, owner
                return self._requests
            with warnings.catch_warnings():
                # Python warns of forking beside threads; the server takes no lock that one of them
                # could hold.
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
            if pid == 0:
                _serve(child_end, owner)
            child_end.close()
            with contextlib.suppress(OSError):  # whoever of the two is first
                os.setpgid(pid, pid)
            self._requests, self._pid, self._owner = Requests(parent_end), pid, owner
        return self._requests

    def _end(self) -> None:
        """End the server, and the child that it waits for."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)


def launcher() -> Path | None:
    """The program that starts others where the folder's hiprtc works, or None where none is named
    or this process was started by it. Raises InvalidValue for a folder that has none."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        return None
    program = Path(folder).expanduser().absolute() / "run"
    if not os.access(program, os.X_OK):
        raise InvalidValue(
            VARIABLE,
            folder,
            "must be a folder with a program `run`",
            f"Make it in a checkout: `tools/get-hiprtc.sh {folder}`",
        )
    under = os.environ.get("KERNELSEAM_HIP_RUN", "")
    return None if os.path.exists(under) and os.path.samefile(program, under) else program


_START = """
import sys
sys.path[:] = sys.argv[3:]
from kernelseam_rocm import compiler, disassembly, worker  # of the first two most requests are
worker.main()
"""


def _spawn(program: Path, connection: Connection[Any, Any]) -> int:
    """Start the server by a program, with this process's modules; its process's number."""
    os.set_inheritable(connection.fileno(), True)
    arguments = (str(connection.fileno()), str(os.getpid()), *sys.path)
    command = [str(program), sys.executable, "-c", _START, *arguments]
    return os.posix_spawn(program, command, os.environ, setpgroup=0)


def main() -> NoReturn:
    """Serve, as a program of its own: by the connection and for the owner that it was given."""
    _serve(Connection(int(sys.argv[1])), int(sys.argv[2]))


@cache
def server() -> CompileServer:
    """The process's compile server; not started yet."""
    return CompileServer()


def _death(answer: _Answer) -> WorkerDied:
    if os.WIFSIGNALED(answer.status):
        name = signal.Signals(os.WTERMSIG(answer.status)).name
        limit = f" after its time limit of {TIME_LIMIT} s" if name == "SIGALRM" else ""
        return WorkerDied(f"the compiler ended its process with {name}{limit}", name, answer.log)
    status = os.WEXITSTATUS(answer.status)
    return WorkerDied(f"the compiler ended its process with exit status {status}", "", answer.log)


def _serve(connection: Connection[Any, Any], owner: int) -> NoReturn:
    """Serve requests until the owner is gone."""
    try:
        os.setpgid(0, 0)  # the owner ends the server and its child as one
        detach(connection.fileno())
        answers = Answers(connection)
        while True:
            # Another process may hold a copy of the owner's end, so that the end of file never
            # comes: look at the parent.
            while not answers.poll(1.0):
                if os.getppid() != owner:
                    os._exit(0)
            answers.answer(pickle.dumps(_in_child(answers.next(), connection)))
    finally:
        os._exit(0)


def detach(*keep: int) -> None:
    """Close and reset what a forked server must not share with its owner: descriptors, signal
    handlers. ``keep``: descriptors that stay open."""
    faulthandler.disable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGALRM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    first = 3
    for descriptor in sorted(keep):
        os.closerange(first, descriptor)
        first = descriptor + 1
    os.closerange(first, os.sysconf("SC_OPEN_MAX"))


def _in_child(request: bytes, connection: Connection[Any, Any]) -> _Answer:
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as log:
        pid = os.fork()
        if pid == 0:
            connection.close()
            _child(request, output.fileno(), log.fileno())
        _, status = os.waitpid(pid, 0)
        output.seek(0)
        log.seek(0)
        answered = os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0
        return _Answer(
            output.read() if answered else None, status, log.read().decode(errors="replace")
        )


def _child(request: bytes, output: int, log: int) -> NoReturn:
    status = 1
    with contextlib.suppress(BaseException):
        os.dup2(log, 1)
        os.dup2(log, 2)
        signal.alarm(TIME_LIMIT)
        function, arguments = pickle.loads(request)
        try:
            pickled = pickle.dumps((True, function(*arguments)))
        except Exception as e:
            pickled = pickle.dumps((False, e))
        with os.fdopen(output, "wb", closefd=False) as file:
            file.write(pickled)
        status = 0
    os._exit(status)
