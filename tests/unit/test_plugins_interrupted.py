"""Ctrl-C while a plugin's code runs reaches the program, and a discovery goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import kernelseam
import pytest
import strange_plugins
from kernelseam.containment import Contained, Escaped, error_text, traceback_text
from kernelseam.deadline import run_with_timeout

WAIT = "print('here', flush=True); time.sleep(60)"
"""What a plugin is at when the signal comes."""
HEAD = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
import numpy as np
import kernelseam
from kernelseam import BatchedGemmStrided, plan, plugins
from kernelseam.errors import InvalidValue
GEMM = BatchedGemmStrided(M=3, N=5, K=4, dtype="float64")
def multiply():
    a, b = np.ones((1, 3, 4)), np.ones((1, 4, 5))
    assert (kernelseam.bmm(a, b) == 4).all()
    return plan(GEMM, device="numpy").implementation
"""
Child = Callable[..., tuple[int, str, str]]


@pytest.fixture
def child(tmp_path: Path, python_command: list[str]) -> Child:
    """``child(script, *signals, PLACE=line)`` → (status, output, errors) of a Python with the
    strange plugin, which is sent one signal each time that it says "here"."""

    def run(script: str, *signals: int, **lines: str) -> tuple[int, str, str]:
        strange_plugins.write(tmp_path, "strange", **lines)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                [str(tmp_path), str(Path(kernelseam.__file__).parents[1])]
            ),
            "KERNELSEAM_PLUGINS": "strange",
        }
        process = subprocess.Popen(
            [*python_command, "-c", HEAD + script],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        try:
            assert process.stdout is not None
            for number in signals:
                line = process.stdout.readline()
                assert line == "here\n", line + process.communicate(timeout=60)[1]
                time.sleep(0.1)  # it goes to sleep
                process.send_signal(number)
            out, err = process.communicate(timeout=20)  # less than any limit
        finally:
            process.kill()
        return process.returncode, out, err

    return run


CALLS = {
    "IMPORT": "kernelseam.devices()",
    "DOCTOR": "plugins.plugins().doctor()",
    "BUILD": "plan(GEMM, device='numpy')",
    "DESCRIBE": "kernelseam.bmm(object(), object())",
}
"""The first two are waited for in a thread of their own."""


@pytest.mark.parametrize(("place", "call"), CALLS.items())
def test_ctrl_c_ends_the_program(child: Child, place: str, call: str) -> None:
    status, _, err = child(f"{call}\nprint('went on')", signal.SIGINT, **{place: WAIT})
    assert (status, err.splitlines()[-1]) == (-signal.SIGINT, "KeyboardInterrupt")


@pytest.mark.parametrize("place", ["IMPORT", "BUILD"])
def test_one_that_a_plugin_raises_passes(child: Child, place: str) -> None:
    """As every KeyboardInterrupt does; at once, not at the end of a time limit."""
    status, _, err = child(
        f"{CALLS[place]}\nprint('went on')", **{place: "raise KeyboardInterrupt"}
    )
    assert (status, err.splitlines()[-1]) == (-signal.SIGINT, "KeyboardInterrupt")


def test_handlers_of_the_program_are_left_alone(child: Child) -> None:
    script = """
def late(*_): raise TimeoutError("late")
signal.signal(signal.SIGALRM, late)
try:
    plan(GEMM, device="numpy", implementation="strange")
except TimeoutError as e:
    print(e, signal.getsignal(signal.SIGALRM) is late)
"""
    look = "print(signal.getsignal(signal.SIGALRM).__name__, flush=True)"
    status, out, err = child(script, BUILD=f"import signal; {look}; raise TimeoutError('late')")
    assert (status, out) == (0, "late\nlate True\n"), err


AGAIN = """
try:
    kernelseam.devices()
except KeyboardInterrupt:
    start = time.monotonic()
    print(multiply(), sorted(plugins.plugins().loaded), plugins.plugins().failures, time.monotonic() - start < 10)
"""  # noqa: E501


@pytest.mark.parametrize("place", ["IMPORT", "REGISTER"])
def test_who_asks_again_gets_what_is_found(child: Child, place: str) -> None:
    """Ctrl-C ends the wait; the discovery goes on, once and whole."""
    line = f"{WAIT.replace('60', '2')}; {strange_plugins.SOUND_LINES[place]}"
    status, out, err = child(AGAIN, signal.SIGINT, **{place: line})
    assert (status, out) == (0, "strange ['reference', 'strange'] () True\n"), err


def test_the_reference_is_never_left_out(child: Child) -> None:
    """Ctrl-C while it is imported."""
    finder = """
import os
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "kernelseam.reference.gemm":
            print("here", flush=True)
            time.sleep(2)
sys.meta_path.insert(0, Finder())
"""
    status, out, err = child(finder + AGAIN, signal.SIGINT)
    assert (status, out) == (0, "strange ['reference', 'strange'] () True\n"), err


def test_ctrl_c_leaves_no_lock_of_imports_behind(child: Child) -> None:
    """Where it strikes between the taking of that lock and the `try` that gives it back, every
    import in another thread would wait: there it strikes here, in the first import of the main
    thread, if there is one."""
    script = """
import importlib._bootstrap as bootstrap
struck = []
def line(frame, event, argument):
    if event == "line" and frame.f_lineno > bootstrap._get_module_lock.__code__.co_firstlineno + 6 and not struck:
        struck.append(1)
        raise KeyboardInterrupt
    return line
def call(frame, event, argument):
    return line if frame.f_code is bootstrap._get_module_lock.__code__ else None
sys.settrace(call)
try:
    kernelseam.devices()
except KeyboardInterrupt:
    pass
sys.settrace(None)
start = time.monotonic()
print(multiply(), sorted(plugins.plugins().loaded), plugins.plugins().failures, time.monotonic() - start < 10)
"""  # noqa: E501
    status, out, err = child(script)
    assert (status, out) == (0, "strange ['reference', 'strange'] () True\n"), err


class Own(BaseException):
    """No Exception."""


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt("its own"), Own("mine")])
def test_all_but_an_exit_passes_as_it_is(error: BaseException) -> None:
    def leave() -> None:
        raise error

    with pytest.raises(type(error)) as caught, Contained("it"):
        leave()
    assert caught.value is error
    with pytest.raises(type(error)) as caught:
        run_with_timeout(5, "leaving", leave)
    assert caught.value is error


def test_an_exit_becomes_an_exception() -> None:
    def leave() -> None:
        raise SystemExit(3)

    with pytest.raises(Escaped, match="^outer raised SystemExit: 3$"), Contained("outer"):
        leave()
    with pytest.raises(Escaped, match="^leaving raised SystemExit: 3$") as caught:
        run_with_timeout(5, "leaving", leave)
    assert error_text(caught.value) == "SystemExit: 3"
    assert traceback_text(caught.value).endswith("SystemExit: 3\n")
