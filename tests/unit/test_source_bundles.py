"""What goes into a binary's key: a main file and what it includes, from any folder, and nothing
else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from compile_matrix import compile_matrix
from kernelseam.compilation.build import binary_key
from kernelseam.compilation.sources import headers_below, included
from kernelseam.contract import SourceBundle
from kernelseam.descriptors.gemm.problem import GemmSpec
from kernelseam.dtypes import DType
from kernelseam.errors import PluginError
from kernelseam.kernels import KERNELS
from kernelseam.kernels.gemm.gemm import GemmDefinition
from kernelseam.kernels.kernel import bundle
from kernelseam.kernels.sources import shared_sources

SPEC = GemmSpec(DType.float16, DType.float16, DType.float32)


class OneArch(GemmDefinition):
    """A kernel of one arch: its source is in a folder of its own."""

    entry, source = "gemm_sm90", "sm90/gemm.h"

    def __init__(self, sources: Mapping[str, str]) -> None:
        self._sources = sources

    def sources(self) -> Mapping[str, str]:
        return self._sources


def own(text: str = "// first") -> dict[str, str]:
    return {
        "sm90/gemm.h": '#include "sm90/words.h"\n#include "tile/base.h"',
        "sm90/words.h": text,
        "sm90/other.h": "",
    }


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``cuda(files)``: the plugin's toolchain, with more device sources."""
    toolchain = pytest.importorskip(
        "kernelseam_cuda.toolchain", reason="kernelseam-cuda is not installed"
    )
    from kernelseam_cuda.runtime import CudaRuntime

    plain = toolchain.sources()

    def made(files: Mapping[str, str]) -> Any:
        monkeypatch.setattr(toolchain, "sources", lambda: {**plain, **files})
        return toolchain.CudaToolchain(CudaRuntime())

    return made


def key(made: SourceBundle) -> str:
    return binary_key(made, "sm_90a", "cuda", "nvrtc 1")


@pytest.mark.parametrize("operation", sorted(KERNELS))
def test_a_change_below_sm90_leaves_the_key_of_a_shared_binary_as_it_was(
    cuda: Any, operation: str
) -> None:
    kernel = KERNELS[operation]
    covered = next(c for c in compile_matrix() if type(c.kernel) is type(kernel))

    def shared(files: Mapping[str, str]) -> str:
        toolchain = cuda(files)
        return key(
            bundle(
                kernel,
                covered.spec,
                covered.tiles(toolchain.arch_row("sm_90a"))[0],
                toolchain,
                "sm_90a",
            )
        )

    assert shared({}) == shared(own()) == shared(own("// second"))
    platform = cuda({}).platform_files("sm_90a")["platform_nvidia.h"]
    assert shared({"platform_nvidia.h": platform + "// changed\n"}) != shared({})


def test_a_change_below_sm90_changes_the_key_of_what_includes_it(cuda: Any) -> None:
    def one(files: Mapping[str, str]) -> SourceBundle:
        toolchain = cuda(files)
        kernel = OneArch(files)
        return bundle(
            kernel, SPEC, kernel.tiles(SPEC, toolchain.arch_row("sm_90a"))[0], toolchain, "sm_90a"
        )

    first, second, same = (
        one(own()),
        one(own("// second")),
        one({**own(), "sm90/other.h": "// changed"}),
    )
    assert [n for n, _ in first.files] == [
        "generated/gemm_sm90.h",
        "sm90/gemm.h",
        "sm90/words.h",
        "tile/base.h",
    ]
    assert (key(first) == key(same), key(first) == key(second)) == (True, False)
    assert dict(first.files)["tile/base.h"] == shared_sources()["tile/base.h"]


def test_a_missing_include_names_file_and_include(cuda: Any) -> None:
    files = {**own(), "sm90/words.h": '  #  include "sm90/lost.h"\n'}
    toolchain, kernel = cuda(files), OneArch(files)
    tile = kernel.tiles(SPEC, toolchain.arch_row("sm_90a"))[0]
    with pytest.raises(PluginError) as caught:
        bundle(kernel, SPEC, tile, toolchain, "sm_90a")
    assert str(caught.value) == (
        'sm90/words.h includes "sm90/lost.h", which is not among the device sources'
    )
    kernel.source = "sm90/none.h"
    with pytest.raises(
        PluginError,
        match=r'^generated/gemm_sm90.h includes "sm90/none.h", which is not among the device',
    ):
        bundle(kernel, SPEC, tile, toolchain, "sm_90a")


def test_two_sources_of_one_name_are_refused(cuda: Any) -> None:
    files = {**own(), "tile/base.h": "// another"}
    kernel, toolchain = OneArch(files), cuda({})
    with pytest.raises(
        PluginError,
        match=r"^gemm_sm90 brings a device source tile/base.h, and there is another of that name",
    ):
        bundle(
            kernel, SPEC, kernel.tiles(SPEC, toolchain.arch_row("sm_90a"))[0], toolchain, "sm_90a"
        )


def test_constants_in_place_of_names_are_followed() -> None:
    files = {"a.h": '#include KS_MATRIX\n// #include "no.h"\n', "b.h": "", "c.h": ""}
    assert [n for n, _ in included("a.h", files, {"KS_MATRIX": '"b.h"'})] == ["a.h", "b.h"]
    with pytest.raises(PluginError, match='a.h includes "KS_MATRIX"'):
        included("a.h", files, {})


def test_files_that_include_each_other_come_once() -> None:
    files = {"a.h": '#include "b.h"', "b.h": '#include "a.h"\n#include "b.h"'}
    assert [n for n, _ in included("a.h", files, {})] == ["a.h", "b.h"]


def test_headers_of_every_folder_are_found(tmp_path: Path) -> None:
    for name in ("platform.h", "sm90/attention.h", "sm90/parts/ring.h", "sm90/notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert headers_below(tmp_path) == {
        n: n for n in ("platform.h", "sm90/attention.h", "sm90/parts/ring.h")
    }


@pytest.mark.parametrize("package", ["kernelseam_cuda", "kernelseam_rocm"])
def test_plugins_find_the_folders_of_theirs(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib

    module = importlib.import_module(f"{package}.toolchain")
    (tmp_path / "kernels" / "sm90").mkdir(parents=True)
    (tmp_path / "kernels" / "sm90" / "attention.h").write_text("// one")
    monkeypatch.setattr("importlib.resources.files", lambda name: tmp_path)
    module.sources.cache_clear()
    try:
        assert module.sources() == {"sm90/attention.h": "// one"}
    finally:
        module.sources.cache_clear()
