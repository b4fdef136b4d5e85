"""On an NVIDIA GPU: the kernel for few queries over many keys beside float64, over ragged batches,
pages, groups and head dims; the same bits every time; one graph for lengths that grow."""

from __future__ import annotations

from typing import Any

import pytest
from attention_formula import attention
from kernelseam import Attention, plan
from nvidia_gpu import cupy  # noqa: F401

torch: Any = pytest.importorskip("torch", reason="torch is missing")
pytestmark = pytest.mark.gpu
MOST = 3000


class Decoding:
    """A paged cache, NaN where no key is, and a call over it."""

    def __init__(
        self,
        lengths: list[int],
        heads: tuple[int, int],
        dim: int,
        page: int,
        queries: int = 1,
        dtype: str = "float16",
        most: int = 0,
    ) -> None:
        torch.manual_seed(len(lengths) + dim)
        (H, self.kv_heads), kind = heads, getattr(torch, dtype)
        self.causal, self.page, most = queries > 1, page, max(most, *lengths, 1)
        width = -(-most // page)
        cache = (len(lengths) * width + 3, page, self.kv_heads, dim)
        self.q = torch.randn(len(lengths), queries, H, dim, device="cuda", dtype=kind)
        self.k, self.v = (torch.randn(*cache, device="cuda", dtype=kind) for _ in "kv")
        order = torch.randperm(cache[0], device="cuda").int()
        self.table = order[: len(lengths) * width].reshape(len(lengths), width).contiguous()
        self.lengths = torch.tensor(lengths, device="cuda", dtype=torch.int32)
        self.out = torch.empty_like(self.q)
        descriptor = Attention.from_arrays(
            self.q,
            self.k,
            self.v,
            self.out,
            layout="bshd",
            block_table=self.table,
            kv_lengths=self.lengths,
            max_seqlen_k=most,
            causal=self.causal,
        )
        self.call = plan(descriptor, implementation="decode").bind()

    def expected(self, b: int) -> Any:
        """One entry's result in float64."""
        n = int(self.lengths[b])
        k, v = (x[self.table[b].long()].flatten(0, 1)[:n].transpose(0, 1) for x in (self.k, self.v))
        out, _ = attention(self.q[b].transpose(0, 1), k, v, causal=self.causal)
        return out.transpose(0, 1)

    def worst(self) -> float:
        """The largest error, NaN where something was not written."""
        errors = [(self.out[b].double() - self.expected(b)).abs().max() for b in range(len(self.q))]
        return float(torch.stack(errors).max())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("heads", "dim", "page", "queries"),
    [
        ((8, 2), 128, 16, 1),
        ((32, 8), 128, 1, 1),
        ((16, 1), 64, 256, 2),  # 32 rows
        ((8, 8), 256, 7, 1),
        ((8, 2), 96, 16, 3),
        ((32, 4), 128, 64, 8),  # 64 rows
        ((16, 1), 128, 16, 8),  # 128 rows
        ((7, 1), 192, 16, 2),
    ],
)
def test_ragged_batches(
    heads: tuple[int, int], dim: int, page: int, queries: int, dtype: str
) -> None:
    lengths = [1, 0, 777, MOST, 64, 15, 16, 17, 5, 5, 0, 2048, 1, 1, 300, 31]
    decoding = Decoding(lengths, heads, dim, page, queries, dtype)
    first = None
    for _ in range(4):
        decoding.out.fill_(float("nan"))
        decoding.call()
        first = decoding.out.clone() if first is None else first
        assert torch.equal(decoding.out, first), "other bits than before"
    assert decoding.worst() < (4e-3 if dtype == "float16" else 3e-2)


def test_a_graph_serves_lengths_that_grow() -> None:
    decoding = Decoding([1, 0, 15, 16] * 9, (32, 8), 128, 16, most=MOST)
    decoding.call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decoding.call()
    for lengths in ([2, 1, 16, 17], [MOST, 1, MOST - 1, 0], [0] * 4, [100, 200, 300, 400]):
        decoding.lengths.copy_(torch.tensor(lengths * 9, dtype=torch.int32))
        decoding.out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert decoding.worst() < 4e-3, lengths
