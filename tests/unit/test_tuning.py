"""Choices that were measured: turns, what is kept, what is believed of a file, and what dispatch
makes of it.

The backend is the third vendor's, with implementations whose times are scripted.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernelseam import Attention, BatchedGemmStrided, plan, planning
from kernelseam.compilation import CacheWarning, entry
from kernelseam.contract import EMULATED, Cost, Device, LaunchRecord, PlanParts, Problem
from kernelseam.dispatch import select
from kernelseam.errors import BrokenImplementation, InvalidValue, UnknownName, Unsupported
from kernelseam.plugins import Plugins, plugins
from kernelseam.tuned import store
from kernelseam.tuned.classes import batch_invariant, problem_class, representative
from kernelseam.tuned.numbers import numbers, with_numbers
from kernelseam.tuned.steps import about, entries, near, shared
from kernelseam.tuning import NOT_STORED, ROUNDS, SLOW_FACTOR, Tuning, tune
from kernelseam.variants import Variant
from kernelseam_thirdvendor import AcmeArray

US = 1e-6


@dataclass
class Scripted:
    """Computes nothing, in as many seconds as it is told to. ``times`` by variant; "" where it has
    none."""

    name: str
    predicted: float
    times: Mapping[str, float]
    refusal: str | None = None
    broken: frozenset[str] = frozenset()
    workspace: int = 0
    backend: str = "acme"
    operation: str = "gemm"
    ran: list[str] = field(default_factory=list)
    workspaces: set[int] = field(default_factory=set)

    def supports(self, problem: Problem, device: Device) -> str | None:
        return self.refusal

    def cost(self, problem: Problem, device: Device) -> Cost:
        return Cost(0, 0, self.predicted)

    def variants(self, problem: Problem, device: Device) -> tuple[Variant, ...]:
        return tuple(Variant(n, Cost(0, 0, self.predicted)) for n in self.times if n)

    def build(self, problem: Problem, device: Device) -> PlanParts:
        return self.build_variant(problem, device, next(iter(self.times)))

    def build_variant(self, problem: Problem, device: Device, variant: str) -> PlanParts:
        if variant in self.broken:
            raise RuntimeError("it fell apart")
        return PlanParts((_Step(self, variant),), self.workspace)


@dataclass
class _Step:
    implementation: Scripted
    variant: str
    record = LaunchRecord("nothing", (1, 1, 1), (1, 1, 1), 0, "acme1")

    def bind(self, pointers: Mapping[str, int], workspace: int) -> Callable[[int], None]:
        self.implementation.workspaces.add(workspace)

        def launch(stream: int) -> None:
            CLOCK.append(
                (
                    f"{self.implementation.name}:{self.variant}".rstrip(":"),
                    self.implementation.times[self.variant],
                )
            )
            self.implementation.ran.append(self.variant)

        return launch


CLOCK: list[tuple[str, float]] = []


def gemm(m: int = 8, n: int = 8, k: int = 8) -> BatchedGemmStrided:
    a, b, c = (AcmeArray(np.zeros(s, np.float32)) for s in ((m, k), (k, n), (m, n)))
    return BatchedGemmStrided(M=m, N=n, K=k, A=a, B=b, C=c)


@pytest.fixture
def implementations(
    acme: Any, discovered: Callable[..., Plugins], monkeypatch: pytest.MonkeyPatch, cache: Path
) -> Callable[..., Device]:
    """``implementations(scripted, …)``: these are all there is on acme:0, which is returned; times
    are what they say."""

    def use(*given: Scripted) -> Device:
        loaded = discovered("kernelseam_thirdvendor")
        loaded.registry.implementations[:] = given
        runtime: Any = loaded.backend("acme").runtime

        def time(launch: Callable[[int], None], device: Device, repeats: int) -> list[float]:
            CLOCK.clear()
            for _ in range(repeats):
                launch(0)
            return [seconds for _, seconds in CLOCK]

        monkeypatch.setattr(runtime, "time", time, raising=False)
        device: Device = runtime.devices()[0]
        return device

    return use


def tiles(predicted: float = 1e-3, **more: Any) -> Scripted:
    return Scripted("tiles", predicted, {"big": 30 * US, "small": 20 * US, "odd": 90 * US}, **more)


def quick(predicted: float = 2e-3, us: float = 25.0, **more: Any) -> Scripted:
    return Scripted("library", predicted, {"": us * US}, **more)


def tuned(device: Device, descriptor: Any = None) -> Tuning:
    return tune(descriptor or gemm(), device)


# ---------------------------------------------------------------- measuring


def test_every_configuration_is_timed_in_turns_and_the_fastest_kept(
    implementations: Callable[..., Device],
) -> None:
    mine, library = tiles(), quick()
    device = implementations(mine, library)
    reported: list[tuple[str, int, int]] = []
    tuning = tune(gemm(), device, progress=lambda *x: reported.append(x))
    assert [(w.name, w.seconds) for w in tuning.configurations] == [
        ("tiles:small", 20 * US),
        ("library", 25 * US),
        ("tiles:big", 30 * US),
        ("tiles:odd", 90 * US),
    ]
    assert (tuning.chosen.name, tuning.model.name, tuning.refused, tuning.note) == (
        "tiles:small",
        "tiles:big",
        (),
        "",
    )
    assert tuning.path is not None and tuning.path.parent.name == "tuned"
    assert 90 * US > SLOW_FACTOR * 20 * US and len(tuning.configurations[3].samples) == 1, (
        "what is hopeless is not timed again"
    )
    assert (
        mine.ran.count("odd") == 4
        and min(len(w.samples) for w in tuning.configurations[:2]) >= ROUNDS
    )
    order = [x for x in mine.ran if x != "odd"][8:]  # after a warm-up and a first look at each
    changes = sum(x != y for x, y in zip(order, order[1:], strict=False))
    assert 30 * US <= SLOW_FACTOR * 20 * US and changes == 2 * ROUNDS - 1, (
        "round after round, not one after the other"
    )
    assert [t[0] for t in reported] == [
        "tiles:big",
        "tiles:small",
        "tiles:odd",
        "library",
        *(f"round {i + 1}" for i in range(ROUNDS)),
    ]
    assert [t[1:] for t in reported] == [(i, 4 + ROUNDS) for i in range(4 + ROUNDS)]


def test_dispatch_takes_what_was_measured_unless_one_is_named(
    implementations: Callable[..., Device],
) -> None:
    device = implementations(tiles(), quick())
    before = plan(gemm(), device=device)
    assert (before.implementation, before.choice.variant, before.choice.by) == (
        "tiles",
        "",
        "model",
    )
    tuned(device)
    after = plan(gemm(), device=device)
    assert (after.implementation, after.choice.variant, after.choice.by) == (
        "tiles",
        "small",
        "tuned",
    )
    assert after.parts.steps[0].variant == "small"  # type: ignore[attr-defined]
    named = plan(gemm(), device=device, implementation="library")
    assert (named.implementation, named.choice.by) == ("library", "named")
    forced = plan(gemm(), device=device, implementation="tiles:odd")
    assert (forced.choice.variant, forced.parts.steps[0].variant) == ("odd", "odd")  # type: ignore[attr-defined]
    planning.forget()
    assert store.clear() == 1
    assert plan(gemm(), device=device).choice.by == "model" and store.clear() == 0


def test_what_was_measured_goes_before_what_is_predicted(
    implementations: Callable[..., Device],
) -> None:
    device = implementations(tiles(), quick(us=5.0))
    assert plan(gemm(), device=device).implementation == "tiles"
    assert tuned(device).chosen.name == "library"
    planned = plan(gemm(), device=device)
    assert (planned.implementation, planned.choice.by) == ("library", "tuned")
    assert planned.parts.steps[0].implementation.name == "library"  # type: ignore[attr-defined]


def test_a_variant_that_is_not_there(implementations: Callable[..., Device]) -> None:
    device = implementations(tiles(), quick())
    for wanted, known in (
        ("tiles:huge", "tiles:big, tiles:small, tiles:odd"),
        ("library:fast", "library"),
    ):
        with pytest.raises(UnknownName) as e:
            plan(gemm(), device=device, implementation=wanted)
        assert str(e.value) == (
            f"implementation = {wanted}: must be one of {known} for gemm on acme. Name one of "
            "these, or leave it out."
        )


def test_what_is_as_good_leaves_the_models_choice(implementations: Callable[..., Device]) -> None:
    device = implementations(
        Scripted("first", 1e-3, {"": 10.05 * US}), Scripted("second", 2e-3, {"": 10 * US})
    )
    assert tuned(device).chosen.name == "first"
    device = implementations(
        Scripted("first", 1e-3, {"": 10.2 * US}), Scripted("second", 2e-3, {"": 10 * US})
    )
    assert tuned(device).chosen.name == "second"


def test_one_workspace_serves_all_in_turn(implementations: Callable[..., Device]) -> None:
    given = tiles(workspace=1000), quick(workspace=4000), Scripted("without", 1.0, {"": US})
    device = implementations(*given)
    tuned(device)
    assert len(given[0].workspaces | given[1].workspaces) == 1 and given[2].workspaces == {0}


@pytest.mark.parametrize("wish", [{"zeroed_bytes": 16}, {"workspace_alignment": 1024}], ids=str)
def test_a_workspace_of_its_own_for_whoever_leaves_zeros_or_wants_more_alignment(
    implementations: Callable[..., Device], monkeypatch: pytest.MonkeyPatch, wish: dict[str, int]
) -> None:
    plain, other, special = (
        quick(workspace=4000),
        tiles(workspace=1000),
        Scripted("special", 1.0, {"": 25 * US}),
    )
    monkeypatch.setattr(
        special, "build", lambda *_: PlanParts((_Step(special, ""),), 2000, **wish), raising=False
    )
    device = implementations(plain, other, special)
    assert not [w.failure for w in tuned(device).configurations if w.failure]
    assert len(plain.workspaces | other.workspaces) == 1
    assert len(special.workspaces) == 1 and not special.workspaces & plain.workspaces


def test_broken_candidates_are_skipped(
    implementations: Callable[..., Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = Scripted("lost", 1e-9, {"": US})
    monkeypatch.setattr(lost, "variants", lambda *_: 1 // 0, raising=False)
    device = implementations(
        tiles(broken=frozenset({"small"})), quick(refusal="needs a matrix"), lost
    )
    actual = tuned(device)
    assert [w.name for w in actual.configurations] == [
        "tiles:big",
        "tiles:odd",
        "lost",
        "tiles:small",
    ]
    assert [w.failure for w in actual.configurations[2:]] == [
        "its variants raised ZeroDivisionError: integer division or modulo by zero",
        "its build raised RuntimeError: it fell apart",
    ]
    assert [str(r) for r in actual.refused] == ["library: needs a matrix"]
    device = implementations(quick(refusal="needs a matrix"))
    with pytest.raises(Unsupported, match=r"library: needs a matrix\.$"):
        tuned(device)
    device = implementations(quick(broken=frozenset({""})))
    with pytest.raises(
        Unsupported, match=r"library: its build raised RuntimeError: it fell apart\.$"
    ):
        tuned(device)


def test_an_emulated_device_is_not_tuned(implementations: Callable[..., Device]) -> None:
    device = replace(implementations(tiles()), evidence=EMULATED)
    with pytest.raises(InvalidValue) as e:
        tuned(device)
    assert str(e.value) == (
        "device = acme:0 (acme1, emulated): its times are those of a program on the host and say "
        "nothing of the hardware. Tune on the hardware."
    )


# ---------------------------------------------------------------- what a choice is for


def test_a_choice_serves_its_class(implementations: Callable[..., Device]) -> None:
    device = implementations(tiles(), quick())
    tuned(device, gemm(m=700))
    for m, by in ((700, "tuned"), (760, "tuned"), (610, "tuned"), (570, "model"), (870, "model")):
        assert plan(gemm(m=m), device=device).choice.by == by, m
    assert plan(gemm(m=700, k=16), device=device).choice.by == "model", (
        "K is the model's, and exact"
    )
    assert select(gemm(m=700).problem(), replace(device, name="Acme Two")).by == "model"


def test_a_problem_of_the_class_that_is_refused_goes_by_the_model(
    implementations: Callable[..., Device],
) -> None:
    mine = tiles()
    device = implementations(mine, quick())
    tuned(device)
    mine.refusal = "too narrow"
    assert plan(gemm(), device=device).implementation == "library"
    mine.refusal = None
    mine.times = {"big": US}  # what was measured is not offered any more
    planning.forget()
    assert plan(gemm(), device=device).choice == select(gemm().problem(), device)
    assert plan(gemm(), device=device).choice.by == "model"


def test_a_tuned_way_that_breaks_is_passed_over(
    implementations: Callable[..., Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = tiles()
    device = implementations(mine, quick())
    tuned(device)
    mine.broken = frozenset({"small"})
    with pytest.warns(
        BrokenImplementation, match="library computes .* tiles: its build raised RuntimeError"
    ):
        assert plan(gemm(), device=device).implementation == "library"
    planning.forget()
    monkeypatch.setattr(mine, "variants", lambda *_: 1 // 0, raising=False)
    with pytest.warns(BrokenImplementation, match="its variants raised ZeroDivisionError"):
        select(gemm().problem(), device)


def test_a_batch_invariant_problem_has_no_tuned_choice(
    implementations: Callable[..., Device], cache: Path
) -> None:
    """Neither by tuning it, nor by a file that says so."""
    device = implementations(*(replace(w, operation="attention") for w in (tiles(), quick())))
    extents: dict[str, Any] = {
        "batch": 1,
        "num_heads": 1,
        "S_q": 8,
        "S_k": 8,
        "head_dim": 8,
        "dtype": "float32",
    }
    arrays = {n: AcmeArray(np.zeros((1, 1, 8, 8), np.float32)) for n in ("q", "k", "v", "out")}
    free = Attention(**extents, **arrays)
    bound = Attention(**extents, **arrays, batch_invariant=True)
    actual = tuned(device, bound)
    assert (actual.path, actual.note, actual.chosen.name) == (None, NOT_STORED, "tiles:small")
    assert not (cache / "tuned").exists()
    assert [batch_invariant(d.problem()) for d in (free, bound)] == [False, True]
    forged = store.Tuned("tiles", "small", "", ())
    for d in (free, bound):
        store.keep(d.problem(), device, forged)
    assert [plan(d, device=device).choice.by for d in (free, bound)] == ["tuned", "model"]


@pytest.mark.parametrize(
    ("n", "middle"),
    [(0, 0), (1, 1), (2, 2), (3, 3), (4, 4), (5, 6), (609, 724), (861, 724), (1024, 1024)],
)
def test_buckets(n: int, middle: int) -> None:
    assert about(n) == middle


def test_batches_of_few_queries_are_classes_by_four_bits() -> None:
    """The largest of each: exact up to 16, then in eight steps an octave."""
    assert [entries(n) for n in range(17)] == [*range(17)]
    assert {entries(n) for n in range(17, 33)} == {*range(18, 33, 2)}
    assert {entries(n) for n in range(33, 65)} == {*range(36, 65, 4)}
    assert [entries(n) for n in (65, 95, 128, 129)] == [72, 96, 128, 144]
    assert all(n <= entries(n) == entries(entries(n)) for n in range(3000))


def test_keys_of_few_queries_are_the_nearest_of_eight_an_octave() -> None:
    assert [near(n) for n in range(17)] == [*range(17)]
    assert [near(n) for n in (703, 1156, 2317, 4096, 8000)] == [704, 1152, 2304, 4096, 8192]
    assert all(16 * abs(near(n) - n) <= n and near(near(n)) == near(n) for n in range(1, 9000))


@pytest.mark.parametrize(
    ("queries", "most", "group", "found"),
    [
        (65, 128, 3, 84),  # two tiles of 42 queries in 128 rows, where 85 would be three
        (65, 128, 4, 80),
        (12, 12, 5, 12),  # 12 queries of five heads fill 64 rows, 25 fill 128
        (13, 16, 5, 16),
        (25, 32, 5, 25),
        (100, 128, 1, 128),
        (9, 12, 16, 12),
    ],
)
def test_queries_of_a_class_have_as_many_tiles(
    queries: int, most: int, group: int, found: int
) -> None:
    """Of heads that share tiles of 64, 128 and 256 rows by whole queries."""
    assert shared(queries, most, group) == found
    for rows in (64, 128, 256):
        if 1 < group <= rows and -(-queries // (rows // group)) < 32:
            assert -(-found // (rows // group)) == -(-queries // (rows // group))


@given(
    extents=st.tuples(*[st.integers(1, 9000)] * 3),
    batch=st.integers(1, 100),
    group=st.sampled_from([1, 2, 3, 5, 8, 16, 64, 100]),
)
def test_a_representative_is_its_own(extents: tuple[int, int, int], batch: int, group: int) -> None:
    """Made from its numbers it is the same, and decides for itself: a class has one."""
    m, n, k = extents
    problems: list[Any] = [
        BatchedGemmStrided(M=m, N=n, K=k, batch=batch, dtype="bfloat16").problem(),
        Attention(
            batch=batch, num_heads=2 * group, kv_heads=2, S_q=m, S_k=n, head_dim=64, dtype="float16"
        ).problem(),
    ]
    for problem in problems:
        found = representative(problem)
        again = with_numbers(found, numbers(found))
        assert again == found == representative(again) and found.spec == problem.spec
    product, attention = map(representative, problems)
    assert m <= product.M and (product.M - m) * 16 <= m + 1024
    assert (product.N - n) * 32 <= n + 2048 and (n & -n & 63) == (product.N & -product.N & 63)
    assert attention.S_q >= m or m > 64 * group


@pytest.mark.parametrize(("heads", "extent"), [(8, 512), (1, 8192), (2, 16384), (3, 300)])
def test_gaps_between_matrices_and_between_entries_are_classes(heads: int, extent: int) -> None:
    """Whatever the heads and the extents: a gap's stride is no multiple of a matrix's."""
    given: Any = {"M": extent, "N": 256, "K": extent, "batch": 4, "num_heads": heads}
    whole: Any = BatchedGemmStrided(dtype="bfloat16", **given).problem()
    _, matrix, row = whole.a_strides
    head = matrix + 64
    problems = [
        replace(whole, a_strides=(batch, head, row)) for batch in (heads * head, heads * head + 64)
    ]
    found = [representative(p) for p in (whole, *problems)]
    assert len(set(found)) == 3, [p.a_strides for p in found]
    for problem in found:
        assert representative(replace(problem)) == problem


@pytest.mark.parametrize("page_size", [1, 16])
def test_pages_that_lie_no_whole_rows_apart_are_a_class_of_their_own(page_size: int) -> None:
    """Whose representative's do not either, and which is its own."""
    rows: Any = Attention(
        batch=2,
        num_heads=4,
        kv_heads=4,
        head_dim=64,
        S_q=1,
        S_k=48,
        block_table=0,
        kv_lengths=0,
        pages=96,
        page_size=page_size,
        dtype="float16",
    ).problem()
    page, head, row = rows.k_strides
    odd = replace(rows, k_strides=(page + row // 2, head, row))
    found, other = representative(odd), representative(rows)
    assert found != other and found.k_strides[0] % found.k_strides[2] != 0
    assert other.k_strides[0] == page_size * other.k_strides[2]
    for problem in (found, other):
        assert representative(replace(problem)) == problem


@given(
    queries=st.integers(1, 5000),
    batch=st.integers(1, 200),
    part=st.floats(0, 1),
    group=st.sampled_from([1, 4]),
)
def test_a_class_of_packed_sequences_knows_how_full_they_are(
    queries: int, batch: int, part: float, group: int
) -> None:
    """As many rows a sequence as the problem has, by four leading bits, and no more than can be."""
    total = max(int(queries * batch * part), 1)
    problem: Any = Attention(
        batch=batch,
        num_heads=8,
        kv_heads=8 // group,
        head_dim=64,
        S_q=queries,
        S_k=2 * queries,
        cu_seqlens_q=0,
        cu_seqlens_k=0,
        total_q=total,
        total_k=2 * queries * batch,
        dtype="float16",
    ).problem()
    found = representative(problem)
    assert representative(replace(found)) == found
    assert found.total_k == found.batch * found.S_k
    most, rows = found.batch * found.S_q, total * found.batch / batch
    if total == queries * batch:
        assert found.total_q == most
    else:
        assert abs(found.total_q - min(rows, most)) <= rows / 16 + 1


def test_classes_of_operations() -> None:
    def one(**more: Any) -> str:
        extents: dict[str, Any] = {
            "batch": 4,
            "num_heads": 8,
            "S_q": 1000,
            "S_k": 1000,
            "head_dim": 64,
        }
        return problem_class(Attention(**{**extents, "dtype": "float16", **more}).problem())

    assert one().endswith("heads=8 kv_heads=8 page=0 batch~4 S_q~1024 S_k~1024")
    assert one() == one(S_q=1100, S_k=1200)
    assert one(window=(127, 0)).endswith("left~128 right~0") and one(window=(127, 0)) != one(
        window=(255, 0)
    )
    different = [
        one(),
        one(batch=8),
        one(S_k=500),
        one(causal=True),
        one(head_dim=128),
        one(dtype="bfloat16"),
        one(num_heads=16),
        one(kv_heads=2),
        one(batch_invariant=True),
    ]
    assert len(set(different)) == len(different)
    plain = BatchedGemmStrided(M=8, N=8, K=8, dtype="float32").problem()
    assert problem_class(plain).endswith(
        "N=8 K=8 group=1 summed=1 beta=False reads=True M~8 matrices~1"
    )
    strided = BatchedGemmStrided(M=8, N=8, K=8, dtype="float32", stride_a_row=16).problem()
    assert strided != plain and problem_class(strided) == problem_class(plain), (
        "strides are no part of it"
    )
    narrow = BatchedGemmStrided(M=8, N=8, K=8, dtype="float32", stride_a_row=9).problem()
    assert problem_class(narrow) != problem_class(plain), "but the alignment that they leave is"


# ---------------------------------------------------------------- the file


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _of_another_key(path: Path) -> None:
    path.write_bytes(entry.pack({"key": "0" * 64}, entry.read(path)[1]))


def _no_choice(path: Path) -> None:
    path.write_bytes(
        entry.pack(entry.read(path)[0], json.dumps({"implementation": "tiles"}).encode())
    )


def _no_json(path: Path) -> None:
    path.write_bytes(entry.pack(entry.read(path)[0], b"tiles"))


def _with(**changes: Any) -> Callable[[Path], None]:
    """The stored choice with other values, its digest right."""

    def change(path: Path) -> None:
        header, payload = entry.read(path)
        path.write_bytes(entry.pack(header, json.dumps(json.loads(payload) | changes).encode()))

    return change


def _timed(seconds: object) -> Callable[[Path], None]:
    return _with(times=[{"implementation": "tiles", "variant": "", "seconds": seconds}])


def _nested(path: Path) -> None:
    path.write_bytes(entry.pack(entry.read(path)[0], b"[" * 100_000))


def _header(text: bytes) -> Callable[[Path], None]:
    """The entry with another text for a header, its digest right."""

    def change(path: Path) -> None:
        body = entry.read(path)[1] + text + struct.pack("<Q", len(text))
        path.write_bytes(body + hashlib.sha256(body).digest() + entry.MAGIC)

    return change


def _writable_by_others(path: Path) -> None:
    path.chmod(0o666)


def _linked(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_cut, "it is cut short or not an entry"),
        (_of_another_key, "it belongs to another key"),
        (_no_choice, "it is no tuned choice"),
        (_no_json, "it is no tuned choice"),
        (_nested, r"it is no tuned choice \(it is nested too deep\)"),
        (_timed(10**400), r".*\(choice.times\[0\].seconds = .*: must be within float64"),
        (_timed(-1), r".*\(choice.times\[0\].seconds = -1.0: must be a time\)"),
        (_timed(math.nan), r".*\(choice.times\[0\].seconds = nan: must be a time\)"),
        (_timed("1"), r".*\(choice.times\[0\].seconds = 1: must be a float\)"),
        (_with(implementation=7), r".*\(choice.implementation = 7: must be a str\)"),
        (_with(times=None), r".*\(choice.times = None: must be a list\)"),
        (_with(speed=1), r".*\(choice = speed: is no field of a Tuned\)"),
        (_header(b"null"), r"its header cannot be read \(header = None: must be a dict\)"),
        (_header(b'{"key": 5}'), r"its header cannot be read \(header.key = 5: must be a str\)"),
        (_header(b"{}"), r"its header cannot be read \('key'\)"),
        (_header(b"[" * 100_000), r"its header cannot be read \(it is nested too deep\)"),
        (_writable_by_others, r"can be written by others \(mode 0666\)"),
        (_linked, "is a symbolic link"),
    ],
)
def test_a_file_that_is_not_believed(
    implementations: Callable[..., Device], damage: Callable[[Path], None], reason: str
) -> None:
    device = implementations(tiles(), quick())
    path = tuned(device).path
    assert path is not None
    damage(path)
    with pytest.warns(CacheWarning, match=f"a tuned choice is not used, .*: {reason}"):
        assert plan(gemm(), device=device).choice.by == "model"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CacheWarning)
        again = tuned(device)
    planning.forget()
    assert again.path == path and plan(gemm(), device=device).choice.by == "tuned", (
        "written anew, it is whole again"
    )


def test_clearing_leaves_what_is_being_written(
    implementations: Callable[..., Device], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tuned(implementations(tiles(), quick())).path
    assert path is not None
    running, killed, written = (path.with_suffix(f".{x}.tmp") for x in "abc")
    for left in (running, killed, written):
        left.write_bytes(b"")
    os.utime(killed, (0, 0))
    folder, foreign = path.with_name(f"{'0' * 64}.tmp"), path.with_name("mine.tmp")
    folder.mkdir()
    foreign.write_bytes(b"")
    for aged in (folder, foreign):
        os.utime(aged, (0, 0))
    is_recent = entry.is_recent

    def asked(temporary: Path) -> bool:
        written.unlink(missing_ok=True)  # its writer has renamed it meanwhile
        return is_recent(temporary)

    monkeypatch.setattr(entry, "is_recent", asked)
    assert store.clear() == 1 and set(path.parent.iterdir()) == {running, folder, foreign}


def test_a_folder_that_others_may_write_to(
    implementations: Callable[..., Device], cache: Path
) -> None:
    device = implementations(tiles(), quick())
    tuned(device)
    (cache / "tuned").chmod(0o777)
    with pytest.warns(
        CacheWarning, match=r"a tuned choice is not used, .*tuned: can be written by others"
    ):
        assert plan(gemm(), device=device).choice.by == "model"
    with warnings.catch_warnings(), pytest.raises(InvalidValue, match="can be written by others"):
        warnings.simplefilter("ignore", CacheWarning)
        tuned(device)


def test_the_file_is_the_users_own_and_says_what_was_measured(
    implementations: Callable[..., Device],
) -> None:
    device = implementations(tiles(), quick())
    path = tuned(device).path
    assert path is not None
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    header, payload = entry.read(path)
    assert header == {
        "key": path.stem,
        "name": problem_class(gemm().problem()),
        "device": "acme:0 (acme1)",
        "backend": "acme",
    }
    assert json.loads(payload)["times"][0] == {
        "implementation": "tiles",
        "variant": "small",
        "seconds": 20 * US,
    }
    actual = store.tuned_choice(gemm().problem(), device)
    assert actual is not None
    assert [actual.seconds_of(n) for n in ("tiles", "library", "other")] == [20 * US, 25 * US, None]


def test_other_drivers_compilers_and_versions_have_choices_of_their_own(
    implementations: Callable[..., Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = implementations(tiles(), quick())
    runtime: Any = plugins().backend("acme").runtime
    key, problem = store.choice_key(gemm().problem(), device), gemm().problem()
    assert store.environment(device) == {"compiler": ""}
    monkeypatch.setattr(runtime, "versions", lambda: {"driver": "2"}, raising=False)
    keys = {
        key,
        store.choice_key(problem, device),
        store.choice_key(problem, replace(device, arch="acme2")),
    }
    monkeypatch.setattr(store, "__version__", "9")
    keys.add(store.choice_key(problem, device))
    assert len(keys) == 4


def test_nothing_is_read_where_nothing_was_tuned(
    implementations: Callable[..., Device], monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    device = implementations(tiles())
    monkeypatch.setattr(store, "choice_key", lambda *_: 1 // 0)
    assert plan(gemm(), device=device).choice.by == "model" and not cache.exists()


def test_an_emulated_device_has_no_tuned_choice(implementations: Callable[..., Device]) -> None:
    """Of the same name and arch as one that was tuned."""
    device = implementations(tiles(), quick())
    tuned(device)
    assert store.tuned_choice(gemm().problem(), device) is not None
    assert store.tuned_choice(gemm().problem(), replace(device, evidence=EMULATED)) is None
