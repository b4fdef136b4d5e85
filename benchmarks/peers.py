"""What comparisons with peers share: times, differences, and a page that is printed as it grows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import torch


def median_ms(run: Callable[[], object], repeat_ms: int) -> float:
    """The median time of one run on the GPU, by its events, the L2 cache cleared before each."""
    from triton.testing import do_bench

    return float(do_bench(run, warmup=25, rep=repeat_ms, return_mode="median"))


def relative_error(ours: torch.Tensor, peer: torch.Tensor) -> float:
    """|ours − peer| / |peer|, Euclidean."""
    return float((ours.float() - peer.float()).norm() / peer.float().norm())


def write(lines: Iterable[str], report: Path | None) -> None:
    """Print each line when it is there, and keep what there is in the file: a run that is cut off has not lost it."""
    found = []
    for line in lines:
        print(line, flush=True)
        found.append(line)
        if report:
            report.write_text("\n".join(found) + "\n", encoding="utf-8")
