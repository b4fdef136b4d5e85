"""A layer of experts over the ranks of one host beside one of them alone, forward and backward.

    torchrun --nproc-per-node 2 -m benchmarks.several_gpus_experts

A token's experts are drawn evenly (``--skewed``: by Zipf's law). Ranks have equal parts of the
tokens and of the experts; rates are of all ranks together. Without a GPU for each rank, with small
sizes, it runs on the host, which shows that it runs.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from kernelseam import distributed
from kernelseam.interop.torch import grouped_mm

from benchmarks.rank_timing import Side, begin, measure, slowest, walk


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--width", type=int, default=1408)
    parser.add_argument("--chosen", type=int, default=6, help="experts of a token")
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--capacity", type=float, nargs="*", default=[1.25],
                        help="of the even number of rows of a rank for an expert")  # fmt: skip
    parser.add_argument("--skewed", action="store_true")
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    device, ranks = begin()
    size, kind = dist.get_world_size(), torch.bfloat16 if device.type != "cpu" else torch.float32
    generator = torch.Generator(device).manual_seed(1 + dist.get_rank())

    def drawn(*shape: int) -> Any:
        x = torch.randn(shape, generator=generator, device=device) * shape[-2] ** -0.5
        return x.to(kind).requires_grad_()

    def layer(tokens: int, experts: int) -> Layer:
        x, up = drawn(tokens, options.hidden), drawn(experts, options.hidden, 2 * options.width)
        down = drawn(experts, options.width, options.hidden)
        return Layer(x, up, down, options, generator)

    tokens = options.tokens // size
    mine = layer(tokens, options.experts // size)
    sides = [Side("tokens once", mine.once())]
    sides += [Side(f"{n} chunks", mine.over_ranks(n, None)) for n in options.chunks]
    for factor in options.capacity:
        rows = -(-int(factor * tokens * options.chosen) // options.experts)
        sides.append(Side(f"capacity {rows}", mine.over_ranks(options.chunks[-1], rows)))
    sides.append(Side("one", layer(options.tokens, options.experts).alone()))
    for run in range(options.runs + 1):
        for side in sides:
            if not side.error:
                measure(side, device, ranks, counted=run > 0)
    if dist.get_rank() == 0:
        print("| way | fwd ms | TFLOP/s | × one | waiting | bwd ms | TFLOP/s | × one | waiting |")
        print("|---" * 9 + "|")
    work = 6.0 * options.tokens * options.chosen * options.hidden * options.width
    for side in sides:
        cells = [side.name, side.error[:60]] if side.error else [side.name]
        for i, operations in enumerate((work, 2 * work) if not side.error else ()):
            seconds, alone, waited = (
                slowest(statistics.median(x[i]), device)
                for x in (side.seconds, sides[-1].seconds, side.waited)
            )
            cells += [f"{seconds * 1e3:.2f}", f"{operations / seconds / 1e12:.1f}",
                      f"{alone / seconds:.3f}", f"{waited / seconds:.1%}"]  # fmt: skip
        if dist.get_rank() == 0:
            print("| " + " | ".join(cells) + " |", flush=True)
    dist.destroy_process_group()


class Layer:
    """Tokens, the experts that they chose, and these experts' weights."""

    def __init__(self, x: Any, up: Any, down: Any, options: Any, generator: Any) -> None:
        self._x, self._up, self._down, self._chosen = x, up, down, options.chosen
        chance = torch.ones(options.experts, device=x.device)
        if options.skewed:
            chance = 1 / torch.arange(1, options.experts + 1, device=x.device)
        experts = torch.multinomial(
            chance.expand(len(x), -1), options.chosen, generator=generator
        ).flatten()
        ordered, self._order = experts.sort()
        numbers = torch.arange(options.experts, device=x.device)
        self._offs = torch.searchsorted(ordered, numbers, right=True, out_int32=True)
        self._places = torch.empty_like(self._order)
        self._places[self._order] = torch.arange(len(experts), device=x.device)
        self._weights = torch.rand(
            (len(x), 1, options.chosen), generator=generator, device=x.device
        )
        self._factors = self._weights.flatten()[self._order]
        self._taken = self._order // options.chosen
        self._dy = torch.randn(x.shape, generator=generator, device=x.device).to(x.dtype)

    def over_ranks(
        self, chunks: int, capacity: int | None
    ) -> Callable[[], tuple[Any, Callable[[], None]]]:
        def run() -> tuple[Any, Callable[[], None]]:
            y = distributed.grouped_mm(
                self._x[self._taken],
                [self._up, swiglu, self._down],
                self._offs,
                group=dist.group.WORLD,
                chunks=chunks,
                capacity=capacity,
            )
            chosen = y.index_select(0, self._places).unflatten(0, (-1, self._chosen))
            return self._with_gradients(torch.bmm(self._weights.to(y.dtype), chosen).squeeze(1))

        return run

    def once(self) -> Callable[[], tuple[Any, Callable[[], None]]]:
        def run() -> tuple[Any, Callable[[], None]]:
            y = distributed.grouped_mm(
                self._x,
                [self._up, swiglu, self._down],
                self._offs,
                group=dist.group.WORLD,
                a_indices=self._taken.int(),
                out_factors=self._factors,
            )
            return self._with_gradients(y)

        return run

    def alone(self) -> Callable[[], tuple[Any, Callable[[], None]]]:
        def run() -> tuple[Any, Callable[[], None]]:
            h = grouped_mm(self._x, self._up, self._offs, a_indices=self._taken.int())
            places = {"out_indices": self._order.int(), "out_factors": self._factors}
            y = grouped_mm(swiglu(h), self._down, self._offs, **places)
            return self._with_gradients(y.unflatten(0, (-1, self._chosen)).sum(1))

        return run

    def _with_gradients(self, out: Any) -> tuple[Any, Callable[[], None]]:
        return out, lambda: walk(out, self._dy, self._x, self._up, self._down)


def swiglu(x: Any) -> Any:
    gate, up = x.chunk(2, -1)
    return functional.silu(gate) * up


if __name__ == "__main__":
    main()
