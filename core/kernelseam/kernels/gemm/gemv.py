"""Kernel definition of gemv.h: a GEMM of few rows or few columns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field, replace

from kernelseam.contract import ArchRow, Device, Launch, Launches
from kernelseam.costs import Work
from kernelseam.descriptors.gemm.problem import GemmProblem, GemmSpec
from kernelseam.dtypes import DType
from kernelseam.frozen import dataclass
from kernelseam.kernels.config import Constants, members
from kernelseam.kernels.definition import OfferingDefinition
from kernelseam.kernels.elements import (
    DEVICE_TYPE,
    divide_up,
    refuse_dtype,
    refuse_row_strides,
    row_strides,
)
from kernelseam.kernels.gemm.gemm import refuse_rounding
from kernelseam.kernels.signature import Signature

MOST_VECTORS = 4
"""Rows, or columns, that are multiplied at once. With more, plain units are slower than memory."""
RATE = 0.12
"""The part of the plain units' rate that products with further vectors reach, half of the
instructions being conversions; those with the first are hidden behind the loads."""
_STARTED = 0.5
"""Of a round of blocks: as much is hidden of the first, whose blocks all start at once (H200: 4096
rows of 14336, one round, take 30.2 µs, and 8192 of 8192, two, 35.5)."""
_DTYPES = frozenset({DType.float16, DType.bfloat16, DType.float32, DType.float64})
_OPERANDS = ("x", "w", "y", "bias", "residual")
_INTS = (
    "x_f",
    "x_k",
    "w_row",
    "y_f",
    "y_n",
    "bias_f",
    "bias_n",
    "residual_f",
    "residual_n",
    "vectors",
    "N",
    "K",
    "num_heads",
    "x_head_group",
    "w_head_group",
    "slabs",
)


@dataclass(frozen=True)
class GemvTile:
    """A row of an arch's table: how a block of ``threads``, ``warps``, is cut where W's rows lie
    along K, or along N: ``lanes`` of a warp that share a row of W, ``rows`` of it that each lane
    has in flight."""

    along_k: bool
    lanes: int
    rows: int
    threads: int
    warps: int
    ahead: bool = False
    """Whether the next rows are loaded while these are multiplied."""
    most_ahead: int = MOST_VECTORS
    """The most vectors with whose sums the next rows still fit into registers."""
    resident_threads: int = field(default=1024, compare=False)
    """For its cost: threads of a compute unit's blocks that run at once."""
    latency: float = field(default=1e-6, compare=False)
    """For its cost: of the seconds from a load of its rows to their use, those that other loads do
    not hide."""
    step_seconds: float = field(default=2e-7, compare=False)
    """For its cost: of a load of its rows to its use in a block that is alone; ``latency`` is what
    is left of it where others load, too. (H200: 2×16×14336, 56 loads one after the other, take 13.6
    µs.)"""
    wave_seconds: float = field(default=0.0, compare=False)
    """For its cost: of a unit's every block but the first, which starts when another ends."""
    block_seconds: float = field(default=0.0, compare=False)
    """For its cost: as in GemmTile."""
    dtypes: frozenset[DType] = _DTYPES
    vectors: int = 1
    """Of a launch, as is ``of_a``: the most that are multiplied at once."""
    of_a: bool = False
    """Whether W is op(A), the vectors op(B)'s columns; else W is op(B)ᵀ, they are op(A)'s rows."""

    @property
    def name(self) -> str:
        """Vectors, lanes×rows, threads."""
        side = "columns" if self.of_a else "rows"
        return (
            f"{self.vectors}{side}-{self.lanes}x{self.rows}-{self.threads}{'-ahead' * self.ahead}"
        )

    def vector(self, spec: GemmSpec) -> int:
        """Bytes of a load of W."""
        return spec.vector_a if self.of_a else spec.vector_b

    def x_vector(self, spec: GemmSpec) -> int:
        """Bytes of a load along a vector; 0 where its elements lie apart."""
        along_k = spec.b_transposed if self.of_a else not spec.a_transposed
        return (spec.vector_b if self.of_a else spec.vector_a) if along_k else 0

    def piece(self, spec: GemmSpec) -> int:
        """Elements of such a load."""
        return self.vector(spec) // spec.dtype.itemsize

    def block_columns(self, spec: GemmSpec) -> int:
        """Of y, n, that a block takes."""
        if self.along_k:
            return self.threads // self.lanes * self.rows
        return self.lanes * self.piece(spec)

    def shared_bytes(self, spec: GemmSpec) -> int:
        """The sums of every warp, where they are added in shared memory."""
        if self.along_k:
            return 0
        sums = self.vectors * self.block_columns(spec)
        return self.warps * sums * spec.dtype_acc.itemsize


def _tiles(spec: GemmSpec, row: ArchRow, vectors: int, of_a: bool) -> Iterator[GemvTile]:
    along_k = not spec.a_transposed if of_a else spec.b_transposed
    for tile in row.tiles.get("gemv", ()):
        if tile.along_k == along_k and spec.dtype in tile.dtypes:
            ahead = tile.ahead and vectors <= tile.most_ahead
            yield replace(tile, vectors=vectors, of_a=of_a, ahead=ahead)


class GemvDefinition(OfferingDefinition):
    """Every block reads rows of W once, for all vectors."""

    operation, name = "gemm", "gemv"
    entry, source = "gemv", "gemm/gemv.h"

    def refuse(self, problem: GemmProblem, row: ArchRow) -> str | None:
        p, spec = problem, problem.spec
        if extras := [x for x in spec.extras if x not in ("bias", "residual")]:
            return f"it has no {extras[0].replace('_', ' ')}"
        if spec.precision:
            return f"it has no {spec.precision} products"
        for dtype in (spec.dtype, spec.dtype_c):
            if dtype.is_fp8:
                return f"it has no products of {dtype}, nor such results"
        if reason := refuse_dtype(spec.dtype, row):
            return reason
        if not self.tiles(spec, row):
            return f"no tile of {row.arch} takes {spec.dtype}"
        if reason := refuse_rounding(spec):
            return reason
        if min(p.M, p.N) > MOST_VECTORS:
            return f"M = {p.M} and N = {p.N}: one of them must be at most {MOST_VECTORS}"
        return refuse_row_strides(**row_strides(p, "a", "b", "c", "residual"))

    def tiles(self, spec: GemmSpec, row: ArchRow) -> tuple[GemvTile, ...]:
        """Of one vector and of the most: two lie between, and where W is op(A) the binaries are
        those of another spec."""
        return tuple(t for v in (1, MOST_VECTORS) for t in _tiles(spec, row, v, False))

    def takes(self, problem: GemmProblem, tile: GemvTile, row: ArchRow, device: Device) -> bool:
        return tile in self.offered(problem, row)

    def offered(self, problem: GemmProblem, row: ArchRow) -> list[GemvTile]:
        """Those of the shorter side's fewest vectors."""
        few, of_a = min((problem.M, False), (problem.N, True))
        vectors = 1 << max(few - 1, 0).bit_length()
        return list(_tiles(problem.spec, row, vectors, of_a))

    def launches(self, problem: GemmProblem, tile: GemvTile, device: Device) -> Launches:
        lists = "_ptrs" if problem.spec.view == "pointers" else ""
        swapped = {"x": f"B{lists}", "w": f"A{lists}"} if tile.of_a else {}
        return Launches((Launch(self, problem, tile, operands=swapped),))

    def constants(self, spec: GemmSpec, tile: GemvTile, row: ArchRow) -> Constants:
        return {
            "T": DEVICE_TYPE[spec.dtype],
            "TY": DEVICE_TYPE[spec.dtype_c],
            "K_LAST": tile.along_k,
            "POINTERS": spec.view == "pointers",
            "VECTOR": tile.vector(spec),
            "X_VECTOR": tile.x_vector(spec),
            "BIAS": DEVICE_TYPE[spec.bias],
            "RESIDUAL": DEVICE_TYPE[spec.residual],
            **members(tile, "vectors", "lanes", "rows", "threads", "ahead"),
            "SHARED_BYTES": tile.shared_bytes(spec),
        }

    def signature(self, spec: GemmSpec) -> Signature:
        scalar = "f64" if spec.dtype_acc is DType.float64 else "f32"
        return Signature(
            (
                *((n, "pointer") for n in _OPERANDS),
                *((f"{n}_{axis}", "i64") for n in _OPERANDS for axis in ("batch", "head")),
                *((n, "i32") for n in _INTS),
                ("alpha", scalar),
                ("beta", scalar),
            )
        )

    def grid(self, problem: GemmProblem, tile: GemvTile, device: Device) -> int:
        return problem.results * _slabs(problem, tile)

    def values(
        self, problem: GemmProblem, tile: GemvTile, device: Device
    ) -> dict[str, int | float]:
        p, spec, reads = problem, problem.spec, problem.reads_inputs
        a, b, of_a = p.a_strides, p.b_strides, tile.of_a
        x, w, group = (b, a, (p.b_head_group, 1)) if of_a else (a, b, (1, p.b_head_group))
        a_steps = (1, a[2]) if spec.a_transposed else (a[2], 1)  # along M and K
        b_steps = (b[2], 1) if spec.b_transposed else (1, b[2])  # along N and K
        x_f, x_k = b_steps if of_a else a_steps

        def steps(row: int, column: int) -> tuple[int, int]:
            """From strides of C's rows and columns, those along f and n."""
            return (column, row) if of_a else (row, column)

        (y_f, y_n), (bias_f, bias_n) = steps(p.c_strides[2], 1), steps(0, 1)
        residual_f, residual_n = steps(p.residual_strides[2], 1)
        leads = (x, w, p.c_strides, p.bias_strides, p.residual_strides)
        return {
            **{
                f"{n}_{axis}": stride
                for n, strides in zip(_OPERANDS, leads, strict=True)
                for axis, stride in zip(("batch", "head"), strides, strict=False)
            },
            "x_f": x_f,
            "x_k": x_k,
            "w_row": w[2],
            "y_f": y_f,
            "y_n": y_n,
            "bias_f": bias_f,
            "bias_n": bias_n,
            "residual_f": residual_f,
            "residual_n": residual_n,
            "vectors": p.N if of_a else p.M,
            "N": p.M if of_a else p.N,
            "K": p.K if reads else 0,
            "num_heads": p.num_heads,
            "x_head_group": group[0],
            "w_head_group": group[1],
            "slabs": _slabs(p, tile),
            "alpha": p.alpha if reads else 0.0,
            "beta": p.beta,
        }

    def pointers(self, spec: GemmSpec) -> dict[str, str]:
        lists = "_ptrs" if spec.view == "pointers" else ""
        added = {n: f"{n}{lists}" if getattr(spec, n) else "" for n in ("bias", "residual")}
        return {"x": f"A{lists}", "w": f"B{lists}", "y": f"C{lists}", **added}

    def work(self, problem: GemmProblem, tile: GemvTile, device: Device) -> Work:
        """Memory's, and what is not hidden of its loads' latency, one after the other."""
        p, spec = problem, problem.spec
        n, k = tile.block_columns(spec), p.K if p.reads_inputs else 0
        blocks, units = p.results * _slabs(p, tile), max(device.limits.compute_units, 1)
        rounds = divide_up(blocks, units * max(tile.resident_threads // tile.threads, 1))
        loads = divide_up(n * k, tile.threads * tile.rows * tile.piece(spec))
        waves = max(divide_up(blocks, units), 1)
        return Work(
            p.bytes_moved,
            blocks,
            2.0 * (tile.vectors - 1) * n * k,
            dtype=DType.float64 if spec.dtype_acc is DType.float64 else DType.float32,
            rate=RATE,
            block_seconds=tile.block_seconds + tile.wave_seconds * (waves - 1) / waves,
            alone=loads * tile.step_seconds,
            waiting=(rounds - _STARTED) * loads * tile.latency,
        )


def _slabs(problem: GemmProblem, tile: GemvTile) -> int:
    """Blocks of a matrix; none without vectors."""
    vectors, n = (problem.N, problem.M) if tile.of_a else (problem.M, problem.N)
    if vectors == 0:
        return 0
    return divide_up(n, tile.block_columns(problem.spec))


GEMV = GemvDefinition()
