"""Keeps a plugin's ``sys.exit()`` from ending the program, and its exceptions' texts printable.

SystemExit passes every ``except Exception``. From a plugin's code it becomes an `Escaped`, which
names the plugin and is an Exception. KeyboardInterrupt and other BaseExceptions pass: they are
Ctrl-C's, a scheduler's or a test's.
"""

from __future__ import annotations

import traceback
from types import TracebackType

from kernelseam.errors import PluginError


class Escaped(PluginError):
    """A plugin's code raised SystemExit, which is ``__cause__``."""


class Contained:
    """``with Contained(whose):`` around a plugin's code, named for the message: SystemExit becomes
    Escaped, and all else passes as it is."""

    __slots__ = ("_whose",)

    def __init__(self, whose: str) -> None:
        self._whose = whose

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, SystemExit):
            raise Escaped(f"{self._whose} raised {error_text(error)}") from error


def error_text(error: BaseException) -> str:
    """``Type: message`` of a plugin's exception, printable even where its ``__str__`` raises."""
    error = _own(error)
    name = type(error).__name__
    try:
        message = str(error)
    except (Exception, SystemExit) as e:
        return f"{name}, whose message is not available: __str__ raised {type(e).__name__}"
    return _printable(f"{name}: {message}" if message else name)


def traceback_text(error: BaseException) -> str:
    """The traceback of a plugin's exception as text: the object would keep the callers' arrays
    alive."""
    error = _own(error)
    try:
        return _printable("".join(traceback.format_exception(error)))
    except (Exception, SystemExit):
        where = "".join(traceback.format_tb(error.__traceback__))
        return _printable(f"Traceback (most recent call last):\n{where}{error_text(error)}\n")


def _own(error: BaseException) -> BaseException:
    """What the plugin's code itself raised."""
    if isinstance(error, Escaped) and error.__cause__ is not None:
        return error.__cause__
    return error


def _printable(text: str) -> str:
    """Escape lone surrogates, as file names may contain, which streams cannot encode."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
