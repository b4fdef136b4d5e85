"""Compile in a background thread what the caller will need later, while it waits for a compilation.

A training call compiles its forward, and soon after its backward: side by side both take the time
of the longer one.
"""

from __future__ import annotations

import contextvars
import logging
import threading
from collections.abc import Callable
from contextvars import ContextVar, Token

Later = Callable[[], Callable[[], object]]
"""Runs in the caller's thread and returns the work for the background thread."""
_log = logging.getLogger("kernelseam")
_later: ContextVar[Later | None] = ContextVar("kernelseam_compiled_later", default=None)


expect: Callable[[Later], Token[Later | None]] = _later.set
"""``expect(later)``: the next compilation in this context starts ``later`` in the background, once.
``expect_no_more`` with the returned token ends it."""
expect_no_more: Callable[[Token[Later | None]], None] = _later.reset


def begin() -> None:
    """Called when a compilation begins: start the expected work. Its errors are logged only,
    because the call that needs its result raises them again."""
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
