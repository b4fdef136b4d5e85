"""Grouped products as torch differentiates them, and as Transformers' experts."""

from __future__ import annotations

from typing import Any

import kernelseam
import pytest
from kernelseam.interop import torch as ks

torch = pytest.importorskip("torch", reason="torch is not installed")

E, T, M, K, N = 3, 9, 2, 4, 3
OFFS = (2, 2, 9)


def by_group(a: Any, b: Any, offs: Any) -> Any:
    """By torch's own operations."""
    if offs is None:
        return a @ b
    ends = offs.tolist()
    parts = list(zip([0, *ends[:-1]], ends, strict=True))
    if b.dim() == 3:
        return torch.cat([a[i:j] @ b[g] for g, (i, j) in enumerate(parts)])
    if a.dim() == 3:
        return torch.cat([a[g] @ b[:, i:j] for g, (i, j) in enumerate(parts)], 1)
    return torch.stack([a[:, i:j] @ b[i:j] for i, j in parts])


def operands(form: str) -> tuple[Any, Any, Any]:
    shapes = {
        "rows": ((T, K), (E, K, N)),
        "columns": ((E, M, K), (K, T)),
        "summed": ((M, T), (T, N)),
        "batch": ((E, M, K), (E, K, N)),
    }[form]
    generator = torch.Generator().manual_seed(len(form))
    made = [
        torch.randn(*s, dtype=torch.float64, generator=generator).requires_grad_() for s in shapes
    ]
    offs = None if form == "batch" else torch.tensor(OFFS, dtype=torch.int32)
    return made[0], made[1], offs


@pytest.mark.parametrize("form", ["rows", "columns", "summed", "batch"])
def test_gradients_and_their_gradients(form: str) -> None:
    a, b, offs = operands(form)
    found, wanted = ks.grouped_mm(a, b, offs, alpha=0.5), 0.5 * by_group(a, b, offs)
    torch.testing.assert_close(found, wanted)
    dc = torch.randn_like(found)
    mine, theirs = (torch.autograd.grad(x, (a, b), dc) for x in (found, wanted))
    torch.testing.assert_close(mine, theirs)
    torch.testing.assert_close(  # a gradient that repeats one number
        torch.autograd.grad(ks.grouped_mm(a, b, offs).sum(), a),
        torch.autograd.grad(by_group(a, b, offs).sum(), a),
    )
    assert torch.autograd.gradcheck(lambda a, b: ks.grouped_mm(a, b, offs), (a, b))
    assert torch.autograd.gradgradcheck(lambda a, b: ks.grouped_mm(a, b, offs), (a, b))


@pytest.mark.parametrize("form", ["rows", "columns", "summed"])
def test_what_is_behind_the_last_group_has_gradient_0(form: str) -> None:
    """New memory holds NaN here."""
    a, b, _ = operands(form)
    offs = torch.tensor([2, 2, 6], dtype=torch.int32)
    torch.use_deterministic_algorithms(True)  # fills what is allocated
    try:
        found = ks.grouped_mm(a, b, offs)
        there = found if form == "summed" else found[:6] if form == "rows" else found[:, :6]
        mine = torch.autograd.grad(there.square().sum(), (a, b))
    finally:
        torch.use_deterministic_algorithms(False)
    theirs = torch.autograd.grad(by_group(a, b, offs).square().sum(), (a, b))
    torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("given", ["gather", "scatter", "factors", "all"])
def test_gradients_of_rows_that_are_gathered_and_scattered(given: str) -> None:
    """Rows 9 and 10 are behind the last group: what their indices name gets no gradient of them."""
    a, b, offs = operands("rows")
    index = {"dtype": torch.int32}
    rows = T if given == "factors" else T + 2
    indices: dict[str, Any] = {
        "a_indices": torch.tensor([0, 3, 3, 8, 1, 0, 4, 4, 4, 99, -7], **index),
        "out_indices": torch.tensor([5, 2, 10, 0, 1, 3, 9, 8, 7, 99, -7], **index),
        "out_factors": torch.linspace(-1, 2, rows).requires_grad_(),
    }
    names = {"gather": "a_indices", "scatter": "out_indices", "factors": "out_factors"}
    if given != "all":
        indices = {names[given]: indices[names[given]]}
    if given == "scatter":
        a = torch.cat([a, torch.full((2, K), float("nan"))]).detach().requires_grad_()
    taken, places = (
        indices[n][:T].long() if n in indices else torch.arange(T)
        for n in ("a_indices", "out_indices")
    )
    product = by_group(a[taken], b, offs)
    if (factors := indices.get("out_factors")) is not None:
        product = product * factors[:T, None].double()
    found = ks.grouped_mm(a, b, offs, **indices)[places]
    torch.testing.assert_close(found, product)
    dc = torch.randn_like(found)
    wanting = [x for x in (a, b, factors) if x is not None]
    mine, theirs = (torch.autograd.grad(x, wanting, dc) for x in (found, product))
    torch.testing.assert_close(mine, theirs)


def test_rows_taken_often_are_summed_in_float32() -> None:
    """bfloat16 sums of ones end at 256."""
    a, b = torch.ones(3, 4).bfloat16().requires_grad_(), torch.eye(4).bfloat16()[None]
    offs, taken = torch.tensor([601], dtype=torch.int32), torch.zeros(700, dtype=torch.int32)
    taken[1] = 2
    taken[601:] = torch.tensor([-5, 1000, 1]).repeat(33)
    found = ks.grouped_mm(a, b, offs, a_indices=taken)
    (da,) = torch.autograd.grad(found[:601].sum(), a)
    assert da.tolist() == [[600.0] * 4, [0.0] * 4, [1.0] * 4]


@pytest.mark.parametrize("given", ["plain", "rest", "rows"])
@pytest.mark.parametrize("gated", [False, True])
def test_gradients_of_an_epilogue_and_of_what_it_captures(given: str, gated: bool) -> None:
    """Also of weights that lie as [experts, N, K]."""
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int, dtype: Any = torch.float64) -> Any:
        return torch.randn(*shape, dtype=dtype, generator=generator).requires_grad_()

    a, weights, bias = drawn(T + 2 * (given == "rest"), K), drawn(E, 6, K), drawn(E, 6)
    b, offs, index = weights.mT, torch.tensor(OFFS, dtype=torch.int32), {"dtype": torch.int32}
    groups = torch.tensor([0] * OFFS[0] + [2] * (T - OFFS[0]))
    taken = places = torch.arange(T)
    rows: dict[str, Any] = {}
    wanting = [a, weights, bias]
    if given == "rows":
        taken, places = torch.tensor([0, 3, 3, 8, 1, 0, 4, 4, 4]), torch.randperm(T)
        factors = drawn(T, dtype=torch.float32)
        rows = {"a_indices": taken.to(**index), "out_indices": places.to(**index)}
        rows |= {"out_factors": factors}
        wanting.append(factors)
    sums = by_group(a[taken], b, offs)
    sums = sums if given != "rows" else sums * factors[:, None].double()
    if gated:
        epilogue: Any = kernelseam.epilogues.gated(
            lambda gate, up, m, n, batch: (gate + bias[batch, n]) * (up * up + bias[batch, n + 3])
        )
        gate, up = sums.chunk(2, -1)
        wanted = (gate + bias[groups, :3]) * (up * up + bias[groups, 3:])
    else:
        epilogue = lambda acc, m, n, batch: (acc + bias[batch, n]) * acc  # noqa: E731
        wanted = (sums + bias[groups]) * sums
    found = ks.grouped_mm(a, b, offs, epilogue=epilogue, **rows)[places]
    torch.testing.assert_close(found, wanted)
    dc = torch.randn_like(found)
    mine, theirs = (torch.autograd.grad(x, wanting, dc) for x in (found, wanted))
    torch.testing.assert_close(mine, theirs)
    assert mine[1].is_contiguous()  # as the weights lie


def test_where_an_epilogue_is_refused() -> None:
    a, b, offs = operands("rows")
    with pytest.raises(kernelseam.errors.InvalidValue, match="epilogue = given: is of rows of gr"):
        ks.grouped_mm(*operands("columns"), epilogue="relu")
    with pytest.raises(kernelseam.errors.InvalidValue, match="epilogue = given: is of rows of gr"):
        ks.grouped_mm(*operands("summed"), epilogue="relu")
    with pytest.raises(kernelseam.errors.InvalidValue, match="must be two or three each"):
        ks.grouped_mm(a[0], b, offs, epilogue="relu")
    with pytest.raises(kernelseam.errors.UnknownName, match="out_dtype = nope: must be one of"):
        ks.grouped_mm(a, b, offs, epilogue="relu", out_dtype="nope")


def test_an_epilogue_of_a_batch() -> None:
    a, b, _ = operands("batch")
    found, wanted = ks.grouped_mm(a, b, epilogue="silu"), torch.nn.functional.silu(a @ b)
    torch.testing.assert_close(found, wanted)
    mine, theirs = (torch.autograd.grad(x.square().sum(), (a, b)) for x in (found, wanted))
    torch.testing.assert_close(mine, theirs)


def test_beside_torchs_own() -> None:
    """Whose rows must be multiples of 16 bytes."""
    a, b = (torch.randn(s, dtype=torch.bfloat16) for s in ((T, 16), (E, 16, 24)))
    offs = torch.tensor(OFFS, dtype=torch.int32)
    torch.testing.assert_close(
        kernelseam.grouped_mm(a, b, offs), torch._grouped_mm(a, b, offs=offs)
    )


def test_where_none_are_wanted_nothing_is_kept() -> None:
    a, b, offs = operands("rows")
    with torch.no_grad():
        assert ks.grouped_mm(a, b, offs).grad_fn is None
    assert ks.grouped_mm(a.detach(), b.detach(), offs, bwd_implementation="numpy").grad_fn is None


def test_autocast_converts() -> None:
    a, b, offs = operands("rows")
    a, b = a.detach().float(), b.detach().float()
    with torch.autocast("cpu", torch.bfloat16):
        assert ks.grouped_mm(a, b, offs).dtype is torch.bfloat16


def listed(dtype: Any = torch.float64) -> tuple[list[Any], list[Any]]:
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> Any:
        return torch.randn(*shape, dtype=dtype, generator=generator).requires_grad_()

    a = [normal(3, 5), normal(4, 2).mT, normal(0, 3), normal(6, 1)]
    return a, [normal(5, 2), normal(4, 3), normal(3, 4), normal(7, 1).mT]


def test_gradients_of_lists_and_their_gradients() -> None:
    a, b = listed()
    found, wanted = (
        ks.grouped_mm_list(a, b, alpha=0.5),
        [0.5 * x @ y for x, y in zip(a, b, strict=True)],
    )
    torch.testing.assert_close(found, wanted)
    dc = [torch.randn_like(x) for x in found]
    mine, theirs = (torch.autograd.grad(x, [*a, *b], dc) for x in (found, wanted))
    torch.testing.assert_close(mine, theirs)

    def products(*x: Any) -> tuple[Any, ...]:
        return tuple(ks.grouped_mm_list(x[:2], x[2:]))

    some = [x.detach().requires_grad_() for x in (*a[:2], *b[:2])]
    assert torch.autograd.gradcheck(products, some)
    assert torch.autograd.gradgradcheck(products, some)
    only = torch.autograd.grad(ks.grouped_mm_list(a, [x.detach() for x in b])[1].sum(), a[1])
    torch.testing.assert_close(only[0], torch.ones(2, 3, dtype=torch.float64) @ b[1].mT)


def test_lists_launch_once_a_layout_and_gradients_too() -> None:
    a, b = (
        [torch.randn(*s).requires_grad_() for s in x] for x in (((3, 5), (7, 2)), ((5, 3), (2, 9)))
    )
    with kernelseam.trace() as launches:
        results = ks.grouped_mm_list(a, b)
    assert len(launches) == 1
    with kernelseam.trace() as launches:
        sum(x.square().sum() for x in results).backward()  # type: ignore[union-attr]
    assert len(launches) == 2  # dc·bᵀ, aᵀ·dc


def test_lists_where_torch_compiles() -> None:
    """One launch of one operator, of a length that no call had before, and its gradients too."""
    a, b = ([x.detach().requires_grad_() for x in 5 * some] for some in listed(torch.float32))

    def multiply(a: Any, b: Any) -> Any:
        return ks.grouped_mm_list([2 * x for x in a], b)

    compiled = torch.compile(multiply, backend="aot_eager", fullgraph=True)
    found, wanted = compiled(a, b), [2 * x @ y for x, y in zip(a, b, strict=True)]
    torch.testing.assert_close(found, wanted)
    dc = [torch.randn_like(x) for x in found]
    mine, theirs = (torch.autograd.grad(x, [*a, *b], dc) for x in (found, wanted))
    torch.testing.assert_close(mine, theirs)
    x, y = [torch.randn(3, 5), torch.randn(2, 5)], [torch.randn(5, 2), torch.randn(5, 7)]
    multiply(x, y)
    with kernelseam.trace() as launches, torch.no_grad():
        compiled(x, y)
    assert len(launches) == 1


def test_lists_into_arrays_of_the_caller_where_torch_compiles() -> None:
    """Scaled by beta first; what eager refuses is refused."""
    a, b = [torch.randn(3, 5), torch.randn(2, 4)], [torch.randn(5, 2), torch.randn(4, 6)]

    def multiply(a: Any, b: Any, out: Any, beta: float) -> Any:
        return kernelseam.grouped_mm_list(a, b, out=out, beta=beta)

    def run(*given: Any) -> None:
        torch._dynamo.reset()
        torch.compile(multiply, backend="aot_eager", fullgraph=True)(*given)

    out = [torch.ones(3, 2), torch.ones(2, 6)]
    run(a, b, out, 0.5)
    torch.testing.assert_close(out, [x @ y + 0.5 for x, y in zip(a, b, strict=True)])
    with pytest.raises(Exception, match="out = None: is read, because beta = 2"):
        run(a, b, None, 2)
    with pytest.raises(Exception, match=r"b\[1\] = an array of shape \[4\]: must have 2 axes"):
        run(a, [b[0], b[1][:, 0]], out, 0)
    with pytest.raises(Exception, match=r"out\[0\].*must have memory of its own"):
        run(a, b, [torch.ones(3, 1).expand(3, 2), out[1]], 0)


def test_lists_that_are_refused() -> None:
    a, b = listed()
    with pytest.raises(kernelseam.errors.InvalidValue, match=r"b\[1\] = int: must be a torch tens"):
        ks.grouped_mm_list(a[:2], [b[0], 3])
    with pytest.raises(kernelseam.errors.InvalidValue, match="b = 1 arrays: a has 4"):
        ks.grouped_mm_list(a, b[:1])
    with pytest.raises(kernelseam.errors.UnknownName, match="bwd_implementation = x: must be one"):
        ks.grouped_mm_list(a, b, bwd_implementation="x")
    assert ks.grouped_mm_list([], []) == []
    for name in ("bwd_implementation", "implementation", "precision"):
        with pytest.raises(kernelseam.errors.InvalidValue, match=f"^{name} = (3|int): must be "):
            ks.grouped_mm_list([], [], **{name: 3})


@pytest.mark.parametrize("model", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_experts_of_models(model: str) -> None:
    hf = pytest.importorskip("transformers", reason="transformers is missing")
    pytest.importorskip(
        "transformers.integrations.moe", reason="transformers has no experts interface"
    )
    from kernelseam.interop import transformers as interop
    from kernelseam.interop.transformers_experts import _epilogue

    interop.register()
    names = {"mixtral": "Mixtral", "qwen3_moe": "Qwen3Moe", "gpt_oss": "GptOss"}
    sizes = {"hidden_size": 32, "intermediate_size": 24, "moe_intermediate_size": 24}
    config = getattr(hf, f"{names[model]}Config")(
        **sizes,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=64,
        num_local_experts=6,
        num_experts=6,
        num_experts_per_tok=2,
    )
    torch.manual_seed(0)
    made = getattr(hf, f"{names[model]}ForCausalLM")(config).float()
    tokens = torch.randint(0, 64, (2, 9))
    results = []
    for implementation in ("eager", interop.NAME):
        made.set_experts_implementation(implementation)
        experts = made.model.layers[0].mlp.experts
        assert (_epilogue(experts, "gate_up_proj") is None) == (model == "gpt_oss")
        made.zero_grad()
        logits = made(tokens).logits
        logits.square().sum().backward()
        results.append((logits.detach(), [p.grad.clone() for p in made.parameters()]))
    (wanted, their), (found, mine) = results
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    for x, y in zip(mine, their, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4 * float(y.abs().max()) + 1e-6)


ACTIVATIONS = {
    "SiLU": torch.nn.functional.silu,
    "GELUActivation": torch.nn.functional.gelu,
    "NewGELUActivation": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "ReLUSquaredActivation": lambda x: torch.relu(x).square(),
    "Tanh": torch.tanh,
}


@pytest.mark.parametrize(
    ("name", "gated", "bias", "fused"),
    [
        ("SiLU", True, None, True),
        ("GELUActivation", True, "constant", True),
        ("NewGELUActivation", True, "learnt", False),
        ("ReLUSquaredActivation", False, None, True),
        ("SiLU", False, "constant", True),
        ("Tanh", True, None, False),
    ],
)
def test_gates_of_experts(name: str, gated: bool, bias: str | None, fused: bool) -> None:
    """Within the first product where they can be; compiled, too, with gradients."""
    from kernelseam.interop import transformers_experts as ours

    moe = pytest.importorskip(
        "transformers.integrations.moe", reason="transformers has no experts interface"
    )
    generator = torch.Generator().manual_seed(3)

    def drawn(*shape: int) -> Any:
        return torch.nn.Parameter(torch.randn(*shape, generator=generator) / 3)

    class Experts(torch.nn.Module):  # type: ignore[misc]
        num_experts, has_gate, is_transposed = 3, gated, name == "SiLU"
        has_bias, has_post_expert_norm, _is_expert_parallel = bias is not None, False, False
        _apply_gate = moe._default_apply_gate

    here, first = Experts(), "gate_up_proj" if gated else "up_proj"
    here.act_fn = type(
        name, (torch.nn.Module,), {"forward": lambda self, x: ACTIVATIONS[name](x)}
    )()
    for part, shape in ((first, (3, 12 if gated else 6, 8)), ("down_proj", (3, 8, 6))):
        weight = drawn(*shape)
        setattr(here, part, torch.nn.Parameter(weight.mT) if here.is_transposed else weight)
        if bias:
            own = drawn(*shape[:2])
            setattr(here, f"{part}_bias", own.requires_grad_(bias == "learnt"))
    x, weights = drawn(5, 8), torch.rand(5, 2, generator=generator).requires_grad_()
    index = torch.randint(0, 3, (5, 2), generator=generator)
    assert (ours._epilogue(here, first) is not None) == fused
    wanting = [x, weights, *(p for p in here.parameters() if p.requires_grad)]
    wanted = moe.batched_mm_experts_forward(here, x, index, weights)
    theirs = torch.autograd.grad(wanted.square().sum(), wanting)
    torch._dynamo.reset()
    compiled = torch.compile(ours.experts_forward, fullgraph=True, backend="aot_eager")
    for forward in (ours.experts_forward, compiled):
        found = forward(here, x, index, weights)
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(torch.autograd.grad(found.square().sum(), wanting), theirs)


def test_experts_of_other_ranks_count_as_nothing() -> None:
    from kernelseam.interop.transformers_experts import experts_forward

    torch.manual_seed(1)

    class Experts(torch.nn.Module):  # type: ignore[misc]
        num_experts, has_gate, has_bias, is_transposed = 3, False, False, True
        _is_expert_parallel = True
        act_fn = staticmethod(torch.relu)

    here = Experts()
    here.up_proj, here.down_proj = torch.randn(3, 8, 6), torch.randn(3, 6, 8)
    x, weights = torch.randn(4, 8, requires_grad=True), torch.rand(4, 2)
    index = torch.tensor([[0, 3], [3, 3], [2, 1], [3, 0]])
    weights = weights.masked_fill(index == 3, 0)
    y = experts_forward(here, x, index, weights)
    wanted = torch.zeros_like(x)
    for t, k in ((0, 0), (2, 0), (2, 1), (3, 1)):
        e = index[t, k]
        row = torch.relu(x[t] @ here.up_proj[e]) @ here.down_proj[e] * weights[t, k]
        wanted = wanted.index_add(0, torch.tensor([t]), row[None])
    torch.testing.assert_close(y, wanted)
    torch.testing.assert_close(
        torch.autograd.grad(y.sum(), x), torch.autograd.grad(wanted.sum(), x)
    )
