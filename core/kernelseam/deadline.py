"""A plugin's code under a time limit: a driver that does not answer must not take the process with
it.

The code runs in a thread of its own. Python cannot end a thread, so one that hangs is left behind
(as a daemon, which does not keep the process from ending). A hang that holds the interpreter's lock
cannot be seen from here. Handlers of signals run in the main thread alone: Ctrl-C ends the wait,
never the code, and whatever the code raises is its own.
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
"""Seconds. Loading a vendor's libraries from a slow disk and waking up a machine full of GPUs takes
many."""

T = TypeVar("T")


class PluginTimeout(PluginError):
    """A plugin's code that did not come back in time. ``stack``: where its thread was left
    behind."""

    def __init__(self, message: str, stack: str) -> None:
        self.stack = stack
        super().__init__(message)
        self.add_note(f"Its thread was left behind here:\n{stack}")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self), self.stack)


def probe_seconds() -> float:
    """The time limit of each hook, import and first listing of devices. Raises InvalidValue."""
    given = os.environ.get(VARIABLE)
    if not given:
        return DEFAULT
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise InvalidValue(
            VARIABLE,
            given,
            "must be a positive number of seconds",
            "Leave it unset, or set it to 30",
        )
    return seconds


def run_with_timeout(
    seconds: float, what: str, call: Callable[..., T], *arguments: Any, **named: Any
) -> T:
    """``call(*arguments, **named)``, or the Exception that it raises; for anything else that it
    raises, Escaped.

    Raises PluginTimeout after so many seconds, naming ``what`` and the line where it hangs.
    """
    # An interrupted wait must leave nothing behind: Thread.join of 3.11 takes the thread for ended
    # then.
    answers: SimpleQueue[tuple[list[T], Exception | None]] = SimpleQueue()

    def work() -> None:
        results: list[T] = []
        try:
            with Contained(what):
                results.append(call(*arguments, **named))
        except Exception as e:
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
