"""The threads that launches on the host share: when they start, who takes what, forks, errors."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import kernelseam
import numpy as np
import pytest
from kernelseam import planning
from kernelseam.plugins import plugins
from kernelseam.reference import products, threads
from kernelseam.reference.attention_block import BLOCK
from kernelseam.reference.attention_tiling import tiling
from kernelseam.reference.threads import share, threads_for

HELPER = "kernelseam-numpy"


def normal(*shape: int, seed: int = 3) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def run(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout


def test_none_starts_before_a_launch_wants_it() -> None:
    out = run(
        f"""
        import threading
        import numpy as np
        import kernelseam
        from dataclasses import replace
        from kernelseam.plugins import plugins

        def helpers():
            return sum(t.name.startswith("{HELPER}") for t in threading.enumerate())

        device = plugins().backend("numpy").runtime.device
        x = np.ones((1, 2, 8, 8), np.float32)
        kernelseam.attention(x, x, x)
        kernelseam.bmm(x, x)
        print(helpers())
        from kernelseam.reference import threads
        threads.share(lambda i, tasks: list(tasks), range(9), 3)
        print(helpers() in (1, 2))
        """
    )
    assert out.split() == ["0", "True"]


def test_each_task_goes_to_one_thread_in_order() -> None:
    taken: list[tuple[int, int]] = []
    together = threading.Barrier(3, timeout=30)

    def work(thread: int, tasks: Iterator[int]) -> None:
        together.wait()
        taken.extend((thread, task) for task in tasks)

    share(work, range(50), 3)
    assert sorted(task for _, task in taken) == list(range(50))
    for thread in range(3):
        own = [task for t, task in taken if t == thread]
        assert own == sorted(own)


@pytest.mark.parametrize("failing", [0, 1])
def test_what_a_thread_raises_reaches_the_caller(failing: int) -> None:
    """No other task starts, and nobody works on when the call is over."""
    failed = threading.Event()
    begun: list[int] = []
    working: list[int] = []

    def work(thread: int, tasks: Iterator[int]) -> None:
        for task in tasks:
            begun.append(task)
            working.append(thread)
            if thread == failing:
                failed.set()
                raise ValueError(f"task {task}")
            assert failed.wait(30)
            time.sleep(0.01)
            working.remove(thread)

    with pytest.raises(ValueError, match="task"):
        share(work, range(1000), 2)
    assert working == [failing] and len(begun) < 100


def test_few_operations_stay_on_the_calling_thread() -> None:
    device = plugins().backend("numpy").runtime.devices()[0]
    device = replace(device, limits=replace(device.limits, compute_units=64))
    assert (threads_for(1e5, device), threads_for(1e9, device)) == (1, threads.MOST)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_starts_its_own() -> None:
    """Also where the parent's threads are at work when it forks."""
    out = run(
        """
        import os, threading, warnings
        import numpy as np
        import kernelseam
        from kernelseam.reference import threads

        warnings.simplefilter("ignore")  # of a fork beside threads
        threads._SERIAL = 0
        x = np.random.default_rng(3).standard_normal((2, 4, 300, 16)).astype(np.float32)
        stop = threading.Event()

        def use():
            while not stop.is_set():
                kernelseam.attention(x, x, x, causal=True)

        expected = kernelseam.attention(x, x, x, causal=True)
        busy = threading.Thread(target=use)
        busy.start()
        for _ in range(5):
            pid = os.fork()
            if not pid:
                same = (kernelseam.attention(x, x, x, causal=True) == expected).all()
                os._exit(0 if same else 1)
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        stop.set()
        busy.join()
        """
    )
    assert out.split() == ["0"] * 5


def test_a_program_that_ends_can_still_launch() -> None:
    """In an exit handler no thread can be started: the launch takes the calling one."""
    out = run(
        """
        import atexit
        import numpy as np
        import kernelseam
        from kernelseam.reference import threads

        threads._SERIAL = 0
        x = np.ones((1, 4, 64, 16), np.float32)
        atexit.register(lambda: print(kernelseam.attention(x, x, x).sum()))
        kernelseam.attention(x, x, x)
        """
    )
    assert out.split() == ["4096.0"]


@pytest.mark.parametrize(
    ("heads", "group", "S_q", "S_k"),
    [(4, 1, 90, 90), (8, 4, 1, 700), (6, 1, 1, 40), (2, 2, 300, 9)],
)
def test_bits_depend_neither_on_threads_nor_on_the_rest_of_the_batch(
    heads: int, group: int, S_q: int, S_k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and gradients; with scores of which some need another reference than 0."""
    batch, d = 5, 24
    q, dout = (normal(batch, heads, S_q, d, seed=n) for n in (1, 2))
    k, v = (normal(batch, heads // group, S_k, d, seed=n) for n in (3, 4))
    q[1], q[2, -1] = 9 * q[1], 1e4 * q[2, -1]

    def results(at: slice) -> list[Any]:
        planning.forget()
        x = [a[at] for a in (q, k, v)]
        out, lse = kernelseam.attention(*x, causal=True, return_lse=True)
        gradients: Any = kernelseam.attention_bwd(dout[at], *x, out, lse, causal=True)
        return [out, lse, *gradients[:3]]

    alone = [results(slice(b, b + 1)) for b in range(batch)]
    serial = results(slice(None))
    for module in ("attention", "attention_bwd"):
        monkeypatch.setattr(
            f"kernelseam.reference.{module}.threads_for", lambda operations, device: 4
        )
    several = results(slice(None))
    planning.forget()
    for i, x in enumerate(serial):
        np.testing.assert_array_equal(x, several[i])
        for b in range(batch):
            np.testing.assert_array_equal(x[b], alone[b][i][0])


def test_a_stack_has_a_bounded_size() -> None:
    """Whatever the batch: a thread's scratch is that of a block of one large head."""
    sizes = []
    for batch, heads, S_q in ((1, 1, 4096), (512, 16, 64), (4096, 16, 1)):
        d = kernelseam.Attention(
            batch=batch, num_heads=heads, S_q=S_q, S_k=max(S_q, 64), head_dim=64, dtype="float32"
        )
        planned = kernelseam.plan(d, backend="numpy")
        sizes.append(planned.workspace_bytes / planned.parts.steps[0].threads)  # type: ignore[attr-defined]
        t = tiling(d.problem(), BLOCK, 0, 1)
        assert t.stack * t.columns * t.keys <= 1 << 18
    assert max(sizes) < 4.25 * 2**20


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("m", "k", "n"),
    [
        (1, 5, 1),
        (300, 64, 130),
        (9, 1000, 65),
        (513, 2, 512),
        (40, 9000, 70),
        (192, 512, 64),
        (9000, 3, 4),
        (9000, 0, 4),
        (0, 3, 4),
    ],
)
def test_products_are_cut_into_small_ones(
    m: int, k: int, n: int, transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of as many rows as BLAS takes at once."""
    whole, sizes, rows = np.matmul, [], []

    def matmul(a: Any, b: Any, out: Any) -> Any:
        sizes.append(a.shape[-2] * a.shape[-1] * b.shape[-1])
        rows.append(a.shape[-2])
        return whole(a, b, out=out)

    a = normal(3, k, m).swapaxes(1, 2) if transposed else normal(3, m, k)
    b, out = normal(3, n, k).swapaxes(1, 2), np.empty((3, n, m), np.float32)
    with monkeypatch.context() as patched:
        patched.setattr(np, "matmul", matmul)
        products.product(a, b, out.swapaxes(1, 2))
    np.testing.assert_allclose(out.swapaxes(1, 2), a @ b, rtol=1e-4, atol=3e-4)
    assert max(sizes) <= products.MOST
    if m * k * n > products.MOST or (n <= 8 and m * k):
        sixes = transposed and n > 8 and 4 < max(rows) < 32
        assert max(rows) % 6 == 0 if sixes else max(rows).bit_count() == 1
    assert n > 8 or not k or max(rows) * n <= 1200


def test_a_product_of_no_matrices() -> None:
    """Of more rows than one product of BLAS's has."""
    products.product(normal(0, 9000, 3), normal(0, 3, 4), np.empty((0, 9000, 4), np.float32))


@pytest.mark.parametrize(("matrices", "rows"), [(2, 128), (64, 300)])
def test_few_matrices_are_cut_into_rows(matrices: int, rows: int) -> None:
    """So that threads share them; of many each is read once."""
    d = kernelseam.BatchedGemmStrided(
        batch=matrices, num_heads=1, M=300, N=64, K=64, dtype="float32"
    )
    step: Any = kernelseam.plan(d, backend="numpy").parts.steps[0]
    assert step.blocks.steps[3] == rows


@pytest.mark.parametrize("kind", ["float32", "float16"])
@pytest.mark.parametrize(("m", "k", "n"), [(40, 50, 60), (300, 100, 70), (20, 1030, 20)])
def test_bits_of_products_do_not_depend_on_threads(
    kind: str, m: int, k: int, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Matrices are shared, and blocks of their rows; those with many summands are left to BLAS."""
    a, b, bias = normal(7, 3, m, k), normal(7, 3, k, n), normal(7, 3, n)
    a, b = a.astype(kind), b.astype(kind)

    def result(threads: int) -> list[Any]:
        planning.forget()
        monkeypatch.setattr(
            "kernelseam.reference.gemm.threads_for", lambda operations, device: threads
        )
        c = np.empty((7, 3, m, n), kind)
        problem = kernelseam.BatchedGemmStrided(A=a, B=b, C=c, M=m, N=n, K=k, batch=7, num_heads=3)
        step: Any = kernelseam.plan(problem, backend="numpy").parts.steps[0]
        assert step.threads == (threads if k <= 1024 else 1)
        return [kernelseam.bmm(a, b), kernelseam.bmm(a, b, bias=bias.astype(kind), alpha=0.5)]

    for x, y in zip(result(1), result(4), strict=True):
        np.testing.assert_array_equal(x, y)
    planning.forget()
