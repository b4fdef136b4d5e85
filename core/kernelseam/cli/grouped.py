"""``--groups``: a GEMM whose products differ in size, divided by offsets on the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import typer

from kernelseam.cli.progress import working
from kernelseam.cli.running import Run, device_for, execute, measure, normal, report
from kernelseam.cli.shapes import GemmShape, one_of
from kernelseam.contract import Device
from kernelseam.descriptors import GroupedGemm
from kernelseam.descriptors.gemm.grouped_problem import STACKED
from kernelseam.errors import InvalidValue
from kernelseam.oracle.operands import Operands
from kernelseam.oracle.subnormals import flushes
from kernelseam.oracle.verification_grouped import GroupedGemmVerifier
from kernelseam.planning import plan
from kernelseam.plugins import plugins

Groups = Annotated[
    int | None,
    typer.Option(
        "--groups", min=1, help="Groups, as of experts: divides M, or what --along names."
    ),
]
Along = Annotated[
    str | None,
    typer.Option("--along", help="With --groups: the axis that is divided, m, n or k. [m]"),
]
Skewed = Annotated[
    bool,
    typer.Option(
        "--skewed", help="With --groups: sizes drawn from 0.2 to 1.2 of a unit, not equal."
    ),
]


@dataclass(frozen=True)
class GroupedShape:
    """A grouped GEMM: one product's shape, of which ``along`` names the divided axis."""

    product: GemmShape
    groups: int
    along: str
    skewed: bool

    @classmethod
    def of(
        cls, product: GemmShape, groups: int | None, along: str | None, skewed: bool
    ) -> GroupedShape | None:
        """From options; None without groups. Raises InvalidValue for what groups do not have."""
        if groups is None:
            described: tuple[tuple[str, object], ...] = ("--along", along), ("--skewed", skewed)
            for name, value in described:
                if value:
                    raise InvalidValue(name, value, "describes groups", "Give --groups too")
            return None
        beside = {
            "--batch": product.batch != 1,
            "--heads": product.heads != 1,
            "--bias": product.bias is not None,
            "--residual": product.residual is not None,
            "--layout": product.layout != "strided",
            "--epilogue": product.epilogue is not None,
        }
        for name, given in beside.items():
            if given:
                raise InvalidValue(
                    "--groups", groups, f"has no {name} beside it", f"Leave {name} out"
                )
        return cls(product, groups, one_of("along", along or "m", "m", "n", "k"), skewed)

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

    def descriptor(self, **operands: Any) -> GroupedGemm:
        """Over operands by name; those left out have no memory."""
        p = self.product
        return GroupedGemm(
            groups=self.groups,
            M=p.M,
            N=p.N,
            K=p.K,
            along=self.along,
            a_transposed=p.a_transposed,
            b_transposed=p.b_transposed,
            dtype=p.dtype,
            dtype_c=p.dtypes()["C"],
            precision=p.precision,
            **operands,
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
        return arrays


def run(
    shape: GroupedShape,
    backend: str | None,
    implementation: str | None,
    options: Mapping[str, Any],
) -> None:
    """``kernelseam gemm --groups``; ``options``: verify, time, json and seed."""
    device = device_for(shape.descriptor().problem(), backend)
    known = plugins().backend(device.backend)
    with working("making random inputs"):
        arrays = shape.operands(device, options["seed"])
    with working(f"computing the products on {device}"):
        planned = plan(shape.descriptor(**arrays), device=device, implementation=implementation)
        call = planned.bind()
        launches = execute(call)
    verdicts = {}
    if options["verify"]:
        described = {n: known.runtime.describe(x) for n, x in arrays.items()}
        pointers = {n: info.pointer for n, info in described.items() if info is not None}
        read = Operands(pointers, known.runtime, device)
        with working("comparing with the float64 oracle"):
            verdicts["oracle"] = GroupedGemmVerifier().verdict(
                shape.descriptor(**arrays).problem(), read, {}, flushes(known, device)
            )
    timing = measure(call) if options["time"] else None
    p = shape.product
    elements = p.M * p.N * (shape.groups if shape.along == "k" else 1)
    report(
        "grouped_gemm",
        device,
        [Run("", planned, launches, elements, verdicts, timing)],
        verify=options["verify"],
        as_json=options["json"],
    )
