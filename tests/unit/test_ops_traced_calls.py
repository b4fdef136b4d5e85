"""Calls of a known spec on tensors of new extents: nothing is described, asked or chosen, and what
is launched is what the planned call launches.

A vendor with a compiler of its own, whose device memory is the host's, so that torch's CPU tensors
are its arrays and its kernel's results are right or wrong.
"""

from __future__ import annotations

import gc
import sys
import threading
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import kernelseam
import pytest
from card import CardRows, CardRuntime, QuickToolchain, add_compiled_card
from kernelseam import dispatch, planning
from kernelseam.contract import Launch, Launches, Memset
from kernelseam.descriptors.common.options import by_name
from kernelseam.descriptors.gemm.options import ProductOptions
from kernelseam.errors import InvalidValue
from kernelseam.kernels import traced_text
from kernelseam.ops import array_call, calling, fast_path, gemm, on_torch, traced_call
from kernelseam.ops.calling import operate
from kernelseam.ops.gemm import gemm_work
from kernelseam.ops.operation import Cleared
from kernelseam.plugins import plugins
from kernelseam.tuned.classes import representative
from kernelseam.tuned.numbers import numbers, with_numbers

torch = pytest.importorskip("torch", reason="torch is not installed")
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402


@pytest.fixture
def card(discovered: Callable[..., Any], cache: object) -> CardRuntime:
    return add_compiled_card(discovered())


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each call, whether it was served without being planned."""
    seen: list[bool] = []
    planned = calling._run_planned

    def watched(*arguments: Any, **more: Any) -> Any:
        seen.append(True)
        return operate(*arguments, **more)

    def planning_it(*arguments: Any) -> Any:
        seen[-1] = False
        return planned(*arguments)

    monkeypatch.setattr(gemm, "operate", watched)
    monkeypatch.setattr(calling, "_run_planned", planning_it)
    return seen


def product(m: int, n: int = 5, k: int = 8, **options: Any) -> None:
    a, b = torch.randn(m, k), torch.randn(k, n)
    actual = kernelseam.matmul2d(a, b, **options)
    expected = options.get("alpha", 1) * (a @ b)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def known(card: CardRuntime, **options: Any) -> None:
    """Two layouts teach a spec, tiles of both kinds among them."""
    for m in (6, 7, 2, 3):
        product(m, **options)


def test_new_extents_are_neither_described_nor_chosen(
    card: CardRuntime, served: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    known(card)
    product(40, 24, 16)
    card.described = 0
    monkeypatch.setattr(calling, "describe", lambda *_: pytest.fail("it was described"))
    served.clear()
    for m in (8, 9, 33, 200, 5, 6):
        product(m)
    assert served == [True] * 6 and card.described == 0


def test_scalars_are_arguments_too(card: CardRuntime, served: list[bool]) -> None:
    known(card, alpha=2.0)
    served.clear()
    for alpha in (3.0, -0.5, float("inf"), 1e30):
        a, b = torch.rand(9, 8), torch.rand(8, 5)
        torch.testing.assert_close(
            kernelseam.matmul2d(a, b, alpha=alpha), alpha * (a @ b), rtol=1e-5, atol=0
        )
    assert served == [True] * 4
    # another type of number is another signature, and what float32 cannot hold is rounded
    product(9, alpha=3)
    a, b = torch.rand(9, 8), torch.rand(8, 5)
    assert kernelseam.matmul2d(a, b, alpha=1e300).isinf().all()


@pytest.mark.parametrize("m", [1, 0])
def test_what_no_trace_serves_is_planned(card: CardRuntime, served: list[bool], m: int) -> None:
    known(card)
    served.clear()
    for _ in range(2):
        assert kernelseam.matmul2d(torch.randn(m, 8), torch.randn(8, 5)).shape == (m, 5)
    assert served[0] is False


def test_errors_are_those_of_the_planned_call(card: CardRuntime) -> None:
    known(card)
    with pytest.raises(InvalidValue, match=r"^b = .*must have K = 8 rows, as a of shape \[9, 8\]"):
        kernelseam.matmul2d(torch.randn(9, 8), torch.randn(7, 5))
    x = torch.randn(9, 9)
    for _ in range(3):
        kernelseam.matmul2d(torch.randn(9, 9), x, out=torch.empty(9, 9))
        kernelseam.matmul2d(torch.randn(6, 6), torch.randn(6, 6), out=torch.empty(6, 6))
    with pytest.raises(InvalidValue, match=r"^out = 0x[0-9a-f]+: overlaps b"):
        kernelseam.matmul2d(torch.randn(9, 9), x, out=x)


def test_arrays_of_the_callers_are_written_and_counted(
    card: CardRuntime, served: list[bool]
) -> None:
    for m in (6, 7, 8, 9, 10):
        a, b, out = torch.randn(m, 8), torch.randn(8, 5), torch.empty(m, 5)
        assert kernelseam.matmul2d(a, b, out=out) is out and out._version == 1
        torch.testing.assert_close(out, a @ b, rtol=1e-5, atol=1e-5)
    assert served[-1] is True


def test_tensors_at_any_address_and_with_any_strides(card: CardRuntime, served: list[bool]) -> None:
    base = torch.randn(4000)
    for start in (0, 1, 4, 3, 2, 8, 1, 5):
        for m, row in ((6, 8), (7, 8), (9, 12), (1, 8), (5, 9), (9, 9)):
            a, b = base[start : start + m * row].view(m, row)[:, :8], torch.randn(8, 5)
            torch.testing.assert_close(kernelseam.matmul2d(a, b), a @ b, rtol=1e-5, atol=1e-5)
    assert sum(served) > len(served) // 2


def test_known_numbers_at_another_alignment_are_learnt_apart(
    card: CardRuntime, served: list[bool]
) -> None:
    """What serves the same extents at one address does not at another."""
    base, b = torch.randn(400), torch.randn(8, 5)
    for _ in range(4):
        for start in (0, 1):
            for m in (9, 10):
                a = base[start : start + 8 * m].view(m, 8)
                torch.testing.assert_close(kernelseam.matmul2d(a, b), a @ b, rtol=1e-5, atol=1e-5)
    served.clear()
    for start in (0, 1, 4, 5):
        a = base[start : start + 88].view(11, 8)
        torch.testing.assert_close(kernelseam.matmul2d(a, b), a @ b, rtol=1e-5, atol=1e-5)
    assert served == [True] * 4


@pytest.mark.parametrize("end", [1 << 62, 0, None])
def test_of_known_numbers_addresses_alone_are_packed(
    discovered: Callable[..., Any], cache: object, monkeypatch: pytest.MonkeyPatch, end: int | None
) -> None:
    """The third time; not where addresses lie beyond those that a tensor map begins with (0), or
    it begins with none (None)."""
    toolchain = QuickToolchain(end)
    known(add_compiled_card(discovered(), toolchain))
    runs: list[int] = []
    packed = traced_call.Function

    def watched(run: Any, *arguments: Any, **more: Any) -> Any:
        return packed(lambda *given: (runs.append(0), run(*given))[1], *arguments, **more)

    monkeypatch.setattr(traced_call, "Function", watched)
    planning.forget()
    known(card)
    kept, counts = list[Any](), list[tuple[int, int]]()
    for m in (40, 41, 40, 41, 41, 41):
        toolchain.encoded.clear()
        runs.clear()
        a, b = torch.randn(m, 8), torch.randn(8, 5)
        kept += [a, b, actual := kernelseam.matmul2d(a, b)]  # what is freed comes back
        torch.testing.assert_close(actual, a @ b, rtol=1e-5, atol=1e-5)
        counts.append((len(runs), len(toolchain.encoded)))
    assert counts == [(1, 1)] * 2 + [(0, 0) if end else (1, 1)] * 4
    if end:
        assert toolchain.tails == 2


def test_one_tensor_as_both_operands_and_torchs_modes(
    card: CardRuntime, served: list[bool]
) -> None:
    weight = torch.nn.Parameter(torch.randn(9, 9))
    for n in (5, 6, 7, 5):
        x = torch.randn(n, n)
        torch.testing.assert_close(kernelseam.matmul2d(x, x), x @ x, rtol=1e-5, atol=1e-5)
        w = weight[:n, :n]
        with torch.no_grad():
            actual = kernelseam.matmul2d(w, x)
            torch.testing.assert_close(actual, w @ x, rtol=1e-5, atol=1e-5)
        with pytest.raises(InvalidValue, match=r"^a\.requires_grad = True"):
            kernelseam.matmul2d(w, x)
        with pytest.raises(InvalidValue, match=r"^a\.is_neg = True"):
            kernelseam.matmul2d(torch._neg_view(x), x)
    assert served[-4:] == [True, True, False, False]


def test_what_is_forgotten_is_planned_anew(card: CardRuntime, served: list[bool]) -> None:
    known(card)
    product(11)
    assert served[-1] is True
    planning.forget()
    served.clear()
    product(12)
    product(13)
    assert served == [False, False]


def test_a_trace_records_what_is_launched(card: CardRuntime) -> None:
    known(card)
    for m in (12, 13):
        with kernelseam.trace() as launches:
            product(m)
        assert [(x.kernel, x.grid[0]) for x in launches] == [
            ("memset", 1),
            ("memset", 1),
            ("rows", -(-m // 4)),
        ] or [x.kernel for x in launches][-1] == "rows"


def test_memory_of_0_is_set_once_on_a_stream_and_never_shared_with_graphs(
    card: CardRuntime, served: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that leaves its counter 0: only what may run beside others has its own."""
    capturing, sets = False, list[int]()
    prepare = card.prepare_memset

    def watched(pointer: int, value: int, size: int, device: Any) -> Callable[[int], None]:
        launch = prepare(pointer, value, size, device)
        return lambda stream: (sets.append(size), launch(stream))[1]

    def launches(self: Any, problem: Any, tile: Any, device: Any) -> Launches:
        steps = Launch(self, problem, tile, {"counter": 0}), Memset(0, 4)
        return Launches(steps, 256, zeroed_bytes=256)

    monkeypatch.setattr(CardRows, "launches", launches)
    monkeypatch.setattr(card, "is_capturing", lambda *_: capturing, raising=False)
    monkeypatch.setattr(card, "prepare_memset", watched)
    known(card)

    def sets_of(rows: int, **options: Any) -> list[int]:
        sets.clear()
        served.clear()
        product(rows, **options)
        assert served == [True]
        return list(sets)

    own, shared, all_of_it = [256, 4], [4], [1 << 18, 4]
    card.stream = 9
    assert [sets_of(m) for m in (70, 71, 72)] == [all_of_it, shared, shared]
    capturing = True
    assert [sets_of(m) for m in (73, 74)] == [own, own]
    card.stream, capturing = 0, False
    assert [sets_of(m) for m in (75, 76)] == [all_of_it, shared]
    for handle in (1, 2):  # a stream of each thread
        card.stream = handle
        assert sets_of(77) == own
    assert sets_of(78, stream=9) == own

    card.stream = 10
    monkeypatch.setattr(on_torch.torch_arrays, "lies_in_default_pool", lambda memory: False)
    assert [sets_of(m) for m in (80, 81)] == [own, own]  # torch's memory is a graph's

    a, b = torch.randn(90, 8), torch.randn(8, 5)
    card.stream = 9
    for capturing in (False,) * 5 + (True, False):
        sets.clear()
        found = kernelseam.matmul2d(a, b)
        torch.testing.assert_close(found, a @ b, rtol=1e-5, atol=1e-5)
        assert sets == (own if capturing else shared)


@pytest.mark.parametrize("implementation", [None, "card-gemm"])
def test_results_are_cleared_before_launches_whatever_serves_a_call(
    card: CardRuntime,
    served: list[bool],
    monkeypatch: pytest.MonkeyPatch,
    implementation: str | None,
) -> None:
    """Planned, of new and of known numbers, and repeated; an array of the caller's is not."""
    monkeypatch.setattr(gemm, "gemm_work", Cleared(gemm.gemm_work, ("out",)))
    cleared: list[int] = []

    def zero(x: Any) -> Any:
        cleared.append(x.data_ptr())
        return x.fill_(0)

    monkeypatch.setattr(torch.Tensor, "zero_", zero)
    a, b, out = torch.randn(9, 8), torch.randn(8, 5), torch.empty(9, 5)
    for m in (6, 7, 2, 3, 8, 9, 9, 9, 9, 9):
        made = kernelseam.matmul2d(a[:m], b, implementation=implementation)
        torch.testing.assert_close(made, a[:m] @ b, rtol=1e-5, atol=1e-5)
        assert cleared.pop() == made.data_ptr() and not cleared
    assert not served[0] and served[-1]
    kernelseam.matmul2d(a, b, out=out, implementation=implementation)
    assert not cleared


def test_a_named_implementation_of_another_kind_is_planned(
    card: CardRuntime, served: list[bool]
) -> None:
    """It answers by problem, as plugins may."""
    for m in (6, 7, 8, 9):
        product(m, implementation="card-gemm")
    assert not any(served)
    product(9, implementation="card-gemm")
    assert served[-1] is True, "layouts that were planned are known"


def test_the_class_decides_not_the_first_problem(
    card: CardRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    select = dispatch.select

    def watched(problem: Any, *more: Any) -> Any:
        asked.append(problem)
        return select(problem, *more)

    monkeypatch.setattr(traced_text, "select", watched)
    for m in (100, 101, 102, 65, 128, 129):
        product(m)
    problem: Any
    for problem in asked:
        assert problem == representative(problem)
    assert [p.M for p in asked] == [128, 192]


def test_the_fast_path_is_for_what_is_like_the_latest_call(
    card: CardRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gives what the usual way gives, and for all else None, with nothing launched."""
    names = ("alpha", "a_transposed")
    defaults = {**by_name(ProductOptions()), "beta": 0}
    others = set[int]()
    path = fast_path.FastPath(gemm_work, ("a", "b"), names, defaults, lambda a, b: len(a) in others)

    def again(a: Any, b: Any, alpha: Any = 2.0, a_transposed: Any = False) -> Any:
        return fast_path.again(path, (a, b), (alpha, a_transposed))

    def usual(m: int) -> None:
        product(m, alpha=2.0)
        fast_path.learn(path, (2.0, False))

    a, b = torch.randn(9, 8), torch.randn(8, 5)
    assert again(a, b) is None
    for m in (6, 7, 2, 3, 9):
        usual(m)
        assert again(a, b) is None
    usual(9)
    card.described = 0
    for _ in range(3):
        x, y = torch.randn(9, 8), torch.randn(8, 5)
        torch.testing.assert_close(again(x, y)[0], 2 * x @ y, rtol=1e-5, atol=1e-5)
        assert len(again(x, y)) == 1
    assert card.described == 0
    unlike = [
        lambda: again(a.clone().requires_grad_(), b),
        lambda: again(torch.randn(10, 8), b),
        lambda: again(torch.randn(8, 9).mT, b),
        lambda: again(torch._neg_view(a), b),
        lambda: again(a.half(), b.half()),
        lambda: again(a.numpy(), b),
        lambda: again(a, b, alpha=3.0),
        lambda: again(a, b, alpha=2),
        lambda: again(a, b, a_transposed=0),
        lambda: again(a, b, alpha=[2.0]),
        lambda: again(a, b, alpha=None),
    ]
    assert [x() for x in unlike] == [None] * len(unlike)
    base = torch.randn(80)
    assert again(base[1:73].view(9, 8), b) is None, "another alignment is another function's"
    others |= {11, 12}  # other numbers, where the path takes them
    assert again(torch.randn(10, 8), b) is None
    assert again(torch.randn(11, 8).half(), b.half()) is None
    assert again(torch.randn(11, 8).requires_grad_(), b) is None
    for m in (11, 12, 11, 11):
        x = torch.randn(m, 8)
        torch.testing.assert_close(again(x, b)[0], 2 * x @ b, rtol=1e-5, atol=1e-5)
    assert again(torch.randn(8, 12).mT, b) is None, "other strides are planned first"
    others.clear()
    usual(9)
    usual(9)
    with kernelseam.trace(), torch.inference_mode():
        assert again(a, b) is None
    with kernelseam.use_backend("card"):
        assert again(a, b) is None
    with torch.autograd.forward_ad.dual_level():
        assert again(a, b) is None
    with TorchDispatchMode():
        assert again(a, b) is None
    with torch.autocast("cpu"):  # callers cast, whatever calls on arrays came under it
        for m in (11, 12, 13, 14, 9, 9, 9):
            kernelseam.matmul2d(torch.randn(m, 8), b, alpha=2.0)
        assert again(a, b) is None
    with monkeypatch.context() as patch:
        patch.setenv("KERNELSEAM_BACKEND", "numpy")
        assert again(a, b) is None
        patch.delenv("KERNELSEAM_BACKEND")
        patch.setattr(card, "current", 1)
        assert again(a, b) is None
    assert again(a, b) is not None
    planning.forget()
    assert again(a, b) is None


def test_threads(card: CardRuntime) -> None:
    known(card)
    barrier = threading.Barrier(8)

    def work(seed: int) -> None:
        barrier.wait(30)
        for i in range(60):
            product(5 + (seed * 7 + i) % 90)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


def test_memory_of_many_problems_is_bounded(
    card: CardRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two numbers, with caches of few entries."""
    monkeypatch.setattr(array_call, "MAX_ENTRIES", 64)
    known(card)
    a, b = torch.randn(128, 2), torch.randn(2, 2)

    def many(first: int, last: int) -> None:
        for i in range(first, last):
            kernelseam.matmul2d(a[: 70 + i % 58], b, alpha=i + 0.5)

    many(0, 200)
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        many(200, 1000)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 1 << 18
    (cache,) = (x for x in plugins().caches.values() if isinstance(x, calling.CallCache))
    for caller in cache.callers.values():
        assert len(caller._seen) <= 64 and len(caller.recent) <= 64


def test_new_extents_pass_few_frames(card: CardRuntime) -> None:
    """The count of Python's calls, which does not depend on the machine."""
    known(card)
    a, b = torch.randn(128, 8), torch.randn(8, 5)
    x = [a[:m] for m in range(100, 120)]
    for y in x[:-1]:
        kernelseam.matmul2d(y, b)
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        kernelseam.matmul2d(x[-1], b)
    finally:
        sys.setprofile(None)
    assert calls < 70


def test_numbers_of_a_problem_come_back(card: CardRuntime) -> None:
    problem = kernelseam.BatchedGemmStrided(M=9, N=5, K=8, dtype="float32").problem()
    values = list(numbers(problem))
    assert with_numbers(problem, values) == problem
    other = with_numbers(problem, [x * 2 for x in values])
    assert (other.M, other.N, other.K, other.spec) == (18, 10, 16, problem.spec)
