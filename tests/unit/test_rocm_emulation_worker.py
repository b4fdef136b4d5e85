"""The emulator's process, with a fake emulator in it: results come back, and every failure is
reported by name."""

from __future__ import annotations

import os
import pickle
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernelseam.contract import Device, LaunchConfig
from kernelseam.dtypes import DType
from kernelseam.errors import DeviceError, OutOfDeviceMemory

pytest.importorskip("kernelseam_rocm_emulator", reason="kernelseam-rocm-emulator is not installed")
import amdelf  # noqa: E402
import fake_emulator as fake  # noqa: E402
from interruption import interrupted  # noqa: E402
from kernelseam_rocm_emulator import worker  # noqa: E402
from kernelseam_rocm_emulator.checkout import Checkout  # noqa: E402
from kernelseam_rocm_emulator.counting import recording  # noqa: E402
from kernelseam_rocm_emulator.devices import EmulatedArray, devices  # noqa: E402
from kernelseam_rocm_emulator.memory import PAGE, Arena  # noqa: E402
from kernelseam_rocm_emulator.worker import Emulator  # noqa: E402

DEVICE = devices(0, 1 << 20)[2]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Emulator]]:
    """``start(limit)``: an emulator over a fake checkout, with 1 MiB of memory."""
    started = []
    checkout = Checkout(fake.write(tmp_path / "checkout"), ("false",))
    (tmp_path / "cache").mkdir()

    def make(limit: int = 30) -> Emulator:
        started.append(Emulator(checkout, Arena(1 << 20), lambda: tmp_path / "cache", limit))
        return started[-1]

    yield make
    for emulator in started:
        emulator.stop()


def run(
    emulator: Emulator,
    *program: Any,
    x: EmulatedArray,
    offset: int = 0,
    grid: int = 1,
    threads: int = 32,
) -> int:
    """Launch a program whose arguments are an array and a number of bytes."""
    elf = amdelf.elf(fake.program(*program))
    arguments = struct.pack("<Qq", x.pointer, offset)
    extents = LaunchConfig((grid, 1, 1), (threads, 1, 1), 0)
    return emulator.launch(str(program), elf, "gfx1100", "k", extents, arguments)


def zeros(emulator: Emulator, count: int = 16) -> EmulatedArray:
    array = EmulatedArray((count,), DType.float32, DEVICE, emulator.arena)
    array.host()[...] = 0
    return array


def integers(array: EmulatedArray) -> list[int]:
    return array.host().view(np.int32).tolist()  # type: ignore[no-any-return]


def test_a_launch_runs_every_wave_of_every_block(start: Callable[..., Emulator]) -> None:
    emulator = start()
    x = zeros(emulator, 8)
    executed = run(emulator, (fake.STORE, 7), x=x, grid=3, threads=64)
    assert executed == 3 * 2 * 2
    assert integers(x) == [7, 17, 107, 117, 207, 217, 0, 0]


def test_every_wave_goes_on_after_a_barrier(start: Callable[..., Emulator]) -> None:
    emulator = start()
    x = zeros(emulator, 4)
    assert run(emulator, (fake.STORE, 1), fake.BARRIER, (fake.STORE, 2), x=x, threads=64) == 2 * 4
    assert integers(x) == [2, 12, 0, 0]


def test_a_process_serves_many_launches(start: Callable[..., Emulator]) -> None:
    emulator = start()
    x = zeros(emulator)
    run(emulator, (fake.STORE, 1), x=x)
    first = emulator._pid
    y = zeros(emulator)  # memory that is new since the process began
    run(emulator, (fake.STORE, 2), x=y)
    assert emulator._pid == first and integers(x)[0] == 1 and integers(y)[0] == 2


def test_a_launch_is_counted_where_it_is_recorded(
    start: Callable[..., Emulator], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Executions of two instructions by six waves; the next launch is not recorded."""
    monkeypatch.setattr(recording, "listings", lambda elf, arch: {"k": ()})
    emulator = start()
    emulator.recording = kept = recording.Recording()
    x = zeros(emulator, 8)
    run(emulator, (fake.STORE, 7), x=x, grid=3, threads=64)
    (counted,) = kept.launches
    assert [tally.count for tally in counted.tallies.values()] == [6, 6]
    assert (counted.arch, counted.kernel, counted.launch.grid) == ("gfx1100", "k", (3, 1, 1))
    entry = counted.code.code["k"][0]
    assert min(counted.tallies) == entry and counted.iteration() is None
    emulator.recording = None
    run(emulator, (fake.STORE, 7), x=x, grid=3, threads=64)
    assert len(kept.launches) == 1


@pytest.mark.parametrize(
    ("offset", "where"),
    [
        (64, "0 bytes behind the end of"),
        (100, "36 bytes behind the end of"),
        (-PAGE, "64 bytes before"),
    ],
)
def test_access_out_of_bounds(start: Callable[..., Emulator], offset: int, where: str) -> None:
    emulator = start()
    x = zeros(emulator)
    at = r"\(kernel k \(gfx1100\), block \(0, 0, 0\), wave 0, 0x4 bytes after its entry\)"
    with pytest.raises(
        DeviceError, match=rf"access out of bounds, {where} an allocation of device memory .* {at}"
    ):
        run(emulator, fake.BARRIER, (fake.STORE, 1), x=x, offset=offset)
    run(emulator, (fake.STORE, 5), x=x)  # another process takes over, and memory is still there
    assert integers(x)[0] == 5


def test_freed_memory_cannot_be_touched(start: Callable[..., Emulator]) -> None:
    emulator = start()
    x, y = zeros(emulator), zeros(emulator)
    run(emulator, (fake.STORE, 1), x=x)
    distance = x.pointer - y.pointer
    del x
    with pytest.raises(DeviceError, match="access out of bounds"):
        run(emulator, (fake.STORE, 1), x=y, offset=distance)


def test_writes_beyond_shared_memory(start: Callable[..., Emulator]) -> None:
    emulator = start()
    with pytest.raises(DeviceError, match="outside the block's shared memory of 0 bytes"):
        run(emulator, (fake.SHARE, 4), x=zeros(emulator))


def test_the_time_limit(start: Callable[..., Emulator]) -> None:
    emulator = start(limit=1)
    x, begun = zeros(emulator), time.monotonic()
    message = (
        "kernel k on gfx1100, emulated, ended the emulator's process: SIGALRM after its "
        "time limit of 1 s"
    )
    with pytest.raises(DeviceError, match=message):
        run(emulator, fake.HANG, x=x)
    assert time.monotonic() - begun < 20
    run(emulator, (fake.STORE, 3), x=x)
    assert integers(x)[0] == 3


def test_a_crash_is_reported_with_its_output(start: Callable[..., Emulator]) -> None:
    emulator = start()
    with pytest.raises(
        DeviceError, match="(?s)ended the emulator's process: SIGABRT.*about to abort"
    ):
        run(emulator, fake.ABORT, x=zeros(emulator))


def test_what_the_emulator_raises(start: Callable[..., Emulator]) -> None:
    emulator = start()
    message = (
        r"failed: RuntimeError: no such instruction \(kernel k \(gfx1100\), block \(0, 0, "
        r"0\), wave 0, 0x0 bytes"
    )
    with pytest.raises(DeviceError, match=message):
        run(emulator, fake.RAISE, x=zeros(emulator))
    first = emulator._pid
    run(emulator, x=zeros(emulator))
    assert emulator._pid == first  # it goes on


def test_too_many_threads(start: Callable[..., Emulator]) -> None:
    emulator = start()
    with pytest.raises(DeviceError, match="kernel k takes 64 threads a block: 96"):
        run(emulator, x=zeros(emulator), threads=96)


def test_a_checkout_that_cannot_be_imported(start: Callable[..., Emulator]) -> None:
    emulator = start()
    (emulator.checkout.folder / "test/mockgpu/amd/emu.py").write_text(
        "raise ImportError('half a checkout')"
    )
    message = "(?s)ended the emulator's process: exit status 1.*ImportError: half a checkout"
    with pytest.raises(DeviceError, match=message):
        run(emulator, x=zeros(emulator))


def test_stop_ends_the_process(start: Callable[..., Emulator]) -> None:
    emulator = start()
    run(emulator, x=zeros(emulator))
    pid = emulator._pid
    emulator.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


# ---------------------------------------------------------------- memory


def test_allocations_end_at_a_guard_and_start_as_nan() -> None:
    arena = Arena(1 << 20)
    for size in (1, 16, 4096, 5000):
        at = arena.allocate(size)
        assert at % 16 == 0 and (at + -(-size // 16) * 16) % PAGE == 0
        assert arena.holds(at, size) and not arena.holds(at, size + 16)
    x = EmulatedArray((3, 5), DType.float64, DEVICE, arena)
    assert np.isnan(x.host()).all()


def test_memory_is_given_back() -> None:
    arena = Arena(1 << 20)
    half = (1 << 19) - 2 * PAGE
    for _ in range(20):
        arrays = [EmulatedArray((half // 4,), DType.float32, DEVICE, arena) for _ in range(2)]
        pointers = {a.pointer for a in arrays}
        assert len(pointers) == 2
        arrays.clear()
    assert arena.live() == () and arena._free == [(0, 1 << 20)]
    with pytest.raises(
        OutOfDeviceMemory,
        match="do not fit into what is left of the 1048576 bytes of emulated memory",
    ):
        arena.allocate(1 << 20)


def test_a_forked_copy_leaves_the_memory_alone() -> None:
    arena = Arena(1 << 20)
    x = EmulatedArray((4,), DType.float32, DEVICE, arena)
    x.host()[...] = 3
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            arena.release(x.pointer)
            arena.allocate(16)
        except DeviceError as e:
            status = 0 if "start a new process" in str(e) else 2
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert x.host().tolist() == [3] * 4 and arena.holds(x.pointer, 16)


def test_an_interrupted_launch_ends_the_process(start: Callable[..., Emulator]) -> None:
    emulator = start()
    x = zeros(emulator)
    run(emulator, x=x)
    pid = emulator._pid
    with interrupted(0.5):
        run(emulator, (fake.STORE, 3), fake.HANG, x=x)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert integers(x)[0] == 3
    assert run(emulator, (fake.STORE, 4), x=x) == 2
    assert integers(x)[0] == 4


def test_an_answer_to_another_launch_is_no_answer(start: Callable[..., Emulator]) -> None:
    emulator = start()
    x = zeros(emulator)
    run(emulator, x=x)
    pid, requests = emulator._pid, emulator._requests
    assert requests is not None
    requests._connection.send_bytes(
        struct.pack("<Q", 9) + pickle.dumps(worker.TestRequest(b"", "gfx1100"))
    )
    with pytest.raises(
        DeviceError, match="kernel k on gfx1100, emulated, ended the emulator's process"
    ):
        run(emulator, (fake.STORE, 1), x=x)
    assert run(emulator, (fake.STORE, 2), x=x) == 2 and emulator._pid != pid


def test_an_empty_array_has_no_memory() -> None:
    arena = Arena(1 << 20)
    assert EmulatedArray((0, 5), DType.float32, Device("rocm", 0, "gfx942"), arena).pointer == 0
    assert arena.live() == ()
