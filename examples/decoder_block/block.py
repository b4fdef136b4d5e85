"""The model: its extents and weights, what all implementations share, and a block of four parts of
which each has two of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import kernelseam
import torch
import torch.nn.functional as F
from torch import Tensor

Run = Callable[[], object]
on_gpu = torch.cuda.is_available() and any(d.backend != "numpy" for d in kernelseam.devices())
DEVICE, DTYPE = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)


class Extents(NamedTuple):
    """Of the block, of what is trained on (``batch`` × ``rows`` tokens), and of what is decoded:
    ``entries`` of ``prompt`` tokens, ``steps`` more each."""

    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    mlp: int
    batch: int
    rows: int
    entries: int
    prompt: int
    steps: int
    page: int


LLAMA_3_8B = Extents(32, 8, 128, 4096, 14336, 2, 8192, 16, 3584, 512, 16)
SMALL = Extents(4, 2, 16, 64, 160, 2, 48, 3, 40, 24, 8)
SIZE = LLAMA_3_8B if on_gpu else SMALL
TIMES = 16
"""A part of a step is launched from one graph, whose replay is timed."""
PARTS = ("norm, q, k, v", "attention", "output", "norm, MLP")
OFF = 2e-2 if on_gpu else 1e-4
"""How far a decoded row, or a gradient beside torch's, may be off, of its norm."""


class Weights(NamedTuple):
    """As torch.nn.Linear has them; gate and up in one."""

    norm: Tensor
    qkv: Tensor
    out: Tensor
    norm_mlp: Tensor
    gate_up: Tensor
    down: Tensor


def weights() -> Weights:
    z, columns = SIZE, SIZE.heads * SIZE.head_dim

    def linear(rows: int, columns: int) -> Tensor:
        return normal(rows, columns) * columns**-0.5

    return Weights(
        torch.ones(z.hidden, device=DEVICE, dtype=DTYPE),
        linear((z.heads + 2 * z.kv_heads) * z.head_dim, z.hidden),
        linear(z.hidden, columns),
        torch.ones(z.hidden, device=DEVICE, dtype=DTYPE),
        linear(2 * z.mlp, z.hidden),
        linear(z.hidden, z.mlp),
    )


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=DTYPE)


def angles() -> tuple[Tensor, Tensor]:
    """Cosines and sines [positions, D/2]."""
    half = torch.arange(SIZE.head_dim // 2, dtype=torch.float64)
    most = max(SIZE.rows, SIZE.prompt + SIZE.steps)
    turns = torch.arange(most)[:, None] * 500000 ** (-2 * half / SIZE.head_dim)
    return turns.cos().float().to(DEVICE), turns.sin().float().to(DEVICE)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (SIZE.hidden,), weight, 1e-5)


def swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [B, S, heads, D]: column i pairs with column i + D/2."""
    a, b = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


if not on_gpu:
    torch.set_num_threads(1)  # more cost a block as small as this more than they bring
else:  # one kernel each, forward and backward, for all implementations; torch's norm is one
    swiglu, rotated = (torch.compile(f, dynamic=False) for f in (swiglu, rotated))


class Block:
    """The four parts of a block; an implementation has its own of the first two. x is
    [B, S, hidden]; heads stand after rows."""

    name = ""

    def __init__(self, w: Weights, rotary: tuple[Tensor, Tensor]) -> None:
        self.w, self.rotary = w, rotary

    def qkv(self, x: Tensor) -> tuple[Tensor, ...]:
        """Turned q and k, and v, of as many positions as there are rows."""
        raise NotImplementedError

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise NotImplementedError

    def output(self, y: Tensor, x: Tensor) -> Tensor:
        return F.linear(y.flatten(-2), self.w.out) + x

    def mlp(self, x: Tensor) -> Tensor:
        normed = norm(x, self.w.norm_mlp)
        return F.linear(swiglu(F.linear(normed, self.w.gate_up)), self.w.down) + x

    def __call__(self, x: Tensor) -> Tensor:
        return self.mlp(self.output(self.attend(*self.qkv(x)), x))

    # A step of decoding: one row x [B, 1, hidden] of each entry behind the ``cached`` rows, in a
    # cache that ``fill`` makes of the rows of a prompt.

    def fill(self, x: Tensor) -> None:
        raise NotImplementedError

    def step_qkv(self, x: Tensor, cached: int) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def step_attend(self, cached: int, *of: Tensor) -> Tensor:
        raise NotImplementedError

    def rewind(self, cached: int) -> None:
        """So many rows are cached."""
        raise NotImplementedError

    one_graph = True
    """Whether one graph serves all steps, whose number is in device memory alone."""
    decodes = True


def empty_pages() -> tuple[Tensor, Tensor]:
    pages = SIZE.entries * -(-(SIZE.prompt + SIZE.steps) // SIZE.page)
    shape = (pages, SIZE.page, SIZE.kv_heads, SIZE.head_dim)
    return normal(*shape), normal(*shape)


def block_table() -> Tensor:
    """Every entry's pages, in any order."""
    generator = torch.Generator().manual_seed(0)
    width = -(-(SIZE.prompt + SIZE.steps) // SIZE.page)
    order = torch.randperm(SIZE.entries * width, generator=generator).to(torch.int32)
    return order.reshape(SIZE.entries, width).to(DEVICE)


def off(actual: Tensor, exact: Tensor) -> float:
    return float((actual - exact).double().norm() / exact.double().norm())
