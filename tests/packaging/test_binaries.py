"""Wheels of binaries made ahead of time, as a vendor's extra ``binaries`` names them, in an
environment without compilers."""

from __future__ import annotations

import json
import re
import sys
import zipfile
from pathlib import Path

import pytest
from kernelseam.cli.main import main
from kernelseam.errors import KernelSeamError
from kernelseam.plugins import plugins
from kernelseam.samples import common_problems, gemm_case
from own_process import environment, installing, printed

ROOT = Path(__file__).parents[2]
BACKENDS = {"cuda": "nvrtc", "rocm": "hiprtc"}
VENDORS = {"nvidia", "cupy", "cupy_backends", "hip", "rocm"}
WITHOUT_COMPILER = """
import json, sys
from kernelseam.absent import product
from kernelseam.errors import CompileError
from kernelseam.plugins import plugins
from kernelseam.samples.gemm_case import case
from kernelseam.samples.operations.operands import problem_of

backend, *archs = sys.argv[1:]
known, numpy = plugins(), plugins().backend("numpy").runtime
try:
    known.backend(backend).toolchain.compiler()
    raise SystemExit("there is a compiler")
except CompileError:
    pass
size = {"M": 512, "N": 512, "K": 512, "batch": 1, "num_heads": 1}
wanted, other = (
    problem_of(case(f"f16-{transposed}", **size), numpy, numpy.devices()[0])
    for transposed in ("nt", "tt")
)
kernels = {i.name: i for i in known.registry.implementations_of("gemm", backend)}
found = {}
for arch in archs:
    device = product(arch)
    taken = [n for n in ("sm90", "shared") if n in kernels]
    taken = [n for n in taken if kernels[n].supports(wanted, device) is None]
    found[arch] = taken, kernels["shared"].supports(other, device)
print(json.dumps(found))
"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_wheels_of_binaries_where_no_compiler_is(
    backend: str,
    built: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """``compile --common`` makes what ``kernelseam-VENDOR[binaries]`` names, here of one product
    each, for every fourth arch; installed, the product needs no compiler there."""
    toolchain = plugins().backend(backend).toolchain
    assert toolchain is not None
    try:
        toolchain.compiler()
    except KernelSeamError as e:
        pytest.skip(f"{BACKENDS[backend]} is missing: {e}")
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    monkeypatch.chdir(wheels)
    small = gemm_case.case("f16-nt", M=512, N=512, K=512, batch=1, num_heads=1)
    monkeypatch.setattr(common_problems, "common_cases", lambda: [small])
    archs = toolchain.archs[::4]
    with pytest.raises(SystemExit) as ended:
        main(["compile", "--common", *(x for a in archs for x in ("--arch", a)), "--json"])
    assert not ended.value.code
    made = json.loads(capsys.readouterr().out)["bundles"]
    assert len(made) == len(archs) > 1
    with zipfile.ZipFile(made[0]["bundle"]) as wheel:
        (contents,) = [wheel.read(n) for n in wheel.namelist() if n.endswith("/contents.txt")]
    assert contents.startswith(b"gemm float16") and contents.count(b"\n") == 1

    (core,), (plugin,) = (built.glob(f"kernelseam{n}-*.whl") for n in ("", f"_{backend}"))
    with zipfile.ZipFile(plugin) as wheel:
        (metadata,) = [wheel.read(n) for n in wheel.namelist() if n.endswith("/METADATA")]
    extra = re.findall(
        r"Requires-Dist: (\S+-binaries-\w+)<.*extra == 'binaries'", metadata.decode()
    )
    names = [Path(x["bundle"]).name.partition("-")[0].replace("_", "-") for x in made]
    assert set(names) < set(extra) and len(extra) == len(toolchain.archs)

    python = environment(tmp_path / "environment")
    (site,) = (tmp_path / "environment").glob("lib/python*/site-packages")
    wanted = [core, plugin, *wheels.glob("*.whl")]
    printed(*installing(python, "--no-index", "--no-deps", *wanted), cwd=tmp_path)
    for folder in filter(Path.is_dir, (Path(p) for p in sys.path if p.endswith("-packages"))):
        for entry in folder.iterdir():
            kept = entry.name not in VENDORS and "kernelseam" not in entry.name
            if kept and entry.suffix != ".pth" and not (site / entry.name).exists():
                (site / entry.name).symlink_to(entry)
    command = [python, "-c", WITHOUT_COMPILER, backend, *archs]
    found = json.loads(printed(*command, cwd=tmp_path, KERNELSEAM_NO_JIT="1"))
    refusal = "KERNELSEAM_NO_JIT is set, and no installed bundle has gemm"
    for arch in archs:
        taken, refused = found[arch]
        assert len(taken) == 1 and refused.startswith(refusal), (arch, taken, refused)
