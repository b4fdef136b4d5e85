"""Plans of problems whose like were planned: bound from numbers, to what planning would bind.

A vendor whose device memory is the host's, as in test_ops_traced_calls.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kernelseam
import pytest
from card import CardRuntime, add_compiled_card
from kernelseam import planning
from kernelseam.errors import InvalidValue, WrongResult
from kernelseam.planning import planner

torch = pytest.importorskip("torch", reason="torch is not installed")


@pytest.fixture
def card(discovered: Callable[..., Any], cache: object) -> CardRuntime:
    return add_compiled_card(discovered())


def gemm(m: int, n: int = 5, k: int = 8, **more: Any) -> tuple[Any, Any]:
    """A descriptor over arrays, and what it computes."""
    a, b = torch.randn(m, k), torch.randn(k, n)
    c = torch.full((m, n), float("nan"))
    given = {"A": a, "B": b, "C": c, "M": m, "N": n, "K": k, **more}
    return kernelseam.BatchedGemmStrided(**given), a @ b


def known(**more: Any) -> None:
    for m in (6, 7, 2, 3):
        kernelseam.plan(gemm(m, **more)[0]).bind()()


def launched(plan: Any, **more: Any) -> Any:
    plan.bind(**more)()
    return plan.descriptor.operands()["C"]


def test_new_extents_ask_no_implementation(
    card: CardRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    known()
    kernelseam.plan(gemm(40)[0]).bind()
    with monkeypatch.context() as patch:
        patch.setattr(planner, "select", lambda *_: pytest.fail("it was chosen again"))
        for m in (8, 9, 33, 200, 5):
            descriptor, expected = gemm(m)
            plan = kernelseam.plan(descriptor)
            assert plan.known is not None
            torch.testing.assert_close(launched(plan), expected, rtol=1e-5, atol=1e-5)
    # what else is asked of a plan is that of one that is built
    assert plan.implementation == "card-rows"
    built = planner.built_plan(descriptor)
    assert built.known is None and built.choice is plan.choice
    assert plan.launches == built.launches and plan.parts is built.parts
    for name in ("workspace_bytes", "workspace_alignment", "zeroed_bytes", "allocation_bytes"):
        assert getattr(plan, name) == getattr(built, name)
    assert copy.copy(plan) is plan and repr(plan.problem) == repr(built.problem)


def test_calls_are_as_those_of_built_plans(card: CardRuntime) -> None:
    known()
    descriptor, expected = gemm(21)
    call = kernelseam.plan(descriptor).bind()
    c = descriptor.operands()["C"]
    for n in (1, 2):
        call()
        assert c._version == n
    torch.testing.assert_close(c, expected, rtol=1e-5, atol=1e-5)
    other = torch.zeros(21, 5)
    call.rebind(C=other)()
    torch.testing.assert_close(other, expected, rtol=1e-5, atol=1e-5)
    with kernelseam.trace() as launches:
        call()
    assert [x.kernel for x in launches][-1] == "rows"
    plan = kernelseam.plan(gemm(22)[0])
    memory = torch.empty(plan.allocation_bytes + 16, dtype=torch.uint8)
    at = plan.align_workspace(memory.data_ptr())
    launched(plan, workspace=at)
    checked = kernelseam.plan(gemm(23)[0]).bind(check=True)
    checked()


def test_what_binding_refuses_is_refused_as_ever(card: CardRuntime) -> None:
    known(n=8)
    descriptor, _ = gemm(8, 8)
    a, c = (descriptor.operands()[n] for n in "AC")
    plan = kernelseam.plan(descriptor)
    assert plan.known is not None
    built = planner.built_plan(descriptor)
    for operands in ({"C": a}, {"A": 0}, {"C": c.data_ptr() + 2}, {"A": torch.randn(3, 3)}):
        messages = []
        for each in (plan, built):
            with pytest.raises(InvalidValue) as caught:
                each.bind(**operands)
            messages.append(str(caught.value))
        assert messages[0] == messages[1]


@pytest.mark.parametrize(
    ("rows", "seed"),
    [(1, 1), pytest.param(4, 3, marks=pytest.mark.slow("half a minute: more of each kind"))],
)
def test_launches_are_to_the_byte_those_of_built_plans(
    monkeypatch: pytest.MonkeyPatch, rows: int, seed: int
) -> None:
    """Of random problems, so many of each kind, on the path to a GPU without one."""
    pytest.importorskip("kernelseam_cuda", reason="kernelseam-cuda is not installed")
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is missing")
    pytest.importorskip("cuda.bindings.nvrtc", reason="nvrtc is missing")
    if shutil.which("cc") is None:
        pytest.skip("a C compiler is missing")
    root = Path(__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(root), *sys.path]))
    idle_device = pytest.importorskip("benchmarks.comparing.idle_device")
    script = str(Path(__file__).parent / "helpers" / "idle_known.py")
    done = idle_device.run_with_idle_driver(
        [script, str(rows), str(seed)], capture_output=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["differ"] == []
    kinds = {"sm90", "sm90-latent", "shared", "lists by sm90", "lists by shared"}
    assert kinds <= set(found["counts"]) and sum(found["counts"].values()) > 30 * rows


def test_scalars_and_layouts_are_numbers(card: CardRuntime) -> None:
    known(alpha=2.0)
    wide, b, c = torch.randn(9, 12), torch.randn(8, 5), torch.empty(9, 5)
    for alpha in (3.0, -0.5):
        for a in (wide[:, :8], torch.randn(9, 8)):
            strides = {"stride_a_row": a.stride(0), "stride_b_row": 5, "stride_c_row": 5}
            descriptor = kernelseam.BatchedGemmStrided(
                A=a, B=b, C=c, M=9, N=5, K=8, alpha=alpha, **strides
            )
            launched(kernelseam.plan(descriptor))
            torch.testing.assert_close(c, alpha * (a @ b), rtol=1e-5, atol=1e-5)


def test_it_is_forgotten_and_a_named_implementation_is_built(card: CardRuntime) -> None:
    known()
    assert kernelseam.plan(gemm(9)[0]).known is not None
    for m in (9, 10, 11):
        named = kernelseam.plan(gemm(m)[0], implementation="card-gemm")
        assert named.known is None, "it answers by problem, as plugins may"
    planning.forget()
    assert kernelseam.plan(gemm(10)[0]).known is None


def test_a_wrong_result_is_found(card: CardRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    known()
    descriptor, _ = gemm(12)
    call = kernelseam.plan(descriptor).bind(check=True)
    monkeypatch.setattr(call, "_run", lambda stream: None)
    with pytest.raises(WrongResult):
        call()
