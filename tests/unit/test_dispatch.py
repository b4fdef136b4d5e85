"""Dispatch: the cheapest that takes a problem, an explicit choice, refusals with each one's own
reason."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
from idle_step import IdleImplementation
from kernelseam import BatchedGemmStrided, plan, use_backend
from kernelseam.contract import Cost, Device, DeviceLimits, Problem
from kernelseam.costs import roofline
from kernelseam.dispatch import build, consider, find_device, preferred_backend, select
from kernelseam.errors import BrokenImplementation, Refusal, UnknownName, Unsupported
from kernelseam.plugins import Plugins
from refusals import Refused

PROBLEM = BatchedGemmStrided(M=5, N=4, K=8, dtype="float32").problem()


@dataclass
class Scripted(IdleImplementation):
    """One that counts how often it is asked, or raises."""

    backend: str = "acme"
    error: Exception | None = None
    asked: int = 0
    last_resort: bool = False

    def supports(self, problem: Problem, device: Device) -> str | None:
        self.asked += 1
        if self.error:
            raise self.error
        return super().supports(problem, device)


@pytest.fixture
def implementations(discovered: Callable[..., Plugins]) -> Callable[..., Device]:
    """``implementations(scripted, …)``: these are all there is on acme:0, which is returned."""

    def use(*given: Scripted) -> Device:
        loaded = discovered("kernelseam_thirdvendor")
        loaded.registry.implementations[:] = given
        return find_device("acme")

    return use


def test_the_cheapest_is_chosen(implementations: Callable[..., Device]) -> None:
    unfit = Scripted("fastest, but not for this", 0.5, "needs 64 columns")
    device = implementations(Scripted("slow", 3), Scripted("fast", 1), unfit, Scripted("so-so", 2))
    choice = select(PROBLEM, device)
    assert choice.implementation.name == "fast"
    assert [c.implementation.name for c in choice.candidates] == [
        "fast",
        "so-so",
        "slow",
        "fastest, but not for this",
    ]
    assert [c.refusal for c in choice.candidates] == [None, None, None, "needs 64 columns"]
    assert choice.candidates[0].cost == Cost(0, 0, 1)
    assert choice.candidates[3].cost is None
    assert consider(PROBLEM, device)[3].cost == Cost(0, 0, 0.5)  # a reader is told all the same


def test_a_last_resort_is_asked_where_no_other_takes_the_problem(
    implementations: Callable[..., Device],
) -> None:
    last, slow = Scripted("last", 0.5, last_resort=True), Scripted("slow", 3)
    device = implementations(last, slow)
    choice = select(PROBLEM, device)
    assert choice.implementation is slow and last.asked == 0
    assert [(c.implementation.name, c.takes) for c in choice.candidates] == [
        ("slow", True),
        ("last", False),
    ]
    assert [c.implementation.name for c in consider(PROBLEM, device)] == ["slow", "last"]
    assert select(PROBLEM, device, "last").implementation is last
    slow.refusal = "not this"
    assert select(PROBLEM, device).implementation is last
    last.refusal = "nor this"
    with pytest.raises(Unsupported, match="slow: not this; last: nor this"):
        select(PROBLEM, device)


def test_a_last_resort_is_built_where_the_others_do_not_build(
    implementations: Callable[..., Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    last, broken = Scripted("last", last_resort=True), Scripted("broken")
    device = implementations(last, broken)
    choice = select(PROBLEM, device)
    monkeypatch.setattr(broken, "build", mock.Mock(side_effect=RuntimeError("no")))
    with pytest.warns(BrokenImplementation, match="last computes"):
        built, _ = build(choice, PROBLEM, device)
    assert built.implementation is last and last.asked == 1


def test_equal_costs_keep_the_order_of_registration(implementations: Callable[..., Device]) -> None:
    assert (
        select(PROBLEM, implementations(Scripted("first"), Scripted("second"))).implementation.name
        == "first"
    )


def test_an_explicit_choice(implementations: Callable[..., Device]) -> None:
    device = implementations(Scripted("fast", 1), Scripted("slow", 3))
    assert select(PROBLEM, device, "slow").implementation.name == "slow"
    d = BatchedGemmStrided(M=5, N=4, K=8, dtype="float32")
    assert plan(d, device=device, implementation="slow").implementation == "slow"
    assert plan(d, device=device).implementation == "fast"


def test_an_explicit_choice_that_refuses(implementations: Callable[..., Device]) -> None:
    device = implementations(
        Scripted("fast"), Scripted("narrow", refusal="needs 64 columns, not 4")
    )
    with pytest.raises(Unsupported) as e:
        select(PROBLEM, device, "narrow")
    assert str(e.value) == (
        "no implementation takes gemm float32→float32 NN strided batch=1 heads=1 5×4×8. "
        "narrow: needs 64 columns, not 4."
    )
    assert e.value.refusals == (Refusal("narrow", "needs 64 columns, not 4"),)


def test_an_unknown_name(implementations: Callable[..., Device], refused: Refused) -> None:
    device = implementations(
        Scripted("fast"), Scripted("slow", 3), Scripted("elsewhere", backend="numpy")
    )
    refused(
        "implementation = elsewhere: must be one of fast, slow for gemm on acme. Name one of "
        "these, or leave it out.",
        lambda: select(PROBLEM, device, "elsewhere"),
    )
    device = implementations()
    refused(
        "implementation = fast: must be one of none for gemm on acme. Name one of these, or "
        "leave it out.",
        lambda: select(PROBLEM, device, "fast"),
    )


def test_every_refusal_has_its_reason(implementations: Callable[..., Device]) -> None:
    device = implementations(
        Scripted("one", refusal="no float32"), Scripted("two", refusal="K is not a multiple of 64")
    )
    with pytest.raises(Unsupported) as e:
        select(PROBLEM, device)
    assert str(e.value).endswith("5×4×8. one: no float32; two: K is not a multiple of 64.")
    again = pickle.loads(pickle.dumps(e.value))
    assert (str(again), again.refusals) == (str(e.value), e.value.refusals)
    with pytest.raises(Unsupported, match=r"none is registered for this operation and device\.$"):
        select(PROBLEM, implementations())


def test_a_broken_check_affects_no_other(implementations: Callable[..., Device]) -> None:
    device = implementations(
        Scripted("broken", 0.1, error=RuntimeError("division of labour")), Scripted("sound")
    )
    choice = select(PROBLEM, device)
    assert choice.implementation.name == "sound"
    assert choice.candidates[1].refusal == "its check raised RuntimeError: division of labour"
    with pytest.raises(
        Unsupported, match="broken: its check raised RuntimeError: division of labour"
    ):
        select(PROBLEM, device, "broken")


def test_a_broken_cost_affects_no_other(
    implementations: Callable[..., Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, silent, lost = Scripted("broken"), Scripted("silent"), Scripted("lost", float("nan"))
    monkeypatch.setattr(broken, "cost", lambda problem, device: 1 // 0, raising=False)
    monkeypatch.setattr(silent, "cost", lambda problem, device: None, raising=False)
    choice = select(PROBLEM, implementations(broken, silent, lost, Scripted("sound", refusal="")))
    assert choice.implementation.name == "sound"
    assert [c.refusal for c in choice.candidates] == [
        None,
        "its check raised ZeroDivisionError: integer division or modulo by zero",
        "its check raised PluginError: cost() of 'silent' must be a Cost, got None",
        (
            "its check raised PluginError: cost() of 'lost': Cost.seconds = nan: must be a number "
            "of at least 0"
        ),
    ]


def test_only_matching_implementations_are_asked(implementations: Callable[..., Device]) -> None:
    given = [
        Scripted("here"),
        Scripted("other operation", operation="attention"),
        Scripted("other backend", backend="numpy"),
    ]
    assert [c.implementation.name for c in consider(PROBLEM, implementations(*given))] == ["here"]
    assert [w.asked for w in given] == [1, 0, 0]


def test_registered_refusal(acme: Any) -> None:
    d = BatchedGemmStrided(M=5, N=4, K=8, dtype="float64")
    with pytest.raises(Unsupported, match=r"5×4×8\. acme-gemm: Acme has no float64\.$"):
        plan(d, backend="acme")
    assert plan(d).implementation == "numpy"


def test_the_default_backend(acme: Any, monkeypatch: pytest.MonkeyPatch, refused: Refused) -> None:
    monkeypatch.delenv("KERNELSEAM_BACKEND", raising=False)
    # priority −100 over −200
    assert (preferred_backend(), str(find_device())) == (None, "numpy:0 (cpu)")
    with mock.patch("os.environ", {"KERNELSEAM_BACKEND": "acme"}):
        assert preferred_backend() == "acme"
    assert preferred_backend() is None
    monkeypatch.setenv("KERNELSEAM_BACKEND", "acme")
    assert str(find_device()) == "acme:0 (acme1)"
    with use_backend("numpy"):  # over the variable
        assert find_device().backend == "numpy"
        assert find_device(backend="acme").backend == "acme"  # the argument over both
        with use_backend("acme"):
            assert find_device().backend == "acme"
        assert find_device().backend == "numpy"
    assert find_device().backend == "acme"
    refused(
        "backend = abacus: must be one of acme, numpy. Name one of these, or see `kernelseam "
        "doctor` for a plugin that was kept out.",
        lambda: use_backend("abacus").__enter__(),
    )
    monkeypatch.setenv("KERNELSEAM_BACKEND", "abacus")
    with pytest.raises(UnknownName, match="^backend = abacus: "):
        find_device()


def test_roofline() -> None:
    big = BatchedGemmStrided(M=1000, N=1000, K=1000, dtype="float16").problem()
    limits = DeviceLimits(
        bytes_per_second=1e9, operations_per_second={"float16": 1e12}, launch_seconds=1e-3
    )
    assert roofline(big, limits) == Cost(6_000_000, 2 * 10**9, 1e-3 + 6e-3)  # memory bounds it
    assert roofline(big, limits, 0.5).seconds == 1e-3 + 12e-3
    slow = DeviceLimits(
        bytes_per_second=1e12, operations_per_second={"float16": 1e10}, launch_seconds=0
    )
    assert roofline(big, slow).seconds == 0.2
