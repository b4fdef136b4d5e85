"""Functions that torch.compile and torch.export take whole, on the NumPy backend: the plain ones
and those that torch differentiates."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import kernelseam
import pytest
from kernelseam.interop import torch as ks

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch_calls import CALLS, arguments_of  # noqa: E402
from torch_operators import (  # noqa: E402
    cells,
    functions,
    gradient_functions,
    ints,
    packed,
    pages,
    projected,
    qkv,
    several,
)

FUNCTIONS = tuple(functions())
INDUCTOR = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
"""torch's own, where inductor looks for oneDNN."""


@pytest.fixture(autouse=True)
def _apart() -> Any:
    """Each test with nothing compiled before it."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def counting() -> Any:
    """A backend that counts compilations. Imported here: it takes seconds, which each process of
    the tests would pay to collect them."""
    from torch._dynamo.testing import CompileCounterWithBackend

    return CompileCounterWithBackend("aot_eager")


def compiled(call: Callable[..., Any], backend: str = "aot_eager", **options: Any) -> Any:
    return torch.compile(call, fullgraph=True, backend=backend, **options)


def used(graph: Any) -> set[str]:
    """The operators of ours in a graph."""
    names = {str(n.target) for n in graph.nodes if n.op == "call_function"}
    return {n.split(".")[1] for n in names if n.startswith("kernelseam.")}


@pytest.fixture
def _without_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced code does not read sys.modules: Dynamo walks all of a dict, and imports meanwhile."""
    from torch._dynamo.variables.builder import VariableBuilder

    wrap = VariableBuilder._wrap

    def checked(self: Any, value: Any) -> Any:
        assert value is not sys.modules
        return wrap(self, value)

    monkeypatch.setattr(VariableBuilder, "_wrap", checked)


@pytest.mark.usefixtures("_without_modules")
@pytest.mark.parametrize("name", CALLS)
def test_every_function_compiles_whole(name: str) -> None:
    """With every parameter; tensors are inputs, the rest constants."""
    call = CALLS[name].call

    def run(operands: dict[str, Any], rest: dict[str, Any]) -> list[Any]:
        return [x * 2 for x in several(call(**operands, **rest)) if x is not None]

    made = []
    for of in (compiled(run), run):
        given = arguments_of(name)
        operands = {n: x for n, x in given.items() if isinstance(x, torch.Tensor)}
        made.append(of(operands, {n: x for n, x in given.items() if n not in operands}))
    torch.testing.assert_close(*made, equal_nan=True)


@pytest.mark.usefixtures("_without_modules")
@pytest.mark.parametrize("name", [n for n in FUNCTIONS if n != "attention_paged"])
def test_differentiable_functions_compile_whole_with_their_gradients(name: str) -> None:
    function = functions()[name]
    wanted = [x for x in function.operands if x.requires_grad]

    def call(*operands: Any) -> Any:
        made = several(function.differentiable(*operands))  # type: ignore[misc]
        return sum((x * x.detach().cos()).nan_to_num(neginf=0).sum() for x in made)

    got = compiled(call)(*function.operands)
    want = call(*function.operands)
    torch.testing.assert_close(got, want)
    mine, theirs = (torch.autograd.grad(x, wanted) for x in (got, want))
    for a, b in zip(mine, theirs, strict=True):
        assert b.abs().max() > 1e-3
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", gradient_functions())
def test_gradients_on_arrays_compile_whole(name: str) -> None:
    call, operands = gradient_functions()[name]
    for a, b in zip(compiled(call)(*operands), call(*operands), strict=True):
        assert a.shape == b.shape and b.abs().max() > 1e-3
        torch.testing.assert_close(a, b)


def block(x: Any, w: Any, b: Any, out: Any) -> Any:
    """A layer: projections around an attention, a norm and a product that inductor writes."""
    q, k, v = ks.fused_qkv_projection(torch.nn.functional.rms_norm(x, (12,)), w, b, 4, 2)
    y = ks.attention(q, k, v, causal=True)
    return torch.relu(ks.fused_output_projection_residual(y, out, residual=x)).square().mean()


@INDUCTOR
@pytest.mark.slow("inductor compiles C++ for half a minute")
def test_a_layer_by_inductor_with_its_gradients() -> None:
    operands = (*projected(), cells(12, 32, seed=7))
    got = compiled(block, backend="inductor")(*operands)
    want = block(*operands)
    torch.testing.assert_close(got, want)
    for a, b in zip(*(torch.autograd.grad(x, operands) for x in (got, want)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.slow("inductor compiles C++ for each function")
@INDUCTOR
@pytest.mark.parametrize("name", FUNCTIONS)
def test_plain_functions_by_inductor(name: str) -> None:
    function = functions()[name]
    operands = [x.detach() for x in function.operands]

    def call(*operands: Any) -> Any:
        return [torch.sin(x) * 2 for x in several(function.plain(*operands))]

    for a, b in zip(compiled(call, "inductor")(*operands), call(*operands), strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)


def lengths(call: Any, made: Callable[[int], tuple[Any, ...]], options: Any = None) -> int:
    """How often a call over operands of many lengths is compiled."""
    counter = counting()
    run = torch.compile(call, fullgraph=True, backend=counter, **(options or {}))
    for n in (6, 10, 17, 33, 64, 65):  # none that is another extent's too, which torch joins
        operands = made(n)
        got, want = run(*operands), call(*operands)
        for a, b in zip(several(got), several(want), strict=True):
            torch.testing.assert_close(a, b)
    return int(counter.frame_count)


@pytest.mark.parametrize("home", [kernelseam, ks], ids=["plain", "differentiable"])
def test_lengths_are_compiled_once_more_and_never_again(home: Any) -> None:
    """The first length by itself, the second for all."""

    def rows(n: int) -> tuple[Any, ...]:
        grad = home is ks
        return cells(2, 4, n, 8, grad=grad), *(cells(2, 2, n + 3, 8, grad=grad) for _ in range(2))

    def call(q: Any, k: Any, v: Any) -> Any:
        return home.attention(q, k, v, causal=True, window=(4, None), return_lse=True)

    assert lengths(call, rows) == 2
    torch._dynamo.reset()
    assert lengths(call, rows, {"dynamic": True}) == 1


def test_lengths_of_products_and_packed_rows() -> None:
    def products(n: int) -> tuple[Any, ...]:
        return cells(2, n, 7, grad=False), cells(2, 7, n + 1, grad=False)

    assert lengths(kernelseam.bmm, products) == 2
    torch._dynamo.reset()

    def sequences(n: int) -> tuple[Any, ...]:
        q, k, v = (cells(n, h, 8, seed=h, grad=False) for h in (4, 2, 2))
        return q, k, v, ints(0, n // 2, n), n - n // 2

    def call(q: Any, k: Any, v: Any, offsets: Any, longest: int) -> Any:
        return ks.attention_varlen(q, k, v, offsets, offsets, longest, longest, causal=True)

    assert lengths(call, sequences) <= 3  # rows, then the longest, become dynamic
    torch._dynamo.reset()

    def tokens(n: int) -> tuple[Any, ...]:
        return cells(2, n, 12, grad=False), cells(64, 12, grad=False)

    assert lengths(lambda x, w: kernelseam.fused_qkv_projection(x, w, None, 4, 2), tokens) == 2


@pytest.fixture
def _numbers_of_tensors() -> Any:
    """tensor.item() stays in the graph."""
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        yield


@pytest.mark.usefixtures("_numbers_of_tensors")
@pytest.mark.parametrize("attention", [ks.attention_varlen, kernelseam.attention_varlen])
def test_lengths_that_are_read_from_a_tensor(attention: Any) -> None:
    """The longest is known when the graph runs; with gradients where there are any."""

    def attend(q: Any, k: Any, v: Any, offsets: Any, less: int) -> Any:
        longest = int((offsets[1:] - offsets[:-1]).max()) - less
        return attention(q, k, v, offsets, offsets, longest, longest, causal=True)

    plain: Any = attend
    count = counting()
    graph = torch.compile(attend, fullgraph=True, backend=count, dynamic=True)
    for rows in (10, 23, 40):
        offsets = torch.tensor([0, 3, rows], dtype=torch.int32)
        found = [cells(rows, 2, 16, grad=attention is ks.attention_varlen) for _ in "qkv"]
        want = [x.detach().clone().requires_grad_(x.requires_grad) for x in found]
        made, expected = graph(*found, offsets, 0), plain(*want, offsets, 0)
        torch.testing.assert_close(made, expected)
        if attention is ks.attention_varlen:
            made.square().sum().backward()
            expected.square().sum().backward()
            for a, b in zip(found, want, strict=True):
                torch.testing.assert_close(a.grad, b.grad)
    assert count.frame_count == 1
    with pytest.raises(kernelseam.errors.InvalidValue, match="max_seqlen_q"):
        graph(*found, offsets, 1000)


def test_decoding_into_pages() -> None:
    """Pages are written by a compiled call as by another, and only they."""
    x, w, b = (y.detach() for y in projected())
    table = ints([0, 1], [2, 3])

    def call(x: Any, k_pages: Any, v_pages: Any) -> Any:
        q = kernelseam.fused_qkv_projection(
            x, w, b, 4, 2, layout="bshd", k_pages=k_pages, v_pages=v_pages, block_table=table
        )
        return kernelseam.attention_paged(q, k_pages, v_pages, table, ints(6, 6))

    both = [[torch.zeros(4, 4, 2, 8) for _ in range(2)] for _ in range(2)]
    got = compiled(call)(x, *both[0])
    torch.testing.assert_close(got, call(x, *both[1]))
    for a, b in zip(*both, strict=True):
        assert a.abs().max() > 0.1
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("causal", [False, True])
def test_pages_that_every_query_sees_or_not(causal: bool) -> None:
    """The default is True here, and False elsewhere."""
    q, *memory = pages()
    q = torch.cat([q, q * 2, q - 1], 1)

    def attend(q: Any) -> Any:
        return kernelseam.attention_paged(q, *memory, causal=causal)

    torch.testing.assert_close(compiled(attend)(q), attend(q))


def test_results_given_by_the_caller() -> None:
    q, k, v, at, of = packed(grad=False)
    a, b, c = (cells(*s, grad=False) for s in ((5, 7), (7, 4), (5, 4)))

    def call(out: Any, more: Any) -> Any:
        kernelseam.attention_varlen(q, k, v, at, of, 4, 5, out=out)
        kernelseam.matmul2d(a, b, out=more, beta=2)
        return out.sum() + more.sum()

    both = [(torch.full((7, 4, 8), 3.0), c.clone()) for _ in range(2)]
    torch.testing.assert_close(compiled(call)(*both[0]), call(*both[1]))
    for x, y in zip(*both, strict=True):
        torch.testing.assert_close(x, y)
    assert both[0][0][6].eq(3).all()  # a row of no sequence stays as it was
    torch.testing.assert_close(both[0][1], a @ b + 2 * c)


class Called(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *operands: Any) -> tuple[Any, ...]:
        return several(self.function(*operands))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_is_exported(name: str) -> None:
    """Without Dynamo, which traces each for torch.compile above, and one for an export below."""
    function = functions()[name]
    operands = tuple(x.detach() for x in function.operands)
    for called in (function.plain, function.differentiable):
        if called is None:  # of pages there are no gradients
            continue
        program = torch.export.export(Called(called), operands, strict=False)
        assert used(program.graph) == {name}
        for a, b in zip(program.module()(*operands), several(called(*operands)), strict=True):
            torch.testing.assert_close(a, b, equal_nan=True)


class Module(torch.nn.Module):  # type: ignore[misc]
    def forward(self, q: Any, k: Any, v: Any) -> Any:
        return kernelseam.attention(q, k, v, causal=True) + ks.attention(q, k, v)


@pytest.mark.parametrize("strict", [True, False])
def test_exported_with_lengths_that_vary(strict: bool) -> None:
    operands = tuple(x.detach() for x in qkv())
    rows, keys = torch.export.Dim("rows"), torch.export.Dim("keys")
    program = torch.export.export(
        Module(),
        operands,
        dynamic_shapes=({2: rows}, {2: keys}, {2: keys}),
        strict=strict,
    )
    assert used(program.graph) == {"attention"}
    for n in (4, 9):
        q, k, v = operands[0][:, :, :n], *(x[:, :, :9] for x in operands[1:])
        torch.testing.assert_close(program.module()(q, k, v), Module()(q, k, v))


@pytest.mark.parametrize(
    ("mode", "use_reentrant"),
    [("eager", True), ("eager", False), ("aot_eager", False)],  # torch compiles the last kind alone
)
def test_activation_checkpointing(use_reentrant: bool, mode: str) -> None:
    operands = (*projected(), cells(12, 32, seed=7))

    def call(*operands: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(block, *operands, use_reentrant=use_reentrant)

    run = call if mode == "eager" else compiled(call, mode)
    loss = run(*operands)
    with kernelseam.trace() as launches:
        got = torch.autograd.grad(loss, operands) if not use_reentrant else None
        if got is None:
            loss.backward()
            got = tuple(x.grad for x in operands)
    assert [x.kernel for x in launches].count("numpy_attention") == 1  # computed again
    for a, b in zip(got, torch.autograd.grad(block(*operands), operands), strict=True):
        torch.testing.assert_close(a, b)


def test_selective_checkpointing_keeps_what_it_is_told_to() -> None:
    """A policy by operator sees ours: the attention's result is kept, and not computed again."""
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    operands = (*projected(), cells(12, 32, seed=7))
    kept = [torch.ops.kernelseam.attention.default]

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(kept)

    loss = checkpoint(block, *operands, use_reentrant=False, context_fn=contexts)
    with kernelseam.trace() as launches:
        got = torch.autograd.grad(loss, operands)
    again = [x.kernel for x in launches]
    assert "numpy_attention" not in again and "numpy_gemm" in again
    for a, b in zip(got, torch.autograd.grad(block(*operands), operands), strict=True):
        torch.testing.assert_close(a, b)


def test_autocast_in_what_is_compiled() -> None:
    q, k, v = qkv()

    def call(q: Any, k: Any, v: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return ks.attention(q, k, v, causal=True), ks.bmm(q[:, 0], k[:, 0].mT)

    got, want = compiled(call)(q, k, v), call(q, k, v)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == torch.bfloat16
        torch.testing.assert_close(a, b)
    mine, theirs = (torch.autograd.grad(y[0].float().square().sum(), q) for y in (got, want))
    torch.testing.assert_close(mine, theirs)


def test_pages_are_decoded_at_growing_lengths_without_compiling() -> None:
    q, k, v, table, _ = pages()
    counter = counting()
    run = torch.compile(kernelseam.attention_paged, fullgraph=True, backend=counter)
    for n in range(1, 9):
        now = ints(n, n)
        want = kernelseam.attention_paged(q, k, v, table, now)
        torch.testing.assert_close(run(q, k, v, table, now), want)
    assert counter.frame_count == 1


def test_a_plain_function_that_is_compiled_has_gradients() -> None:
    """Uncompiled it refuses what would be lost; its operator loses nothing."""
    q, k, v = qkv()
    got = compiled(lambda *x: kernelseam.attention(*x, causal=True).square().sum())(q, k, v)
    want = ks.attention(q, k, v, causal=True).square().sum()
    for a, b in zip(*(torch.autograd.grad(y, (q, k, v)) for y in (got, want)), strict=True):
        torch.testing.assert_close(a, b)
