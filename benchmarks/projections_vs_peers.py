"""The projections beside torch's linear (cuBLASLt), forward and backward, and GEMMs with small matrices, on one GPU.

Times are medians of device events; ratios are peer time over our time. torch makes q, k and v by one linear and leaves
them token-major in one array; ours splits them into heads, and where the row says so turns them, for which torch takes
operations of its own. A linear's gradients are two products and a sum over rows; with the residual torch takes linear
and an addition.

    python benchmarks/projections_vs_peers.py [--report FILE.md] [--repeat-ms 100]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import peers
import torch
import torch.nn.functional as functional

import kernelseam as ks

HIDDEN, HEADS, KV_HEADS, DIM = 4096, 32, 8, 128
COLUMNS = (HEADS + 2 * KV_HEADS) * DIM
TOKENS = (16384, 512)
SMALL = [(65536, 8), (65536, 16), (16384, 32)]  # matrices, their extents

Run = Callable[[], object]


def row(name: str, ours: Run, peer: Run, flops: float, repeat_ms: int, error: Callable[[], float]) -> str:
    ours(), peer()
    off = error()
    peer_ms, ours_ms = peers.median_ms(peer, repeat_ms), peers.median_ms(ours, repeat_ms)
    return (
        f"| {name} | {peer_ms * 1e3:.1f} | {flops / peer_ms / 1e9:.0f} | {ours_ms * 1e3:.1f} "
        f"| {flops / ours_ms / 1e9:.0f} | {peer_ms / ours_ms:.2f} | {off:.1e} |"
    )


def forward_rows(tokens: int, repeat_ms: int) -> Iterator[str]:
    def made(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) / shape[-1] ** 0.25

    x, w, b = made(1, tokens, HIDDEN), made(COLUMNS, HIDDEN), made(COLUMNS)
    q = torch.empty(1, HEADS, tokens, DIM, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.empty(1, KV_HEADS, tokens, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    angles = torch.rand(tokens, DIM // 2, device="cuda") * 6.28
    flops = 2.0 * tokens * HIDDEN * COLUMNS

    def linear() -> torch.Tensor:
        return functional.linear(x, w, b)

    def off() -> float:
        return peers.relative_error(torch.cat([q, k, v], 1).transpose(1, 2).flatten(2), linear())

    plain = ks.plan(ks.QkvProjection.from_arrays(x, w, q, k, v, bias=b)).bind()
    yield row(f"qkv {tokens}×{HIDDEN}→{COLUMNS}", plain, linear, flops, repeat_ms, off)
    turned = ks.plan(
        ks.QkvProjection.from_arrays(x, w, q, k, v, bias=b, cos=angles.cos(), sin=angles.sin())
    ).bind()

    def rotated() -> tuple[torch.Tensor, torch.Tensor]:
        heads = linear().unflatten(2, (-1, DIM)).transpose(1, 2)
        low, high = heads[:, : HEADS + KV_HEADS].float().chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([low * cos - high * sin, high * cos + low * sin], -1).to(x.dtype), heads[:, HEADS + KV_HEADS :]

    def off_turned() -> float:
        return peers.relative_error(torch.cat([q, k, v], 1), torch.cat(rotated(), 1))

    yield row(f"qkv {tokens}×{HIDDEN}→{COLUMNS}, turned", turned, rotated, flops, repeat_ms, off_turned)

    weight, bias, residual = made(HIDDEN, HEADS * DIM), made(HIDDEN), made(1, tokens, HIDDEN)
    out = torch.empty_like(residual)
    for layout, attn in (("bhsd", q), ("bshd", q.transpose(1, 2).contiguous())):
        call = ks.plan(
            ks.OutputProjection.from_arrays(attn, weight, out, layout=layout, bias=bias, residual=residual)
        ).bind()
        flat = q.transpose(1, 2).flatten(2).contiguous()

        def added(flat: torch.Tensor = flat) -> torch.Tensor:
            return functional.linear(flat, weight, bias) + residual

        def apart(added: Callable[[], torch.Tensor] = added) -> float:
            return peers.relative_error(out, added())

        name = f"output {tokens}×{HEADS * DIM}→{HIDDEN} + residual, {'head' if layout == 'bhsd' else 'token'}-major"
        yield row(name, call, added, 2.0 * tokens * HIDDEN * HEADS * DIM, repeat_ms, apart)


def backward_rows(tokens: int, repeat_ms: int) -> Iterator[str]:
    def made(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    x, w = made(1, tokens, HIDDEN), made(COLUMNS, HIDDEN)
    dq, dk, dv = made(1, HEADS, tokens, DIM), made(1, KV_HEADS, tokens, DIM), made(1, KV_HEADS, tokens, DIM)
    dx, dw, db = torch.empty_like(x), torch.empty_like(w), made(COLUMNS)
    call = ks.plan(ks.QkvProjectionBwd.from_arrays(
        dq, dk, dv, input=x, weight=w, d_input=dx, d_weight=dw, d_bias=db
    )).bind()
    flat = torch.cat([dq, dk, dv], 1).transpose(1, 2).flatten(2).contiguous()[0]

    def peer() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return flat @ w, flat.T @ x[0], flat.sum(0)

    def off() -> float:
        return max(peers.relative_error(a, b) for a, b in zip((dx[0], dw, db), peer(), strict=True))

    yield row(f"qkv backward {tokens}", call, peer, 4.0 * tokens * HIDDEN * COLUMNS, repeat_ms, off)

    weight, d_out, attn = made(HIDDEN, HEADS * DIM), made(1, tokens, HIDDEN), made(1, HEADS, tokens, DIM)
    d_attn, d_weight, d_bias = torch.empty_like(attn), torch.empty_like(weight), made(HIDDEN)
    call = ks.plan(ks.OutputProjectionBwd.from_arrays(
        d_out, attn_out=attn, weight=weight, d_attn_out=d_attn, d_weight=d_weight, d_bias=d_bias
    )).bind()
    seen = attn.transpose(1, 2).flatten(2).contiguous()[0]

    def theirs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return d_out[0] @ weight, d_out[0].T @ seen, d_out[0].sum(0)

    def apart() -> float:
        ours = (d_attn.transpose(1, 2).flatten(2)[0], d_weight, d_bias)
        return max(peers.relative_error(a, b) for a, b in zip(ours, theirs(), strict=True))

    yield row(f"output backward {tokens}", call, theirs, 4.0 * tokens * HIDDEN * HEADS * DIM, repeat_ms, apart)


def small_row(count: int, n: int, repeat_ms: int) -> str:
    a, b = (torch.randn(count, n, n, device="cuda", dtype=torch.float16) for _ in range(2))
    c, peer_c = torch.empty_like(a), torch.empty_like(a)
    call = ks.plan(ks.BatchedGemmStrided(A=a, B=b, C=c, M=n, N=n, K=n, batch=count), implementation="shared").bind()

    def off() -> float:
        return peers.relative_error(c, peer_c)

    def peer() -> torch.Tensor:
        return torch.bmm(a, b, out=peer_c)

    return row(f"{count} × {n}×{n}×{n} float16", call, peer, 2.0 * count * n**3, repeat_ms, off)


def lines(repeat_ms: int) -> Iterator[str]:
    yield f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}"
    yield from ("", "| bfloat16 | torch µs | TFLOP/s | shared µs | TFLOP/s | torch / shared | rel. difference |")
    yield "|" + "---|" * 7
    for tokens in TOKENS:
        yield from forward_rows(tokens, repeat_ms)
        yield from backward_rows(tokens, repeat_ms)
    yield from (small_row(*case, repeat_ms) for case in SMALL)


if __name__ == "__main__":
    peers.command(__doc__, lines)
