"""Plans and calls: binding, rebinding, workspaces, streams, traces, remembered plans, threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kernelseam import BatchedGemmPointers, BatchedGemmStrided, plan, planning, trace, use_backend
from kernelseam.contract import LaunchRecord
from kernelseam.errors import UnknownName
from kernelseam.planning import planner
from kernelseam.plugins import plugins
from kernelseam_thirdvendor import AcmeArray, AcmeGemm
from refusals import Refused


def operands(index: int = 0, seed: int = 0) -> dict[str, AcmeArray]:
    rng = np.random.default_rng(seed)
    shapes = {"A": (2, 3, 5, 8), "B": (2, 3, 8, 4), "C": (2, 3, 5, 4)}
    return {
        n: AcmeArray(rng.standard_normal(s).astype(np.float32), index) for n, s in shapes.items()
    }


def gemm(**more: Any) -> BatchedGemmStrided:
    return BatchedGemmStrided(
        **{"M": 5, "N": 4, "K": 8, "batch": 2, "num_heads": 3, "dtype": "float32", **more}
    )


def error(x: dict[str, AcmeArray], alpha: float = 1.0) -> float:
    expected = alpha * x["A"].host.astype("f8") @ x["B"].host
    return float(abs(x["C"].host - expected).max())


# ---------------------------------------------------------------- binding


def test_plan_bind_call(acme: Any) -> None:
    x = operands()
    p = plan(gemm(**x))
    assert (p.implementation, str(p.device), p.workspace_bytes, p.note) == (
        "acme-gemm",
        "acme:0 (acme1)",
        64,
        "",
    )
    assert p.launches == (LaunchRecord("acme_gemm", (6, 1, 1), (1, 1, 1), 0, "acme1"),)
    assert error(x) > 0.1
    p.bind()()
    assert error(x) < 1e-5


def test_operands_given_to_bind(acme: Any) -> None:
    x = operands()
    p = plan(gemm(), backend="acme")
    p.bind(**x)()
    assert error(x) < 1e-5
    y = operands(seed=1)
    p.bind(**{n: a.host.ctypes.data for n, a in y.items()})()
    assert error(y) < 1e-5


def test_rebind_leaves_the_first_call_alone(acme: Any) -> None:
    x, y = operands(), operands(seed=1)
    first = plan(gemm(**x)).bind()
    second = first.rebind(A=y["A"], C=y["C"])
    third = second.rebind(B=y["B"])
    first()
    assert error(x) < 1e-5
    second()
    assert error({"A": y["A"], "B": x["B"], "C": y["C"]}) < 1e-5
    third()
    assert error(y) < 1e-5
    first()
    assert error(x) < 1e-5


def test_missing_and_unknown_operands(acme: Any, refused: Refused) -> None:
    x = operands()
    p = plan(gemm(A=x["A"], B=x["B"]))
    refused(
        "C = missing: must be the address of memory on the device. Give C in the descriptor or "
        "to bind.",
        lambda: p.bind(),
    )
    refused(
        "D = given: is no operand of this plan. Its operands are A, B, C.",
        lambda: p.bind(D=x["C"], C=x["C"]),
    )
    call = p.bind(C=x["C"])
    refused(
        "a = given: is no operand of this plan. Its operands are A, B, C.",
        lambda: call.rebind(a=x["A"]),
    )


def test_wrong_device(acme: Any, refused: Refused) -> None:
    p = plan(gemm(**operands(1)))
    assert str(p.device) == "acme:1 (acme1)"
    refused(
        "A = an array on acme:0 (acme1): the plan is for acme:1 (acme1). Move it there, or plan "
        "for its device.",
        lambda: p.bind(**operands(0)),
    )


def test_overlap(acme: Any, refused: Refused) -> None:
    pool = np.zeros((2, 3, 5, 24), np.float32)
    a, c = AcmeArray(pool[..., :8]), AcmeArray(pool[..., 8:12])
    given = gemm(
        A=a,
        B=operands()["B"],
        C=c,
        stride_a_batch=360,
        stride_a_head=120,
        stride_a_row=24,
        stride_c_batch=360,
        stride_c_head=120,
        stride_c_row=24,
    )
    plan(given).bind()()  # side by side in the same rows
    refused(
        f"C = {hex(pool.ctypes.data + 16)}: overlaps A. Give the output memory of its own.",
        lambda: plan(given).bind(C=pool.ctypes.data + 16),
    )


# ---------------------------------------------------------------- workspaces


def test_workspace_of_ones_own(acme: Any) -> None:
    x, space = operands(), AcmeArray(np.zeros(16, np.float32))
    p = plan(gemm(**x))
    p.bind(workspace=space)(5)
    assert space.host[0] == 5  # Acme's kernel leaves its stream there
    p.bind(workspace=space.host.ctypes.data)(6)
    assert space.host[0] == 6
    p.bind(workspace=AcmeArray(space.host.reshape(4, 4)))(7)
    assert space.host[0] == 7
    assert error(x) < 1e-5


def test_workspaces_refused(acme: Any, refused: Refused) -> None:
    p = plan(gemm(**operands()))
    floats = np.zeros(64, np.float32)
    frozen = floats[:16].view()
    frozen.flags.writeable = False
    remedy = "must be contiguous and writable. Allocate one, or leave it out."
    for message, workspace in [
        (
            "workspace = 60 bytes: must have at least 64 bytes. See plan.workspace_bytes.",
            AcmeArray(floats[:15]),
        ),
        (f"workspace = strides [2]: {remedy}", AcmeArray(floats[::2])),
        (f"workspace = a read-only array: {remedy}", AcmeArray(frozen)),
        (
            "workspace = an array on numpy:0 (cpu): must lie on acme:0 (acme1). Allocate it there.",
            floats,
        ),
        (
            (
                "workspace = an array on acme:1 (acme1): must lie on acme:0 (acme1). Allocate it "
                "there."
            ),
            AcmeArray(floats, 1),
        ),
        (
            (
                "workspace = 0x0: must be the address of memory, a multiple of 16 bytes. Align it, "
                "or leave it out."
            ),
            0,
        ),
        (
            (
                "workspace = 0x1008: must be the address of memory, a multiple of 16 bytes. Align "
                "it, or leave it out."
            ),
            4104,
        ),
    ]:
        refused(message, lambda w=workspace: p.bind(workspace=w))


# ---------------------------------------------------------------- streams


@pytest.mark.parametrize(
    ("stream", "handle"),
    [
        (None, 7),  # the library's current one
        (0, 0),
        (41, 41),
        (SimpleNamespace(__cuda_stream__=lambda: (0, 43)), 43),
        (SimpleNamespace(__cuda_stream__=(0, 44)), 44),
    ],
)
def test_streams(acme: Any, stream: object, handle: int) -> None:
    space = np.zeros(16, np.float32)
    call = plan(gemm(**operands())).bind(workspace=space.ctypes.data)
    assert call.stream_handle(stream) == handle
    call(stream=stream)
    assert space[0] == handle


def test_the_current_stream_comes_from_the_arrays_library(acme: Any) -> None:
    x = operands()
    plan(gemm(**x)).bind()()
    assert acme.asked.owner is x["A"]
    plan(gemm(), device="acme").bind(**{n: a.host.ctypes.data for n, a in x.items()})()
    assert acme.asked is None
    shape = {"M": 5, "N": 4, "K": 8, "num_heads": 6, "dtype": "float32"}
    scattered = {
        f"{n}_ptrs": [AcmeArray(m) for m in reversed(a.host.reshape(6, *a.host.shape[2:]))]
        for n, a in x.items()
    }
    plan(BatchedGemmPointers(**shape, **scattered)).bind()()
    assert acme.asked.owner is scattered["A_ptrs"][0]
    assert error(x) < 1e-5


def test_stream_refused(acme: Any, refused: Refused) -> None:
    call = plan(gemm(**operands())).bind()
    for stream in ("main", True, -1, 1.0):
        refused(
            f"stream = {stream!r}: must be an int, an object with __cuda_stream__, or None. Pass "
            "the stream's integer handle.",
            lambda stream=stream: call(stream),
        )


def test_a_call_only_launches(acme: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x = operands(1)
    call = plan(gemm(**x)).bind()
    seen: list[int] = []

    @contextmanager
    def activate(device: Any) -> Iterator[None]:
        seen.append(device.index)
        yield
        seen.append(-1)

    def forbidden(*args: Any, **more: Any) -> None:
        raise AssertionError("a call must not do this")

    for name in ("empty", "from_host", "to_host", "synchronize", "describe", "devices"):
        monkeypatch.setattr(acme, name, forbidden)
    monkeypatch.setattr(acme, "activate", activate)
    call()
    call(3)
    assert seen == [1, -1, 1, -1]
    assert error(x) < 1e-5


def test_the_device_before_is_restored(acme: Any) -> None:
    plan(gemm(**operands(1))).bind()()
    assert acme.current == 0


def test_timing_loop(acme: Any) -> None:
    x = operands()
    p = plan(gemm(**x))
    with trace() as launches:
        seconds = acme.time(p.bind().launcher(), p.device, 3)
    assert len(seconds) == 3 and min(seconds) > 0
    assert launches == []  # a timing loop is not a call
    assert error(x) < 1e-5


# ---------------------------------------------------------------- traces


def test_trace(acme: Any) -> None:
    call = plan(gemm(**operands())).bind()
    call()
    with trace() as outer:
        call()
        with trace() as inner:
            call()
        other = threading.Thread(target=call)  # its launches are its own
        other.start()
        other.join()
    assert len(outer) == 2 and len(inner) == 1
    assert inner == list(call.plan.launches)
    call()
    assert len(outer) == 2


# ---------------------------------------------------------------- remembered plans


@pytest.fixture
def builds(acme: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The problems that were built, in order."""
    built: list[Any] = []
    build = AcmeGemm.build

    def counted(self: AcmeGemm, problem: Any, device: Any) -> Any:
        built.append((problem, device.index))
        return build(self, problem, device)

    monkeypatch.setattr(AcmeGemm, "build", counted)
    return built


def test_plans_are_remembered(builds: list[Any]) -> None:
    first = plan(gemm(**operands()))
    again = plan(gemm(**operands(seed=1)))  # other arrays, one problem
    assert first.parts is again.parts and len(builds) == 1
    plan(gemm(**operands(1)))
    assert [index for _, index in builds] == [0, 1]
    plan(gemm(alpha=2.0), backend="acme")
    plan(gemm(**operands()), implementation="acme-gemm")
    assert len(builds) == 4
    planning.forget()
    plan(gemm(**operands()))
    assert len(builds) == 5


def test_only_so_many_plans_are_remembered(
    builds: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "MAX_PLANS", 3)
    for m in range(1, 6):
        plan(gemm(M=m), device="acme")
    assert len(plugins().cache_of(planner.Plans).entries) == 3
    plan(gemm(M=5), device="acme")
    assert len(builds) == 5
    plan(gemm(M=1), device="acme")
    assert len(builds) == 6


def test_threads_share_a_plan(acme: Any) -> None:
    def work(seed: int) -> float:
        x = operands(seed % 2, seed)
        p = plan(gemm(**x))
        with trace() as launches:
            call = p.bind()
            for _ in range(5):
                call()
        assert len(launches) == 5
        return error(x)

    with ThreadPoolExecutor(8) as pool:
        errors = list(pool.map(work, range(64)))
    assert len(errors) == 64 and max(errors) < 1e-5


# ---------------------------------------------------------------- devices and backends


def test_devices_by_name(acme: Any, refused: Refused) -> None:
    assert str(plan(gemm()).device) == "numpy:0 (cpu)"
    assert str(plan(gemm(), backend="acme").device) == "acme:0 (acme1)"
    assert str(plan(gemm(), device="acme:1").device) == "acme:1 (acme1)"
    assert str(plan(gemm(), device=acme.devices()[1]).device) == "acme:1 (acme1)"
    message = (
        "backend = numpy: the arrays are on acme:0 (acme1). Move them to a device of numpy, or "
        "let the arrays choose: "
        "name no backend (backend=, use_backend and KERNELSEAM_BACKEND name one)."
    )
    refused(message, lambda: plan(gemm(**operands()), backend="numpy"))
    with use_backend("numpy"):
        refused(message, lambda: plan(gemm(**operands())))
        assert plan(gemm(**operands()), backend="acme").implementation == "acme-gemm"
        assert str(plan(gemm(), device="acme:1").device) == "acme:1 (acme1)"
    refused(
        "backend = numpy: the device is acme:1 (acme1). Name one of the two.",
        lambda: plan(gemm(), device="acme:1", backend="numpy"),
    )


def test_unknown_devices(acme: Any, refused: Refused) -> None:
    refused(
        "device = acme:2: backend acme has 2 device(s) here. See `kernelseam doctor`, or use "
        "another backend.",
        lambda: plan(gemm(), device="acme:2"),
    )
    for device in ("acme:x", "acme:", "acme:²", "", 0):
        reported = "''" if device == "" else device
        refused(
            f"device = {reported}: must be a Device, BACKEND or BACKEND:INDEX. For example numpy "
            "or numpy:0.",
            lambda device=device: plan(gemm(), device=device),
        )
    with pytest.raises(UnknownName, match=r"^device = abacus: must be one of acme, numpy\. "):
        plan(gemm(), device="abacus")


def test_what_is_no_descriptor(refused: Refused) -> None:
    refused(
        "descriptor = ndarray: must be a descriptor. Fill in one: BatchedGemmStrided, Attention, "
        "QkvProjection or another.",
        lambda: plan(np.zeros(3)),  # type: ignore[arg-type]
    )
