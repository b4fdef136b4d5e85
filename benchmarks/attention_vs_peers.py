"""Attention's gradients beside torch's FlashAttention-2 and cuDNN, and paged decoding in bytes per second, on one GPU.

Times are medians of device events; ratios are peer time over our time. TFLOP/s count 2.5 × the forward's operations, a
causal mask half; GB/s count K and V read once. A peer that refuses a problem has no figures. Gradients are taken twice:
in order, the same bits every time, and in any order, where an arch has a way with atomics.

    python benchmarks/attention_vs_peers.py [--backward] [--report FILE.md] [--repeat-ms 60]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import peers
import torch
import torch.nn.functional as functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import kernelseam as ks

GRADIENTS = [  # batch, heads, S, D, causal
    (4, 16, 4096, 128, False), (4, 16, 4096, 128, True), (4, 32, 4096, 64, False), (4, 32, 4096, 64, True),
    (4, 8, 4096, 256, True),
]
PAGED = [  # batch, keys, heads, KV heads, D, page size
    (64, 8192, 32, 8, 128, 16), (64, 8192, 32, 8, 128, 256), (16, 2048, 32, 8, 128, 16), (1, 32768, 32, 8, 128, 16),
]
PEERS = {"FA2": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}


def gradient_rows(case: tuple[int, int, int, int, bool], repeat_ms: int, device: str = "cuda") -> Iterator[str]:
    """In order, and in any order."""
    batch, heads, s, d, causal = case
    q, k, v, dout, out, dq, dk, dv = (
        torch.randn(batch, heads, s, d, device=device, dtype=torch.bfloat16) for _ in range(8)
    )
    lse = torch.empty(batch, heads, s, device=device)
    forward = ks.Attention.from_arrays(q, k, v, out, lse, causal=causal)
    ks.plan(forward).bind()()
    flops = 10 * batch * heads * s * s * d * (0.5 if causal else 1.0)
    theirs: list[tuple[float, tuple[torch.Tensor, ...]] | None] = []
    for backend in PEERS.values():
        inputs = tuple(x.clone().requires_grad_() for x in (q, k, v))
        try:
            with sdpa_kernel(backend):
                result = functional.scaled_dot_product_attention(*inputs, is_causal=causal)
        except RuntimeError:  # "No available kernel"
            theirs.append(None)
            continue

        def peer(result: torch.Tensor = result, inputs: tuple[torch.Tensor, ...] = inputs) -> tuple[torch.Tensor, ...]:
            return torch.autograd.grad(result, inputs, dout, retain_graph=True)

        theirs.append((peers.median_ms(peer, repeat_ms), peer()))
    name = f"B{batch} H{heads} S{s} D{d}{' causal' if causal else ''}"
    for way, deterministic in (("in order", True), ("any order", False)):
        call = ks.plan(
            ks.AttentionBwd(forward=forward, dout=dout, dq=dq, dk=dk, dv=dv, deterministic=deterministic)
        ).bind()
        ours = peers.median_ms(call, repeat_ms)
        cells = []
        for found in theirs:
            if found is None:
                cells.append("– | – | –")
                continue
            error = max(peers.relative_error(x, y) for x, y in zip((dq, dk, dv), found[1], strict=True))
            cells.append(f"{found[0] * 1e3:.0f} | {found[0] / ours:.2f} | {error:.1e}")
        yield f"| {name} | {way} | {ours * 1e3:.0f} | {flops / ours / 1e9:.0f} | {' | '.join(cells)} |"


def paged_row(case: tuple[int, int, int, int, int, int], repeat_ms: int, device: str = "cuda") -> str:
    batch, keys, heads, kv_heads, d, page = case
    each = -(-keys // page)
    k, v = (torch.randn(batch * each, page, kv_heads, d, device=device, dtype=torch.bfloat16) for _ in range(2))
    table = torch.randperm(batch * each, device=device).to(torch.int32).reshape(batch, each)
    lengths = torch.full((batch,), keys, dtype=torch.int32, device=device)
    q = torch.randn(batch, 1, heads, d, device=device, dtype=torch.bfloat16)
    out = torch.empty_like(q)
    plan = ks.plan(
        ks.Attention.from_arrays(q, k, v, out, layout="bshd", block_table=table, kv_lengths=lengths, max_seqlen_k=keys)
    )
    ms = peers.median_ms(plan.bind(), repeat_ms)
    gathered = (x[table.long()].reshape(batch, each * page, kv_heads, d)[:, :keys].transpose(1, 2) for x in (k, v))
    dense = functional.scaled_dot_product_attention(
        q.transpose(1, 2).float(), *(x.float() for x in gathered), enable_gqa=True
    ).transpose(1, 2)
    size = 2 * batch * keys * kv_heads * d * 2
    return (
        f"| B{batch} × {keys} H{heads}/{kv_heads} D{d} page {page} | {ms * 1e3:.1f} | {size / ms / 1e6:.0f} "
        f"| {len(plan.launches)} | {peers.relative_error(out, dense):.1e} |"
    )


def lines(repeat_ms: int, gradients_alone: bool) -> Iterator[str]:
    yield f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16"
    peer_columns = "".join(f" {name} µs | {name} / ours | error |" for name in PEERS)
    yield from ("", "| gradients | way | µs | TFLOP/s |" + peer_columns, "|" + "---|" * 10)
    for case in GRADIENTS:
        yield from gradient_rows(case, repeat_ms)
    if gradients_alone:
        return
    yield from ("", "| paged decode | µs | GB/s | launches | error |", "|" + "---|" * 5)
    yield from (paged_row(case, repeat_ms) for case in PAGED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backward", action="store_true", help="the gradients alone")
    parser.add_argument("--report", type=Path)
    parser.add_argument("--repeat-ms", type=int, default=60)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    peers.write(lines(arguments.repeat_ms, arguments.backward), arguments.report)


if __name__ == "__main__":
    main()
