"""``kernelseam attention``: on random data or on a file's; forward or gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import typer

from kernelseam.cli import shapes
from kernelseam.cli.attention_files import Inputs, check_output, read_inputs, save
from kernelseam.cli.attention_options import AttentionOptions, with_attention_options
from kernelseam.cli.progress import working
from kernelseam.cli.running import Run, device_for, execute, measure, report
from kernelseam.contract import Device
from kernelseam.descriptors import Attention
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue
from kernelseam.oracle import check, formulas
from kernelseam.oracle.sampling import sampled
from kernelseam.oracle.subnormals import flushes
from kernelseam.parity.cases.attention_bwd_case import BackwardCase
from kernelseam.parity.cases.attention_case import AttentionCase
from kernelseam.parity.data import attention as attention_data
from kernelseam.parity.data import attention_bwd as attention_bwd_data
from kernelseam.parity.data.memory import Layout, repeated_copy, unrepeated_shape
from kernelseam.parity.operations import operands
from kernelseam.parity.operations.operands import describe
from kernelseam.planning import plan
from kernelseam.plugins import plugins

Array = npt.NDArray[Any]
MOST_VERIFIED = 1e11
"""Operations of gradients beyond which the oracle, which makes all of them, would take minutes."""
ROWS = ("out", "dq", "dk", "dv")
"""Results whose axes have the order that is asked for."""
FULL_LENGTHS = "the rate counts every entry of the batch at its full length"


@with_attention_options
def run(
    request: AttentionOptions,
    backend: shapes.Backend = None,
    implementation: shapes.Implementation = None,
    input: Annotated[
        Path | None,
        typer.Option(
            "--input", help="An .npz with q, k, v, or NAME_q, NAME_k, NAME_v (and NAME_out)."
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", help="Save the result: .npy, or .npz by name.")
    ] = None,
    json: shapes.Json = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare with the float64 oracle.")
    ] = False,
    time: Annotated[bool, typer.Option("--time", help="Measure, after a warm-up.")] = False,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the random data.")] = 0,
) -> None:
    """softmax(q·kᵀ/√D)·v, or its gradients."""
    if output is not None:
        check_output(output)
    found: list[tuple[AttentionCase, Inputs | None]] = (
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
        request.over(request.backward_case(c) if request.backward else c).problem()
        for c, _ in found
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
    for case, inputs in found:
        done, made = compute(
            request, case, inputs, device, implementation, seed, verify=verify, timed=time
        )
        runs.append(done)
        results.update(made)
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
    """Run one attention, or its gradients; the report and the results on the host, by name."""
    whole = request.backward_case(case) if request.backward else case
    name = "" if inputs is None else inputs.name
    with working("making random inputs" if inputs is None else f"reading {name or 'the inputs'}"):
        values = random_values(request, whole, inputs, seed)
        memory = Memory(whole, values, device)
    with working(f"computing the attention on {device}"):
        forward = plan(
            memory.descriptor(case),
            device=device,
            implementation=None if request.backward else implementation,
        ).bind()
        launches = execute(forward)
    call, written = forward, ("out", *(("lse",) if case.lse else ()))
    if isinstance(whole, BackwardCase):
        with working(f"computing its gradients on {device}"):
            call = plan(
                memory.descriptor(whole), device=device, implementation=implementation
            ).bind()
            launches, written = execute(call), attention_bwd_data.outputs(whole)
    found = {n: memory.read(n) for n in written}
    flushed = flushes(plugins().backend(device.backend), device)
    verdicts = {}
    with working("comparing with the float64 oracle"):
        if verify and isinstance(whole, BackwardCase):
            wanted = attention_bwd_data.expected(whole, values)
            verdicts["oracle"] = check.attention_bwd(wanted, case.dtype, found, flushed=flushed)
        elif verify:
            verdicts = _verify(
                case,
                values,
                found,
                None if inputs is None else _logical(inputs.stored, request),
                flushed,
            )
    notes = [inputs.note] if inputs is not None and verify and inputs.note else []
    if timed and (case.keys or case.q_sequences):
        notes.append(FULL_LENGTHS)
    elements = sum(x.size for x in found.values())
    timing = measure(call) if timed else None
    results = {
        _saved_as(name, n): _logical(x, request) if n in ROWS else x for n, x in found.items()
    }
    return Run(name, call.plan, launches, elements, verdicts, timing, tuple(notes)), results


def _saved_as(name: str, operand: str) -> str:
    """A result's name in a file: out stands under the name of its inputs alone."""
    if operand == "out":
        return name or "out"
    return f"{name}_{operand}" if name else operand


def _logical(x: Array | None, request: AttentionOptions) -> Any:
    """[batch, head, row, column] ↔ the order of the axes that is asked for."""
    return x if x is None or request.layout == "bhsd" else x.swapaxes(1, 2)


def random_values(
    request: AttentionOptions, whole: AttentionCase | BackwardCase, inputs: Inputs | None, seed: int
) -> dict[str, Array]:
    """Operands by name, [batch, head, row, column]: random ones, and a file's in the place of
    theirs."""
    rng = np.random.default_rng(seed)
    case = whole.forward if isinstance(whole, BackwardCase) else whole
    found = attention_data.values(case, rng)
    if isinstance(whole, BackwardCase):
        found["dout"] = rng.standard_normal(attention_data.shapes(case)["out"]).astype(
            case.dtype.numpy
        )
    if request.mask_density is not None:
        plane = (case.batch, case.num_heads, case.S_q, case.S_k)
        found["mask"] = repeated_copy(
            rng.random(unrepeated_shape(plane, case.mask_layout)) < request.mask_density, plane
        )
    if inputs is not None:
        found.update({n: _logical(getattr(inputs, n), request) for n in "qkv"})
    return found


class Memory:
    """A case's operands on a device, each in an allocation of its own; what is not given is NaN."""

    def __init__(
        self, case: AttentionCase | BackwardCase, values: Mapping[str, Array], device: Device
    ) -> None:
        self.layout, self.device = operands.layout(case, separate=True), device
        self.runtime = plugins().backend(device.backend).runtime
        host = self.layout.buffers()
        self.layout.write(host, values)
        self.held = {
            name: self.runtime.from_host(b.view(np.float32), device) for name, b in host.items()
        }

    def descriptor(self, case: AttentionCase | BackwardCase) -> Any:
        """The case's own over these operands."""
        wanted = operands.layout(case).placements
        addresses = {}
        for name, p in wanted.items():
            info = self.runtime.describe(self.held[p.block])
            assert info is not None
            addresses[name] = info.pointer + p.offset * p.dtype.itemsize
        return describe(case, Layout(wanted), addresses, self.runtime, self.device)

    def read(self, name: str) -> Array:
        """An operand on the host, [batch, head, row, column]; 0 where it has no memory."""
        block = self.layout.placements[name].block
        bytes_ = (
            np.ascontiguousarray(self.runtime.to_host(self.held[block])).view(np.uint8).reshape(-1)
        )
        return self.layout.read({block: bytes_}, name)


def _verify(
    case: AttentionCase,
    x: Mapping[str, Array],
    found: Mapping[str, Array],
    stored: Array | None,
    flushed: bool,
) -> dict[str, check.Verdict]:
    lead = (case.batch, case.num_heads, case.S_q)
    rows = formulas.sample_rows(
        int(np.prod(lead)), sampled(4 * case.S_k * (case.head_dim + case.value_dim))
    )
    expected = formulas.attention(
        x["q"], x["k"], x["v"], case.causal, case.scale_used, rows, attention_data.variant(case, x)
    )

    def against(
        reference: formulas.AttentionResult, got: Array, lse: Array | None, of: DType
    ) -> check.Verdict:
        return check.attention_verdict(
            reference, case.S_k, case.head_dim, of, got, lse, lead, rows, flushed
        )

    out, dtype = found["out"], case.dtype
    verdicts = {"oracle": against(expected, out, found.get("lse"), dtype)}
    if stored is not None:
        kept: Array = stored.astype(np.float64).reshape(-1, case.value_dim)
        kept = (kept if rows is None else kept[rows]).reshape(expected.out.shape)
        if dtype is DType.float64:  # what is stored was rounded to float32 at best
            dtype, out = DType.float32, out.astype(np.float32)
        verdicts["stored result"] = against(replace(expected, out=kept), out, None, dtype)
    return verdicts
