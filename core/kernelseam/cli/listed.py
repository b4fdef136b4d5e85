"""``--sizes``: products of sizes of their own."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from kernelseam.cli.running import normal
from kernelseam.cli.shapes import GemmShape
from kernelseam.contract import Device
from kernelseam.descriptors import GroupedGemmPointers
from kernelseam.errors import InvalidValue
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
