"""GEMMs of e4m3 on one NVIDIA GPU, each way in turns with torch._scaled_mm (cuBLASLt), and what
their sums lose.

First every result is held against float64: the loss is max |y − ref| / (2⁻¹³·Σ|A||B|) of float32
results. Then times, medians over bursts (of graphs, where a launch is short), a scale a tensor,
results of bfloat16. ``--blocks``: in place of that with scales of 1×128 and 128×128, beside the
same with one scale each, and the largest error of results over their tolerance.

    python -m benchmarks.gemm_8_bits [--blocks] [--report FILE.md]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kernelseam as ks
import torch
from kernelseam.descriptors.gemm.fields import SCALES
from kernelseam.dispatch import consider
from kernelseam.variants import variants_of

from benchmarks import peers
from benchmarks.comparing.clocks import GpuClock
from benchmarks.comparing.timing import Run, Settings, Turn, measure

SHAPES = (
    (1, 512, 6144, 4096),
    (1, 64, 6144, 4096),
    (1, 2048, 4096, 4096),
    (1, 8192, 8192, 8192),
    (1, 16384, 6144, 4096),
    (64, 1024, 1024, 1024),
)
"""Matrices, M, N, K."""
BLOCK_SHAPES = (
    (64, 7168, 2048),
    (512, 7168, 2048),
    (4096, 7168, 2048),
    (4096, 4096, 7168),
    (8192, 8192, 8192),
)
"""M, N, K; the first four are DeepSeek-V3's, or nearly."""
SIDE = 128
"""Of a block."""
SUMS = (32, 128, 1024, 8192)


@dataclass(frozen=True)
class Product:
    """A [count, M, K], B [count, N, K], and one scale of each."""

    a: torch.Tensor
    b: torch.Tensor
    out: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def drawn(
        cls, count: int, m: int, n: int, k: int, dtype: torch.dtype, positive: bool = False
    ) -> Product:
        draw = torch.rand if positive else torch.randn
        a, b = (draw(count, rows, k, device="cuda") for rows in (m, n))
        eight = torch.float8_e4m3fn
        out = torch.empty(count, m, n, device="cuda", dtype=dtype)
        return cls(a.to(eight), b.to(eight), out, torch.tensor([0.5, 2.0], device="cuda"))

    def planned(self, implementation: str | None = None) -> Any:
        (count, m, k), n = self.a.shape, self.b.shape[1]
        axes = {"a": ("batch", "head", "row"), "b": ("batch", "head", "column")}
        steps: dict[str, Any] = {
            f"stride_{x}_scales_{axis}": 0 for x, names in axes.items() for axis in names
        }
        descriptor = ks.BatchedGemmStrided(
            M=m,
            N=n,
            K=k,
            batch=count,
            A=self.a,
            B=self.b,
            C=self.out,
            a_scales=self.scales[:1],
            b_scales=self.scales[1:],
            b_transposed=True,
            **steps,
        )
        return ks.plan(descriptor, implementation=implementation)

    def ours(self, implementation: str | None = None) -> Run:
        call = self.planned(implementation).bind()
        return lambda: call(stream=torch.cuda.current_stream())

    def theirs(self, fast: bool) -> Run:
        """Of one matrix."""
        a, b, out = self.a[0], self.b[0].t(), self.out[0]
        of_a, of_b = (scale.clone() for scale in self.scales)  # cuBLASLt: aligned to 16 bytes

        def run() -> object:
            return torch._scaled_mm(
                a,
                b,
                scale_a=of_a,
                scale_b=of_b,
                out_dtype=out.dtype,
                use_fast_accum=fast,
                out=out,
            )

        return run

    def lost(self) -> float:
        worst = 0.0
        for a, b, out in zip(self.a, self.b, self.out, strict=True):
            ref = a.double() @ b.double().T
            size = a.double().abs() @ b.double().abs().T
            worst = max(worst, float(((out.double() - ref).abs() / size).max()) * 2**13)
        return worst


def losses() -> Iterator[str]:
    yield "| K | numbers | sm90 | shared | cuBLASLt, exact | cuBLASLt, fast |"
    yield "|" + "---|" * 6
    for k in SUMS:
        for positive in (False, True):
            product = Product.drawn(1, 1024, 1024, k, torch.float32, positive)
            runs = [product.ours("sm90"), product.ours("shared")]
            runs += [product.theirs(False), product.theirs(True)]
            cells = []
            for run in runs:
                product.out.fill_(float("nan"))
                try:
                    run()
                except RuntimeError:  # cuBLASLt does not take every K
                    cells.append("–")
                    continue
                torch.cuda.synchronize()
                cells.append(f"{product.lost():.3g}")
            yield f"| {k} | {'U(0,1)' if positive else 'N(0,1)'} | {' | '.join(cells)} |"


def times() -> Iterator[str]:
    clock = GpuClock()
    yield "| product | who | µs | TFLOP/s |"
    yield "|" + "---|" * 4
    for count, m, n, k in SHAPES:
        product = Product.drawn(count, m, n, k, torch.bfloat16)
        plan = product.planned()
        ways: dict[str, Run] = {"chosen": product.ours()}
        for c in consider(plan.problem, plan.device):
            if c.refusal is None and c.implementation.name == "sm90":
                for v in variants_of(c.implementation, plan.problem, plan.device):
                    ways[f"sm90:{v.name}"] = product.ours(f"sm90:{v.name}")
        if count == 1:
            ways["cuBLASLt, exact"] = product.theirs(False)
            ways["cuBLASLt, fast"] = product.theirs(True)
        samples, graphs = measure({x: Turn(run) for x, run in ways.items()}, clock, Settings())
        for who, taken in samples.items():
            seconds = statistics.median(taken.back_to_back)
            rate = 2 * count * m * n * k / seconds / 1e12
            name = f"{count} × {m}×{n}×{k}" + " (graphs)" * graphs
            yield f"| {name} | {who} | {seconds * 1e6:.2f} | {rate:.0f} |"


@dataclass(frozen=True)
class Blocks:
    """A [M, K] with scales [M, K / 128], rows next to each other, and B [N, K] with scales [N /
    128, K / 128]."""

    product: Product
    a_scales: torch.Tensor
    b_scales: torch.Tensor

    @classmethod
    def drawn(cls, m: int, n: int, k: int) -> Blocks:
        product = Product.drawn(1, m, n, k, torch.bfloat16)
        by_row = torch.rand(k // SIDE, m, device="cuda").t() + 0.5
        return cls(product, by_row, torch.rand(n // SIDE, k // SIDE, device="cuda") + 0.5)

    def ours(self, implementation: str | None = None) -> Run:
        (m, k), n, x = self.product.a.shape[1:], self.product.b.shape[1], self.product
        steps = {"a_scales_row": 1, "a_scales_k": m, "b_scales_column": k // SIDE, "b_scales_k": 1}
        steps |= {f"{name}_{axis}": 0 for name in SCALES for axis in ("batch", "head")}
        given: dict[str, Any] = {f"stride_{name}": step for name, step in steps.items()}
        descriptor = ks.BatchedGemmStrided(
            M=m,
            N=n,
            K=k,
            A=x.a,
            B=x.b,
            C=x.out,
            a_scales=self.a_scales,
            b_scales=self.b_scales,
            b_transposed=True,
            scale_block=(1, SIDE, SIDE),
            **given,
        )
        call = ks.plan(descriptor, implementation=implementation).bind()
        return lambda: call(stream=torch.cuda.current_stream())

    def theirs(self) -> Run:
        a, b, out = self.product.a[0], self.product.b[0].t(), self.product.out[0]
        of_a, of_b = self.a_scales, self.b_scales.t()
        kind = out.dtype
        return lambda: torch._scaled_mm(
            a, b, scale_a=of_a, scale_b=of_b, out_dtype=kind, use_fast_accum=False, out=out
        )

    def error(self) -> float:
        """max |y − ref| over 2·u·|ref| + 8·2⁻¹³·Σ|A||B|, of at most 256 rows."""
        rows = slice(0, 256)
        a = self.product.a[0, rows].double() * self.a_scales[rows].double().repeat_interleave(
            SIDE, 1
        )
        of_b = self.b_scales.double().repeat_interleave(SIDE, 0).repeat_interleave(SIDE, 1)
        b = (self.product.b[0].double() * of_b).T
        ref, size = a @ b, a.abs() @ b.abs()
        bound = 2 * 2.0**-8 * ref.abs() + 8 * 2.0**-13 * size
        return float(((self.product.out[0, rows].double() - ref).abs() / bound).max())


def blocks() -> Iterator[str]:
    clock = GpuClock()
    yield "| product | who | µs | TFLOP/s | error/tolerance |"
    yield "|" + "---|" * 5
    for m, n, k in BLOCK_SHAPES:
        x = Blocks.drawn(m, n, k)
        ways: dict[str, Run] = {"blocks: chosen": x.ours(), "blocks: shared": x.ours("shared")}
        ways["one scale: chosen"] = x.product.ours()
        errors = {}
        try:
            x.theirs()()
            ways["blocks: torch._scaled_mm"] = x.theirs()
        except RuntimeError as e:
            yield f"| {m}×{n}×{k} | torch._scaled_mm refuses: {str(e).splitlines()[0]} | | | |"
        for who, run in ways.items():
            x.product.out.fill_(float("nan"))
            run()
            torch.cuda.synchronize()
            errors[who] = f"{x.error():.2g}" if who.startswith("blocks") else ""
        samples, graphs = measure({w: Turn(run) for w, run in ways.items()}, clock, Settings())
        for who, taken in samples.items():
            seconds = statistics.median(taken.back_to_back)
            rate = 2 * m * n * k / seconds / 1e12
            name = f"{m}×{n}×{k}" + " (graphs)" * graphs
            yield f"| {name} | {who} | {seconds * 1e6:.2f} | {rate:.0f} | {errors[who]} |"


def page(with_blocks: bool) -> Iterator[str]:
    if with_blocks:
        yield f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
        yield ""
        yield from blocks()
        return
    yield f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    yield ""
    yield from losses()
    yield ""
    yield from times()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", action="store_true")
    parser.add_argument("--report", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    with torch.no_grad():
        peers.write(page(arguments.blocks), arguments.report)


if __name__ == "__main__":
    main()
