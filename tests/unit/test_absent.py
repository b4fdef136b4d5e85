"""Devices that are not here, found by their arch or by words of their names."""

from __future__ import annotations

import pytest

pytest.importorskip("kernelseam_cuda")
pytest.importorskip("kernelseam_rocm")

from kernelseam import absent
from kernelseam.descriptors import Attention
from kernelseam.dispatch import consider
from kernelseam.errors import UnknownName


@pytest.mark.parametrize(
    ("name", "arch", "product"),
    [
        ("sm_90a", "sm_90a", "NVIDIA H200"),
        ("sm_90", "sm_90a", "NVIDIA H200"),
        ("SM_100", "sm_100a", "NVIDIA B200"),
        ("H100", "sm_90a", "NVIDIA H100 SXM"),
        ("h100 pcie", "sm_90a", "NVIDIA H100 PCIe"),
        ("RTX 4090", "sm_89", "NVIDIA GeForce RTX 4090"),
        ("mi300x", "gfx942", "AMD Instinct MI300X"),
        ("MI250X", "gfx90a", "AMD Instinct MI250X, one of its two dies"),
        ("gfx1201", "gfx1201", "AMD Radeon RX 9070 XT"),
    ],
)
def test_names_of_devices(name: str, arch: str, product: str) -> None:
    device = absent.product(name)
    assert (device.arch, device.name) == (arch, product)
    assert absent.arch_of(name) == arch


def test_products_of_an_arch_differ() -> None:
    h200, h100 = absent.product("H200").limits, absent.product("H100").limits
    assert (h200.bytes_per_second, h100.bytes_per_second) == (4.8e12, 3.35e12)
    assert h200.operations_per_second == h100.operations_per_second


@pytest.mark.parametrize("name", ["H300", "sm_9", "", "90", "''"])
def test_an_unknown_name_is_refused(name: str) -> None:
    with pytest.raises(UnknownName, match=r"must be one of .*sm_90a.*or a product such as ") as e:
        absent.arch_of(name)
    assert "NVIDIA" in e.value.rule and "AMD" in e.value.rule


def test_plugins_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """What no plugin compiles names the commands that install one."""

    def version(distribution: str) -> str:
        raise absent.metadata.PackageNotFoundError(distribution)

    monkeypatch.setattr(absent.metadata, "version", version)
    monkeypatch.setattr(absent, "_archs", lambda result: [])
    with pytest.raises(UnknownName) as refused:
        absent.arch_of("gfx942")
    assert str(refused.value) == (
        "arch = gfx942: no installed plugin compiles. In a checkout: `pip install "
        "'./plugins/cuda[cu13]'` or `pip install ./plugins/rocm`; no GPU is needed. `kernelseam "
        "doctor` shows plugins that are kept out."
    )


def test_of_no_heads_all_implementations_are_asked() -> None:
    extents = {"batch": 1, "num_heads": 0, "S_q": 70, "S_k": 80, "head_dim": 64}
    operands = dict.fromkeys(("q", "k", "v", "out"), 1 << 48)
    none = Attention(**extents, **operands, dtype="float16")  # type: ignore[arg-type]
    candidates = consider(none.problem(), absent.product("H100"))
    assert {"shared", "sm90", "gemm-softmax-gemm"} <= {c.implementation.name for c in candidates}
    assert [c.error for c in candidates if c.error] == []
