"""The kernel for few queries over many keys on the host platform: ragged lengths that grow between
calls, whatever the number of blocks; a call's workspace serves the next; what is taken and what is
refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from attention_formula import attention
from kernelseam import trace
from kernelseam.contract import Device, SourceBundle
from kernelseam.descriptors import Attention
from kernelseam.dispatch import consider
from kernelseam.kernels import kernel as kernels_module
from kernelseam.parity.matrix import matrix
from kernelseam.planning import plan
from kernelseam.plugins import Plugins
from kernelseam.samples.attention_case import AttentionCase
from kernelseam.samples.common import DECODE
from kernelseam_hostcpp.runtime import DEVICES, HostArray
from own_cases import own_cases, require_passed

RNG = np.random.default_rng(7)
PAGE, WIDTH, HEADS, KV_HEADS, D = 5, 60, 6, 2, 32
MOST = PAGE * WIDTH
LENGTHS = (
    [300, 1, 0, 17, 256, 0, 3, 299, 16, 15, 33, 128, 7, 90, 1, 1, 2, 250],
    [0] * 18,
    [MOST] * 18,
    [0] * 17 + [MOST],
    [MOST] + [0] * 17,
    [1] * 18,
)


class Decoding:
    """A paged cache of 18 sequences, one call over it."""

    def __init__(
        self, queries: int = 1, device: Device | None = None, most: int = MOST, **options: Any
    ) -> None:
        batch = len(LENGTHS[0])
        draw = lambda *shape: RNG.standard_normal(shape).astype(np.float16)  # noqa: E731
        self.q = draw(batch, queries, HEADS, D)
        self.k, self.v = (draw(batch * WIDTH, PAGE, KV_HEADS, D) for _ in range(2))
        self.table = RNG.permutation(batch * WIDTH).astype(np.int32).reshape(batch, WIDTH)
        self.lengths = np.zeros(batch, np.int32)
        self.out = np.zeros_like(self.q)
        arrays = (self.q, self.k, self.v, self.out)
        made = Attention.from_arrays(
            *(HostArray(x) for x in arrays),
            layout="bshd",
            block_table=HostArray(self.table),
            kv_lengths=HostArray(self.lengths),
            max_seqlen_k=most,
            **options,
        )
        self.options = options
        self.plan = plan(made, device=device, implementation=DECODE)
        self.call = self.plan.bind()

    def run(self, lengths: list[int]) -> np.ndarray:
        self.lengths[:] = lengths
        self.out[:] = np.nan
        self.call()
        return self.out.astype(np.float64)

    def expected(self, lengths: list[int]) -> np.ndarray:
        """In float64, an entry after the other."""
        out = np.zeros(self.q.shape)
        for b, n in enumerate(lengths):
            q = self.q[b].swapaxes(0, 1)
            k, v = (
                x[self.table[b]].reshape(MOST, KV_HEADS, D)[:n].swapaxes(0, 1)
                for x in (self.k, self.v)
            )
            options = {n: self.options[n] for n in ("causal", "window") if n in self.options}
            out[b] = attention(q, k, v, **options)[0].swapaxes(0, 1)
        return out


@pytest.mark.parametrize("units", [1, 3, 29])
@pytest.mark.parametrize(("queries", "causal"), [(1, False), (3, True)])
def test_lengths_that_change_between_calls(
    hostcpp: Plugins, monkeypatch: pytest.MonkeyPatch, units: int, queries: int, causal: bool
) -> None:
    """One call, whose counters each launch leaves 0."""
    wide = replace(DEVICES[0], limits=replace(DEVICES[0].limits, compute_units=units))
    runtime = hostcpp.backend("hostcpp").runtime
    monkeypatch.setattr(type(runtime), "devices", lambda self: (wide,))
    monkeypatch.setattr("kernelseam_hostcpp.runtime.DEVICES", (wide, *DEVICES[1:]))
    decoding = Decoding(queries, causal=causal)
    with trace() as launches:
        for lengths in LENGTHS:
            np.testing.assert_allclose(
                decoding.run(lengths), decoding.expected(lengths), atol=2e-3, err_msg=str(lengths)
            )
    assert [r.kernel for r in launches] == ["attention_decode"] * len(LENGTHS)
    assert max(r.grid[0] for r in launches) > 1


@pytest.mark.parametrize("options", [{}, {"causal": True, "window": (20, 0)}], ids=str)
def test_lengths_beyond_the_keys_are_cut_and_negative_ones_are_0(
    hostcpp: Plugins, options: dict[str, Any]
) -> None:
    """As if on another device, whose memory is not looked at before each launch."""
    decoding = Decoding(3, device=replace(DEVICES[0], evidence="measured"), **options)
    lengths = [-1, MOST + 1, -100, 40, 2**31 - 1, -(2**31), *[12] * 12]
    meant = [min(max(n, 0), MOST) for n in lengths]
    np.testing.assert_allclose(decoding.run(lengths), decoding.expected(meant), atol=2e-3)


def test_the_same_bits_every_time(hostcpp: Plugins) -> None:
    decoding = Decoding()
    first = decoding.run(LENGTHS[0]).copy()
    for _ in range(3):
        np.testing.assert_array_equal(decoding.run(LENGTHS[0]), first)


@pytest.fixture
def lost_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counters of items in several parts keep what they have counted."""
    whole, words = kernels_module.bundle, "if (last) *counter = 0;"

    def planted(*arguments: Any) -> SourceBundle:
        made = whole(*arguments)
        assert sum(words in text for _, text in made.files) == 1
        return replace(
            made, files=tuple((name, text.replace(words, "")) for name, text in made.files)
        )

    monkeypatch.setattr(kernels_module, "bundle", planted)


@pytest.mark.usefixtures("lost_reset")
def test_a_lost_reset_of_a_counter_is_seen(hostcpp: Plugins) -> None:
    """The next call's items would never be joined, or too early."""
    decoding = Decoding()
    lengths = LENGTHS[0]
    np.testing.assert_allclose(decoding.run(lengths), decoding.expected(lengths), atol=2e-3)
    assert not np.isfinite(decoding.run(lengths)).all(), "nobody was the last to arrive"


@pytest.mark.usefixtures("lost_reset")
@pytest.mark.parametrize("most", [MOST, 0], ids=["of-many", "all"])
@pytest.mark.parametrize(("keys", "whole"), [(1, True), (48, True), (128, True), (200, False)])
def test_short_items_that_are_alike_are_in_no_parts(
    hostcpp: Plugins, monkeypatch: pytest.MonkeyPatch, keys: int, whole: bool, most: int
) -> None:
    """36 items of up to eight tiles and five places of eight a block: a block each, none of which
    counts. Of 13 tiles each is in two parts. So where the host knows how many keys there are."""
    wide = replace(DEVICES[0], limits=replace(DEVICES[0].limits, compute_units=132))
    runtime = hostcpp.backend("hostcpp").runtime
    monkeypatch.setattr(type(runtime), "devices", lambda self: (wide,))
    monkeypatch.setattr("kernelseam_hostcpp.runtime.DEVICES", (wide, *DEVICES[1:]))
    decoding, lengths = Decoding(most=most or keys), [keys] * len(LENGTHS[0])
    for _ in range(2):
        found = decoding.run(lengths)
    assert np.isfinite(found).all() == whole
    if whole:
        np.testing.assert_allclose(found, decoding.expected(lengths), atol=2e-3)


def _must(case: AttentionCase) -> bool:
    """Whether the kernel is made for a case."""
    return (
        case.dtype.itemsize == 2
        and case.view == "strided"
        and case.S_q * (case.num_heads // max(case.kv_heads, 1)) <= 128
        and max(case.head_dim, case.value_dim) <= 128  # a row of 16-byte chunks for 16 lanes
        and not case.batch_invariant
    )


TAKEN = [
    c.name
    for c in matrix()
    if isinstance(c, AttentionCase) and _must(c) and min(c.batch, c.S_q, c.num_heads) > 0
]
OFTEN = {
    "attention-f16-64-split-pages",
    "attention-f16-64-causal-pages-16-sequences",
    "attention-f16-64-causal-pages-48-window-sinks",
    "attention-bf16-128-causal-pages-48-gqa",
    "attention-f16-64-everything",
    "attention-f16-64-split-nan",
}


@pytest.mark.parametrize(("name", "device"), own_cases(TAKEN, OFTEN))
def test_parity(hostcpp: Plugins, name: str, device: Device) -> None:
    require_passed(name, device, DECODE)


def test_the_cases_that_are_run_often_are_there() -> None:
    assert set(TAKEN) >= OFTEN and len(TAKEN) > 200


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"batch_invariant": True}, "it cuts keys by the lengths of all entries"),
        ({"dtype": "float32"}, "it takes bfloat16 and float16, not float32"),
        ({"S_q": 65}, "S_q·heads of a group = 130: it takes 128 at most"),
        ({"head_dim": 576, "value_dim": 512}, "no tile of host takes float16 with head dims 576"),
        ({"S_q": 0}, "there are no queries"),
        ({"batch": 2**20, "S_k": 2**20}, "tiles of keys: it takes less than 2^31"),
    ],
    ids=str,
)
def test_what_is_refused_is_named(hostcpp: Plugins, more: dict[str, Any], words: str) -> None:
    fields = {
        "batch": 2,
        "num_heads": 4,
        "kv_heads": 2,
        "S_q": 1,
        "S_k": 500,
        "head_dim": 64,
        "dtype": "float16",
    }
    problem = Attention(**{**fields, **more}).problem()
    refusals = {a.implementation.name: a.refusal for a in consider(problem, DEVICES[0])}
    assert words in str(refusals[DECODE]), refusals
