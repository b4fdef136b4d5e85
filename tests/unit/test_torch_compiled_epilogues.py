"""Products with an epilogue where torch compiles, exports or transforms the call: one operator."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import kernelseam as ks
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is missing: it is what compiles")
import torch.nn.functional as F  # noqa: E402
from kernelseam import epilogues  # noqa: E402
from kernelseam.errors import InvalidValue  # noqa: E402
from kernelseam.interop import torch as ks_torch  # noqa: E402
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402
from torch_operators import in_mode, on_fakes  # noqa: E402

M, N, K = 5, 8, 7


def drawn(*shape: int, gradients: bool = False) -> Any:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, requires_grad=gradients)


def compiled(function: Callable[..., Any]) -> tuple[Callable[..., Any], Any]:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(function, backend=counter, fullgraph=True), counter


def with_breaks(function: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, backend="aot_eager")  # type: ignore[no-any-return]


def scaled(x: Any, acc: Any, m: Any, n: Any, batch: Any) -> Any:
    return torch.tanh(acc) * x[m]


def columns_of(x: Any) -> Callable[..., Any]:
    return lambda acc, m, n, batch: acc * x[n] + m


def gate(gate: Any, up: Any, m: Any, n: Any, batch: Any) -> Any:
    return torch.sin(gate) * up


INSIDE: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    "a name": (lambda x: "gelu", lambda y, x: F.gelu(y)),
    "a list": (
        lambda x: ["silu", epilogues.row_factor(x), epilogues.clamp(-0.5, 2.0)],
        lambda y, x: (F.silu(y) * x[:, None]).clamp(-0.5, 2),
    ),
    "a partial": (
        lambda x: functools.partial(scaled, x),
        lambda y, x: torch.tanh(y) * x[:, None],
    ),
    "a lambda": (
        lambda x: lambda acc, m, n, batch: acc * (n + 1),
        lambda y, x: y * torch.arange(1, N + 1),
    ),
    "a gate": (
        lambda x: [epilogues.gated(gate), epilogues.row_bias(x)],
        lambda y, x: torch.sin(y[..., : N // 2]) * y[..., N // 2 :] + x[:, None],
    ),
}


@pytest.mark.parametrize("what", INSIDE)
@pytest.mark.parametrize("batched", [False, True])
def test_made_in_what_is_compiled(what: str, batched: bool) -> None:
    """With gradients to all that the product itself takes."""
    made, formula = INSIDE[what]
    lead = (3,) if batched else ()

    def loss(multiply: Any, a: Any, b: Any, bias: Any, x: Any) -> Any:
        return multiply(a, b, bias=bias, epilogue=made(x))

    multiply = ks_torch.bmm if batched else ks_torch.matmul2d
    a, b, bias = (drawn(*s, gradients=True) for s in ((*lead, M, K), (*lead, K, N), (N,)))
    x = drawn(M)
    run, counter = compiled(functools.partial(loss, multiply))
    got, want = run(a, b, bias, x), formula(a @ b + bias, x)
    torch.testing.assert_close(got, want)
    arriving = drawn(*want.shape)
    for found, right in zip(
        torch.autograd.grad(got, (a, b, bias), arriving),
        torch.autograd.grad(want, (a, b, bias), arriving),
        strict=True,
    ):
        torch.testing.assert_close(found, right)
    run(a, b, bias, x + 1)
    assert counter.frame_count == 1


@pytest.mark.parametrize("matmul2d", [ks.matmul2d, ks_torch.matmul2d])
def test_other_functions_of_known_code_run_what_was_compiled(matmul2d: Any) -> None:
    """Made outside, over other tensors; another one's code compiles anew."""

    def multiply(a: Any, b: Any, epilogue: Any) -> Any:
        return matmul2d(a, b, epilogue=epilogue)

    run, counter = compiled(multiply)
    a, b = drawn(M, K), drawn(K, N)
    for step in range(3):
        x = drawn(N) + step
        torch.testing.assert_close(run(a, b, columns_of(x)), (a @ b) * x + torch.arange(M)[:, None])
    assert counter.frame_count == 1
    (graph,) = counter.graphs
    called = [n.target for n in graph.graph.nodes if n.op == "call_function"]
    assert [t for t in called if "kernelseam" in str(t)] == [
        torch.ops.kernelseam.matmul2d_epilogue.default
    ]
    torch.testing.assert_close(run(a, b, "relu"), torch.relu(a @ b))
    assert counter.frame_count == 2


def rounds(times: int, by: float, acc: Any, m: Any, n: Any, batch: Any) -> Any:
    for _ in range(times):
        acc = acc * by
    return acc + by


def test_a_number_that_python_needs() -> None:
    def powers(a: Any, b: Any, by: float, times: int) -> Any:
        return ks_torch.matmul2d(a, b, epilogue=functools.partial(rounds, times, by))

    run, _ = compiled(powers)
    a, b = drawn(M, K), drawn(K, N)
    for times in (3, 2):
        torch.testing.assert_close(run(a, b, 0.5, times), (a @ b) * 0.5**times + 0.5)


def test_other_numbers() -> None:
    """A float that torch makes symbolic where it sees another value."""

    def capped(a: Any, b: Any, cap: Any) -> Any:
        return ks_torch.matmul2d(a, b, epilogue=epilogues.softcap(cap))

    run, _ = compiled(capped)
    a, b = drawn(M, K), drawn(K, N)
    for cap in (2.0, 3.0):
        torch.testing.assert_close(run(a, b, cap), cap * torch.tanh(a @ b / cap))


def test_a_second_result() -> None:
    def multiply(a: Any, b: Any) -> Any:
        sums = torch.empty(M, N)
        out = ks.matmul2d(a, b, epilogue="swiglu", preactivation=sums)
        return out, sums

    run, _ = compiled(multiply)
    a, b = drawn(M, K), drawn(K, N)
    out, sums = run(a, b)
    torch.testing.assert_close(sums, a @ b)
    torch.testing.assert_close(out, F.silu(sums[:, : N // 2]) * sums[:, N // 2 :])


SECOND: dict[str, tuple[Callable[[], Any], str]] = {
    "integers": (lambda: torch.empty(M, N, dtype=torch.int32), "int32: must be .*float32"),
    "narrower": (lambda: torch.empty(M, N, dtype=torch.bfloat16), "must be .*float32 as the"),
    "broadcasting": (lambda: torch.empty(3, M, N), r"must have shape \[5, 8\]"),
    "strided columns": (lambda: torch.empty(M, 2 * N)[:, ::2], "must be contiguous"),
    "expanded": (lambda: torch.empty(N).expand(M, N), "memory of its own|share elements"),
    "the result": (lambda: None, "overlaps preactivation"),
}


@pytest.mark.parametrize("what", SECOND)
def test_a_second_result_is_checked_as_uncompiled(what: str) -> None:
    made, message = SECOND[what]

    def multiply(a: Any, b: Any, sums: Any) -> Any:
        out = torch.empty(M, N)
        sums = out if sums is None else sums
        return ks.matmul2d(a, b, out=out, epilogue="relu", preactivation=sums)

    run, _ = compiled(multiply)
    for function, error in ((multiply, InvalidValue), (run, Exception)):
        with pytest.raises(error, match=message):
            function(drawn(M, K), drawn(K, N), made())
    if what in ("integers", "narrower", "broadcasting"):  # before there is any memory
        with pytest.raises(InvalidValue, match=message):
            on_fakes(multiply, drawn(M, K), drawn(K, N), made())
        with pytest.raises(torch._dynamo.exc.TorchRuntimeError, match=message):
            run(drawn(M, K), drawn(K, N), made())


@pytest.mark.parametrize(
    "backend",
    [
        "eager",
        "aot_eager",
        pytest.param("inductor", marks=pytest.mark.slow("inductor compiles C++")),
    ],
)
def test_results_that_share_memory_are_refused(backend: str) -> None:
    """Also by what was compiled for results apart; rows between those of another one are apart."""

    def multiply(a: Any, b: Any, out: Any, sums: Any) -> Any:
        return ks.matmul2d(a, b, out=out, epilogue="relu", preactivation=sums)

    def within(a: Any, b: Any) -> Any:
        memory = torch.zeros(2 * M, N)
        return multiply(a, b, memory[:M], memory[2 : M + 2])

    def listed(a: Any, b: Any, out: Any) -> Any:
        return ks.grouped_mm_list([a, a], [b, b], out=out)

    torch._dynamo.reset()
    run = functools.partial(torch.compile, fullgraph=True, backend=backend)
    a, b, memory = drawn(M, K), drawn(K, N), torch.zeros(M, 2 * N)
    run(multiply)(a, b, memory[:, :N], memory[:, N:])
    torch.testing.assert_close(memory, torch.cat([torch.relu(a @ b), a @ b], 1))
    rows = torch.zeros(2 * M, N)
    shared = rows[:M], rows[2 : M + 2]
    for function, given, names in (
        (multiply, (a, b, *shared), ("out", "preactivation")),
        (within, (a, b), ("out", "preactivation")),
        (listed, (a, b, [*shared]), (r"out\[1\]", r"out\[0\]")),
    ):
        for form in (function, run(function)):
            with pytest.raises(Exception, match="{} = .*overlaps .*{}".format(*names)):
                form(*given)


def test_results_of_8_bits() -> None:
    def multiply(a: Any, b: Any, scales: Any) -> Any:
        own = ["relu", epilogues.quantized(scales)]
        return ks_torch.matmul2d(a, b, out_dtype=torch.float8_e4m3fn, epilogue=own)

    run, _ = compiled(multiply)
    given = drawn(M, K), drawn(K, N), torch.rand(M) + 0.5
    found, want = run(*given), multiply(*given)
    assert found.dtype is torch.float8_e4m3fn
    torch.testing.assert_close(found.float(), want.float(), rtol=0, atol=0)
    run, _ = compiled(multiply)
    with pytest.raises(torch._dynamo.exc.TorchRuntimeError, match="must be wider than 8 bits"):
        run(given[0].requires_grad_(), *given[1:])


def test_export_and_vmap() -> None:
    class Model(torch.nn.Module):  # type: ignore[misc]
        def forward(self, a: Any, b: Any) -> Any:
            return ks_torch.matmul2d(a, b, epilogue=[epilogues.softcap(2.0), "relu"])

    a, b = drawn(M, K), drawn(K, N)
    want = torch.relu(2 * torch.tanh(a @ b / 2))
    torch.testing.assert_close(torch.export.export(Model(), (a, b)).module()(a, b), want)
    found = torch.func.vmap(Model(), (0, None))(a.expand(2, M, K), b)
    torch.testing.assert_close(found, want.expand(2, M, N))


@pytest.mark.parametrize("learnt", [(0,), (1,), (0, 1)], ids=str)
def test_gradients_around_vmap(learnt: tuple[int, ...]) -> None:
    """What is mapped stands for a tensor that wants a gradient, and does not say so itself."""
    given = [drawn(2, M, K), drawn(2, K, N)]
    for i in learnt:
        given[i].requires_grad_()
    one = lambda a, b: ks_torch.matmul2d(a, b, epilogue="swiglu")  # noqa: E731
    mapped, asked = torch.func.vmap(one), [given[i] for i in learnt]
    want = ks_torch.bmm(*given, epilogue="swiglu").square().sum()
    gradients = torch.autograd.grad(want, asked)
    for run in (mapped, compiled(lambda a, b: mapped(a, b))[0]):
        found = torch.autograd.grad(run(*given).square().sum(), asked)
        torch.testing.assert_close(found, gradients)


def test_refusals() -> None:
    def multiply(a: Any, b: Any, x: Any) -> Any:
        return ks_torch.matmul2d(a, b, epilogue=epilogues.row_bias(x))

    run, _ = compiled(multiply)
    a, b = drawn(M, K), drawn(K, N)
    with pytest.raises(torch._dynamo.exc.TorchRuntimeError, match="captured_0.requires_grad"):
        run(a, b, drawn(M, gradients=True))
    tables = [np.full(N, i, np.float32) for i in range(9)]

    def many(acc: Any, m: Any, n: Any, batch: Any) -> Any:
        for table in tables:
            acc = acc + table[n]
        return acc

    multiply_many = lambda a, b: ks_torch.matmul2d(a, b, epilogue=many)  # noqa: E731
    run, _ = compiled(multiply_many)
    with pytest.raises(Exception, match="capture at most 8"):
        run(a, b)
    torch.testing.assert_close(with_breaks(multiply_many)(a, b), multiply_many(a, b))


@pytest.mark.parametrize("epilogue", ["nope", lambda acc, m, n, batch: acc if acc > 0 else 0])
@pytest.mark.parametrize("matmul2d", [ks.matmul2d, ks_torch.matmul2d])
def test_what_cannot_be_traced_is_refused_by_its_message(matmul2d: Any, epilogue: Any) -> None:
    multiply = functools.partial(matmul2d, epilogue=epilogue)
    run, _ = compiled(lambda a, b: multiply(a, b))
    a, b = drawn(M, K), drawn(K, N)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="epilogue"):
        run(a, b)
    with pytest.raises(InvalidValue, match="epilogue = "):
        with_breaks(lambda a, b: multiply(a, b))(a, b)


@pytest.mark.parametrize("matmul2d", [ks.matmul2d, ks_torch.matmul2d])
def test_sums_and_maxima_are_written_uncompiled(matmul2d: Any) -> None:
    """No operator has their arrays: without ``fullgraph`` the graph breaks there."""
    largest = torch.zeros(1)

    def multiply(a: Any, b: Any) -> Any:
        return matmul2d(a, b, epilogue=["relu", epilogues.amax(largest)])

    a, b = drawn(M, K), drawn(K, N)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="where torch does not compile"):
        compiled(multiply)[0](a, b)
    assert largest == 0
    out = with_breaks(multiply)(a, b)
    assert largest == out.max() > 0


def index(*values: int) -> Any:
    return torch.tensor(values, dtype=torch.int32)


GROUPS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "rows": ((M, K), {"offs": index(2, 2, M)}),
    "a rest": ((M, K), {"offs": index(2, 2, M - 1)}),
    "gathered": ((3, K), {"offs": index(1, 3, M), "a_indices": index(2, 0, 1, 1, 2)}),
    "scattered": ((M, K), {"offs": index(1, 3, M), "out_indices": index(4, 0, 3, 1, 2)}),
    "a batch": ((3, M, K), {}),
}
"""Shape of a, and what says where groups and rows are."""


@pytest.mark.parametrize(
    ("form", "what"),
    [
        *((form, "a gate") for form in GROUPS),
        *(("scattered", what) for what in INSIDE if what != "a gate"),
    ],
)
def test_groups(form: str, what: str) -> None:
    """Beside those uncompiled, with gradients to a, b and factors; of a rest nothing is read."""
    shape, rows = GROUPS[form]
    made = INSIDE[what][0]
    a, b = drawn(*shape, gradients=True), drawn(3, K, N, gradients=True)
    factors = None if form == "a batch" else drawn(M, gradients=True)
    kept = M - 1 if form == "a rest" else None

    def loss(a: Any, b: Any, factors: Any, x: Any) -> Any:
        out = ks_torch.grouped_mm(a, b, **rows, out_factors=factors, epilogue=made(x))
        return out if kept is None else out[:kept]

    x = drawn(M)
    run, counter = compiled(loss)
    got, want = run(a, b, factors, x), loss(a, b, factors, x)
    torch.testing.assert_close(got, want)
    wanting = [y for y in (a, b, factors) if y is not None]
    arriving = drawn(*want.shape)
    torch.testing.assert_close(*(torch.autograd.grad(y, wanting, arriving) for y in (got, want)))
    run(a, b, factors, x + 1)
    assert counter.frame_count == 1


def test_groups_under_transforms_and_exported() -> None:
    def multiply(a: Any, b: Any, offs: Any) -> Any:
        return ks_torch.grouped_mm(a, b, offs, epilogue="swiglu")

    a, b, offs = drawn(M, K), drawn(2, K, N), index(2, M)
    with FlopCounterMode(display=False) as counter:
        want = multiply(a, b, offs)
    assert counter.get_total_flops() == 2 * M * K * N
    found = torch.func.vmap(multiply, (0, None, None))(torch.stack([a, 2 * a]), b, offs)
    torch.testing.assert_close(found, torch.stack([want, multiply(2 * a, b, offs)]))
    loss = lambda a, b: multiply(a, b, offs).square().sum()  # noqa: E731
    wanting = [x.clone().requires_grad_() for x in (a, b)]
    torch.testing.assert_close(
        torch.func.grad(loss, (0, 1))(a, b), torch.autograd.grad(loss(*wanting), wanting)
    )

    class Model(torch.nn.Module):  # type: ignore[misc]
        def forward(self, a: Any, b: Any, offs: Any) -> Any:
            return multiply(a, b, offs)

    given = a, b, offs
    torch.testing.assert_close(torch.export.export(Model(), given).module()(*given), want)


def test_groups_into_arrays_of_the_caller() -> None:
    """To the first rows, and scattered to some of more; the others stay."""

    def multiply(a: Any, b: Any, offs: Any, out: Any, sums: Any, places: Any) -> Any:
        return ks.grouped_mm(
            a, b, offs, out_indices=places, out=out, epilogue="swiglu", preactivation=sums
        )

    a, b = drawn(M, K), drawn(2, K, N)
    for places, rows, ends in (
        (None, M, 3),
        (index(6, 0, 3, 1, 2), 8, M),
        (index(*range(M)), 8, 2),
    ):
        offs = index(2, ends)
        results = [(torch.ones(rows, N // 2), torch.full((rows, N), 7.0)) for _ in range(3)]
        run, _ = compiled(multiply)
        followed = functools.partial(in_mode, multiply)
        for function, (out, sums) in zip((multiply, run, followed), results, strict=True):
            function(a, b, offs, out, sums, places)
        (out, sums), *others = results
        taken = torch.arange(M)[:ends] if places is None else places.long()[:ends]
        rest = [i for i in range(rows) if i not in taken]
        assert rest and (out[rest] == 1).all() and (sums[rest] == 7).all()
        for found in others:
            torch.testing.assert_close(found, (out, sums), rtol=0, atol=0)
    run, _ = compiled(multiply)
    with pytest.raises(Exception, match=r"must have shape \[8, 8\]"):
        run(a, b, offs, out, torch.ones(M, N), places)


def test_groups_that_are_refused() -> None:
    a, b, offs = drawn(M, K), drawn(2, K, N), index(2, M)
    run, _ = compiled(lambda a, b, offs: ks_torch.grouped_mm(a, b, offs, epilogue="relu"))
    with pytest.raises(Exception, match="a = an array of shape .*: must have 2 or 3 axes"):
        run(a[0], b, offs)
    with pytest.raises(Exception, match="epilogue = given: is of rows of groups along 'm'"):
        run(a.mT, drawn(M, N), offs)
    run, _ = compiled(
        lambda a, b, offs, x: ks_torch.grouped_mm(a, b, offs, epilogue=epilogues.row_bias(x))
    )
    with pytest.raises(torch._dynamo.exc.TorchRuntimeError, match="captured_0.requires_grad"):
        run(a, b, offs, drawn(M, gradients=True))


def test_an_epilogue_that_a_stand_in_does_not_serve() -> None:
    """Numbers of partials are first tried as any number would be."""
    factors = [None] * 3 + [2.0] * 10

    def picked(acc: Any, m: Any, n: Any, batch: Any, k: int) -> Any:
        return acc * factors[k]

    a, b = drawn(M, K), drawn(K, N)
    run, _ = compiled(lambda a, b: ks_torch.matmul2d(a, b, epilogue=functools.partial(picked, k=8)))
    torch.testing.assert_close(run(a, b), 2 * a @ b)
