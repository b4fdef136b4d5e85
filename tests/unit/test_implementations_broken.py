"""Implementations that raise or compute wrongly: the others go on, and the culprit is named."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from idle_step import IdleImplementation
from kernelseam import BatchedGemmStrided, plan
from kernelseam.contract import Device, LaunchRecord, PlanParts
from kernelseam.dispatch import find_device, select
from kernelseam.errors import BrokenImplementation, CompileError, OutOfDeviceMemory, WrongResult
from kernelseam.plugins import plugins
from kernelseam.reference.attention_bwd import NumpyAttentionBwd
from kernelseam.reference.merge import NumpyMerge

Discovered = Callable[..., Any]
RAISES = {"BUILD": "raise RuntimeError('the second wing is missing')", "DEVICES": "return ()"}
LOSES_A_SUMMAND = {
    "IMPORT": "from dataclasses import replace",
    "BUILD": "return super().build(replace(problem, K=problem.K - 1), device)",
    "DEVICES": "return ()",
}
"""Lines of a strange plugin, whose GEMM is the cheapest: one that takes every problem and builds
none, and one that is wrong."""


def operands(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "A": rng.standard_normal((5, 8)),
        "B": rng.standard_normal((8, 4)),
        "C": np.zeros((5, 4)),
    }


def gemm(x: dict[str, Any]) -> BatchedGemmStrided:
    return BatchedGemmStrided(M=5, N=4, K=8, dtype="float64", **x)


def error(x: dict[str, Any]) -> float:
    return float(abs(x["C"] - x["A"] @ x["B"]).max())


def test_one_that_raises_in_build(strange: Discovered) -> None:
    strange(**RAISES)
    x = operands()
    message = (
        r"^numpy computes gemm float64→float64 NN strided batch=1 heads=1 5×4×8 on numpy:0 "
        r"\(cpu\), as faster implementations are broken\. strange: its build raised "
        r"RuntimeError: the second wing is missing$"
    )
    with pytest.warns(BrokenImplementation, match=message) as warned:
        planned = plan(gemm(x))
    assert warned[0].filename == __file__
    planned.bind()()
    assert planned.implementation == "numpy" and error(x) < 1e-12
    assert [(c.implementation.name, c.refusal) for c in planned.choice.candidates] == [
        ("numpy", None),
        ("strange", "its build raised RuntimeError: the second wing is missing"),
    ]
    assert "strange_strange.py" in planned.choice.candidates[1].error
    again = plan(gemm(operands(1)))  # remembered: it is not tried a second time, nor warned of
    assert again.parts is planned.parts
    # whoever asks for it is told
    with pytest.raises(RuntimeError, match="^the second wing is missing$"):
        plan(gemm(x), implementation="strange")


def test_a_remembered_failure_keeps_no_array(strange: Discovered) -> None:
    strange(**RAISES)

    def work() -> weakref.ref[Any]:
        x = operands()
        with pytest.warns(BrokenImplementation):
            plan(gemm(x)).bind()()
        return weakref.ref(x["C"])

    there = work()
    gc.collect()
    assert there() is None


class Scripted(IdleImplementation):
    """An implementation whose build raises."""

    def __init__(self, name: str, seconds: float, error: Exception | None) -> None:
        super().__init__(name, seconds)
        self.error, self.built = error, 0

    def build(self, problem: Any, device: Device) -> PlanParts:
        self.built += 1
        if self.error:
            raise self.error
        return super().build(problem, device)


def test_where_none_can_be_built_the_first_failure_is_reported(discovered: Discovered) -> None:
    loaded = discovered()
    first = CompileError("gemm", "cpu", "1: error: no such luck", "/tmp/source")
    loaded.registry.implementations[:] = [
        Scripted("second", 2, RuntimeError("nor here")),
        Scripted("first", 1, first),
    ]
    with pytest.raises(CompileError) as caught:
        plan(gemm({}), device="numpy")
    assert caught.value is first


def test_the_next_cheapest_is_used(discovered: Discovered) -> None:
    loaded = discovered()
    implementations = [
        Scripted("third", 3, None),
        Scripted("second", 2, None),
        Scripted("first", 1, RuntimeError("no")),
    ]
    loaded.registry.implementations[:] = implementations
    with pytest.warns(BrokenImplementation, match="^second computes"):
        assert plan(gemm({}), device="numpy").implementation == "second"
    assert [w.built for w in implementations] == [0, 1, 1]


def test_too_little_memory_is_no_fault_of_the_implementation(discovered: Discovered) -> None:
    loaded = discovered()
    implementations = [
        Scripted("first", 1, OutOfDeviceMemory("3 GB wanted")),
        Scripted("second", 2, None),
    ]
    loaded.registry.implementations[:] = implementations
    with pytest.raises(OutOfDeviceMemory, match="^3 GB wanted$"):
        plan(gemm({}), device="numpy")
    assert implementations[1].built == 0


def test_one_that_computes_wrongly(strange: Discovered) -> None:
    strange(**LOSES_A_SUMMAND)
    x = operands()
    planned = plan(gemm(x))
    assert planned.implementation == "strange"
    planned.bind()()
    assert error(x) > 0.1  # nobody asked
    with pytest.raises(WrongResult) as caught:
        planned.bind(check=True)()
    e = caught.value
    assert (e.implementation, e.device) == ("strange", "numpy:0 (cpu)")
    assert str(e).startswith(
        "strange on numpy:0 (cpu) computes gemm float64→float64 NN strided batch=1 heads=1 "
        "5×4×8 wrongly: C["
    )
    assert str(e).endswith(
        ", the worst of 20 elements. Name another implementation, and "
        "report this to the plugin's authors."
    )
    plan(gemm(x), implementation="numpy").bind(check=True)()
    assert error(x) < 1e-12


@pytest.mark.parametrize(
    ("lines", "stage", "message"),
    [
        (RAISES, "build", "RuntimeError: the second wing is missing"),
        (
            LOSES_A_SUMMAND,
            "numbers",
            "WrongResult: strange on numpy:0 (cpu) computes gemm float16→float16",
        ),
    ],
)
def test_doctor_names_the_culprit(
    command: Callable[..., Any],
    strange: Discovered,
    lines: dict[str, str],
    stage: str,
    message: str,
) -> None:
    strange(**lines)
    status, out, err = command("doctor", "--json")
    assert (status, err) == (0, "")
    report = json.loads(out)
    (failure,) = report["failures"]
    assert (failure["plugin"], failure["stage"]) == ("strange", stage)
    assert failure["message"].startswith(f"strange of gemm on numpy:0 (cpu): {message}")
    assert failure["traceback"].startswith("Traceback")
    states = {
        f["implementation"]: f["state"] for f in report["examined"] if f["operation"] == "gemm"
    }
    assert states == {"numpy": "right", "strange": "broken", "acme-gemm": "right"}
    text = command("doctor")[1]
    assert f"strange failed at {stage}: " in text and "    Traceback (most" in text
    assert f"broken: at {stage}: " in text
    assert json.loads(command("doctor", "--json", "--no-check")[1])["examined"] == []


def test_doctor_tells_of_those_that_are_right_and_of_those_that_refuse(
    command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kernelseam_thirdvendor import AcmeGemm

    monkeypatch.setattr(AcmeGemm, "supports", lambda *_: "it is tired")
    report = json.loads(command("doctor", "--json")[1])
    assert report["failures"] == []
    assert {
        (f["device"], f["operation"], f["implementation"], f["plugin"], f["state"])
        for f in report["examined"]
    } == {
        ("numpy:0 (cpu)", "gemm", "numpy", "reference", "right"),
        ("numpy:0 (cpu)", "grouped_gemm", "numpy", "reference", "right"),
        ("numpy:0 (cpu)", "grouped_gemm_pointers", "numpy", "reference", "right"),
        ("numpy:0 (cpu)", "attention", "numpy", "reference", "right"),
        ("numpy:0 (cpu)", "merge_states", "numpy", "reference", "right"),
        ("numpy:0 (cpu)", "paged_cache", "numpy", "reference", "right"),
        ("numpy:0 (cpu)", "attention_bwd", "numpy", "reference", "right"),
        ("numpy:0 (cpu)", "qkv_projection", "numpy", "reference", "right"),
        ("numpy:0 (cpu)", "output_projection", "numpy", "reference", "right"),
        ("numpy:0 (cpu)", "qkv_projection_bwd", "numpy", "reference", "right"),
        ("numpy:0 (cpu)", "output_projection_bwd", "numpy", "reference", "right"),
        ("acme:0 (acme1)", "gemm", "acme-gemm", "kernelseam-thirdvendor", "refuses"),
        ("acme:1 (acme1)", "gemm", "acme-gemm", "kernelseam-thirdvendor", "refuses"),
    }
    details = {
        f["implementation"]: f["detail"] for f in report["examined"] if f["operation"] == "gemm"
    }
    assert details["numpy"] == "3 problems, each within its tolerance"
    problem = "gemm float16→float16 NT strided batch=2 heads=3 65×72×33"
    assert details["acme-gemm"].startswith(f"{problem}: it is tired; gemm")


class CarelessMerge(NumpyMerge):
    """It loses the last part."""

    def build(self, problem: Any, device: Device) -> PlanParts:
        return super().build(replace(problem, parts=problem.parts - 1), device)


class CarelessGradients(NumpyAttentionBwd):
    """It takes another scale."""

    def build(self, problem: Any, device: Device) -> PlanParts:
        return super().build(replace(problem, forward=replace(problem.forward, scale=0.2)), device)


class FailingGradients(NumpyAttentionBwd):
    """It cannot be bound."""

    def build(self, problem: Any, device: Device) -> PlanParts:
        return PlanParts((FailingStep(),))


class FailingStep:
    record = LaunchRecord("failing", (1, 1, 1), (1, 1, 1), 0, "cpu")

    def bind(self, pointers: Any, workspace: int) -> Any:
        raise RuntimeError("no such luck")


@pytest.mark.parametrize(
    ("made", "operation", "stage", "message"),
    [
        (
            CarelessMerge,
            "merge_states",
            "numbers",
            "WrongResult: careless on numpy:0 (cpu) computes merge_",
        ),
        (
            CarelessGradients,
            "attention_bwd",
            "numbers",
            "WrongResult: careless on numpy:0 (cpu) computes attent",
        ),
        (
            FailingGradients,
            "attention_bwd",
            "call",
            (
                "kernelseam.errors.PluginError: bind() of 'careless', step 'failing', raised "
                "RuntimeError: no such luck"
            ),
        ),
    ],
)
def test_doctor_tries_merges_and_gradients(
    command: Callable[..., Any], made: type, operation: str, stage: str, message: str
) -> None:
    careless = made()
    careless.name = "careless"
    plugins().registry.implementations.append(careless)
    report = json.loads(command("doctor", "--json")[1])
    (failure,) = report["failures"]
    assert failure["stage"] == stage and failure["traceback"].startswith("Traceback")
    assert failure["message"].startswith(f"careless of {operation} on numpy:0 (cpu): {message}")
    states = {
        f["implementation"]: f["state"] for f in report["examined"] if f["operation"] == operation
    }
    assert states == {"numpy": "right", "careless": "broken"}


def test_select_does_not_build(strange: Discovered) -> None:
    strange(**RAISES)
    assert select(gemm({}).problem(), find_device("numpy")).implementation.name == "strange"
