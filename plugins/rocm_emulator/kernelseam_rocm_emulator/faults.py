"""Access outside every allocation, described: the address, and the nearest allocation.

The emulated device's loads and stores are the host's, so a wrong one ends in a SIGSEGV at a guard.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Iterable, Sequence

Place = tuple[str, int, int]
"""What lies somewhere, its first address and the one behind its last."""

_ON_FAULT = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
_WITH_INFORMATION = 4  # SA_SIGINFO
_ADDRESS_AT = 16  # si_addr in siginfo_t


class _Action(ctypes.Structure):
    """struct sigaction of Linux on x86_64, as the C library takes it."""

    _fields_ = [
        ("handler", _ON_FAULT),
        ("mask", ctypes.c_char * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    ]


_installed: list[_Action] = []


def on_fault(report: Callable[[int], None]) -> None:
    """Call ``report(address)`` for an access to memory that is not there; the process ends
    afterwards."""

    def handle(number: int, information: int, context: int) -> None:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        try:
            report(ctypes.c_uint64.from_address(information + _ADDRESS_AT).value)
        finally:
            os._exit(1)

    action = _Action(handler=_ON_FAULT(handle), flags=_WITH_INFORMATION)
    _installed[:] = [action]  # it must live as long as it may be called
    libc = ctypes.CDLL(None)
    for number in (signal.SIGSEGV, signal.SIGBUS):
        libc.sigaction(int(number), ctypes.byref(action), None)


def describe(address: int, places: Iterable[Place], guards: Sequence[Place] = ()) -> str:
    """Where an address is: in the guards of something, else by the nearest place. ``places`` may
    not be empty."""
    for what, start, end in guards:
        if start <= address < end:
            return f"outside {what}"
    if address < 1 << 16:
        return "a null pointer" if not address else f"near the null pointer ({address:#x})"
    what, start, end = min(
        places, key=lambda p: p[1] - address if address < p[1] else address - p[2]
    )
    if address < start:
        return f"{start - address} bytes before {what}"
    return (
        f"{address - end} bytes behind the end of {what}"
        if address >= end
        else f"inside {what}, yet unreadable"
    )
