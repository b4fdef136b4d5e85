"""What comparisons with peers share: times, differences, and a page that is printed as it grows."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch


def median_ms(run: Callable[[], object], repeat_ms: int) -> float:
    """The median time of one run on the GPU, by its events, the L2 cache cleared before each."""
    from triton.testing import do_bench

    return float(do_bench(run, warmup=25, rep=repeat_ms, return_mode="median"))


def in_turns(runs: Mapping[str, Callable[[], object]], repeat_ms: int) -> dict[str, float]:
    """The median of three rounds for each, in which all take turns: clocks drift."""
    rounds = [{name: median_ms(run, repeat_ms) for name, run in runs.items()} for _ in range(3)]
    return {name: sorted(times[name] for times in rounds)[1] for name in runs}


def relative_error(ours: torch.Tensor, peer: torch.Tensor) -> float:
    """|ours − peer| / |peer|, Euclidean."""
    return float((ours.float() - peer.float()).norm() / peer.float().norm())


def write(lines: Iterable[str], report: Path | None) -> None:
    """Print each line when it is there, and keep what there is in the file: a run that is cut off
    has not lost it."""
    entries = []
    for line in lines:
        print(line, flush=True)
        entries.append(line)
        if report:
            report.write_text("\n".join(entries) + "\n", encoding="utf-8")


def command(description: str | None, lines: Callable[[int], Iterable[str]]) -> None:
    """A script's command line: the page of ``lines(repeat_ms)``, float32 products of torch's in
    float32."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--report", type=Path)
    parser.add_argument("--repeat-ms", type=int, default=100)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    write(lines(options.repeat_ms), options.report)
