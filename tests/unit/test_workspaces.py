"""What a plan may want of its workspace: an alignment, first bytes that are zero; and memory set at
a launch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

import kernelseam
import numpy as np
import pytest
from idle_step import IdleImplementation
from kernelseam import BatchedGemmStrided, plan
from kernelseam.contract import Device, LaunchRecord, PlanParts
from kernelseam.errors import InvalidValue
from kernelseam.reference.runtime import HostRuntime

Discovered = Callable[..., Any]
ALIGNMENT, SIZE, ZEROED = 128, 256, 8


class Counting(IdleImplementation):
    """A GEMM whose launch counts in the first bytes of its workspace, says what it found there, and
    leaves 0; what lies behind it fills with ones."""

    record = LaunchRecord("counting", (1, 1, 1), (1, 1, 1), 0, "cpu")

    def __init__(self) -> None:
        super().__init__("counting", 0.0)
        self.places: list[int] = []
        self.found: list[int] = []

    def build(self, problem: Any, device: Device) -> PlanParts:
        return PlanParts((self,), SIZE, ALIGNMENT, ZEROED)

    def bind(self, pointers: Mapping[str, int], workspace: int) -> Callable[[int], None]:
        self.places.append(workspace)

        def launch(stream: int) -> None:
            memory = (ctypes.c_uint8 * SIZE).from_address(workspace)
            self.found.append(sum(memory[:ZEROED]))
            ctypes.memset(workspace + ZEROED, 1, SIZE - ZEROED)

        return launch


@pytest.fixture
def counting(discovered: Discovered, monkeypatch: pytest.MonkeyPatch) -> Counting:
    """With memory that a runtime hands out full of ones, at addresses that are multiples of 16 and
    of no more."""
    created = Counting()
    discovered().registry.implementations.append(created)  # type: ignore[arg-type]
    plain = HostRuntime.empty

    def empty(self: HostRuntime, shape: Any, dtype: Any, device: Device, like: Any = None) -> Any:
        if len(shape) > 1:
            return plain(self, shape, dtype, device, like)
        room = np.full(shape[0] * dtype.itemsize + 2 * ALIGNMENT, 1, np.uint8)
        start = -room.ctypes.data % ALIGNMENT + 16
        return room[start : start + shape[0] * dtype.itemsize].view(dtype.numpy)

    monkeypatch.setattr(HostRuntime, "empty", empty)
    return created


def small() -> BatchedGemmStrided:
    a = np.ones((2, 2), np.float32)
    return BatchedGemmStrided(A=a, B=a, C=np.empty_like(a), M=2, N=2, K=2)


def test_a_calls_own_workspace_is_aligned_and_starts_with_zeros(counting: Counting) -> None:
    planned = plan(small())
    assert (planned.workspace_bytes, planned.parts.workspace_alignment) == (SIZE, ALIGNMENT)
    call = planned.bind()
    for _ in range(3):
        with kernelseam.trace() as launches:
            call()
        assert [r.kernel for r in launches] == ["counting"]
    assert [p % ALIGNMENT for p in counting.places] == [0]
    assert counting.found == [0, 0, 0]


def test_functions_on_arrays_take_another_workspace_each_time(counting: Counting) -> None:
    """Each begins with ones, and is set before each launch: its owner may have used it in
    between."""
    a = np.ones((1, 1, 2, 2), np.float32)
    for _ in range(3):
        with kernelseam.trace() as launches:
            kernelseam.bmm(a, a)
        assert [(r.kernel, r.kind) for r in launches] == [
            ("memset", "memset"),
            ("counting", "kernel"),
        ]
    assert counting.found == [0, 0, 0] and {p % ALIGNMENT for p in counting.places} == {0}


def test_a_given_workspace_is_aligned_and_set_at_bind(counting: Counting) -> None:
    room = np.full(SIZE + 2 * ALIGNMENT, 7, np.uint8)
    start = -room.ctypes.data % ALIGNMENT
    planned = plan(small())
    call = planned.bind(workspace=room.ctypes.data + start)
    assert room[start : start + ZEROED + 1].tolist() == [0] * ZEROED + [7]
    call()
    assert counting.found == [0]
    view = room[start : start + SIZE].view(np.float32)
    planned.bind(workspace=view)
    for wrong in (room.ctypes.data + start + 64, room[start + 16 :][:SIZE].view(np.float32)):
        with pytest.raises(
            InvalidValue,
            match=r"workspace = 0x\w+: must be the address of memory, a multiple of 128 ",
        ):
            planned.bind(workspace=wrong)


CAPTURED = "stream = one that is being captured in a graph: "
FREED = (
    f"{CAPTURED}this call's workspace is freed when it returns, and the graph would use it later. "
    "Capture torch's tensors on torch's current stream, or plan and bind before the capture."
)


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> set[int | None]:
    """The streams that the host runtime says are being captured; None: a current one."""
    streams: set[int | None] = set()
    monkeypatch.setattr(
        HostRuntime,
        "is_capturing",
        lambda self, device, stream=None: stream in streams,
        raising=False,
    )
    return streams


def test_a_capture_refuses_what_synchronises(counting: Counting, captured: set[int | None]) -> None:
    planned = plan(small())
    call, checked = planned.bind(), plan(small(), implementation="numpy").bind(check=True)
    captured |= {None, 0}
    with pytest.raises(InvalidValue) as error:
        planned.bind()
    assert str(error.value) == (
        f"{CAPTURED}binding this plan sets the start of its workspace to 0 and synchronises. "
        "Bind before the capture."
    )
    for attempt in (lambda: checked.plan.bind(check=True), checked):
        with pytest.raises(InvalidValue) as error:
            attempt()
        assert str(error.value) == (
            f"{CAPTURED}check=True copies operands to the host, which synchronises. "
            "Bind without check, or launch outside of the capture."
        )
    call()
    assert len(counting.places) == 1 and counting.found == [0]
    captured.clear()
    checked()


def test_a_capture_refuses_a_workspace_that_is_freed(
    counting: Counting, captured: set[int | None]
) -> None:
    """A function's, but torch's on its current stream, which is of the graph's own pool."""
    a = np.ones((1, 1, 2, 2), np.float32)
    kernelseam.bmm(a, a)
    captured.add(0)
    with pytest.raises(InvalidValue) as error:
        kernelseam.bmm(a, a)
    assert str(error.value) == FREED and len(counting.found) == 1
    torch = pytest.importorskip("torch", reason="torch is not installed")
    b = torch.ones(1, 1, 2, 2)
    kernelseam.bmm(b, b)
    captured.add(5)
    with pytest.raises(InvalidValue) as error:
        kernelseam.bmm(b, b, stream=5)
    assert str(error.value) == FREED and len(counting.found) == 2


def test_plans_that_want_no_more_are_as_they_were() -> None:
    assert (PlanParts(()).workspace_alignment, PlanParts(()).zeroed_bytes) == (16, 0)
    planned = plan(small())
    assert planned.allocation_bytes == planned.workspace_bytes
    assert planned.align_workspace(0x1230) == 0x1230


def test_memory_of_the_host_is_set_at_the_launch() -> None:
    runtime = HostRuntime()
    memory = np.full(8, 7, np.uint8)
    launch = runtime.prepare_memset(memory.ctypes.data + 2, 255, 4, runtime.device)
    assert memory.tolist() == [7] * 8
    launch(0)
    assert memory.tolist() == [7, 7, 255, 255, 255, 255, 7, 7]
