"""The file of a trace: every operation's problems, read back as they were; and what is refused."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kernelseam
import numpy as np
import pytest
from kernelseam.bundling import read_trace
from kernelseam.bundling.traces import PROBLEMS
from kernelseam.errors import InvalidValue
from kernelseam.launch_trace import active
from refusals import Refused, cases

REMEDY = "Write the file again by kernelseam.trace(path)."


def f16(*shape: int) -> Any:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float16)


def everything() -> None:
    """A call of each operation, some with options that a problem has fields for."""
    q, k, v = f16(2, 4, 8, 16), f16(2, 2, 8, 16), f16(2, 2, 8, 16)
    out, lse = kernelseam.attention(q, k, v, causal=True, window=(3, 0), return_lse=True)
    kernelseam.attention(q, k, v, mask=np.ones((2, 1, 8, 8), bool), out_dtype=np.float32)
    kernelseam.attention_bwd(out, q, k, v, out, lse, causal=True, window=(3, 0))
    kernelseam.merge_states(np.stack([out, out]), np.stack([lse, lse]))
    kernelseam.bmm(f16(3, 5, 8), f16(3, 8, 7))
    kernelseam.grouped_mm(f16(5, 8), f16(2, 8, 7), np.array([2, 5], np.int32))
    kernelseam.grouped_mm_list([f16(5, 8), f16(3, 2)], [f16(8, 7), f16(2, 4)])
    pages, table = f16(4, 4, 2, 16), np.array([[0, 1], [2, 3]], np.int32)
    kernelseam.attention_paged(f16(2, 1, 4, 16), pages, pages, table, np.array([8, 5], np.int32))
    kernelseam.append_paged(
        f16(2, 1, 2, 16),
        None,
        pages.copy(),
        None,
        block_table=table,
        kv_lengths=np.array([8, 5], np.int32),
    )
    x, w = f16(2, 8, 32), f16(128, 32)
    kernelseam.fused_qkv_projection(x, w, None, 4, 2)
    kernelseam.fused_output_projection_residual(q, f16(32, 64), residual=x)


def test_what_was_computed_is_read_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "traced.json"
    with kernelseam.trace() as outer, kernelseam.trace(path) as launches:
        everything()
        everything()
        (recording, same) = active()
        assert list(recording.problems) == list(same.problems)
        problems = list(recording.problems.items())
    assert outer == launches and len(launches) == sum(calls for _, calls in problems)
    found = read_trace(path)
    assert [t.problem for t in found] == [p.problem for p, _ in problems]
    assert [hash(t.problem) for t in found] == [hash(p.problem) for p, _ in problems]
    assert [(t.device, t.device.limits, t.implementation, t.variant) for t in found] == [
        (p.device, p.device.limits, p.implementation, p.variant) for p, _ in problems
    ]
    assert {p["calls"] for p in json.loads(path.read_text())["problems"]} == {2}
    assert {t.problem.operation for t in found} >= {
        "attention",
        "attention_bwd",
        "gemm",
        "grouped_gemm",
        "grouped_gemm_pointers",
        "merge_states",
        "output_projection",
        "paged_cache",
        "qkv_projection",
    }


def test_every_operation_can_be_read() -> None:
    from kernelseam.kernels import COMPOSITIONS

    assert set(PROBLEMS) == set(COMPOSITIONS)


def test_the_file_is_written_where_the_block_raises_and_not_in_part(tmp_path: Path) -> None:
    path = tmp_path / "traced.json"
    with pytest.raises(KeyboardInterrupt), kernelseam.trace(path):
        kernelseam.bmm(f16(1, 2, 2), f16(1, 2, 2))
        raise KeyboardInterrupt
    assert len(read_trace(path)) == 1 and list(tmp_path.iterdir()) == [path]
    missing = tmp_path / "no folder" / "traced.json"
    with pytest.raises(FileNotFoundError), kernelseam.trace(missing):
        pass


@pytest.mark.parametrize(
    ("place", "value", "message"),
    cases("trace_file", "trace", globals()),
)
def test_what_is_not_a_trace_is_refused(
    refused: Refused, tmp_path: Path, place: tuple[Any, ...], value: object, message: str
) -> None:
    path = tmp_path / "traced.json"
    with kernelseam.trace(path):
        kernelseam.bmm(f16(1, 2, 2), f16(1, 2, 2))
    content = json.loads(path.read_text())
    inner = content
    for step in place[:-1]:
        inner = inner[step]
    inner[place[-1]] = value
    path.write_text(json.dumps(content))
    refused(f"{message.format(path=path)} {REMEDY}", lambda: read_trace(path))
    del inner[place[-1]]
    path.write_text(json.dumps(content))
    if place[-1] in ("M", "a_strides"):
        at = ".".join(["problems[0]", "problem", place[-1]])
        refused(f"{at} = None: is missing. {REMEDY}", lambda: read_trace(path))


GARBAGE = (None, "x", -1, 0, 1, 2**63, 10**400, 0.5, True, [], [1], {}, {"a": 1}, "paged")


def places(content: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value of a JSON document."""
    if at:
        yield at
    if isinstance(content, dict | list):
        inner = content.items() if isinstance(content, dict) else enumerate(content)
        for key, value in inner:
            yield from places(value, (*at, key))


def test_any_value_anywhere_is_refused_or_means_a_problem(tmp_path: Path) -> None:
    """What is read means something: its operands and sizes follow, and it is written as it was."""
    path = tmp_path / "traced.json"
    with kernelseam.trace(path):
        everything()
    whole = path.read_text()
    draw, refusals = random.Random(0), 0
    everywhere = [at for at in places(json.loads(whole)) if at[2:3] == ("problem",)]
    for at in draw.sample(everywhere, 300):
        content = json.loads(whole)
        inner = content
        for step in at[:-1]:
            inner = inner[step]
        inner[at[-1]] = draw.choice(GARBAGE)
        path.write_text(json.dumps(content))
        try:
            found = read_trace(path)
        except InvalidValue as e:
            refusals += 1
            assert e.remedy + "." == REMEDY
            continue
        for t in found:
            assert all(rule.span >= 0 for rule in t.problem.operands)
            assert t.problem.operations >= 0 <= t.problem.bytes_moved
    assert refusals > 180


def test_what_is_no_json_is_refused(refused: Refused, tmp_path: Path) -> None:
    path = tmp_path / "traced.json"
    path.write_text("{")
    message = (
        f"--from = {path}: cannot be read as JSON: Expecting property name enclosed in double "
        f"quotes: line 1 column 2 (char 1). {REMEDY}"
    )
    refused(message, lambda: read_trace(path))
