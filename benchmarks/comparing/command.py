"""Ours beside the peers on one GPU: errors checked, times in turns, JSON, tables, plots.

    python -m benchmarks run attention gemm --json FILE.json --report FILE.md --plots DIR
    python -m benchmarks run attention --only '*D256*' --implementation sm90 --implementation shared
    python -m benchmarks run gemm --implementation cublas --implementation cublaslt
    python -m benchmarks run host --device idle   host time, no GPU needed
    python -m benchmarks run compile --device cpu
    python -m benchmarks draw FILE.json DIR       plots from a run's JSON; no GPU needed
    python -m benchmarks table FILE.json          its tables
    python -m benchmarks rows [SUITE …]           names of rows
    python -m benchmarks run drawn --count 84 --seed 7   random problems beside their peers
    python -m benchmarks choices --count 200      dispatch's choices for random problems
    python -m benchmarks choices --count 200 --again FILE.json --arch H200   today's choices, by the
        times of a run with the same count, seed and kinds; no GPU needed
    python -m benchmarks judges --report docs/judges.md   other projects' tests, on NumPy

The exit status is 1 where a row failed: a wrong result, an exception. Rows below their target, and
rows that nothing of ours supports on the device, are said, and no failure.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.comparing.results import Record
    from benchmarks.comparing.rows import Row, Session


JUDGES = ("flash-attention", "torch", "onnx", "attention-gym")


def main(arguments: Sequence[str] | None = None) -> int:
    start = time.monotonic()  # importing torch takes long, too
    from benchmarks.comparing import idle_device, running, tables

    options = _parser(tuple(running.SUITES)).parse_args(arguments)
    if options.command == "judges":
        from benchmarks.judging import command as judging

        return judging.run(options.judges, options.only, options.most, options.report)
    if options.command == "rows":
        for row in _rows(options):
            print(f"{row.suite}/{row.name}")
        return 0
    if options.command == "choices":
        return _choices(options, start)
    if options.command == "run":
        if options.device == "idle" and not idle_device.active():
            given = sys.argv[1:] if arguments is None else arguments
            return idle_device.run_with_idle_driver(("-m", "benchmarks", *given)).returncode
        return _run(options, start)
    environment, records = running.read(options.file)
    if options.command == "draw":
        from benchmarks.comparing import plots

        for path in plots.draw(environment, records, options.folder):
            print(path)
    else:
        print("\n".join(tables.page(environment, records)))
    return 0


def _parser(suites: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="measure suites")
    rows = commands.add_parser("rows", help="names of rows")
    for command in (run, rows):
        command.add_argument(
            "suites", nargs="*", metavar="SUITE", choices=[*suites, []], help=", ".join(suites)
        )
        command.add_argument(
            "--only", action="append", default=[], metavar="GLOB", help="rows by name"
        )
        _add_draw(command, None, None, "of the suite drawn: ")
    run.add_argument("--rounds", type=int, default=7)
    run.add_argument("--warm", type=float, default=0.3, metavar="SECONDS", help="before each row")
    run.add_argument(
        "--burst", type=float, default=8.0, metavar="MS", help="of launches back to back, a round"
    )
    run.add_argument(
        "--implementation",
        action="append",
        default=[],
        metavar="NAME",
        help="time this way of ours too, where it takes a row; NAME:VARIANT for one tile",
    )
    run.add_argument(
        "--device",
        choices=("cuda", "cpu", "idle"),
        default="cuda",
        help="cpu: compilation, and for the rest a look at"
        " the output, no figures; idle: the suite host beside a driver that does nothing",
    )
    run.add_argument(
        "--seconds", type=float, metavar="S", help="begin no row later than this after the start"
    )
    run.add_argument("--json", type=Path)
    run.add_argument("--report", type=Path, metavar="FILE.md")
    run.add_argument("--plots", type=Path, metavar="DIR")
    choices = commands.add_parser("choices", help="how good dispatch's choices are")
    _add_draw(choices, 200, 0)
    choices.add_argument("--seconds", type=float, metavar="S", help="as for run")
    choices.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    choices.add_argument("--again", type=Path, metavar="FILE.json", help="see above")
    choices.add_argument("--arch", default="H200", help="of --again: the device that it ran on")
    choices.add_argument("--json", type=Path)
    choices.add_argument("--report", type=Path, metavar="FILE.md")
    judges = commands.add_parser("judges", help="other projects' tests, on NumPy")
    judges.add_argument(
        "judges",
        nargs="*",
        metavar="JUDGE",
        choices=[*JUDGES, []],
        help=", ".join(JUDGES),
    )
    judges.add_argument("--only", action="append", default=[], metavar="GLOB", help="cases by name")
    judges.add_argument("--most", type=int, metavar="N", help="cases of up to so many scores")
    judges.add_argument("--report", type=Path, metavar="FILE.md")
    draw = commands.add_parser("draw", help="plots from a run's JSON")
    draw.add_argument("file", type=Path)
    draw.add_argument("folder", type=Path)
    table = commands.add_parser("table", help="tables from a run's JSON")
    table.add_argument("file", type=Path)
    return parser


def _add_draw(
    command: argparse.ArgumentParser, count: int | None, seed: int | None, of: str = ""
) -> None:
    command.add_argument("--count", type=int, default=count, help=f"{of}random problems")
    command.add_argument("--seed", type=int, default=seed, help=f"{of}a seed's are the same")
    command.add_argument("--kind", action="append", default=[], help=f"{of}only these")


def _rows(options: argparse.Namespace) -> list[Row]:
    from benchmarks.comparing import running
    from benchmarks.comparing.drawing import drawn_rows

    suites = options.suites or list(running.SUITES)
    given = {"kinds": options.kind or None, "count": options.count, "seed": options.seed}
    given = {name: value for name, value in given.items() if value is not None}
    if given and "drawn" not in suites:
        raise SystemExit(
            "python -m benchmarks: --count, --seed and --kind are of the suite drawn, which is not "
            f"among {', '.join(suites)}. Name it, or leave them out"
        )
    drawn = partial(drawn_rows, **given) if given else running.SUITES["drawn"]
    return running.chosen(suites, options.only, running.SUITES | {"drawn": drawn})


def _session(device: str) -> Session:
    import torch
    from kernelseam.errors import KernelSeamError

    from benchmarks.comparing import clocks
    from benchmarks.comparing.rows import Session

    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    torch.backends.cuda.matmul.allow_tf32 = False
    if device == "cuda":
        if not torch.cuda.is_available():
            raise SystemExit(
                f"python -m benchmarks: torch {torch.__version__} sees no GPU. Install the torch "
                "that is built for it, or give --device cpu"
            )
        try:
            Session(device, clocks.HostClock()).target()
        except KernelSeamError as e:  # no plugin for torch's GPU, or an arch that it does not know
            raise SystemExit(
                f"python -m benchmarks: torch sees {torch.cuda.get_device_name()}, kernelseam does "
                f"not: {e} `kernelseam doctor` says what is missing"
            ) from None
        return Session(device, clocks.GpuClock())
    return Session("cpu", clocks.HostClock())


def _choices(options: argparse.Namespace, start: float) -> int:
    from benchmarks import precompile
    from benchmarks.comparing import choices, machine, running
    from benchmarks.comparing.drawing import drawn

    session = _session("cpu" if options.again else options.device)
    rows = drawn(options.kind, options.count, options.seed)
    if options.again:
        from kernelseam import absent

        session = replace(session, planned_for=absent.product(options.arch))
        head, measured = running.read(options.again)
        records = choices.again(choices.questions(rows, session), measured)
        note = f"Times of an earlier run, {options.again.name}; the choices are those of today."
        return _choices_page(options, head, records, note)
    asked = choices.questions(rows, session)
    units = {k: u for q in asked for k, u in q.units(session.target()).items()}
    for problem in precompile.compile_all(list(units.values()), session.target()) if units else ():
        print(problem, flush=True)
    ready = f"{len(units)} binaries are compiled {time.monotonic() - start:.1f} s after the start"
    print(f"{len(asked)} of {len(rows)} problems are supported; {ready}", flush=True)
    head = {"device": machine.described(session.device)}
    log = running.Log(options.json, head)
    for question in asked:
        if options.seconds is not None and time.monotonic() - start > options.seconds:
            print(f"the time is up: {len(asked) - len(log.records)} problems are not measured")
            break
        log.add(record := running.recorded(question.row, choices.answered, question, session))
        print(choices.line(record), flush=True)
    return _choices_page(options, head, log.records, "")


def _choices_page(
    options: argparse.Namespace, head: dict[str, Any], records: Sequence[Record], note: str
) -> int:
    from benchmarks.comparing import choices, tables

    kinds = "".join(f" --kind {k}" for k in options.kind)
    command = f"`python -m benchmarks choices --count {options.count} --seed {options.seed}{kinds}`"
    explained = f"{command}. {choices.EXPLAINED} {note}".rstrip()
    page = [*tables.head(head), "", explained, "", *choices.summary(records)]
    print("\n".join(page), flush=True)
    if options.report:
        options.report.write_text("\n".join(page) + "\n", encoding="utf-8")
    return 0 if options.again else int(tables.failures(records) > 0)


def _run(options: argparse.Namespace, start: float) -> int:
    from benchmarks.comparing import idle_device, machine, running, tables
    from benchmarks.comparing.timing import Settings

    if options.plots and find_spec("matplotlib") is None:  # not after hours of measuring
        raise SystemExit(
            "python -m benchmarks: --plots needs matplotlib. Install it, or leave it out"
        )
    rows = _rows(options)
    if idle_device.active():
        idle_device.install()
    on_gpu = options.device == "cuda"
    device = "cuda" if on_gpu else "cpu"
    settings = Settings(options.rounds, options.warm, options.burst * 1e-3)
    session = replace(_session(device), settings=settings, implementations=options.implementation)
    head = {"device": machine.described(device), "settings": vars(settings)}
    for problem in running.compile_ahead(rows, session):
        print(problem, flush=True)
    if on_gpu:
        head["ceilings"] = machine.ceilings(device, session.clock)
    ready = f"{len(rows)} rows; all is compiled {time.monotonic() - start:.1f} s after the start"
    print("\n".join([*tables.head(head), ready]), flush=True)
    log = running.Log(options.json, head)
    for done, row in enumerate(rows):
        if options.seconds is not None and time.monotonic() - start > options.seconds:
            print(f"the time is up: {len(rows) - done} rows are not measured", flush=True)
            break
        log.add(record := running.measured(row, session))
        print(tables.line(record), flush=True)
        if options.report:
            options.report.write_text(
                "\n".join(tables.page(head, log.records)) + "\n", encoding="utf-8"
            )
    print(
        "\n".join(["", *tables.summary(log.records), f"{time.monotonic() - start:.0f} s"]),
        flush=True,
    )
    if options.plots:
        from benchmarks.comparing import plots

        plots.draw(head, log.records, options.plots)
    return int(tables.failures(log.records) > 0)
