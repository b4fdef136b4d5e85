"""Forward and backward of the whole block and of each part."""

from __future__ import annotations

import sys
from typing import Any

import torch
from block import OFF, PARTS, SIZE, Block, Run, normal, off
from timing import milliseconds, table
from torch import Tensor


def forward_and_backward(block: Block, x: Tensor, dy: Tensor) -> dict[str, Run]:
    """Each part's forward, and its forward and backward; the whole. Gradients are by x and by the
    weights."""
    w, passes = block.w, dict[str, Run]()
    inputs: tuple[Tensor, ...] = (x,)
    for name, part, own in (
        (PARTS[0], block.qkv, (w.norm, w.qkv)),
        (PARTS[1], block.attend, ()),
        (PARTS[2], lambda y: block.output(y, x), (w.out,)),
        (PARTS[3], block.mlp, (w.norm_mlp, w.gate_up, w.down)),
    ):
        leaves = [t.detach().requires_grad_() for t in inputs]
        results = several(part(*leaves))
        down = [torch.randn_like(t) for t in results]

        def forward(part: Any = part, leaves: Any = leaves) -> Any:
            return several(part(*leaves))

        def both(
            forward: Any = forward, leaves: Any = leaves, down: Any = down, own: Any = own
        ) -> Any:
            return torch.autograd.grad(forward(), [*leaves, *own], down)

        passes |= {f"{name}, forward": forward, f"{name}, both": both}
        inputs = tuple(t.detach() for t in results)
    return {**passes, "whole": lambda: torch.autograd.grad(block(x), [x, *w], dy)}


def several(results: Any) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


def training(blocks: list[Any], repeats: int) -> None:
    z = SIZE
    x = normal(z.batch, z.rows, z.hidden).requires_grad_()
    dy = normal(z.batch, z.rows, z.hidden)
    exact: Any = None
    passes = []
    for block in blocks:
        print(f"training by {block.name} …", file=sys.stderr)
        passes.append(forward_and_backward(block, x, dy))
        gradients: Any = passes[-1]["whole"]()
        exact = exact or gradients
        worst = max(off(a, b) for a, b in zip(gradients, exact, strict=True))
        assert worst < OFF, f"{block.name}: gradients are {worst:.1e} off {blocks[0].name}'s"
    rows: dict[str, list[float]] = {}
    for name in passes[0]:
        runs = {block.name: run[name] for block, run in zip(blocks, passes, strict=True)}
        rows[name] = [*milliseconds(runs, repeats).values()]
    for part in PARTS:
        forward = rows[f"{part}, forward"]
        rows[f"{part}, both"] = [b - f for b, f in zip(rows[f"{part}, both"], forward, strict=True)]
    named = {name.replace(", both", ", backward"): row for name, row in rows.items()}
    names = [block.name for block in blocks]
    table(f"training, {z.batch} × {z.rows} tokens", names, named, z.batch * z.rows)
