"""One way to bind: what the host may read is read on any vendor's host device, a descriptor is
validated once, tiles are chosen once, and what is remembered goes with its plugins."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import kernelseam as ks
import numpy as np
import pytest
from idle_step import IdleImplementation
from kernelseam import descriptors, plugins
from kernelseam.contract import (
    HOST,
    ArrayInfo,
    Backend,
    Device,
    LaunchRecord,
    PlanParts,
)
from kernelseam.kernels.attention.forward import AttentionDefinition
from kernelseam.kernels.gemm.gemm import GemmDefinition
from kernelseam.ops import calling, operation
from kernelseam.planning import calls, planner
from kernelseam.tuned.classes import representative
from kernelseam_thirdvendor import AcmeArray, AcmeRuntime, compiled
from public_calls import FUNCTIONS, D, G, H, attention_lists, f32, heads, i32, paged
from refusals import Refused

Discovered = Callable[..., Any]


# ---------------------------------------------------------------- the host is any vendor's


class Nothing(IdleImplementation):
    """An implementation of any operation that counts its launches and computes nothing."""

    record = LaunchRecord("nothing", (1, 1, 1), (1, 1, 1), 0, "acme1")

    def __init__(self, operation: str) -> None:
        super().__init__("nothing", 0.0, None, "acme", operation)
        self.launched = 0

    def build(self, problem: Any, device: Device) -> PlanParts:
        return PlanParts((self,))

    def bind(self, pointers: Mapping[str, int], workspace: int) -> Callable[[int], None]:
        return self.launch

    def launch(self, stream: int) -> None:
        self.launched += 1


class EvidentRuntime(AcmeRuntime):
    """Acme, whose devices say of themselves what a test says."""

    def __init__(self, evidence: str) -> None:
        super().__init__()
        self.evidence = evidence

    def devices(self) -> list[Device]:
        return [replace(d, evidence=self.evidence) for d in super().devices()]

    def describe(self, array: object) -> ArrayInfo | None:
        info = super().describe(array)
        return info and replace(info, device=self.devices()[info.device.index])


OPERATIONS = (
    "attention",
    "attention_bwd",
    "gemm",
    "qkv_projection",
)


@pytest.fixture
def vendor(discovered: Discovered) -> Callable[[str], list[Nothing]]:
    """``vendor(evidence)``: Acme's implementations, on devices of that evidence."""

    def use(evidence: str) -> list[Nothing]:
        loaded, created = discovered(), [Nothing(o) for o in OPERATIONS]
        loaded.registry.add_backend(
            Backend("acme", EvidentRuntime(evidence), implementations=tuple(created), priority=-200)
        )
        return created

    return use


def there(x: Any) -> Any:
    """Arrays of Acme's, with what they stand among."""
    if isinstance(x, np.ndarray):
        return AcmeArray(x)
    return [there(e) for e in x] if isinstance(x, list) else x


def _packed() -> tuple[Any, Any, str]:
    offsets = i32(0, 5, 9)
    descriptor = ks.Attention.from_arrays(
        *map(there, (f32(7, H, D), f32(9, G, D), f32(9, G, D), f32(7, H, D))),
        cu_seqlens_q=there(i32(0, 3, 7)),
        cu_seqlens_k=there(offsets),
        max_seqlen_q=4,
        max_seqlen_k=5,
    )
    return descriptor, (offsets, 2, 11), "cu_seqlens_k[2] = 11: gives entry 1 of the batch 6 rows"


def _pages() -> tuple[Any, Any, str]:
    x = paged()
    descriptor = ks.Attention.from_arrays(
        *(there(x[n].swapaxes(1, 2) if n == "q" else x[n]) for n in ("q", "k_pages", "v_pages")),
        there(x["out"].swapaxes(1, 2)),
        block_table=there(x["block_table"]),
        kv_lengths=there(x["kv_lengths"]),
        max_seqlen_k=7,
    )
    return descriptor, (x["block_table"], (0, 1), 99), "block_table[0, 1] = 99: must be a page"


def _listed_attention() -> tuple[Any, Any, str]:
    x = attention_lists()
    given = {n: there(v) for n, v in x.items()}
    place = x["kv_lengths"]
    return ks.AttentionPointers(**given), (place, 0, 7), "kv_lengths[0] = 7: must be from 0 to"


def _gradients() -> tuple[Any, Any, str]:
    lengths = i32(0, 3, 7)
    q, k, v = f32(7, H, D), f32(9, G, D), f32(9, G, D)
    out, lse = f32(7, H, D), f32(H, 7)
    forward = ks.Attention.from_arrays(
        *map(there, (q, k, v, out, lse)),
        cu_seqlens_q=there(lengths),
        cu_seqlens_k=there(i32(0, 5, 9)),
        max_seqlen_q=4,
        max_seqlen_k=5,
    )
    results = {n: there(f32(*x.shape)).host for n, x in (("dq", q), ("dk", k), ("dv", v))}
    rows = {n: there(x.swapaxes(0, 1)[None]) for n, x in {**results, "dout": out}.items()}
    fields: dict[str, Any] = {}
    for name, x in {**results, "dout": out}.items():
        fields |= {f"stride_{name}_head": x.shape[2], f"stride_{name}_row": x.shape[1] * x.shape[2]}
    descriptor = ks.AttentionBwd(forward=forward, **rows, **fields)
    return descriptor, (lengths, 1, -1), "cu_seqlens_q[1] = -1: must not be below its predecessor"


def _positions() -> tuple[Any, Any, str]:
    positions = np.array([[0, 1, 2], [3, 4, 5]], np.int32)
    table = f32(8, D // 2)
    descriptor = ks.QkvProjection(
        batch=2,
        S=3,
        hidden=5,
        num_heads=H,
        kv_heads=G,
        head_dim=D,
        input=there(f32(2, 3, 5)),
        weight=there(f32((H + 2 * G) * D, 5)),
        q=there(f32(2, H, 3, D)),
        k=there(f32(2, G, 3, D)),
        v=there(f32(2, G, 3, D)),
        cos=there(table),
        sin=there(table),
        max_position=8,
        rotary_dim=D,
        positions=there(positions),
    )
    return descriptor, (positions, (1, 2), 8), "positions[1, 2] = 8: must be a position"


def _listed_product() -> tuple[Any, Any, str]:
    a, b, c = heads(4, 3, 5), heads(4, 5, 2), heads(4, 3, 2)
    entries = np.array([m.ctypes.data for m in c], np.uint64)
    descriptor = ks.BatchedGemmPointers(
        M=3, N=2, K=5, batch=4, A_ptrs=there(a), B_ptrs=there(b), C_ptrs=there(entries)
    )
    descriptor_keeps = (entries, 2, 0)
    return descriptor, descriptor_keeps, "C_ptrs[2] = null: must be the address of a matrix"


CONTENTS = {
    "packed rows": _packed,
    "pages": _pages,
    "attention over lists": _listed_attention,
    "gradients of packed rows": _gradients,
    "positions of a projection": _positions,
    "lists of a product": _listed_product,
}


@pytest.mark.parametrize("name", CONTENTS)
def test_contents_are_checked_on_a_third_vendors_host(
    name: str, vendor: Callable[[str], list[Nothing]]
) -> None:
    launched = vendor(HOST)
    descriptor, (memory, place, value), message = CONTENTS[name]()
    call = ks.plan(descriptor).bind()
    assert call.plan.device.is_host and call.plan.implementation == "nothing"
    call()
    kept = memory[place]
    memory[place] = value
    for refused in (call, call.rebind):
        with pytest.raises(ks.errors.InvalidValue) as caught:
            refused()
        assert str(caught.value).startswith(message)
    assert sum(n.launched for n in launched) == 1
    memory[place] = kept
    call()
    assert sum(n.launched for n in launched) == 2


@pytest.mark.parametrize("name", CONTENTS)
def test_contents_are_left_alone_on_a_device_of_its_own(
    name: str, vendor: Callable[[str], list[Nothing]]
) -> None:
    """Reading them would wait for the device: they are asked for by ``check=True``."""
    launched = vendor("measured")
    descriptor, (memory, place, value), message = CONTENTS[name]()
    call = ks.plan(descriptor).bind()
    memory[place] = value
    call()
    assert not call.plan.device.is_host and sum(n.launched for n in launched) == 1
    with pytest.raises(ks.errors.InvalidValue) as caught:
        call.plan.bind(check=True)
    assert str(caught.value).startswith(message)


def test_functions_on_arrays_check_contents_there_too(
    vendor: Callable[[str], list[Nothing]], refused: Refused
) -> None:
    vendor(HOST)
    offsets = i32(0, 5, 9)
    given = [there(x) for x in (f32(7, H, D), f32(9, G, D), f32(9, G, D), i32(0, 3, 7), offsets)]
    for _ in range(2):
        ks.attention_varlen(*given, 4, 5)
    offsets[1] = -1
    refused(
        "cu_seqlens_k[1] = -1: must not be below its predecessor, 0. Offsets never decrease.",
        lambda: ks.attention_varlen(*given, 4, 5),
    )


# ---------------------------------------------------------------- once


@pytest.fixture
def validated(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of descriptors that were validated, in order."""
    seen: list[str] = []

    def counted(kind: type, validate: Callable[[Any], None]) -> Callable[[Any], None]:
        def validates(self: Any) -> None:
            seen.append(kind.__name__)
            validate(self)

        return validates

    for name in descriptors.__all__:
        kind = getattr(descriptors, name)
        if (validate := vars(kind).get("__post_init__")) is not None:
            monkeypatch.setattr(kind, "__post_init__", counted(kind, validate))
    return seen


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_call_validates_each_descriptor_once(
    name: str, validated: list[str], discovered: Discovered, monkeypatch: pytest.MonkeyPatch
) -> None:
    discovered()
    planned: list[object] = []
    plan = operation.plan
    monkeypatch.setattr(operation, "plan", lambda *x, **o: (planned.append(x), plan(*x, **o))[1])
    called = FUNCTIONS[name]
    called.call(**called.arguments())
    # the gradients of a product are two products, those of an attention are described beside it
    assert len(planned) == (2 if name in ("bmm_bwd", "matmul2d_bwd") else 1)
    assert set(Counter(validated).values()) == {len(planned)}
    validated.clear()
    called.call(**called.arguments())  # of arrays that lie the same way it needs none
    # a list of addresses is each call's own
    assert validated == (["GroupedGemmPointers"] if name == "grouped_mm_list" else [])


def test_operands_are_checked_once(acme: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a call, and of a function on arrays at the memory that it meets first."""
    checks: list[object] = []
    check = calls.check_operands
    monkeypatch.setattr(
        calls, "check_operands", lambda rules, x: (checks.append(x), check(rules, x))[1]
    )
    a, b, c = (AcmeArray(np.ones((2, 2), np.float32)) for _ in range(3))
    call = ks.plan(ks.BatchedGemmStrided(A=a, B=b, C=c, M=2, N=2, K=2)).bind()
    call()
    assert len(checks) == 1
    ks.matmul2d(a, b, out=c)
    assert len(checks) == 2


def test_a_tile_is_chosen_once(
    discovered: Discovered, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    discovered("kernelseam_thirdvendor.compiled")
    chosen: list[Any] = []
    tile = compiled.Rows.tile
    monkeypatch.setattr(
        compiled.Rows, "tile", lambda self, p, *x: (chosen.append(p), tile(self, p, *x))[1]
    )
    a, b, c = (AcmeArray(np.ones((4, 4), np.float32)) for _ in range(3))
    described = ks.BatchedGemmStrided(A=a, B=b, C=c, M=4, N=4, K=4)
    ks.plan(described).bind()()
    # that of the class, and, as the kernel says nothing of classes, whether it is the problem's own
    assert chosen == [representative(described.problem()), described.problem()]
    np.testing.assert_array_equal(c.host, 4)
    ks.plan(replace(described, alpha=2.0))
    assert len(chosen) == 3


@pytest.mark.parametrize("kernel", [AttentionDefinition, GemmDefinition])
def test_shared_kernels_choose_a_tile_once_for_all_who_ask(
    kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The unfused attention asks what the fused one costs."""
    from kernelseam.kernels import shared_implementations
    from kernelseam_cuda.runtime import CudaRuntime
    from kernelseam_cuda.toolchain import CudaToolchain

    chosen: list[Any] = []
    tile = kernel.tile
    monkeypatch.setattr(
        kernel, "tile", lambda self, p, *x: (chosen.append(p), tile(self, p, *x))[1]
    )
    device = Device("cuda", 0, "sm_80")
    problem = ks.Attention(
        batch=1, num_heads=2, S_q=64, S_k=64, head_dim=64, dtype="float16"
    ).problem()
    requested = [
        i
        for i in shared_implementations(CudaToolchain(CudaRuntime()))
        if i.operation == "attention" and i.supports(problem, device) is None
    ]
    assert len(requested) == 3
    for i in requested:
        i.cost(problem, device)
        i.records(problem, device)  # type: ignore[attr-defined]
    assert len(chosen) == len(set(chosen)) == (1 if kernel is AttentionDefinition else 2)


# ---------------------------------------------------------------- what is remembered


def test_what_is_remembered_goes_with_its_plugins(
    discovered: Discovered, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = discovered("kernelseam_thirdvendor")
    a = AcmeArray(np.ones((2, 2), np.float32))
    ks.matmul2d(a, a)
    kept = loaded.cache_of(planner.Plans).entries
    assert len(kept) == 1
    ((_, parts),) = kept.values()
    missing = [weakref.ref(x) for x in (parts, loaded.cache_of(calling.CallCache), loaded)]
    del loaded, kept, parts
    plugins.reset()
    gc.collect()
    assert [ref() for ref in missing] == [None] * 3


def test_plugins_share_no_plans(discovered: Discovered) -> None:
    """Equal problems on equal devices, of plugins that were discovered one after the other."""
    x = AcmeArray(np.ones((2, 2), np.float32))
    first = discovered("kernelseam_thirdvendor")
    planned = ks.plan(ks.BatchedGemmStrided(A=x, B=x, M=2, N=2, K=2))
    second = discovered("kernelseam_thirdvendor")
    assert first.cache_of(planner.Plans) is not second.cache_of(planner.Plans)
    again = ks.plan(ks.BatchedGemmStrided(A=x, B=x, M=2, N=2, K=2))
    assert again.problem == planned.problem and again.parts is not planned.parts
    assert again.choice.implementation is not planned.choice.implementation


def test_forgetting_discovers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "_plugins", None)
    monkeypatch.setattr(plugins, "discover", lambda *_: pytest.fail("plugins were discovered"))
    ks.planning.forget()
