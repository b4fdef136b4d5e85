"""Sharding rules of the operators for DTensors.

``RULES`` names the axes of each operator's tensors, a letter each, and the letters that may be
sharded, as in an einsum. Along such a letter, tensors that have it are sharded on that axis, inputs
without it are replicated, and results that sum over it are partial sums. torch expands this to
meshes of any number of dimensions, and redistributes inputs that lie otherwise.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from kernelseam.descriptors.attention.options import ScoreOperands
from kernelseam.descriptors.common.options import options_of
from kernelseam.errors import InvalidValue
from kernelseam.frozen import dataclass
from kernelseam.interop.torch_library.namespace import operator_of

Shape = Sequence[int]
Shapes = Mapping[str, Shape]
Options = Mapping[str, Any]


@dataclass(frozen=True)
class Result:
    """The axes of a result, and the letters that it sums over."""

    axes: str
    sums: str = ""


@dataclass(frozen=True)
class Sharding:
    """``axes``: given input → its axes, where "." is never sharded. ``letters``: those along which
    the call may be sharded."""

    axes: Mapping[str, str]
    results: Sequence[Result]
    letters: str


Rule = Callable[[Shapes, Options], Sharding]
_NONE = Result("")
"""A result that was not requested."""


def _repeating(shape: Shape, plane: str) -> str:
    """The axes of a tensor that broadcasts to ``plane``; "." where its extent is 1."""
    letters = plane[len(plane) - len(shape) :]
    return "".join("." if n == 1 else x for n, x in zip(shape, letters, strict=True))


def _dense(options: Options, default: str = "bhsd") -> tuple[str, str]:
    """The axes of queries and of keys."""
    return ("BHSD", "BHLD") if options.get("layout", default) == "bhsd" else ("BSHD", "BLHD")


_PLANES = {n: o.axes or "" for n, o in options_of(ScoreOperands).items()}


def _attention(q: str, k: str, lse: str, letters: str, shapes: Shapes, options: Options) -> Any:
    """(inputs' axes, the keys' axes, letters). A single KV head is not sharded, since all query
    heads share it; nor are scales, which may be of blocks."""
    keys = shapes["k"] if "k" in shapes else shapes["k_pages"]
    if keys[k.index("H")] == 1:
        k = k.replace("H", ".")
    axes = {"q": q, "k": k, "v": k, "k_pages": k, "v_pages": k, "block_table": "B.", "dout": q,
            "out": q, "dlse": lse, "lse": lse}  # fmt: skip
    axes |= {n: _repeating(shapes[n], p) for n, p in _PLANES.items() if n in shapes}
    if any(n.endswith("_scales") for n in shapes):
        letters = ""
    return {n: axes.get(n, "." * len(x)) for n, x in shapes.items()}, k, letters


def _forward(q: str, k: str, lse: str, letters: str, shapes: Shapes, options: Options) -> Sharding:
    axes, _, letters = _attention(q, k, lse, letters, shapes, options)
    asked = options.get("return_lse", True)
    return Sharding(axes, (Result(q), Result(lse) if asked else _NONE), letters)


def _backward(q: str, k: str, lse: str, letters: str, shapes: Shapes, options: Options) -> Sharding:
    axes, k, letters = _attention(q, k, lse, letters, shapes, options)
    results = [Result(q), *[Result(k, _lacking(k))] * 2]
    for name, asked in (("bias", "bias_gradient"), ("sinks", "sink_gradient")):
        wanted = options[asked] and name in axes
        results.append(Result(axes[name], _lacking(axes[name])) if wanted else _NONE)
    return Sharding(axes, results, letters)


def _lacking(axes: str) -> str:
    """The letters of batch and heads that an operand lacks, over which its gradient is summed."""
    return "".join(x for x in "BH" if x not in axes)


def _paged(shapes: Shapes, options: Options) -> Sharding:
    packed = "cu_seqlens_q" in shapes
    q = "THD" if packed else _dense(options, "bshd")[0]
    pages = ".LHD" if options.get("kv_layout", "nhd") == "nhd" else ".HLD"
    letters, lse = ("H", "HT") if packed else ("BH", "BHS")
    return _forward(q, pages, lse, letters, shapes, options)


def _gathered(shapes: Shapes, options: Options) -> Sharding:
    """Sharded by heads; dense rows also by entries, and with slots by tokens. Pages are replicated
    but for their heads."""
    pages = ".LHD" if options.get("kv_layout", "nhd") == "nhd" else ".HLD"
    slots = shapes.get("slot_mapping", ())
    packed = "cu_seqlens" in shapes or len(slots) == 1
    rows, entries = _dense(options, "bshd")[0], "B"
    if packed:
        rows, entries = rows.removeprefix("B"), "."
    axes = {"k_pages": pages, "v_pages": pages, "k": rows, "v": rows, "kv_lengths": entries}
    axes |= {"slot_mapping": "BS"[2 - len(slots) :], "block_table": f"{entries}."}
    for name in ("k_scales", "v_scales"):
        if name in shapes:
            one = "H" if shapes[name] not in ((), (1,)) else "." * len(shapes[name])
            axes[name] = pages.removesuffix("D") if len(shapes[name]) == 3 else one
    axes = {n: axes.get(n, "." * len(x)) for n, x in shapes.items()}
    letters = "H" + "B" * (not packed) + "S" * bool(slots)
    return Sharding(axes, (Result(rows), Result(rows) if "v_pages" in shapes else _NONE), letters)


def _product(shapes: Shapes, options: Options) -> tuple[dict[str, str], str, str]:
    """(the factors' axes, the product's, letters)."""
    batch = "BH"[: len(shapes["a"]) - 2]
    a = batch + ("KM" if options.get("a_transposed") else "MK")
    b = batch + ("NK" if options.get("b_transposed") else "KN")
    scaled = any(n.endswith("_scales") for n in shapes)
    return {"a": a, "b": b}, f"{batch}MN", "" if scaled else f"{batch}MN"


def _gemm(shapes: Shapes, options: Options) -> Sharding:
    axes, c, letters = _product(shapes, options)
    if "bias" in shapes:
        axes["bias"] = _repeating(shapes["bias"], c[:-2] + "N")
    if "residual" in shapes:
        axes["residual"] = _repeating(shapes["residual"], c)
    axes["out"] = c
    axes = {n: axes.get(n, "." * len(x)) for n, x in shapes.items()}
    sums = "K" if letters and not {"bias", "residual", "out"} & {*shapes} else ""
    return Sharding(axes, [Result(c, sums)], letters + sums)


def _gemm_bwd(shapes: Shapes, options: Options) -> Sharding:
    axes, c, letters = _product(shapes, options)
    if options.get("sum_repeats"):  # along strides of 0, which shapes do not show
        return Sharding({"dc": c, **axes}, [_NONE, _NONE], "")
    da = Result(axes["a"], "N") if options["a_gradient"] else _NONE
    db = Result(axes["b"], "M") if options["b_gradient"] else _NONE
    return Sharding({"dc": c, **axes}, [da, db], letters + "K")


def _qkv(shapes: Shapes, options: Options) -> Sharding:
    """Not sharded by heads: the weight's rows are those of q, k and v in order."""
    input = "BSC"[3 - len(shapes["input"]) :]
    one = input.removesuffix("SC") + _dense(options)[0][1:]
    axes = {"input": input, "weight": "RC", "bias": "R", **dict.fromkeys("qkv", one)}
    if "positions" in shapes:
        axes["positions"] = "BS"[2 - len(shapes["positions"]) :]
    axes = {n: axes.get(n, "." * len(x)) for n, x in shapes.items()}
    letters = "B" if "cos" in shapes else "BS"  # whose rows begin at first_position
    return Sharding(axes, [Result(one)] * 3, letters)


def _projected(options: Options, *results: Result) -> list[Result]:
    """The requested gradients of a projection."""
    wanted = (options["input_gradient"], options["weight_gradient"], options["has_bias"])
    return [r if w else _NONE for r, w in zip(results, wanted, strict=True)]


def _qkv_bwd(shapes: Shapes, options: Options) -> Sharding:
    one = _dense(options)[0][4 - len(shapes["dq"]) :]
    input = "BSC" if len(one) == 4 else "SC"
    axes = {"dq": one, "dk": one, "dv": one, "input": input, "weight": "RC"}
    results = _projected(options, Result(input), Result("RC", "BS"), Result("R", "BS"))
    return Sharding({n: axes[n] for n in shapes}, results, "BSC")


def _rows_of_heads(shapes: Shapes, options: Options) -> tuple[str, str]:
    """The axes of attn_out and of the projection's result."""
    axes = len(shapes["attn_out"])
    attn_out = _dense(options)[0] if axes == 4 else "BSH"[3 - axes :]
    return attn_out, "BSN" if axes > 2 else "SN"


def _output(shapes: Shapes, options: Options) -> Sharding:
    attn_out, out = _rows_of_heads(shapes, options)
    axes = {"attn_out": attn_out, "weight": "NH", "bias": "N", "residual": out, "out": out}
    sums = "" if {"bias", "residual"} & {*shapes} else "H"
    return Sharding({n: axes[n] for n in shapes}, [Result(out, sums)], "BSN" + sums)


def _output_bwd(shapes: Shapes, options: Options) -> Sharding:
    attn_out, out = _rows_of_heads(shapes, options)
    axes = {"d_output": out, "attn_out": attn_out, "weight": "NH"}
    results = _projected(options, Result(attn_out, "N"), Result("NH", "BS"), Result("N", "BS"))
    return Sharding({n: axes[n] for n in shapes}, results, "BSNH")


def _grouped(shapes: Shapes, options: Options) -> Sharding:
    """Not sharded along the axis that the offsets divide."""
    forms = {
        (2, 3): (".K", ".KN", ".N", "N", "K"),
        (3, 2): (".MK", "K.", "M.", "M", "K"),
        (2, 2): ("M.", ".N", ".MN", "MN", ""),
        (3, 3): ("EMK", "EKN", "EMN", "EMN", "K"),
    }
    a, b, c, letters, sums = forms[len(shapes["a"]), len(shapes["b"])]
    axes = {"a": a, "b": b, "out": c}
    if any(n.endswith("_scales") for n in shapes):
        letters = sums = ""
    if "out" in shapes or any(n.startswith("out_") for n in shapes):
        sums = ""
    axes = {n: axes.get(n, "." * len(x)) for n, x in shapes.items()}
    return Sharding(axes, [Result(c, sums)], letters + sums)


def _merge(shapes: Shapes, options: Options) -> Sharding:
    rows = _dense(options)[0]
    axes = {"outs": f".{rows}", "lses": ".BHS", "out": rows}
    return Sharding({n: axes[n] for n in shapes}, [Result(rows), Result("BHS")], "BHS")


RULES: dict[str, Rule] = {
    "attention": lambda s, o: _forward(*_dense(o), "BHS", "BH", s, o),
    "attention_bwd": lambda s, o: _backward(*_dense(o), "BHS", "BH", s, o),
    "attention_varlen": lambda s, o: _forward("THD", "LHD", "HT", "H", s, o),
    "attention_varlen_bwd": lambda s, o: _backward("THD", "LHD", "HT", "H", s, o),
    "attention_paged": _paged,
    "gather_paged": _gathered,
    **dict.fromkeys(("bmm", "matmul2d"), _gemm),
    **dict.fromkeys(("bmm_bwd", "matmul2d_bwd"), _gemm_bwd),
    "fused_qkv_projection": _qkv,
    "fused_qkv_projection_bwd": _qkv_bwd,
    "fused_output_projection_residual": _output,
    "fused_output_projection_residual_bwd": _output_bwd,
    "grouped_mm": _grouped,
    "merge_states": _merge,
}


_registered: set[str] = set()


def register_sharding(name: str) -> bool:
    """Register an operator's rule with torch if torch.distributed.tensor is imported already.
    Importing it takes a second or two, which is left to the caller."""
    if name in _registered or name not in RULES or "torch.distributed.tensor" not in sys.modules:
        return True
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo

    known = operator_of(name).default
    arguments = known._schema.arguments
    # All options are part of the key under which torch keeps what a rule said.
    options = [a.name for a in arguments if a.kwarg_only]
    info = RuntimeSchemaInfo(len(arguments) - len(options), options)
    propagator = DTensor._op_dispatcher.sharding_propagator
    propagator.register_op_strategy(known, _strategy(RULES[name]), info)
    _registered.add(name)
    return True


def _is_imported() -> bool:
    """Whether torch.distributed.tensor is imported; else there are no DTensors."""
    return "torch.distributed.tensor" in sys.modules


def are_sharded(tensors: Sequence[Any]) -> bool:
    """Whether any tensor is a DTensor."""
    if not _is_imported():
        return False
    from torch.distributed.tensor import DTensor

    return any(isinstance(x, DTensor) for x in tensors)


def check_alike(name: str, tensors: Sequence[Any]) -> None:
    """Raise where plain tensors stand beside DTensors and torch would not treat them as
    replicated."""
    if not _is_imported():
        return
    from torch.distributed.tensor import DTensor

    if DTensor._op_dispatcher._allow_implicit_replication:
        return
    given = [(i, x) for i, x in enumerate(tensors) if isinstance(x, torch.Tensor)]
    plain = [i for i, x in given if not isinstance(x, DTensor)]
    if 0 < len(plain) < len(given):
        arguments = operator_of(name).default._schema.arguments
        raise InvalidValue(
            arguments[plain[0]].name,
            "a tensor of this rank",
            "must be a DTensor, as other operands are",
            "Pass distribute_tensor(x, mesh, placements), or to_local() of the others",
        )


_called: Any
for _called in (register_sharding, _is_imported):
    # Dynamo calls them while it traces; sys.modules it would walk, while modules are added to it
    _called._dynamo_marked_constant = True


def _strategy(rule: Rule) -> Callable[[Any], Any]:
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor._op_schema import OpStrategy
    from torch.distributed.tensor._ops.utils import expand_to_full_mesh_op_strategy

    def placed(axes: str, letter: str, sums: str = "") -> Any:
        if letter and letter in axes:
            return Shard(axes.index(letter))
        return Partial() if letter and letter in sums else Replicate()

    def strategy(schema: Any) -> Any:
        named = zip(schema.op._schema.arguments, schema.args_schema, strict=False)
        shapes = {a.name: tuple(x.shape) for a, x in named if isinstance(x, OpStrategy)}
        sharding = rule(shapes, schema.kwargs_schema)
        inputs = list(sharding.axes.values())

        def placements(letter: str) -> list[Any]:
            of_results = [placed(r.axes, letter, r.sums) for r in sharding.results]
            return of_results + [placed(axes, letter) for axes in inputs]

        def even(specs: Sequence[Any], results: Any) -> bool:
            """Whether every letter is split evenly: axes of one letter may differ in extent (query
            and KV heads), and their shards then belong together only if even."""
            for letter in sharding.letters:
                extents = {
                    (shape[axes.index(letter)], spec.num_shards_map[axes.index(letter)])
                    for shape, axes, spec in zip(shapes.values(), inputs, specs, strict=True)
                    if letter in axes
                }
                if len({n for n, _ in extents}) > 1 and any(n % shards for n, shards in extents):
                    return False
            return True

        return expand_to_full_mesh_op_strategy(
            schema.get_mesh_from_args(),
            schema,
            [placements(letter) for letter in ("", *sharding.letters)],
            input_index=len(sharding.results),
            is_valid_strategy_cb=even,
        )

    return strategy
