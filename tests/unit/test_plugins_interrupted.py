"""Signals that arrive while a plugin's code runs: they are the user's, and what the plugin raises
itself is not."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kernelseam
import pytest
import strange_plugins
from kernelseam.containment import Contained, Escaped, error_text, traceback_text
from kernelseam.deadline import run_with_timeout

WAIT = "print('here', flush=True); time.sleep(60)"
"""What a plugin is at when the signal comes."""
HEAD = """
import signal, sys, time
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


IN_A_THREAD = {
    "IMPORT": "kernelseam.devices()",
    "INFO": "kernelseam.devices()",
    "REGISTER": "kernelseam.devices()",
    "DEVICES": "kernelseam.devices()",
    "DOCTOR": "plugins.plugins().doctor()",
}
IN_THE_MAIN_THREAD = {
    "SUPPORTS": "plan(GEMM, device='numpy')",
    "COST": "plan(GEMM, device='numpy')",
    "BUILD": "plan(GEMM, device='numpy')",
    "DESCRIBE": "kernelseam.bmm(object(), object())",
}


@pytest.mark.parametrize(("place", "call"), [*IN_A_THREAD.items(), *IN_THE_MAIN_THREAD.items()])
def test_ctrl_c_ends_the_program(child: Child, place: str, call: str) -> None:
    status, _, err = child(f"{call}\nprint('went on')", signal.SIGINT, **{place: WAIT})
    assert (status, err.splitlines()[-1]) == (-signal.SIGINT, "KeyboardInterrupt")


@pytest.mark.parametrize(("place", "call"), IN_THE_MAIN_THREAD.items())
def test_a_plugin_cannot_swallow_it(child: Child, place: str, call: str) -> None:
    """Nor turn it into an exception of its own."""
    swallowing = f"""
        try:
            {WAIT}
        except KeyboardInterrupt:
            raise SystemExit(0)
    """.strip()
    status, _, err = child(f"{call}\nprint('went on')", signal.SIGINT, **{place: swallowing})
    assert (status, err.splitlines()[-1]) == (-signal.SIGINT, "KeyboardInterrupt")


@pytest.mark.parametrize("place", ["IMPORT", "SUPPORTS", "BUILD"])
def test_a_handler_of_the_program_ends_it(child: Child, place: str) -> None:
    """SIGTERM in a container: the handler's SystemExit is not the plugin's, which is contained."""
    script = (
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\nplan(GEMM, "
        "device='numpy')\nprint('went on')"
    )
    status, out, _ = child(script, signal.SIGTERM, **{place: WAIT})
    assert (status, out) == (7, "")


def test_a_timeout_of_the_program_is_no_refusal(child: Child) -> None:
    script = """
class Late(Exception): pass
def late(*_): raise Late
signal.signal(signal.SIGALRM, late)
try:
    plan(GEMM, device="numpy")
except Late:
    print("late")
"""
    assert child(script, signal.SIGALRM, SUPPORTS=WAIT)[:2] == (0, "late\n")


def test_a_handler_that_raises_nothing_ends_nothing(child: Child) -> None:
    script = """
seen = []
signal.signal(signal.SIGINT, lambda *_: seen.append(1))
print(multiply(), seen, callable(signal.getsignal(signal.SIGINT)))
"""
    assert child(
        script, signal.SIGINT, SUPPORTS=f"{WAIT.replace('60', '1')}; return 'it is tired'"
    )[:2] == (0, "numpy [1] True\n")


@pytest.mark.parametrize("place", [*IN_A_THREAD, *IN_THE_MAIN_THREAD])
def test_one_that_a_plugin_raises_itself_ends_nothing(child: Child, place: str) -> None:
    script = """
before = signal.getsignal(signal.SIGINT)
print(multiply(), len(kernelseam.devices()), len(plugins.plugins().doctor()))
try:
    kernelseam.bmm(object(), object())
except InvalidValue:
    print(signal.getsignal(signal.SIGINT) is before is signal.default_int_handler)
"""
    status, out, err = child(script, **{place: "raise KeyboardInterrupt"})
    assert status == 0, err
    assert out.splitlines()[-1] == "True"


AGAIN = """
try:
    kernelseam.devices()
except KeyboardInterrupt:
    start = time.monotonic()
    print(multiply(), sorted(plugins.plugins().loaded), plugins.plugins().failures, time.monotonic() - start < 10)
"""  # noqa: E501


@pytest.mark.parametrize("place", ["IMPORT", "INFO", "REGISTER"])
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


# ---------------------------------------------------------------- one block


class Own(BaseException):
    """No Exception."""


def handled(number: int, handler: Any, work: Callable[[], object]) -> Any:
    """Do the work with a handler of a signal."""
    before = signal.signal(number, handler)
    try:
        return work()
    finally:
        assert signal.getsignal(number) is handler  # the block has put it back
        signal.signal(number, before)


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt("of the user")


def test_blocks_within_blocks() -> None:
    """A plugin's code may plan: what it is asked in turn is contained, and the user's interrupt
    passes both."""

    def work() -> None:
        with Contained("outer"):
            with (
                pytest.raises(Escaped, match="^inner raised KeyboardInterrupt: its own$"),
                Contained("inner"),
            ):
                raise KeyboardInterrupt("its own")
            with Contained("inner"):
                signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt, match="of the user"):
        handled(signal.SIGINT, interrupt, work)


def test_one_that_was_swallowed_is_raised_at_the_end() -> None:
    def work() -> None:
        with Contained("it"), contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt, match="of the user"):
        handled(signal.SIGINT, interrupt, work)


def test_a_handler_that_the_plugin_sets_stays() -> None:
    def own(*_: object) -> None:
        pass

    before = signal.getsignal(signal.SIGUSR1)
    try:
        with Contained("it"):
            signal.signal(signal.SIGUSR1, own)
        assert signal.getsignal(signal.SIGUSR1) is own
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_exceptions_pass_as_they_are() -> None:
    error = ValueError("no")
    with pytest.raises(ValueError) as caught, Contained("it"):
        raise error
    assert caught.value is error


def test_another_thread_is_not_interrupted() -> None:
    """While the main thread runs a plugin's code and is interrupted, another thread's is left
    alone."""
    inside, go_on, actual = threading.Event(), threading.Event(), list[str]()

    def other() -> None:
        with Contained("other"):
            inside.set()
            go_on.wait(30)
        actual.append("done")

    thread = threading.Thread(target=other)

    def work() -> None:
        with Contained("main"):
            thread.start()
            inside.wait(30)
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                go_on.set()
                thread.join(30)

    with pytest.raises(KeyboardInterrupt, match="of the user"):
        handled(signal.SIGINT, interrupt, work)
    assert actual == ["done"]


def test_under_the_limit_it_is_the_same() -> None:
    def leave() -> None:
        raise Own("mine")

    with pytest.raises(Escaped, match="^leaving raised Own: mine$") as caught:
        run_with_timeout(5, "leaving", leave)
    assert error_text(caught.value) == "Own: mine"
    assert traceback_text(caught.value).endswith("Own: mine\n")
