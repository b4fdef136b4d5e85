"""The core names no vendor, and importing it loads none, makes no folder and is quick."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kernelseam
import pytest

CORE = Path(kernelseam.__file__).parent
VENDORS = ("nvidia", "amd", "rocm", "hip", "hiprtc", "nvrtc", "cuda", "cupy")
PROTOCOLS = ("__cuda_array_interface__", "__cuda_stream__")
WORD = re.compile(
    f"(?i:{'|'.join(v for v in VENDORS if v != 'hip')})|(?<![a-z])hip|Hip|(?<![A-Z])HIP"
)
"""Anywhere, inside other words too; but "hip" stands in ship and relationship, so that it counts
only at a start."""


def words(text: str) -> list[str]:
    for protocol in PROTOCOLS:
        text = text.replace(protocol, "")
    return [m.group().lower() for m in WORD.finditer(text)]


def test_the_pattern_finds_what_it_should() -> None:
    text = (
        "NVIDIA's, an AMD card; rocm_path, hip.h hipBLAS libhiprtc.so HIPRTC _hip nvrtc "
        "cudaMalloc CuPy useCuda"
    )
    assert words(text) == [
        "nvidia",
        "amd",
        "rocm",
        "hip",
        "hip",
        "hiprtc",
        "hiprtc",
        "hip",
        "nvrtc",
        "cuda",
        "cupy",
        "cuda",
    ]
    assert (
        words(
            "ships a chip; ownership and relationship; lambda; __cuda_array_interface__, "
            "__cuda_stream__"
        )
        == []
    )


def test_the_core_names_no_vendor() -> None:
    sources = sorted(CORE.rglob("*.py"))
    assert len(sources) > 20
    found = [
        f"{path.relative_to(CORE)}:{number}: {line.strip()}"
        for path in sources
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if words(line)
    ]
    assert found == []
    assert [p.name for p in sources if words(p.stem)] == []


SCRIPT = """
import json, os, sys, time
from pathlib import Path
import numpy
home = Path(os.environ["HOME"])
start = time.process_time()
import kernelseam
kernelseam.attention
seconds = time.process_time() - start
of_attention = sorted(m for m in sys.modules if m.startswith("kernelseam.descriptors."))
public = [getattr(kernelseam, name) for name in kernelseam.__all__]  # most are imported at their first use
print(json.dumps({
    "seconds": seconds, "of_attention": of_attention, "modules": sorted({m.partition(".")[0] for m in sys.modules}), "public": len(public),
    "made": sorted(str(p) for p in home.rglob("*")),
}))
"""  # noqa: E501


@pytest.fixture
def fresh(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    reported: Callable[..., dict[str, Any]],
) -> Callable[[], dict[str, Any]]:
    """What a new Python reports of its import, in an empty home."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("KERNELSEAM_CACHE", "XDG_"))}
    environment = {
        **kept,
        "HOME": str(tmp_path),
        "PYTHONPATH": str(CORE.parent),
        "PYTHONDONTWRITEBYTECODE": "",  # an installed package has bytecode, too
        "PYTHONPYCACHEPREFIX": str(tmp_path_factory.getbasetemp() / "bytecode"),
    }
    return lambda: reported(SCRIPT, tmp_path, environment)


def test_importing_loads_no_vendor_and_makes_nothing(fresh: Callable[[], dict[str, Any]]) -> None:
    result = fresh()
    assert {"cupy", "cuda", "hip", "rocm", "torch", "jax"} & set(result["modules"]) == set()
    # no plugin either
    assert {m for m in result["modules"] if m.startswith("kernelseam")} == {"kernelseam"}
    assert result["public"] == len(kernelseam.__all__)
    assert result["made"] == []


def test_importing_is_quick(fresh: Callable[[], dict[str, Any]]) -> None:
    """Attention's under 0.2 s of CPU time beyond NumPy's; in one of a few, for the machine may
    be busy."""
    assert any(fresh()["seconds"] < 0.2 for _ in range(5))


def test_an_operation_imports_no_other_ones_descriptors(
    fresh: Callable[[], dict[str, Any]],
) -> None:
    imported = fresh()["of_attention"]
    assert "kernelseam.descriptors.attention.forward" in imported
    others = ("gemm.strided", "gemm.grouped", "projection.qkv", "cache.cache")
    assert {f"kernelseam.descriptors.{m}" for m in others}.isdisjoint(imported)
