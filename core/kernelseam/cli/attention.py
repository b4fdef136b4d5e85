"""``kernelseam attention``: forward or gradients, on random inputs or on those of a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import typer

from kernelseam.cli import shapes
from kernelseam.cli.asked import Memory, over_placeholders
from kernelseam.cli.attention_files import Inputs, check_output, read_inputs, save
from kernelseam.cli.attention_options import AttentionOptions, with_attention_options
from kernelseam.cli.progress import working
from kernelseam.cli.running import Run, device_for, execute, measure, report
from kernelseam.contract import Device
from kernelseam.descriptors import Attention
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue
from kernelseam.oracle.check import Verdict
from kernelseam.oracle.sampling import sampled
from kernelseam.oracle.subnormals import flushes
from kernelseam.planning import plan
from kernelseam.plugins import plugins
from kernelseam.samples.attention_bwd_case import BackwardCase
from kernelseam.samples.attention_case import AttentionCase
from kernelseam.samples.data import attention as attention_data
from kernelseam.samples.data import attention_bwd as attention_bwd_data
from kernelseam.samples.data.memory import repeated_copy, unrepeated_shape
from kernelseam.samples.operations.table import operation_of

Array = npt.NDArray[Any]
MOST_VERIFIED = 1e11
"""Floating-point operations of a backward pass above which its oracle, which computes every
element, would take minutes."""
ROWS = ("out", "dq", "dk", "dv")
"""Results whose axes have the requested layout."""
FULL_LENGTHS = "the rate counts every entry of the batch at its full length"


@with_attention_options
def run(
    request: AttentionOptions,
    backend: shapes.Backend = None,
    implementation: shapes.Implementation = None,
    input: Annotated[
        Path | None,
        typer.Option(help="An .npz with q, k, v, or NAME_q, NAME_k, NAME_v (and NAME_out)."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Save the result: .npy, or .npz by name.")
    ] = None,
    json: shapes.Json = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare with the float64 oracle.")
    ] = False,
    time: Annotated[bool, typer.Option("--time", help="Time it, after a warm-up.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random inputs.")] = 0,
) -> None:
    """softmax(q·kᵀ/√D)·v, or its gradients."""
    if output is not None:
        check_output(output)
    cases: list[tuple[AttentionCase, Inputs | None]] = (
        [(request.case(seed), None)]
        if input is None
        else [
            (
                request.case_of(
                    Attention.from_arrays(
                        i.q, i.k, i.v, i.empty_out(request.layout), layout=request.layout
                    ).problem(),
                    seed,
                ),
                i,
            )
            for i in _read(request, input)
        ]
    )
    problems = [
        over_placeholders(request.backward_case(c) if request.backward else c).problem()
        for c, _ in cases
    ]
    largest = max(problems, key=lambda p: p.bytes_moved)
    if request.backward and verify and largest.operations > MOST_VERIFIED:
        raise InvalidValue(
            "--verify",
            f"{largest.operations:.2g} operations",
            f"gradients are verified up to {MOST_VERIFIED:.0e}",
            "Make the problem smaller",
        )
    device = device_for(largest, backend)
    runs, results = [], {}
    for case, inputs in cases:
        one, outputs = compute(
            request, case, inputs, device, implementation, seed, verify=verify, timed=time
        )
        runs.append(one)
        results.update(outputs)
    if output is not None:
        save(output, results)
    report(
        "attention_bwd" if request.backward else "attention",
        device,
        runs,
        verify=verify,
        as_json=json,
    )


def _read(request: AttentionOptions, path: Path) -> list[Inputs]:
    request.refuse_for_file()
    return read_inputs(
        path,
        None if request.dtype is None else shapes.dtype_of(request.dtype, "dtype"),
        request.changes,
    )


def compute(
    request: AttentionOptions,
    case: AttentionCase,
    inputs: Inputs | None,
    device: Device,
    implementation: str | None,
    seed: int,
    *,
    verify: bool,
    timed: bool,
) -> tuple[Run, dict[str, Array]]:
    """Run one attention, or its gradients. Returns the report, and the results by name as arrays on
    the host."""
    full_case = request.backward_case(case) if request.backward else case
    name = "" if inputs is None else inputs.name
    with working("making random inputs" if inputs is None else f"reading {name or 'the inputs'}"):
        values = random_values(request, full_case, inputs, seed)
        memory = Memory(full_case, values, device)
    with working(f"computing the attention on {device}"):
        forward = plan(
            memory.descriptor(case),
            device=device,
            implementation=None if request.backward else implementation,
        ).bind()
        launches = execute(forward)
    call, names = forward, ("out", *(("lse",) if case.lse else ()))
    if isinstance(full_case, BackwardCase):
        with working(f"computing its gradients on {device}"):
            call = plan(
                memory.descriptor(full_case), device=device, implementation=implementation
            ).bind()
            launches, names = execute(call), attention_bwd_data.outputs(full_case)
    outputs = {n: memory.read(n) for n in names}
    flushed = flushes(plugins().backend(device.backend), device)
    verdicts = {}
    with working("comparing with the float64 oracle"):
        if verify:
            stored = None if inputs is None else _logical(inputs.stored, request)
            verdicts = _verdicts(full_case, values, outputs, stored, flushed)
    notes = [inputs.note] if inputs is not None and verify and inputs.note else []
    if timed and (case.keys or case.q_sequences):
        notes.append(FULL_LENGTHS)
    elements = sum(x.size for x in outputs.values())
    timing = measure(call) if timed else None
    results = {
        _saved_as(name, n): _logical(x, request) if n in ROWS else x for n, x in outputs.items()
    }
    return Run(name, call.plan, launches, elements, verdicts, timing, tuple(notes)), results


def _saved_as(name: str, operand: str) -> str:
    """A result's name in a file: out stands under the name of its inputs alone."""
    if operand == "out":
        return name or "out"
    return f"{name}_{operand}" if name else operand


def _logical(x: Array | None, request: AttentionOptions) -> Any:
    """Convert between [batch, head, row, column] and the requested layout, either way."""
    return x if x is None or request.layout == "bhsd" else x.swapaxes(1, 2)


def random_values(
    request: AttentionOptions,
    full_case: AttentionCase | BackwardCase,
    inputs: Inputs | None,
    seed: int,
) -> dict[str, Array]:
    """Operands by name, [batch, head, row, column]: random, except those that a file gives."""
    rng = np.random.default_rng(seed)
    case = full_case.forward if isinstance(full_case, BackwardCase) else full_case
    values = attention_data.values(case, rng)
    if isinstance(full_case, BackwardCase):
        values["dout"] = rng.standard_normal(attention_data.shapes(case)["out"]).astype(
            case.dtype.numpy
        )
    if request.mask_density is not None:
        plane = (case.batch, case.num_heads, case.S_q, case.S_k)
        values["mask"] = repeated_copy(
            rng.random(unrepeated_shape(plane, case.mask_layout)) < request.mask_density, plane
        )
    if inputs is not None:
        values.update({n: _logical(getattr(inputs, n), request) for n in "qkv"})
    return values


def _verdicts(
    case: AttentionCase | BackwardCase,
    values: Mapping[str, Array],
    results: Mapping[str, Array],
    stored: Array | None,
    flushed: bool,
) -> dict[str, Verdict]:
    """By reference: the oracle, and a result that the file has."""
    if isinstance(case, AttentionCase):  # of a large result some rows
        case = replace(case, sample=sampled(4 * case.S_k * (case.head_dim + case.value_dim)))
    operation = operation_of(case)
    expected = operation.expected(case, values)
    verdicts = {"oracle": operation.verdict(case, expected, results, flushed)}
    if stored is not None and isinstance(case, AttentionCase):
        rows, out = operation.rows(case), results["out"]
        kept: Array = stored.astype(np.float64).reshape(-1, case.value_dim)
        kept = (kept if rows is None else kept[rows]).reshape(expected.out.shape)
        if case.dtype is DType.float64:  # what is stored was rounded to float32 at best
            case, out = replace(case, dtype=DType.float32), out.astype(np.float32)
        verdicts["stored result"] = operation.verdict(
            case, replace(expected, out=kept), {"out": out}, flushed
        )
    return verdicts
