"""What is written into a torch tensor counts in its version: torch refuses gradients that need what
was there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kernelseam
import numpy as np
import pytest
from gradient_problems import uneven
from kernelseam import Attention, AttentionPointers, BatchedGemmPointers, BatchedGemmStrided, plan

torch = pytest.importorskip("torch", reason="torch is not installed")
Written = tuple[Callable[[], object], dict[str, Any]]


def ones(*shape: int) -> Any:
    return torch.ones(shape)


def into_attention() -> Written:
    x, out = ones(1, 2, 3, 4), ones(1, 2, 3, 4)
    return lambda: kernelseam.attention(x, x, x, out=out, return_lse=True), {"out": out}


def into_attention_varlen() -> Written:
    x, out, offsets = ones(3, 2, 4), ones(3, 2, 4), torch.tensor([0, 3], dtype=torch.int32)
    return lambda: kernelseam.attention_varlen(x, x, x, offsets, offsets, 3, 3, out=out), {
        "out": out
    }


def into_attention_paged() -> Written:
    q, pages, out = ones(1, 3, 2, 4), ones(2, 4, 2, 4), ones(1, 3, 2, 4)
    table, lengths = torch.tensor([[1]], dtype=torch.int32), torch.tensor([4], dtype=torch.int32)
    return lambda: kernelseam.attention_paged(q, pages, pages, table, lengths, out=out), {
        "out": out
    }


def into_merge_states() -> Written:
    outs, out = ones(2, 1, 2, 3, 4), ones(1, 2, 3, 4)
    return lambda: kernelseam.merge_states(outs, ones(2, 1, 2, 3), out=out), {"out": out}


def into_a_product() -> Written:
    out = ones(3, 5)
    return lambda: kernelseam.matmul2d(ones(3, 4), ones(4, 5), out=out), {"out": out}


def into_a_product_by_columns() -> Written:
    """Computed as its transpose."""
    out = ones(2, 5, 3)
    return lambda: kernelseam.bmm(ones(2, 3, 4), ones(2, 4, 5), out=out.mT), {"out": out}


def into_a_products_gradients() -> Written:
    da, db = ones(3, 4), ones(4, 5)
    return lambda: kernelseam.matmul2d_bwd(ones(3, 5), ones(3, 4), ones(4, 5), da=da, db=db), {
        "da": da,
        "db": db,
    }


def into_a_gradient_by_lists() -> Written:
    """Rows and heads repeat, and heads of dc have gaps: no two strides walk over what is summed."""
    dc, a, b = (
        torch.from_numpy(np.ascontiguousarray(x)) for x in uneven(np.random.default_rng(0))[0]
    )
    dc = torch.nn.functional.pad(dc, (0, 7, 0, 7, 0, 3))[:, :6, :33, :17]
    a, da = a[:, :1, :1].expand(2, 6, 33, 20), ones(2, 1, 1, 20)
    return lambda: kernelseam.bmm_bwd(dc, a, b, b_gradient=False, da=da), {"da": da}


def into_projections() -> Written:
    q, k, v = out = ones(1, 2, 3, 4), ones(1, 1, 3, 4), ones(1, 1, 3, 4)
    return lambda: kernelseam.fused_qkv_projection(
        ones(1, 3, 5), ones(16, 5), None, 2, 1, out=out
    ), dict(zip("qkv", (q, k, v), strict=True))


def into_pages() -> Written:
    k, v, table = ones(2, 4, 1, 4), ones(2, 4, 1, 4), torch.tensor([[1]], dtype=torch.int32)
    return lambda: kernelseam.fused_qkv_projection(
        ones(1, 3, 5), ones(16, 5), None, 2, 1, k_pages=k, v_pages=v, block_table=table
    ), {"k_pages": k, "v_pages": v}


def into_an_output_projection() -> Written:
    out = ones(1, 3, 5)
    return lambda: kernelseam.fused_output_projection_residual(
        ones(1, 3, 8), ones(5, 8), None, out, out=out
    ), {"out": out}


def by_a_call() -> Written:
    q, out, lse = ones(1, 2, 3, 4), ones(1, 2, 3, 4), ones(1, 2, 3)
    return plan(Attention.from_arrays(q, q, q, out, lse)).bind(), {"out": out, "lse": lse}


def by_a_call_bound_anew() -> Written:
    call = plan(BatchedGemmStrided(A=ones(3, 4), B=ones(4, 5), C=ones(3, 5), M=3, N=5, K=4)).bind()
    out = ones(3, 5)
    return call.rebind(C=out), {"C": out}


def by_a_call_over_lists() -> Written:
    a, b, c = ([ones(*s) for _ in range(3)] for s in ((3, 4), (4, 5), (3, 5)))
    call = plan(BatchedGemmPointers(A_ptrs=a, B_ptrs=b, C_ptrs=c, M=3, N=5, K=4, batch=3)).bind()
    return call, {f"C_ptrs[{i}]": x for i, x in enumerate(c)}


def by_a_call_over_even_lists() -> Written:
    """Served as strided memory."""
    x, out = [list(ones(2, 3, 4)) for _ in range(3)], ones(2, 3, 4)
    call = plan(
        AttentionPointers(
            q_ptrs=x[0],
            k_ptrs=x[1],
            v_ptrs=x[2],
            out_ptrs=list(out),
            batch=1,
            num_heads=2,
            S_q=3,
            S_k=3,
            head_dim=4,
        )
    ).bind()
    return call, {"out_ptrs": out}


CASES = [value for name, value in list(globals().items()) if name.startswith(("into_", "by_a_"))]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_write_counts(case: Callable[[], Written]) -> None:
    """At every call, the one that is worked out and those that are remembered; and not for what is
    only read."""
    call, written = case()
    for _ in range(3):
        before = {name: x._version for name, x in written.items()}
        call()
        assert all(x._version > before[name] for name, x in written.items()), written.keys()


def test_torch_refuses_a_gradient_that_needs_what_was_there() -> None:
    x = torch.ones(3, 3, requires_grad=True)
    kept = torch.full((3, 3), 2.0)
    y = (x * kept).sum()
    kernelseam.matmul2d(torch.ones(3, 3), torch.ones(3, 3), out=kept)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_what_is_read_is_not_counted() -> None:
    a, b, out = ones(3, 4), ones(4, 5), ones(3, 5)
    kernelseam.matmul2d(a, b, bias=(bias := ones(5)), residual=(residual := ones(3, 5)), out=out)
    assert [x._version for x in (a, b, bias, residual, out)] == [0, 0, 0, 0, 1]
    call = plan(BatchedGemmStrided(A=a, B=b, C=out, M=3, N=5, K=4)).bind()
    assert out._version == 1, "binding writes nothing"
    call()
    assert [x._version for x in (a, b, out)] == [0, 0, 2]
