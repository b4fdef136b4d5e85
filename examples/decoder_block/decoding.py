"""Decoding from a cache, a step at a time, held against the forward over all rows."""

from __future__ import annotations

import sys
from typing import Any

import torch
from block import DEVICE, OFF, PARTS, SIZE, TIMES, Run, normal, off, on_gpu
from timing import captured, milliseconds, table
from torch import Tensor


class Decoding:
    """``steps`` rows behind the prompts of hidden [B, prompt + steps, hidden]."""

    def __init__(self, block: Any, hidden: Tensor) -> None:
        self.block = block
        block.fill(hidden[:, : SIZE.prompt].contiguous())
        self.rows = hidden[:, SIZE.prompt :].transpose(0, 1)[:, :, None].contiguous()
        self.outs = torch.empty_like(self.rows)
        self.at = torch.zeros(1, dtype=torch.long, device=DEVICE)
        self.step(SIZE.prompt)  # plans and compiles
        # A step whose keys are a slice has a graph of each length, captured before it counts.
        lengths = range(SIZE.prompt, SIZE.prompt + SIZE.steps)
        if on_gpu and block.one_graph:
            lengths = lengths[:1]
        pool = torch.cuda.graph_pool_handle() if on_gpu else None
        graphs = [captured(lambda cached=cached: self.step(cached), pool) for cached in lengths]  # type: ignore[misc]
        self.replays = graphs * (SIZE.steps // len(graphs))

    def step(self, cached: int) -> None:
        x = self.rows.index_select(0, self.at)[0]
        y = self.block.step_attend(cached, *self.block.step_qkv(x, cached))
        self.outs.index_copy_(0, self.at, self.block.mlp(self.block.output(y, x))[None])
        self.at.add_(1)

    def whole(self) -> None:
        self.at.zero_()
        self.block.rewind(SIZE.prompt)
        for replay in self.replays:
            replay()

    def parts(self) -> dict[str, Run]:
        """So many times each part of the last step, and what lies between."""
        block, x, last = self.block, self.rows[-1].clone(), SIZE.prompt + SIZE.steps - 1
        block.rewind(last)
        q = block.step_qkv(x, last)
        y = block.step_attend(last, *q).clone()
        h = block.output(y, x)

        def often(run: Run) -> Run:
            def runs() -> None:
                for _ in range(TIMES):
                    block.rewind(last)
                    run()

            return captured(runs)

        return {
            PARTS[0]: often(lambda: block.step_qkv(x, last)),
            PARTS[1]: often(lambda: block.step_attend(last, *q)),
            PARTS[2]: often(lambda: block.output(y, x)),
            PARTS[3]: often(lambda: block.mlp(h)),
            "rewind": often(lambda: block.rewind(last)) if block.one_graph else lambda: None,
        }


def decoding(blocks: list[Any], repeats: int) -> float:
    """How far decoded rows are off the forward's, at most."""
    z, decodings, worst = SIZE, [], 0.0
    hidden = normal(z.entries, z.prompt + z.steps, z.hidden)
    exact = torch.cat([blocks[0](h[None])[:, z.prompt :] for h in hidden])
    blocks = [b for b in blocks if b.decodes]
    for block in blocks:
        print(f"decoding by {block.name} …", file=sys.stderr)
        decodings.append(Decoding(block, hidden))
        decodings[-1].whole()
        rows = decodings[-1].outs[:, :, 0].transpose(0, 1)
        worst = max(worst, off(rows, exact))
        assert worst < OFF, f"{block.name}: decoded rows are {worst:.1e} off the forward's"
    runs: dict[str, dict[str, Run]] = {}
    for block, of in zip(blocks, decodings, strict=True):
        for name, run in {**of.parts(), "whole": of.whole}.items():
            runs.setdefault(name, {})[block.name] = run
    spent = {name: [*milliseconds(each, repeats).values()] for name, each in runs.items()}
    between = [x / 2 for x in spent.pop("rewind")]  # which it did twice
    per_step = {
        part: [(x - b) / TIMES for x, b in zip(spent[part], between, strict=True)] for part in PARTS
    }
    per_step["whole"] = [x / z.steps for x in spent["whole"]]
    title = f"a step of decoding, {z.entries} entries, {z.prompt} + {z.steps} keys"
    table(title, [b.name for b in blocks], per_step, z.entries)
    return worst
