"""A block by kernelseam, by torch with each of its backends, and by FlashAttention-3."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import Any

import kernelseam
import torch
import torch.nn.functional as F
from block import (
    DEVICE,
    DTYPE,
    SIZE,
    Block,
    Weights,
    block_table,
    empty_pages,
    norm,
    normal,
    on_gpu,
    rotated,
)
from kernelseam import Attention, plan
from kernelseam.interop import torch as seam
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


class Ours(Block):
    """One launch for q, k and v, rotated; one for the attention; one for output and residual; two
    for the MLP: gate, up and SwiGLU, and down with the residual."""

    name = "kernelseam"

    def qkv(self, x: Tensor) -> tuple[Tensor, ...]:
        heads = (SIZE.heads, SIZE.kv_heads, SIZE.head_dim)
        return seam.fused_qkv_projection(
            norm(x, self.w.norm), self.w.qkv, None, *heads, rotary=self.rotary, layout="bshd"
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return seam.attention(q, k, v, causal=True, layout="bshd", deterministic=False)

    def output(self, y: Tensor, x: Tensor) -> Tensor:
        return seam.fused_output_projection_residual(y, self.w.out, residual=x, layout="bshd")

    def mlp(self, x: Tensor) -> Tensor:
        rows = norm(x, self.w.norm_mlp).flatten(0, 1)
        hidden = seam.matmul2d(rows, self.w.gate_up, b_transposed=True, epilogue="swiglu")
        added = x.flatten(0, 1)
        return seam.matmul2d(hidden, self.w.down, b_transposed=True, residual=added).view_as(x)

    def fill(self, x: Tensor) -> None:
        self.pages = [torch.zeros_like(p) for p in empty_pages()]
        self.table = block_table()
        self.lengths = torch.full((SIZE.entries,), SIZE.prompt, dtype=torch.int32, device=DEVICE)
        rows = torch.arange(SIZE.prompt, dtype=torch.int32, device=DEVICE)
        self.project(x, rows.expand(SIZE.entries, -1).contiguous())
        # A plan for what is launched again and again: its call only launches.
        self.q = normal(SIZE.entries, 1, SIZE.heads, SIZE.head_dim)
        self.y = torch.empty_like(self.q)
        k_pages, v_pages = self.pages
        self.call = plan(
            Attention.from_arrays(
                self.q,
                k_pages,
                v_pages,
                self.y,
                layout="bshd",
                block_table=self.table,
                kv_lengths=self.lengths,
                max_seqlen_k=SIZE.prompt + SIZE.steps,
            )
        ).bind()

    def project(self, x: Tensor, positions: Tensor, out: Tensor | None = None) -> Tensor:
        """q; k and v go to their pages."""
        return kernelseam.fused_qkv_projection(
            norm(x, self.w.norm),
            self.w.qkv,
            None,
            SIZE.heads,
            SIZE.kv_heads,
            SIZE.head_dim,
            rotary=self.rotary,
            positions=positions,
            k_pages=self.pages[0],
            v_pages=self.pages[1],
            block_table=self.table,
            layout="bshd",
            out=out,
        )

    def step_qkv(self, x: Tensor, cached: int) -> tuple[Tensor, ...]:
        self.project(x, self.lengths[:, None], self.q)
        return ()

    def step_attend(self, cached: int, *of: Tensor) -> Tensor:
        self.lengths.add_(1)
        self.call()
        return self.y

    def rewind(self, cached: int) -> None:
        self.lengths.fill_(cached)


class Sdpa(Block):
    """torch's products and attention, by one backend of its own; a cache [B, H_kv, S, D]."""

    one_graph = False  # the keys that a step sees are a slice of the cache

    def __init__(self, w: Weights, rotary: tuple[Tensor, Tensor], backend: Any = None) -> None:
        super().__init__(w, rotary)
        self.backend = backend
        self.name = "torch" if backend is None else f"torch, {NAMES[backend]}"
        # cuDNN would plan every length anew
        self.decodes = backend is not SDPBackend.CUDNN_ATTENTION

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        z = SIZE
        heads = F.linear(norm(x, self.w.norm), self.w.qkv).unflatten(-1, (-1, z.head_dim))
        return tuple(heads.split([z.heads, z.kv_heads, z.kv_heads], dim=-2))

    def qkv(self, x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = self.split(x)
        cos, sin = (t[: x.shape[1]] for t in self.rotary)
        return rotated(q, cos, sin), rotated(k, cos, sin), v

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return self.sdpa(q, k, v, q.shape[2] == k.shape[2] > 1).transpose(1, 2)

    def sdpa(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        with nullcontext() if self.backend is None else sdpa_kernel(self.backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

    def fill(self, x: Tensor) -> None:
        shape = (SIZE.entries, SIZE.kv_heads, SIZE.prompt + SIZE.steps, SIZE.head_dim)
        self.cache = [normal(*shape) for _ in "kv"]
        for cached, rows in zip(self.cache, self.qkv(x)[1:], strict=True):
            cached[:, :, : SIZE.prompt] = rows.transpose(1, 2)

    def step_qkv(self, x: Tensor, cached: int) -> tuple[Tensor, ...]:
        q, k, v = self.split(x)
        cos, sin = (t[cached : cached + 1] for t in self.rotary)
        self.cache[0][:, :, cached] = rotated(k, cos, sin)[:, 0]
        self.cache[1][:, :, cached] = v[:, 0]
        return (rotated(q, cos, sin),)

    def step_attend(self, cached: int, *of: Tensor) -> Tensor:
        k, v = (x[:, :, : cached + 1] for x in self.cache)
        return self.sdpa(of[0].transpose(1, 2), k, v, False).transpose(1, 2)

    def rewind(self, cached: int) -> None:
        pass


NAMES = {SDPBackend.FLASH_ATTENTION: "flash", SDPBackend.CUDNN_ATTENTION: "cuDNN"}


class Flash3(Sdpa):
    """FlashAttention-3, which turns q and k of a step and puts k and v into pages itself."""

    one_graph = True

    def __init__(self, w: Weights, rotary: tuple[Tensor, Tensor]) -> None:
        super().__init__(w, rotary)
        self.name = "FlashAttention-3"
        self.interface: Any = __import__("flash_attn_interface")
        for function in ("flash_attn_func", "flash_attn_with_kvcache"):
            if not hasattr(self.interface, function):
                raise ImportError(f"flash_attn_interface has no {function}")
        self.turns = [t.to(DTYPE) for t in rotary]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result = self.interface.flash_attn_func(q, k, v, causal=True)
        return result[0] if isinstance(result, tuple) else result

    def fill(self, x: Tensor) -> None:
        self.pages = [torch.zeros_like(p) for p in empty_pages()]
        self.table = block_table()
        self.lengths = torch.full((SIZE.entries,), SIZE.prompt, dtype=torch.int32, device=DEVICE)
        row = torch.arange(SIZE.prompt, device=DEVICE)
        places = self.table[:, row // SIZE.page].long() * SIZE.page + row % SIZE.page
        for pages, rows in zip(self.pages, self.qkv(x)[1:], strict=True):
            pages.flatten(0, 1)[places] = rows

    def step_qkv(self, x: Tensor, cached: int) -> tuple[Tensor, ...]:
        return self.split(x)

    def step_attend(self, cached: int, *of: Tensor) -> Tensor:
        q, k, v = of
        result = self.interface.flash_attn_with_kvcache(
            q,
            *self.pages,
            k=k,
            v=v,
            rotary_cos=self.turns[0],
            rotary_sin=self.turns[1],
            cache_seqlens=self.lengths,
            page_table=self.table,
            causal=True,
            rotary_interleaved=False,
        )
        self.lengths.add_(1)
        return result[0] if isinstance(result, tuple) else result

    def rewind(self, cached: int) -> None:
        self.lengths.fill_(cached)


def available(w: Weights, rotary: tuple[Tensor, Tensor]) -> list[Any]:
    """Ours, then what else is here."""
    if not on_gpu:
        return [Ours(w, rotary), Sdpa(w, rotary)]
    blocks: list[Any] = [Ours(w, rotary), *(Sdpa(w, rotary, backend) for backend in NAMES)]
    try:
        blocks.append(Flash3(w, rotary))
    except (ImportError, OSError) as e:
        print(f"FlashAttention-3 is not here: {e}", file=sys.stderr)
    return blocks
