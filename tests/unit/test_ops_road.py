"""Calls on torch's tensors whose like were planned: they give what the planned call gives, and none
is launched that must be planned.

A vendor whose device memory is the host's, so that torch's CPU tensors are its arrays.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import kernelseam
import pytest
from card import CardGemm, CardRuntime
from kernelseam import planning
from kernelseam.arrays import guards
from kernelseam.arrays import torch as torch_arrays
from kernelseam.contract import Backend
from kernelseam.errors import InvalidValue, OutOfDeviceMemory, UnknownName, WrongResult
from kernelseam.ops import array_call, calling
from kernelseam.ops.repeat import Repeat
from kernelseam.planning import planner
from kernelseam.plugins import plugins
from kernelseam_thirdvendor.gemm import _Step
from refusals import Refused

torch = pytest.importorskip("torch", reason="torch is not installed")


@pytest.fixture
def card(discovered: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> CardRuntime:
    loaded, runtime = discovered(), CardRuntime()
    loaded.registry.add_backend(
        Backend("card", runtime, implementations=(CardGemm(),), priority=10)
    )
    return runtime


def memory() -> calling.CallCache:
    return plugins().cache_of(calling.CallCache)


def repeats() -> list[Repeat]:
    """Of planned calls, by layouts."""
    return [x for caller in memory().callers.values() for x in caller._layouts.values()]


def close(x: Any, expected: Any) -> None:
    torch.testing.assert_close(x, expected, rtol=1e-5, atol=1e-5)


def test_a_call_that_repeats_describes_nothing(card: CardRuntime) -> None:
    a, b = torch.randn(2, 3, 4), torch.randn(2, 4, 5)
    close(kernelseam.bmm(a, b), a @ b)
    card.described = 0
    for _ in range(3):
        close(kernelseam.bmm(a, b), a @ b)
        a, b = torch.randn(2, 3, 4), torch.randn(2, 4, 5)
    assert card.described == 0
    close(kernelseam.bmm(a, b[:, :, :4]), a @ b[:, :, :4])
    assert card.described > 0


def test_other_layouts_or_options_take_the_slow_path(card: CardRuntime) -> None:
    """Each beside the call that is remembered, and each again."""
    a, b = torch.randn(2, 4, 4), torch.randn(2, 4, 4)
    c = torch.randn(2, 4, 4)
    wide = torch.randn(2, 4, 9)
    wide[:, :, 1:5] = a  # 4 bytes off
    ways: list[tuple[Callable[[], Any], Any]] = [
        (lambda: kernelseam.bmm(a, b), a @ b),
        (lambda: kernelseam.bmm(a.mT, b), a.mT @ b),
        (lambda: kernelseam.bmm(a, b.mT), a @ b.mT),
        (lambda: kernelseam.bmm(wide[:, :, 1:5], b), a @ b),
        (lambda: kernelseam.bmm(a[:1].expand(2, 4, 4), b), a[:1] @ b),
        (lambda: kernelseam.bmm(a, b, a_transposed=True), a.mT @ b),
        (lambda: kernelseam.bmm(a, b, alpha=2), 2 * a @ b),
        (lambda: kernelseam.bmm(a.half(), b.half()), (a.half() @ b.half())),
        (lambda: kernelseam.bmm(a, b, out_dtype="float32"), a @ b),
        (lambda: kernelseam.bmm(a, b, out=c, beta=1), None),
        (lambda: kernelseam.bmm(torch.nn.Parameter(a, requires_grad=False), b), a @ b),
    ]
    for _ in range(3):
        for way, expected in ways:
            actual = way()
            if expected is None:
                continue
            torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-2)
    # no address at 16 bytes; a Parameter is like a tensor
    assert len(repeats()) == len(ways) - 2


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # by torch, of torch
@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning")  # the same, of torch 2.14
def test_what_is_refused_is_refused_after_a_call_that_was_not(
    card: CardRuntime, refused: Refused
) -> None:
    a, b, out = torch.randn(4, 4), torch.randn(4, 4), torch.empty(4, 4)
    for _ in range(2):
        kernelseam.matmul2d(a, b)
        kernelseam.matmul2d(a, b, alpha=1, out=out)
    wants = torch.nn.Parameter(a)
    refused(
        "a.requires_grad = True: gradients do not flow through this call. Call under "
        "torch.no_grad(), or pass tensor.detach() (what has gradients: kernelseam.interop.torch).",
        lambda: kernelseam.matmul2d(wants, b),
    )
    with torch.no_grad():
        close(kernelseam.matmul2d(wants, b), a @ b)
    negative = torch.view_as_complex(torch.randn(4, 4, 2)).conj().imag
    assert negative.is_neg()
    refused(
        "b.is_neg = True: its memory holds the negated values (a lazy negation). "
        "Pass tensor.resolve_neg().",
        lambda: kernelseam.matmul2d(a, negative),
    )
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(a, torch.ones_like(a))
        with pytest.raises(
            InvalidValue, match=r"^a\.tangent = given: forward-mode derivatives do not flow"
        ):
            kernelseam.matmul2d(dual, b)
    refused(
        "alpha = True: must be a real number. Pass a float.",
        lambda: kernelseam.matmul2d(a, b, alpha=True),
    )
    refused(
        f"out = {hex(a.data_ptr())}: overlaps a. Give the output memory of its own.",
        lambda: kernelseam.matmul2d(a, b, out=a),
    )
    with pytest.raises(InvalidValue, match=r"^stream = 'x': must be an int, an object with"):
        kernelseam.matmul2d(a, b, stream="x")
    with pytest.raises(InvalidValue, match=r"^stream = -1: must be an int"):
        kernelseam.matmul2d(a, b, stream=-1)
    with pytest.raises(
        InvalidValue, match=r"^b = .*Tensor.*: must be an array of a library and on a device known"
    ):
        kernelseam.matmul2d(a, b.to("meta"))
    with pytest.raises(
        InvalidValue, match=r"^b\.layout = torch\.sparse_coo: must be torch\.strided"
    ):
        kernelseam.matmul2d(a, b.to_sparse())
    with pytest.raises(UnknownName, match=r"^implementation = x: must be one of card-gemm"):
        kernelseam.matmul2d(a, b, implementation="x")
    with pytest.raises(UnknownName, match=r"^out_dtype = "):
        kernelseam.matmul2d(a, b, out_dtype=["float32"])


def test_the_requested_backend_counts_at_every_call(
    card: CardRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    for _ in range(2):
        kernelseam.matmul2d(a, b)
        kernelseam.matmul2d(a, b, backend="card")
    card.described = 0
    with kernelseam.use_backend("numpy"):
        # the host's runtime is asked first, and knows a CPU tensor
        close(kernelseam.matmul2d(a, b), a @ b)
    assert card.described == 0
    monkeypatch.setenv("KERNELSEAM_BACKEND", "numpy")
    with kernelseam.trace() as launches:
        kernelseam.matmul2d(a, b)
        kernelseam.matmul2d(a, b, backend="card")
    assert [x.arch for x in launches] == ["cpu", "acme1"]
    monkeypatch.setenv("KERNELSEAM_BACKEND", "nobody")
    with pytest.raises(UnknownName, match="^backend = nobody"):
        kernelseam.matmul2d(a, b)
    monkeypatch.delenv("KERNELSEAM_BACKEND")
    card.described = 0
    kernelseam.matmul2d(a, b)
    assert card.described == 0


def test_launches_are_traced_and_version_counters_incremented(card: CardRuntime) -> None:
    a, b, out = torch.randn(4, 4), torch.randn(4, 4), torch.empty(4, 4)
    counts = []
    for _ in range(4):
        with kernelseam.trace() as launches:
            assert kernelseam.matmul2d(a, b, out=out) is out
        counts.append((len(launches), out._version, a._version))
    assert counts == [(1, n, 0) for n in (1, 2, 3, 4)]
    kernelseam.matmul2d(a, b, out=out)  # untraced: without a list of records
    assert out._version == 5


def test_the_device_is_made_current_where_it_is_not(card: CardRuntime) -> None:
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    for _ in range(2):
        kernelseam.matmul2d(a, b, out=(out := torch.empty(4, 4)))
    kernelseam.matmul2d(a, b, out=out)
    card.entered = 0
    kernelseam.matmul2d(a, b, out=out)
    entered = card.entered
    card.current = 1
    kernelseam.matmul2d(a, b, out=out)
    assert (entered, card.entered, card.current) == (card.entered - 1, entered + 1, 1)


def test_another_stream_is_awaited_before_its_workspace_goes_back(
    card: CardRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    monkeypatch.setattr(_Step, "bind", lambda *_: seen.append)
    a, b, out = torch.randn(4, 4), torch.randn(4, 4), torch.empty(4, 4)
    for _ in range(3):
        for stream, awaited in (
            (None, 0),
            (card.stream, 0),
            (3, 1),
            (SimpleNamespace(__cuda_stream__=(0, 4)), 1),
        ):
            card.waits = 0
            kernelseam.matmul2d(a, b, out=out, stream=stream)
            assert card.waits == awaited
    assert seen == [7, 7, 3, 4] * 3


def test_no_array_is_kept_and_what_is_kept_is_bounded(
    card: CardRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        a, b = torch.randn(4, 4), torch.randn(4, 4)
        out = kernelseam.matmul2d(a, b)
        into = kernelseam.matmul2d(a, b, out=torch.empty(4, 4))
        there = [weakref.ref(x) for x in (a, b, out, into)]
        del a, b, out, into
        card.asked = None  # the vendor notes which array it was last asked about
        gc.collect()
        assert [ref() for ref in there] == [None] * 4
    monkeypatch.setattr(array_call, "MAX_ENTRIES", 3)
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    outs = [torch.empty(4, 4) for _ in range(9)]
    for i, out in enumerate(outs):
        for _ in range(2):
            close(kernelseam.matmul2d(a, b, out=out, alpha=i), i * (a @ b))
    cache = memory()
    caches: list[Any] = [cache.callers, cache.bound, cache.plans]
    caches += [x for c in cache.callers.values() for x in (c._layouts, c.recent, c._seen)]
    assert max(map(len, caches)) == 3


def test_out_of_memory_is_reported_by_the_runtime(
    card: CardRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    for _ in range(2):
        kernelseam.matmul2d(a, b)

    def full(*arguments: Any, **more: Any) -> Any:
        raise OutOfDeviceMemory("card:0 has 12 bytes left")

    (repeat,) = repeats()
    with (
        monkeypatch.context() as patch,
        pytest.raises(OutOfDeviceMemory, match="^card:0 has 12 bytes left$"),
    ):
        patch.setattr(repeat, "_shapes", [("out", full)])
        patch.setattr(card, "empty", full)
        kernelseam.matmul2d(a, b)
    close(kernelseam.matmul2d(a, b), a @ b)


def test_results_of_other_layouts_take_the_slow_path(card: CardRuntime) -> None:
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    kernelseam.matmul2d(a, b)
    (repeat,) = repeats()
    repeat._shapes = (("out", lambda: torch.empty(17)[1:].view(4, 4)), *repeat._shapes[1:])
    card.described = 0
    close(kernelseam.matmul2d(a, b), a @ b)
    assert card.described > 0


def test_gradients_of_both_factors_that_repeat(card: CardRuntime) -> None:
    """Two launches, one workspace, results by name."""
    a, b, dc = torch.randn(2, 3, 4), torch.randn(2, 4, 5), torch.randn(2, 3, 5)
    for _ in range(3):
        actual = kernelseam.bmm_bwd(dc, a, b)
        close(actual.da, dc @ b.mT)
        close(actual.db, a.mT @ dc)
        assert kernelseam.bmm_bwd(dc, a, b, a_gradient=False).da is None
    card.described = 0
    actual = kernelseam.bmm_bwd(dc, a, b)
    assert card.described == 0
    into = {"da": torch.empty(2, 3, 4), "db": torch.empty(2, 4, 5)}
    for n in range(1, 4):
        kernelseam.bmm_bwd(dc, a, b, **into)
        assert [x._version for x in (dc, a, b, *into.values())] == [0, 0, 0, n, n]
    square = torch.randn(2, 4, 4)
    kernelseam.bmm_bwd(square, square, square, da=torch.empty(2, 4, 4))
    other = torch.randn(2, 4, 4)
    with pytest.raises(
        InvalidValue, match=r"^da = 0x[0-9a-f]+: overlaps a, which is still to be read"
    ):
        kernelseam.bmm_bwd(square, other, square, da=other)


def test_eight_threads_by_one_repeat(card: CardRuntime) -> None:
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    expected = a @ b
    kernelseam.matmul2d(a, b)
    barrier = threading.Barrier(8)

    def work(_: int) -> None:
        barrier.wait(30)
        for _ in range(200):
            close(kernelseam.matmul2d(a, b), expected)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


def test_plugins_that_are_discovered_again_are_asked_again(
    card: CardRuntime, discovered: Callable[..., Any]
) -> None:
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    for _ in range(2):
        kernelseam.matmul2d(a, b)
    discovered()
    with kernelseam.trace() as launches:
        close(kernelseam.matmul2d(a, b), a @ b)
    assert [x.arch for x in launches] == ["cpu"]


def test_what_is_forgotten_is_planned_anew(
    card: CardRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = torch.randn(2, 8, 8)
    for _ in range(3):
        kernelseam.bmm(a, a)
    requested = list[object]()
    select = planner.select
    monkeypatch.setattr(
        planner, "select", lambda *x, **y: (requested.append(x), select(*x, **y))[1]
    )
    kernelseam.bmm(a, a)
    assert not requested
    planning.forget()
    kernelseam.bmm(a, a)
    assert len(requested) == 1


# ---------------------------------------------------------------- found by addresses


def test_memory_that_was_seen_is_not_read_again(
    card: CardRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, out = torch.randn(2, 3, 4), torch.randn(2, 4, 5), torch.empty(2, 3, 5)
    for _ in range(2):
        kernelseam.bmm(a, b)
        kernelseam.bmm(a, b, out=out)
    monkeypatch.setattr(torch_arrays, "layouts", lambda *_: pytest.fail("layouts were read"))
    for _ in range(3):
        # new tensors over the same memory
        close(kernelseam.bmm(a.view(2, 3, 4), b.view(2, 4, 5)), a @ b)
        close(kernelseam.bmm(a, b, out=out.zero_()), a @ b)


def test_one_address_with_many_layouts(card: CardRuntime) -> None:
    """In turns, so that each is found where another was."""
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    views = (a, a.mT, a[:2], a[:, :4], a[::2], a.view(1, 4, 4)[0], a[:1].expand(4, 4))
    for _ in range(4):
        for view in views:
            close(kernelseam.matmul2d(view, b), view @ b)
            close(kernelseam.matmul2d(b, view.mT), b @ view.mT)
        c, d = a.view(torch.float16), a.view(torch.bfloat16)
        for x in (c, d):
            x.copy_(torch.randn(4, 8))
            torch.testing.assert_close(kernelseam.matmul2d(x.mT, x), x.mT @ x)
        a.copy_(torch.randn(4, 4))


def test_one_tensor_as_several_operands(card: CardRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = torch.randn(2, 4, 4), torch.randn(2, 4, 4)
    same = a.view(2, 4, 4)  # another tensor over a's memory
    ways = ((a, a), (a, b), (b, b), (a, same), (a, a.mT), (same, same))

    def check() -> None:
        for x, y in ways:
            close(kernelseam.bmm(x, y), x @ y)

    for _ in range(3):
        check()
    card.described = 0
    check()
    assert card.described == 0
    monkeypatch.setattr(torch_arrays, "layouts", lambda *_: pytest.fail("layouts were read"))
    for _ in range(2):
        kernelseam.bmm(b, b)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # by torch, of torch
@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning")  # the same, of torch 2.14
def test_gradients_are_not_lost_where_memory_was_seen(card: CardRuntime) -> None:
    weight, b = torch.nn.Parameter(torch.randn(4, 4)), torch.randn(4, 4)
    for _ in range(3):
        with torch.no_grad():
            for _ in range(3):
                close(kernelseam.matmul2d(weight, b), weight @ b)
                close(kernelseam.matmul2d(weight, weight), weight @ weight)
        for operands in ((weight, b), (weight, weight)):
            with pytest.raises(InvalidValue, match=r"^a\.requires_grad = True: gradients do not"):
                kernelseam.matmul2d(*operands)
    a = torch.randn(4, 4)
    for _ in range(3):
        kernelseam.matmul2d(a, b)
    with pytest.raises(InvalidValue, match=r"^a\.requires_grad = True"):
        kernelseam.matmul2d(a.requires_grad_(), b)
    close(kernelseam.matmul2d(a.requires_grad_(False), b), a @ b)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(a, torch.ones_like(a))
        with pytest.raises(InvalidValue, match=r"^a\.tangent = given"):
            kernelseam.matmul2d(dual, b)
    with pytest.raises(InvalidValue, match=r"^a\.is_neg = True"):
        kernelseam.matmul2d(torch._neg_view(a), b)


def test_torchs_modes_take_turns(card: CardRuntime) -> None:
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    modes = (
        *(torch.no_grad, torch.enable_grad, torch.inference_mode),
        lambda: torch.autocast("cpu", torch.bfloat16),
    )
    for _ in range(4):
        for mode in modes:
            with mode():
                close(kernelseam.matmul2d(a, b), (a.double() @ b.double()).float())
    (repeat,) = repeats()
    assert 1 < len(repeat.guards) <= 4


def test_strides_that_do_not_matter_do_not_pile_up(card: CardRuntime) -> None:
    """Along an axis of extent 1: one repeat, with a guard for each of the latest."""
    row, b = torch.randn(4), torch.randn(4, 4)
    for _ in range(2):
        for stride in range(4, 12):
            a = row.as_strided((1, 4), (stride, 1))
            close(kernelseam.matmul2d(a, b), a @ b)
    (repeat,) = repeats()
    assert len(repeat.guards) == 4


def test_fake_tensors_are_not_asked_for_addresses(
    card: CardRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch warns of it."""
    from torch._subclasses import FakeTensor, FakeTensorMode

    a, b = torch.randn(4, 4), torch.randn(4, 4)
    for _ in range(3):
        kernelseam.matmul2d(a, b)
    monkeypatch.setattr(
        FakeTensor, "data_ptr", lambda _: pytest.fail("an address was asked for"), raising=False
    )
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) for x in (a, b)]
        assert kernelseam.matmul2d(*fake).shape == (4, 4)


def test_functionalized_tensors_are_planned(card: CardRuntime) -> None:
    """They have the layout of what they stand for, and null for an address."""
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    for _ in range(3):
        kernelseam.matmul2d(a, b)
    close(torch.func.functionalize(kernelseam.matmul2d)(a, b), a @ b)


@pytest.mark.parametrize(
    ("wanted", "equal"),
    [
        ({"a_transposed": True}, {"a_transposed": 1}),
        ({}, {"a_transposed": 0}),
        ({}, {"b_transposed": 0.0}),
        ({"alpha": 1.0}, {"alpha": True}),
        ({"beta": 0.0}, {"beta": False}),
    ],
)
def test_equal_options_of_other_types_are_refused_as_at_first(
    wanted: dict[str, Any], equal: dict[str, Any], card: CardRuntime
) -> None:
    a = torch.randn(2, 4, 4)
    (name,) = equal
    for function, operand in ((kernelseam.bmm, a), (kernelseam.matmul2d, a[0])):
        with pytest.raises(InvalidValue, match=f"^{name} = ") as first:
            function(operand, operand, **equal)
        for _ in range(3):
            function(operand, operand, **wanted)
        with pytest.raises(InvalidValue) as later:
            function(operand, operand, **equal)
        assert str(later.value) == str(first.value)


def test_without_the_guards_of_torchs_compiler(
    card: CardRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guards, "_guards", lambda: None)
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    kernelseam.matmul2d(a, b)
    card.described = 0
    for _ in range(3):
        close(kernelseam.matmul2d(a, b), a @ b)
    assert card.described == 0


def test_tensors_are_cleared_whatever_their_number() -> None:
    for count in range(4):
        given = [torch.ones(3, n) for n in range(count)]
        torch_arrays.clear(given)
        assert not any(x.any() for x in given)


def test_guards_of_tensors_that_repeat_are_of_bounded_number() -> None:
    x, other = torch.zeros(2), torch.zeros(2)
    for n in range(2, 100):
        holds = guards.tensor_guard([x] * n)
        assert holds(*[other] * n) and not holds(*[other] * (n - 1), x)
    assert guards._asked.cache_info().currsize <= 64


def test_guards_that_hold_for_everything_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    find = guards._guards.__wrapped__
    theirs = torch._C._dynamo.guards
    assert find() is theirs.TensorGuards

    class Lax:
        def __init__(self, *tensors: Any, **more: Any) -> None: ...

        def check(self, *tensors: Any) -> bool:
            return True

    class Elsewhere:
        """Asked in a thread that has none of torch's modes."""

        def __init__(self, *tensors: Any, **more: Any) -> None:
            self._check = actual(*tensors, **more).check

        def check(self, *tensors: Any) -> bool:
            with ThreadPoolExecutor(1) as pool:
                return pool.submit(self._check, *tensors).result()

    actual = theirs.TensorGuards
    for guard in (Lax, Elsewhere):
        monkeypatch.setattr(theirs, "TensorGuards", guard)
        assert find() is None
    monkeypatch.delattr(theirs, "TensorGuards")
    assert find() is None


# ---------------------------------------------------------------- calls of plans


def planned(a: Any, b: Any, c: Any, **more: Any) -> Any:
    gemm = kernelseam.BatchedGemmStrided(A=a, B=b, C=c, M=4, N=4, K=4)
    return kernelseam.plan(gemm).bind(**more)


def test_a_call_counts_its_writes(card: CardRuntime) -> None:
    a, b, c = torch.randn(4, 4), torch.randn(4, 4), torch.empty(4, 4)
    call = planned(a, b, c)
    for n in (1, 2, 3):
        card.current = n % 2  # without making the device current, and with it
        call()
        close(c, a @ b)
        assert (a._version, b._version, c._version) == (0, 0, n)
    call.launcher()(0)
    assert c._version == 4


def test_a_checked_call_checks_though_its_device_is_current(
    card: CardRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Step, "bind", lambda *_: lambda stream: None)
    a, b, c = torch.randn(4, 4), torch.randn(4, 4), torch.zeros(4, 4)
    call = planned(a, b, c, check=True)
    with pytest.raises(WrongResult):
        call()
    c.copy_(a @ b)
    call()
