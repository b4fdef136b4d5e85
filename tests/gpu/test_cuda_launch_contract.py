"""On an NVIDIA GPU: what the driver says of a kernel, tensor maps as arguments, clusters, early
starts, memory set."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from kernelseam.contract import LaunchConfig, SourceBundle, TensorMap
from kernelseam.dtypes import DType
from kernelseam.errors import DeviceError
from kernelseam.kernels.signature import Signature
from nvidia_gpu import DEVICE, RUNTIME, TOOLCHAIN, cupy

pytestmark = pytest.mark.gpu
ROW = TOOLCHAIN.arch_row(DEVICE.arch)
needs_clusters = pytest.mark.skipif(
    ROW.cluster_blocks == 1, reason=f"{DEVICE.arch} has neither clusters nor tensor maps"
)
OPTIONS = ("-std=c++17", "-default-device")

TILE = r"""
struct alignas(64) Map { unsigned long long words[16]; };

// out[block, row, column] = the map's tile at (0, 8 * block, 1): 8 rows of 32 halves.
extern "C" __global__ void __launch_bounds__(32) k(BEFORE const __grid_constant__ Map map, unsigned short* out) {
  __shared__ alignas(128) unsigned short tile[8 * 32];
  __shared__ alignas(8) unsigned long long full;
  unsigned at = (unsigned)__cvta_generic_to_shared(tile), barrier = (unsigned)__cvta_generic_to_shared(&full);
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier));
    asm volatile("fence.mbarrier_init.release.cluster;");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 512;" ::"r"(barrier));
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4}], [%5];"
                 ::"r"(at), "l"(&map), "r"(0), "r"(8 * (int)blockIdx.x), "r"(1), "r"(barrier) : "memory");
  }
  __syncthreads();
  asm volatile("{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0; "
               "@!done bra again; }" ::"r"(barrier) : "memory");
  for (int i = threadIdx.x; i < 8 * 32; i += 32) out[blockIdx.x * 256 + i] = tile[i];
}
"""  # noqa: E501

CLUSTER = r"""
extern "C" __global__ void k(int* out) {
  unsigned rank, blocks;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
  asm volatile("griddepcontrol.wait;");
  out[blockIdx.x] = int(rank + 10 * blocks);
}
"""


def loaded(text: str) -> Any:
    source = SourceBundle("k", "k.cu", (("k.cu", text),), (), OPTIONS)
    binary = TOOLCHAIN.compile(source, DEVICE.arch)
    return binary, TOOLCHAIN.load(binary, "k", DEVICE)


def test_the_driver_says_what_the_binary_says() -> None:
    text = """struct Pair { long long a; int b; };
    extern "C" __global__ void k(char c, const float* x, Pair p, short s, double* y) {
      __shared__ float kept[64]; kept[threadIdx.x] = x[p.b]; __syncthreads(); y[p.a] = kept[s] + c; }"""  # noqa: E501
    binary, kernel = loaded(text)
    read = TOOLCHAIN.inspect(binary, DEVICE.arch)["k"]
    for name in ("name", "registers", "scratch_bytes", "shared_bytes", "parameters"):
        assert getattr(kernel.facts, name) == getattr(read, name), name


@needs_clusters
@pytest.mark.parametrize("before", ["", "int n, ", "double* more, long long x, int n, "])
def test_a_tensor_map_is_read_where_it_was_packed(before: str) -> None:
    """x [2, 20, 40] with rows of 48 in planes of 30; tiles of plane 1, the last two blocks go
    beyond its 20 rows."""
    kinds = {"": (), "int n, ": ("i32",)}.get(before, ("pointer", "i64", "i32"))
    binary, kernel = loaded(TILE.replace("BEFORE", before))
    assert kernel.facts.parameters == TOOLCHAIN.inspect(binary, DEVICE.arch)["k"].parameters
    memory = np.arange(2 * 30 * 48, dtype=np.uint16)
    x = cupy.asarray(memory)
    out = cupy.full((4, 8, 32), 7, cupy.uint16)
    tensor_map = TensorMap(
        "x", DType.float16, (40, 20, 2), (1, 48, 30 * 48), (32, 8, 1), 0, 128, offset=16
    )
    assert TOOLCHAIN.refuse_tensor_map(tensor_map, DEVICE.arch, 16) is None
    encoded = TOOLCHAIN.encode_tensor_map(tensor_map, x.data.ptr)
    signature = Signature(
        (*((f"x{i}", k) for i, k in enumerate(kinds)), ("map", "tensor_map"), ("out", "pointer"))
    )
    packed = signature.placed(kernel.facts).pack(
        {
            **{f"x{i}": 3 for i in range(len(kinds))},
            "map": encoded,
            "out": out.data.ptr,
        }
    )
    kernel.prepare(LaunchConfig((4, 1, 1), (32, 1, 1)), packed)(cupy.cuda.get_current_stream().ptr)
    plane = memory[8 + 30 * 48 :][: 20 * 48].reshape(20, 48)[:, :32]
    expected = np.zeros((32, 32), np.uint16)
    expected[:20] = plane
    assert np.array_equal(out.get().reshape(32, 32), expected)


@needs_clusters
def test_an_axis_of_extent_1_may_have_any_stride() -> None:
    for stride in (0, 3, 2**50):
        one = TensorMap("x", DType.float16, (64, 16, 1), (1, 64, stride), (64, 8, 1), 128)
        assert TOOLCHAIN.refuse_tensor_map(one, DEVICE.arch, 16) is None
        assert len(TOOLCHAIN.encode_tensor_map(one, cupy.zeros(1024, cupy.float16).data.ptr)) == 128


@needs_clusters
@pytest.mark.parametrize("cooperative", [False, True])
@pytest.mark.parametrize("programmatic", [False, True])
@pytest.mark.parametrize("cluster", [1, 2, 8])
def test_clusters_early_and_cooperative_starts(
    cluster: int, programmatic: bool, cooperative: bool
) -> None:
    _, kernel = loaded(CLUSTER)
    out = cupy.zeros(8, cupy.int32)
    config = LaunchConfig((8, 1, 1), (32, 1, 1), 0, (cluster, 1, 1), programmatic, cooperative)
    launch, stream = (
        kernel.prepare(config, struct.pack("<Q", out.data.ptr)),
        cupy.cuda.Stream(non_blocking=True),
    )
    cupy.cuda.get_current_stream().synchronize()
    for _ in range(3):
        launch(stream.ptr)
    stream.synchronize()
    assert out.get().tolist() == [i % cluster + 10 * cluster for i in range(8)]


@needs_clusters
def test_a_cluster_beyond_the_hardware_is_an_error() -> None:
    _, kernel = loaded(CLUSTER)
    out = cupy.zeros(64, cupy.int32)
    config = LaunchConfig((64, 1, 1), (32, 1, 1), 0, (64, 1, 1))
    with pytest.raises(DeviceError, match=r"^cuLaunchKernelEx failed .*cluster \(64, 1, 1\)"):
        kernel.prepare(config, struct.pack("<Q", out.data.ptr))(0)


def test_memory_is_set_in_the_streams_order_and_in_a_graph() -> None:
    x = cupy.full(8, 7, cupy.int32)
    launch = RUNTIME.prepare_memset(x.data.ptr + 8, 0, 8, DEVICE)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.get_current_stream().synchronize()
    launch(stream.ptr)
    stream.synchronize()
    assert x.get().tolist() == [7, 7, 0, 0, 7, 7, 7, 7]
    with stream:
        stream.begin_capture()
        launch(stream.ptr)
        graph = stream.end_capture()
    x[...] = 5
    cupy.cuda.get_current_stream().synchronize()
    graph.launch(stream)
    stream.synchronize()
    assert x.get().tolist() == [5, 5, 0, 0, 5, 5, 5, 5]
