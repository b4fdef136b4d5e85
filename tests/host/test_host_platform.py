"""The platform's promises, one small kernel each: barriers, copies in flight, poisoned memory,
complaints."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from compile_matrix import compile_matrix
from kernelseam.contract import LaunchConfig
from kernelseam.descriptors.gemm.problem import GemmSpec
from kernelseam.dtypes import DType
from kernelseam.errors import CompileError, DeviceError
from kernelseam.kernels import KERNELS, build_binary
from kernelseam.plugins import Plugins
from kernelseam_hostcpp import HostArray, HostToolchain
from kernelseam_hostcpp.library import library

Probe = Callable[..., None]


def test_shared_memory_starts_as_nan_in_every_block(probe: Probe) -> None:
    text = """
    KS_KERNEL(32, 1) probe(i64* out) {
      char* memory = shared_memory<64>();
      out[block_index() * 32 + thread_index()] = ((unsigned short*)memory)[thread_index()];
      block_barrier();
      ((unsigned short*)memory)[thread_index()] = 7;
    }"""
    out = np.zeros(5 * 32, np.int64)
    probe(text, 32, out, grid=5, shared=64)
    assert (out == 0xFFFF).all()


GEMMS = [
    c.spec for c in compile_matrix() if isinstance(c.spec, GemmSpec) and c.often and not c.grouped
]
COPY = """
typedef PlainTile<float, 4, 16> Tile;
KS_KERNEL(16, 1) probe(const float* from, float* out) {
  Tile t(shared_memory<Tile::BYTES>()), u(shared_memory<2 * Tile::BYTES>() + Tile::BYTES);
  const StridedView<const float> view{from, 16};
  Copy<Tile, 16, 16, true> copy;
  Copy<Tile, 16, 4, false> ragged;
  t.at(lane() / 4, lane() % 4) = 1;
  warp_barrier();
  copy.fetch(t, view, 0, 4, 0, 16);
  copies_commit();
  ragged.fetch(u, view, 1, 4, 3, 13);
  copies_commit();
  warp_barrier();
  for (int step = 0; step < 3; step++) {
    if (step == 1) { copies_wait<1>(); copy.land(t); }
    if (step == 2) { copies_wait<0>(); ragged.land(u); }
    warp_barrier();
    for (int r = 0; r < 4; r++) {
      out[step * 128 + r * 16 + lane()] = t.at(r, lane());
      out[step * 128 + 64 + r * 16 + lane()] = u.at(r, lane());
    }
    warp_barrier();
  }
}"""


@pytest.mark.parametrize("through_registers", [False, True])
def test_a_copy_is_visible_only_after_its_wait(probe: Probe, through_registers: bool) -> None:
    whole = np.arange(64, dtype=np.float32).reshape(4, 16)
    out = np.zeros((3, 2, 4, 16), np.float32)
    probe(COPY, 16, whole, out, shared=512, through_registers=through_registers)
    ragged = np.zeros((4, 16), np.float32)
    ragged[:3, :10] = whole[1:4, 3:13]
    if through_registers:
        assert (out[0, 0, :, :4] == 1).all(), "what lay there stays until the copy lands"
    else:
        assert np.isnan(out[0, 0]).all(), "what lay there is lost from the start"
    assert np.isnan(out[0, 1]).all()
    assert np.array_equal(out[1, 0], whole)
    assert np.isnan(out[1, 1]).all()
    assert np.array_equal(out[2], [whole, ragged])


def test_exchanges_and_a_question_to_the_block(probe: Probe) -> None:
    text = """
    KS_KERNEL(48, 1) probe(float* single, double* wide, i64* any) {
      single[thread_index()] = shuffle_xor((float)thread_index() / 3, 5);
      wide[thread_index()] = shuffle_xor(thread_index() / 3.0, 8);
      for (int i = 0; i < 4; i++) any[4 * thread_index() + i] = block_any(thread_index() == i * 17 && i != 1);
    }"""  # noqa: E501
    single, wide, any_ = np.zeros(48, np.float32), np.zeros(48), np.zeros((48, 4), np.int64)
    probe(text, 48, single, wide, any_)
    threads = np.arange(48)
    assert np.array_equal(single, ((threads ^ 5).astype(np.float32) / np.float32(3)))
    assert np.array_equal(wide, (threads ^ 8) / 3.0)
    assert np.array_equal(any_, np.tile([1, 0, 1, 0], (48, 1)))


COMPLAINTS = {
    "if (lane() == 3) warp_barrier();": r"block 1, warp [01]: lanes wait at the end and a warp "
    r"barrier",
    "if (lane() == 3) block_barrier(); else warp_barrier();": r"block 1, warp [01]: lanes wait "
    r"at a warp barrier and a block "
    r"barrier",
    "if (warp_index() == 1) block_barrier();": r"block 1, warp [01]: warps wait at (the end and "
    r"a block barrier|a block barrier and the end)",
    "shuffle_xor(1.f, lane() == 2 ? 4 : 1);": r"block 1, warp [01]: lanes exchange over "
    r"different distances",
    "shared_memory<1025>();": r"block 1, warp [01]: the kernel uses more shared memory than the "
    r"launch gives",
    """typedef PlainTile<float, 16, 16> Tile;
       const StridedView<const float> odd{(float*)out + 1, 16};
       Copy<Tile, 32, 16, false>().fetch(Tile(shared_memory<1024>()), odd, 0, 1, 0, 16);
    """: r"block 1, warp [01]: a row that is said to be aligned to 16 bytes is not",
    """typedef PlainTile<float, 16, 16> Tile;
       const StridedView<const float> view{(float*)out, 16};
       Copy<Tile, 32, 4, true>().fetch(Tile(shared_memory<1024>()), view, 0, 1, 0, 15);
    """: r"block 1, warp [01]: a copy that is said to be exact is not",
}


@pytest.mark.parametrize("fault", COMPLAINTS)
def test_what_would_hang_or_corrupt_is_an_error(probe: Probe, fault: str) -> None:
    """In the second block, so that the first one's result is there and the third's is not."""
    text = f"""
    KS_KERNEL(32, 1) probe(i64* out) {{
      out[block_index()] = 1;
      block_barrier();
      if (block_index() == 1) {{ {fault} }}
    }}"""
    out = np.zeros(16, np.int64)
    with pytest.raises(DeviceError, match=f"^{COMPLAINTS[fault]}$"):
        probe(text, 32, out, grid=3, shared=1024)
    assert out.tolist() == [1, 1] + 14 * [0]


def test_other_threads_or_arguments_are_refused(probe: Probe) -> None:
    out = np.zeros(1, np.int64)
    with pytest.raises(DeviceError, match=r"^16 threads a block, the kernel takes 32$"):
        probe("KS_KERNEL(32, 1) probe(i64* out) {}", 16, out)
    binary, _ = build_binary(HostToolchain(), GEMMS[0], "host")
    with pytest.raises(DeviceError, match=r"^8 bytes of arguments, the kernel takes 212$"):
        library(binary.data).prepare(LaunchConfig((1, 1, 1), (64, 1, 1)), bytes(8))(0)


def test_parameters_are_the_compilers(hostcpp: Plugins) -> None:
    """float64's alpha and beta lie at multiples of 8, float32's of 4: read off the binaries, not
    off the signature."""
    toolchain = HostToolchain()
    sizes = {}
    for spec in GEMMS:
        if spec.view == "strided" and not (spec.a_transposed or spec.b_transposed):
            binary, facts = build_binary(toolchain, spec, "host")
            assert facts["gemm"].parameters == KERNELS["gemm"].signature(spec).layout
            if spec.plain:
                sizes[spec.dtype] = facts["gemm"].parameters[-2:]
    assert sizes[DType.float64] == ((208, 8), (216, 8))
    assert sizes[DType.float32] == sizes[DType.float16] == ((204, 4), (208, 4))


def test_a_compile_error_carries_the_log(hostcpp: Plugins) -> None:
    toolchain = HostToolchain()
    row = toolchain.arch_row("host")
    spec = GEMMS[0]
    broken = replace(KERNELS["gemm"].tiles(spec, row)[0], stages=1)
    with pytest.raises(
        CompileError, match=re.escape("a copy that is in flight needs a stage of its own")
    ) as caught:
        build_binary(toolchain, spec, "host", broken)
    assert "gemm/gemm.h" in caught.value.log and caught.value.source is not None


def test_arrays_are_distinguished(hostcpp: Plugins) -> None:
    runtime, reference = hostcpp.backend("hostcpp").runtime, hostcpp.backend("numpy").runtime
    plain = np.zeros((2, 3), np.float32)
    own = HostArray(plain, 1)
    assert runtime.describe(plain) is None and reference.describe(own) is None
    info = runtime.describe(own)
    assert info is not None
    assert (info.pointer, info.shape, info.kind, str(info.device)) == (
        plain.ctypes.data,
        (2, 3),
        "hostcpp",
        "hostcpp:1 (host-registers)",
    )
    assert [str(d) for d in hostcpp.devices()] == [
        "numpy:0 (cpu)",
        "hostcpp:0 (host)",
        "hostcpp:1 (host-registers)",
    ], "never the default"
