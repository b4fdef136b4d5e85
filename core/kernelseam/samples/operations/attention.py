"""The attention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from kernelseam.contract import Device
from kernelseam.descriptors import Attention, AttentionPointers
from kernelseam.descriptors.attention.options import ScoreScalars
from kernelseam.descriptors.common.options import scalars_of
from kernelseam.oracle import check, formulas
from kernelseam.oracle.check import Verdict
from kernelseam.oracle.formulas import AttentionResult
from kernelseam.oracle.scaled_rows import scaled_rows
from kernelseam.samples.attention_case import AttentionCase
from kernelseam.samples.data import attention as data
from kernelseam.samples.data import captured
from kernelseam.samples.data.descriptors import strides
from kernelseam.samples.data.memory import Layout
from kernelseam.samples.operations.operation import Arrays, Operation, Placed

FIELDS = (
    "batch",
    "num_heads",
    "kv_heads",
    "S_q",
    "S_k",
    "head_dim",
    "value_dim",
    *scalars_of(ScoreScalars),
    "dtype",
    "dtype_out",
    "batch_invariant",
)
"""Fields with the same name in a case and in both descriptors."""


class AttentionForward(Operation[AttentionCase, AttentionResult]):
    """softmax(scale·q·kᵀ)·v and its variants."""

    name, data = "attention", data

    def outputs(self, case: AttentionCase) -> tuple[str, ...]:
        return ("out", "lse") if case.lse else ("out",)

    def lead(self, case: AttentionCase) -> tuple[int, ...]:
        return case.batch, case.num_heads, case.S_q

    def describe(self, case: AttentionCase, placed: Placed) -> Attention | AttentionPointers:
        layout, addresses = placed.layout, placed.addresses
        if case.view == "strided":
            return describe_strided(case, layout, addresses, placed.device)
        options = _options(case)
        listed = [n for n in addresses if n in ("q", "k", "v", "out")]
        steps = {
            n: s
            for n, s in strides(layout).items()
            if n.endswith("_row") or not n.startswith(tuple(f"stride_{x}_" for x in listed))
        }
        lists: dict[str, Any] = {f"{n}_ptrs": placed.listed(case.view, n) for n in listed}
        if case.view == "device":
            options["alignment"] = (
                16 if all(addresses[n] % 16 == 0 for n in listed) else case.dtype.itemsize
            )
        return AttentionPointers(
            **{n: at for n, at in addresses.items() if n not in listed}, **lists, **steps, **options
        )

    def expected(self, case: AttentionCase, inputs: Arrays) -> AttentionResult:
        k, v = inputs["k"], inputs["v"]
        if case.row_scale_block is not None:
            k, v = scaled_rows(k, case.value_dim, case.row_scale_block)
        return formulas.attention(
            inputs["q"],
            k,
            v,
            case.causal,
            case.scale_used,
            self.rows(case),
            data.variant(case, inputs),
        )

    def verdict(
        self, case: AttentionCase, expected: AttentionResult, results: Arrays, flushed: bool = False
    ) -> Verdict:
        return check.attention_verdict(
            expected,
            case.S_k,
            case.head_dim,
            case.q_dtype,
            results["out"],
            results.get("lse"),
            results["out"].shape[:-1],
            self.rows(case),
            flushed,
            case.precision,
            case.row_scale_block is not None,
        )


def describe_strided(
    case: AttentionCase, layout: Layout, addresses: Mapping[str, Any], device: Device
) -> Attention:
    """The descriptor of an attention without pointer lists."""
    expression = None
    if case.mods:
        addresses, arrays = captured.views(layout, addresses, device)
        expression = replace(data.expression(case), arrays=arrays)
    return Attention(
        expression=expression,
        **addresses,
        **strides(layout, packed(case)),
        **dict(_views(case)),
        **_options(case),
        **case.fields("dtype_q", "dtype_kv", "q_scale_block", "scale_block"),
        **case.fields("latent", "row_scale_block", "prefix_groups"),
    )


def packed(case: AttentionCase) -> set[str]:
    """Operands whose rows are packed."""
    queries = set() if case.q_sequences is None else {"q", "out", "lse"}
    queries |= {"q_scales"} if queries and case.q_scale_block else set()
    keys = {"k", "v"} | ({"k_scales", "v_scales"} if case.scale_block else set())
    return queries | (set() if case.k_sequences is None else keys)


def _options(case: AttentionCase) -> dict[str, Any]:
    return {**case.fields(*FIELDS), "dtype_bias": case.bias}


def _views(case: AttentionCase) -> Iterator[tuple[str, Any]]:
    """The extents of packed and paged memory."""
    for letter, lengths in (("q", case.q_sequences), ("k", case.k_sequences)):
        if lengths is not None:
            yield f"total_{letter}", sum(lengths) + 2 * case.margin
    if case.page_size:
        yield "pages", data.pages(case)
        yield "page_size", case.page_size
        yield "table_width", data.block_table(case).shape[1]
