"""The grouped GEMM: products of different sizes in one launch, divided by offsets on the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from typing import Any, ClassVar

import numpy as np

from kernelseam.contract import Device, Runtime
from kernelseam.descriptors.common.captured import bare, captured_operands, epilogue_fields
from kernelseam.descriptors.common.contents import Ints, read_integers, refuse_any
from kernelseam.descriptors.common.operands import (
    describe_all,
    pointer,
)
from kernelseam.descriptors.common.precision import precision_of
from kernelseam.descriptors.common.protocol import Resolved
from kernelseam.descriptors.common.strided import StridedDescriptor
from kernelseam.descriptors.common.validation import (
    WIDE,
    extent,
    packed,
    row_strides,
    vector_bytes,
)
from kernelseam.descriptors.gemm.fields import (
    SCALES,
    OperandFields,
    are_scaled,
    check_product,
    gemm_dtypes,
    narrow_halves,
    refuse_idle,
    scale_block_of,
    traced_epilogue_of,
)
from kernelseam.descriptors.gemm.grouped_problem import (
    AXES,
    INDICES,
    STACKED,
    GroupedGemmProblem,
    GroupedGemmSpec,
)
from kernelseam.descriptors.gemm.problem import GemmSpec
from kernelseam.dtypes import DType
from kernelseam.epilogues import Epilogue
from kernelseam.errors import InvalidValue
from kernelseam.expressions.epilogues import EpilogueExpression, epilogue_text
from kernelseam.frozen import dataclass

_MATRICES = ("A", "B", "C")
_READ = ("offsets", "a_indices", "c_indices")


@dataclass(frozen=True, eq=False, kw_only=True)
class GroupedGemm(OperandFields, StridedDescriptor[GroupedGemmProblem]):
    """C_g = alpha·op(A_g)·op(B_g) + beta·C_g for each group g, in one launch; the host need not
    know the groups' sizes.

    ``offsets``, int32 [groups] on the device, as torch's ``offs``: where each group ends along one
    axis. Group g is from offsets[g − 1] (0 for the first) to offsets[g], may be empty and may begin
    anywhere. ``along`` names the axis:

    * "m": A [M, K] and C [M, N] are divided by rows, B [groups, K, N] has a matrix a group
      (the tokens of experts);
    * "n": B [K, N] and C [M, N] are divided by columns, A [groups, M, K] has a matrix a group;
    * "k": A [M, K] and B [K, N] are divided along what is summed over, C [groups, M, N] has a
      matrix a group (the gradients of experts' weights); that of an empty group becomes beta·C_g.

    The extent of that axis is a capacity: what follows the last offset is neither read nor written.

    In memory A is M×K (K×M where ``a_transposed``) and B is K×N (N×K where ``b_transposed``);
    columns are contiguous. Operands are arrays, addresses (ints), or None until ``bind``. Strides
    count elements; those left out pack row-major.

    ``dtype`` (A and B) comes from the arrays where it is left out, ``dtype_c`` from C's array, else
    it is ``dtype``, float32 for e4m3. beta = 0 never reads C. ``precision`` says how float32 is
    multiplied, as in ``BatchedGemmStrided``.

    A and B of e4m3 may have ``a_scales`` and ``b_scales``, float32, both or none: of rows of op(A),
    [M] where these are divided, else [groups, M], and of columns of op(B), [N] where these are
    divided, else [groups, N]. Strides of 0 repeat them: all for one scale of a tensor. With
    ``scale_block`` = (1, n, k), along "m" alone, scales are of blocks: a_scales [M, ⌈K/k⌉],
    b_scales [groups, ⌈N/n⌉, ⌈K/k⌉].

    ``epilogue``, of groups along "m", and ``preactivation`` are as in ``BatchedGemmStrided``: a
    function (acc, m, n, batch) whose ``batch`` is the group and m the row of the product, whichever
    rows of A and C it is of; ``acc`` has been multiplied by ``c_factors``. A second result has C's
    rows, in their order.

    Offsets and indices that the host may read are checked; ``bind(check=True)`` copies them from
    the device.

    Raises InvalidValue (naming field, value, rule and remedy) where no such problem exists.
    """

    groups: int
    along: str
    offsets: object = field(default=None, repr=False)
    stride_a_group: int | None = None
    stride_b_group: int | None = None
    stride_c_group: int | None = None
    stride_a_scales_group: int | None = None
    stride_b_scales_group: int | None = None
    a_indices: object = field(default=None, repr=False)
    c_indices: object = field(default=None, repr=False)
    c_factors: object = field(default=None, repr=False)
    a_rows: int | None = None
    c_rows: int | None = None
    preactivation: object = field(default=None, repr=False)
    stride_preactivation_row: int | None = None
    epilogue: EpilogueExpression | Epilogue | None = None

    AXES: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **dict.fromkeys(_MATRICES, ("group", "row")),
        "preactivation": ("row",),
        "offsets": (),
        **dict.fromkeys(INDICES, ()),
        "a_scales": ("group", "row", "k"),
        "b_scales": ("group", "column", "k"),
    }

    def __post_init__(self) -> None:
        put = object.__setattr__
        expression = traced_epilogue_of(self, "residual", "preactivation")
        infos = describe_all(self.operands())
        dtype, dtype_c, dtype_acc = gemm_dtypes(
            self.dtype, self.dtype_c, self.dtype_acc, infos, ("A", "B"), "C"
        )
        put(self, "groups", extent("groups", self.groups))
        check_product(self)
        if not isinstance(self.along, str) or self.along not in AXES:
            raise InvalidValue(
                "along", self.along, "must be 'm', 'n' or 'k'", "Name the axis that offsets divide"
            )
        self._refuse_rows_of("epilogue")
        if expression is not None and expression.structure.reductions:
            raise InvalidValue(
                "epilogue",
                "row_sums, column_sums or amax",
                "is of products that are not grouped",
                "Leave it out, and reduce the result",
            )
        pairs = expression is not None and bool(expression.structure.pairs)
        indices, rows = self._indices()
        for name in SCALES:
            self._refuse_idle(name)
        scaled = are_scaled(self, dtype, SCALES, summed=False)
        block = self._scale_block(scaled)
        shapes = {
            "A": (self.K, self.M) if self.a_transposed else (rows.get("a_rows", self.M), self.K),
            "B": (self.N, self.K) if self.b_transposed else (self.K, self.N),
            "C": (rows.get("c_rows", self.M), self.N // 2 if pairs else self.N),
        }
        if self.preactivation is not None:
            shapes["preactivation"] = (rows.get("c_rows", self.M), self.N)
        strides, vectors = {}, {}
        for name, shape in shapes.items():
            kind = dtype if name in ("A", "B") else dtype_c
            strides[name] = self._walk(name, shape, kind)
            vectors[name] = vector_bytes(
                kind,
                (self._matrices(name), *shape),
                strides[name],
                pointer(name, getattr(self, name), infos),
            )
        if pairs:
            narrow_halves(vectors, self.N, self.b_transposed, dtype, dtype_c)
        for name in ("offsets", *indices, *SCALES):
            pointer(name, getattr(self, name), infos)
        product = GemmSpec(
            dtype,
            dtype_c,
            dtype_acc,
            self.a_transposed,
            self.b_transposed,
            "strided",
            vectors["A"],
            vectors["B"],
            vectors["C"],
            precision=precision_of(self.precision, dtype, "A and B"),
            scales=scaled,
            scale_block=block,
            epilogue=None if expression is None else epilogue_text(expression.structure),
            preactivation=self.preactivation is not None,
            vector_p=vectors.get("preactivation", WIDE),
        )
        counts = {"m": self.M, "n": shapes["C"][-1], "batch": self.groups}
        fields: dict[str, Any] = {f"{n.lower()}_strides": s for n, s in strides.items()}
        problem = GroupedGemmProblem(
            GroupedGemmSpec(self.along, product, indices),
            self.groups,
            self.M,
            self.N,
            self.K,
            **fields,
            alpha=self.alpha,
            beta=self.beta,
            a_rows=rows.get("a_rows", 0),
            c_rows=rows.get("c_rows", 0),
            **epilogue_fields(expression, infos, counts),
        )
        if scaled:
            walks = [
                self._scale_walk(n, extents)
                for n, extents in zip(SCALES, problem.scale_extents, strict=True)
            ]
            problem = replace(
                problem,
                a_scale_strides=walks[0][:2],
                b_scale_strides=walks[1][:2],
                scale_k_strides=(walks[0][2], walks[1][2]),
            )
        self._keep(problem, infos, by_axes=True)

    def _indices(self) -> tuple[tuple[str, ...], dict[str, int]]:
        """Those of ``INDICES`` that are given, and how many rows A and C then have."""
        given = tuple(n for n in INDICES if getattr(self, n) is not None)
        self._refuse_rows_of(*given)
        if "a_indices" in given and self.a_transposed:
            raise InvalidValue(
                "a_indices",
                "given",
                "names rows of A, which are columns in memory where a_transposed is set",
                "Give a row-major A",
            )
        rows = {}
        for name in ("a", "c"):
            refuse_idle(self, f"{name}_rows", f"{name}_indices", (f"{name}_rows",))
            if f"{name}_indices" in given:
                asked = getattr(self, f"{name}_rows")
                rows[f"{name}_rows"] = extent(f"{name}_rows", self.M if asked is None else asked)
        return given, rows

    def _refuse_rows_of(self, *names: str) -> None:
        """Raise InvalidValue for what is of rows of groups where these are along another axis."""
        for name in names:
            if self.along != "m" and getattr(self, name) is not None:
                raise InvalidValue(
                    name,
                    "given",
                    f"is of rows of groups along 'm', and these are along {self.along!r}",
                    "Leave it out",
                )

    def _matrices(self, name: str) -> int:
        return self.groups if name in STACKED[self.along] else 1

    def _walk(self, name: str, shape: tuple[int, int], dtype: DType) -> tuple[int, int]:
        group = f"stride_{name.lower()}_group"
        stacked = name in STACKED[self.along]
        if not stacked and (given := getattr(self, group, None)) is not None:
            raise InvalidValue(
                group,
                given,
                f"{name} has no axis of groups: offsets divide it along {self.along!r}",
                "Leave it out",
            )
        whole = (self._matrices(name), *shape)
        known = [None, None, *self._given(name)][-2:]
        steps = row_strides(name.lower(), whole, known, dtype, ("group", "row"))
        return (steps[0] if stacked else 0), steps[1]

    def _scale_block(self, scaled: bool) -> tuple[int, int, int] | None:
        block = scale_block_of(self.scale_block, scaled)
        if block is not None and (self.along != "m" or block[0] != 1):
            raise InvalidValue(
                "scale_block",
                block,
                "of a grouped product is (1, n, k), and groups are along 'm': no block may lie in "
                "two groups",
                "Give scales of rows and columns",
            )
        if block is None:
            for name in SCALES:
                if (step := getattr(self, f"stride_{name}_k")) is not None:
                    raise InvalidValue(
                        f"stride_{name}_k", step, "describes blocks of k", "Give scale_block too"
                    )
        return block

    def _scale_walk(self, name: str, extents: tuple[int, ...]) -> tuple[int, int, int]:
        known = self._valid(name, DType.float32)
        group, outer, k = (*packed(extents, known[: len(extents)]), 0)[:3]
        return (group if extents[0] > 1 else 0), outer, k

    def _axis_strides(self, name: str) -> list[int | None]:
        steps = self._given(name)
        if name in SCALES:
            return steps[: 2 if self.scale_block is None else 3]
        divided = name in _MATRICES and name not in STACKED[self.along]
        return steps[1:] if divided else steps

    def operands(self) -> dict[str, object]:
        """A, B, C, offsets, indices, scales, preactivation and what the epilogue captured, as far
        as they are given."""
        return super().operands() | captured_operands(self.epilogue)

    def _found(self) -> dict[str, object]:
        product, arrays = self._problem.spec.product, self._arrays
        traced = product.epilogue is not None
        epilogue = bare(self.epilogue, arrays, function=None) if traced else None
        return {"dtype": product.dtype, "dtype_c": product.dtype_c, "epilogue": epilogue}

    def check_device(self, resolved: Resolved, runtime: Runtime, device: Device) -> None:
        """Raise InvalidValue for offsets that decrease, or leave the capacity, and for indices
        beyond the rows. Copies them to the host."""
        p = self._problem
        read = read_integers(p.operands, _READ, resolved, runtime, device)
        if "offsets" not in read:
            return
        offsets = read["offsets"]
        check_offsets(offsets, p)
        for name, rows in (("a_indices", p.a_rows), ("c_indices", p.c_rows)):
            if name in read:
                check_indices(name, read[name][: offsets[-1]], rows)


def check_indices(name: str, indices: Ints, rows: int) -> None:
    """Raise InvalidValue, naming the entry, for an index that is no row, and for two rows of a
    product that would be written to one of C."""
    rule = f"must be a row, from 0 to {name[0]}_rows − 1 = {rows - 1}"
    refuse_any(name, indices, (indices < 0) | (indices >= rows), rule, "Correct it")
    if name == "c_indices" and np.unique(indices).size < indices.size:
        order = np.argsort(indices, kind="stable")
        twice = int(order[1:][np.diff(indices[order]) == 0].min())
        raise InvalidValue(
            f"{name}[{twice}]",
            int(indices[twice]),
            "must differ from those before it: two rows cannot be written to one",
            "Give each row its own, and sum afterwards",
        )


def check_offsets(offsets: Ints, p: GroupedGemmProblem) -> None:
    """Raise InvalidValue, naming the entry, for offsets that are not ends of groups in order."""
    capacity = {"m": p.M, "n": p.N, "k": p.K}[p.spec.along]
    before = 0
    for i, end in enumerate(offsets.tolist()):
        if end < before:
            raise InvalidValue(
                f"offsets[{i}]",
                end,
                f"must not be below {'0' if i == 0 else f'its predecessor, {before}'}",
                "Give the end of each group, in order",
            )
        before = end
    if before > capacity:
        raise InvalidValue(
            f"offsets[{len(offsets) - 1}]",
            before,
            f"must not exceed {p.spec.along.upper()} = {capacity}",
            "Correct the last offset, or give larger operands",
        )
