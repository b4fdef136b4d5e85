"""Several kernels of a plan: compiled beside each other, told of one after the other."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakecc import BUNDLE, Toolchain
from kernelseam import compilation
from kernelseam.compilation import CacheWarning, compiled, compiled_together
from kernelseam.compilation.ahead import expect, expect_no_more
from kernelseam.contract import SourceBundle
from kernelseam.errors import CompileError

BUNDLES = [replace(BUNDLE, defines=(("N", str(n)),)) for n in range(3)]


class Beside(Toolchain):
    """Whose compiler may be asked by several threads; ``names`` of those that asked."""

    compiles_beside = True

    def __init__(self, notes: Path, work: Callable[[str], object] = lambda constant: None) -> None:
        super().__init__(notes)
        self.names: list[str] = []
        self.each = work

    def compile(self, bundle: SourceBundle, arch: str) -> bytes:
        self.names.append(threading.current_thread().name)
        self.each(dict(bundle.defines)["N"])
        return super().compile(bundle, arch)


@pytest.fixture(autouse=True)
def four_processors(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)


@pytest.mark.parametrize("count", [2, 3])
def test_compilations_overlap_and_each_is_made_once(tmp_path: Path, count: int) -> None:
    """Each waits until all have begun."""
    all_begun = threading.Barrier(count)
    toolchain = Beside(tmp_path / "notes", lambda _: all_begun.wait(30))
    requested = [*BUNDLES[:count], BUNDLES[0]]
    actual = compiled_together(toolchain, requested, "arch1")
    assert [b.data.partition(b"\n")[0] for b in actual] == [
        f"arch1#define N {n}".encode() for n in (*range(count), 0)
    ]
    assert actual[0] is actual[-1] and toolchain.runs == count
    assert sorted(toolchain.names) == [f"kernelseam: compiling {i}" for i in range(count)]
    assert [compiled(toolchain, b, "arch1") for b in requested] == actual
    compilation.forget()
    assert compiled_together(toolchain, requested, "arch1") == actual  # from the cache
    assert toolchain.runs == count


def test_one_missing_bundle_or_a_serial_compiler_needs_no_thread(
    tmp_path: Path,
) -> None:
    here = threading.current_thread().name
    toolchain = Beside(tmp_path / "notes")
    compiled(toolchain, BUNDLES[0], "arch1")
    compiled_together(toolchain, BUNDLES[:2], "arch1")
    assert toolchain.names == [here] * 2
    toolchain.compiles_beside = False  # type: ignore[misc]
    compiled_together(toolchain, [replace(b, name="other") for b in BUNDLES], "arch1")
    assert toolchain.names == [here] * 5


def test_no_more_threads_than_processors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    inside: list[int] = []
    most = []

    def work(_: str) -> None:
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.02)
        inside.pop()

    compiled_together(Beside(tmp_path / "notes", work), BUNDLES, "arch1")
    assert max(most) <= 2


def test_the_first_error_in_order_is_raised(tmp_path: Path) -> None:
    """Though a later one came first; and what did compile is kept."""
    late = threading.Event()

    def work(n: str) -> None:
        if n == "2":
            late.set()
        elif n == "1":
            assert late.wait(30)
        if n != "0":
            raise CompileError("twice", "arch1", f"log of {n}")

    toolchain = Beside(tmp_path / "notes", work)
    with pytest.raises(CompileError) as caught:
        compiled_together(toolchain, BUNDLES, "arch1")
    assert caught.value.log == "log of 1" and caught.value.source is not None
    toolchain.each = lambda n: pytest.fail("it was compiled")
    compiled(toolchain, BUNDLES[0], "arch1")


def test_warnings_are_given_by_whoever_asks_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = tmp_path / "file"
    block.write_text("no folder")
    monkeypatch.setenv("KERNELSEAM_CACHE_DIR", str(block / "cache"))
    toolchain = Beside(tmp_path / "notes")
    with warnings.catch_warnings(record=True) as output:
        warnings.simplefilter("always")
        actual = compiled_together(toolchain, BUNDLES, "arch1")
    assert [w.category for w in output] == [CacheWarning] * 3
    assert all(str(w.message).startswith("compiling without the binary cache. ") for w in output)
    assert [b.path for b in actual] == [None] * 3 and toolchain.runs == 3
    compilation.forget()
    with (
        warnings.catch_warnings(),
        pytest.raises(CacheWarning, match="^compiling without the binary cache"),
    ):
        warnings.simplefilter("error")
        compiled_together(toolchain, BUNDLES, "arch1")


@pytest.mark.skipif(
    not hasattr(signal, "setitimer"), reason="this system has no interval timers to interrupt with"
)
def test_whoever_waits_can_be_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has begun ends in its thread, and is kept; what has not is left."""
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    go_on, begun = (
        threading.Event(),
        threading.Barrier(2, action=lambda: signal.setitimer(signal.ITIMER_REAL, 0.05)),
    )
    toolchain = Beside(tmp_path / "notes", lambda n: (begun.wait(30), go_on.wait(30)))

    class Interrupted(Exception):
        pass

    def interrupt(*_: Any) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(Interrupted):
            compiled_together(toolchain, BUNDLES, "arch1")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        go_on.set()
    for thread in threading.enumerate():
        if thread.name.startswith("kernelseam: compiling"):
            thread.join(30)
    assert toolchain.runs == 2
    toolchain.each = lambda n: None
    compiled_together(toolchain, BUNDLES, "arch1")
    assert toolchain.runs == 3


def test_where_no_thread_can_start_they_are_compiled_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    toolchain = Beside(tmp_path / "notes")
    assert len(compiled_together(toolchain, BUNDLES, "arch1")) == 3
    assert toolchain.names == [threading.current_thread().name] * 3


def test_a_plan_of_several_kernels_compiles_them_together(tmp_path: Path) -> None:
    """The gradients of an attention by nvrtc: up to three kernels."""
    pytest.importorskip("kernelseam_cuda", reason="kernelseam-cuda is not installed")
    from kernelseam import Attention
    from kernelseam.contract import Device, DeviceLimits
    from kernelseam.descriptors import AttentionBwd
    from kernelseam.kernels import KernelImplementation, shared_implementations
    from kernelseam_cuda.plugin import backend

    real = backend().toolchain
    assert real is not None
    all_begun = threading.Barrier(2)
    callers, names = itertools.count(), set[str]()

    class Recorded:
        compiles_beside = True

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def compiler(self) -> str:
            return "none"

        def compile(self, bundle: SourceBundle, arch: str) -> bytes:
            names.add(bundle.name)
            if next(callers) < 2:
                all_begun.wait(30)
            raise CompileError(bundle.name, arch, f"log of {bundle.name}")

    forward = Attention(
        batch=1,
        num_heads=2,
        S_q=64,
        S_k=64,
        head_dim=64,
        dtype="float16",
        q=0,
        k=0,
        v=0,
        out=0,
        lse=0,
    )
    created = [i for i in shared_implementations(Recorded()) if i.operation == "attention_bwd"]  # type: ignore[arg-type]
    device = Device(
        "cuda", 0, "sm_80", "", DeviceLimits(compute_units=8, shared_bytes_per_block=1 << 17)
    )
    problem = AttentionBwd(forward=forward, dout=0, dq=0, dk=0, dv=0).problem()
    (several,) = [
        i
        for i in created
        if isinstance(i, KernelImplementation) and i.supports(problem, device) is None
    ][:1]
    first = several.launches(problem, device).kernels[0].kernel.entry
    with pytest.raises(CompileError, match=f"log of {first}"):
        several.build(problem, device)
    assert len(names) > 1


def test_what_is_expected_begins_once_in_the_callers_thread(tmp_path: Path) -> None:
    begun: list[threading.Thread] = []

    def later() -> Callable[[], object]:
        begun.append(threading.current_thread())
        return lambda: None

    token = expect(later)
    try:
        compiled_together(Beside(tmp_path / "notes"), BUNDLES, "arch1")
    finally:
        expect_no_more(token)
    assert begun == [threading.current_thread()]
