"""One transformer layer in bfloat16, forward and backward, each gradient held against torch's
autograd in float64.

The layer is that of today's language models: RMS norm, grouped KV heads, rotary embedding, causal
attention, SwiGLU. The projections (the first turns q and k as well), the attention and their
gradients are kernelseam's; norms and SwiGLU are torch's. The same layer is run by torch alone: in
float64, to which the gradients are held, and in bfloat16, to compare.

Needs torch. On a GPU where torch sees one and its plugin is installed, else on the CPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NamedTuple

try:
    import kernelseam
    import torch
    import torch.nn.functional as F
    from kernelseam.interop import torch as seam
    from torch import Tensor
except ModuleNotFoundError as e:
    raise SystemExit(f"{e.name} is missing: pip install kernelseam torch") from None

BATCH, LENGTH, WIDTH, HEADS, KV_HEADS, HEAD_DIM, FFN = 2, 160, 512, 8, 2, 64, 1408
# In units of bfloat16's rounding, 2⁻⁸. A gradient has passed through some twenty tensors that were
# each rounded, by a third of a unit on average: √20 / 3 ≈ 1.5 units of its norm. No element may be
# off by more than a few of its largest.
UNIT, NORM_UNITS, ELEMENT_UNITS = 2.0**-8, 3, 4
on_gpu = torch.cuda.is_available() and any(d.backend != "numpy" for d in kernelseam.devices())
DEVICE = "cuda" if on_gpu else "cpu"


class Ops(NamedTuple):
    """Where the layer's three calls go. Heads stand after rows: q, k, v and the attention are [B,
    S, heads, D]."""

    qkv: Callable[..., tuple[Tensor, Tensor, Tensor]]
    attention: Callable[..., Tensor]
    out: Callable[..., Tensor]


def rotary_tables() -> tuple[Tensor, Tensor]:
    """Cosines and sines [S, D/2]: in row s, pair i of a head's columns turns by s·10000^(−2i/D)."""
    half = torch.arange(HEAD_DIM // 2, dtype=torch.float64)
    angles = torch.arange(LENGTH)[:, None] * 10000 ** (-2 * half / HEAD_DIM)
    return angles.cos().float().to(DEVICE), angles.sin().float().to(DEVICE)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [B, S, heads, D]: column i pairs with column i + D/2."""
    a, b = x.to(torch.promote_types(x.dtype, cos.dtype)).chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def torch_qkv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    rotary: tuple[Tensor, Tensor],
    layout: str,
) -> tuple[Tensor, Tensor, Tensor]:
    heads = F.linear(x, weight, bias).unflatten(-1, (-1, head_dim))
    q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=-2)
    return rotated(q, *rotary), rotated(k, *rotary), v


def torch_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, layout: str) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True).transpose(
        1, 2
    )


def torch_out(
    attention: Tensor, weight: Tensor, bias: Tensor, residual: Tensor, *, layout: str
) -> Tensor:
    return F.linear(attention.flatten(-2), weight, bias) + residual


KERNELSEAM = Ops(seam.fused_qkv_projection, seam.attention, seam.fused_output_projection_residual)
TORCH = Ops(torch_qkv, torch_attention, torch_out)


def layer(p: dict[str, Tensor], ops: Ops) -> Tensor:
    """Of p["x"] [B, S, WIDTH], in the same shape."""
    x = p["x"]
    normed = F.rms_norm(x, (WIDTH,), p["attention norm"], 1e-6)
    q, k, v = ops.qkv(
        normed,
        p["qkv weight"],
        p["qkv bias"],
        HEADS,
        KV_HEADS,
        HEAD_DIM,
        rotary=rotary_tables(),
        layout="bshd",
    )
    seen = ops.attention(q, k, v, causal=True, layout="bshd")
    x = ops.out(seen, p["out weight"], p["out bias"], x, layout="bshd")
    normed = F.rms_norm(x, (WIDTH,), p["ffn norm"], 1e-6)
    return x + F.linear(F.silu(F.linear(normed, p["gate"])) * F.linear(normed, p["up"]), p["down"])


def parameters() -> dict[str, Tensor]:
    """Input, parameters and the gradient that comes in, in float64 with values that bfloat16
    has."""
    torch.manual_seed(0)
    rows = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    weights = {
        "x": torch.randn(BATCH, LENGTH, WIDTH),
        "attention norm": 1 + 0.1 * torch.randn(WIDTH),
        "qkv weight": torch.randn(rows, WIDTH) / WIDTH**0.5,
        "qkv bias": 0.1 * torch.randn(rows),
        "out weight": torch.randn(WIDTH, HEADS * HEAD_DIM) / (HEADS * HEAD_DIM) ** 0.5,
        "out bias": 0.1 * torch.randn(WIDTH),
        "ffn norm": 1 + 0.1 * torch.randn(WIDTH),
        "gate": torch.randn(FFN, WIDTH) / WIDTH**0.5,
        "up": torch.randn(FFN, WIDTH) / WIDTH**0.5,
        "down": torch.randn(WIDTH, FFN) / FFN**0.5,
        "d result": torch.randn(BATCH, LENGTH, WIDTH),
    }
    return {name: x.bfloat16().double().to(DEVICE) for name, x in weights.items()}


def differentiated(values: dict[str, Tensor], ops: Ops, dtype: torch.dtype) -> dict[str, Tensor]:
    """The layer's result and the gradients of everything that goes in, computed in ``dtype``, as
    float64."""
    p = {name: x.to(dtype, copy=True).requires_grad_() for name, x in values.items()}
    y = layer(p, ops)
    y.backward(p.pop("d result").detach())
    grown = {name: x.grad for name, x in p.items() if x.grad is not None}
    assert grown.keys() == p.keys(), f"no gradient reached {p.keys() - grown.keys()}"
    return {"result": y.detach().double()} | {f"d {name}": g.double() for name, g in grown.items()}


def units_off(actual: Tensor, exact: Tensor) -> tuple[float, float]:
    """The error's norm beside the norm, and its largest element beside the largest, in units of
    bfloat16's rounding."""
    error = actual - exact
    return (error.norm() / exact.norm()).item() / UNIT, (
        error.abs().max() / exact.abs().max()
    ).item() / UNIT


def main() -> None:
    values = parameters()
    print("the layer by torch in float64 and bfloat16, then by kernelseam …", file=sys.stderr)
    exact = differentiated(values, TORCH, torch.float64)
    plain = differentiated(values, TORCH, torch.bfloat16)
    with kernelseam.trace() as launches:
        ours = differentiated(values, KERNELSEAM, torch.bfloat16)
    print(
        f"on {DEVICE}: {HEADS} heads on {KV_HEADS}, dim {HEAD_DIM}, {BATCH} × {LENGTH} tokens of "
        f"{WIDTH}, "
        f"{len(launches)} launches forward and backward:"
    )
    print(", ".join(record.kernel for record in launches))
    print(
        f"{'off from float64, in 2⁻⁸':28}{'norm':>6}{'largest':>9}   torch "
        f"bfloat16:{'norm':>6}{'largest':>9}"
    )
    worst_norm = worst_element = 0.0
    for name, reference in exact.items():
        (norm, element), (torch_norm, torch_element) = (
            units_off(x[name], reference) for x in (ours, plain)
        )
        print(f"{name:28}{norm:6.2f}{element:9.2f}{torch_norm:24.2f}{torch_element:9.2f}")
        worst_norm, worst_element = max(worst_norm, norm), max(worst_element, element)
    print(
        f"within {NORM_UNITS} and {ELEMENT_UNITS}: {worst_norm:.2f} and {worst_element:.2f} at most"
    )
    assert worst_norm <= NORM_UNITS and worst_element <= ELEMENT_UNITS


if __name__ == "__main__":
    main()
