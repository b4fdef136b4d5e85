"""A GEMM's epilogue on the host, by evaluating its graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kernelseam.contract import OperandRule
from kernelseam.descriptors.common.captured import captured
from kernelseam.expressions.epilogues import HALVES, EpilogueStructure
from kernelseam.expressions.evaluation import evaluate
from kernelseam.expressions.nodes import Node
from kernelseam.frozen import dataclass
from kernelseam.reference.implementation import operand_arrays
from kernelseam.reference.reductions import Reductions

Array = npt.NDArray[Any]


class _Spec(Protocol):
    @property
    def epilogue_structure(self) -> EpilogueStructure | None: ...


class _Problem(Protocol):
    """Of products that have an epilogue."""

    @property
    def spec(self) -> _Spec: ...
    @property
    def operands(self) -> tuple[OperandRule, ...]: ...
    @property
    def captured_numbers(self) -> tuple[float, ...]: ...
    @property
    def captured_extents(self) -> tuple[tuple[int, ...], ...]: ...


@dataclass(frozen=True)
class Epilogue:
    """An expression with what it captured."""

    structure: EpilogueStructure
    numbers: tuple[int | float, ...]
    arrays: tuple[Array, ...]

    @classmethod
    def bound(cls, p: _Problem, pointers: Mapping[str, int]) -> Epilogue | None:
        """A problem's, over its operands; None without one."""
        if p.spec.epilogue_structure is None:
            return None
        names = list(map(captured, range(len(p.captured_extents))))
        arrays = operand_arrays([r for r in p.operands if r.name in names], pointers)
        given = tuple(arrays[n] for n in names)
        return cls(p.spec.epilogue_structure, p.captured_numbers, given)

    def columns(self, of_c: slice, n: int) -> Iterator[slice]:
        """The columns of sums that columns of C are made of."""
        if not self.structure.pairs:
            yield of_c
        elif self.structure.pairs == HALVES:
            yield from (slice(of_c.start + x, of_c.stop + x) for x in (0, n // 2))
        else:
            yield from (slice(2 * of_c.start + x, 2 * of_c.stop + x, 2) for x in (0, 1))

    def __call__(
        self,
        sums: Sequence[Array],
        numbers: Array,
        rows: slice,
        columns: slice,
        reductions: Reductions | None = None,
    ) -> Array:
        """Of sums [batch, group, head, row, column] of C's of these numbers. ``reductions`` take
        what is theirs."""
        indices = {
            "m": np.arange(rows.start, rows.stop)[:, None],
            "n": np.arange(columns.start, columns.stop),
            "batch": numbers[..., None, None],
        }

        def of(node: Node, elements: Mapping[str, Array]) -> Array:
            (value,) = evaluate(
                [node], {**elements, **indices}, self.numbers, self.arrays, sums[0].dtype
            )
            return value

        value = of(self.structure.value, dict(zip(self.structure.sums, sums, strict=True)))
        for i, one in enumerate(self.structure.reductions):
            assert reductions is not None
            whole = np.broadcast_to(of(one.value, {"acc": value}), sums[0].shape)
            reductions.add(i, whole, numbers, rows, columns)
            value = of(one.rest, {"acc": value})
        return value
