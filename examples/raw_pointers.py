"""The descriptor API over raw pointers: an attention planned once, then launched over whatever
memory it is bound to.

Addresses are of the host here. On a GPU they are what its allocator returned, and everything else
stays as it is.
"""

from __future__ import annotations

try:
    import kernelseam
    import numpy as np
    from kernelseam import Attention, AttentionPointers
except ModuleNotFoundError as e:
    raise SystemExit(f"{e.name} is missing: pip install kernelseam") from None

B, H, H_KV, S, D = 2, 8, 2, 100, 64
rng = np.random.default_rng(0)


def strided() -> None:
    """Heads of one projection's output: q, k and v lie side by side in a row of [B, S, (H +
    2·H_KV)·D]."""
    width = (H + 2 * H_KV) * D
    qkv = rng.standard_normal((B, S, width), np.float32)
    out = np.empty((B, S, H, D), np.float32)
    start = qkv.ctypes.data
    rows = {
        f"stride_{x}_{axis}": n
        for x in "qkv"
        for axis, n in (("batch", S * width), ("row", width), ("head", D))
    }
    descriptor = Attention(
        batch=B,
        num_heads=H,
        kv_heads=H_KV,
        S_q=S,
        S_k=S,
        head_dim=D,
        dtype="float32",
        causal=True,
        q=start,
        k=start + 4 * H * D,
        v=start + 4 * (H + H_KV) * D,
        out=out.ctypes.data,
        **rows,
        stride_out_batch=S * H * D,
        stride_out_row=H * D,
        stride_out_head=D,
    )
    plan = kernelseam.plan(descriptor, device="numpy:0")
    call = plan.bind(check=True)  # raises WrongResult where the formula in float64 differs
    with kernelseam.trace() as launches:
        call()
    print(f"strided: {plan.problem}, {len(launches)} launch, right")

    # the same plan over other memory: nothing is planned or compiled again
    other = np.empty_like(out)
    call.rebind(out=other.ctypes.data)()
    assert np.array_equal(out, other)
    print("rebound: the same bits in other memory")


def matrices(count: int) -> list[np.ndarray]:
    """In any order in memory. Evenly spaced ones would be served as strided memory."""
    arrays = [rng.standard_normal((S, D), np.float32) for _ in range(count)]
    return [arrays[i] for i in rng.permutation(count)]


def listed() -> None:
    """Every head of q, k, v and out in an allocation of its own, as a list of addresses each."""
    q, k, v, out = (matrices(B * n) for n in (H, H_KV, H_KV, H))
    lse = np.empty((B, H, S), np.float32)
    descriptor = AttentionPointers(
        batch=B,
        num_heads=H,
        kv_heads=H_KV,
        S_q=S,
        S_k=S,
        head_dim=D,
        dtype="float32",
        causal=True,
        **{
            f"{n}_ptrs": [x.ctypes.data for x in xs]
            for n, xs in (("q", q), ("k", k), ("v", v), ("out", out))
        },
        lse=lse.ctypes.data,
    )
    plan = kernelseam.plan(descriptor, device="numpy:0")
    # the lists are copied to the device here, and stay alive with the call
    call = plan.bind(check=True)
    with kernelseam.trace() as launches:
        call()
    print(f"listed: {plan.problem}, {len(launches)} launch, right")
    assert np.isfinite(lse).all()


def refused() -> None:
    """What cannot be right is refused before anything is launched."""
    try:
        Attention(
            batch=B,
            num_heads=H,
            kv_heads=3,
            S_q=S,
            S_k=S,
            head_dim=D,
            dtype="float32",
            q=1 << 40,
            k=1 << 41,
            v=1 << 42,
            out=1 << 43,
        )
    except kernelseam.errors.InvalidValue as e:
        print(f"refused: {e}")
    else:
        raise AssertionError("8 heads cannot share 3")


if __name__ == "__main__":
    strided()
    listed()
    refused()
