"""The descriptor of an attention's gradients: what it makes of the problem, and every refusal, word
for word."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernelseam import Attention, AttentionBwd, plan
from kernelseam.descriptors import AttentionPointers
from kernelseam.descriptors.attention.backward_problem import AttentionBwdProblem
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue, Unsupported
from kernelseam_thirdvendor import AcmeArray
from refusals import Refused

Array = np.ndarray[Any, Any]
BASE: dict[str, Any] = {
    "batch": 2,
    "num_heads": 4,
    "kv_heads": 2,
    "S_q": 5,
    "S_k": 7,
    "head_dim": 8,
    "value_dim": 16,
    "dtype": "float16",
    "return_lse": True,
}
PACKED: dict[str, Any] = {"cu_seqlens_q": 0, "total_q": 9, "cu_seqlens_k": 0, "total_k": 11}


def forward(**more: Any) -> Attention:
    return Attention(**{**BASE, **more})


def problem(given: Attention | None = None, **more: Any) -> AttentionBwdProblem:
    return AttentionBwd(forward=given or forward(), **more).problem()


# ---------------------------------------------------------------- what is derived


def test_strides_default_to_row_major() -> None:
    p = problem()
    assert p.dout_strides == (320, 80, 16) and p.dq_strides == (160, 40, 8)
    assert p.dk_strides == (112, 56, 8) and p.dv_strides == (224, 112, 16)
    rules = {r.name: r for r in p.operands}
    assert list(rules) == ["q", "k", "v", "out", "lse", "dout", "dq", "dk", "dv"]
    assert [n for n, r in rules.items() if r.written] == ["dq", "dk", "dv"]
    assert rules["dout"].shape == (2, 4, 5, 16) and rules["dk"].shape == (2, 2, 7, 8)
    p = problem(forward(**PACKED))
    assert p.dout_strides == (0, 16, 64) and p.dq_strides == (0, 8, 32)
    assert p.dk_strides == (0, 8, 16) and p.dv_strides == (0, 16, 32)
    assert {r.name: r.shape for r in p.operands}["dk"] == (1, 2, 11, 8)


def test_given_strides_are_kept() -> None:
    p = problem(
        stride_dq_batch=8 * 20,
        stride_dq_head=8,
        stride_dq_row=32,
        stride_dv_row=20,
        stride_dout_head=0,
    )
    assert p.dq_strides == (160, 8, 32) and p.dv_strides == (2 * 7 * 20, 7 * 20, 20)
    assert p.dout_strides == (0, 0, 16)  # dout is read: it may repeat
    p = problem(forward(**PACKED), stride_dk_head=88, stride_dk_row=8)
    assert p.dk_strides == (0, 88, 8)


def test_the_bias_gradient_has_the_biass_own_extents() -> None:
    given = forward(bias=0, stride_bias_batch=0, stride_bias_head=7, stride_bias_row=0)
    p = problem(given, dbias=0)
    assert (p.dbias_shape, p.dbias_strides) == ((1, 4, 1, 7), (0, 7, 0, 1))
    assert p.spec.bias_gradient and not problem(given).spec.bias_gradient
    p = problem(given, dbias=0, stride_dbias_column=4, stride_dbias_head=1)
    assert p.dbias_strides == (0, 1, 0, 4)
    (rule,) = (r for r in p.operands if r.name == "dbias")
    assert (rule.dtype, rule.shape, rule.written, rule.alignment) == (
        DType.float16,
        (1, 4, 1, 7),
        True,
        2,
    )
    p = problem(forward(bias=0, dtype_bias="float32"), dbias=0)
    assert p.dbias_strides == (140, 35, 7, 1)
    assert {r.name: r.dtype for r in p.operands}["dbias"] is DType.float32


def test_sinks_and_determinism() -> None:
    p = problem(forward(sinks=0), dsinks=0, deterministic=False)
    (rule,) = (r for r in p.operands if r.name == "dsinks")
    assert (rule.dtype, rule.shape, rule.written) == (DType.float32, (4,), True)
    assert p.spec.sink_gradient and not p.spec.deterministic and problem().spec.deterministic


def test_vector_is_that_of_all_rows() -> None:
    """Odd strides and addresses of the gradients narrow the accesses to all operands."""
    assert problem().spec.forward.vector == 16
    for more in ({"stride_dq_row": 12}, {"dk": 8 + (1 << 20)}, {"stride_dout_head": 84}):
        p = problem(**more)
        assert p.spec.forward.vector == p.forward.spec.vector == 2
        assert {r.alignment for r in p.operands if r.name in ("q", "dq", "dout")} == {2}


def test_operations_and_bytes() -> None:
    p = problem(forward(causal=True))
    assert p.operations == 2 * 2 * 4 * (3 + 4 + 5 + 6 + 7) * (3 * 8 + 2 * 16)
    rows, keys = 2 * 4 * 5, 2 * 2 * 7
    moved = 2 * (rows * (8 + 16) * 2 + keys * (8 + 16) * 2) + 4 * rows
    assert p.bytes_moved == moved + 8 * rows
    assert str(p) == "attention_bwd float16 causal batch=2 heads=4/2 S_q=5 S_k=7 dim=8/16"


def test_it_keeps_no_array() -> None:
    x = {
        n: np.zeros(s, np.float32)
        for n, s in (("q", (1, 1, 3, 4)), ("k", (1, 1, 5, 4)), ("v", (1, 1, 5, 4)))
    }
    given = Attention(
        batch=1,
        num_heads=1,
        S_q=3,
        S_k=5,
        head_dim=4,
        **x,
        out=np.zeros((1, 1, 3, 4), np.float32),
        lse=np.zeros((1, 1, 3), np.float32),
    )
    d = AttentionBwd(forward=given, dout=given.out, dq=np.zeros((1, 1, 3, 4), np.float32))
    assert list(d.operands()) == ["q", "k", "v", "out", "lse", "dout", "dq"]
    assert str(d.device) == "numpy:0 (cpu)" and problem().spec == problem().spec
    bare = d.without_arrays()
    assert bare.device is None and bare.problem() == d.problem()
    assert bare.operands() == {n: i.pointer for n, i in d._arrays.items()}


# ---------------------------------------------------------------- refusals


def test_what_is_no_backward(refused: Refused) -> None:
    refused(
        "forward = dict: must be an Attention. Fill in its descriptor.",
        lambda: AttentionBwd(forward={}),
    )
    lists: Any = AttentionPointers(batch=1, num_heads=1, S_q=1, S_k=1, head_dim=8, dtype="float16")
    refused(
        "forward = AttentionPointers: must be an Attention. Fill in its descriptor.",
        lambda: AttentionBwd(forward=lists),
    )
    refused(
        "forward = an attention without lse: must have one. Give lse, or return_lse=True.",
        lambda: problem(forward(return_lse=False)),
    )
    refused("dbias = given: the attention has no bias. Leave it out.", lambda: problem(dbias=0))
    refused("dsinks = given: the attention has no sinks. Leave it out.", lambda: problem(dsinks=0))
    refused(
        "deterministic = 1: must be True or False. Pass a bool.", lambda: problem(deterministic=1)
    )


def test_strides(refused: Refused) -> None:
    rule = "Strides count elements, from 0 (broadcast) upward."
    for name in ("dout", "dq", "dk", "dv"):
        for axis in ("batch", "head", "row"):
            refused(
                f"stride_{name}_{axis} = -1: must be from 0 to 2**62 - 1. {rule}",
                lambda name=name, axis=axis: problem(**{f"stride_{name}_{axis}": -1}),
            )
        refused(
            f"stride_{name}_batch = 7: packed rows have no batch. Leave it out.",
            lambda name=name: problem(forward(**PACKED), **{f"stride_{name}_batch": 7}),
        )
    for axis in ("batch", "head", "row", "column"):
        refused(
            f"stride_dbias_{axis} = 1.5: must be an integer. Pass an int.",
            lambda axis=axis: problem(forward(bias=0), dbias=0, **{f"stride_dbias_{axis}": 1.5}),
        )
        refused(
            f"stride_dbias_{axis} = 1: describes dbias. Give dbias too (0: it will be bound).",
            lambda axis=axis: problem(forward(bias=0), **{f"stride_dbias_{axis}": 1}),
        )


def test_gradients_whose_elements_share_memory(refused: Refused) -> None:
    remedy = "An output needs memory of its own for every element: make"
    refused(
        "stride_dq_row = 4: the 5 entries of this axis of dq share elements (extents [2, 4, 5, "
        f"8], strides [80, 20, 4, 1]). {remedy} stride_dq_row larger.",
        lambda: problem(stride_dq_row=4),
    )
    refused(
        "stride_dk_head = 0: the 2 entries of this axis of dk share elements (extents [2, 2, 7, "
        f"8], strides [0, 0, 8, 1]). {remedy} stride_dk_head larger.",
        lambda: problem(stride_dk_head=0),
    )
    for axis, strides in (("batch", [0, 35, 7, 1]), ("column", [0, 0, 0, 0])):
        entries = {"batch": 2, "column": 7}[axis]
        refused(
            f"stride_dbias_{axis} = 0: the {entries} entries of this axis of dbias share elements "
            f"(extents [2, 4, 5, 7], strides {strides}). {remedy} stride_dbias_{axis} larger.",
            lambda axis=axis: problem(forward(bias=0), dbias=0, **{f"stride_dbias_{axis}": 0}),
        )


def arrays(**more: Any) -> dict[str, Array]:
    f16 = {
        "dout": (2, 4, 5, 16),
        "dq": (2, 4, 5, 8),
        "dk": (2, 2, 7, 8),
        "dv": (2, 2, 7, 16),
        "dbias": (2, 4, 5, 7),
    }
    return {
        **{n: np.zeros(s, np.float16) for n, s in f16.items()},
        "dsinks": np.zeros(4, np.float32),
        **more,
    }


def test_arrays_that_do_not_fit(refused: Refused) -> None:
    given = forward(bias=0, sinks=0)
    frozen = np.zeros((2, 4, 5, 8), np.float16)
    frozen.flags.writeable = False
    assert problem(given, **arrays()).spec.bias_gradient
    for message, more in (
        (
            (
                "dout = an array of float32: must be float16. Convert the array, or plan for its "
                "dtype."
            ),
            {"dout": np.zeros((2, 4, 5, 16), np.float32)},
        ),
        (
            (
                "dsinks = an array of float64: must be float32. Convert the array, or plan for its "
                "dtype."
            ),
            {"dsinks": np.zeros(4)},
        ),
        (
            (
                "dbias = an array of float32: must be float16. Convert the array, or plan for its "
                "dtype."
            ),
            {"dbias": np.zeros((2, 4, 5, 7), np.float32)},
        ),
        ("dq = a read-only array: is written to. Give a writable array.", {"dq": frozen}),
        (
            (
                "dv = an array that spans 208 elements: the extents and strides walk over 448. "
                "Make them smaller, or give a "
                "larger array (or an address, where more memory follows)."
            ),
            {"dv": np.zeros((1, 1, 13, 16), np.float16)},
        ),
    ):
        refused(message, lambda more=more: problem(given, **arrays(**more)))
    gaps = (
        "must be row-major without gaps where no strides are given. Give the strides, or copy "
        "the array."
    )
    for name, array in (
        ("dq", np.zeros((2, 5, 4, 8), np.float16).swapaxes(1, 2)),
        ("dbias", np.zeros((2, 4, 7, 5), np.float16).swapaxes(2, 3)),
        ("dsinks", np.zeros(8, np.float32)[::2]),
    ):
        strides = [s // array.itemsize for s in array.strides]
        refused(
            f"{name} = an array with strides {strides}: {gaps}",
            lambda name=name, array=array: problem(given, **arrays(**{name: array})),
        )
    apart = np.zeros((9, 4, 16), np.float16)[..., :8]
    refused(
        f"dq = an array with strides [64, 16, 1]: {gaps}",
        lambda: problem(forward(**PACKED), dq=apart),
    )
    assert problem(forward(**PACKED), dq=apart, stride_dq_row=64, stride_dq_head=16).dq_strides == (
        0,
        16,
        64,
    )
    refused(
        "dq = strides (-160, 40, 8, 1): must not be negative. Copy the array first.",
        lambda: problem(dq=np.zeros((2, 4, 5, 8), np.float16)[::-1]),
    )


@pytest.mark.usefixtures("acme")
def test_arrays_on_several_devices(refused: Refused) -> None:
    refused(
        "dq = an array on acme:0 (acme1): dout is on numpy:0 (cpu). Move all arrays to one device.",
        lambda: problem(dout=arrays()["dout"], dq=AcmeArray(arrays()["dq"])),
    )


def bound() -> dict[str, Array]:
    f16 = {"q": (2, 4, 5, 8), "k": (2, 2, 7, 8), "v": (2, 2, 7, 16), "out": (2, 4, 5, 16)}
    x = {n: a for n, a in arrays().items() if n not in ("dbias", "dsinks")}
    return {
        **{n: np.zeros(s, np.float16) for n, s in f16.items()},
        "lse": np.zeros((2, 4, 5), np.float32),
        **x,
    }


def test_what_bind_refuses(refused: Refused) -> None:
    planned = plan(AttentionBwd(forward=forward()), backend="numpy")
    planned.bind(**bound())()
    for name in bound():
        given = {n: x for n, x in bound().items() if n != name}
        refused(
            f"{name} = missing: must be the address of memory on the device. Give {name} in the "
            "descriptor or to bind.",
            lambda given=given: planned.bind(**given),
        )
    for name, other in (("dq", "q"), ("dk", "k"), ("dv", "v")):
        x = bound()
        x[name] = x[other]
        with pytest.raises(
            InvalidValue, match=rf"= 0x[0-9a-f]+: overlaps ({name}|{other})\. Give the output"
        ):
            planned.bind(**x)
    refused(
        "dbias = given: is no operand of this plan. Its operands are q, k, v, out, lse, dout, "
        "dq, dk, dv.",
        lambda: planned.bind(**bound(), dbias=0),
    )
    lengths = plan(AttentionBwd(forward=forward(kv_lengths=0)), backend="numpy")
    refused(
        "kv_lengths[1] = 8: must be from 0 to S_k = 7. Raise S_k, or correct it.",
        lambda: lengths.bind(**bound(), kv_lengths=np.array([7, 8], np.int32)),
    )


def test_pages_are_refused_by_name() -> None:
    paged = forward(block_table=0, kv_lengths=0, pages=6, page_size=4)
    with pytest.raises(
        Unsupported, match="numpy: k and v are paged: it takes strided and packed rows"
    ):
        plan(AttentionBwd(forward=paged), backend="numpy")
