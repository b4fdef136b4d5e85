"""What one H200 measured, in µs: rows of ``benchmarks/results`` and ``docs/strided-or-pointers.md``
that predictions are held to. Of figures that were measured several times the latest stands here."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kernelseam import Attention, AttentionBwd, BatchedGemmPointers, BatchedGemmStrided
from kernelseam.contract import Device, DeviceLimits, Problem
from kernelseam.descriptors.attention.problem import AttentionProblem
from kernelseam_cuda.archs import LAUNCH_SECONDS

GHZ, UNITS = 1.98e9, 132
H200 = Device(
    "cuda",
    0,
    "sm_90a",
    "NVIDIA H200",
    DeviceLimits(
        compute_units=UNITS,
        shared_bytes_per_block=227 << 10,
        memory_bytes=140 << 30,
        bytes_per_second=4.917e12,
        operations_per_second={
            d: n * UNITS * GHZ
            for d, n in (("float16", 4096), ("bfloat16", 4096), ("float32", 256), ("float64", 256))
        },
        launch_seconds=LAUNCH_SECONDS,
    ),
)
"""As the driver describes it: 132 multiprocessors at up to 1.98 GHz, 6144 bits at 3.2 GHz."""


@dataclass(frozen=True)
class Row:
    """A problem with the µs of each implementation that was measured."""

    name: str
    problem: Problem
    us: dict[str, float] = field(hash=False)
    """By implementation."""
    tiles: dict[tuple[int, int], float] = field(default_factory=dict, hash=False)
    """By rows and columns of the shared kernel's tile."""


def product(
    count: int,
    M: int,
    N: int,
    K: int,
    dtype: str,
    us: dict[str, float],
    tiles: dict[tuple[int, int], float] | None = None,
    layout: str = "NT",
    view: str = "strided",
    alignment: int = 128,
) -> Row:
    """``alignment``: of lists' matrices."""
    extents = {
        "M": M,
        "N": N,
        "K": K,
        "batch": count,
        "dtype": dtype,
        "b_transposed": layout == "NT",
    }
    problem = BatchedGemmStrided(**extents).problem()  # type: ignore[arg-type]
    if view == "pointers":
        lists = {f"{n}_ptrs": 0 for n in "ABC"}
        problem = BatchedGemmPointers(**extents, **lists, alignment=alignment).problem()  # type: ignore[arg-type]
    more = f" at {alignment}" * (alignment != 128)
    return Row(f"{count} × {M}×{N}×{K} {dtype} {view}{more}", problem, us, tiles or {})


def both(cublas: float, shared: float) -> dict[str, float]:
    return {"cublas": cublas, "cublaslt": cublas, "shared": shared}


def lists(cublas: float, shared: float) -> dict[str, float]:
    return {"cublas-batched": cublas, "shared": shared}


BIG, NARROW = (128, 128), (128, 64)
GEMM = (
    product(384, 512, 512, 64, "float16", both(76.4, 75.1)),
    product(384, 512, 64, 512, "float16", both(64.3, 65.2), layout="NN"),
    product(384, 512, 512, 64, "float32", both(407, 405)),
    product(8192, 32, 32, 32, "float16", both(31.8, 16.1)),
    product(52, 62, 16, 16, "float16", both(2.4, 2.3), layout="NN"),
    product(384, 512, 512, 64, "float16", lists(76.1, 83.5), view="pointers"),
    product(384, 512, 64, 512, "float16", lists(65.1, 66.6), layout="NN", view="pointers"),
    product(384, 512, 512, 64, "float32", {"cublas-batched": 408}, view="pointers"),
    product(8192, 32, 32, 32, "float16", lists(63.6, 18.6), view="pointers"),
    product(4096, 64, 64, 64, "float16", both(39.5, 33.5)),
    product(256, 2048, 128, 2048, "float16", both(594, 868), layout="NN"),
    product(64, 1024, 1024, 1024, "float32", both(2780, 3188)),
    product(256, 2048, 2048, 128, "float32", both(6508, 7350)),
    product(256, 2048, 128, 2048, "float32", both(5312, 6290), layout="NN"),
    product(1, 16384, 6144, 4096, "bfloat16", both(1021, 2016), {BIG: 2016, NARROW: 3371}),
    product(1, 512, 6144, 4096, "bfloat16", both(45, 105), {BIG: 105, NARROW: 109}),
    product(64, 1024, 1024, 1024, "bfloat16", both(217, 387), {BIG: 387, NARROW: 463}),
    product(256, 2048, 2048, 128, "bfloat16", both(692, 1158), {BIG: 1158, NARROW: 1315}),
    product(65536, 8, 8, 8, "float16", both(212.2, 44.7)),
    product(65536, 16, 16, 16, "float16", both(207.3, 44.0)),
    product(16384, 32, 32, 32, "float16", both(58.3, 33.5)),
    product(384, 512, 512, 64, "float64", both(431, 443), {BIG: 550, NARROW: 443, (64, 64): 439}),
    product(64, 512, 512, 512, "float64", both(327, 396), layout="NN"),
    product(1, 2048, 2048, 2048, "float64", both(299, 392), layout="NN"),
)
# in turns: products by TMA and wgmma, the tile that the model chooses, beside the others
HOPPER = (
    product(384, 512, 512, 64, "float16", {"cublas": 74.0, "sm90": 69.6}),
    product(384, 512, 64, 512, "float16", {"cublas": 64.0, "sm90": 62.8}, layout="NN"),
    product(256, 2048, 2048, 128, "float16", {"cublas": 706.3, "sm90": 654.3}),
    product(256, 2048, 128, 2048, "float16", {"cublas": 644.7, "sm90": 633.4}, layout="NN"),
    product(
        64,
        1024,
        1024,
        1024,
        "float16",
        {"cublas": 238.9, "sm90": 220.0, "shared": 466.9},
        layout="NN",
    ),
    product(1, 8192, 8192, 8192, "bfloat16", {"cublas": 1571.9, "sm90": 1533.1}),
    product(1, 16384, 6144, 4096, "bfloat16", {"cublas": 1208.5, "sm90": 1185.3}),
    product(1, 512, 6144, 4096, "bfloat16", {"cublas": 39.7, "sm90": 39.6}),
    product(
        4096, 64, 64, 64, "float16", {"cublas": 37.2, "sm90": 29.2, "shared": 27.8}, layout="NN"
    ),
    product(8192, 32, 32, 32, "float16", {"cublas": 29.9, "shared": 14.5}, layout="NN"),
    product(384, 1, 512, 64, "float16", {"cublas": 7.9, "sm90": 10.8}),
    # thin ones, whose tiles all read the same few lines of A
    product(
        *(1, 24, 38464, 24, "float16"),
        {"cublas": 3.9, "sm90": 8.4, "shared": 8.5},
        layout="NN",
    ),
    product(
        *(1, 20, 21392, 56, "float16"),
        {"cublas": 3.1, "sm90": 4.6, "shared": 4.8},
        layout="NN",
    ),
)
# lists: matrices that were allocated one by one, and matrices at uneven gaps of 16 bytes
LISTS = tuple(
    product(
        *extents,
        "float16",
        {"sm90": ours, "cublas-batched": cublas},
        layout=layout,
        view="pointers",
        alignment=alignment,
    )
    for extents, layout, alignment, ours, cublas in (
        ((384, 512, 512, 64), "NT", 128, 71.9, 81.9),
        ((384, 512, 64, 512), "NN", 128, 62.6, 65.7),
        ((256, 2048, 2048, 128), "NT", 128, 706.9, 777.0),
        ((256, 2048, 128, 2048), "NN", 128, 609.2, 627.0),
        ((64, 1024, 1024, 1024), "NN", 128, 235.0, 251.0),
        ((384, 512, 512, 64), "NT", 16, 97.4, 113.7),
        ((384, 512, 64, 512), "NN", 16, 72.4, 71.7),
        ((256, 2048, 2048, 128), "NT", 16, 1297.0, 1028.0),
        ((256, 2048, 128, 2048), "NN", 16, 869.3, 686.0),
        ((64, 1024, 1024, 1024), "NN", 16, 252.0, 254.0),
    )
)
# few rows or columns, in turns and in graphs: vectors by matrices, the tile that the model chooses
GEMV = (
    product(384, 1, 512, 64, "float16", {"gemv": 7.4, "cublas": 7.8, "sm90": 11.2}),
    product(384, 1, 64, 512, "float16", {"gemv": 5.7, "cublas": 7.6, "sm90": 13.9}, layout="NN"),
    product(384, 1, 512, 128, "bfloat16", {"gemv": 14.1, "cublas": 15.3, "sm90": 18.5}),
    product(1, 1, 8192, 8192, "bfloat16", {"gemv": 34.5, "cublas": 33.8, "sm90": 90.9}),
    product(1, 1, 4096, 14336, "bfloat16", {"gemv": 30.2, "cublas": 30.8}),
    product(1, 1, 14336, 4096, "bfloat16", {"gemv": 32.0, "cublas": 30.6}),
    product(1, 1, 4096, 4096, "bfloat16", {"gemv": 7.2, "cublas": 10.7}),
    product(1, 1, 6144, 4096, "bfloat16", {"gemv": 16.0, "cublas": 14.6}),
    product(1, 1, 32000, 4096, "bfloat16", {"gemv": 66.0, "cublas": 64.4}),
    product(64, 1, 4096, 128, "bfloat16", {"gemv": 19.7, "cublas": 21.8}),
    product(1, 1, 4096, 4096, "float32", {"gemv": 18.4, "cublas": 21.9}),
    product(1, 1, 8192, 8192, "float32", {"gemv": 61.0, "cublas": 90.3}),
    product(1, 1, 4096, 4096, "float64", {"gemv": 31.9, "cublas": 32.8}),
    product(64, 512, 1, 512, "float16", {"gemv": 6.2, "cublas": 6.3}, layout="NN"),
    product(384, 2, 512, 64, "float16", {"gemv": 9.2, "cublas": 7.8, "sm90": 10.4}),
    product(384, 4, 512, 64, "float16", {"gemv": 12.1, "cublas": 7.8, "sm90": 10.4}),
    product(384, 4, 64, 512, "float16", {"gemv": 10.3, "cublas": 7.7, "sm90": 13.7}, layout="NN"),
    product(1, 4, 6144, 4096, "bfloat16", {"gemv": 16.4, "cublas": 14.4}),
    product(1, 8, 6144, 4096, "bfloat16", {"cublas": 14.2, "sm90": 13.0}),
    product(1, 16, 4096, 14336, "bfloat16", {"cublas": 32.1, "sm90": 25.9}),
    product(1, 32, 4096, 4096, "bfloat16", {"cublas": 9.7, "sm90": 8.27}),
    product(1, 7, 4680, 2992, "bfloat16", {"cublas": 7.6, "sm90": 9.64}),
    product(1, 17, 1984, 6320, "bfloat16", {"cublas": 9.2, "sm90": 9.27}),
    product(1, 2, 3832, 3864, "float16", {"cublas": 9.6, "sm90": 9.1}, layout="NN"),
    product(54, 1, 528, 16, "bfloat16", {"cublas": 5.0, "gemv": 2.2}),
)
LIBRARY = (  # PEERS of which the shared kernel was not measured, or long ago
    product(384, 512, 64, 512, "float32", {"cublas": 306}, layout="NN"),
    product(256, 2048, 2048, 128, "float32", {"cublas": 6471}),
    product(256, 2048, 128, 2048, "float32", {"cublas": 5242}, layout="NN"),
    product(8192, 32, 32, 32, "float32", {"cublas": 48.9}),
    product(4096, 64, 64, 64, "float32", {"cublas": 90.5}),
)


def attention(
    batch: int,
    heads: int,
    S: int,
    dim: int,
    dtype: str,
    causal: bool,
    us: float,
    kv_heads: int | None = None,
    implementation: str = "shared",
) -> Row:
    d = Attention(
        batch=batch,
        num_heads=heads,
        kv_heads=kv_heads or heads,
        S_q=S,
        S_k=S,
        head_dim=dim,
        causal=causal,
        dtype=dtype,
    )
    return Row(
        f"B{batch} H{heads} S{S} D{dim} {dtype}{' causal' * causal} {implementation}",
        d.problem(),
        {implementation: us},
    )


FORWARD = (
    attention(4, 16, 4096, 128, "bfloat16", False, 1738.5),
    attention(4, 16, 4096, 128, "bfloat16", True, 907.1),
    attention(4, 32, 4096, 64, "bfloat16", False, 1677.8),
    attention(4, 32, 4096, 64, "bfloat16", True, 950.2),
    attention(4, 8, 4096, 256, "bfloat16", True, 1197.0),
    attention(4, 32, 4096, 128, "bfloat16", True, 1828.5, 8),
    attention(32, 12, 512, 64, "float16", False, 101.4),
)


def decode(batch: int, S_k: int, shared: float, joined: float) -> Row:
    """32 heads of queries over 8 of keys, 128 wide, in pages of 16."""
    descriptor = Attention(
        batch=batch, num_heads=32, kv_heads=8, S_q=1, S_k=S_k, head_dim=128, dtype="bfloat16"
    ).problem()
    assert isinstance(descriptor, AttentionProblem)
    pages = S_k // 16
    walk = (8 * 16 * 128, 16 * 128, 128)
    problem = replace(
        descriptor,
        spec=replace(descriptor.spec, kv_view="paged", lengths=True),
        k_strides=walk,
        v_strides=walk,
        pages=batch * pages,
        page_size=16,
        table_width=pages,
        table_stride=pages,
    )
    return Row(f"decode B{batch} × {S_k}", problem, {"shared": shared, "decode": joined})


DECODE = (
    decode(64, 8192, 599.4, 500.5),
    decode(16, 2048, 56.3, 41.5),
    decode(1, 32768, 67.5, 44.9),
)


def gradients(heads: int, dim: int, causal: bool, in_order: float, any_order: float) -> list[Row]:
    results = []
    for deterministic, us in ((True, in_order), (False, any_order)):
        forward = Attention(
            batch=4,
            num_heads=heads,
            S_q=4096,
            S_k=4096,
            head_dim=dim,
            causal=causal,
            dtype="bfloat16",
            lse=0,
        )
        d = AttentionBwd(forward=forward, deterministic=deterministic)
        name = (
            f"B4 H{heads} S4096 D{dim}{' causal' * causal}, "
            f"{'in' if deterministic else 'any'} order"
        )
        results.append(Row(name, d.problem(), {"shared": us}))
    return results


BACKWARD = (
    *gradients(16, 128, False, 6724, 5426),
    *gradients(16, 128, True, 3766, 2920),
    *gradients(32, 64, False, 7453, 5751),
    *gradients(32, 64, True, 4145, 3083),
    *gradients(8, 256, False, 7260, 6177),
    *gradients(8, 256, True, 3907, 3481),
)
