"""Attention over the ranks of one host beside one of them alone and beside torch's context
parallelism, forward and backward, causal and full.

    torchrun --nproc-per-node 2 -m benchmarks.several_gpus --tokens 32768 131072 262144

Times are medians of runs that take turns; rates are of all ranks together, by 4·S²·H·D operations
forward (half under a causal mask) and 2.5 times as many backward. Our gradients are summed in order
(the same bits every time) but with ``--any-order``; torch's in any. Without a GPU for each rank it
runs small on the host, which shows that it runs.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from kernelseam import distributed
from kernelseam.interop.torch import attention

from benchmarks.rank_timing import Ranks, Side, begin, measure, slowest, walk

DIM = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[32768, 131072, 262144])
    parser.add_argument("--heads", nargs="+", default=["16/16", "32/8"], help="H/H_kv")
    parser.add_argument("--masks", nargs="+", default=["causal", "full"])
    parser.add_argument("--methods", nargs="+", default=["ring"])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--peers", nargs="+", default=["one", "torch"], choices=["one", "torch"])
    parser.add_argument(
        "--any-order", action="store_true", help="gradients whose order of summation varies"
    )
    options = parser.parse_args()
    device, ranks = begin()
    if dist.get_rank() == 0:
        print(
            "| tokens | H/H_kv | mask | way | fwd ms | TFLOP/s | × one | waiting | bwd ms "
            "| TFLOP/s | × one | waiting | MB above operands |\n" + "|---" * 13 + "|"
        )
    for tokens in options.tokens:
        for heads in options.heads:
            for mask in options.masks:
                counts = [int(x) for x in heads.split("/")]
                _row(tokens, counts[0], counts[1], mask == "causal", device, ranks, options)
    dist.destroy_process_group()


def _row(
    tokens: int, heads: int, kv_heads: int, causal: bool, device: Any, ranks: Ranks, options: Any
) -> None:
    group, size = dist.group.WORLD, dist.get_world_size()
    kind = torch.bfloat16 if device.type != "cpu" else torch.float32
    result = torch.Generator(device).manual_seed(1)

    def operand(count: int, rows: int) -> Any:
        return torch.randn(1, count, rows, DIM, generator=result, device=device).to(kind)

    def whole() -> tuple[Any, ...]:
        return tuple(operand(n, tokens) for n in (heads, kv_heads, kv_heads, heads))

    def one() -> tuple[Any, Callable[[], None]]:
        q, k, v, dout = kept["one"]
        out = attention(q, k, v, causal=causal, deterministic=not options.any_order)
        return out, lambda: walk(out, dout, q, k, v)

    def ours(method: str) -> Callable[[], tuple[Any, Callable[[], None]]]:
        def run() -> tuple[Any, Callable[[], None]]:
            q, k, v, dout = kept["ours"]
            out = distributed.attention(
                q,
                k,
                v,
                group=group,
                method=method,
                causal=causal,
                deterministic=not options.any_order,
            )
            return out, lambda: walk(out, dout, q, k, v)

        return run

    each = tokens // size
    kept: dict[str, Any] = {"ours": [operand(n, each) for n in (heads, kv_heads, kv_heads, heads)]}
    for x in kept["ours"][:3]:
        x.requires_grad_()
    sides = [Side(method, ours(method)) for method in options.methods]
    # The way of one rank is that of all at once: each has the whole.
    with _prepared(options.peers, kept, whole, sides, one, causal, device):
        for run in range(options.runs + 1):
            for side in sides:
                if not side.error:
                    measure(side, device, ranks, counted=run > 0)
    alone = next((s for s in sides if s.name == "one"), None)
    operations = 4.0 * tokens**2 * heads * DIM / (2 if causal else 1)
    for side in sides:
        cells = [str(tokens), f"{heads}/{kv_heads}", "causal" if causal else "full", side.name]
        if side.error:
            cells += [side.error[:60]] + [""] * 8
        for i, work in enumerate((operations, 2.5 * operations) if not side.error else ()):
            seconds = slowest(statistics.median(side.seconds[i]), device)
            share = slowest(statistics.median(side.waited[i]), device) / seconds
            ratio = ""
            if alone is not None and not alone.error:
                ratio = f"{slowest(statistics.median(alone.seconds[i]), device) / seconds:.3f}"
            cells += [f"{seconds * 1e3:.2f}", f"{work / seconds / 1e12:.1f}", ratio, f"{share:.1%}"]
        if not side.error:
            cells.append(f"{slowest(side.memory / 1e6, device):.0f}")
        if dist.get_rank() == 0:
            print("| " + " | ".join(cells) + " |", flush=True)


class _prepared:
    """Peers' operands, and torch's context where it is asked for."""

    def __init__(
        self,
        peers: list[str],
        kept: dict[str, Any],
        whole: Callable[[], tuple[Any, ...]],
        sides: list[Side],
        one: Callable[[], tuple[Any, Callable[[], None]]],
        causal: bool,
        device: Any,
    ) -> None:
        if "one" in peers:
            kept["one"] = list(whole())
            for x in kept["one"][:3]:
                x.requires_grad_()
            sides.append(Side("one", one))
        self._context: Any = None
        self._buffers: tuple[Any, ...] = ()
        if "torch" in peers:
            side = Side("torch", lambda: (None, lambda: None))
            sides.append(side)
            try:
                self._torch(kept, whole, side, causal, device)
            except Exception as error:
                side.error = f"{type(error).__name__}: {error}".replace("\n", " ")

    def _torch(
        self, kept: dict[str, Any], whole: Any, side: Side, causal: bool, device: Any
    ) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.experimental import _attention, context_parallel

        _attention._cp_options.enable_load_balance = (
            causal  # torch refuses it without a causal mask
        )
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        q, k, v, dout = whole()
        self._buffers = (q, k, v)
        context = context_parallel(mesh, buffers=[q, k, v, dout], buffer_seq_dims=[2] * 4)
        context.__enter__()
        self._context = context
        for x in (q, k, v):
            x.requires_grad_()

        def run() -> tuple[Any, Callable[[], None]]:
            out = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
            )
            return out, lambda: walk(out, dout, q, k, v)

        side.forward = run

    def __enter__(self) -> None:
        return None

    def __exit__(self, *given: object) -> None:
        if self._context is not None:
            for x in self._buffers:
                x.requires_grad_(False)
            try:
                self._context.__exit__(None, None, None)
            except Exception as error:
                print(f"torch's context: {type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    main()
