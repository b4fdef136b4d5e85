"""The batched GEMM over lists of addresses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from kernelseam.contract import ArrayInfo, Device, OperandRule, Runtime
from kernelseam.descriptors.address_lists import (
    Addresses,
    AddressList,
    Matrix,
    check_entries,
    fetch,
    read_list,
    spacing,
    stage,
)
from kernelseam.descriptors.gemm import BatchedGemmStrided, check_numbers, gemm_dtypes
from kernelseam.descriptors.operands import known_names
from kernelseam.descriptors.gemm_problem import GemmProblem, GemmSpec
from kernelseam.descriptors.validation import WIDE, check_walk, integer, row_strides, vector_bytes
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
    _matrices: Mapping[str, Matrix] = field(init=False, repr=False)
    _lists: Mapping[str, AddressList] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        put = object.__setattr__
        check_numbers(self)
        shapes = {
            "A_ptrs": (self.K, self.M) if self.a_transposed else (self.M, self.K),
            "B_ptrs": (self.N, self.K) if self.b_transposed else (self.K, self.N),
            "C_ptrs": (self.M, self.N),
        }
        lists = self._read(self.operands(), {n: Matrix(*shapes[n], self._row(n), None) for n in NAMES}, None)
        infos: dict[str, ArrayInfo] = {n: found.matrix for n, found in lists.items() if found.matrix is not None}
        dtype, dtype_c, dtype_acc = gemm_dtypes(
            self.dtype, self.dtype_c, self.dtype_acc, infos, ("A_ptrs", "B_ptrs"), "C_ptrs"
        )
        matrices, vectors = {}, []
        for name, shape in shapes.items():
            kind = dtype_c if name == "C_ptrs" else dtype
            row = self._row(name)
            if row is None and name in lists:
                row = lists[name].row_stride
            (row,) = row_strides(name[0].lower(), shape, [row], kind, ("row",))
            matrices[name] = Matrix(*shape, row, kind)
            rule = OperandRule(name, kind, shape, (row, 1), kind.itemsize, written=name == "C_ptrs")
            check_walk(rule, [f"stride_{name[0].lower()}_row"])
            vectors.append(vector_bytes(kind, shape, (row,), self._alignment(lists.get(name), kind)))
        a, b, c = ((0, 0, cast(int, matrices[n].row_stride)) for n in NAMES)
        problem = GemmProblem(
            GemmSpec(dtype, dtype_c, dtype_acc, self.a_transposed, self.b_transposed, "pointers", *vectors),
            self.M, self.N, self.K, self.batch, self.num_heads, a, b, c, 1, self.alpha, self.beta,
        )
        put(self, "_problem", problem)
        put(self, "_matrices", matrices)
        put(self, "_lists", lists)
        self._check(lists)

    def _row(self, name: str) -> int | None:
        row: int | None = getattr(self, f"stride_{name[0].lower()}_row")
        return row

    def _alignment(self, found: AddressList | None, dtype: DType) -> int:
        """What the plan may rely on: the promise, else what the host can read, else the element size."""
        if self.alignment is not None:
            promised = integer("alignment", self.alignment, dtype.itemsize, 4096, "Give 16, or the element size")
            if promised & (promised - 1):
                raise InvalidValue("alignment", promised, "must be a power of two", "Give 16, or the element size")
            return promised
        if found is None or found.addresses is None or (found.addresses % WIDE).any():
            return dtype.itemsize
        return WIDE

    def _read(
        self, operands: Mapping[str, object], matrices: Mapping[str, Matrix], device: Device | None
    ) -> dict[str, AddressList]:
        """The lists, of the right length and on one device."""
        lists = {n: read_list(n, v, matrices[n]) for n, v in operands.items() if v is not None}
        count = self.batch * self.num_heads
        for name, found in lists.items():
            if found.entries != count:
                raise InvalidValue(
                    name, f"{found.entries} entries", f"must have batch·num_heads = {count}",
                    "Give one entry a matrix, batch-major",
                )
            device = device or found.device
            if found.device not in (None, device):
                raise InvalidValue(name, f"on {found.device}", f"the others are on {device}", "Move all to one device")
        return lists

    def _live(self) -> tuple[str, ...]:
        """The lists whose entries are read."""
        p = self._problem
        if not p.matrices * p.M * p.N:
            return ()
        return NAMES if p.reads_inputs else NAMES[2:]

    def _check(self, lists: Mapping[str, AddressList], runtime: Runtime | None = None) -> None:
        """Check the entries that are read: those the host knows, and with a runtime those on the device too."""
        s = self._problem.spec
        vectors = dict(zip(NAMES, (s.vector_a, s.vector_b, s.vector_c), strict=True))
        known: dict[str, Addresses] = {}
        for name in self._live():
            found = lists.get(name)
            if found is not None and found.addresses is not None:
                known[name] = found.addresses
            elif found is not None and runtime is not None:
                known[name] = fetch(found.source, runtime)
        check_entries(known, self._matrices, vectors)

    @property
    def device(self) -> Device | None:
        """Where the arrays are; None where there are only addresses."""
        return next((d for found in self._lists.values() if (d := found.device)), None)

    def problem(self) -> GemmProblem:
        """The hashable part, without pointers."""
        return self._problem

    def operands(self) -> dict[str, object]:
        """A_ptrs, B_ptrs and C_ptrs, as far as they are given."""
        return {n: v for n in NAMES if (v := getattr(self, n)) is not None}

    def matrix(self, name: str) -> Matrix:
        """What every matrix of a list is."""
        return self._matrices[name]

    def read(self, operands: Mapping[str, object], device: Device) -> dict[str, AddressList]:
        """Lists for this problem on a device, checked as far as the host can read them."""
        known_names(self._problem.operands, operands)
        lists = self._read(operands, self._matrices, device)
        self._check(lists)
        spec = self._problem.spec
        for name, wide in zip(NAMES, (spec.vector_a, spec.vector_b, spec.vector_c), strict=True):
            on_device = name in lists and lists[name].addresses is None
            if on_device and self.alignment is None and wide > self._matrices[name].itemsize:
                raise InvalidValue(
                    name, "a list on the device", "the plan relies on 16-byte alignment, found from a host list",
                    "Plan with this list, or with alignment=16 to promise it",
                )
        return lists

    def resolve(self, operands: Mapping[str, object], runtime: Runtime, device: Device) -> Resolved:
        """Lists in device memory. Raises InvalidValue for what ``read`` refuses."""
        lists = self.read(operands, device)
        pointers: dict[str, int] = {}
        keep: list[object] = [lists]
        for name in self._live():
            if name in lists and lists[name].addresses is not None:
                held, pointers[name] = stage(cast(Addresses, lists[name].addresses), runtime, device)
                keep.append(held)
            elif name in lists:
                pointers[name] = cast(ArrayInfo, lists[name].words).pointer
        return Resolved(pointers, tuple(keep), arrays_of(lists))

    def check_device(self, resolved: Resolved, runtime: Runtime, device: Device) -> None:
        """Check lists in device memory as host lists are; synchronises."""
        self._check(cast(Mapping[str, AddressList], resolved.keep[0]), runtime)

    def simplified(self) -> tuple[Descriptor, str]:
        """The same problem over strided memory where the host knows all addresses and they are evenly spaced."""
        steps: dict[str, int] = {}
        for name in self._live():
            found = self._lists.get(name)
            if found is None or found.addresses is None:
                return self, ""
            step = spacing(found.addresses, self._matrices[name].itemsize)
            if step is None:
                return self, ""
            steps[name] = step
        if not steps:
            return self, ""
        note = "addresses are evenly spaced: the strided way is taken"
        return EvenlySpaced(self, self._as_strided(steps), steps), note

    def _as_strided(self, steps: Mapping[str, int]) -> BatchedGemmStrided:
        """All entries as one batch axis."""
        count = self.batch * self.num_heads
        where: dict[str, Any] = {}
        for name, step in steps.items():
            letter = name[0]
            where[letter] = int(cast(Addresses, self._lists[name].addresses)[0])
            where[f"stride_{letter.lower()}_batch"] = step if count > 1 else None
            where[f"stride_{letter.lower()}_row"] = self._matrices[name].row_stride
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


@dataclass(frozen=True, eq=False)
class EvenlySpaced:
    """Address lists served as strided memory: bound by the lists' names, computed by strides."""

    lists: BatchedGemmPointers
    strided: BatchedGemmStrided
    steps: Mapping[str, int]
    """Elements from entry to entry, by list."""

    def problem(self) -> GemmProblem:
        """The strided problem."""
        return self.strided.problem()

    def operands(self) -> dict[str, object]:
        """The lists."""
        return self.lists.operands()

    def simplified(self) -> tuple[EvenlySpaced, str]:
        """Itself."""
        return self, ""

    def resolve(self, operands: Mapping[str, object], runtime: Runtime, device: Device) -> Resolved:
        """Addresses of the first entries. Raises InvalidValue for lists that are spaced otherwise."""
        pointers: dict[str, int] = {}
        lists = self.lists.read(operands, device)
        for name, found in lists.items():
            if name not in self.steps:
                continue
            step = None if found.addresses is None else spacing(found.addresses, self.lists.matrix(name).itemsize)
            if found.addresses is None or step != self.steps[name]:
                raise InvalidValue(
                    name, "a list on the device" if found.addresses is None else "a list spaced otherwise",
                    f"the plan walks entries {self.steps[name]} elements apart, as the lists it was made with",
                    "Plan again with this list",
                )
            pointers[name[0]] = int(found.addresses[0])
        return Resolved(pointers, tuple(operands.values()), arrays_of(lists))


def arrays_of(lists: Mapping[str, AddressList]) -> tuple[ArrayInfo, ...]:
    """One array of each list, to tell whose current stream is meant."""
    return tuple(info for found in lists.values() if (info := found.matrix or found.words))
