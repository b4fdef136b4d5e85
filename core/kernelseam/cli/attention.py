"""``kernelseam attention``: on random data or on a file's."""

from __future__ import annotations

import re
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import typer

from kernelseam.cli import shapes
from kernelseam.cli.running import Run, device_for, execute, measure, normal, report
from kernelseam.contract import Device
from kernelseam.descriptors import Attention
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue
from kernelseam.parity import check, oracle
from kernelseam.planning import plan
from kernelseam.plugins import plugins
from kernelseam.verification import sampled

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Inputs:
    """q, k and v of one attention as they lie in memory, and a result to compare with."""

    name: str
    q: Array
    k: Array
    v: Array
    stored: Array | None = None
    note: str = ""


def run(
    batch: shapes.Batch = None, heads: shapes.Heads = None, seq_len: shapes.SeqLen = None,
    kv_seq_len: shapes.KvSeqLen = None, head_dim: shapes.HeadDim = None, kv_heads: shapes.KvHeads = None,
    value_dim: shapes.ValueDim = None, causal: shapes.Causal = False, dtype: shapes.Dtype = None,
    layout: shapes.AttentionLayout = "bhsd", backend: shapes.Backend = None,
    implementation: shapes.Implementation = None,
    input: Annotated[
        Path | None, typer.Option("--input", help="An .npz with q, k, v, or NAME_q, NAME_k, NAME_v (and NAME_out).")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", help="Save the result: .npy, or .npz by name.")] = None,
    json: shapes.Json = False,
    verify: Annotated[bool, typer.Option("--verify", help="Compare with the float64 oracle.")] = False,
    time: Annotated[bool, typer.Option("--time", help="Measure, after a warm-up.")] = False,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the random data.")] = 0,
) -> None:
    """softmax(q·kᵀ/√D)·v."""
    extents = {
        "batch": batch, "heads": heads, "seq_len": seq_len, "kv_seq_len": kv_seq_len, "head_dim": head_dim,
        "kv_heads": kv_heads, "value_dim": value_dim,
    }
    if output is not None:
        _check_output(output)
    if input is not None:
        for name, value in extents.items():
            if value is not None:
                raise InvalidValue(f"--{name.replace('_', '-')}", value, "the extents are the file's", "Leave it out")
        shapes.one_of("layout", layout, "bhsd", "bshd")
        found = read_inputs(input, None if dtype is None else DType.of(dtype, "dtype"), causal)
        descriptors = [Attention.from_arrays(i.q, i.k, i.v, _empty_out(i, layout), causal=causal, layout=layout)
                       for i in found]
        device = device_for(max((d.problem() for d in descriptors), key=lambda p: p.bytes_moved), backend)
    else:
        shape = shapes.AttentionShape.of(**extents, causal=causal, dtype=dtype, layout=layout)
        device = device_for(shape.descriptor().problem(), backend)
        rng, lie = np.random.default_rng(seed), shape.shapes()
        q, k, v = (normal(rng, lie[n], shape.dtype) for n in "qkv")
        found = [Inputs("", q, k, v)]
    runs, results = [], {}
    for i in found:
        done, result = compute(i, device, implementation, causal=causal, layout=layout, verify=verify, timed=time)
        runs.append(done)
        results[i.name or "out"] = result
    if output is not None:
        save(output, results)
    report("attention", device, runs, verify=verify, as_json=json)


def compute(
    inputs: Inputs, device: Device, implementation: str | None, *, causal: bool, layout: str, verify: bool, timed: bool
) -> tuple[Run, Array]:
    """Run one attention; its report and its result on the host."""
    runtime = plugins().backend(device.backend).runtime
    q, k, v = (runtime.from_host(x, device) for x in (inputs.q, inputs.k, inputs.v))
    blank = _empty_out(inputs, layout)
    out = runtime.empty(blank.shape, DType.of(blank.dtype), device)
    made = plan(
        Attention.from_arrays(q, k, v, out, causal=causal, layout=layout), device=device, implementation=implementation
    )
    call = made.bind()
    launches = execute(call)
    result = runtime.to_host(out)
    verdicts = _verify(inputs, result, causal, layout) if verify else {}
    notes = (inputs.note,) if verify and inputs.note else ()
    return Run(
        inputs.name, made, launches, result.size, verdicts, measure(call) if timed else None, notes
    ), result


def _verify(inputs: Inputs, result: Array, causal: bool, layout: str) -> dict[str, check.Verdict]:
    q, k, v, out, stored = (
        x if x is None or layout == "bhsd" else x.swapaxes(1, 2)
        for x in (inputs.q, inputs.k, inputs.v, result, inputs.stored)
    )
    assert q is not None and k is not None and v is not None and out is not None
    limit = sampled(4 * k.shape[2] * (k.shape[3] + v.shape[3]))
    lead = q.shape[:3]
    rows = oracle.sample_rows(int(np.prod(lead)), limit)
    expected = oracle.attention(q, k, v, causal, q.shape[3] ** -0.5 if q.shape[3] else 1.0, rows)
    dtype = DType.of(q.dtype)

    def against(reference: oracle.AttentionResult, got: Array, of: DType) -> check.Verdict:
        return check.attention_verdict(reference, k.shape[2], q.shape[3], of, got, None, lead, rows)

    verdicts = {"oracle": against(expected, out, dtype)}
    if stored is not None:
        kept: Array = stored.astype(np.float64).reshape(-1, v.shape[3])
        kept = (kept if rows is None else kept[rows]).reshape(expected.out.shape)
        if dtype is DType.float64:  # what is stored was rounded to float32 at best
            dtype, out = DType.float32, out.astype(np.float32)
        verdicts["stored result"] = against(replace(expected, out=kept), out, dtype)
    return verdicts


def _empty_out(inputs: Inputs, layout: str) -> Array:
    """An array of the result's shape and dtype that takes no memory until it is written."""
    if inputs.q.ndim != 4 or inputs.v.ndim != 4:
        raise InvalidValue(
            f"{inputs.name or 'file'}: axes of q, k, v", (inputs.q.ndim, inputs.k.ndim, inputs.v.ndim),
            f"must be 4, {layout}", "Give arrays of four axes",
        )
    return np.empty((*inputs.q.shape[:3], inputs.v.shape[3]), inputs.q.dtype)


def read_inputs(path: Path, dtype: DType | None, causal: bool) -> list[Inputs]:
    """Every q, k, v in an .npz, in the order of their names, converted to ``dtype`` if one is given.

    Raises InvalidValue for what is not such a file.
    """
    try:
        with path.open("rb") as file:
            found = np.load(file, allow_pickle=False)
            arrays = {} if isinstance(found, np.ndarray) else {name: found[name] for name in found.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as e:
        raise InvalidValue("--input", path, f"cannot be read: {e}", "Give an .npz with q, k and v") from e
    if isinstance(found, np.ndarray):
        raise InvalidValue("--input", path, "must be an .npz", "Save it with numpy.savez")
    names = {m[1] or "" for key in arrays if (m := re.fullmatch(r"(?:(.*)_)?([qkv])", key))}
    if not names:
        raise InvalidValue(
            "--input", path, f"has no q, k, v or NAME_q, NAME_k, NAME_v among {', '.join(arrays) or 'nothing'}",
            "Name the arrays so",
        )
    return [_read_one(path, name, arrays, dtype, causal) for name in sorted(names)]


def _read_one(path: Path, name: str, arrays: dict[str, Array], dtype: DType | None, causal: bool) -> Inputs:
    prefix = f"{name}_" if name else ""
    if missing := [prefix + x for x in "qkv" if prefix + x not in arrays]:
        raise InvalidValue("--input", path, f"lacks {', '.join(missing)}", "Give q, k and v together")
    q, k, v = (arrays[prefix + x] for x in "qkv")
    stored, note = arrays.get(f"{prefix}out"), ""
    kind = DType.of(q.dtype, f"{prefix}q") if dtype is None else dtype
    exact = all(np.can_cast(x.dtype, kind.numpy, "safe") for x in (q, k, v))
    q, k, v = (x.astype(kind.numpy, copy=False) for x in (q, k, v))
    if stored is not None:
        if causal or not exact:
            why = "it is of every key" if causal else f"the inputs were rounded to {kind}"
            stored, note = None, f"{prefix}out is not compared: {why}"
        elif stored.shape != (shape := (*q.shape[:3], v.shape[-1])):
            raise InvalidValue(f"{prefix}out", stored.shape, f"must be {shape}", "Store the result of this q, k, v")
    return Inputs(name, q, k, v, stored, note)


def _check_output(path: Path) -> None:
    if path.suffix not in (".npy", ".npz"):
        raise InvalidValue("--output", path, "must end in .npy or .npz", "Name it so")
    if not path.parent.is_dir():
        raise InvalidValue("--output", path, f"there is no folder {path.parent}", "Make it first")


def save(path: Path, results: dict[str, Array]) -> None:
    """Results by name into an .npz; into an .npy the one there is, or several of one shape stacked in their order.

    bfloat16, which the format does not know, is saved as float32, which holds its every value.
    """
    plain = {n: x.astype(np.float32) if x.dtype.kind == "V" else x for n, x in results.items()}
    try:
        if path.suffix == ".npz":
            np.savez(path, **plain)  # type: ignore[arg-type]
        elif len(plain) == 1:
            np.save(path, next(iter(plain.values())))
        elif len({x.shape for x in plain.values()}) == 1:
            np.save(path, np.stack(list(plain.values())))
        else:
            raise InvalidValue("--output", path, "results of several shapes do not fit one array", "Name an .npz")
    except OSError as e:
        raise InvalidValue("--output", path, f"cannot be written: {e}", "Name another place") from e
