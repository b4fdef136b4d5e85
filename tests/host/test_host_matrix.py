"""The parity matrix on the host platform: shared kernels, compiled by the system's compiler,
against the oracle.

By default the specs of many cases, and few more that have every value which a field of a spec takes
in some case, dtypes among them. Of each the first case, and those with a field value of a kind that
no earlier one had, run: of every ninth spec on the arch whose copies go through registers, else on
the one whose copies write shared memory by themselves. The rest of the matrix is slow.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import kernelseam
import ml_dtypes
import numpy as np
import pytest
from compile_matrix.choice import fewest, flat
from kernelseam.contract import Device
from kernelseam.descriptors.cache import contents
from kernelseam.dtypes import DType
from kernelseam.kernels import COMPOSITIONS
from kernelseam.kernels.cache.cache import CACHE, PagedCacheDefinition
from kernelseam.kernels.kernel import build
from kernelseam.parity.cases.cache import cache_cases
from kernelseam.parity.matrix import matrix
from kernelseam.parity.running.run import Target, run_case
from kernelseam.plugins import Plugins
from kernelseam.samples.case import Case
from kernelseam_hostcpp import HostArray, HostToolchain
from kernelseam_hostcpp.executable import problem_of
from kernelseam_hostcpp.runtime import DEVICES

TIMELY = 2000
"""Blocks a launch."""
MANY = 20
"""Cases of a spec."""


def _parameters() -> Iterator[object]:
    cases = matrix()
    problems = [problem_of(case, DEVICES[0]) for case in cases]
    specs = [p.spec for p in problems]
    count, numbers = Counter(specs), {s: i for i, s in enumerate(dict.fromkeys(specs))}
    chosen = {*fewest(specs), *(s for s in specs if count[s] >= MANY)}
    own = {p.spec: _own_device(p, numbers[p.spec]) for p in problems if p.spec in chosen}
    values = set[object]()
    for device in DEVICES:
        seen = set[object]()
        for case, spec in zip(cases, specs, strict=True):
            slow = (
                own.get(spec) is not device
                or getattr(case, "batch", 1) * getattr(case, "num_heads", 1) > TIMELY
                or case.name.endswith("-large")
            )
            if not slow:
                mine = set(_values(case))
                slow = spec in seen and mine <= values
                values |= mine
            seen.add(spec)
            # each has a text of its own: a compilation a case
            slow |= _is_written(spec) and numbers[spec] % 2 > 0
            marks = [pytest.mark.slow("a compilation each, or no new value")] if slow else []
            yield pytest.param(case, device, id=f"{case.name}-on-{device.arch}", marks=marks)


def _values(case: Case) -> Iterator[tuple[object, ...]]:
    """What a case has, of its kind. Extents but those of a product's or scores' tiles count as 0,
    1, a multiple of 16 or another; steps of scores as how many there are, infinite ones or not, and
    orders of axes as none or some. The matrix on NumPy has each by itself, as have slow cases
    here."""
    for name, value in flat(case):
        if name == "steps":
            yield type(case), name, len(value), any(np.isinf(by) for _, by in value)
        elif name in ("operand_layouts", "order", "sizes"):
            yield type(case), name, bool(value)
        elif type(value) is int and name not in ("M", "N", "K", "S_q", "S_k"):
            yield type(case), name, min(value, 2), value % 16 == 0  # 1 is True, 0 is False
        elif name not in ("name", "group"):
            yield type(case), name, value


def _own_device(problem: Any, number: int) -> Device:
    """Where cases of its spec run by default."""
    composition, toolchain = COMPOSITIONS[problem.operation], HostToolchain()
    taken = [d for d in DEVICES if composition.refuse(problem, toolchain.arch_row(d.arch)) is None]
    return (taken or DEVICES)[-1 if number % 9 == 0 else 0]


def _is_written(spec: object) -> bool:
    """Whether it has a score or a mask of a user's."""
    return getattr(getattr(spec, "forward", spec), "expression", None) is not None


def _of_8_bits(case: Case) -> set[DType]:
    """Dtypes of 8 bits of factors, or of keys and values."""
    kinds = (getattr(case, "dtype", None), getattr(case, "dtype_kv", None))
    return {d for d in kinds if d is not None and d.is_fp8}


def _compile(case: Case, device: Device) -> None:
    toolchain, problem = HostToolchain(), problem_of(case, device)
    composition, row = COMPOSITIONS[problem.operation], toolchain.arch_row(device.arch)
    if composition.refuse(problem, row) is None:
        for launch in composition.launches(
            problem, composition.tile(problem, row, device), device
        ).steps:
            build(launch.kernel, launch.problem.spec, launch.tile, toolchain, device.arch)


@pytest.fixture(scope="module")
def compiled(
    ahead: Callable[..., Callable[[pytest.Item], object]],
) -> Callable[[pytest.Item], object]:
    return ahead("test_parity", _compile, 40)


@pytest.mark.parametrize(("case", "device"), list(_parameters()))
def test_parity(
    request: pytest.FixtureRequest,
    hostcpp: Plugins,
    compiled: Callable[[pytest.Item], object],
    case: Case,
    device: Device,
) -> None:
    compiled(request.node)
    outcome = run_case(case, Target(device, "shared", case.operation, builtin=True))
    outcome.require()
    if outcome.refusal is not None:
        assert "shared" in case.may_refuse
        if eights := _of_8_bits(case):  # none is lost of the dtype that the arch converts
            known = HostToolchain().arch_row(device.arch).fp8_dtypes
            others = getattr(case, "prefix_groups", None), getattr(case, "row_scale_block", None)
            assert not eights <= set(known) or others != (None, None)
        pytest.skip(f"shared kernels refuse it, as they may: {outcome.refusal}")
    assert outcome.verdict is not None and outcome.verdict.worst <= 1


@pytest.mark.parametrize("passes", [2, 3, 5])
@pytest.mark.parametrize(
    "name",
    [
        "f16-rotary",
        "f16-norm-in-place",
        "f16-halves-20",
        "f16-packed-given",
        "bf16-e4m3-everything",
        "bf16-e4m3-zeros",
    ],
)
def test_heads_of_a_token_one_after_another(
    hostcpp: Plugins, monkeypatch: pytest.MonkeyPatch, name: str, passes: int
) -> None:
    """Appended rows that are computed, as of many tokens; with more passes than heads, too."""
    (case,) = (c for c in cache_cases() if c.name == f"paged-cache-append-{name}")
    (tile,) = CACHE.tiles(problem_of(case, DEVICES[0]).spec, HostToolchain().arch_row("host"))
    monkeypatch.setattr(PagedCacheDefinition, "tile", lambda *_: replace(tile, passes=passes))
    hostcpp.forget()
    outcome = run_case(case, Target(DEVICES[0], "shared", case.operation, builtin=True))
    outcome.require()
    assert outcome.verdict is not None and outcome.verdict.worst <= 1


def test_a_scale_of_0_divides_as_the_least_does(
    hostcpp: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where scales are not read ahead: rows of 0 stay 0, others saturate."""
    k = np.arange(-8, 8, dtype="f4").reshape(1, 2, 1, 8)
    pages, scales = np.zeros((1, 2, 1, 8), ml_dtypes.float8_e4m3fn), np.zeros(1, "f4")
    slots, k_pages = np.arange(2, dtype="i4")[None], HostArray(pages)
    monkeypatch.setattr(contents, "read_numbers", lambda *operands: {})
    kernelseam.append_paged(
        HostArray(k), None, k_pages, None, slot_mapping=HostArray(slots), k_scales=HostArray(scales)
    )
    np.testing.assert_array_equal(k_pages.host[0].astype("f4"), np.sign(k[0]) * 448)


SCRIPT = """
import json
import numpy as np
import kernelseam
from kernelseam.plugins import plugins
from kernelseam_hostcpp import HostArray
a, b = np.arange(600, dtype="f2").reshape(2, 15, 20) % 7, np.ones((2, 20, 9), "f2")
found = plugins()
with kernelseam.trace() as launches:
    c = kernelseam.bmm(HostArray(a), HostArray(b, 0))
out = kernelseam.attention(HostArray(a[None]), HostArray(a[None]), HostArray(a[None]), layout="bhsd")
print(json.dumps({
    "loaded": sorted(found.loaded), "failures": [f.message for f in found.failures], "kind": type(c).__name__,
    "same": np.array_equal(c.host, a @ b), "shape": out.host.shape,
    "launches": [(r.kernel, r.arch) for r in launches], "default": str(kernelseam.devices()[0]),
}))
"""  # noqa: E501


def test_installed(
    tmp_path: Path,
    install: Callable[[Path, Path], None],
    reported: Callable[..., dict[str, Any]],
) -> None:
    """As a distribution of its own, found by its entry point, its headers with it."""
    install(Path(__file__).parents[1] / "plugins" / "hostcpp", tmp_path)
    core = Path(kernelseam.__file__).parents[1]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(core)]),
        "KERNELSEAM_PLUGINS": "hostcpp",
    }
    assert reported(SCRIPT, tmp_path, environment) == {
        "loaded": ["hostcpp", "reference"],
        "failures": [],
        "kind": "HostArray",
        "same": True,
        "shape": [1, 2, 15, 20],
        "launches": [["gemm", "host"]],
        "default": "numpy:0 (cpu)",
    }
