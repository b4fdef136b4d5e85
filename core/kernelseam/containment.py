"""Keeps a plugin's code from ending the program: all that it raises becomes an Exception, while the
user's signals pass.

``sys.exit()``, a KeyboardInterrupt or any other BaseException of a plugin's own passes every
``except Exception``. Here it becomes an `Escaped`, which names the plugin. An exception that a
signal handler raises is the user's, even while a plugin's code runs: Ctrl-C, or a program's own
SIGTERM handler that calls ``sys.exit()``. The two are distinguished by where they are raised, not
by type: Python runs handlers in the main thread only, where they are wrapped while a plugin's code
runs. A handler's exception ends the block, even where the plugin's code swallowed it.
"""

from __future__ import annotations

import signal
import threading
import traceback

# Not `signal.signal`, which converts every handler to an enum: the slowest part of this module.
from _signal import getsignal  # type: ignore[import-not-found]
from _signal import signal as set_handler
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from kernelseam.errors import PluginError

SIGNALS = tuple(
    int(getattr(signal, name))
    for name in (
        "SIGINT",
        "SIGTERM",
        "SIGHUP",
        "SIGQUIT",
        "SIGBREAK",
        "SIGALRM",
        "SIGUSR1",
        "SIGUSR2",
    )
    if hasattr(signal, name)
)
"""Signals whose handlers may raise."""


class Escaped(PluginError):
    """A plugin's code raised what is no Exception. ``__cause__`` is what it raised."""


class Contained:
    """``with Contained(whose):`` around a plugin's code, named for the message.

    Exceptions pass as they are, other BaseExceptions as Escaped; what a signal's handler raised is
    raised.
    """

    __slots__ = ("_watch", "_whose")

    def __init__(self, whose: str) -> None:
        self._whose = whose
        self._watch: _Watch | None = None

    def __enter__(self) -> None:
        global _watching
        if _watching is None and threading.current_thread() is threading.main_thread():
            self._watch = _watching = _Watch()
            self._watch.begin()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        global _watching
        escaped = None
        try:
            if error is not None and not isinstance(error, Exception):
                escaped = Escaped(f"{self._whose} raised {_error_text(error)}")
        finally:
            watch = _watching if threading.current_thread() is threading.main_thread() else None
            if self._watch is not None:  # else it is of a block around this one
                _watching = None
                self._watch.end()
        if watch is not None and watch.raised is not None:
            if error is watch.raised:
                return
            raise watch.raised
        if escaped is not None:
            raise escaped from error


class _Watch:
    """Wraps signal handlers to record what they raise."""

    def __init__(self) -> None:
        self.raised: BaseException | None = None
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}

    def begin(self) -> None:
        for number in SIGNALS:
            handler = getsignal(number)
            if callable(handler):
                self._handlers[number] = handler
                try:
                    set_handler(number, self._handle)
                except ValueError:  # the main thread of a subinterpreter
                    return

    def end(self) -> None:
        for number, handler in self._handlers.items():
            last = set_handler(number, handler)
            if last != self._handle:  # the plugin's code installed its own
                set_handler(number, last)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        try:
            self._handlers[number](number, frame)
        except BaseException as e:
            self.raised = e
            raise


_watching: _Watch | None = None
"""The main thread's watch, while it runs a plugin's code."""


def error_text(error: BaseException) -> str:
    """``Type: message`` of a plugin's exception, printable even where its ``__str__`` raises."""
    if isinstance(error, Escaped) and error.__cause__ is not None:
        error = error.__cause__
    with Contained("an exception's message"):
        return _error_text(error)


def traceback_text(error: BaseException) -> str:
    """The traceback of a plugin's exception as text: the object would keep the callers' arrays
    alive."""
    if isinstance(error, Escaped) and error.__cause__ is not None:
        error = error.__cause__
    with Contained("an exception's traceback"):
        try:
            return _printable("".join(traceback.format_exception(error)))
        except BaseException:
            where = "".join(traceback.format_tb(error.__traceback__))
            return _printable(f"Traceback (most recent call last):\n{where}{_error_text(error)}\n")


def _error_text(error: BaseException) -> str:
    """Call within a Contained block: ``__str__`` is the plugin's code, too."""
    name = type(error).__name__
    try:
        message = str(error)
    except BaseException as e:
        return f"{name}, whose message is not available: __str__ raised {type(e).__name__}"
    return _printable(f"{name}: {message}" if message else name)


def _printable(text: str) -> str:
    """Escape lone surrogates, as file names may contain, which streams cannot encode."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
