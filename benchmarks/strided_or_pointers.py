"""Batched GEMM by strides and by lists of addresses, over memory that lies in several ways, on
every implementation.

    python -m benchmarks.strided_or_pointers [--device cuda:0] [--markdown FILE] [--small]

Each row is one product over one kind of memory: contiguous; gapped (unused memory between rows and
between matrices); token-major ([B, T, H, D]: rows of a head H·D apart); scattered (any order,
uneven gaps). Times are medians on the device's clock, inputs and results in place. Every result is
held against the float64 oracle. What an implementation refuses is said below the tables.
``--small`` is for a look at the output: its times say nothing.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from kernelseam import BatchedGemmPointers, BatchedGemmStrided, plan
from kernelseam.contract import Device, Runtime
from kernelseam.dispatch import consider, find_device
from kernelseam.dtypes import DType
from kernelseam.errors import CompileError, DeviceError
from kernelseam.oracle import check
from kernelseam.oracle.sampling import sampled
from kernelseam.planning import Call
from kernelseam.planning.binding import in_order
from kernelseam.plugins import plugins

STRIDED, POINTERS, EACH = "strides", "pointers", "a call per matrix"
CONTIGUOUS, GAPPED, TOKENS, SCATTERED = "contiguous", "gapped", "token-major", "scattered"
TIMED_SECONDS = 0.3
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Product:
    """op(B) is Bᵀ where ``b_transposed``; ``by_token`` names the operands that may have tokens
    first."""

    name: str
    batch: int
    heads: int
    M: int
    N: int
    K: int
    b_transposed: bool
    dtype: DType
    by_token: str = ""

    @property
    def count(self) -> int:
        return self.batch * self.heads

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Of each operand's matrices, as they lie in memory."""
        b = (self.N, self.K) if self.b_transposed else (self.K, self.N)
        return {"A": (self.M, self.K), "B": b, "C": (self.M, self.N)}

    def __str__(self) -> str:
        return f"{self.name}: {self.count} × {self.M}×{self.N}×{self.K} {self.dtype}"


PRODUCTS = (
    Product("q·kᵀ", 32, 12, 512, 512, 64, True, DType.float16, "AB"),
    Product("p·v", 32, 12, 512, 64, 512, False, DType.float16, "BC"),
    Product("q·kᵀ", 32, 12, 512, 512, 64, True, DType.float32, "AB"),
    Product("small", 1024, 8, 32, 32, 32, False, DType.float16),
    Product("the page's", 2, 4, 8, 8, 16, True, DType.float32, "AB"),
)
SMALL = (
    Product("q·kᵀ", 2, 3, 16, 16, 8, True, DType.float16, "AB"),
    Product("p·v", 2, 3, 16, 8, 16, False, DType.float32, "BC"),
)


@dataclass(frozen=True)
class Memory:
    """Where one operand's matrices lie: the element at which each starts, and the elements from row
    to row."""

    starts: Array
    row: int
    strides: tuple[int, int] | None
    """(batch, head), where there are such."""

    def view(self, flat: Array, i: int, rows: int, columns: int) -> Array:
        """Matrix i of memory."""
        step = flat.itemsize
        return np.lib.stride_tricks.as_strided(
            flat[self.starts[i] :], (rows, columns), (self.row * step, step)
        )


def memory(kind: str, product: Product, operand: str, rng: np.random.Generator) -> Memory:
    """Every row starts at a multiple of 16 bytes, as the columns of the products here allow."""
    (rows, columns), heads = product.shapes[operand], product.heads
    if kind == SCATTERED:
        order, unit = rng.permutation(product.count), 16 // product.dtype.itemsize
        gaps = rng.integers(1, 64, product.count) * unit
        return Memory((np.cumsum(gaps + rows * columns) - rows * columns)[order], columns, None)
    row, head = columns, rows * columns
    if kind == GAPPED:
        row = columns + 64
        head = (rows + 1) * row
    strides = heads * head, head
    if kind == TOKENS and operand in product.by_token:
        row, strides = heads * columns, (rows * heads * columns, columns)
    b, h = np.divmod(np.arange(product.count), heads)
    return Memory(b * strides[0] + h * strides[1], row, strides)


class Bench:
    """One product over one kind of memory, on a device."""

    def __init__(self, product: Product, kind: str, device: Device, runtime: Runtime) -> None:
        self.product, self.kind, self.device, self._runtime = product, kind, device, runtime
        rng = np.random.default_rng(0)
        self.places = {n: memory(kind, product, n, rng) for n in "ABC"}
        self.host = {
            n: _normal(rng, (product.count, *product.shapes[n]), product.dtype) for n in "AB"
        }
        self._held: dict[str, object] = {}
        self.addresses: dict[str, Array] = {}
        for name in self.places:
            self._put(name)

    def clear(self) -> None:
        """Give C new memory, which holds no result."""
        self._put("C")

    def _put(self, name: str) -> None:
        place, (rows, columns) = self.places[name], self.product.shapes[name]
        size = int(place.starts.max()) + (rows - 1) * place.row + columns
        flat = np.full(size, np.nan, self.product.dtype.numpy)
        for i, x in enumerate(self.host.get(name, ())):
            place.view(flat, i, rows, columns)[...] = x
        self._held.pop(name, None)
        self._held[name] = self._runtime.from_host(flat, self.device)
        info = self._runtime.describe(self._held[name])
        assert info is not None and info.pointer % 16 == 0
        self.addresses[name] = info.pointer + place.starts * self.product.dtype.itemsize

    def descriptor(self, way: str) -> Any:
        """What is planned; None where memory has no strides."""
        p, places = self.product, self.places
        rows: dict[str, Any] = {f"stride_{n.lower()}_row": m.row for n, m in places.items()}
        shape: dict[str, Any] = {
            "M": p.M,
            "N": p.N,
            "K": p.K,
            "b_transposed": p.b_transposed,
            "dtype": p.dtype,
            **rows,
        }
        if way == POINTERS:  # lists that come with bind are not looked at
            return BatchedGemmPointers(**shape, batch=p.batch, num_heads=p.heads, alignment=16)
        first: dict[str, Any] = {n: int(a[0]) for n, a in self.addresses.items()}
        if way == EACH:
            return BatchedGemmStrided(**shape, **first)
        strides: dict[str, Any] = {
            f"stride_{n.lower()}_{axis}": s
            for n, m in places.items()
            for axis, s in zip(("batch", "head"), m.strides or (), strict=False)
        }
        if any(m.strides is None for m in places.values()):
            return None
        return BatchedGemmStrided(**shape, **first, **strides, batch=p.batch, num_heads=p.heads)

    def calls(self, way: str, implementation: str) -> tuple[Call, ...]:
        """Bound: one, or one a matrix."""
        planned = plan(self.descriptor(way), device=self.device, implementation=implementation)
        if way == POINTERS:
            lists: dict[str, Any] = {f"{n}_ptrs": a for n, a in self.addresses.items()}
            return (planned.bind(**lists),)
        if way == STRIDED:
            return (planned.bind(),)
        each: Iterator[dict[str, Any]] = (
            {n: int(a[i]) for n, a in self.addresses.items()} for i in range(self.product.count)
        )
        return tuple(planned.bind(**addresses) for addresses in each)

    def seconds(self, calls: tuple[Call, ...]) -> float:
        """The median of all calls together, warmed up."""
        run = in_order([call.launcher() for call in calls])
        with self._runtime.activate(self.device):
            once = min(self._runtime.time(run, self.device, 3))
            runs = int(min(max(TIMED_SECONDS / max(once, 1e-7), 5), 500))
            return statistics.median(self._runtime.time(run, self.device, runs))

    def require(self) -> None:
        """Raise AssertionError where C is not what the oracle says."""
        p, flat = self.product, self._runtime.to_host(self._held["C"])
        c = np.stack([self.places["C"].view(flat, i, p.M, p.N) for i in range(p.count)])
        a, b = self.host["A"], self.host["B"]
        verdict = check.gemm(a, b, c, b_transposed=p.b_transposed, rows=sampled(4 * p.N * p.K))
        assert verdict.passed, f"is wrong: {verdict.message}"


def _normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: DType) -> Array:
    return rng.standard_normal(shape, np.float32).astype(dtype.numpy)


@dataclass(frozen=True)
class Row:
    """What was measured, or why not."""

    product: str
    kind: str
    way: str
    implementation: str
    chosen: bool = False
    seconds: float = 0.0
    launches: int = 0
    operations: int = 0
    bytes: int = 0
    reason: str = ""
    """Why there is no time."""
    failed: bool = False

    def __str__(self) -> str:
        name = f"**{self.implementation}**" if self.chosen else self.implementation
        rates = self.operations / self.seconds / 1e12, self.bytes / self.seconds / 1e9
        cells = (
            self.kind,
            self.way,
            name,
            _number(self.seconds * 1e6),
            self.launches,
            *map(_number, rates),
        )
        return f"| {' | '.join(map(str, cells))} |"


def rows(products: tuple[Product, ...], device: Device) -> Iterator[Row]:
    """Everything that can be measured of the products, and what is refused."""
    runtime = plugins().backend(device.backend).runtime
    for product in products:
        for kind in (CONTIGUOUS, GAPPED, TOKENS, SCATTERED):
            if kind == TOKENS and not product.by_token:
                continue
            bench = Bench(product, kind, device, runtime)
            for way in (STRIDED, POINTERS, EACH):
                if (descriptor := bench.descriptor(way)) is None or (
                    way == EACH and kind != SCATTERED
                ):
                    continue
                yield from _row(bench, way, descriptor)


def _row(bench: Bench, way: str, descriptor: Any) -> Iterator[Row]:
    implementation = plan(descriptor, device=bench.device).implementation
    for answer in consider(descriptor.problem(), bench.device):
        name = answer.implementation.name
        about = str(bench.product), bench.kind, way, name
        if way == EACH and name != implementation:
            continue
        if answer.refusal is not None:
            yield Row(*about, reason=answer.refusal)
            continue
        try:
            bench.clear()
            calls = bench.calls(way, name)
            seconds = bench.seconds(calls)
            bench.require()
        except (DeviceError, CompileError, AssertionError) as e:
            yield Row(*about, reason=str(e).partition("\n")[0], failed=True)
            continue
        problem, count = calls[0].plan.problem, len(calls)
        yield Row(
            *about,
            name == implementation,
            seconds,
            count * len(calls[0].plan.launches),
            count * problem.operations,
            count * problem.bytes_moved,
        )


def _number(x: float) -> str:
    return f"{x:.0f}" if x >= 100 else f"{x:.1f}" if x >= 1 else f"{x:.2g}"


def markdown(rows: list[Row], device: Device) -> str:
    """A table a product, and the refusals below them all."""
    lines = [
        f"{device.name or device.arch}. Bold: dispatch's own choice among those of one way.",
        "",
    ]
    for product in dict.fromkeys(r.product for r in rows):
        lines += [
            f"**{product}**",
            "",
            "| memory | by | implementation | µs | launches | TFLOP/s | GB/s |",
        ]
        lines += ["|---|---|---|---:|---:|---:|---:|"]
        lines += [str(r) for r in rows if r.product == product and not r.reason]
        lines.append("")
    for title, failed in (("Refused", False), ("FAILED", True)):
        where: dict[tuple[str, str, str], list[str]] = {}
        for r in rows:
            # What takes strides alone takes no lists, and the other way round: that needs no line.
            if r.reason and r.failed == failed and not r.reason.endswith(" only"):
                where.setdefault((r.implementation, r.product, r.reason), []).append(
                    f"{r.kind} by {r.way}"
                )
        if where:
            lines += [f"{title}:", ""]
            for (name, product, reason), places in where.items():
                lines.append(f"* {name}, {product}: {reason} ({', '.join(places)})")
            lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", help="BACKEND or BACKEND:INDEX; the first of the default backend where left out"
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there, too")
    parser.add_argument("--small", action="store_true", help="two tiny products")
    options = parser.parse_args()
    device = find_device(options.device)
    measured = list(rows(SMALL if options.small else PRODUCTS, device))
    text = markdown(measured, device)
    print(text)
    if options.markdown:
        options.markdown.write_text(text, encoding="utf-8")
    raise SystemExit(any(r.failed for r in measured))


if __name__ == "__main__":
    main()
