"""Outcomes, refusals, the list of cases and the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kernelseam.contract import (
    ArrayInfo,
    Backend,
    Cost,
    Device,
    LaunchRecord,
    PlanParts,
    host_array,
)
from kernelseam.descriptors import GemmProblem
from kernelseam.dtypes import DType
from kernelseam.errors import DeviceError
from kernelseam.kernels import KernelImplementation
from kernelseam.kernels.attention.prefix_groups import PrefixGroups
from kernelseam.parity.matrix import matrix, named
from kernelseam.parity.running.run import Target, run_case, targets
from kernelseam.planning import forget
from kernelseam.planning.planner import Plans
from kernelseam.plugins import plugins
from kernelseam.reference.gemm import NumpyGemm
from kernelseam.reference.runtime import HostRuntime
from kernelseam.samples.operations.operands import describe, layout, values


@dataclass(frozen=True)
class Broken:
    """Refuses one transposition and fails at the rest."""

    name: str = "broken"
    backend: str = "numpy"
    operation: str = "gemm"

    def supports(self, problem: object, device: Device) -> str | None:
        return "takes no transposed B" if problem.spec.b_transposed else None  # type: ignore[attr-defined]

    def cost(self, problem: object, device: Device) -> Cost:
        return Cost(0, 0, 1e3)

    def build(self, problem: object, device: Device) -> PlanParts:
        raise DeviceError("the runtime said 719")


@dataclass(frozen=True)
class Nothing(Broken):
    """Writes zeros, which is right where every result is lost as a subnormal."""

    name: str = "nothing"

    def supports(self, problem: object, device: Device) -> str | None:
        return None

    def value(self) -> float:
        return 0.0

    def build(self, problem: object, device: Device) -> PlanParts:
        return PlanParts((Filling(problem, self.value),))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Drifting(Nothing):
    """Writes another number with every launch."""

    name: str = "drifting"
    numbers: Iterator[int] = field(default_factory=count, compare=False)

    def value(self) -> float:
        return float(next(self.numbers))


@dataclass(frozen=True)
class Spilling(Nothing):
    """Adds 0 to a number that lies ``place`` bytes from its workspace, which has 20 bytes."""

    name: str = "spilling"
    place: int = 0

    def build(self, problem: object, device: Device) -> PlanParts:
        return PlanParts((Filling(problem, self.value, place=self.place),), 20)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Filling:
    """Their step: every element of C is set to a value."""

    problem: GemmProblem
    value: Callable[[], float]
    record: LaunchRecord = LaunchRecord("fill", (1, 1, 1), (1, 1, 1), 0, "cpu")
    place: int = 0

    def bind(self, pointers: Mapping[str, int], workspace: int) -> Callable[[int], None]:
        rule = self.problem.operands[2]
        out = host_array(pointers["C"], rule.shape, rule.strides, self.problem.spec.dtype_c)

        def run(stream: int) -> None:
            out.fill(self.value())
            if workspace:
                near = host_array(workspace + self.place, (1,), (1,), DType.float32)
                near += 0

        return run


@pytest.fixture
def host() -> Iterator[Device]:
    results = plugins().registry.implementations
    kept = list(results)
    results.append(Broken())
    yield plugins().backend("numpy").runtime.devices()[0]
    results[:] = kept
    forget()


def test_a_refusal_is_neither_a_pass_nor_a_failure_where_it_is_allowed(host: Device) -> None:
    case = named("gemm-f16-nt")
    allowed = run_case(case, Target(host, "broken", "gemm", builtin=False))
    assert (allowed.status, allowed.detail, allowed.verdict) == (
        "refused",
        "takes no transposed B",
        None,
    )
    allowed.require()
    forbidden = run_case(case, Target(host, "broken", "gemm", builtin=True))
    assert (forbidden.status, forbidden.detail) == (
        "error",
        "refused what it must take: takes no transposed B",
    )
    with pytest.raises(
        AssertionError, match="gemm-f16-nt on numpy-broken: refused what it must take"
    ):
        forbidden.require()
    declared = replace(case, may_refuse=frozenset({"broken"}))
    assert run_case(declared, Target(host, "broken", "gemm", builtin=True)).status == "refused"


def test_a_check_that_raises_is_an_error_and_no_refusal(
    host: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def supports(*_: object) -> str | None:
        raise KeyError("no such spec")

    monkeypatch.setattr(Broken, "supports", supports)
    outcome = run_case(named("gemm-f16-nt"), Target(host, "broken", "gemm", builtin=False))
    assert (outcome.status, outcome.refusal) == ("error", None)
    assert "in supports" in outcome.detail and "KeyError: 'no such spec'" in outcome.detail


def test_an_error_keeps_its_traceback(host: Device) -> None:
    outcome = run_case(named("gemm-f16-nn"), Target(host, "broken", "gemm", builtin=False))
    assert outcome.status == "error"
    assert (
        outcome.detail.startswith("Traceback")
        and "DeviceError: the runtime said 719" in outcome.detail
    )


def test_a_second_launch_must_give_the_same_bits(host: Device) -> None:
    plugins().registry.add_implementation(Drifting())
    outcome = run_case(named("gemm-f16-nn"), Target(host, "drifting", "gemm", builtin=False))
    assert outcome.status == "failed"
    assert outcome.detail.endswith("bytes differ after a second launch on the same inputs")


@pytest.mark.parametrize(
    ("place", "where"),
    [
        (-8, "1 bytes outside the workspace changed, the first 5 bytes before its start"),
        (0, ""),
        (16, ""),
        (20, "1 bytes outside the workspace changed, the first 3 bytes after its end"),
        (1000, "1 bytes outside the workspace changed, the first 983 bytes after its end"),
    ],
)
def test_nothing_is_written_around_a_workspace(host: Device, place: int, where: str) -> None:
    """Not even that 0 is added to what is there."""
    plugins().registry.add_implementation(Spilling(place=place))
    outcome = run_case(
        named("gemm-f16-nt-subnormal"),
        Target(host, "spilling", "gemm", builtin=False, flushed=True),
    )
    assert (outcome.status, outcome.detail if where else "") == (
        "failed" if where else "passed",
        where,
    )


def test_flushed_subnormals_widen_the_bound(host: Device) -> None:
    plugins().registry.add_implementation(Nothing())
    case = named("gemm-f16-nt-subnormal")  # every result is below the smallest normal half
    assert run_case(case, Target(host, "nothing", "gemm", builtin=False)).status == "failed"
    assert (
        run_case(case, Target(host, "nothing", "gemm", builtin=False, flushed=True)).status
        == "passed"
    )


class FarArray:
    """An array that says, as a GPU's do, that it is no host memory."""

    def __init__(self, host: np.ndarray) -> None:
        self.host = host

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {**self.host.__array_interface__, "version": 3}


class FarRuntime(HostRuntime):
    """Host memory behind arrays of another kind."""

    def __init__(self) -> None:
        self.device = Device("far", 0, "far1")

    def describe(self, array: object) -> ArrayInfo | None:
        interface = getattr(array, "__cuda_array_interface__", None)
        if interface is None:
            return None
        known = np.asarray(type("Memory", (), {"__array_interface__": interface})())
        strides = tuple(s // known.itemsize for s in known.strides)
        return ArrayInfo(
            known.ctypes.data,
            known.shape,
            strides,
            DType.of(known.dtype),
            self.device,
            "far",
            array,
        )

    def empty(
        self, shape: Sequence[int], dtype: DType, device: Device, like: ArrayInfo | None = None
    ) -> object:
        return FarArray(np.empty(tuple(shape), dtype.numpy))

    def from_host(self, host: np.ndarray, device: Device) -> object:
        return FarArray(host.copy())

    def to_host(self, array: object) -> np.ndarray:
        assert isinstance(array, FarArray)
        return array.host.copy()


class FarGemm(NumpyGemm):
    name, backend = "far", "far"


@pytest.mark.parametrize(
    "name",
    [
        "gemm-f16-nt-pointers",
        "gemm-f16-nt-pointers-device",
        "gemm-f16-nt-pointers-device-even",
        "gemm-f32-nn-gaps",
    ],
)
def test_memory_and_lists_on_another_device(name: str) -> None:
    registry = plugins().registry
    kept = list(registry.implementations)
    registry.add_backend(Backend("far", FarRuntime(), implementations=(FarGemm(),), priority=-300))
    try:
        (target,) = targets(backend="far")
        assert not target.builtin
        outcome = run_case(named(name), target)
        assert outcome.status == "passed", outcome.detail
        views = {
            p.spec.view
            for p, device, _ in plugins().cache_of(Plans).entries
            if device == target.device
        }
        # only a host can see that a list is even
        assert views == {"pointers" if "pointers" in name else "strided"}
    finally:
        del registry.backends["far"]
        registry.implementations[:] = kept
        forget()


def test_targets_are_the_implementations_registered(host: Device) -> None:
    actual = {(t.operation, t.implementation): t.builtin for t in targets(backend="numpy")}
    assert (
        actual[("gemm", "numpy")]
        and actual[("attention", "numpy")]
        and not actual[("gemm", "broken")]
    )
    assert targets(backend="nobody") == []


@pytest.mark.parametrize(("archs", "builtin"), [((), True), (("sm_90a",), False)])
def test_the_cores_composition_of_a_plugins_kernels_is_the_plugins(
    archs: tuple[str, ...], builtin: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = KernelImplementation(PrefixGroups(archs=archs), SimpleNamespace(backend="numpy"))  # type: ignore[arg-type]
    registry = plugins().registry
    monkeypatch.setattr(registry, "implementations", [*registry.implementations, made])
    actual = {t.implementation: t.builtin for t in targets(backend="numpy")}
    assert actual["prefix-groups"] is builtin


def test_emulated_devices_are_targets_where_they_are_named(
    acme: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = acme.devices()
    emulated = [replace(d, evidence="emulated") for d in real]
    monkeypatch.setattr(type(acme), "devices", lambda self: [emulated[0], real[1]])
    assert [t.device for t in targets() if t.device.backend == "acme"] == [real[1]]
    assert [t.device.evidence for t in targets(backend="acme")] == ["emulated"]
    assert [(t.device, t.implementation) for t in targets(device=real[1])] == [
        (real[1], "acme-gemm")
    ]


@pytest.mark.parametrize(
    "name",
    [
        "gemm-f32-nn-gaps-beta",
        "gemm-f16-nt-odd-a",
        "attention-f16-64-packed-ramp",
        "attention-f16-64-gaps",
    ],
)
def test_memory_may_be_separate(name: str) -> None:
    case = named(name)
    target = next(t for t in targets(backend="numpy") if t.operation == case.operation)
    outcome = run_case(case, target, separate=True)
    assert outcome.status == "passed", outcome.detail


def _specs() -> set[Any]:
    result = set()
    for case in matrix():
        lay = layout(case)
        at = {
            n: 2**20 + lay.blocks()[p.block][1] + p.offset * p.dtype.itemsize
            for n, p in lay.placements.items()
        }
        host = plugins().backend("numpy").runtime
        created, _ = describe(case, lay, at, host, host.devices()[0]).simplified()
        result.add(created.problem().spec)
    return result


def test_the_matrix_is_wide_and_compiles_little() -> None:
    cases = matrix()
    assert len({c.name for c in cases}) == len(cases) >= 300
    compiled = Counter(spec.operation for spec in _specs())
    assert compiled <= Counter(
        gemm=154,
        grouped_gemm=82,
        grouped_gemm_pointers=21,
        attention=295,
        attention_bwd=106,
        merge_states=12,
    ) + Counter(
        paged_cache=63,
        qkv_projection=31,
        output_projection=10,
        qkv_projection_bwd=10,
        output_projection_bwd=14,
    )
    attention = [c for c in cases if c.operation == "attention"]
    assert {c.name for c in attention} == {
        c.name.removesuffix("-ramp") + s for c in attention for s in ("", "-ramp")
    }


def test_a_pattern_chooses_cases() -> None:
    assert [c.name for c in matrix("f64-tt,f64-tn-unaligned", "gemm")][:2] == [
        "gemm-f64-tt",
        "gemm-f64-tn-unaligned",
    ]
    assert [c.name for c in matrix("f64-tt-p", "gemm")] == ["gemm-f64-tt-pointers"]
    assert {c.operation for c in matrix("mqa,pointers-odd")} == {
        "gemm",
        "attention",
        "attention_bwd",
    }
    with pytest.raises(KeyError, match="no-such-case"):
        named("no-such-case")


def test_data_are_the_same_every_time() -> None:
    first, second = (values(named("attention-f16-64-mqa-ramp")) for _ in range(2))
    for name, x in first.items():
        np.testing.assert_array_equal(x, second[name])
    assert first["q"].shape == (2, 5, 65, 64) and first["k"].shape == (2, 1, 129, 64)
    assert (first["q"][..., 0] == 8).all()
    assert first["k"][0, 0, :4, 0].tolist() == [0, 0.0625, 0.125, 0.1875]
