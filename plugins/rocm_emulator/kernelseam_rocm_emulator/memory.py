"""Guarded memory: the emulated device cannot access memory outside of allocations.

The arena is shared between this process and the emulator's, at the same addresses. Guards are
active only in the emulator's process, where everything except live allocations is protected.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
import os

from kernelseam.errors import DeviceError, OutOfDeviceMemory
from kernelseam.forking import new_lock

PAGE = mmap.PAGESIZE
ALIGNMENT = 16
UNTOUCHED = 0xFF
"""New memory is filled with this byte: NaN in every dtype."""

_NONE, _READ_WRITE = 0, mmap.PROT_READ | mmap.PROT_WRITE
_NO_RESERVE = 0x4000  # MAP_NORESERVE, which Python 3.11 does not name
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def protect(start: int, size: int, accessible: bool) -> None:
    """Allow or forbid every access to whole pages, in this process."""
    if size and _libc.mprotect(start, size, _READ_WRITE if accessible else _NONE):
        raise DeviceError(
            f"mprotect of {size} bytes at {start:#x} failed with error {ctypes.get_errno()}"
        )


def pages(size: int) -> int:
    """The bytes of the pages that hold so many bytes."""
    return -(-size // PAGE) * PAGE


class Arena:
    """Device memory of every emulated device, which are one host's: allocations end where a guard
    begins."""

    def __init__(self, capacity: int) -> None:
        self.capacity = pages(capacity)
        self._map = mmap.mmap(
            -1, self.capacity, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _NO_RESERVE
        )
        self.start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._free = [(0, self.capacity)]  # (offset, bytes), in order, never adjacent
        # by address: offset and bytes of its pages, guard included
        self._live: dict[int, tuple[int, int]] = {}
        self._lock = new_lock()
        self._owner = os.getpid()

    def allocate(self, size: int) -> int:
        """The address of new memory, a multiple of 16 bytes, as near to the guard behind it as that
        allows.

        Raises OutOfDeviceMemory, and DeviceError in a forked copy of the process, which shares this
        memory.
        """
        if os.getpid() != self._owner:
            raise DeviceError(
                f"emulated memory belongs to process {self._owner}, of which this is a forked "
                "copy: start a new process"
            )
        need = pages(size) + PAGE
        with self._lock:
            place = next(
                (i for i, (_, available) in enumerate(self._free) if available >= need + PAGE), None
            )
            if place is None:
                raise OutOfDeviceMemory(
                    f"{size} bytes do not fit into what is left of the {self.capacity} bytes of "
                    "emulated memory"
                )
            offset, available = self._free[place]
            # The page before the block stays free: it guards its beginning.
            self._free[place : place + 1] = [(offset, PAGE)] + [
                (offset + PAGE + need, available - PAGE - need)
            ] * (available > PAGE + need)
            offset += PAGE
            address = self.start + offset + pages(size) - -(-size // ALIGNMENT) * ALIGNMENT
            self._live[address] = (offset, need)
        ctypes.memset(self.start + offset, UNTOUCHED, pages(size))
        return address

    def release(self, address: int) -> None:
        """Free the memory; the emulated device can no longer access it."""
        if os.getpid() != self._owner:
            return  # it is still the owner's
        with self._lock:
            offset, size = self._live.pop(address)
            self._map.madvise(mmap.MADV_REMOVE, offset, size - PAGE)
            at = bisect.bisect(self._free, (offset, 0))
            self._free.insert(at, (offset, size))
            for i in (at, at - 1):
                if 0 <= i < len(self._free) - 1 and sum(self._free[i]) == self._free[i + 1][0]:
                    self._free[i : i + 2] = [
                        (self._free[i][0], self._free[i][1] + self._free[i + 1][1])
                    ]

    def holds(self, start: int, size: int) -> bool:
        """Whether a range is within one allocation's pages."""
        return any(first <= start and start + size <= first + all_ for first, all_ in self.live())

    def live(self) -> tuple[tuple[int, int], ...]:
        """First address and bytes of the pages of every allocation, guards left out."""
        with self._lock:
            return tuple((self.start + offset, size - PAGE) for offset, size in self._live.values())


class Region:
    """Private memory in the midst of guards, ending at one."""

    def __init__(self, size: int, guard: int = PAGE, readable: bool = False) -> None:
        """``guard``: bytes on either side that cannot be touched, or with ``readable`` read as
        zeros. They are reserved, not used."""
        self.size, inner = size, pages(size)
        self._map = mmap.mmap(
            -1,
            inner + 2 * guard,
            flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE,
            prot=mmap.PROT_READ,
        )
        base = _address(self._map)
        self.guards = (base, base + inner + 2 * guard)
        if not readable:
            protect(base, inner + 2 * guard, False)
        protect(base + guard, inner, True)
        self.address = base + guard + inner - -(-size // ALIGNMENT) * ALIGNMENT

    def fill(self, value: int) -> None:
        ctypes.memset(self.address, value, self.size)

    def write(self, data: bytes, offset: int = 0) -> None:
        ctypes.memmove(self.address + offset, data, len(data))


class _Buffer(ctypes.Structure):
    """The beginning of Py_buffer: an address can be asked of a read-only map in no other way."""

    _fields_ = [("buf", ctypes.c_void_p), ("rest", ctypes.c_char * 128)]


def _address(memory: mmap.mmap) -> int:
    view = _Buffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(memory), ctypes.byref(view), 0)
    try:
        return int(view.buf or 0)
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(view))
