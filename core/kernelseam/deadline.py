"""Runs a plugin's code with a time limit, so that a driver that hangs does not hang the process.

The code runs in a thread of its own. Python cannot end a thread, so one that hangs keeps running
(as a daemon, which does not keep the process from exiting). A hang that holds the GIL cannot be
detected. Signal handlers run in the main thread only: Ctrl-C ends the wait, not the code.
"""

from __future__ import annotations

import contextvars
import math
import os
import sys
import threading
import traceback
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from kernelseam.containment import Contained
from kernelseam.errors import InvalidValue, PluginError

VARIABLE = "KERNELSEAM_PROBE_SECONDS"
DEFAULT = 30.0
"""Seconds: enough to load a vendor's libraries from a slow disk and to initialise many GPUs."""

T = TypeVar("T")


class PluginTimeout(PluginError):
    """A plugin's code did not return in time. ``stack``: the stack of its thread, which goes on."""

    def __init__(self, message: str, stack: str) -> None:
        self.stack = stack
        super().__init__(message)
        self.add_note(f"Its thread still runs here:\n{stack}")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self), self.stack)


def probe_seconds() -> float:
    """The time limit of each hook, import and first listing of devices. Raises InvalidValue."""
    text = os.environ.get(VARIABLE)
    if not text:
        return DEFAULT
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise InvalidValue(
            VARIABLE,
            text,
            "must be a positive number of seconds",
            "Leave it unset, or set it to 30",
        )
    return seconds


def run_with_timeout(
    seconds: float, what: str, call: Callable[..., T], *arguments: Any, **named: Any
) -> T:
    """Return ``call(*arguments, **named)``, or raise what it raises, SystemExit as Escaped.

    Raises PluginTimeout after ``seconds``, naming ``what`` and the line where it hangs.
    """
    # Not Thread.join: interrupted, Python 3.11's marks the thread as ended.
    answers: SimpleQueue[tuple[list[T], BaseException | None]] = SimpleQueue()

    def work() -> None:
        results: list[T] = []
        try:
            with Contained(what):
                results.append(call(*arguments, **named))
        except BaseException as e:
            answers.put((results, e))
        else:
            answers.put((results, None))

    context = contextvars.copy_context()
    thread = threading.Thread(
        target=context.run, args=(work,), name=f"kernelseam: {what}", daemon=True
    )
    thread.start()
    try:
        results, error = answers.get(timeout=min(seconds, threading.TIMEOUT_MAX))
    except Empty:
        raise _timeout(thread, what, seconds) from None
    if error is not None:
        raise error
    return results[0]


def _timeout(thread: threading.Thread, what: str, seconds: float) -> PluginTimeout:
    frame = sys._current_frames().get(thread.ident or 0)
    stack = traceback.extract_stack(frame) if frame else traceback.StackSummary()
    at = f" It hangs in {stack[-1].name}, {stack[-1].filename}:{stack[-1].lineno}." if stack else ""
    return PluginTimeout(
        f"{what} did not come back within {seconds:g} s ({VARIABLE}).{at}",
        "".join(stack.format()).rstrip(),
    )
