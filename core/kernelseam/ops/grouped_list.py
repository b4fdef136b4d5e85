"""Products of arrays of any sizes, in lists."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from kernelseam.contract import ArrayInfo
from kernelseam.descriptors.common.options import read_values, values_of
from kernelseam.descriptors.common.wording import Wording
from kernelseam.descriptors.gemm.grouped_pointers import LISTS, GroupedGemmPointers, table_of
from kernelseam.descriptors.gemm.grouped_pointers_problem import TABLE
from kernelseam.descriptors.gemm.options import ListOptions
from kernelseam.dispatch import check_name
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue, format_value
from kernelseam.kernels.listed import WORKSPACE_WORDS, ListedKernels
from kernelseam.kernels.tracing import Enqueue
from kernelseam.ops.array_call import Infos
from kernelseam.ops.calling import operate
from kernelseam.ops.gemm import check_added, result, result_shape
from kernelseam.ops.listed import COLUMNS, ROWS, Lists
from kernelseam.ops.on_torch import OnTorch, none_zeroed
from kernelseam.ops.operation import ByNumbers, Operation
from kernelseam.ops.products import check_matrices, is_strided, transpose
from kernelseam.ops.signatures import Array
from kernelseam.ops.split import Split, split_of
from kernelseam.ops.traced_call import Function
from kernelseam.plugins import plugins

_values = values_of(ListOptions)
_EXTENTS = (("M", "C"), ("N", "C"), ("K", "A"))
"""Those of a product, and the matrix that they are read from."""
_NAMES: dict[tuple[tuple[str, ...], int], tuple[str, ...]] = {}
"""Arrays' names by those of lists and their length."""
_MOST_NAMES = 64
_KEPT = (bool,)
"""In place of packers: launches that may be kept."""
MOST = 1 << 16
"""Products of one call."""


def grouped_mm_list(
    a: Sequence[Array],
    b: Sequence[Array],
    *,
    alpha: float = 1,
    beta: float = 0,
    out: Sequence[Any] | None = None,
    out_dtype: DType | str | None = None,
    precision: str | None = None,
    backend: str | None = None,
    implementation: str | None = None,
    stream: object = None,
) -> list[Array]:
    """[alpha·a_g·b_g + beta·out_g for each g] of a_g [M_g, K_g] and b_g [K_g, N_g], which differ in
    size from one g to the next, in one launch: what cuBLAS calls a grouped batch.

    Extents may be 0. Matrices may be views that are transposed, as in ``bmm``; a_g and b_g have one
    dtype, float16, bfloat16, float32, float64 or e4m3. Products that differ in dtype, in which of
    their matrices are transposed, or in whether their rows begin at multiples of 16 bytes, are
    launches of their own.

    ``out``: arrays for the results, one for each product; ``out_dtype``, ``precision``,
    ``backend``, ``implementation``, ``stream`` as in ``bmm``. Returns the results. Raises
    InvalidValue for what does not fit together, Unsupported with each implementation's reason.

    The call copies addresses and sizes to the device, and waits for its launches. Of torch tensors
    on torch's current stream it does not wait, once a call like it was planned. It cannot be
    captured in a graph: ``GroupedGemmPointers`` is bound once and launched many times.
    """
    arrays = named({"a": a, "b": b, **({} if out is None else {"out": out})})
    options = _values(
        alpha=alpha, beta=beta, out_dtype=out_dtype, precision=precision, products=len(a)
    )
    if not a:
        read_values(ListOptions, options)
        check_added(beta, out is not None)
        for field, name in (("backend", backend), ("implementation", implementation)):
            if name is not None:
                check_name(field, name)
        return []
    results = operate(list_work, arrays, options, backend, implementation, stream)
    if out is not None:
        return list(out)
    return list(results.values())


def named(lists: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """The arrays of lists by their names, "a[0]", …, list after list. Raises InvalidValue for what
    is no list, and for lists of different lengths."""
    first = next(iter(lists))
    for name, given in lists.items():
        if not isinstance(given, list | tuple):
            raise InvalidValue(
                name, format_value(given), "must be a list of arrays", "Give [array, …]"
            )
        count = len(lists[first])
        if len(given) != count:
            raise InvalidValue(
                name, f"{len(given)} arrays", f"{first} has {count}", "Give one for each product"
            )
        if count > MOST:
            raise InvalidValue(name, f"{count} arrays", f"must be at most {MOST}", "Split the list")
    names = _names(tuple(lists), len(lists[first]))
    return dict(zip(names, [x for given in lists.values() for x in given], strict=True))


def _names(lists: tuple[str, ...], count: int) -> tuple[str, ...]:
    names = _NAMES.get((lists, count))
    if names is None:
        names = _made_names(lists, count)
        if len(_NAMES) < _MOST_NAMES:
            _NAMES[lists, count] = names
    return names


def _made_names(lists: tuple[str, ...], count: int) -> tuple[str, ...]:
    return tuple([f"{name}[{g}]" for name in lists for g in range(count)])


# Dynamo would depend on what the cache held, which the traced call itself changes.
_names._torchdynamo_inline = _made_names  # type: ignore[attr-defined]


def _work(operation: Operation, *values: Any) -> None:
    """``values``: those of ``ListOptions``."""
    asked, infos = read_values(ListOptions, values), operation.infos
    check_added(asked.beta, "out[0]" in infos)
    launches: dict[Hashable, list[dict[str, str]]] = {}
    for g in range(asked.products):
        names = {"A": f"a[{g}]", "B": f"b[{g}]", "C": f"out[{g}]"}
        m, n = _shape(infos, names)
        result(operation, names["C"], (m, n), asked.out_dtype, names["A"])
        for name in names.values():
            check_matrices(name, infos[name])
        if _lies_as_transpose(infos[names["C"]]):  # Cᵀ = Bᵀ·Aᵀ
            names = {"A": names["B"], "B": names["A"], "C": names["C"]}
        if 0 in (m, n):
            continue
        launches.setdefault(_combination(infos, names), []).append(names)
    # of empty results alone one is launched, which checks the options
    for products in launches.values() or ([names],):
        _launch(operation, products, asked)


def _function(
    on: OnTorch,
    infos: Infos,
    names: tuple[str, ...],
    options: tuple[Any, ...],
    implementation: str | None,
) -> Function:
    """Of calls like one over ``infos``, of which the caller gives those of ``names``."""
    asked = read_values(ListOptions, options)
    count, is_new = asked.products, "out[0]" not in names
    factors = len(split_of(options).parted(options)[0])
    kinds = [(infos[f"a[{g}]"].dtype, infos[f"out[{g}]"].dtype) for g in range(count)]
    dtypes = [getattr(infos[f"out[{g}]"].owner, "dtype", None) for g in range(count)]
    lists, end = Lists(kinds, asked.precision), len(names)
    known = plugins().cache_of(ListedKernels)

    def run(
        packers: tuple[Any, ...], empty: Any, zeroed: Any, *numbers: Any
    ) -> tuple[tuple[Any, ...], Any, tuple[Enqueue, ...]] | None:
        if zeroed is none_zeroed or on.captures():
            return None
        given = iter(numbers[end : end + factors])
        now = read_values(ListOptions, Split.replaced(options, lambda _: next(given)))
        if is_new and now.beta:  # refused where it is planned: nothing is there to be added
            return None
        at: Any = np.array(numbers[:end], np.int64).reshape(-1, count)
        layouts = np.array(numbers[end + factors :], np.int64).reshape(-1, count, 4)
        made: tuple[Any, ...] = ()
        if is_new:
            m, n = layouts[0, :, ROWS], layouts[1, :, COLUMNS]
            step = np.maximum(n, 1)
            results = np.stack((m, n, step, np.ones_like(n)), axis=1)
            layouts = np.concatenate((layouts, results[None]))
            made = tuple(
                [
                    empty((rows, columns), (row, 1), dtype)
                    for (rows, columns, row, _), dtype in zip(results.tolist(), dtypes, strict=True)
                ]
            )
            at = np.concatenate((at, [[x.data_ptr() for x in made]]))
        found = lists.launches(at, layouts, now.alpha, now.beta, is_new)
        if found is None:
            return None
        if not found:
            return made, None, ()
        ours = [y for x in found if (y := known.find(x.problem, on.device, implementation))]
        if len(ours) < len(found):
            return None
        words = [
            y for x in found for y in (x.addresses.ravel(), table_of(x.problem).view(np.int64))
        ]
        # behind them each launch's workspace, of which nothing is read before it is written
        sizes = [x.workspace_words for x in ours]
        listed = sum(map(len, words))
        words.append(np.zeros(-listed % WORKSPACE_WORDS + sum(sizes), np.int64))
        staged = on.copied(np.concatenate(words))
        place, kept = staged.data_ptr(), packers is _KEPT or len(found) > 1
        workspace = place + 8 * (listed + -listed % WORKSPACE_WORDS)
        launches: list[Enqueue] = []
        for x, of_list, size in zip(found, ours, sizes, strict=True):
            groups = x.problem.groups
            addresses = {n: place + 8 * groups * i for i, n in enumerate((*LISTS, TABLE))}
            if (launch := of_list.packed(addresses, workspace, kept)) is None:
                return None
            launches += launch
            place += 8 * 6 * groups
            workspace += 8 * size
        return made, staged, tuple(launches)

    results = _names(("out",), count)
    new, written = (results, ()) if is_new else ((), results)
    return Function(run, (), _KEPT, new, written, zeroes=False, stages=True)


def _shape(infos: dict[str, ArrayInfo], names: dict[str, str]) -> tuple[int, ...]:
    a, b = infos[names["A"]], infos[names["B"]]
    try:
        return result_shape({"a": a, "b": b}, False, False, False, "Check the order of the axes")
    except InvalidValue as e:
        raise Wording({"a": names["A"], "b": names["B"]}).reworded(e) from None


def _lies_as_transpose(c: ArrayInfo) -> bool:
    return is_strided(c) and not is_strided(transpose(c))


def _views(infos: dict[str, ArrayInfo], names: dict[str, str]) -> dict[str, ArrayInfo]:
    """A, B and C of one product, each [rows, columns] of what is multiplied."""
    exchanged = _lies_as_transpose(infos[names["C"]])
    return {n: transpose(infos[x]) if exchanged else infos[x] for n, x in names.items()}


def _combination(infos: dict[str, ArrayInfo], names: dict[str, str]) -> Hashable:
    """What products of one launch have in common."""
    views = _views(infos, names)
    a, b, c = (views[n] for n in "ABC")
    wide = all(
        x.pointer % 16 == 0 and all(s * x.dtype.itemsize % 16 == 0 for s in x.strides if s != 1)
        for x in (a, b, c)
    )
    return a.dtype, c.dtype, is_strided(a), is_strided(b), wide


def _launch(operation: Operation, products: list[dict[str, str]], asked: ListOptions) -> None:
    views = [_views(operation.infos, names) for names in products]
    transposed = {n: is_strided(views[0][n]) for n in "AB"}
    fields: dict[str, Any] = {
        f"{n}_ptrs": [transpose(x[n]) if transposed.get(n) else x[n] for x in views] for n in "ABC"
    }
    words = {
        f"{n}_ptrs[{i}]": name for i, names in enumerate(products) for n, name in names.items()
    }
    extents = {f"{x}[{i}]": f"{n}_ptrs[{i}]" for x, n in _EXTENTS for i in range(len(products))}
    words |= {f"{n}_ptrs": name for n, name in products[0].items()}  # their dtype is all's
    names = {name: name for of in products for name in of.values()}
    try:
        operation.launch_lists(
            {name: operation.infos[name] for name in names},
            GroupedGemmPointers(
                M=[x["C"].shape[0] for x in views],
                N=[x["C"].shape[1] for x in views],
                K=[x["A"].shape[1] for x in views],
                a_transposed=transposed["A"],
                b_transposed=transposed["B"],
                alpha=asked.alpha,
                beta=asked.beta,
                precision=asked.precision,
                **fields,
            ),
            names,
            {of["C"] for of in products},
        )
    except InvalidValue as e:
        raise Wording(words, extents).reworded(e) from None


list_work = ByNumbers(_work, _function)
