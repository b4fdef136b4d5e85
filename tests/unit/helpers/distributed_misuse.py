"""Distributed calls that a rank makes wrongly, alone or with all others."""

from __future__ import annotations

from typing import Any

Arguments = dict[str, Any]


def calls(group: Any) -> dict[str, Arguments]:
    """Right arguments of each public function, on any number of ranks."""
    import torch

    def rows(*shape: int) -> Any:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(1))

    def ints(*shape: int) -> Any:
        return torch.ones(*shape, dtype=torch.int32)

    size = 1 if group is None else _size(group)
    where: Arguments = {"backend": None, "implementation": None}
    shared: Arguments = {"scale": None, "softcap": None, "sinks": None, "out_dtype": None,
                         "return_lse": False, "batch_invariant": False, **where}  # fmt: skip
    of_rows: Arguments = {"group": group, "method": "ring", "order": "contiguous", "causal": False,
                          "window": None, "alibi_slopes": None, "deterministic": True,
                          "bwd_implementation": None, "check": False, "score_mod": None,
                          "mask_mod": None, **shared}  # fmt: skip
    projection: Arguments = {"group": group, "rows": "sharded", "order": "contiguous", "chunks": 2,
                             "bwd_implementation": None, "check": False, **where}  # fmt: skip
    dense, packed = ({n: rows(*shape) for n in "qkv"} for shape in ((1, 2, 4, 8), (6, 2, 8)))
    return {
        "attention": {
            **dense, **of_rows, "bias": None, "mask": None, "prefix_lengths": None,
            "kv_lengths": None,
        },
        "attention_varlen": {**packed, **of_rows, "cu_seqlens": [0, 3, 6]},
        "attention_paged": {
            "q": rows(2, 1, 2, 8), "k_pages": rows(4, 2, 2, 8), "v_pages": rows(4, 2, 2, 8),
            "block_table": ints(2, 3), "kv_lengths": 6 * ints(2), "group": group, "causal": True,
            "kv_layout": "nhd", "check": False, **shared,
        },
        "qkv_projection": {
            "input": rows(1, 4, 8), "weight": rows(72, 8), "bias": None, "num_heads": 12,
            "num_kv_heads": None, **projection,
        },
        "output_projection": {
            "attn_out": rows(1, 2, 12, 4), "weight": rows(8, 8), "bias": None, "residual": None,
            **projection,
        },
        "grouped_mm": {
            "a": rows(5, 4), "b": rows(1, 4, 3),
            "offs": torch.arange(1, size + 1, dtype=torch.int32) * 5 // size,
            "group": group, "a_indices": None, "out_factors": None, "capacity": None,
            "chunks": None, "precision": None,
            "bwd_implementation": None, "check": False, **where,
        },
        "explain": {
            **dense, "group": group, "order": None, "causal": False, "window": None,
            "machine": None,
        },
        "shard": {"x": rows(24, 4), "dim": 0, "group": group, "causal": False},
        "unshard": {"x": rows(4, 4), "dim": 0, "group": group, "causal": False},
        "shard_qkv": {
            "weight": rows(72, 8), "group": group, "num_heads": 12, "num_kv_heads": None,
        },
        "shard_lengths": {"kv_lengths": ints(2), "page_size": 2, "group": group},
        "Machine": {
            "products": 1e12, "within": 1e9, "between": 1e9, "latency": 1e-5, "ranks_per_host": 8,
        },
    }  # fmt: skip


def _size(group: Any) -> int:
    import torch.distributed as dist

    return int(getattr(group, "size", lambda: 1)()) if dist.is_initialized() else 1


def strange() -> dict[str, Any]:
    """What of torch's fits nowhere above."""
    import warnings

    import torch

    matrix = torch.eye(4)
    with warnings.catch_warnings(action="ignore"):  # torch's, of a prototype
        nested = torch.nested.nested_tensor([matrix, matrix[:2]])
    return {
        "complex": torch.zeros(2, dtype=torch.complex64),
        "sparse": matrix.to_sparse(),
        "nested": nested,
        "0-d": torch.tensor(1.0),
        "a dtype": torch.int8,
    }


def call(group: Any, function: str, /, **changes: Any) -> Any:
    """A call that all ranks make alike."""
    from kernelseam import distributed

    return getattr(distributed, function)(**{**calls(group)[function], **changes})


def twice(group: Any, function: str, operand: str, /, **changes: Any) -> None:
    """Differentiate an operand's gradients."""
    import torch

    x = calls(group)[function][operand].requires_grad_()
    y = call(group, function, **changes, **{operand: x})
    made = y if isinstance(y, torch.Tensor) else sum(part.sum() for part in y)
    (dx,) = torch.autograd.grad(made.square().sum(), x, create_graph=True)
    dx.sum().backward()


def by_one(group: Any, odd: int, function: str, /, **changes: Any) -> None:
    """A call that one rank makes in another way, and all check; a change may be a function of the
    right value."""
    import torch.distributed as dist
    from kernelseam import distributed

    given = {**calls(group)[function], "check": True}
    if dist.get_rank(group) == odd:
        given |= {n: x(given[n]) if callable(x) else x for n, x in changes.items()}
    getattr(distributed, function)(**given)


def agreeing(group: Any, odd: int, what: str) -> Any:
    """A check whose descriptions or refusals are long, or that fails on one rank."""
    import torch.distributed as dist
    from kernelseam.distributed.agreement import agree
    from kernelseam.distributed.ranks import axis_of
    from kernelseam.errors import InvalidValue

    here = dist.get_rank(group) == odd

    def make() -> tuple[str, dict[str, object]]:
        if here and what == "long refusal":
            raise InvalidValue("x", "y" * 9000, "rule " + "r" * 9000, "remedy")
        if here and what == "failure":
            raise TypeError("no such thing")
        tail = "z" if here and what == "long difference" else "y"
        return "made", {"x": "y" * 9000 + tail, "other": 1}

    return agree(axis_of(group), True, make)


def meshes(group: Any, ranks: list[Any], names: tuple[str, ...] | None, function: str) -> None:
    """A call over a mesh of these ranks."""
    from torch.distributed.device_mesh import DeviceMesh

    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=names)
    changes = {"method": "mesh"} if function == "attention" and mesh.ndim == 2 else {}
    call(mesh, function, **changes)
