"""A kernel that a third vendor's plugin registers, with no line of the core changed: chosen,
compiled, launched."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kernelseam
import numpy as np
import pytest
from compile_matrix import compile_matrix
from kernelseam.cli.main import main
from kernelseam.contract import Backend, LaunchConfig
from kernelseam.descriptors import BatchedGemmStrided
from kernelseam.errors import PluginError, Unsupported
from kernelseam.kernels import build_binary
from kernelseam.plugins import plugins
from kernelseam.registry import Registry

Discovered = Callable[..., Any]


@pytest.fixture
def backend(discovered: Discovered, cache: Path) -> Backend:
    loaded = discovered("kernelseam_thirdvendor.compiled")
    assert loaded.failures == ()
    backend: Backend = loaded.backend("acme")
    return backend


def product(
    backend: Backend, M: int = 6, N: int = 5, K: int = 3, seed: int = 0
) -> tuple[Any, Any, Any, Any]:
    rng = np.random.default_rng(seed)
    device = backend.runtime.devices()[1]
    a, b = (rng.standard_normal(shape, dtype=np.float32) for shape in ((1, 1, M, K), (1, 1, K, N)))
    there = [
        backend.runtime.from_host(x, device)
        for x in (a, b, np.full((1, 1, M, N), np.nan, np.float32))
    ]
    return (*there, a[0, 0] @ b[0, 0])


def described(a: Any, b: Any, c: Any, alpha: float = 1.0) -> BatchedGemmStrided:
    batch, heads, M, K = a.host.shape
    return BatchedGemmStrided(
        A=a, B=b, C=c, M=M, N=b.host.shape[3], K=K, batch=batch, num_heads=heads, alpha=alpha
    )


def test_a_third_vendors_plugin_registers_a_kernel_of_its_own(backend: Backend) -> None:
    a, b, c, expected = product(backend)
    plan = kernelseam.plan(described(a, b, c, alpha=2.0))
    assert (plan.implementation, plan.workspace_bytes, plan.parts.workspace_alignment) == (
        "acme-rows",
        256,
        256,
    )
    call = plan.bind()
    with kernelseam.trace() as launches:
        call()
    assert [(r.kernel, r.kind, r.grid) for r in launches] == [
        ("memset", "memset", (1, 1, 1)),
        ("rows", "kernel", (2, 1, 1)),
    ]
    np.testing.assert_allclose(backend.runtime.to_host(c)[0, 0], 2 * expected, rtol=1e-6)
    again = product(backend, seed=1)
    call.rebind(A=again[0], B=again[1], C=again[2])()  # the counter is zero again
    np.testing.assert_allclose(backend.runtime.to_host(again[2])[0, 0], 2 * again[3], rtol=1e-6)


def test_it_computes_functions_on_arrays_too(backend: Backend) -> None:
    a, b, _, expected = product(backend)
    for _ in range(2):
        with kernelseam.trace() as launches:
            out = kernelseam.bmm(a, b)
        assert [r.kernel for r in launches] == ["memset", "rows"]
        np.testing.assert_allclose(backend.runtime.to_host(out)[0, 0], expected, rtol=1e-6)


def test_a_tensor_map_is_encoded_again_only_where_the_address_changed(backend: Backend) -> None:
    a, b, c, _ = product(backend)
    address = a.host.ctypes.data
    call = kernelseam.plan(described(a, b, c)).bind()
    other = product(backend, seed=2)
    call.rebind(B=other[1])
    call.rebind(C=other[2])
    assert backend.toolchain.encoded == [("A", address)]  # type: ignore[union-attr]
    call.rebind(A=other[0])
    call.rebind(A=other[0], B=other[1])
    assert backend.toolchain.encoded == [("A", address), ("A", other[0].host.ctypes.data)]  # type: ignore[union-attr]


def test_what_it_refuses_has_its_reason(backend: Backend) -> None:
    a, b = (np.zeros((2, 1, 4, 4), np.float32) for _ in range(2))
    device = backend.runtime.devices()[0]
    x, y, z = (backend.runtime.from_host(v, device) for v in (a, b, a))
    with pytest.raises(Unsupported) as caught:
        kernelseam.plan(described(x, y, z))
    assert {r.implementation: r.reason for r in caught.value.refusals} == {
        "shared": "no tile of acme1 takes float32 to float32",
        "gemv": "no tile of acme1 takes float32",
        "acme-rows": "it multiplies one matrix by another, not a batch",
    }


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            {"cluster": (4, 1, 1)},
            "it launches clusters of 4 blocks, acme1 has clusters of at most 2",
        ),
        (
            {"grid": (3, 1, 1), "cluster": (2, 1, 1)},
            "its grid (3, 1, 1) is not divided by its clusters (2, 1, 1)",
        ),
        ({"programmatic": True}, "it is a programmatic dependent launch, acme1 has none"),
    ],
)
def test_a_launch_that_the_arch_has_not_is_refused_where_it_is_planned(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], reason: str
) -> None:
    (kernel,) = backend.kernels
    created = dataclasses.replace(LaunchConfig((2, 1, 1), (1, 1, 1)), **config)
    monkeypatch.setattr(type(kernel), "config", lambda self, *_: created)
    a, b, c, _ = product(backend)
    descriptor = described(a, b, c)
    with pytest.raises(Unsupported) as caught:
        kernelseam.plan(descriptor)
    assert [r.reason for r in caught.value.refusals if r.implementation == "acme-rows"] == [reason]
    assert len(caught.value.refusals) == 3, "the next was asked"
    own = next(i for i in plugins().registry.implementations if i.name == "acme-rows")
    with pytest.raises(Unsupported, match="acme-rows: it"):
        own.build(descriptor.problem(), backend.runtime.devices()[0])


def test_a_tensor_map_that_the_hardware_cannot_take_is_a_refusal(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    (kernel,) = backend.kernels
    plain = type(kernel).tensor_maps
    monkeypatch.setattr(
        type(kernel),
        "tensor_maps",
        lambda self, *a: {
            n: dataclasses.replace(
                m, extents=(*m.extents, 2), strides=(*m.strides, 8), box=(*m.box, 1)
            )
            for n, m in plain(self, *a).items()
        },
    )
    a, b, c, _ = product(backend)
    with pytest.raises(Unsupported, match="acme-rows: Acme's tensor maps have two axes, A more"):
        kernelseam.plan(described(a, b, c))


def test_compile_shows_it(backend: Backend, capsys: pytest.CaptureFixture[str]) -> None:
    """Acme has no tiles for the shared one: it is left out."""
    with pytest.raises(SystemExit):
        main(
            [
                "compile",
                "gemm",
                "--batch",
                "1",
                "--heads",
                "1",
                "--dtype",
                "float32",
                "--arch",
                "acme1",
                "--json",
            ]
        )
    (binary,) = json.loads(capsys.readouterr().out)["binaries"]
    assert (binary["implementation"], binary["kernel"], binary["arch"]) == (
        "acme-rows",
        "rows",
        "acme1",
    )


def test_the_compile_matrix_has_it(backend: Backend) -> None:
    assert backend.toolchain is not None
    own = [c for c in compile_matrix(backend.kernels) if c.kernel.entry == "rows"]
    assert [*compile_matrix(), *own] == [*compile_matrix(backend.kernels)]
    (covered,) = own
    row = backend.toolchain.arch_row("acme1")
    assert [t.rows for t in covered.tiles(row)] == [4, 1]
    assert covered.tiles(dataclasses.replace(row, arch="acme2")) == ()
    for tile in covered.tiles(row):
        binary, facts = build_binary(backend.toolchain, covered.spec, "acme1", tile, covered.kernel)
        assert b"KS_ROWS = %d" % tile.rows in binary.data and set(facts) == {"rows"}


def test_kernels_without_a_toolchain_keep_the_plugin_out(backend: Backend) -> None:
    with pytest.raises(
        PluginError, match="backend 'b' has kernels and no toolchain that compiles them"
    ):
        Registry().add_backend(Backend("b", backend.runtime, kernels=backend.kernels))
