"""``pytest --pyargs kernelseam.parity`` from an installed wheel, outside a checkout; and projects
that ask for none."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from kernelseam.parity.matrix import matrix

Run = Callable[..., "subprocess.CompletedProcess[str]"]

QUIET = "python -m pytest -q -p no:cacheprovider"
MATRIX = f"{QUIET} -p kernelseam.pytest_options --pyargs kernelseam.parity"


def test_the_matrix_of_a_backend(run_installed: Run, tmp_path: Path) -> None:
    done = run_installed(f"{MATRIX} --backend numpy -vv -k 'f64-t or 64-mqa'", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"::test_parity\[gemm-f64-tt-on-numpy-numpy\] PASSED", done.stdout)
    chosen = [c for c in matrix() if "f64-t" in c.name or "64-mqa" in c.name]
    count = Counter(c.operation for c in chosen)
    assert set(count) == {"gemm", "attention"}
    assert re.search(rf"= {len(chosen)} passed, \d+ deselected in", done.stdout.splitlines()[-1])
    lines = [line.split()[:6] for line in done.stdout.splitlines() if line.startswith((*count,))]
    assert lines == [[o, "numpy", "numpy", str(n), str(n), "0"] for o, n in count.items()]


@pytest.mark.slow("the whole matrix: tests/parity runs it too, in a checkout")
def test_the_whole_matrix_of_numpy(run_installed: Run, tmp_path: Path) -> None:
    done = run_installed(f"{MATRIX} --backend numpy", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    match = re.match(r"(\d+) passed in", done.stdout.splitlines()[-1])
    assert match is not None and int(match[1]) > 300


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "nope",
            ("backend = nope: must be one of numpy. Name one of these, or see `kernelseam doctor`"),
        ),
        ("", "expected one argument"),
    ],
)
def test_a_backend_that_is_not_there(
    run_installed: Run, tmp_path: Path, name: str, message: str
) -> None:
    done = run_installed(f"{MATRIX} --backend {name}", tmp_path)
    assert done.returncode == 4 and message in done.stderr and "Traceback" not in done.stderr


def test_the_variable_names_the_backend_too(run_installed: Run, tmp_path: Path) -> None:
    done = run_installed(f"KERNELSEAM_BACKEND=nope {MATRIX}", tmp_path)
    assert done.returncode == 4 and "backend = nope" in done.stderr


def test_without_the_option_a_variable_names_the_backend(
    run_installed: Run, tmp_path: Path
) -> None:
    command = f"KERNELSEAM_BACKEND=numpy {QUIET} --pyargs kernelseam.parity -k gemm-f64-tt"
    done = run_installed(command, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^gemm +numpy +numpy +([1-9]\d*) +\1 +0 +0 ", done.stdout, re.M)


def test_other_projects_are_left_alone(run_installed: Run, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "def pytest_addoption(parser):\n    parser.addoption('--backend')\n"
    )
    (tmp_path / "test_own.py").write_text(
        "import sys\ndef test_own(request):\n    assert request.config.getoption('--backend') == "
        "'theirs'\n    loaded = {m for m in sys.modules if m.startswith('kernelseam')}\n    "
        "assert not loaded\n"
    )
    done = run_installed(f"{QUIET} -W error --backend theirs", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout and "parity" not in done.stdout


def test_it_needs_no_pytest_but_says_so(run_installed: Run, tmp_path: Path) -> None:
    script = "import sys; sys.modules['pytest'] = None; import kernelseam.parity.pytest_plugin"
    done = run_installed(f'python -c "{script}"', tmp_path)
    assert done.returncode == 1
    assert "pip install pytest; or run `kernelseam parity`, which needs nothing more" in done.stderr
    blocked = (
        "import sys; sys.modules['pytest'] = None; from kernelseam.cli.main import main; "
        "main(sys.argv[1:])"
    )
    done = run_installed(
        f'python -c "{blocked}" parity --backend numpy --case gemm-f64-nn', tmp_path
    )
    assert done.returncode == 0 and "gemm       numpy    numpy           1      1" in done.stdout
