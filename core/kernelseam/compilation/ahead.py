"""Compilations that a caller will need later, begun beside the one that it waits for now.

A call that trains has a forward that is compiled, and minutes or milliseconds later gradients that
are: beside one another they take the time of the longer.
"""

from __future__ import annotations

import contextvars
import logging
import threading
from collections.abc import Callable
from contextvars import ContextVar, Token

Later = Callable[[], Callable[[], object]]
"""Reads what it needs in the caller's thread; what it returns is run in another."""
_log = logging.getLogger("kernelseam")
_later: ContextVar[Later | None] = ContextVar("kernelseam_compiled_later", default=None)


expect: Callable[[Later], Token[Later | None]] = _later.set
"""Should something be compiled from here on, begin ``later`` beside it, once. To be ended by
``expect_no_more``."""
expect_no_more: Callable[[Token[Later | None]], None] = _later.reset


def begin() -> None:
    """A compilation begins. An error of what begins beside it is logged: the call that needs it
    comes to the same one."""
    later = _later.get()
    if later is None:
        return
    _later.set(None)
    try:
        work = later()
    except Exception:
        _log.debug("nothing is compiled ahead", exc_info=True)
        return

    def run() -> None:
        try:
            work()
        except Exception:
            _log.debug("what was to be compiled ahead is not", exc_info=True)

    context = contextvars.copy_context()
    try:
        threading.Thread(target=context.run, args=(run,), name="kernelseam: ahead").start()
    except RuntimeError:  # no more threads can start
        _log.debug("nothing is compiled ahead", exc_info=True)
