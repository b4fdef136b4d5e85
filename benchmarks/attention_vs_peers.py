"""Attention's gradients beside torch's FlashAttention-2 and cuDNN, and paged decoding in bytes per second, on one GPU.

Times are medians of device events; ratios are peer time over our time. TFLOP/s count 2.5 × the forward's operations, a
causal mask half; GB/s count K and V read once.

    python benchmarks/attention_vs_peers.py [--report FILE.md] [--repeat-ms 60]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.testing import do_bench

import kernelseam as ks

GRADIENTS = [  # batch, heads, S, D, causal
    (4, 16, 4096, 128, False), (4, 16, 4096, 128, True), (4, 32, 4096, 64, False), (4, 32, 4096, 64, True),
    (4, 8, 4096, 256, True),
]
PAGED = [  # batch, keys, heads, KV heads, D, page size
    (64, 8192, 32, 8, 128, 16), (64, 8192, 32, 8, 128, 256), (16, 2048, 32, 8, 128, 16), (1, 32768, 32, 8, 128, 16),
]
PEERS = {"FA2": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}


def median_ms(run: Callable[[], object], repeat_ms: int) -> float:
    return float(do_bench(run, warmup=25, rep=repeat_ms, return_mode="median"))


def relative_error(ours: torch.Tensor, peer: torch.Tensor) -> float:
    return float((ours.float() - peer.float()).norm() / peer.float().norm())


def gradient_row(case: tuple[int, int, int, int, bool], repeat_ms: int) -> str:
    batch, heads, s, d, causal = case
    q, k, v, dout, out, dq, dk, dv = (
        torch.randn(batch, heads, s, d, device="cuda", dtype=torch.bfloat16) for _ in range(8)
    )
    lse = torch.empty(batch, heads, s, device="cuda")
    forward = ks.Attention.from_arrays(q, k, v, out, lse, causal=causal)
    ks.plan(forward).bind()()
    call = ks.plan(ks.AttentionBwd(forward=forward, dout=dout, dq=dq, dk=dk, dv=dv)).bind()
    ours = median_ms(call, repeat_ms)
    flops = 10 * batch * heads * s * s * d * (0.5 if causal else 1.0)
    cells = []
    for backend in PEERS.values():
        inputs = tuple(x.clone().requires_grad_() for x in (q, k, v))
        with sdpa_kernel(backend):
            result = functional.scaled_dot_product_attention(*inputs, is_causal=causal)

        def peer(result: torch.Tensor = result, inputs: tuple[torch.Tensor, ...] = inputs) -> tuple[torch.Tensor, ...]:
            return torch.autograd.grad(result, inputs, dout, retain_graph=True)

        theirs = median_ms(peer, repeat_ms)
        error = max(relative_error(x, y) for x, y in zip((dq, dk, dv), peer(), strict=True))
        cells.append(f"{theirs * 1e3:.0f} | {theirs / ours:.2f} | {error:.1e}")
    name = f"B{batch} H{heads} S{s} D{d}{' causal' if causal else ''}"
    return f"| {name} | {ours * 1e3:.0f} | {flops / ours / 1e9:.0f} | {' | '.join(cells)} |"


def paged_row(case: tuple[int, int, int, int, int, int], repeat_ms: int) -> str:
    batch, keys, heads, kv_heads, d, page = case
    each = -(-keys // page)
    k, v = (torch.randn(batch * each, page, kv_heads, d, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    table = torch.randperm(batch * each, device="cuda").to(torch.int32).reshape(batch, each)
    lengths = torch.full((batch,), keys, dtype=torch.int32, device="cuda")
    q = torch.randn(batch, 1, heads, d, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(q)
    plan = ks.plan(
        ks.Attention.from_arrays(q, k, v, out, layout="bshd", block_table=table, kv_lengths=lengths, max_seqlen_k=keys)
    )
    ms = median_ms(plan.bind(), repeat_ms)
    gathered = (x[table.long()].reshape(batch, each * page, kv_heads, d)[:, :keys].transpose(1, 2) for x in (k, v))
    dense = functional.scaled_dot_product_attention(
        q.transpose(1, 2).float(), *(x.float() for x in gathered), enable_gqa=True
    ).transpose(1, 2)
    size = 2 * batch * keys * kv_heads * d * 2
    return (
        f"| B{batch} × {keys} H{heads}/{kv_heads} D{d} page {page} | {ms * 1e3:.1f} | {size / ms / 1e6:.0f} "
        f"| {len(plan.launches)} | {relative_error(out, dense):.1e} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", type=Path)
    parser.add_argument("--repeat-ms", type=int, default=60)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    lines = [
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16", "",
        "| gradients | µs | TFLOP/s | FA2 µs | FA2 / ours | error | cuDNN µs | cuDNN / ours | error |",
        "|---|---|---|---|---|---|---|---|---|",
        *(gradient_row(case, arguments.repeat_ms) for case in GRADIENTS), "",
        "| paged decode | µs | GB/s | launches | error |", "|---|---|---|---|---|",
        *(paged_row(case, arguments.repeat_ms) for case in PAGED),
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if arguments.report:
        arguments.report.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
