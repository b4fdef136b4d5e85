"""Grouped products whose groups, experts, lie on several ranks: rows go to the ranks of their
experts, are multiplied there, and come back. Experts go in chunks: while the rows of one chunk
travel, those of another are multiplied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import pad

from kernelseam.descriptors.common.precision import precision_name
from kernelseam.descriptors.common.validation import MAX_EXTENT, extent, flag, integer
from kernelseam.distributed.agreement import agree
from kernelseam.distributed.operands import check_axes, check_names, own_tensors
from kernelseam.distributed.ranks import Axis, axis_of
from kernelseam.distributed.routes import Route
from kernelseam.distributed.tokens import ExpertLayer, Rows
from kernelseam.distributed.transfers import all_gather
from kernelseam.errors import InvalidValue
from kernelseam.frozen import dataclass
from kernelseam.interop.torch_function import autocast, check_bwd_implementation, wanted
from kernelseam.interop.torch_grouped import grouped_mm as product

Tensor = Any
Function = Callable[[Tensor], Tensor]
_OF_TOKENS = ("a_indices", "out_factors")
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def grouped_mm(
    a: Tensor,
    b: Tensor | Sequence[Tensor | Function],
    offs: Tensor,
    *,
    group: Any,
    a_indices: Tensor | None = None,
    out_factors: Tensor | None = None,
    capacity: int | None = None,
    chunks: int | None = None,
    precision: str | None = None,
    backend: str | None = None,
    implementation: str | None = None,
    bwd_implementation: str | None = None,
    check: bool = False,
) -> Tensor:
    """``kernelseam.interop.torch.grouped_mm`` of rows by experts that lie on the n ranks of
    ``group``: [T, N], what this rank's rows become at their experts.

    a [T, K] is this rank's rows, sorted by expert; T may differ from rank to rank. ``offs`` [E],
    int32, ends the rows of each of all E experts. ``b`` [E/n, K, N] is this rank's experts, those
    from rank·E/n on. Or b is a list, in which functions may stand between (and behind) weights:
    ``[gate_up, swiglu, down]`` is a layer of experts. Each is called with [rows, columns] and
    returns as many rows, each of its own alone, and must not communicate.

    Without ``capacity`` all ranks' ``offs`` are gathered, and the host reads them, once a call:
    exactly the rows that have an expert are sent. With it the host reads nothing, and sends
    ``capacity`` rows for each expert, taken or not: of more rows that a rank has for an expert, the
    last ones are dropped. Rows that are dropped and rows behind the last expert's come out as 0.

    The experts of a rank go in ``chunks`` (2 by default, as many as there are experts, at most):
    the rows of the next one travel while those of one are multiplied, in the gradients too.

    With ``a_indices``, int32 [T], row i is row a_indices[i] of a [tokens, K], and the result
    [tokens, N] has of each token the sum of its rows, each times ``out_factors[i]``, float32 [T],
    where that is given: a whole layer of experts with its router's weights. A token then goes once
    to each rank that has any of its experts (to every rank where most are expected to have some),
    and its sum there, rounded to a's dtype, comes back. The last step has to be weights;
    ``capacity`` and ``chunks`` are refused.

    Every rank calls it alike and walks its gradients back alike, one without rows, too: a rank
    whose loss does not depend on its result, or that asks for other gradients, leaves the others
    waiting.

    Gradients flow to a, the weights and ``out_factors``, those of the sum of all ranks' losses:
    each rank has its experts' whole gradients. They are not differentiated again. float16,
    bfloat16, float32 and float64. Raises as ``attention``; for ``offs`` that are not ascending, or
    end behind a, on every rank, unless they are on a GPU and there is a capacity.
    """
    axis = axis_of(group)

    def make() -> tuple[_ShardedProduct, dict[str, object]]:
        call = _checked(axis, a, b, offs, (a_indices, out_factors), capacity, chunks)
        names = {"backend": backend, "implementation": implementation}
        check_names(**names)
        if precision is not None:
            precision_name("precision", precision)
        check_bwd_implementation(bwd_implementation, "grouped_gemm", "a", {"a": call.a})
        call.options.update(names, precision=precision, bwd_implementation=bwd_implementation)
        return call, {**call.said, **call.options}

    return agree(axis, flag("check", check), make).run()


def _checked(
    axis: Axis,
    a: Tensor,
    b: Any,
    offs: Tensor,
    of_tokens: tuple[Any, Any],
    capacity: int | None,
    chunks: int | None,
) -> _ShardedProduct:
    steps = list(b) if (listed := isinstance(b, list | tuple)) else [b]
    named = {f"b[{i}]" if listed else "b": x for i, x in enumerate(steps)}
    weights = {n: x for n, x in named.items() if isinstance(x, torch.Tensor) or not callable(x)}
    if not weights:
        raise InvalidValue("b", f"{len(steps)} steps", "must have weights", "Give [E/n, K, N]")
    given = {n: x for n, x in zip(_OF_TOKENS, of_tokens, strict=True) if x is not None}
    needed = ("a", "offs", *weights)
    operands = own_tensors({"a": a, "offs": offs, **weights, **given}, needed)
    operands = autocast(operands, ("a", *weights))
    wanted(operands, ("a", *weights, "out_factors"))
    a, offs = operands["a"], operands["offs"]
    check_axes("a", a, "T, K")
    check_axes("offs", offs, "E")
    if offs.dtype is not torch.int32:
        raise InvalidValue("offs", offs.dtype, "must be int32", "Convert it")
    experts = offs.shape[0]
    if experts % axis.size:
        raise InvalidValue(
            "offs.shape[0]",
            experts,
            f"must be a multiple of the {axis.size} ranks",
            "Give experts without rows to the last ranks",
        )
    if a.dtype not in _DTYPES:
        raise InvalidValue(
            "a", a.dtype, f"must be one of {', '.join(map(str, _DTYPES))}", "Convert it"
        )
    each = experts // axis.size
    for name in weights:
        w = operands[name]
        check_axes(name, w, "E/n, K, N")
        wide = a.shape[1] if named[name] is steps[0] else w.shape[1]
        if w.shape[:2] != (each, wide):
            columns = wide if named[name] is steps[0] else "K"
            raise InvalidValue(
                name,
                tuple(w.shape),
                f"must be [{each}, {columns}, N], of the experts of one of {axis.size} ranks",
                "Pass this rank's experts",
            )
        if w.dtype is not a.dtype:
            raise InvalidValue(name, w.dtype, f"must be {a.dtype} as a is", "Convert one of them")
    for name, x in operands.items():
        if x.device != a.device:
            raise InvalidValue(name, f"on {x.device}", f"must be on {a.device}", "Move it there")
    if capacity is not None:
        most = MAX_EXTENT // max(experts * a.shape[1], 1)  # elements that are sent
        capacity = integer("capacity", capacity, 1, most, "Lower it, or leave it out")
    parts = max(min(extent("chunks", 2 if chunks is None else chunks, 1), each), 1)
    rows = None
    if given:
        _check_tokens(operands, steps, {"capacity": capacity, "chunks": chunks})
        rows = Rows(operands["a_indices"], operands.get("out_factors"), offs)
    said: dict[str, object] = {
        "a": f"{a.dtype} [T, {a.shape[1]}]" + " with gradients" * a.requires_grad,
        "offs": f"[{experts}]",
        **{n: f"{[*operands[n].shape]}" + " with gradients" * x.requires_grad
           for n, x in ((n, operands[n]) for n in weights)},
        "b": f"{len(steps)} steps",
        **{n: "given" + " with gradients" * operands[n].requires_grad for n in given},
        "capacity": capacity,
        "chunks": chunks,
    }  # fmt: skip
    steps = [operands.get(n, x) for n, x in named.items()]
    return _ShardedProduct(axis, a, steps, offs, rows, capacity, parts, said, {})


def _check_tokens(operands: Mapping[str, Tensor], steps: Sequence[Any], others: Any) -> None:
    """Refuse what does not go with rows of tokens."""
    for name, value in others.items():
        if value is not None:
            raise InvalidValue(
                name, value, "is for rows of a, not for tokens'", "Leave out it or a_indices"
            )
    if "a_indices" not in operands:
        raise InvalidValue(
            "out_factors", "given", "is for tokens' rows", "Give a_indices, or leave it out"
        )
    if not isinstance(steps[-1], torch.Tensor):
        raise InvalidValue(
            f"b[{len(steps) - 1}]",
            "a function",
            "must be weights where a_indices is given: their products' rows are added up",
            "Apply it to the result, or leave out a_indices",
        )
    for name in _OF_TOKENS:
        x = operands.get(name)
        dtype = torch.int32 if name == "a_indices" else torch.float32
        shape = tuple(operands["a_indices"].shape)
        if x is not None and (x.dtype is not dtype or x.ndim != 1 or tuple(x.shape) != shape):
            raise InvalidValue(
                name,
                f"{x.dtype} {list(x.shape)}",
                f"must be {dtype} [T]" + f" = {list(shape)}" * (len(shape) == 1),
                "Give one for each row",
            )
    indices, tokens = operands["a_indices"], operands["a"].shape[0]
    if indices.device.type == "cpu":
        for i in ((indices < 0) | (indices >= tokens)).nonzero().flatten().tolist()[:1]:
            raise InvalidValue(
                f"a_indices[{i}]",
                int(indices[i]),
                f"must be from 0 to {tokens - 1}, a row of a",
                "Correct it",
            )


@dataclass(frozen=True, eq=False)
class _ShardedProduct:
    """A product that was checked."""

    axis: Axis
    a: Tensor
    steps: list[Any]
    offs: Tensor
    rows: Rows | None
    capacity: int | None
    chunks: int
    said: dict[str, object]
    options: dict[str, Any]

    def run(self) -> Tensor:
        if self.rows is not None:
            layer = ExpertLayer(self.axis, self.steps, self.rows, self.options, self._step(""))
            return layer.run(self.a, _check_ends, self._applied)
        own = pad(self.offs, (0, 1), value=self.a.shape[0])
        gathered = all_gather(self.axis, own, self._step("exchange of counts"))
        ends = gathered[:, :-1]
        counts = ends.diff(dim=1, prepend=ends.new_zeros(len(ends), 1))
        counts = counts.unflatten(1, (self.axis.size, -1))  # [from, to, expert there]
        if self.capacity is not None and gathered.device.type != "cpu":
            return self._by_capacity(counts, self.capacity)
        known: list[list[int]] = gathered.tolist()
        _check_ends(known)
        if self.capacity is not None:
            return self._by_capacity(counts, self.capacity)
        return self._by_counts(counts, [(0, *of[:-1]) for of in known])

    def _by_counts(self, counts: Tensor, ends: list[tuple[int, ...]]) -> Tensor:
        me, n, chunks = self.axis.index, self.axis.size, self._experts()

        def rows(source: int, place: int, chunk: slice) -> int:
            first, of = place * int(counts.shape[2]), ends[source]
            return int(of[first + chunk.stop] - of[first + chunk.start])

        sent = [[rows(me, place, c) for c in chunks] for place in range(n)]
        there = sum(map(sum, sent))
        whole = [*(x for of in sent for x in of), self.a.shape[0] - there]
        *parts, rest = self.a.split(whole)
        routes = [
            Route(
                self.axis,
                [of[i] for of in sent],
                [rows(source, me, c) for source in range(n)],
                self._step(f"rows to experts, chunk {i + 1} of {len(chunks)}"),
            )
            for i, c in enumerate(chunks)
        ]
        of_expert = counts[:, me]
        keys = [
            torch.arange(c.stop - c.start, device=counts.device)
            .repeat(n)
            .repeat_interleave(of_expert[:, c].flatten(), output_size=sum(route.received))
            for c, route in zip(chunks, routes, strict=True)
        ]
        results = self._through([parts[i :: len(chunks)] for i in range(len(chunks))], routes, keys)
        if len(results) > 1:
            cut = [y.split(route.sent) for y, route in zip(results, routes, strict=True)]
            results = [x for place in zip(*cut, strict=True) for x in place]
        if len(rest):
            results.append(results[0].new_zeros(len(rest), results[0].shape[1]))
        return torch.cat(results) if len(results) > 1 else results[0]

    def _by_capacity(self, counts: Tensor, capacity: int) -> Tensor:
        me, n, rows = self.axis.index, self.axis.size, self.a.shape[0]
        slot = torch.arange(capacity, device=counts.device, dtype=counts.dtype)
        taken = slot < counts[me, :, :, None]  # [to, expert there, slot]
        begin = self.offs.view(n, -1, 1) - counts[me, :, :, None]
        where = (begin + slot).masked_fill(~taken, rows).clamp(0, rows)  # whatever offs holds
        there = slot < counts[:, me, :, None]  # [from, expert here, slot]
        # One more row, which stands for all that are not there. Of 1, as below: of 0, a norm or a
        # logarithm has no derivative, and gradients of what a function learns would be NaN.
        a = torch.cat([self.a, self.a.new_ones(1, self.a.shape[1])])
        chunks, parts, routes, keys, places = self._experts(), [], [], [], []
        for i, c in enumerate(chunks):
            each = [(c.stop - c.start) * capacity] * n
            places.append(where[:, c].flatten())
            parts.append(a.index_select(0, places[-1]).split(each))
            step = self._step(f"rows to experts, chunk {i + 1} of {len(chunks)}")
            routes.append(Route(self.axis, each, each, step))
            number = torch.arange(c.stop - c.start, device=counts.device)[:, None]
            keys.append(number.where(there[:, c], c.stop - c.start).flatten())
        results = torch.cat(self._through(parts, routes, keys))
        whole = results.new_zeros(rows + 1, results.shape[1])
        return whole.index_copy(0, torch.cat(places).long(), results)[:rows]

    def _through(
        self, parts: Sequence[Sequence[Tensor]], routes: Sequence[Route], keys: Sequence[Tensor]
    ) -> list[Tensor]:
        """What the parts of each chunk become, in their order."""
        chunks = self._experts()
        sizes = [c.stop - c.start for c in chunks]
        steps = [x.split(sizes) if isinstance(x, torch.Tensor) else [x] * len(chunks)
                 for x in self.steps]  # fmt: skip
        coming, going = routes[0].begin(parts[0]), []
        for i, route in enumerate(routes):
            here = coming
            if i + 1 < len(routes):
                coming = routes[i + 1].begin(parts[i + 1])
            y = self._multiplied(route.end(here), [s[i] for s in steps], keys[i], sizes[i])
            back = Route(
                self.axis,
                route.received,
                route.sent,
                self._step(f"results, chunk {i + 1} of {len(routes)}"),
            )
            going.append((back, back.begin(y.split(route.received))))
        return [back.end(y) for back, y in going]

    def _multiplied(self, x: Tensor, steps: list[Any], keys: Tensor, experts: int) -> Tensor:
        """Rows as they came, of whose experts ``keys`` tells, through the steps: the first product
        gathers them by expert, the last one scatters them again."""
        ordered, order = keys.sort(stable=True)
        numbers = torch.arange(experts, device=keys.device)
        offs = torch.searchsorted(ordered, numbers, right=True, out_int32=True)
        index = order.int()
        products = [i for i, s in enumerate(steps) if isinstance(s, torch.Tensor)]
        for i, step in enumerate(steps):
            if i in products:
                rows = {"a_indices": index} if i == products[0] else {}
                rows |= {"out_indices": index} if i == products[-1] else {}
                x = product(x, step, offs, **rows, **self.options)
                continue
            if self.capacity is not None and i > products[0]:
                # rows of no expert are not written by products
                place = torch.arange(len(x), device=x.device)
                taken = keys < experts if i > products[-1] else place < offs[-1:]
                x = x.where(taken[:, None], 1)
            x = self._applied(i, x)
        return x

    def _applied(self, i: int, x: Tensor) -> Tensor:
        """What a step that is a function makes of rows."""
        y = self.steps[i](x)
        if not isinstance(y, torch.Tensor) or y.ndim != 2 or len(y) != len(x):
            raise InvalidValue(
                f"b[{i}]",
                f"a function that makes {_shape_of(y)} of {list(x.shape)}",
                "must return as many rows",
                "Return [rows, columns]",
            )
        return y

    def _experts(self) -> list[slice]:
        """Chunks of a rank's experts, nearly even."""
        each = self.offs.shape[0] // self.axis.size
        bounds = [each * i // self.chunks for i in range(self.chunks + 1)]
        return [slice(i, j) for i, j in pairwise(bounds)]

    def _step(self, what: str) -> str:
        return f"{what} on rank {self.axis.index} of {self.axis.size}"


def _shape_of(y: object) -> str:
    return str(list(y.shape)) if isinstance(y, torch.Tensor) else type(y).__name__


def _check_ends(gathered: Sequence[Sequence[int]]) -> None:
    """Refuse what the ranks' ``offs`` hold, each with its number of rows behind, on all alike."""
    for rank, (*ends, rows) in enumerate(gathered):
        for g, (before, end) in enumerate(pairwise((0, *ends))):
            if not before <= end <= rows:
                raise InvalidValue(
                    f"offs[{g}]",
                    end,
                    f"must be from {before}, the end before, to T = {rows} (rank {rank} of "
                    f"{len(gathered)})",
                    "Give ascending ends",
                )
