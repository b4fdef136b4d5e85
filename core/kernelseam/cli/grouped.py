"""``--groups`` and ``--sizes``: a GEMM whose products differ in size."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import typer

from kernelseam.cli.running import epilogue_on, normal
from kernelseam.cli.shapes import GemmShape, one_of
from kernelseam.contract import Device
from kernelseam.descriptors import GroupedGemm, GroupedGemmPointers
from kernelseam.descriptors.gemm.grouped_problem import INDICES, STACKED
from kernelseam.epilogues import Gated
from kernelseam.errors import InvalidValue
from kernelseam.expressions.epilogues import traced_epilogue
from kernelseam.plugins import plugins

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


@dataclass(frozen=True)
class ListedShape:
    """Products of ``sizes``; all else is that of one product's shape."""

    product: GemmShape
    sizes: tuple[Three, ...]

    operation = "grouped_gemm_pointers"

    @property
    def elements(self) -> int:
        """Of the results."""
        return sum(m * n for m, n, _ in self.sizes)

    def descriptor(self, **operands: Any) -> GroupedGemmPointers:
        """Over lists by name; those left out have no memory."""
        p = self.product
        m, n, k = zip(*self.sizes, strict=True)
        return GroupedGemmPointers(M=m, N=n, K=k, **p.product, **operands)

    def function(self) -> None:
        """It has no epilogue."""

    def operands(self, device: Device, seed: int) -> dict[str, Any]:
        """Random arrays on a device."""
        p, runtime = self.product, plugins().backend(device.backend).runtime
        rng, dtypes = np.random.default_rng(seed), p.dtypes()
        lists: dict[str, list[Any]] = {f"{n}_ptrs": [] for n in "ABC"}
        for m, n, k in self.sizes:
            a, b = (k, m) if p.a_transposed else (m, k), (n, k) if p.b_transposed else (k, n)
            for name, shape in (("A", a), ("B", b)):
                values = normal(rng, shape, dtypes[name])
                lists[f"{name}_ptrs"].append(runtime.from_host(values, device))
            lists["C_ptrs"].append(runtime.empty((m, n), dtypes["C"], device))
        return lists


_Groups = Annotated[
    int | None,
    typer.Option(
        "--groups", min=1, help="Groups, as of experts: divides M, or what --along names."
    ),
]
_Along = Annotated[
    str | None,
    typer.Option("--along", help="With --groups: the axis that is divided, m, n or k. [m]"),
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
    str | None,
    typer.Option("--sizes", help="Products of sizes of their own: MxNxK,MxNxK,…, in one launch."),
]
_PLACEHOLDER = 1 << 20


@dataclass(frozen=True)
class GroupOptions:
    """The options of groups."""

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

    def over(self, product: GemmShape) -> GroupedShape | ListedShape | GemmShape:
        """What they make of a product, itself where there are none. Raises InvalidValue for what
        groups do not have."""
        if self.groups is None and self.sizes is None:
            return product
        option, value = ("--groups", self.groups) if self.sizes is None else ("--sizes", "given")
        beside = {
            "--batch": product.batch != 1,
            "--heads": product.heads != 1,
            "--bias": product.bias is not None,
            "--residual": product.residual is not None,
            "--layout": product.layout != "strided",
            "--epilogue": product.epilogue is not None and self.sizes is not None,
            **dict.fromkeys(product.named, self.sizes is not None),
        }
        for name, given in beside.items():
            if given:
                raise InvalidValue(option, value, f"has no {name} beside it", f"Leave {name} out")
        if self.sizes is not None:
            return ListedShape(product, self.sizes)
        assert self.groups is not None
        along = one_of("along", self.along or "m", "m", "n", "k")
        return GroupedShape(product, self.groups, along, self.skewed, self.indices)


@dataclass(frozen=True)
class GroupedShape:
    """A grouped GEMM: one product's shape, of which ``along`` names the divided axis."""

    product: GemmShape
    groups: int
    along: str
    skewed: bool
    indices: tuple[str, ...] = ()

    operation = "grouped_gemm"

    @property
    def elements(self) -> int:
        """Of the results."""
        *_, m, n = self.product.shapes()["C"]
        return m * n * (self.groups if self.along == "k" else 1)

    def ends(self) -> npt.NDArray[np.int32]:
        """Of each group, of all of the axis together."""
        p = self.product
        weights = np.ones(self.groups)
        if self.skewed:
            weights = np.random.default_rng(0).uniform(0.2, 1.2, self.groups)
        whole = {"m": p.M, "n": p.N, "k": p.K}[self.along]
        ends = np.round(np.cumsum(weights) / weights.sum() * whole)
        offsets: npt.NDArray[np.int32] = ends.astype(np.int32)
        return offsets

    def function(self) -> Gated | None:
        """The epilogue, over arrays on the host. Raises InvalidValue."""
        return self.product.function(self.groups)

    def descriptor(self, **operands: Any) -> GroupedGemm:
        """Over operands by name; those left out have no memory."""
        p = self.product
        given: dict[str, Any] = dict.fromkeys(self.indices, _PLACEHOLDER)
        if "epilogue" not in operands and (function := self.function()) is not None:
            given["epilogue"] = traced_epilogue(function.function, function.pairs)
        given |= operands
        return GroupedGemm(
            groups=self.groups,
            M=p.M,
            N=p.N,
            K=p.K,
            along=self.along,
            **p.product,
            **given,
        )

    def operands(self, device: Device, seed: int) -> dict[str, Any]:
        """Random arrays on a device, and the offsets."""
        runtime = plugins().backend(device.backend).runtime
        rng, dtypes = np.random.default_rng(seed), self.product.dtypes()
        arrays: dict[str, Any] = {"offsets": runtime.from_host(self.ends(), device)}
        for name, shape in self.product.shapes().items():
            whole = (self.groups, *shape[2:]) if name in STACKED[self.along] else shape[2:]
            if name == "C":
                arrays[name] = runtime.empty(whole, dtypes[name], device)
            else:
                arrays[name] = runtime.from_host(normal(rng, whole, dtypes[name]), device)
        of_rows: dict[str, npt.NDArray[Any]] = {
            "a_indices": rng.integers(0, self.product.M, self.product.M).astype(np.int32),
            "c_indices": rng.permutation(self.product.M).astype(np.int32),
            "c_factors": rng.uniform(0.5, 2, self.product.M).astype(np.float32),
        }
        arrays |= {n: runtime.from_host(of_rows[n], device) for n in self.indices}
        if (function := self.function()) is not None:
            arrays["epilogue"] = epilogue_on(device, function)
        return arrays
