"""How a batched GEMM is tiled on an arch."""

from __future__ import annotations

from dataclasses import field

from kernelseam.descriptors.gemm.problem import GemmProblem, GemmSpec
from kernelseam.dtypes import DType
from kernelseam.frozen import dataclass
from kernelseam.kernels.elements import divide_up


@dataclass(frozen=True)
class GemmTile:
    """A tile configuration, a row of an arch's table: each team of warps computes a BM×BN tile
    of C in slices of BK, which come through a ring of ``stages`` slices."""

    dtypes: frozenset[DType]
    bm: int
    bn: int
    bk: int
    warps_m: int
    warps_n: int
    stages: int
    min_blocks: int = 1
    """Blocks that share a compute unit; bounds the registers, and how many persistent blocks are
    started."""
    persistent: bool = True
    """Whether a block computes one tile after another and prefetches the next one's slices; else
    one tile, in less shared memory."""
    teams: int = 1
    """Tiles that a block computes at once; if more than one, each team is one warp."""
    row_sums: bool = True
    """Whether it leaves registers for sums of rows, or for what is written beside both halves."""
    reduces_halves: bool = True
    """Whether it leaves registers for sums and maxima of pairs of both halves."""
    plain: bool = False
    """Whether it leaves no registers for an epilogue with bias or residual."""
    precision: str | None = None
    """That of the spec."""
    scale_k: int = 0
    """Values of k after which sums of 8 bits can be scaled, or multiples of them; 0: it leaves no
    registers for sums of blocks beside those of all of K."""
    rate: float = field(default=0.0, compare=False)
    """For its cost: the fraction of the instruction's peak rate that it reaches; 0: not
    measured. ``block_seconds``: the prologue and epilogue of a block."""
    block_seconds: float = field(default=0.0, compare=False)
    slice_seconds: float = field(default=7e-7, compare=False)
    """The latency of a slice from memory, where nothing else runs on the compute unit (H200:
    16×6144×4096 in 128 slices of two stages takes 95 µs)."""

    @property
    def name(self) -> str:
        """Rows×columns×slice, warps, stages, teams."""
        teams = f"-{self.teams}t" if self.teams > 1 else ""
        return f"{self.bm}x{self.bn}x{self.bk}-{self.warps_m}x{self.warps_n}-{self.stages}{teams}"

    def shared_bytes(self, spec: GemmSpec) -> int:
        """For each team the ring, and the tile of C: beside it where blocks are persistent, else in
        its place."""
        ring = self.stages * (self.bm + self.bn) * self.bk * spec.dtype.itemsize
        result = self.bm * self.bn * spec.dtype_c.itemsize
        return self.teams * (ring + result if self.persistent else max(ring, result))

    def scales_blocks(self, k: int) -> bool:
        """Whether sums can be scaled after every ``k`` values: slices and blocks nest."""
        nests = k % self.bk == 0 or self.bk % k == 0
        return self.scale_k > 0 and k % self.scale_k == 0 and nests

    def count(self, problem: GemmProblem) -> int:
        """Tiles of all matrices."""
        return divide_up(problem.M, self.bm) * divide_up(problem.N, self.bn) * problem.results

    def blocks(self, problem: GemmProblem) -> int:
        """Blocks that compute a tile a team."""
        return divide_up(self.count(problem), self.teams)
