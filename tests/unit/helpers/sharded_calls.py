"""What each rank of a test does with DTensors: the same call over the whole and over shards."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """A call by its operands' shapes, where each is sharded (the axis, or None), and where the
    results are to be: an axis, None, or "sum" of partial ones."""

    function: str
    shapes: tuple[Shape, ...]
    given: tuple[int | None, ...]
    results: tuple[int | str | None, ...]
    names: tuple[str, ...] = ()
    """The keywords of the last operands."""
    options: dict[str, Any] = field(default_factory=dict)
    moved: bool = False
    """Operands lie otherwise than any rule has them: torch moves them."""


def shown(case: Case) -> str:
    added = [*case.names, *[f"{n}={x}" for n, x in case.options.items()]]
    return " ".join(
        [case.function, "".join("-" if x is None else str(x) for x in case.given), *added]
    )


def _function(name: str) -> Any:
    import kernelseam
    import kernelseam.interop.torch as ks

    if name == "grouped_mm_list":
        return lambda a, b, c, d: tuple(ks.grouped_mm_list([a, b], [c, d]))
    return getattr(kernelseam, name) if name.endswith("_paged") else getattr(ks, name)


def _operands(case: Case) -> list[Any]:
    import torch

    generator = torch.Generator().manual_seed(3)
    result = []
    for i, shape in enumerate(case.shapes):
        name = _name(case, i)
        if name in ("block_table", "slot_mapping"):
            x = torch.randperm(math.prod(shape), generator=generator).view(shape).int()
        elif name in ("kv_lengths", "prefix_lengths"):
            x = torch.arange(1, shape[0] + 1, dtype=torch.int32)
        elif name in ("cu_seqlens_q", "cu_seqlens_k"):
            x = torch.tensor([0, 2, 6], dtype=torch.int32)
        elif name == "offs":
            x = torch.tensor([1, 1, 6], dtype=torch.int32)
        elif name == "mask":
            x = torch.rand(shape, generator=generator) < 0.7
        else:
            x = torch.randn(shape, generator=generator, dtype=torch.float64)
            x = x.float() if name in ("sinks", "alibi_slopes") else x
        result.append(x)
    return result


def _name(case: Case, i: int) -> str | None:
    first = len(case.shapes) - len(case.names)
    return case.names[i - first] if i >= first else None


def _called(case: Case, operands: list[Any]) -> tuple[Any, ...]:
    first = len(operands) - len(case.names)
    named = dict(zip(case.names, operands[first:], strict=True))
    result = _function(case.function)(*operands[:first], **named, **case.options)
    return result if isinstance(result, tuple) else (result,)


def sharded(group: Any, case: Case) -> dict[str, Any]:
    """Errors of results and gradients against the whole's, whether results lie where they are to,
    and how many transfers the forward made."""
    import torch
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    mesh = _mesh(group)

    def placed(x: Any, axis: int | str | None) -> Any:
        one = Replicate() if axis is None else Partial() if axis == "sum" else Shard(axis)
        return [one]

    whole = _operands(case)
    shards = [
        distribute_tensor(x, mesh, placed(x, axis))
        for x, axis in zip(whole, case.given, strict=True)
    ]
    differentiable = [
        i for i, x in enumerate(whole)
        if x.is_floating_point() and not case.function.endswith("_paged")
        and _name(case, i) not in ("alibi_slopes", "cos", "sin")
    ]  # fmt: skip
    for i in differentiable:
        whole[i].requires_grad_()
        shards[i].requires_grad_()
    want = _called(case, whole)
    with CommDebugMode() as transfers:
        have = _called(case, shards)
    assert all(isinstance(x, DTensor) for x in have)
    found: dict[str, Any] = {"transfers": transfers.get_total_counts(), "errors": []}
    found["placed"] = [
        tuple(x.placements) == tuple(placed(x, axis))
        for x, axis in zip(have, case.results, strict=True)
    ]
    pairs = list(zip(want, have, strict=True))
    if differentiable:
        generator = torch.Generator().manual_seed(4)
        given = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in want]
        torch.autograd.backward(want, given)
        torch.autograd.backward(have, [distribute_tensor(g, mesh, [Replicate()]) for g in given])
        pairs += [(whole[i].grad, shards[i].grad) for i in differentiable]
    for a, b in pairs:
        assert a.shape == b.shape and a.dtype == b.dtype
        found["errors"].append(float((a - b.full_tensor()).detach().abs().max()))
    return found


def _mesh(group: Any) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh.from_group(group, "cpu")


def by_batch_and_heads(group: Any) -> tuple[list[str], int, float]:
    """Over a mesh of two dimensions, entries by one and heads by the other: (placements, transfers,
    the largest error)."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    case = Case("attention", ((2, 4, 6, 8), (2, 2, 6, 8), (2, 2, 6, 8)), (), ())
    whole, mesh = _operands(case), init_device_mesh("cpu", (2, 2))
    shards = [distribute_tensor(x, mesh, [Shard(0), Shard(1)]) for x in whole]
    with CommDebugMode() as transfers:
        have = _function("attention")(*shards, causal=True)
    error = (have.full_tensor() - _function("attention")(*whole, causal=True)).abs().max()
    return [str(p) for p in have.placements], transfers.get_total_counts(), float(error)


def by_options(group: Any) -> list[str]:
    """Dtypes and shapes of calls that differ by an option alone, and by nothing that torch keys
    rules by of itself."""
    import torch
    from torch.distributed.tensor import Shard, distribute_tensor

    q = torch.randn(2, 2, 2, 8)
    mesh = _mesh(group)
    x = distribute_tensor(q, mesh, [Shard(0)])
    attention, bmm = _function("attention"), _function("bmm")
    a = distribute_tensor(torch.randn(2, 4, 4), mesh, [Shard(1)])
    results = [
        attention(x.half(), x.half(), x.half()),
        attention(x.half(), x.half(), x.half(), out_dtype="float32"),
        attention(x, x, x, return_lse=True)[1],
        attention(x, x, x, layout="bshd", return_lse=True)[1],
        bmm(a, a),
        bmm(a, a, a_transposed=True),
    ]
    return [f"{x.dtype} {list(x.shape)} {x.placements[0]}" for x in results]


def beside(group: Any, function: str) -> None:
    """A rank's own tensor beside DTensors."""
    import kernelseam.interop.torch
    import torch
    from torch.distributed.tensor import Shard, distribute_tensor

    q = distribute_tensor(torch.randn(2, 2, 4, 8), _mesh(group), [Shard(0)])
    lengths = torch.tensor([3, 4], dtype=torch.int32)
    module = kernelseam if function == "plain" else kernelseam.interop.torch
    module.attention(q, q, q, kv_lengths=lengths)


def compiled(group: Any) -> tuple[str, float]:
    """Placements of a compiled call, and its error."""
    import torch
    from torch.distributed.tensor import Shard, distribute_tensor

    attention = _function("attention")
    q = torch.randn(2, 2, 4, 8, generator=torch.Generator().manual_seed(0))
    shard = distribute_tensor(q, _mesh(group), [Shard(1)])

    def layer(x: Any) -> Any:
        return attention(x, x, x, causal=True)

    made = torch.compile(layer, backend="aot_eager", fullgraph=True)(shard)
    return str(made.placements[0]), float((made.full_tensor() - layer(q)).abs().max())
