"""Every public function and descriptor with arguments that it takes, made anew at each use."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from contextlib import chdir
from dataclasses import dataclass, fields
from functools import cache
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any
from unittest.mock import patch

import kernelseam as ks
import numpy as np
import numpy.typing as npt
from kernelseam.bundling import read_trace
from kernelseam.errors import InvalidValue
from kernelseam.tuning import tune

Array = npt.NDArray[Any]
Arguments = dict[str, Any]
B, H, G, S, T, D, N = 2, 4, 2, 5, 6, 8, 3
"""Entries, heads of q, heads of k and v, queries, keys, columns of a head, parts or pages."""
HIDDEN, WIDTH = 12, (H + 2 * G) * D


@dataclass(frozen=True)
class PublicCall:
    """One thing that a user may call."""

    call: Callable[..., Any]
    arguments: Callable[[], Arguments]
    """Of every parameter; those whose defaults do are None or the default."""
    run: Callable[[Any], None] = lambda result: None
    """What is done with what it returns, where all operands are arrays."""
    names: frozenset[str] = frozenset()
    """What a refusal may name besides the parameters."""
    binds: bool = False
    """Whether memory behind addresses is read."""


@cache
def _ramp(shape: tuple[int, ...]) -> Array:
    return np.linspace(-1, 1, int(np.prod(shape)), dtype=np.float32).reshape(shape)


def f32(*shape: int) -> Array:
    return _ramp(shape).copy()


_EXTENTS = {"B": B, "H": H, "G": G, "S": S, "T": T, "D": D, "N": N, "I": HIDDEN, "W": WIDTH}


def f32s(**axes: str) -> Arguments:
    """Arrays by name, of a letter or a digit for each axis."""
    return {n: f32(*(_EXTENTS.get(x) or int(x) for x in of)) for n, of in axes.items()}


def i32(*values: int) -> Array:
    return np.array(values, np.int32)


def _defaults(call: Callable[..., Any]) -> Arguments:
    return {
        n: None if p.default is p.empty else p.default
        for n, p in inspect.signature(call).parameters.items()
        if p.kind is not p.VAR_KEYWORD
    }


def _function(call: Callable[..., Any], make: Callable[[], Arguments], *names: str) -> PublicCall:
    return PublicCall(call, lambda: {**_defaults(call), **make()}, names=frozenset(names))


def _descriptor(kind: Any, make: Callable[[], Arguments]) -> PublicCall:
    blank = {f.name: f.default for f in fields(kind) if f.init}

    def arguments() -> Arguments:
        return {**blank, **make()}

    return PublicCall(kind, arguments, _run)


def _run(descriptor: Any) -> None:
    ks.plan(descriptor, backend="numpy").bind()()


def _from_arrays(
    call: Callable[..., Any], make: Callable[[], Arguments], *names: str
) -> PublicCall:
    kind = call.__self__  # type: ignore[attr-defined]  # the fields of what it makes are there to be given, too
    return PublicCall(
        call,
        lambda: {**_defaults(call), **make()},
        _run,
        frozenset([*names, *(f.name for f in fields(kind))]),
    )


def q_k_v() -> Arguments:
    return f32s(q="BHSD", k="BGTD", v="BGTD")


def scores() -> Arguments:
    return {
        "causal": True,
        "window": (3, 2),
        "scale": 0.5,
        "softcap": 2.0,
        "bias": f32(B, H, S, T),
        "mask": np.ones((B, H, S, T), bool),
        **f32s(alibi_slopes="BH", sinks="H"),
        "prefix_lengths": i32(1, 2),
    }


def attention() -> Arguments:
    return {
        **q_k_v(),
        **scores(),
        "kv_lengths": i32(6, 4),
        "out": f32(B, H, S, D),
        "return_lse": True,
    }


def extents(heads: str = "num_heads") -> Arguments:
    return {"batch": B, heads: H, "kv_heads": G, "S_q": S, "S_k": T, "head_dim": D, "value_dim": D}


def varlen() -> Arguments:
    return {
        **f32s(q="7HD", k="9GD", v="9GD"),
        "cu_seqlens_q": i32(0, 3, 7),
        "cu_seqlens_k": i32(0, 5, 9),
        "max_seqlen_q": 4,
        "max_seqlen_k": 5,
        "causal": True,
        **f32s(out="7HD", bias="H45"),
        "return_lse": True,
    }


def paged() -> Arguments:
    return {
        **f32s(q="BSHD", k_pages="N4GD", v_pages="N4GD"),
        "block_table": np.array([[0, 1], [2, 0]], np.int32),
        "kv_lengths": i32(6, 4),
        "max_seqlen_k": 7,
        "out": f32(B, S, H, D),
        "mask": np.ones((B, H, S, 7), bool),
    }


def paged_varlen() -> Arguments:
    return {
        **paged(),
        **f32s(q="7HD", out="7HD"),
        "cu_seqlens_q": i32(0, 3, 7),
        "max_seqlen_q": 5,
        "mask": None,
    }


def forward_results() -> Arguments:
    return f32s(out="BHSD", lse="BHS")


def attention_bwd() -> Arguments:
    return {
        "dout": f32(B, H, S, D),
        **q_k_v(),
        **forward_results(),
        **scores(),
        "bias_gradient": True,
        "sink_gradient": True,
    }


def bmm() -> Arguments:
    return {**f32s(a="BHSD", b="BGDT", bias="T", residual="BHST", out="BHST"), "beta": 0.0}


def matmul2d() -> Arguments:
    return f32s(a="SD", b="DT", bias="T", residual="ST", out="ST")


def grouped() -> Arguments:
    return {**f32s(a="7D", b="NDT"), "offs": i32(0, 4, 7), "out": f32(7, T)}


def bmm_bwd() -> Arguments:
    return {**f32s(dc="BST", a="BSD", b="BDT", da="BSD", db="BDT"), "beta": 1.0}


def matmul2d_bwd() -> Arguments:
    return f32s(dc="ST", a="SD", b="DT", da="SD", db="DT")


def merge() -> Arguments:
    return f32s(outs="NBHSD", lses="NBHS", out="BHSD")


def caches() -> Arguments:
    return {
        **f32s(k="BSGD", v="BSGD", k_pages="N6GD", v_pages="N6GD"),
        "block_table": np.array([[0, 1], [2, 0]], np.int32),
        "kv_lengths": i32(6, 5),
    }


def append() -> Arguments:
    norms = {**f32s(q_norm="D", k_norm="D"), "norm_eps": 1e-5}
    return {**caches(), "q": f32(B, S, H, D), "rotary": rotary(), "out": f32(B, S, H, D), **norms}


def gather() -> Arguments:
    pages = {n: x for n, x in caches().items() if n not in ("k", "v")}
    return {**pages, "max_seqlen_k": 6, "out": (f32(B, 6, G, D), f32(B, 6, G, D))}


def copies() -> Arguments:
    pages = {n: caches()[n] for n in ("k_pages", "v_pages")}
    return {**pages, "sources": i32(0, 0), "destinations": i32(1, 2)}


def cache_fields() -> Arguments:
    cos, sin = rotary()
    extents = {"batch": B, "S": S, "kv_heads": G, "head_dim": D, "pages": N, "page_size": 6}
    extents |= {"num_heads": H, "table_width": 2, "rotary_dim": D, "max_position": 20}
    of_q = f32s(q="BSHD", q_out="BSHD", q_norm="D", k_norm="D")
    heads_first = {n: x.swapaxes(1, 2).copy() for n, x in caches().items() if x.ndim == 4}
    of_q |= {n: x.swapaxes(1, 2).copy() for n, x in of_q.items() if x.ndim == 4}
    return {**extents, **caches(), **heads_first, **of_q, "cos": cos, "sin": sin}


def cache_arrays() -> Arguments:
    cos, sin = rotary()
    return {**caches(), **f32s(q="BSHD", q_out="BSHD"), "cos": cos, "sin": sin}


def rotary() -> tuple[Array, Array]:
    return f32(20, D // 2), f32(20, D // 2)


def positions() -> Array:
    return np.arange(B * S, dtype=np.int32).reshape(B, S)


def qkv() -> Arguments:
    return {
        **f32s(input="BSI", weight="WI", bias="W"),
        "num_heads": H,
        "num_kv_heads": G,
        "head_dim": D,
        "rotary": rotary(),
        "positions": positions(),
        "out": (f32(B, H, S, D), f32(B, G, S, D), f32(B, G, S, D)),
    }


def qkv_paged() -> Arguments:
    return {
        **qkv(),
        **f32s(k_pages="N6GD", v_pages="N6GD"),
        "block_table": np.array([[0, 1], [2, 0]], np.int32),
        "out": f32(B, H, S, D),
    }


def output() -> Arguments:
    return {
        "attn_out": f32(B, H, S, D),
        "weight": f32(HIDDEN, H * D),
        **f32s(bias="I", residual="BSI", out="BSI"),
    }


def qkv_bwd() -> Arguments:
    return {
        **f32s(dq="BHSD", dk="BGSD", dv="BGSD", input="BSI", weight="WI"),
        "has_bias": True,
        "num_heads": H,
        "num_kv_heads": G,
        "head_dim": D,
        "bias_dtype": "float32",
    }


def output_bwd() -> Arguments:
    return {
        **f32s(d_output="BSI", attn_out="BHSD"),
        "weight": f32(HIDDEN, H * D),
        "has_bias": True,
        "bias_dtype": "float32",
    }


def qkv_gradients() -> Arguments:
    """As arrays: what is read, and what is computed."""
    read = {n: x for n, x in qkv_bwd().items() if isinstance(x, np.ndarray)}
    computed = f32s(d_input="BSI", d_weight="WI", d_bias="W")
    return {**read, **computed}


def output_gradients() -> Arguments:
    """The same of an output projection."""
    read = {n: x for n, x in output_bwd().items() if isinstance(x, np.ndarray)}
    of_weight = {"d_weight": f32(HIDDEN, H * D), "d_bias": f32(HIDDEN)}
    return {**read, "d_attn_out": f32(B, H, S, D), **of_weight}


def attention_gradients() -> Arguments:
    """What an attention's gradients are written to."""
    of_keys = {n: f32(B, G, T, D) for n in ("dk", "dv")}
    return {"dq": f32(B, H, S, D), **of_keys, **f32s(dbias="BHST", dsinks="H")}


def projected() -> Arguments:
    return {"batch": B, "S": S, "hidden": HIDDEN, "num_heads": H, "head_dim": D}


def forward() -> ks.Attention:
    return ks.Attention.from_arrays(
        **{**q_k_v(), **forward_results()}, bias=f32(B, H, S, T), sinks=f32(H)
    )


def heads(count: int, rows: int, columns: int) -> list[Array]:
    """Matrices in memory of their own."""
    return [f32(rows, columns) for _ in range(count)]


def attention_lists() -> Arguments:
    return {
        **extents(),
        **scores(),
        "q_ptrs": heads(B * H, S, D),
        "k_ptrs": heads(B * G, T, D),
        "v_ptrs": heads(B * G, T, D),
        "out_ptrs": heads(B * H, S, D),
        "lse": f32(B, H, S),
        "kv_lengths": i32(6, 4),
        "dtype": "float32",
    }


def gemm_lists() -> Arguments:
    return {
        "M": S,
        "N": T,
        "K": D,
        "batch": B,
        "num_heads": H,
        "A_ptrs": heads(B * H, S, D),
        "B_ptrs": heads(B * H, D, T),
        "C_ptrs": heads(B * H, S, T),
        "bias_ptrs": [f32(T) for _ in range(B * H)],
        "residual_ptrs": heads(B * H, S, T),
        "dtype": "float32",
    }


def gemm() -> Arguments:
    return {
        "M": S,
        "N": T,
        "K": D,
        "batch": B,
        "num_heads": H,
        **f32s(A="BHSD", B="BGDT", C="BHST", bias="BHT", residual="BHST"),
        "b_head_group": H // G,
    }


def _arrays(**named: Any) -> Callable[[], Arguments]:
    return lambda: {n: make() for n, make in named.items()}


def qkv_fields() -> Arguments:
    cos, sin = rotary()
    return {
        **projected(),
        "kv_heads": G,
        **f32s(input="BSI", weight="WI", bias="W"),
        "cos": cos,
        "sin": sin,
        "positions": positions(),
        **f32s(q="BHSD", k="N6GD", v="N6GD"),
        "block_table": np.array([[0, 1], [2, 0]], np.int32),
        "pages": N,
        "page_size": 6,
        "table_width": 2,
        "rotary_dim": D,
        "max_position": 20,
        "rotary_style": "halves",
    }


def qkv_arrays() -> Arguments:
    result = {n: x for n, x in qkv_fields().items() if isinstance(x, np.ndarray)}
    return {**result, "rotary_style": "pairs", "first_position": 0}


FUNCTIONS = {
    "attention": _function(ks.attention, attention),
    "attention_varlen": _function(ks.attention_varlen, varlen),
    "attention_paged": _function(ks.attention_paged, paged),
    "attention_paged packed": _function(ks.attention_paged, paged_varlen),
    "attention_bwd": _function(ks.attention_bwd, attention_bwd),
    "bmm": _function(ks.bmm, bmm),
    "matmul2d": _function(ks.matmul2d, matmul2d),
    "grouped_mm": _function(ks.grouped_mm, grouped),
    "grouped_mm_list": _function(
        ks.grouped_mm_list,
        lambda: {"a": [f32(3, D)], "b": [f32(D, T)], "out": [f32(3, T)], "beta": 0.0},
    ),
    "bmm_bwd": _function(ks.bmm_bwd, bmm_bwd),
    "matmul2d_bwd": _function(ks.matmul2d_bwd, matmul2d_bwd),
    "merge_states": _function(ks.merge_states, merge),
    "append_paged": _function(ks.append_paged, append),
    "gather_paged": _function(ks.gather_paged, gather),
    "copy_pages": _function(ks.copy_pages, copies),
    "fused_qkv_projection": _function(ks.fused_qkv_projection, qkv),
    "fused_qkv_projection paged": _function(ks.fused_qkv_projection, qkv_paged),
    "fused_output_projection_residual": _function(ks.fused_output_projection_residual, output),
    "fused_qkv_projection_bwd": _function(ks.fused_qkv_projection_bwd, qkv_bwd),
    "fused_output_projection_residual_bwd": _function(
        ks.fused_output_projection_residual_bwd, output_bwd
    ),
}
DESCRIPTORS = {
    "Attention": _descriptor(
        ks.Attention, lambda: {**extents(), **attention(), "lse": f32(B, H, S)}
    ),
    "Attention packed": _descriptor(
        ks.Attention,
        lambda: {
            **extents(),
            "S_q": 4,
            "S_k": 5,
            **f32s(q="7HD", k="9GD", v="9GD", out="7HD"),
            "cu_seqlens_q": i32(0, 3, 7),
            "cu_seqlens_k": i32(0, 5, 9),
            "total_q": 7,
            "total_k": 9,
        },
    ),
    "Attention paged": _descriptor(
        ks.Attention,
        lambda: {
            **extents(),
            **q_k_v(),
            **f32s(k="N4GD", v="N4GD", out="BHSD"),
            "block_table": np.array([[0, 1], [2, 0]], np.int32),
            "kv_lengths": i32(6, 4),
            "pages": N,
            "page_size": 4,
            "table_width": 2,
        },
    ),
    "Attention.from_arrays": _from_arrays(
        ks.Attention.from_arrays, lambda: {**attention(), "lse": f32(B, H, S)}, "dtype"
    ),
    "AttentionBwd": _descriptor(
        ks.AttentionBwd,
        lambda: {"forward": forward(), "dout": f32(B, H, S, D), **attention_gradients()},
    ),
    "AttentionBwd.from_arrays": _from_arrays(
        ks.AttentionBwd.from_arrays,
        lambda: {
            **{n: x for n, x in attention_bwd().items() if not n.endswith("_gradient")},
            **attention_gradients(),
        },
        *(f.name for f in fields(ks.Attention)),
        "max_seqlen_q",
        "max_seqlen_k",
        "kv_layout",
    ),
    "AttentionPointers": _descriptor(ks.AttentionPointers, attention_lists),
    "BatchedGemmStrided": _descriptor(ks.BatchedGemmStrided, gemm),
    "BatchedGemmStrided.for_scores": _from_arrays(
        ks.BatchedGemmStrided.for_scores,
        lambda: f32s(q="BHSD", k="BGTD", scores="BHST"),
    ),
    "BatchedGemmStrided.for_output": _from_arrays(
        ks.BatchedGemmStrided.for_output,
        lambda: f32s(scores="BHST", v="BGTD", out="BHSD"),
    ),
    "BatchedGemmPointers": _descriptor(ks.BatchedGemmPointers, gemm_lists),
    "GroupedGemm": _descriptor(
        ks.GroupedGemm,
        lambda: {
            "groups": N,
            "M": 7,
            "N": T,
            "K": D,
            "along": "m",
            **f32s(A="7D", B="NDT", C="7T"),
            "offsets": i32(0, 4, 7),
        },
    ),
    "GroupedGemmPointers": _descriptor(
        ks.GroupedGemmPointers,
        lambda: {
            "M": [3, 5],
            "N": [T, 4],
            "K": [D, 2],
            "A_ptrs": [f32(3, D), f32(5, 2)],
            "B_ptrs": [f32(D, T), f32(2, 4)],
            "C_ptrs": [f32(3, T), f32(5, 4)],
        },
    ),
    "MergeStates": _descriptor(
        ks.MergeStates,
        lambda: {
            **merge(),
            "parts": N,
            "batch": B,
            "num_heads": H,
            "rows": S,
            "value_dim": D,
            "lse": f32(B, H, S),
        },
    ),
    "PagedCache": _descriptor(ks.PagedCache, cache_fields),
    "PagedCache.from_arrays": _from_arrays(ks.PagedCache.from_arrays, cache_arrays),
    "QkvProjection": _descriptor(ks.QkvProjection, qkv_fields),
    "QkvProjection.from_arrays": _from_arrays(ks.QkvProjection.from_arrays, qkv_arrays),
    "OutputProjection": _descriptor(
        ks.OutputProjection,
        lambda: {**output(), **projected()},
    ),
    "OutputProjection.from_arrays": _from_arrays(ks.OutputProjection.from_arrays, output),
    "QkvProjectionBwd": _descriptor(
        ks.QkvProjectionBwd,
        lambda: {**projected(), "kv_heads": G, **qkv_gradients()},
    ),
    "QkvProjectionBwd.from_arrays": _from_arrays(ks.QkvProjectionBwd.from_arrays, qkv_gradients),
    "OutputProjectionBwd": _descriptor(
        ks.OutputProjectionBwd,
        lambda: {**projected(), **output_gradients()},
    ),
    "OutputProjectionBwd.from_arrays": _from_arrays(
        ks.OutputProjectionBwd.from_arrays,
        output_gradients,
    ),
}


def _bound() -> Any:
    return ks.plan(ks.BatchedGemmStrided(**gemm()), backend="numpy").bind()


def _operands() -> Arguments:
    return {n: x for n, x in gemm().items() if isinstance(x, np.ndarray)}


def _used(backend: Any) -> None:
    with ks.use_backend(backend):
        pass


def _traced(path: Any) -> None:
    try:
        with TemporaryDirectory() as folder, chdir(folder), ks.trace(path):
            ks.bmm(f32(1, 2, 2), f32(1, 2, 2))
    except OSError as e:  # what the system takes for no file's name
        raise InvalidValue("path", "…", str(e.strerror), "Name another") from e


@cache
def _a_trace() -> str:
    folder = mkdtemp()
    with ks.trace(f"{folder}/traced.json"):
        ks.bmm(f32(1, 2, 2), f32(1, 2, 2))
    return f"{folder}/traced.json"


def _tuned(**arguments: Any) -> None:
    with TemporaryDirectory() as folder, patch.dict(os.environ, KERNELSEAM_CACHE_DIR=folder):
        tune(**arguments)


PLANS = {
    "plan": PublicCall(
        ks.plan,
        lambda: {
            "descriptor": ks.BatchedGemmStrided(**gemm()),
            "device": "numpy:0",
            "backend": "numpy",
            "implementation": "numpy",
        },
    ),
    "Plan.bind": PublicCall(
        lambda **x: _bound().plan.bind(**x),
        lambda: {"workspace": np.zeros(1 << 16, np.float32), "check": False, **_operands()},
        lambda call: call(),
        binds=True,
    ),
    "Plan.bind of lists": PublicCall(
        lambda **x: ks.plan(ks.AttentionPointers(**attention_lists()), backend="numpy").bind(**x),
        lambda: {
            n: x
            for n, x in attention_lists().items()
            if n.endswith("_ptrs") or n in ("lse", "kv_lengths")
        },
        lambda call: call(),
        binds=True,
    ),
    "Call.rebind": PublicCall(
        lambda **x: _bound().rebind(**x), _operands, lambda call: call(), binds=True
    ),
    "Call": PublicCall(lambda **x: _bound()(**x), lambda: {"stream": 0}),
    "trace": PublicCall(_traced, lambda: {"path": None}),
    "read_trace": PublicCall(read_trace, lambda: {"path": _a_trace()}, names=frozenset({"from"})),
    "tune": PublicCall(
        _tuned,
        lambda: {
            "descriptor": ks.BatchedGemmStrided(**gemm()),
            "device": "numpy:0",
        },
    ),
    "use_backend": PublicCall(_used, lambda: {"backend": "numpy"}),
    "DType.of": PublicCall(lambda dtype: ks.DType.of(dtype), lambda: {"dtype": "float32"}),
}
CALLS = {**FUNCTIONS, **DESCRIPTORS, **PLANS}
