"""torch's CPU tensors: met where they are loaded, never imported."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import kernelseam
import numpy as np
import pytest
from kernelseam import BatchedGemmPointers, arrays, plan
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue
from refusals import Refused

torch = pytest.importorskip("torch", reason="torch is not installed")


def test_a_tensor_is_seen_as_it_lies() -> None:
    whole = torch.zeros(4, 10, 6, dtype=torch.bfloat16)
    part = whole[1:3, ::2, 2:5]
    info = arrays.describe(part)
    assert info.pointer == whole.data_ptr() + 62 * 2
    assert (info.shape, info.strides, info.dtype) == ((2, 5, 3), (60, 12, 1), DType.bfloat16)
    assert (info.kind, str(info.device), info.owner) == ("torch", "numpy:0 (cpu)", part)
    assert arrays.describe(torch.zeros(1, 3).expand(5, 3)).strides == (0, 1)


def test_out_is_written_in_place_and_kinds_may_be_mixed() -> None:
    a, b = np.ones((3, 4), np.float32), torch.full((4, 5), 2.0)
    out = torch.empty(3, 10)[:, ::2].T.contiguous().T
    assert kernelseam.matmul2d(a, b, out=out) is out
    assert torch.equal(out, torch.full((3, 5), 8.0))
    assert type(kernelseam.matmul2d(a, b)) is np.ndarray
    assert type(kernelseam.matmul2d(b.T, a.T)) is torch.Tensor


def test_what_would_be_lost_is_refused(refused: Refused) -> None:
    x = torch.ones(3, 3, requires_grad=True)
    refused(
        "a.requires_grad = True: gradients do not flow through this call. Call under "
        "torch.no_grad(), or pass tensor.detach() (what has gradients: kernelseam.interop.torch).",
        lambda: kernelseam.matmul2d(x, x),
    )
    with torch.no_grad():
        assert torch.equal(kernelseam.matmul2d(x, x), torch.full((3, 3), 3.0))
    negated = torch.ones(3, 3, dtype=torch.complex64).conj().imag
    assert negated.is_neg()
    refused(
        "a.is_neg = True: its memory holds the negated values (a lazy negation). "
        "Pass tensor.resolve_neg().",
        lambda: kernelseam.matmul2d(negated, x.detach()),
    )
    names = (
        "must be one of float16, bfloat16, float32, float64, or where 8 bits are taken "
        "float8_e4m3fn or float8_e4m3fnuz. Convert the array."
    )
    refused(
        f"a.dtype = int64: {names}",
        lambda: kernelseam.matmul2d(torch.ones(3, 3, dtype=torch.int64), x.detach()),
    )
    refused(
        "a.layout = torch.sparse_coo: must be torch.strided. Pass tensor.to_dense().",
        lambda: kernelseam.matmul2d(torch.ones(3, 3).to_sparse(), x.detach()),
    )
    with pytest.raises(
        InvalidValue,
        match=r"^a = torch\.Tensor on meta: must be an array of a library and on a device",
    ):
        kernelseam.matmul2d(torch.ones(3, 3, device="meta"), x.detach())


def test_torch_is_not_imported_for_its_sake() -> None:
    code = (
        "import sys, numpy as np, kernelseam\nx = np.ones((1, 1, 4, 4), "
        "np.float32)\nkernelseam.attention(x, x, x)\nassert 'torch' not in sys.modules\n"
    )
    env = {"PYTHONPATH": ":".join(sys.path), "KERNELSEAM_PLUGINS": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", ["int64", "uint64"])
def test_a_tensor_of_addresses_is_a_list_in_device_memory(kind: str, refused: Refused) -> None:
    a, b, c = (torch.randn(3, *shape) for shape in ((4, 8), (8, 5), (4, 5)))
    order = {"A": (0, 1, 2), "B": (2, 0, 1), "C": (0, 1, 2)}
    lists = [
        torch.tensor([x[i].data_ptr() for i in order[n]]).to(getattr(torch, kind))
        for n, x in zip("ABC", (a, b, c), strict=True)
    ]
    operands = dict(zip(("A_ptrs", "B_ptrs", "C_ptrs"), lists, strict=True))
    gemm = BatchedGemmPointers(M=4, N=5, K=8, batch=3, dtype=torch.float32, **operands)
    plan(gemm).bind(check=True)()
    torch.testing.assert_close(c, a @ b[[2, 0, 1]])
    lists[2][1] = lists[2][0]
    refused(
        f"C_ptrs[1] = {hex(int(lists[2][0]))}: equals C_ptrs[0]. Give every output memory of its "
        "own.",
        lambda: plan(gemm).bind(check=True),
    )
    refused(
        "A_ptrs = Tensor: must be a list or tuple of arrays or addresses, or an array of 64-bit "
        "integers. Pass list(…), or a one-dimensional array of int64 or uint64.",
        lambda: BatchedGemmPointers(
            M=4, N=5, K=8, batch=3, dtype="float32", A_ptrs=lists[0].to(torch.int32)
        ),
    )


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
def test_a_kind_of_plain_tensors_is_not_taken_where_torch_follows_the_call() -> None:
    """One that was seen without modes: it casts, transforms, traces, or a mode sees operations."""
    from kernelseam.interop.torch_function import plain_kind
    from torch._subclasses import FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode

    x = [torch.randn(2, 3, 4) for _ in range(3)]
    for wants in (False, True):
        for y in x:
            y.requires_grad_(wants)
        for _ in range(2):
            assert plain_kind(*x) is wants
            assert plain_kind(x[0], x[0], x[2]) is wants
        with torch.no_grad():
            assert plain_kind(*x) is False
        found: list[bool | None] = []

        def ask(y: Any) -> Any:
            found.append(plain_kind(*x))  # noqa: B023
            return y + 1

        with torch.autocast("cpu"):
            ask(0)
        with FakeTensorMode(), torch.no_grad():
            ask(0)
        with FlopCounterMode(display=False):
            ask(0)
        with torch.autograd.forward_ad.dual_level():
            ask(0)
        torch.func.vmap(ask)(torch.zeros(2))
        torch.func.grad(lambda y: ask(y).sum())(torch.zeros(2))  # noqa: B023
        torch.jit.trace(ask, torch.zeros(2), check_trace=False)
        assert found == [None] * 7
        assert plain_kind(*x) is wants
        assert plain_kind(*x[:2], x[2].to("meta")) is None
        assert plain_kind(*x[:2], x[2].detach().as_subclass(torch.nn.Buffer)) is None
