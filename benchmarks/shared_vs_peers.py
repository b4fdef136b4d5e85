"""The shared kernels beside the peers, in one process on one GPU.

Attention beside torch's FlashAttention-2, GEMM beside cuBLAS (torch.bmm). Times are medians over repeats measured with
device events; ratios are peer time over our time.

    python benchmarks/shared_vs_peers.py [--report FILE.md] [--repeat-ms 100]
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import peers
import torch
import torch.nn.functional as functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import kernelseam as ks

ATTENTION = [  # batch, heads, KV heads, S, D, causal, dtype
    (4, 16, 16, 4096, 128, False, torch.bfloat16),
    (4, 16, 16, 4096, 128, True, torch.bfloat16),
    (4, 32, 32, 4096, 64, False, torch.bfloat16),
    (4, 32, 32, 4096, 64, True, torch.bfloat16),
    (4, 8, 8, 4096, 256, True, torch.bfloat16),
    (4, 32, 8, 4096, 128, True, torch.bfloat16),
    (32, 12, 12, 512, 64, False, torch.float16),
]
GEMM = [  # matrices, M, N, K, B transposed, dtype
    (384, 512, 512, 64, True, torch.float16),
    (384, 512, 64, 512, False, torch.float16),
    (256, 2048, 2048, 128, True, torch.float16),
    (256, 2048, 128, 2048, False, torch.float16),
    (8192, 32, 32, 32, True, torch.float16),
    (4096, 64, 64, 64, True, torch.float16),
    (64, 1024, 1024, 1024, False, torch.float16),
    (384, 512, 512, 64, True, torch.float32),
    (64, 1024, 1024, 1024, False, torch.float32),
]


def attention_row(case: tuple[int, int, int, int, int, bool, torch.dtype], repeat_ms: int) -> str:
    batch, heads, kv_heads, s, d, causal, dtype = case
    q = torch.randn(batch, heads, s, d, device="cuda", dtype=dtype)
    k, v = (torch.randn(batch, kv_heads, s, d, device="cuda", dtype=dtype) for _ in range(2))
    out = torch.empty_like(q)
    call = ks.plan(ks.Attention.from_arrays(q, k, v, out, causal=causal), implementation="shared").bind()
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        def peer() -> torch.Tensor:
            return functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=kv_heads != heads)

        peer_ms = peers.median_ms(peer, repeat_ms)
        reference = peer()
    ours_ms = peers.median_ms(call, repeat_ms)
    flops = 4 * batch * heads * s * s * d * (0.5 if causal else 1.0)
    name = f"B{batch} H{heads}{'' if kv_heads == heads else f'/{kv_heads}'} S{s} D{d} {str(dtype)[6:]}"
    return (
        f"| {name}{' causal' if causal else ''} | {peer_ms * 1e3:.1f} | {flops / peer_ms / 1e9:.0f} "
        f"| {ours_ms * 1e3:.1f} | {flops / ours_ms / 1e9:.0f} "
        f"| {peer_ms / ours_ms:.2f} | {peers.relative_error(out, reference):.1e} |"
    )


def gemm_row(case: tuple[int, int, int, int, bool, torch.dtype], repeat_ms: int) -> str:
    count, m, n, k, b_transposed, dtype = case
    a = torch.randn(count, m, k, device="cuda", dtype=dtype)
    b = torch.randn(count, *((n, k) if b_transposed else (k, n)), device="cuda", dtype=dtype)
    c, peer_c = (torch.empty(count, m, n, device="cuda", dtype=dtype) for _ in range(2))
    descriptor = ks.BatchedGemmStrided(A=a, B=b, C=c, M=m, N=n, K=k, batch=count, b_transposed=b_transposed)
    call = ks.plan(descriptor, implementation="shared").bind()
    right = b.transpose(1, 2) if b_transposed else b
    peer_ms = peers.median_ms(lambda: torch.bmm(a, right, out=peer_c), repeat_ms)
    ours_ms = peers.median_ms(call, repeat_ms)
    flops, moved = 2 * count * m * n * k, a.element_size() * count * (m * k + n * k + m * n)
    return (
        f"| {count} × {m}×{n}×{k} {str(dtype)[6:]} | {peer_ms * 1e3:.1f} | {moved / peer_ms / 1e6:.0f} "
        f"| {ours_ms * 1e3:.1f} | {moved / ours_ms / 1e6:.0f} | {flops / ours_ms / 1e9:.0f} | {peer_ms / ours_ms:.2f} "
        f"| {peers.relative_error(c, peer_c):.1e} |"
    )


def host_microseconds(run: Callable[[], object], repeats: int = 2000) -> float:
    """Host time of one call, the device kept far behind so that nothing waits for it."""
    for _ in range(100):
        run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    elapsed = time.perf_counter() - start
    torch.cuda.synchronize()
    return elapsed / repeats * 1e6


def host_rows() -> list[str]:
    q = torch.randn(1, 4, 64, 64, device="cuda", dtype=torch.float16)
    out = torch.empty_like(q)
    call = ks.plan(ks.Attention.from_arrays(q, q, q, out)).bind()
    stream = torch.cuda.current_stream().cuda_stream
    a, c = q[0], torch.empty(4, 64, 64, device="cuda", dtype=torch.float16)
    rows = {
        "call(stream)": lambda: call(stream), "call()": call,
        "attention(q, k, v, out=out)": lambda: ks.attention(q, q, q, out=out),
        "bmm(a, b, out=out)": lambda: ks.bmm(a, a, out=c),
        "torch scaled_dot_product_attention": lambda: functional.scaled_dot_product_attention(q, q, q),
        "torch.bmm": lambda: torch.bmm(a, a, out=c),
    }
    return [f"| {name} | {host_microseconds(run):.1f} |" for name, run in rows.items()]


def lines(repeat_ms: int) -> Iterator[str]:
    yield f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}"
    yield from ("", "| attention | FA2 µs | TFLOP/s | shared µs | TFLOP/s | FA2 / shared | rel. difference |")
    yield "|" + "---|" * 7
    yield from (attention_row(case, repeat_ms) for case in ATTENTION)
    yield ""
    yield "| batched GEMM | cuBLAS µs | GB/s | shared µs | GB/s | TFLOP/s | cuBLAS / shared | rel. difference |"
    yield "|" + "---|" * 8
    yield from (gemm_row(case, repeat_ms) for case in GEMM)
    yield from ("", "| host time of one call | µs |", "|---|---|", *host_rows())


if __name__ == "__main__":
    peers.command(__doc__, lines)
