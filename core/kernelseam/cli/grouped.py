"""``--groups`` and ``--sizes``: a GEMM whose products differ in size."""

from __future__ import annotations

import re
from typing import Annotated

import numpy as np
import typer

from kernelseam.cli.asked import Asked
from kernelseam.cli.shapes import one_of
from kernelseam.descriptors.gemm.grouped_problem import INDICES
from kernelseam.errors import InvalidValue
from kernelseam.frozen import dataclass
from kernelseam.samples.gemm_case import GemmCase
from kernelseam.samples.grouped_case import GroupedCase
from kernelseam.samples.grouped_pointers_case import GroupedPointersCase

Three = tuple[int, int, int]


def parsed_sizes(text: str) -> tuple[Three, ...]:
    """(M, N, K) of each product. Raises InvalidValue."""
    sizes: list[Three] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d{1,10})[x×](\d{1,10})[x×](\d{1,10})\s*", part)
        if found is None:
            raise InvalidValue(
                "--sizes",
                text,
                "must be M, N and K of each product",
                "For example --sizes 4096x512x64,1x24x8",
            )
        m, n, k = map(int, found.groups())
        sizes.append((m, n, k))
    return tuple(sizes)


_Groups = Annotated[
    int | None, typer.Option(min=1, help="Groups, as of experts: divides M, or what --along names.")
]
_Along = Annotated[
    str | None, typer.Option(help="With --groups: the axis that is divided, m, n or k. [m]")
]
_Skewed = Annotated[
    bool,
    typer.Option(
        "--skewed", help="With --groups: sizes drawn from 0.2 to 1.2 of a unit, not equal."
    ),
]
_AIndices = Annotated[
    bool, typer.Option("--a-indices", help="With --groups: rows are gathered from A, at random.")
]
_CIndices = Annotated[
    bool, typer.Option("--c-indices", help="With --groups: rows are scattered into C, at random.")
]
_CFactors = Annotated[
    bool, typer.Option("--c-factors", help="With --groups: rows of C are multiplied by factors.")
]
_Sizes = Annotated[
    str | None, typer.Option(help="Products of sizes of their own: MxNxK,MxNxK,…, in one launch.")
]


@dataclass(frozen=True)
class GroupOptions:
    groups: int | None
    along: str | None
    skewed: bool
    indices: tuple[str, ...]
    sizes: tuple[Three, ...] | None

    @classmethod
    def of(
        cls,
        *,
        groups: _Groups = None,
        along: _Along = None,
        skewed: _Skewed = False,
        a_indices: _AIndices = False,
        c_indices: _CIndices = False,
        c_factors: _CFactors = False,
        sizes: _Sizes = None,
    ) -> GroupOptions:
        """From options of a command (``WithOptions``). Raises InvalidValue."""
        given = dict(zip(INDICES, (a_indices, c_indices, c_factors), strict=True))
        described: dict[str, object] = {"--along": along, "--skewed": skewed}
        described |= {f"--{n.replace('_', '-')}": there for n, there in given.items()}
        if groups is None:
            for name, value in described.items():
                if value:
                    raise InvalidValue(name, value, "describes groups", "Give --groups too")
        elif sizes is not None:
            raise InvalidValue(
                "--sizes", sizes, "are of products that --groups does not divide", "Give one"
            )
        indices = tuple(n for n, there in given.items() if there)
        return cls(groups, along, skewed, indices, None if sizes is None else parsed_sizes(sizes))

    def over(self, product: Asked) -> Asked:
        """What they make of a product, itself where there are none. Raises InvalidValue for what
        groups do not have."""
        if self.groups is None and self.sizes is None:
            return product
        case = product.case
        assert isinstance(case, GemmCase)
        option, value = ("--groups", self.groups) if self.sizes is None else ("--sizes", "given")
        beside = {
            "--batch": case.batch != 1,
            "--heads": case.num_heads != 1,
            "--bias": case.bias is not None,
            "--residual": case.residual is not None,
            "--layout": case.view != "strided",
            "--epilogue": case.epilogue and self.sizes is not None,
            **dict.fromkeys(product.named, self.sizes is not None),
        }
        for name, given in beside.items():
            if given:
                raise InvalidValue(option, value, f"has no {name} beside it", f"Leave {name} out")
        if self.sizes is not None:
            return Asked(
                GroupedPointersCase(
                    "", sizes=self.sizes, aligned=self._aligned(case), **case.product
                )
            )
        along = one_of("along", self.along or "m", "m", "n", "k")
        extents = {"m": case.M, "n": case.N, "k": case.K}
        return Asked(
            GroupedCase(
                "",
                along=along,
                sizes=self._divided(extents[along]),
                M=case.M,
                N=case.N,
                K=case.K,
                indices=self.indices,
                a_rows=case.M,
                tight=True,
                epilogue=case.epilogue,
                **case.product,
            )
        )

    def _aligned(self, case: GemmCase) -> bool:
        """Whether all rows of products of these sizes fill 16 bytes."""
        return not any(
            columns * dtype.itemsize % 16
            for m, n, k in self.sizes or ()
            for columns, dtype in (
                (m if case.a_transposed else k, case.dtype),
                (k if case.b_transposed else n, case.dtype),
                (n, case.out_dtype),
            )
        )

    def _divided(self, whole: int) -> tuple[int, ...]:
        """The sizes of the groups, of all of the axis together."""
        weights = np.ones(self.groups or 0)
        if self.skewed:
            weights = np.random.default_rng(0).uniform(0.2, 1.2, len(weights))
        ends = np.round(np.cumsum(weights) / weights.sum() * whole).astype(int)
        return tuple(np.diff(ends, prepend=0).tolist())
