"""Projections of heads that lie on 2, 3 and 4 gloo processes, around an attention, forward and
backward, against the whole by torch in float64."""

from __future__ import annotations

import re
from unittest import mock

import pytest

pytest.importorskip("torch", reason="torch is not installed")
import distributed_calls  # noqa: E402
from gloo_ranks import Ranks  # noqa: E402
from kernelseam.errors import InvalidValue  # noqa: E402


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("rows", "order"), [("sharded", "contiguous"), ("sharded", "balanced"), ("whole", "contiguous")]
)
@pytest.mark.parametrize("chunks", [1, 3])
def test_a_layer(ranks: Ranks, rows: str, order: str, chunks: int, size: int) -> None:
    for made in ranks.run(distributed_calls.layer, rows, order, chunks, ranks=size):
        assert isinstance(made, dict), made
        assert max(made.values()) < 1e-13, made


@pytest.mark.parametrize("rows", ["sharded", "whole"])
def test_ranks_sums_are_rounded_once(ranks: Ranks, rows: str) -> None:
    for ours, early in ranks.run(distributed_calls.rounded_once, rows, ranks=3):
        assert ours < 1e-5 < 1e-2 < early


def test_without_biases(ranks: Ranks) -> None:
    for made in ranks.run(distributed_calls.layer, "sharded", "contiguous", 4, bias=False, ranks=2):
        assert isinstance(made, dict) and max(made.values()) < 1e-13, made


def faulty(group: object, fault: str) -> dict[str, float]:
    """The layer with a fault planted into this process."""
    from kernelseam.distributed import projections

    if fault == "residual added by every rank":
        # As if it were part of every rank's product.
        import torch

        right = projections._done
        with mock.patch.object(
            projections, "_done", lambda x, t: right(x, t) + (x.ndim == 3) * torch.ones(())
        ):
            return distributed_calls.layer(group, "sharded", "contiguous", 2)
    if fault == "chunks in the wrong order":
        pieces = projections._ShardedProjection.pieces
        with mock.patch.object(
            projections._ShardedProjection, "pieces", lambda self, rows: pieces(self, rows)[::-1]
        ):
            return distributed_calls.layer(group, "sharded", "contiguous", 3)
    assert fault == "sum of one rank alone"
    with mock.patch.object(
        projections._ShardedProjection,
        "scatter",
        lambda self, x, step: (
            x.unflatten(0, (self.axis.size, -1))[self.axis.index].contiguous(),
            mock.Mock(),
        ),
    ):
        return distributed_calls.layer(group, "sharded", "contiguous", 2)


@pytest.mark.parametrize(
    "fault",
    ["residual added by every rank", "chunks in the wrong order", "sum of one rank alone"],
)
def test_a_planted_fault_is_seen(ranks: Ranks, fault: str) -> None:
    for made in ranks.run(faulty, fault, ranks=2):
        assert isinstance(made, dict), made
        assert max(made.values()) > 1e-2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("heads", r"^num_kv_heads = 1: must be a multiple of the 2 ranks\. Shard the sequence "),
        (
            "weight",
            r"^weight = \(12, 7\): must be \[3·head_dim, hidden\] beside an input \[B,",
        ),
        ("rows", r"^rows = all: must be one of sharded, whole\. Choose one\.$"),
        ("odd", r"^input\.shape\[1\] = 3: order 'balanced' has two chunks of one length on each "),
        ("chunks", r"^chunks = 0: "),
        ("cut", r"^weight\.shape\[0\] = 13: must be a multiple of num_heads \+ 2·num_kv_heads = 6"),
        (
            "residual",
            r"^residual = torch\.float32 \[1, 6, 8\]: must be torch\.float32, of shape \[1, 3",
        ),
        (
            "residual of integers",
            r"^residual = torch\.int8 \[1, 3, 8\]: must be torch\.float32, of",
        ),
        (
            "bias of integers",
            r"^bias = torch\.int8 \[8\]: must be torch\.float32, of shape \[8\]\. ",
        ),
        (
            "gradients",
            r"^bwd_implementation = nobody: must be one of numpy for qkv_projection_bwd on ",
        ),
        ("output gradients", r"^bwd_implementation = nobody: must be one of numpy for output_proj"),
        ("lengths", r"^attn_out\.shape\[2\] = 5: must be a multiple of the 2 ranks\. Pad to 6\.$"),
    ],
)
def test_what_does_not_fit_is_refused(ranks: Ranks, change: str, message: str) -> None:
    for error in ranks.run(distributed_calls.projections_misfit, change, ranks=2):
        assert isinstance(error, InvalidValue), error
        assert re.search(message, str(error)), str(error)
