"""The batched GEMM over lists of addresses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any, cast

from kernelseam.contract import Device, Runtime
from kernelseam.descriptors.common.address_lists import AddressList, Matrix
from kernelseam.descriptors.common.lists import (
    ListDescriptor,
    Lists,
    arrays_of,
    begin_lines,
    completed,
    first_arrays,
    given_row,
    plain,
    read_lists,
    row_field,
    vector_of,
)
from kernelseam.descriptors.common.operands import is_address
from kernelseam.descriptors.common.precision import precision_of
from kernelseam.descriptors.common.protocol import Resolved
from kernelseam.descriptors.common.validation import WIDE
from kernelseam.descriptors.gemm.fields import (
    ADDED,
    BatchFields,
    added_dtype,
    are_scaled,
    check_batch,
    gemm_dtypes,
    refuse_idle,
)
from kernelseam.descriptors.gemm.problem import GemmProblem, GemmSpec
from kernelseam.descriptors.gemm.strided import BatchedGemmStrided
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue
from kernelseam.frozen import dataclass

SCALES = ("a_scales_ptrs", "b_scales_ptrs")
NAMES = ("A_ptrs", "B_ptrs", "C_ptrs", "bias_ptrs", "residual_ptrs", *SCALES)
VECTORS = ("bias_ptrs", *SCALES)


@dataclass(frozen=True, eq=False, kw_only=True)
class BatchedGemmPointers(BatchFields, ListDescriptor[GemmProblem]):
    """C[j] = alpha·Σ op(A[i])·op(B[i]) + beta·C[j] + bias[j] + residual[j] over lists of matrices,
    in one launch.

    ``A_ptrs`` and ``B_ptrs`` have batch·num_heads entries, batch-major (entry b·num_heads + h).
    ``C_ptrs``, ``bias_ptrs`` (vectors, N long, added to every row) and ``residual_ptrs`` have one
    for each C: as many, or with groups (batch // c_batch_group)·(num_heads // c_head_group), each
    the sum of its group's products. A list is on the host — a list or tuple of two-dimensional
    arrays or of addresses, or a NumPy array of integers — or an array of 64-bit integers on the
    device, or None until ``bind``; a bias or a residual that ``bind`` will give is announced by
    0. Host lists are copied to the device by ``bind``, which keeps them alive. Matrices of one list
    share their dtype and their row stride (``stride_a_row``, …, in elements; left out: the arrays',
    else packed). Shapes, transposes, factors, dtypes and ``precision`` are as in
    BatchedGemmStrided. An entry of the residual may be its own C, where beta is 0.
    ``a_scales_ptrs`` and ``b_scales_ptrs``, both or none, are for A and B of 8 bits: float32
    vectors, M and N long, one for each A and B, by which rows of op(A) and columns of op(B) are
    multiplied.

    ``alignment``: bytes, a power of two, of which all addresses are multiples. Left out, it is
    found from host lists, and is the element size for lists that the host cannot read. Promise 16
    for 16-byte accesses; 128 also promises that matrices begin at cache lines, which dispatch takes
    into account.

    Host lists are checked for null, misaligned and equal (or overlapping) addresses;
    ``bind(check=True)`` copies device lists to the host, which synchronises, and checks them too.
    Lists that turn out evenly spaced are served as strided memory.

    Raises InvalidValue (naming field, value, rule and remedy) where no such problem exists.
    """

    A_ptrs: object = field(default=None, repr=False)
    B_ptrs: object = field(default=None, repr=False)
    C_ptrs: object = field(default=None, repr=False)
    bias_ptrs: object = field(default=None, repr=False)
    residual_ptrs: object = field(default=None, repr=False)
    a_scales_ptrs: object = field(default=None, repr=False)
    b_scales_ptrs: object = field(default=None, repr=False)
    alignment: int | None = None

    def __post_init__(self) -> None:
        put = object.__setattr__
        check_batch(self)
        refuse_idle(self, "bias", "bias_ptrs", ())
        refuse_idle(self, "residual", "residual_ptrs", ("stride_residual_row",))
        blank = self._blank()
        given = read_lists(self.operands(), blank)
        firsts = first_arrays(given)
        dtype, dtype_c, dtype_acc = gemm_dtypes(
            self.dtype, self.dtype_c, self.dtype_acc, firsts, ("A_ptrs", "B_ptrs"), "C_ptrs", True
        )
        kinds = {"A_ptrs": dtype, "B_ptrs": dtype, "C_ptrs": dtype_c}
        bias, residual = (
            added_dtype(self, n, f"{n}_ptrs", firsts, dtype_c, dtype_acc) for n in ADDED
        )
        kinds |= {
            n: kind
            for n, kind in (("bias_ptrs", bias), ("residual_ptrs", residual))
            if kind is not None
        }
        scaled = are_scaled(self, dtype, SCALES, self.c_batch_group * self.c_head_group > 1)
        kinds |= dict.fromkeys(SCALES, DType.float32) if scaled else {}
        matrices = {n: completed(n, blank[n], given.get(n), kind) for n, kind in kinds.items()}
        vectors = {
            n: m.itemsize if m.vector else vector_of(m, given.get(n), self.alignment)
            for n, m in matrices.items()
        }
        strides = {n: (0, 0, cast(int, m.row_stride)) for n, m in matrices.items()}
        problem = GemmProblem(
            GemmSpec(
                dtype,
                dtype_c,
                dtype_acc,
                self.a_transposed,
                self.b_transposed,
                "pointers",
                vectors["A_ptrs"],
                vectors["B_ptrs"],
                vectors["C_ptrs"],
                bias,
                residual,
                vectors.get("residual_ptrs", WIDE),
                self.c_batch_group * self.c_head_group > 1,
                precision=precision_of(self.precision, dtype, "A and B"),
                scales=scaled,
            ),
            self.M,
            self.N,
            self.K,
            self.batch,
            self.num_heads,
            strides["A_ptrs"],
            strides["B_ptrs"],
            strides["C_ptrs"],
            1,
            self.alpha,
            self.beta,
            self.c_batch_group,
            self.c_head_group,
            residual_strides=strides.get("residual_ptrs", (0, 0, 0)),
            a_scale_strides=(0, 0, int(scaled)),
            b_scale_strides=(0, 0, int(scaled)),
            whole_lines=begin_lines(given, kinds.keys() - {*VECTORS}, self.alignment),
        )
        put(self, "_problem", problem)
        put(self, "_lists", Lists.of(problem, matrices, given, vectors, self.alignment is not None))

    def _blank(self) -> dict[str, Matrix]:
        """The matrices of each list; dtypes and row strides may follow from the arrays."""
        a = (self.K, self.M) if self.a_transposed else (self.M, self.K)
        b = (self.N, self.K) if self.b_transposed else (self.K, self.N)
        products, counted = self.batch * self.num_heads, "batch·num_heads"
        results = (self.batch // self.c_batch_group) * (self.num_heads // self.c_head_group)
        results_counted = (
            counted if results == products else f"{counted} / (c_batch_group·c_head_group)"
        )
        c = (self.M, self.N)
        rows = {n: given_row(n, getattr(self, row_field(n))) for n in NAMES if n not in VECTORS}
        return {
            "A_ptrs": Matrix(*a, rows["A_ptrs"], None, products, counted),
            "B_ptrs": Matrix(*b, rows["B_ptrs"], None, products, counted),
            "C_ptrs": Matrix(*c, rows["C_ptrs"], None, results, results_counted, written=True),
            "bias_ptrs": Matrix(1, self.N, None, None, results, results_counted, vector=True),
            "residual_ptrs": Matrix(
                *c,
                rows["residual_ptrs"],
                None,
                results,
                results_counted,
                may_alias="" if self.beta else "C_ptrs",
            ),
            "a_scales_ptrs": Matrix(1, self.M, None, None, products, counted, vector=True),
            "b_scales_ptrs": Matrix(1, self.N, None, None, products, counted, vector=True),
        }

    @property
    def device(self) -> Device | None:
        """The device of the arrays; None where there are only addresses."""
        return self._lists.device

    def operands(self) -> dict[str, object]:
        """The lists, as far as they are given."""
        return {n: v for n in NAMES if (v := getattr(self, n)) is not None and not _announced(v)}

    def resolve(self, operands: Mapping[str, object], runtime: Runtime, device: Device) -> Resolved:
        """Lists in device memory. Raises InvalidValue for what ``read`` refuses."""
        lists = self.read(operands, device)
        pointers, staged = self._lists.stage(lists, runtime, device)
        return Resolved(pointers, (lists, *staged), arrays_of(lists))

    def check_device(self, resolved: Resolved, runtime: Runtime, device: Device) -> None:
        """Check lists in device memory as host lists are; synchronises."""
        self._lists.check_device(cast(Mapping[str, AddressList], resolved.keep[0]), runtime)

    def _as_strided(self, steps: Mapping[str, int]) -> BatchedGemmStrided:
        """Entries of a list as batches of heads."""
        where: dict[str, Any] = {f"dtype_{n}": getattr(self._problem.spec, n) for n in ADDED}
        for name, step in steps.items():
            operand, matrix = plain(name), self.matrix(name)
            heads = (
                self.num_heads
                if name in ("A_ptrs", "B_ptrs", *SCALES)
                else self.num_heads // self.c_head_group
            )
            batches = matrix.entries // heads
            where[operand] = self._lists.first(name)
            where[f"stride_{operand.lower()}_batch"] = step * heads if batches > 1 else None
            where[f"stride_{operand.lower()}_head"] = step if heads > 1 else None
            if not matrix.vector:
                where[row_field(name)] = matrix.row_stride
        s = self._problem.spec
        try:
            return BatchedGemmStrided(
                M=self.M,
                N=self.N,
                K=self.K,
                batch=self.batch,
                num_heads=self.num_heads,
                a_transposed=self.a_transposed,
                b_transposed=self.b_transposed,
                alpha=self.alpha,
                beta=self.beta,
                c_batch_group=self.c_batch_group,
                c_head_group=self.c_head_group,
                dtype=s.dtype,
                dtype_c=s.dtype_c,
                dtype_acc=s.dtype_acc,
                precision=self.precision,
                **where,
            )
        except InvalidValue as e:
            raise InvalidValue(
                "C_ptrs",
                f"{self._problem.results} matrices, {steps['C_ptrs']} elements apart",
                "they share elements",
                "Give every output memory of its own",
            ) from e


def _announced(value: object) -> bool:
    return is_address(value) and value == 0
