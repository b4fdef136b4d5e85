"""What is being done, for a person who waits: on standard error, from the third second on."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

PATIENCE = 2.0
"""Seconds of silence."""


@contextmanager
def working(what: str) -> Iterator[None]:
    """Say that ``what`` is being done while the block runs, and for how long.

    On a terminal one line, which counts the seconds and goes at the end. Elsewhere a line each time
    that the time has doubled.
    """
    stream = sys.stderr
    terminal = bool(getattr(stream, "isatty", bool)())
    over, begun = threading.Event(), time.monotonic()

    def tell() -> None:
        wait, shown = PATIENCE, False
        with suppress(OSError, ValueError):  # nobody reads it any more
            while not over.wait(wait):
                passed = time.monotonic() - begun
                if terminal:
                    print(f"\r\x1b[K{what}, {passed:.0f} s", end="", file=stream, flush=True)
                    wait, shown = 1.0, True
                else:
                    print(f"{what}, {passed:.0f} s", file=stream, flush=True)
                    wait = passed
            if shown:
                print("\r\x1b[K", end="", file=stream, flush=True)

    teller = threading.Thread(target=tell, name="kernelseam-progress", daemon=True)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join()
