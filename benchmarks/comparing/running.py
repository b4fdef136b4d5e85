"""One run: what is compiled first, then row after row, each printed and kept as soon as it is
there."""

from __future__ import annotations

import fnmatch
import json
import os
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from kernelseam.dispatch import select
from kernelseam.errors import KernelSeamError, Unsupported
from kernelseam.kernels.kernel import KernelImplementation

from benchmarks import precompile
from benchmarks.comparing.attention_rows import (
    adversarial_rows,
    few_rows,
    forward_rows,
    option_rows,
    small_rows,
)
from benchmarks.comparing.backward import backward_rows
from benchmarks.comparing.compiling import compile_rows
from benchmarks.comparing.decoding import decode_rows
from benchmarks.comparing.definitions import definition_rows
from benchmarks.comparing.dims import backward_dims_rows, dims_rows
from benchmarks.comparing.drawing import drawn_rows
from benchmarks.comparing.epilogues import epilogue_rows
from benchmarks.comparing.fp8 import fp8_rows
from benchmarks.comparing.gemm import half_rows, wide_rows
from benchmarks.comparing.grouped import grouped_rows
from benchmarks.comparing.host import host_rows
from benchmarks.comparing.host_cpu import cpu_rows
from benchmarks.comparing.listed import listed_rows
from benchmarks.comparing.models import model_rows
from benchmarks.comparing.paging import paged_rows
from benchmarks.comparing.projections import projection_rows
from benchmarks.comparing.results import Record
from benchmarks.comparing.rows import Row, Session, Wrong
from benchmarks.comparing.scores import score_rows

SCHEMA = 1
"""Of the JSON."""
SUITES: dict[str, Callable[[], Sequence[Row]]] = {
    "attention": forward_rows,
    "attention-options": option_rows,
    "attention-adversarial": adversarial_rows,
    "attention-few": few_rows,
    "attention-small": small_rows,
    "attention-dims": dims_rows,
    "attention-paged": paged_rows,
    "attention-scores": score_rows,
    "backward": backward_rows,
    "backward-dims": backward_dims_rows,
    "decode": decode_rows,
    "definitions": definition_rows,
    "drawn": drawn_rows,
    "gemm": half_rows,
    "gemm-f32": wide_rows,
    "gemm-e4m3": fp8_rows,
    "gemm-epilogue": epilogue_rows,
    "grouped": lambda: [*grouped_rows(), *listed_rows()],
    "projections": projection_rows,
    "host": host_rows,
    "host-cpu": cpu_rows,
    "models": model_rows,
    "compile": compile_rows,
}


def chosen(
    suites: Iterable[str],
    only: Sequence[str] = (),
    of: Mapping[str, Callable[[], Sequence[Row]]] = SUITES,
) -> list[Row]:
    """Rows of these suites, those whose name, or SUITE/NAME, one of the patterns fits. Raises
    KeyError."""
    rows = [row for suite in suites for row in of[suite]()]
    return [
        r
        for r in rows
        if not only
        or any(
            fnmatch.fnmatchcase(text, p) for p in only for text in (r.name, f"{r.suite}/{r.name}")
        )
    ]


def compile_ahead(rows: Iterable[Row], session: Session) -> list[str]:
    """Every binary that ours launch in these rows, in parallel, into the cache; what failed, in
    words. What dispatch refuses shows when its row comes."""
    device, units = session.target(), dict[Any, Any]()
    for row in rows:
        for descriptor in row.planned(session):
            for name in (None, *session.implementations):
                with suppress(KernelSeamError):
                    problem = descriptor.simplified()[0].problem()
                    implementation = select(problem, device, name).implementation
                    if isinstance(implementation, KernelImplementation):
                        units.update(precompile.units_of(implementation, problem, device))
    return precompile.compile_all(list(units.values()), device) if units else []


def measured(row: Row, session: Session) -> Record:
    """The row's record; of one that fails, why."""
    return recorded(row, row.measure, session)


def recorded(row: Row, measure: Callable[..., Record], *arguments: Any) -> Record:
    """What a measurement returned, or a record of the row that says why it raised."""
    start = time.monotonic()
    try:
        record = measure(*arguments)
    except Unsupported as e:
        record = Record(row.suite, row.name, unsupported=str(e))
    except (Wrong, KernelSeamError) as e:
        record = Record(row.suite, row.name, failure=f"{type(e).__name__}: {e}")
    except Exception as e:  # the rows after it are worth having
        place = traceback.extract_tb(e.__traceback__)[-1]
        where = f"{Path(place.filename).name}:{place.lineno}"
        record = Record(row.suite, row.name, failure=f"{type(e).__name__}: {e} ({where})"[:500])
    record.seconds = round(time.monotonic() - start, 2)
    return record


class Log:
    """The run's JSON, written anew after each row: a run that is cut off has lost no row."""

    def __init__(self, path: Path | None, head: dict[str, Any]) -> None:
        self._path, self.head, self.records = path, head, list[Record]()
        self._write()

    def add(self, record: Record) -> None:
        self.records.append(record)
        self._write()

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **self.head, "rows": [r.to_json() for r in self.records]}

    def _write(self) -> None:
        if self._path is None:
            return
        text = json.dumps(self.to_json(), indent=1, ensure_ascii=False)
        beside = self._path.with_name(self._path.name + ".part")
        beside.write_text(text + "\n", encoding="utf-8")
        os.replace(beside, self._path)


def read(path: Path) -> tuple[dict[str, Any], list[Record]]:
    """A run's head and its records. Raises OSError, ValueError for another schema."""
    content = json.loads(path.read_text(encoding="utf-8"))
    if content.get("schema") != SCHEMA:
        raise ValueError(f"{path} has schema {content.get('schema')}, not {SCHEMA}: measure again")
    return {k: v for k, v in content.items() if k not in ("schema", "rows")}, [
        Record.read(r) for r in content["rows"]
    ]
