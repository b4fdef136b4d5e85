"""Python's calls of functions on new extents, counted beside a driver that does nothing: run by a
test in a process that has loaded it (``benchmarks.comparing.idle_device``). Prints the counts."""

from __future__ import annotations

import json
import sys
import weakref
from collections.abc import Callable
from typing import Any

import kernelseam as ks
import kernelseam.interop.torch as ks_torch
import numpy as np
import torch
from idle_compiler import compile_nothing
from kernelseam.arrays import torch as torch_arrays
from kernelseam.interop.transformers_attention import attention_forward

from benchmarks.comparing import idle_device

Make = Callable[[int], Callable[[], object]]


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.bfloat16)


def makes() -> dict[str, Make]:
    q, kv, x = zeros(4, 32, 1, 128), zeros(4, 8, 400, 128), zeros(1, 8, 400, 128)
    rows, w = zeros(800, 256), zeros(256, 256)
    tokens, weight = zeros(1, 400, 256), zeros(768, 256)
    offsets = torch.arange(3, dtype=torch.int32)
    cells = torch.zeros(2, 60, 16, 4, 64, dtype=torch.float8_e4m3fn)
    lengths, table = torch.full((2,), 400, dtype=torch.int32), torch.zeros(2, 30, dtype=torch.int32)
    one, angles, halves = torch.ones(1), torch.zeros(480, 32), zeros(2, 60, 16, 8, 128)
    long = torch.full((400,), 480, dtype=torch.int32)

    def packed(n: int) -> Callable[[], object]:
        y, cu = rows.view(800, 4, 64)[: 2 * n], offsets * n
        return lambda: ks.attention_varlen(y, y, y, cu, cu, n, n)

    def products(n: int) -> Callable[[], object]:
        a, b = [rows[: n + g % 8] for g in range(64)], [w] * 64
        return lambda: ks.grouped_mm_list(a, b)

    def into_pages(x: torch.Tensor) -> object:
        cache = {"kv_lengths": lengths, "cu_seqlens_q": offsets * (len(x) // 2)}
        pages = {"k_pages": cells[0], "v_pages": cells[1], "block_table": table}
        scales = dict.fromkeys(("k_scales", "v_scales"), one)
        return ks.fused_qkv_projection(
            x,
            weight,
            None,
            4,
            4,
            layout="bshd",
            rotary=(angles, angles),
            **pages,
            **cache,
            **scales,
        )

    def paged(x: torch.Tensor) -> object:
        k, v = halves
        return ks.attention_paged(x, k, v, table[0].expand(len(x), 30), long[: len(x)])

    def gradients(a: torch.Tensor) -> object:
        leaves = [a.detach().requires_grad_() for _ in range(3)]
        return torch.autograd.grad(ks_torch.attention(*leaves, causal=True), leaves, a)

    def banded(n: int) -> Callable[[], object]:
        reach = np.int32(n)
        return lambda: ks.attention(x, x, x, mask_mod=lambda b, h, i, j: abs(i - j) < reach)

    def capped(n: int) -> Callable[[], object]:
        cap = np.float32(n)
        function = lambda s, b, h, i, j: cap * torch.tanh(s / cap)  # noqa: E731
        return lambda: ks.attention(x, x, x, score_mod=function)

    def cut(x: torch.Tensor, call: Callable[[torch.Tensor], object], axis: int) -> Make:
        def make(n: int) -> Callable[[], object]:
            part = x.narrow(axis, 0, n)
            return lambda: call(part)

        return make

    return {
        "decode": cut(kv, lambda a: ks.attention(q, a, a), 2),
        "causal": cut(x, lambda a: ks.attention(a, a, a, causal=True), 2),
        "varlen": packed,
        "paged": cut(zeros(400, 1, 32, 128), paged, 0),
        "matmul2d": cut(rows, lambda a: ks.matmul2d(a, w, implementation="sm90"), 0),
        "gradients": cut(x, gradients, 2),
        "lists": products,
        "reach": banded,
        "cap": capped,
        "qkv": cut(tokens, lambda a: ks.fused_qkv_projection(a, weight, None, 4, 4), 1),
        "qkv into pages": cut(tokens[0], into_pages, 0),
    }


def layer(n: int) -> Callable[[], object]:
    """One query in a layer of a model: a cache of n keys."""
    q, k, v = zeros(4, 32, 1, 64), zeros(4, 8, n, 64), zeros(4, 8, n, 64)
    return lambda: attention_forward(None, q, k, v, None, scaling=0.125, position_ids=None)


def repeated() -> dict[str, Callable[[], object]]:
    """Calls that come again, at the same addresses."""
    q, a = zeros(1, 4, 128, 64), zeros(16, 128, 128)
    out, c = torch.empty_like(q), torch.empty_like(a)
    k, b = zeros(1, 4, 128, 64), zeros(16, 128, 128)
    lists = [[zeros(8 + g, 64) for g in range(64)] for _ in range(2)]
    return {
        "lists again": lambda: ks.grouped_mm_list(lists[0], [a[0, :64, :64].mT] * 64, out=lists[1]),
        "attention again": lambda: ks.attention(q, k, k.view(k.shape), out=out),
        "bmm again": lambda: ks.bmm(a, b, out=c),
        "torch.attention again": lambda: ks_torch.attention(q, k, k.view(k.shape)),
    }


def staged() -> list[weakref.ref[torch.Tensor]]:
    """What calls copy to the device from now on, as far as anything keeps it."""
    copier, copies = torch_arrays.copier, list[weakref.ref[torch.Tensor]]()

    def recording(like: Any) -> Any:
        copied = copier(like)

        def copy(host: Any) -> Any:
            tensor = copied(host)
            copies.append(weakref.ref(tensor))
            return tensor

        return copy

    torch_arrays.copier = recording
    return copies


def counted_again(run: Callable[[], object]) -> int:
    """The fewest of several, as an allocator may give a result another place."""
    for _ in range(4):
        run()
    return min(counted(run) for _ in range(50))


def counted(run: Callable[[], object]) -> int:
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        # not the classes of cuda-bindings, nor torch's autograd, nor NumPy
        others = ("/cuda/bindings/", "/torch/", "/numpy/")
        own = not any(x in frame.f_code.co_filename for x in others)
        calls += event == "call" and own

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls - 1


if __name__ == "__main__":
    idle_device.install()
    compile_nothing()
    counts = {}
    for name, make in makes().items():
        for n in (70, 71, 350, 351):
            make(n)()
        counts[name] = counted(make(349))  # of the class of the two before
        counts[f"{name}, a class"] = counted(make(250))
    layers = [layer(n) for n in (70, 71, 350, 351, *[359] * 4, *[360] * 3)]
    passed = [counted(run) for run in layers]
    counts |= zip(("first layer", "second layer", "layer"), passed[-3:], strict=True)
    copies, again = staged(), repeated()
    counts |= {name: counted_again(run) for name, run in again.items()}
    counts["lists' copies"] = len(copies)
    counts["lists' copies kept"] = sum(x() is not None for x in copies)
    again["lists again"]()
    counts["lists' copies again"] = len(copies)
    print(json.dumps(counts))
