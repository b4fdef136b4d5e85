"""What the functions on arrays share: kinds of results, backends, devices, streams, remembered
plans, imports."""

from __future__ import annotations

import gc
import importlib
import subprocess
import sys
import weakref
from types import SimpleNamespace
from typing import Any

import kernelseam
import ml_dtypes
import numpy as np
import pytest
from kernelseam import planning
from kernelseam.errors import InvalidValue
from kernelseam.ops import array_call, calling, operation
from kernelseam.plugins import plugins
from refusals import Refused

Array = np.ndarray[Any, Any]
A, B = np.arange(6, dtype=np.float32).reshape(2, 3), np.ones((3, 4), np.float32)


class Stranger:
    """An array of a library that is known by its protocols alone."""

    def __init__(self, host: Array, device: int = 1) -> None:
        self.host, self.device = host, device

    def __dlpack_device__(self) -> tuple[int, int]:
        return (self.device, 0)

    def __dlpack__(self, **options: Any) -> Any:
        return self.host.__dlpack__(**options)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return self.host

    def __array_namespace__(self) -> Any:
        return SimpleNamespace(from_dlpack=lambda x: Stranger(np.from_dlpack(x)), asarray=Stranger)


def test_a_strangers_result_is_handed_back_in_its_kind() -> None:
    y = kernelseam.matmul2d(Stranger(A), Stranger(B))
    assert type(y) is Stranger
    np.testing.assert_array_equal(y.host, A @ B)
    q = Stranger(np.ones((1, 1, 3, 4), ml_dtypes.bfloat16))
    y, lse = kernelseam.attention(q, q, q, return_lse=True)
    assert (
        type(y) is type(lse) is Stranger
        and y.host.dtype == ml_dtypes.bfloat16
        and lse.host.dtype == np.float32
    )
    np.testing.assert_array_equal(y.host, q.host)


def test_a_stranger_without_a_namespace_gets_a_numpy_array() -> None:
    class Plain:
        def __init__(self, host: Array) -> None:
            self.host = host

        def __dlpack_device__(self) -> tuple[int, int]:
            return (1, 0)

        def __dlpack__(self, **options: Any) -> Any:
            return self.host.__dlpack__(**options)

    y = kernelseam.matmul2d(Plain(A), Plain(B))
    assert type(y) is np.ndarray
    np.testing.assert_array_equal(y, A @ B)


def test_a_strangers_memory_can_take_the_result() -> None:
    out, refusal = (
        Stranger(np.zeros((2, 4), np.float32)),
        r"^out = a read-only array: is written to\. Give a writable",
    )
    if np.from_dlpack(out).flags.writeable:
        assert kernelseam.matmul2d(A, B, out=out) is out
        np.testing.assert_array_equal(out.host, A @ B)
    else:  # to NumPy before 2.2.1 whatever it is lent is read-only
        with pytest.raises(InvalidValue, match=refusal):
            kernelseam.matmul2d(A, B, out=out)
    with pytest.raises(InvalidValue, match=refusal):
        half = ml_dtypes.bfloat16  # seen through __array__, which may be a copy
        kernelseam.matmul2d(A.astype(half), B.astype(half), out=Stranger(np.zeros((2, 4), half)))


def test_a_stranger_on_a_device_that_no_plugin_knows() -> None:
    with pytest.raises(
        InvalidValue, match=r"^b = .*Stranger.*: must be an array of a library and on a device"
    ):
        kernelseam.matmul2d(A, Stranger(B, device=14))


def test_devices_and_kinds_of_another_vendor(acme: Any, refused: Refused) -> None:
    from kernelseam_thirdvendor import AcmeArray

    y = kernelseam.matmul2d(AcmeArray(A, 1), AcmeArray(B, 1))
    assert type(y) is AcmeArray and y.index == 1
    np.testing.assert_array_equal(y.host, A @ B)
    refused(
        "b = numpy:0 (cpu): must be on the same device as a, which is on acme:0 (acme1). Move b "
        "or a.",
        lambda: kernelseam.matmul2d(AcmeArray(A), B),
    )
    refused(
        "out = acme:1 (acme1): must be on the same device as a, which is on numpy:0 (cpu). Move "
        "out or a.",
        lambda: kernelseam.matmul2d(A, B, out=AcmeArray(np.zeros((2, 4), np.float32), 1)),
    )
    with pytest.raises(kernelseam.errors.Unsupported, match="acme-gemm: Acme has no float64"):
        kernelseam.matmul2d(AcmeArray(A.astype(float)), AcmeArray(B.astype(float)))


def test_the_requested_backend_must_be_the_arrays(
    acme: Any, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = (
        "backend = acme: the arrays are on numpy:0 (cpu). Move them to a device of acme, or let "
        "the arrays choose: name no backend (backend=, use_backend and KERNELSEAM_BACKEND name "
        "one)."
    )
    refused(message, lambda: kernelseam.matmul2d(A, B, backend="acme"))
    with kernelseam.use_backend("acme"):
        refused(message, lambda: kernelseam.matmul2d(A, B))
        # the argument is over it
        np.testing.assert_array_equal(kernelseam.matmul2d(A, B, backend="numpy"), A @ B)
    monkeypatch.setenv("KERNELSEAM_BACKEND", "acme")
    refused(message, lambda: kernelseam.matmul2d(A, B))
    with kernelseam.use_backend("numpy"):
        np.testing.assert_array_equal(kernelseam.matmul2d(A, B), A @ B)
    refused(
        "backend = hsa: must be one of acme, numpy. Name one of these, or see `kernelseam doctor` "
        "for a plugin that was kept out.",
        lambda: kernelseam.matmul2d(A, B, backend="hsa"),
    )


def test_an_implementation_by_name(refused: Refused) -> None:
    np.testing.assert_array_equal(kernelseam.matmul2d(A, B, implementation="numpy"), A @ B)
    refused(
        "implementation = fast: must be one of numpy for gemm on numpy. Name one of these, or "
        "leave it out.",
        lambda: kernelseam.matmul2d(A, B, implementation="fast"),
    )


def test_streams(acme: Any, refused: Refused) -> None:
    from kernelseam_thirdvendor import AcmeArray

    x, y = AcmeArray(A), AcmeArray(B)
    stream = SimpleNamespace(__cuda_stream__=lambda: (0, 5))
    for given in (None, 3, stream):
        np.testing.assert_array_equal(kernelseam.matmul2d(x, y, stream=given).host, A @ B)
    with pytest.raises(InvalidValue, match=r"^stream = 'x': must be an int, an object with"):
        kernelseam.matmul2d(x, y, stream="x")


def test_a_repeated_call_is_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    created: list[object] = []
    plan = operation.plan
    planning.forget()
    monkeypatch.setattr(
        operation, "plan", lambda *args, **options: created.append(args) or plan(*args, **options)
    )
    for scale in (2, 3):
        np.testing.assert_array_equal(kernelseam.matmul2d(scale * A, B), scale * (A @ B))
    assert len(created) == 1
    kernelseam.matmul2d(A, B, alpha=2)
    kernelseam.matmul2d(np.asfortranarray(A), B)
    kernelseam.matmul2d(A.astype(np.float64), B.astype(np.float64))
    kernelseam.matmul2d(A, B, implementation="numpy")
    assert len(created) == 5
    odd = np.zeros(7, np.float32)[1:].reshape(2, 3)
    odd[:] = A
    np.testing.assert_array_equal(kernelseam.matmul2d(odd, B), A @ B)
    assert len(created) == 6  # another alignment


def test_remembered_plans_keep_no_array_alive_and_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Watched(np.ndarray[Any, Any]):
        pass

    a = A.copy().view(Watched)
    missing = weakref.ref(a)
    kernelseam.matmul2d(a, B)
    del a
    gc.collect()
    assert missing() is None
    monkeypatch.setattr(array_call, "MAX_ENTRIES", 3)
    for alpha in range(10):
        kernelseam.matmul2d(A, B, alpha=alpha)
    assert len(plugins().cache_of(calling.CallCache).plans) <= 3


def test_a_remembered_plan_does_not_skip_the_checks(refused: Refused) -> None:
    out = np.empty((2, 4), np.float32)
    kernelseam.matmul2d(A, B, out=out)
    out.flags.writeable = False
    refused(
        "out = a read-only array: is written to. Give a writable array.",
        lambda: kernelseam.matmul2d(A, B, out=out),
    )
    refused(
        "a_transposed = 0: must be True or False. Pass a bool.",
        lambda: kernelseam.matmul2d(A, B, a_transposed=0),
    )
    square = np.ones((3, 3), np.float32)
    kernelseam.matmul2d(square, square, out=np.empty((3, 3), np.float32))
    with pytest.raises(InvalidValue, match="overlaps a"):
        kernelseam.matmul2d(square, square, out=square)


def test_what_is_equal_to_what_was_seen_is_held_to_its_own_type(refused: Refused) -> None:
    kernelseam.matmul2d(A, B, alpha=1)
    refused(
        "alpha = True: must be a real number. Pass a float.",
        lambda: kernelseam.matmul2d(A, B, alpha=True),
    )
    q = np.ones((1, 1, 3, 4), np.float32)
    kernelseam.attention(q, q, q, causal=True, window=(1, 1))
    refused(
        "causal = 1: must be True or False. Pass a bool.",
        lambda: kernelseam.attention(q, q, q, causal=1),
    )
    refused(
        "window[0] = True: must be an integer. Pass an int.",
        lambda: kernelseam.attention(q, q, q, causal=True, window=(True, 1)),
    )
    with pytest.raises(kernelseam.errors.UnknownName, match="^out_dtype = "):
        kernelseam.matmul2d(A, B, out_dtype=["float32"])  # which cannot be hashed


def test_a_remembered_call_names_the_callers_arrays(acme: Any, refused: Refused) -> None:
    """In refusals of addresses that the plan sees for the first time, also where it takes b
    first."""
    from kernelseam_thirdvendor import AcmeArray

    x, y, out = (np.ones((4, 4), np.float32) for _ in range(3))
    for turn in (np.asarray, np.transpose):
        kernelseam.matmul2d(AcmeArray(turn(x)), AcmeArray(turn(y)), out=AcmeArray(turn(out)))
        refused(
            f"out = {hex(x.ctypes.data)}: overlaps a. Give the output memory of its own.",
            lambda t=turn: kernelseam.matmul2d(
                AcmeArray(t(x)), AcmeArray(t(y)), out=AcmeArray(t(x))
            ),
        )
        refused(
            f"out = {hex(y.ctypes.data)}: overlaps b. Give the output memory of its own.",
            lambda t=turn: kernelseam.matmul2d(
                AcmeArray(t(x)), AcmeArray(t(y)), out=AcmeArray(t(y))
            ),
        )


def test_launches_are_bound_once_for_each_memory_and_bounded(
    acme: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kernelseam_thirdvendor import AcmeArray
    from kernelseam_thirdvendor.gemm import _Step

    monkeypatch.setattr(acme, "empty", lambda *_: space)  # the same workspace every time
    planning.forget()
    monkeypatch.setattr(array_call, "MAX_ENTRIES", 3)
    bound: list[int] = []
    bind = _Step.bind
    monkeypatch.setattr(_Step, "bind", lambda step, p, w: bound.append(p["C"]) or bind(step, p, w))
    space, x, y = AcmeArray(np.zeros(16, np.float32)), AcmeArray(A), AcmeArray(B)
    outs = [AcmeArray(np.zeros((2, 4), np.float32)) for _ in range(5)]
    for out in (*outs[:2], *outs[:2], outs[0]):
        out.host[...] = 0
        kernelseam.matmul2d(x, y, out=out)
        np.testing.assert_array_equal(out.host, A @ B)
    assert bound == [out.host.ctypes.data for out in outs[:2]]
    for out in outs:
        kernelseam.matmul2d(x, y, out=out)
    assert len(plugins().cache_of(calling.CallCache).bound) <= 3
    missing = weakref.ref(outs[4])
    del outs, out
    gc.collect()
    assert missing() is None


def test_a_result_that_lies_otherwise_is_planned_for(
    acme: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a library's new memory is not as aligned as that of the first call."""
    from kernelseam_thirdvendor import AcmeArray

    x, y, empty = AcmeArray(A), AcmeArray(B), acme.empty
    planning.forget()
    np.testing.assert_array_equal(kernelseam.matmul2d(x, y).host, A @ B)

    def odd(shape: Any, dtype: Any, device: Any, like: Any = None) -> Any:
        if len(shape) == 1:  # the workspace
            return empty(shape, dtype, device, like)
        whole = np.zeros(int(np.prod(shape)) + 1, np.float32)
        return AcmeArray(whole[1:].reshape(shape))

    monkeypatch.setattr(acme, "empty", odd)
    for _ in range(2):
        np.testing.assert_array_equal(kernelseam.matmul2d(x, y).host, A @ B)


def test_lengths_that_the_host_can_read_are_read_at_every_call() -> None:
    q, lengths = np.ones((2, 1, 3, 4), np.float32), np.array([3, 3], np.int32)
    kernelseam.attention(q, q, q, kv_lengths=lengths)
    lengths[1] = 4
    with pytest.raises(InvalidValue, match=r"^kv_lengths\[1\] = 4: must be from 0 to S_k = 3"):
        kernelseam.attention(q, q, q, kv_lengths=lengths)


def run(code: str) -> str:
    env = {"PYTHONPATH": ":".join(sys.path), "KERNELSEAM_PLUGINS": "", "HOME": "/nonexistent"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_is_cheap_and_loads_no_library_of_arrays() -> None:
    heavy = {
        "cupy",
        "cuda",
        "hip",
        "rocm",
        "torch",
        "jax",
        "ml_dtypes",
        "pluggy",
        "rich",
        "typer",
        "kernelseam.ops",
    }
    loaded = run("import sys, kernelseam; print(*sys.modules)").split()
    assert "kernelseam" in loaded and heavy.isdisjoint(loaded)
    code = (
        "import numpy, time; t = time.perf_counter(); import kernelseam; "
        "print(time.perf_counter() - t)"
    )
    assert any(float(run(code)) < 0.3 for _ in range(3))


def test_a_first_call_on_tensors_imports_and_registers_little() -> None:
    """Torch itself where a function is asked for. Dynamo takes torch seconds, and is the business
    of those who compile; to register operators takes as long as all else that is imported, and a
    call needs none. Where torch is asked for one, it is there, and one that another thread defines
    is waited for."""
    pytest.importorskip("torch", reason="torch is not installed")
    code = """
import sys, threading, time, kernelseam.interop.torch
print('torch' in sys.modules)
from kernelseam.interop.torch import attention
print('torch' in sys.modules)
import torch
import kernelseam.interop.transformers_attention
x = torch.ones(1, 1, 2, 4)
attention(x, x, x)
print('torch._dynamo' in sys.modules, 'kernelseam.interop.torch_library.define' in sys.modules)
begun, define = threading.Event(), torch.library.Library.define

def slowly(self, schema, *rest, **options):
    if schema.startswith("bmm("):
        begun.set()
        time.sleep(0.3)
    return define(self, schema, *rest, **options)

def look_up():
    begun.wait(60)
    print(torch.ops.kernelseam.bmm)

torch.library.Library.define = slowly
other = threading.Thread(target=look_up)
other.start()
ours = torch.ops.kernelseam
ours.bmm
other.join()
print(hasattr(ours, 'none'), ours.attention(x, x, x)[0].shape)
"""
    assert run(code).splitlines() == [
        *("False", "True", "False False"),
        "kernelseam.bmm",
        "False torch.Size([1, 1, 2, 4])",
    ]


def test_every_operator_is_found_by_its_name() -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    from torch_operators import samples

    names = sorted({operator for operator, _, _ in samples().values()})
    code = (
        "import torch, kernelseam.interop.torch_autograd; ours = torch.ops.kernelseam; "
        f"found = [ours.__getattr__('merge_states'), *(getattr(ours, n) for n in {names})]; "
        "print(*found, found[0] is ours.merge_states)"
    )
    expected = [f"kernelseam.{name}" for name in ("merge_states", *names)]
    assert run(code).split() == [*expected, "True"]


def test_an_implementation_of_numpys_is_imported_when_it_is_asked() -> None:
    code = (
        "import sys, numpy as np, kernelseam; kernelseam.devices(); "
        "ours = lambda: sorted(m.rpartition('.')[2] for m in sys.modules if m in "
        "('kernelseam.reference.gemm', 'kernelseam.reference.attention')); "
        "before = ours(); x = np.ones((1, 2, 2), np.float32); kernelseam.bmm(x, x); "
        "print(before, ours())"
    )
    assert run(code) == "[] ['gemm']"


@pytest.mark.parametrize(
    "name", ["", ".descriptors", ".reference", ".interop.torch", ".interop.jax"]
)
def test_modules_list_their_names(name: str) -> None:
    module = importlib.import_module(f"kernelseam{name}")
    assert dir(module) == sorted(module.__all__)
    assert {n for names in module._NAMES.values() for n in names.split()} <= set(module.__all__)


def test_every_public_name_is_there() -> None:
    for name in kernelseam.__all__:
        assert getattr(kernelseam, name) is not None
    assert kernelseam.errors.InvalidValue is InvalidValue
    with pytest.raises(AttributeError, match="module 'kernelseam' has no attribute 'atention'"):
        kernelseam.atention  # noqa: B018
    assert kernelseam.devices()[-1].backend == "numpy"


def test_a_missing_array_is_named() -> None:
    for names in (("q", "k", "v"), ("k",), ("v",)):
        given = {n: None if n in names else np.ones((1, 1, 2, 4), np.float32) for n in "qkv"}
        with pytest.raises(
            InvalidValue, match=rf"^{names[0]} = builtins\.NoneType: must be an array of a library"
        ):
            kernelseam.attention(**given)
    with pytest.raises(
        InvalidValue, match=r"^b = builtins\.NoneType: must be an array of a library"
    ):
        kernelseam.matmul2d(A, None)
