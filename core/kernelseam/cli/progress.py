"""Progress messages on standard error, for steps that take longer than two seconds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

PATIENCE = 2.0
"""Seconds before the first message."""


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show ``what`` and the elapsed time while the block runs.

    On a terminal in one line, updated every second and erased at the end; elsewhere a new line each
    time the elapsed time has doubled.
    """
    stream = sys.stderr
    terminal = bool(getattr(stream, "isatty", bool)())
    finished, start = threading.Event(), time.monotonic()

    def show() -> None:
        wait, shown = PATIENCE, False
        with suppress(OSError, ValueError):  # the stream is closed
            while not finished.wait(wait):
                elapsed = time.monotonic() - start
                if terminal:
                    print(f"\r\x1b[K{what}, {elapsed:.0f} s", end="", file=stream, flush=True)
                    wait, shown = 1.0, True
                else:
                    print(f"{what}, {elapsed:.0f} s", file=stream, flush=True)
                    wait = elapsed
            if shown:
                print("\r\x1b[K", end="", file=stream, flush=True)

    thread = threading.Thread(target=show, name="kernelseam-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join()
