"""What Hopper's kernels take to compile, and to load from the cache: bounds that a busy machine
does not break.

``python -m benchmarks run compile --device cpu`` prints every kernel's, to be held against the
budget on idle cores.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from kernelseam.errors import CompileError
from kernelseam.plugins import plugins

pytest.importorskip("kernelseam_cuda", reason="nvrtc is missing: kernelseam-cuda is not installed")
TOOLCHAIN = plugins().backend("cuda").toolchain
assert TOOLCHAIN is not None
try:
    TOOLCHAIN.compiler()
except CompileError as e:
    pytest.skip(f"nvrtc is missing: {e.log}", allow_module_level=True)

from benchmarks.comparing import binaries  # noqa: E402

FAST = binaries.kernels("sm_90a", "sm90")
BUSY = 6
"""How much longer than the budget a compilation's CPU time may be where every core is shared."""


@pytest.mark.slow("compilations past every cache, 9 s: bounds that only a slip by much breaks")
@pytest.mark.parametrize("operation", sorted({c.kernel.operation for c, _ in FAST}))
def test_compiling_and_loading_stay_near_their_budgets(
    operation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel with the most options of each operation: its CPU time cold, and the fastest of
    some disk hits."""
    assert TOOLCHAIN is not None
    monkeypatch.setenv("KERNELSEAM_CACHE_DIR", str(tmp_path))
    mine = [(c, tile) for c, tile in FAST if c.kernel.operation == operation]
    covered, tile = max(mine, key=lambda m: len(getattr(m[0].spec, "options", ())))
    binaries.warm_up(TOOLCHAIN, "sm_90a")
    times = binaries.measured(covered, tile, TOOLCHAIN, "sm_90a")
    assert 0.05 < times.cpu < BUSY * binaries.BUDGET[operation], times
    assert 0 < min(times.disk) < 5 * binaries.DISK_HIT, times


def test_every_fast_kernel_has_a_budget() -> None:
    assert FAST and {c.kernel.operation for c, _ in FAST} <= set(binaries.BUDGET)
