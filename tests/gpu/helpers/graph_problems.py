"""Each operation over memory that stays where it is while its contents change: what a CUDA graph
replays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import kernelseam as ks
import torch
from kernelseam.oracle.verification import Verification
from nvidia_gpu import DEVICE, RUNTIME

Tensors = dict[str, Any]
HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32


def normal(*shape: int, dtype: Any = HALF) -> Any:
    return torch.randn(*shape, device="cuda").to(dtype)


def normals(dtype: Any = HALF, **shapes: tuple[int, ...]) -> Tensors:
    return {n: normal(*shape, dtype=dtype) for n, shape in shapes.items()}


def i32(*values: Any) -> Any:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def in_order(*values: tuple[int, ...]) -> Callable[[int], Any]:
    """The int32 contents of each replay."""
    return lambda turn: i32(*values[turn])


@dataclass
class GraphProblem:
    """Operands by their names in the descriptor, what is made of them, and what changes."""

    operands: Tensors
    descriptor: Callable[[Tensors], Any]
    function: Callable[[], Mapping[str, Any]] | None = None
    """The public function over the operands: its results by the descriptor's names."""
    memory: Mapping[str, Any] | None = None
    """A plan's results; else memory like that of the function's."""
    change: Mapping[str, Callable[[int], Any]] = field(default_factory=dict)
    """What operands hold at each replay; those of floating point that are not named are drawn."""
    implementation: str | None = None

    def results(self) -> Tensors:
        """Memory for a plan's results."""
        if self.memory is not None:
            return dict(self.memory)
        assert self.function is not None
        return {n: torch.empty_like(x) for n, x in self.function().items()}

    def renew(self, turn: int) -> None:
        """Other contents in the same memory."""
        for name, x in self.operands.items():
            if name in self.change:
                x.copy_(self.change[name](turn))
            elif x.is_floating_point():
                x.normal_()

    def plan(self, results: Tensors) -> tuple[ks.Plan, dict[str, int]]:
        """The plan over these results, and the addresses that it is bound to."""
        memory = {**self.operands, **results}
        descriptor = self.descriptor(memory)
        plan = ks.plan(descriptor, device=DEVICE, implementation=self.implementation)
        resolved = descriptor.resolve(descriptor.operands(), RUNTIME, DEVICE)
        return plan, resolved.pointers


def hold(problem: GraphProblem, results: Tensors, replay: Callable[[], None]) -> None:
    """Replay over contents that change, each time held against the oracle."""
    plan, pointers = problem.plan(results)
    for turn in range(3):
        problem.renew(turn)
        for x in results.values():
            x.fill_(float("nan"))
        torch.cuda.synchronize()
        verification = Verification(plan, pointers, RUNTIME)
        replay()
        torch.cuda.synchronize()
        verification.require()


# ---- attention


def _attention(
    operands: Tensors,
    layout: str = "bhsd",
    paged: bool = False,
    change: Mapping[str, Callable[[int], Any]] | None = None,
    implementation: str | None = None,
    **options: Any,
) -> GraphProblem:
    q = operands["q"]

    def function() -> Tensors:
        given = {n: x for n, x in operands.items() if n not in "qkv"}
        call: Any = ks.attention
        if paged:
            call = ks.attention_paged
        elif "cu_seqlens_k" in operands:
            call = ks.attention_varlen
        if q.dim() == 4:
            given["layout"] = layout
        out, lse = call(
            q,
            operands["k"],
            operands["v"],
            **given,
            **options,
            return_lse=True,
            implementation=implementation,
        )
        return {"out": out, "lse": lse}

    return GraphProblem(
        operands,
        lambda memory: ks.Attention.from_arrays(**memory, layout=layout, **options),
        function,
        change=change or {},
        implementation=implementation,
    )


def dense(dtype: Any, dim: int, implementation: str | None = None) -> GraphProblem:
    keys = (2, 2, 300, dim)
    operands = normals(dtype, q=(2, 8, 200, dim), k=keys, v=keys)
    return _attention(operands, causal=True, implementation=implementation)


def options() -> GraphProblem:
    operands = {
        **normals(q=(2, 4, 70, 64), k=(2, 4, 90, 64), v=(2, 4, 90, 32), bias=(4, 70, 90)),
        "mask": torch.ones(2, 1, 70, 90, dtype=torch.bool, device="cuda"),
        "sinks": normal(4, dtype=FULL),
        "kv_lengths": i32(90, 90),
    }
    change = {
        "mask": lambda turn: torch.rand(2, 1, 70, 90, device="cuda") < 0.7,
        "kv_lengths": lambda turn: i32(90 - 20 * turn, 1 + turn),
    }
    return _attention(operands, window=(40, 3), softcap=20.0, change=change)


def packed() -> GraphProblem:
    operands = {
        **normals(q=(300, 8, 128), k=(400, 2, 128), v=(400, 2, 128)),
        "cu_seqlens_q": i32(0, 100, 200, 300),
        "cu_seqlens_k": i32(0, 100, 200, 400),
    }
    change = {
        "cu_seqlens_q": in_order((0, 256, 256, 300), (0, 1, 44, 300), (0, 100, 200, 300)),
        "cu_seqlens_k": in_order((0, 256, 256, 400), (0, 7, 144, 400), (0, 100, 200, 400)),
    }
    return _attention(operands, causal=True, max_seqlen_q=256, max_seqlen_k=256, change=change)


def paged(implementation: str | None, queries: int = 1, most: int = 1500) -> GraphProblem:
    """Lengths that grow, and pages that change their owners."""
    batch, page, width = 5, 16, -(-most // 16)
    pages = batch * width + 3
    operands = {
        **normals(q=(batch, queries, 32, 128), k=(pages, page, 8, 128), v=(pages, page, 8, 128)),
        "block_table": torch.zeros(batch, width, dtype=torch.int32, device="cuda"),
        "kv_lengths": i32(*[1] * batch),
    }

    def table(turn: int) -> Any:
        return torch.randperm(pages, device="cuda")[: batch * width].reshape(batch, width)

    change = {
        "block_table": table,
        "kv_lengths": in_order(
            (1, 0, 15, 16, 17), (2, 1, 16, 17, 700), (most, 0, most - 1, 33, 800)
        ),
    }
    return _attention(
        operands,
        "bshd",
        paged=True,
        causal=True,
        max_seqlen_k=most,
        change=change,
        implementation=implementation,
    )


def paged_packed() -> GraphProblem:
    problem = paged(None, queries=1)
    operands = {
        **problem.operands,
        "q": normal(40, 32, 128),
        "cu_seqlens_q": i32(0, 8, 16, 24, 32, 40),
        "kv_lengths": i32(40, 40, 40, 40, 40),
    }
    change = {
        **problem.change,
        "kv_lengths": lambda turn: i32(40 + 100 * turn, 40, 41, 700, 1500 - turn),
        "cu_seqlens_q": in_order(
            (0, 8, 16, 24, 32, 40), (0, 0, 40, 40, 40, 40), (0, 1, 2, 20, 39, 40)
        ),
    }
    return _attention(
        operands, paged=True, causal=True, max_seqlen_q=40, max_seqlen_k=1500, change=change
    )


def attention_lists() -> GraphProblem:
    """Lists of addresses in device memory, whose order changes from replay to replay."""
    heads, rows, keys, dim = 6, 64, 80, 64
    rows_of = {"q": rows, "k": keys, "v": keys}
    held = {n: normal(heads, r, dim) for n, r in rows_of.items()}
    operands = {
        **held,
        **{f"{n}_ptrs": torch.zeros(heads, dtype=torch.int64, device="cuda") for n in held},
    }
    out = torch.empty_like(held["q"])
    out_ptrs = _addresses(out)

    def descriptor(memory: Tensors) -> Any:
        return ks.AttentionPointers(
            batch=2,
            num_heads=3,
            kv_heads=3,
            S_q=rows,
            S_k=keys,
            head_dim=dim,
            value_dim=dim,
            dtype="float16",
            out_ptrs=out_ptrs,
            causal=True,
            **{f"{n}_ptrs": memory[f"{n}_ptrs"] for n in held},
        )

    change = {f"{n}_ptrs": _shuffled(x) for n, x in held.items()}
    return GraphProblem(operands, descriptor, memory={"out": out}, change=change)


def _addresses(x: Any) -> Any:
    first, step = x.data_ptr(), x.stride(0) * x.element_size()
    return torch.tensor([first + i * step for i in range(len(x))], device="cuda")


def _shuffled(x: Any) -> Callable[[int], Any]:
    return lambda turn: _addresses(x)[torch.randperm(len(x), device="cuda")]


# ---- products


def product(dtype: Any, implementation: str | None = None, **options: Any) -> GraphProblem:
    operands = normals(dtype, A=(6, 130, 96), B=(6, 96, 104), bias=(104,))
    fields: dict[str, Any] = {"M": 130, "N": 104, "K": 96, "batch": 6, "stride_bias_batch": 0}

    def function() -> Tensors:
        out = ks.bmm(
            operands["A"],
            operands["B"],
            bias=operands["bias"],
            implementation=implementation,
            **options,
        )
        return {"C": out}

    return GraphProblem(
        operands,
        lambda memory: ks.BatchedGemmStrided(**memory, **fields, **options),
        function,
        implementation=implementation,
    )


def product_of_lists() -> GraphProblem:
    held = normals(A=(6, 130, 96), B=(6, 96, 104))
    operands = {
        **held,
        **{f"{n}_ptrs": torch.zeros(6, dtype=torch.int64, device="cuda") for n in held},
    }
    out = torch.empty(6, 130, 104, dtype=HALF, device="cuda")
    out_ptrs = _addresses(out)
    fields: dict[str, Any] = {
        "M": 130,
        "N": 104,
        "K": 96,
        "batch": 6,
        "dtype": "float16",
        "alignment": 16,
    }
    return GraphProblem(
        operands,
        lambda memory: ks.BatchedGemmPointers(
            A_ptrs=memory["A_ptrs"], B_ptrs=memory["B_ptrs"], C_ptrs=out_ptrs, **fields
        ),
        memory={"C": out},
        change={f"{n}_ptrs": _shuffled(x) for n, x in held.items()},
    )


def one_product(implementation: str | None = None) -> GraphProblem:
    operands = normals(BRAIN, A=(300, 256), B=(256, 512), residual=(300, 512))

    def function() -> Tensors:
        return {
            "C": ks.matmul2d(
                operands["A"],
                operands["B"],
                residual=operands["residual"],
                implementation=implementation,
            )
        }

    return GraphProblem(
        operands,
        lambda memory: ks.BatchedGemmStrided(**memory, M=300, N=512, K=256),
        function,
        implementation=implementation,
    )


# ---- projections and merging


def _angles() -> tuple[Any, Any]:
    angles = torch.arange(200, device="cuda")[:, None] / 10000 ** (
        torch.arange(64, device="cuda") / 64
    )
    return angles.cos(), angles.sin()


def qkv(paged: bool) -> GraphProblem:
    cos, sin = _angles()
    batch, rows, hidden, H, G, D = 3, 4, 256, 8, 2, 128
    operands = {
        **normals(BRAIN, input=(batch, rows, hidden), weight=((H + 2 * G) * D, hidden)),
        "cos": cos,
        "sin": sin,
        "positions": torch.zeros(batch, rows, dtype=torch.int32, device="cuda"),
    }
    if paged:
        operands["block_table"] = torch.zeros(batch, 10, dtype=torch.int32, device="cuda")

    pages = normals(BRAIN, k_pages=(40, 16, G, D), v_pages=(40, 16, G, D)) if paged else {}

    def function() -> Tensors:
        given = {n: x for n, x in operands.items() if n not in ("input", "weight", "cos", "sin")}
        made = ks.fused_qkv_projection(
            operands["input"],
            operands["weight"],
            None,
            H,
            G,
            D,
            rotary=(cos, sin),
            layout="bshd",
            **given,
            **pages,
        )
        if paged:
            return {"q": made, "k": pages["k_pages"], "v": pages["v_pages"]}
        return dict(zip("qkv", made, strict=True))

    change: dict[str, Callable[[int], Any]] = {
        "cos": lambda turn: cos.clone(),
        "sin": lambda turn: sin.clone(),
        "positions": lambda turn: (
            torch.arange(rows, device="cuda") + torch.randint(0, 150, (batch, 1), device="cuda")
        ),
        "block_table": lambda turn: torch.randperm(40, device="cuda")[:30].reshape(3, 10),
    }
    return GraphProblem(
        operands,
        lambda memory: ks.QkvProjection.from_arrays(**memory, layout="bshd", rotary_style="halves"),
        function,
        change=change,
    )


def output() -> GraphProblem:
    operands = normals(BRAIN, attn_out=(3, 40, 8, 128), weight=(512, 1024), residual=(3, 40, 512))

    def function() -> Tensors:
        return {"out": ks.fused_output_projection_residual(**operands, layout="bshd")}

    return GraphProblem(
        operands,
        lambda memory: ks.OutputProjection.from_arrays(**memory, layout="bshd"),
        function,
    )


def merge() -> GraphProblem:
    operands = normals(FULL, outs=(4, 2, 8, 50, 64), lses=(4, 2, 8, 50))

    def descriptor(memory: Tensors) -> Any:
        return ks.MergeStates(parts=4, batch=2, num_heads=8, rows=50, value_dim=64, **memory)

    def function() -> Tensors:
        return dict(zip(("out", "lse"), ks.merge_states(**operands), strict=True))

    return GraphProblem(operands, descriptor, function)


# ---- gradients


def attention_gradients(deterministic: bool, dtype: Any, dim: int) -> GraphProblem:
    """Of what the forward made of the same contents."""
    q, k, v = (normal(2, n, 160, dim, dtype=dtype) for n in (8, 2, 2))
    out, lse = ks.attention(q, k, v, causal=True, return_lse=True)
    operands = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "dout": torch.randn_like(q)}

    def forward(turn: int) -> tuple[Any, Any]:
        made: tuple[Any, Any] = ks.attention(q, k, v, causal=True, return_lse=True)
        return made

    def descriptor(memory: Tensors) -> Any:
        gradients = {n: memory[n] for n in ("dout", "dq", "dk", "dv")}
        of = {n: memory[n] for n in ("q", "k", "v", "out", "lse")}
        return ks.AttentionBwd(
            forward=ks.Attention.from_arrays(**of, causal=True),
            deterministic=deterministic,
            **gradients,
        )

    def function() -> Tensors:
        made = ks.attention_bwd(
            operands["dout"], q, k, v, out, lse, causal=True, deterministic=deterministic
        )
        return dict(zip(("dq", "dk", "dv"), made, strict=False))

    return GraphProblem(
        operands,
        descriptor,
        function,
        # in the operands' order: q, k and v are new when these are made
        change={"out": lambda turn: forward(turn)[0], "lse": lambda turn: forward(turn)[1]},
    )


def qkv_gradients() -> GraphProblem:
    batch, rows, hidden, H, G, D = 2, 70, 256, 8, 2, 64
    operands = normals(
        BRAIN,
        **{f"d{n}": (batch, heads, rows, D) for n, heads in (("q", H), ("k", G), ("v", G))},
        input=(batch, rows, hidden),
        weight=((H + 2 * G) * D, hidden),
    )

    def function() -> Tensors:
        made = ks.fused_qkv_projection_bwd(
            **operands,
            has_bias=True,
            num_heads=H,
            num_kv_heads=G,
            head_dim=D,
            bias_dtype="float32",
        )
        return dict(zip(("d_input", "d_weight", "d_bias"), made, strict=True))

    return GraphProblem(
        operands,
        lambda memory: ks.QkvProjectionBwd.from_arrays(**memory),
        function,
    )


def output_gradients() -> GraphProblem:
    operands = normals(BRAIN, d_output=(2, 70, 256), attn_out=(2, 8, 70, 64), weight=(256, 512))

    def function() -> Tensors:
        made = ks.fused_output_projection_residual_bwd(
            **operands, has_bias=True, bias_dtype="float32"
        )
        return dict(zip(("d_attn_out", "d_weight", "d_bias"), made, strict=False))

    return GraphProblem(
        operands,
        lambda memory: ks.OutputProjectionBwd.from_arrays(**memory),
        function,
    )


PROBLEMS: dict[str, Callable[[], GraphProblem]] = {
    "attention-f16-128": lambda: dense(HALF, 128),
    "attention-bf16-64": lambda: dense(BRAIN, 64),
    "attention-f32": lambda: dense(FULL, 64),
    "attention-shared": lambda: dense(HALF, 128, "shared"),
    "attention-unfused": lambda: dense(HALF, 64, "gemm-softmax-gemm"),
    "attention-options": options,
    "varlen": packed,
    "paged": lambda: paged(None),
    "paged-decode-8-queries": lambda: paged("decode", queries=8),
    "paged-splits": lambda: paged("shared"),
    "paged-packed": paged_packed,
    "attention-lists": attention_lists,
    "bmm-f16": lambda: product(HALF),
    "bmm-bf16": lambda: product(BRAIN, alpha=0.5),
    "bmm-f32": lambda: product(FULL),
    "bmm-f64": lambda: product(torch.float64),
    "bmm-shared": lambda: product(HALF, "shared"),
    "bmm-cublaslt": lambda: product(HALF, "cublaslt"),
    "bmm-lists": product_of_lists,
    "matmul2d": one_product,
    "matmul2d-shared": lambda: one_product("shared"),
    "qkv": lambda: qkv(False),
    "qkv-paged": lambda: qkv(True),
    "output": output,
    "merge": merge,
    "attention_bwd-f16-128": lambda: attention_gradients(True, HALF, 128),
    "attention_bwd-any-order": lambda: attention_gradients(False, BRAIN, 64),
    "attention_bwd-f32": lambda: attention_gradients(True, FULL, 64),
    "qkv_bwd": qkv_gradients,
    "output_bwd": output_gradients,
}
