"""The batched GEMM over lists of addresses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from kernelseam.contract import Device, Runtime
from kernelseam.descriptors.address_lists import AddressList, Matrix
from kernelseam.descriptors.gemm import BatchedGemmStrided, check_numbers, gemm_dtypes
from kernelseam.descriptors.gemm_problem import GemmProblem, GemmSpec
from kernelseam.descriptors.lists import (
    SPACED,
    EvenlySpaced,
    Lists,
    arrays_of,
    completed,
    first_arrays,
    plain,
    read_lists,
    row_field,
    vector_of,
)
from kernelseam.descriptors.operands import known_names
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue
from kernelseam.planning import Descriptor, Resolved

NAMES = ("A_ptrs", "B_ptrs", "C_ptrs")


@dataclass(frozen=True, eq=False, kw_only=True)
class BatchedGemmPointers:
    """C[i] = alpha·op(A[i])·op(B[i]) + beta·C[i] over lists of matrices, in one launch.

    ``A_ptrs, B_ptrs, C_ptrs`` have batch·num_heads entries, batch-major (entry b·num_heads + h). Each is a host
    list — a list or tuple of two-dimensional arrays or of addresses, or a NumPy array of integers — or an array of
    64-bit integers on the device, or None until ``bind``. Host lists are copied to the device by ``bind``, which
    keeps them alive. Matrices of one list share their dtype and their row stride (``stride_a_row``, …, in elements;
    left out: the arrays', else packed). Shapes, transposes, factors and dtypes are as in BatchedGemmStrided.

    ``alignment``: a multiple of bytes that all addresses keep, a power of two. It is found from host lists where it is
    left out; for lists that the host cannot read it is then the element size. Promise 16 for 16-byte accesses.

    Host lists are checked for null, misaligned and equal (or overlapping) addresses; ``bind(check=True)`` copies
    device lists to the host, which synchronises, and checks them too. Lists that turn out evenly spaced are served
    as strided memory.

    Raises InvalidValue (naming field, value, rule and remedy) where no such problem exists.
    """

    M: int
    N: int
    K: int
    A_ptrs: object = field(default=None, repr=False)
    B_ptrs: object = field(default=None, repr=False)
    C_ptrs: object = field(default=None, repr=False)
    batch: int = 1
    num_heads: int = 1
    stride_a_row: int | None = None
    stride_b_row: int | None = None
    stride_c_row: int | None = None
    a_transposed: bool = False
    b_transposed: bool = False
    alpha: float = 1.0
    beta: float = 0.0
    dtype: DType | str | None = None
    dtype_c: DType | str | None = None
    dtype_acc: DType | str | None = None
    alignment: int | None = None
    _problem: GemmProblem = field(init=False, repr=False)
    _lists: Lists = field(init=False, repr=False)

    def __post_init__(self) -> None:
        put = object.__setattr__
        check_numbers(self)
        shapes = {
            "A_ptrs": (self.K, self.M) if self.a_transposed else (self.M, self.K),
            "B_ptrs": (self.N, self.K) if self.b_transposed else (self.K, self.N),
            "C_ptrs": (self.M, self.N),
        }
        count = self.batch * self.num_heads
        blank = {
            n: Matrix(*shapes[n], getattr(self, row_field(n)), None, count, "batch·num_heads", n == "C_ptrs")
            for n in NAMES
        }
        given = read_lists(self.operands(), blank)
        dtype, dtype_c, dtype_acc = gemm_dtypes(
            self.dtype, self.dtype_c, self.dtype_acc, first_arrays(given), ("A_ptrs", "B_ptrs"), "C_ptrs"
        )
        kinds = {"A_ptrs": dtype, "B_ptrs": dtype, "C_ptrs": dtype_c}
        matrices = {n: completed(n, blank[n], given.get(n), kinds[n]) for n in NAMES}
        vectors = {n: vector_of(matrices[n], given.get(n), self.alignment) for n in NAMES}
        a, b, c = ((0, 0, cast(int, matrices[n].row_stride)) for n in NAMES)
        problem = GemmProblem(
            GemmSpec(
                dtype, dtype_c, dtype_acc, self.a_transposed, self.b_transposed, "pointers", *vectors.values()
            ),
            self.M, self.N, self.K, self.batch, self.num_heads, a, b, c, 1, self.alpha, self.beta,
        )
        put(self, "_problem", problem)
        put(self, "_lists", Lists.of(problem, matrices, given, vectors, self.alignment is not None))

    @property
    def device(self) -> Device | None:
        """Where the arrays are; None where there are only addresses."""
        return self._lists.device

    def problem(self) -> GemmProblem:
        """The hashable part, without pointers."""
        return self._problem

    def operands(self) -> dict[str, object]:
        """A_ptrs, B_ptrs and C_ptrs, as far as they are given."""
        return {n: v for n in NAMES if (v := getattr(self, n)) is not None}

    def matrix(self, name: str) -> Matrix:
        """What every matrix of a list is."""
        return self._lists.matrices[name]

    def read(self, operands: Mapping[str, object], device: Device) -> dict[str, AddressList]:
        """Lists for this problem on a device, checked as far as the host can read them."""
        known_names(self._problem.operands, operands)
        return self._lists.read(operands, device)

    def resolve(self, operands: Mapping[str, object], runtime: Runtime, device: Device) -> Resolved:
        """Lists in device memory. Raises InvalidValue for what ``read`` refuses."""
        lists = self.read(operands, device)
        pointers, held = self._lists.stage(lists, runtime, device)
        return Resolved(pointers, (lists, *held), arrays_of(lists))

    def check_device(self, resolved: Resolved, runtime: Runtime, device: Device) -> None:
        """Check lists in device memory as host lists are; synchronises."""
        self._lists.check(cast(Mapping[str, AddressList], resolved.keep[0]), runtime)

    def simplified(self) -> tuple[Descriptor, str]:
        """The same problem over strided memory where the host knows all addresses and they are evenly spaced."""
        steps = self._lists.steps()
        return (self, "") if steps is None else (EvenlySpaced(self, self._as_strided(steps), steps), SPACED)

    def _as_strided(self, steps: Mapping[str, int]) -> BatchedGemmStrided:
        """All entries as one batch axis."""
        count = self.batch * self.num_heads
        where: dict[str, Any] = {}
        for name, step in steps.items():
            letter = plain(name)
            where[letter] = self._lists.first(name)
            where[f"stride_{letter.lower()}_batch"] = step if count > 1 else None
            where[row_field(name)] = self.matrix(name).row_stride
        s = self._problem.spec
        try:
            return BatchedGemmStrided(
                M=self.M, N=self.N, K=self.K, batch=count, a_transposed=self.a_transposed,
                b_transposed=self.b_transposed, alpha=self.alpha, beta=self.beta, dtype=s.dtype, dtype_c=s.dtype_c,
                dtype_acc=s.dtype_acc, **where,
            )
        except InvalidValue as e:
            raise InvalidValue(
                "C_ptrs", f"{count} matrices, {steps['C_ptrs']} elements apart", "they share elements",
                "Give every output memory of its own",
            ) from e
