"""Small calls of every operator of torch.ops.kernelseam, for the tests of what torch does with
them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import kernelseam
import torch
from kernelseam.epilogues import epilogue_expression
from kernelseam.expressions.epilogues import epilogue_text
from kernelseam.expressions.scores import score_expression
from kernelseam.expressions.text import text_of
from kernelseam.interop import torch as ks
from kernelseam.interop.torch_library import handover  # noqa: F401  defines all operators
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

B, H, G, S_Q, S_K, D, D_V = 2, 4, 2, 6, 9, 8, 8
HIDDEN, WIDTH = 12, (H + 2 * G) * D


def cells(*shape: int, seed: int = 0, grad: bool = True) -> Any:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed + len(shape)))
    return made.requires_grad_(grad)


def several(made: Any) -> tuple[Any, ...]:
    return made if isinstance(made, tuple) else (made,)


def ints(*values: Any) -> Any:
    return torch.tensor(values, dtype=torch.int32)


def qkv(grad: bool = True) -> tuple[Any, Any, Any]:
    return (
        cells(B, H, S_Q, D, seed=1, grad=grad),
        cells(B, G, S_K, D, seed=2, grad=grad),
        cells(B, G, S_K, D_V, seed=3, grad=grad),
    )


def packed(grad: bool = True) -> tuple[Any, ...]:
    """Rows of two sequences, of 2 and 4 queries over 5 and 4 keys, with rows of none behind."""
    q, k, v = (
        cells(7, H, D, seed=1, grad=grad),
        cells(10, G, D, seed=2, grad=grad),
        cells(10, G, D_V, seed=3, grad=grad),
    )
    return q, k, v, ints(0, 2, 6), ints(0, 5, 9)


def pages() -> tuple[Any, ...]:
    return (
        cells(B, 1, H, D, seed=1, grad=False),
        cells(5, 4, G, D, seed=2, grad=False),
        cells(5, 4, G, D_V, seed=3, grad=False),
        ints([3, 1, 0], [4, 2, 0]),
        ints(9, 6),
    )


def rotary() -> tuple[Any, Any]:
    at = torch.arange(20)[:, None] / 10.0 ** (torch.arange(D // 2) / (D // 2))
    return torch.cos(at), torch.sin(at)


def projected() -> tuple[Any, Any, Any]:
    return cells(B, S_Q, HIDDEN), cells(WIDTH, HIDDEN, seed=4), cells(WIDTH)


def states() -> tuple[Any, Any]:
    lses = cells(3, B, H, S_Q, seed=5, grad=False)
    lses[1, 0, 0, 0] = -torch.inf
    return cells(3, B, H, S_Q, D_V), lses.requires_grad_()


Sample = tuple[str, tuple[Any, ...], dict[str, Any]]
_HEADS = {"num_heads": H, "num_kv_heads": G, "head_dim": D}


def samples() -> dict[str, Sample]:
    """Operator, operands and options by a name."""
    q, k, v = qkv()
    bias, sinks = cells(H, S_Q, S_K), cells(H)
    mask = torch.rand(B, 1, S_Q, S_K, generator=torch.Generator().manual_seed(1)) < 0.7
    plain = tuple(x.detach() for x in (q, k, v))
    made, lse = ks.attention(*plain, causal=True, return_lse=True)
    rows = packed()
    q3, k3, v3, at, of = packed(False)
    some, some_lse = ks.attention_varlen(q3, k3, v3, at, of, 4, 5, causal=True, return_lse=True)
    longest = {"max_seqlen_q": 4, "max_seqlen_k": 5}
    x, w, b = projected()
    a2, b2 = cells(5, 7), cells(7, 4)
    a3, b3 = cells(B, 5, 7), cells(B, 7, 4)
    heads = cells(B, H, S_Q, D)
    tokens, out_w = cells(B, S_Q, HIDDEN), cells(HIDDEN, H * D)
    d = (*(cells(B, n, S_Q, D, seed=n) for n in (H, G, G)),)
    k_pages, v_pages = (torch.zeros(4, 4, G, D) for _ in range(2))
    table = ints([0, 1], [2, 3])
    table_of_heads = torch.linspace(0.1, 0.5, H)
    mod = score_expression(lambda s, b, h, i, j: s + table_of_heads[h] * (i - j))
    of_mods = {"expression": text_of(mod.structure), "captured_numbers": []}
    swiglu = epilogue_expression("swiglu")
    own = epilogue_expression(lambda acc, m, n, batch: torch.sin(acc) * table_of_heads[n] + 0.5 * m)
    of_epilogue = {"expression": epilogue_text(own.structure), "captured_numbers": []}
    return {
        "attention": ("attention", (q, k, v), {"causal": True}),
        "attention-options": (
            "attention",
            (q, k, v, bias, mask, None, sinks, None, ints(9, 5)),
            {"softcap": 2.0, "window_left": 5, "scale": 0.3},
        ),
        "attention-no-lse": (
            "attention",
            tuple(x.transpose(1, 2) for x in plain),
            {"return_lse": False, "layout": "bshd", "out_dtype": torch.float32},
        ),
        "attention_bwd": (
            "attention_bwd",
            (made.clone(), lse.clone(), made, lse, *plain),
            {"causal": True, "bias_gradient": False, "sink_gradient": False},
        ),
        "attention_varlen": ("attention_varlen", rows, {"causal": True, **longest}),
        "attention_varlen_bwd": (
            "attention_varlen_bwd",
            (some.clone(), None, some, some_lse, *(x.detach() for x in rows)),
            {"causal": True, "bias_gradient": False, "sink_gradient": False, **longest},
        ),
        "attention_paged": ("attention_paged", pages(), {"causal": True}),
        "attention-mods": ("attention_mods", (q, k, v, *[None] * 10, table_of_heads), of_mods),
        "attention_bwd-mods": (
            "attention_bwd_mods",
            (made.clone(), lse.clone(), made, lse, *plain, *[None] * 6, table_of_heads),
            {"bias_gradient": False, "sink_gradient": False, **of_mods},
        ),
        "attention_varlen-mods": (
            "attention_varlen_mods",
            (*rows, *[None] * (14 - len(rows)), table_of_heads),
            {**longest, **of_mods},
        ),
        "attention_varlen_bwd-mods": (
            "attention_varlen_bwd_mods",
            (some.clone(), None, some, some_lse, q3, k3, v3, at, of, *[None] * 5, table_of_heads),
            {"bias_gradient": False, "sink_gradient": False, **longest, **of_mods},
        ),
        "attention_paged-mods": (
            "attention_paged_mods",
            (*pages(), *[None] * (15 - len(pages())), table_of_heads),
            of_mods,
        ),
        "bmm": ("bmm", (a3, b3, cells(4), cells(B, 5, 4)), {"alpha": 0.5}),
        "bmm-transposed": ("bmm", (a3, b3.detach().mT), {"b_transposed": True}),
        "bmm_bwd": (
            "bmm_bwd",
            (cells(B, 5, 4, grad=False), a3.detach(), b3.detach()),
            {"a_gradient": True, "b_gradient": False},
        ),
        "bmm-epilogue": (
            "bmm_epilogue",
            (a3, b3, cells(4), *[None] * 5, table_of_heads),
            {"alpha": 0.5, "keep_preactivation": True, **of_epilogue},
        ),
        "matmul2d-epilogue": (
            "matmul2d_epilogue",
            (a2.detach(), b2.detach(), *[None] * 6, table_of_heads),
            {"out_dtype": torch.float64, **of_epilogue},
        ),
        "epilogue_bwd-gate": (
            "epilogue_bwd",
            (cells(5, 2, grad=False), cells(5, 4, grad=False)),
            {"expression": epilogue_text(swiglu.structure), "captured_numbers": []},
        ),
        "epilogue_bwd-groups": (
            "epilogue_bwd",
            (cells(5, 4, grad=False), cells(5, 4, grad=False), ints(2, 5), table_of_heads),
            of_epilogue,
        ),
        "matmul2d": ("matmul2d", (a2, b2, cells(4)), {"out_dtype": torch.float64}),
        "matmul2d_bwd": (
            "matmul2d_bwd",
            (cells(5, 4, grad=False), a2.detach(), b2.detach()),
            {"a_gradient": True, "b_gradient": True},
        ),
        "grouped_mm": ("grouped_mm", (a2, cells(3, 7, 4), ints(2, 2, 5)), {"alpha": 0.5}),
        "grouped_mm-summed": ("grouped_mm", (cells(5, 7), cells(7, 4), ints(0, 3, 7)), {}),
        "grouped_mm-epilogue": (
            "grouped_mm_epilogue",
            (
                *(a2, cells(3, 7, 4), ints(2, 2, 6), None, None, ints(0, 4, 4, 1, 2, 3)),
                *(ints(5, 3, 1, 0, 2, 4), cells(6), None, None, table_of_heads),
            ),
            {"alpha": 0.5, "keep_preactivation": True, **of_epilogue},
        ),
        "grouped_mm_list": (
            "grouped_mm_list",
            ([a2, cells(6, HIDDEN)], [b2, cells(HIDDEN, 3)]),
            {},
        ),
        "fused_qkv_projection": (
            "fused_qkv_projection",
            (x, w, b, *rotary()),
            {"num_heads": H, "num_kv_heads": G, "first_position": 3},
        ),
        "fused_qkv_projection_bwd": (
            "fused_qkv_projection_bwd",
            (*(y.detach() for y in d), x.detach(), w.detach()),
            {"has_bias": True, "input_gradient": True, "weight_gradient": True, **_HEADS},
        ),
        "fused_qkv_projection_paged": (
            "fused_qkv_projection_paged",
            (x.detach(), w.detach(), k_pages, v_pages, table, b.detach()),
            {"num_heads": H, "num_kv_heads": G},
        ),
        "fused_output_projection_residual": (
            "fused_output_projection_residual",
            (heads, out_w, cells(HIDDEN), tokens),
            {},
        ),
        "fused_output_projection_residual_bwd": (
            "fused_output_projection_residual_bwd",
            (tokens.detach(), heads.detach(), out_w.detach()),
            {"has_bias": True, "input_gradient": True, "weight_gradient": True},
        ),
        "merge_states": ("merge_states", states(), {}),
        "append_paged-q": (
            "append_paged",
            (
                *(d[1].detach().transpose(1, 2), None, k_pages.clone(), None, None, None),
                *(None, table, ints(8, 8), None, None, d[0].detach().transpose(1, 2)),
                *(torch.ones(D), torch.ones(D), *rotary()),
            ),
            {"norm_eps": 1e-5},
        ),
        "gather_paged-dense": (
            "gather_paged",
            (k_pages, v_pages, None, table),
            {"max_seqlen_k": 5, "out_dtype": torch.float64},
        ),
        "copy_pages-both": ("copy_pages", (k_pages.clone(), v_pages.clone(), ints(0), ints(3)), {}),
    }


class Function(NamedTuple):
    """A function on arrays, its operands, and which of them have gradients through ``ks``'s."""

    plain: Callable[..., Any]
    differentiable: Callable[..., Any] | None
    operands: tuple[Any, ...]


def functions() -> dict[str, Function]:
    """Every function, on arrays and as torch differentiates it, over the same operands."""
    q, k, v = qkv()
    rows = packed()
    x, w, b = projected()
    heads, out_w, tokens = cells(B, H, S_Q, D), cells(HIDDEN, H * D), cells(B, S_Q, HIDDEN)

    def attention(home: Any) -> Callable[..., Any]:
        return lambda q, k, v: home.attention(q, k, v, causal=True, window=(5, None))

    def varlen(home: Any) -> Callable[..., Any]:
        """Without the row of no sequence, which the plain function does not write."""
        return lambda *x: home.attention_varlen(*x, 4, 5, causal=True)[:6]

    def qkv_projection(home: Any) -> Callable[..., Any]:
        return lambda x, w, b: home.fused_qkv_projection(x, w, b, H, G, rotary=rotary())

    def output(home: Any) -> Callable[..., Any]:
        return lambda *x: home.fused_output_projection_residual(x[0], x[1], residual=x[2])

    return {
        "attention": Function(attention(kernelseam), attention(ks), (q, k, v)),
        "attention_varlen": Function(varlen(kernelseam), varlen(ks), rows),
        "attention_paged": Function(kernelseam.attention_paged, None, pages()),
        "bmm": Function(kernelseam.bmm, ks.bmm, (cells(B, 5, 7), cells(B, 7, 4))),
        "matmul2d": Function(kernelseam.matmul2d, ks.matmul2d, (cells(5, 7), cells(7, 4))),
        "grouped_mm": Function(
            kernelseam.grouped_mm, ks.grouped_mm, (cells(5, 7), cells(3, 7, 4), ints(2, 2, 5))
        ),
        "grouped_mm_list": Function(
            lambda a, b, c, d: tuple(kernelseam.grouped_mm_list([a, c], [b, d])),
            lambda a, b, c, d: tuple(ks.grouped_mm_list([a, c], [b, d])),
            (cells(5, 7), cells(7, 4), cells(6, HIDDEN), cells(HIDDEN, 3)),
        ),
        "fused_qkv_projection": Function(qkv_projection(kernelseam), qkv_projection(ks), (x, w, b)),
        "fused_output_projection_residual": Function(
            output(kernelseam), output(ks), (heads, out_w, tokens)
        ),
        "merge_states": Function(kernelseam.merge_states, ks.merge_states, states()),
    }


def gradient_functions() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """The gradients on arrays, and operands: what has no gradients of its own."""
    on_arrays: Any = kernelseam
    q, k, v = qkv(False)
    out, lse = kernelseam.attention(q, k, v, causal=True, return_lse=True)
    q3, k3, v3, at, of = packed(False)
    longest = {"max_seqlen_q": 4, "max_seqlen_k": 5}
    some, some_lse = on_arrays.attention_varlen(q3, k3, v3, at, of, **longest, return_lse=True)
    bias = cells(1, S_Q, S_K, grad=False).expand(H, S_Q, S_K)
    a, b, dc = (cells(*s, grad=False) for s in ((B, 5, 7), (B, 7, 4), (B, 5, 4)))
    heads = tuple(cells(B, n, S_Q, D, seed=n, grad=False) for n in (H, G, G))
    x, w, _ = (y.detach() for y in projected())
    rows, columns = cells(B, S_Q, HIDDEN, grad=False), cells(HIDDEN, H * D, grad=False)

    def dense(*operands: Any) -> Any:
        made = on_arrays.attention_bwd(*operands, bias=bias, causal=True, bias_gradient=True)
        return made[:4]

    def varlen(*operands: Any) -> Any:
        """Without the rows of no sequence."""
        made = on_arrays.attention_bwd(
            *operands, cu_seqlens_q=at, cu_seqlens_k=of, **longest, causal=True
        )
        return made.dq[:6], made.dk[:9], made.dv[:9]

    return {
        "attention_bwd": (dense, (cells(*out.shape, grad=False), q, k, v, out, lse)),
        "attention_bwd packed": (
            varlen,
            (cells(*some.shape, grad=False), q3, k3, v3, some, some_lse),
        ),
        "bmm_bwd": (lambda *x: tuple(on_arrays.bmm_bwd(*x, alpha=0.5)), (dc, a, b)),
        "bmm_bwd repeated": (
            lambda dc, a, b: tuple(on_arrays.bmm_bwd(dc, a[:1].expand(B, 5, 7), b)),
            (dc, a, b),
        ),
        "matmul2d_bwd": (
            lambda *x: (on_arrays.matmul2d_bwd(*x, b_gradient=False).da,),
            (dc[0], a[0], b[0]),
        ),
        "fused_qkv_projection_bwd": (
            lambda *y: tuple(on_arrays.fused_qkv_projection_bwd(*y, True, H, G, D)),
            (*heads, x, w),
        ),
        "fused_output_projection_residual_bwd": (
            lambda *y: tuple(on_arrays.fused_output_projection_residual_bwd(*y, False))[:2],
            (rows, heads[0], columns),
        ),
    }


def in_mode(function: Any, *given: Any) -> Any:
    """Of a call that torch follows operation by operation."""
    with FlopCounterMode(display=False):
        return function(*given)


def on_fakes(function: Any, *given: Any) -> Any:
    with FakeTensorMode() as mode:
        return function(*map(mode.from_tensor, given))
