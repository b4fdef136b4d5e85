"""The package for Hugging Face's kernel hub: its imports, and what it does with torch alone."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
from hub_package import NotPortable, build, relative  # noqa: E402

MadeOnce = Callable[[str, Callable[[Path], None]], Path]
TORCH_ALONE = (
    *("torch", "torchgen", "functorch", "numpy", "numpy.libs", "filelock", "fsspec", "jinja2"),
    *("markupsafe", "mpmath", "networkx", "sympy", "typing_extensions.py"),
)
OF_TORCH = {"torchgen", "sympy", "mpmath", "typing_extensions", "_remote_module_non_scriptable"}
"""What importing torch, and calling it, may import."""
OF_CUDA = ("cuda", "nvidia")
"""What torch's wheels for CUDA require since 2.10."""
LOAD = """
import importlib.util, json, sys
from pathlib import Path
before = set(sys.modules)

def load(variant, name=None):  # as kernels.importer does
    name = name or json.loads((variant / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

import torch
ours = load(Path(sys.argv[1]))
"""
CALLS = """
from torch.nn.functional import scaled_dot_product_attention as sdpa
torch.manual_seed(0)
q, k, v = (torch.randn(2, 4, 33, 32, requires_grad=True) for _ in range(3))
out, expected = ours.attention(q, k, v, causal=True), sdpa(q, k, v, is_causal=True)
errors = {"attention": (out - expected).abs().max()}
for ours_, theirs in zip(
    torch.autograd.grad(out.square().sum(), (q, k, v)),
    torch.autograd.grad(expected.square().sum(), (q, k, v)),
):
    errors["gradients"] = max(errors.get("gradients", 0), (ours_ - theirs).abs().max())
q, k, v = (x.detach() for x in (q, k, v))
offsets = torch.tensor([0, 33, 66], dtype=torch.int32)
rows = [x.transpose(1, 2).reshape(66, 4, 32) for x in (q, k, v)]
packed = ours.varlen(*rows, offsets, offsets, 33, 33, causal=True)
errors["varlen"] = (packed.view(2, 33, 4, 32).transpose(1, 2) - expected).abs().max()
pages = [x.transpose(1, 2)[:, :32].reshape(4, 16, 4, 32) for x in (k, v)]
table = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
lengths = torch.full((2,), 32, dtype=torch.int32)
last = q[:, :, 31:32]
paged = ours.paged(last.transpose(1, 2).contiguous(), *pages, table, lengths).transpose(1, 2)
errors["paged"] = (paged - sdpa(last, k[:, :, :32], v[:, :, :32])).abs().max()
a, b = torch.randn(3, 8, 16), torch.randn(3, 16, 8)
errors["bmm"] = (ours.bmm(a, b) - a @ b).abs().max()
ends = torch.tensor([8, 16, 24], dtype=torch.int32)
grouped = ours.grouped_mm(a.reshape(24, 16), b, ends)
errors["grouped_mm"] = (grouped - (a @ b).reshape(24, 8)).abs().max()
linear = torch.nn.Linear(16, 8)
linear_out = ours.layers.Linear.forward(linear, a)
errors["Linear"] = (linear_out - linear(a)).abs().max()
refused = None
try:
    ours.bmm(a.bfloat16(), b.bfloat16())
except ours.errors.InvalidValue as e:
    refused = str(e)
tops = {m.partition(".")[0] for m in set(sys.modules) - before}
tops -= {*sys.stdlib_module_names, ours.__name__}
tops -= {t for t in tops if t.startswith(("__", "_cython", "_sysconfig"))}
other = load(Path(sys.argv[1]), "_another_copy")
again = torch.compile(other.bmm, backend="eager", fullgraph=True)(a, b)
print(json.dumps({
    "errors": {n: float(x) for n, x in errors.items()},
    "modules": sorted(tops),
    "refused": refused,
    "copies": bool(torch.equal(again, ours.bmm(a, b))) and other.bmm is not ours.bmm,
}))
"""
COMPILES = """
from importlib import import_module
core = lambda name: import_module(f"{ours.__name__}.kernelseam.{name}")
found = core("plugins").plugins()
_, toolchain = core("absent").compiler_for("H100")
problem = core("descriptors").Attention(
    batch=2, num_heads=8, S_q=512, S_k=512, head_dim=128, causal=True, dtype="bfloat16"
).problem()
device = core("absent").product("H100")
chosen = [
    i for i in found.registry.implementations_of("attention", "cuda")
    if i.supports(problem, device) is None
]
binary, facts = core("kernels").build_binary(toolchain, problem.spec, "sm_90a")
(fact,) = facts.values()
print(json.dumps({
    "cubin": binary.data.hex(), "facts": str(toolchain.inspect(binary.data, "sm_90a")),
    "plugins": sorted(found.loaded), "failures": [str(f) for f in found.failures],
    "chosen": sorted(i.name for i in chosen),
    "spills": fact.spills, "matrix": fact.matrix_instructions,
}))
"""


@pytest.fixture(scope="session")
def package(made_once: MadeOnce) -> Path:
    """The folder of the repository."""
    return made_once("hub", lambda folder: None if build(folder) else None)


@pytest.fixture(scope="session")
def python(package: Path, made_once: MadeOnce) -> Callable[..., dict[str, object]]:
    """``python(code, names)``: what code prints where the loaded package sees those libraries and
    the standard library alone."""
    import torch

    libraries = Path(torch.__path__[0]).parent

    def run(code: str, names: tuple[str, ...]) -> dict[str, object]:
        def link(folder: Path) -> None:
            for name in names:
                if (libraries / name).exists():
                    (folder / name).symlink_to(libraries / name)

        seen = made_once("hub-sees-" + "-".join(names[-2:]), link)
        path = f"import sys; sys.path.insert(0, {str(seen)!r})\n"
        command = [sys.executable, "-I", "-S", "-c", path + LOAD + code]
        done = subprocess.run(
            [*command, str(package / "build/torch-universal")],
            capture_output=True,
            text=True,
            timeout=280,
            env=os.environ | {"LD_LIBRARY_PATH": str(libraries / "nvidia/cu13/lib")},
        )
        assert done.returncode == 0, done.stderr
        result: dict[str, object] = json.loads(done.stdout)
        return result

    return run


def test_where_there_is_torch_alone(python: Callable[..., dict[str, object]]) -> None:
    told = python(CALLS, TORCH_ALONE)
    errors = told["errors"]
    assert isinstance(errors, dict) and set(errors) >= {"attention", "gradients", "varlen", "paged"}
    assert max(errors.values()) < 1e-4 and told["copies"] is True
    modules = told["modules"]
    assert isinstance(modules, list) and set(modules) - OF_TORCH == {"numpy", "torch"}
    assert told["refused"] == (
        "dtype = bfloat16: is computed on the host by NumPy with ml_dtypes, which is not "
        "installed. pip install ml_dtypes, or pass tensors of a GPU."
    )


def test_it_plans_and_compiles_for_a_gpu(python: Callable[..., dict[str, object]]) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed")
    pytest.importorskip("nvidia", reason="nvrtc's wheel is not installed")
    cubin = pytest.importorskip("kernelseam_cuda.cubin", reason="kernelseam-cuda is not installed")
    told = python(COMPILES, (*TORCH_ALONE, *OF_CUDA))
    assert told["plugins"] == ["cuda", "reference"] and told["failures"] == []
    assert told["spills"] == 0 and int(str(told["matrix"])) > 0
    assert told["facts"] == str(cubin.facts(bytes.fromhex(str(told["cubin"]))))
    chosen = told["chosen"]
    assert isinstance(chosen, list) and {"shared", "sm90"} <= set(chosen)


def test_a_model_of_transformers_with_a_window(package: Path) -> None:
    """It asks for our masks as well: those that Transformers makes for a kernel of the hub leave
    the window to it, and causality."""
    hf = pytest.importorskip("transformers", reason="transformers is missing", exc_type=ImportError)
    torch = pytest.importorskip("torch")
    from kernelseam.interop import transformers as installed

    variant = package / "build/torch-universal/__init__.py"
    spec = importlib.util.spec_from_file_location("_of_the_hub", variant)
    assert spec is not None and spec.loader is not None
    ours = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(ours)
    sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 5}
    torch.manual_seed(7)
    model = hf.MistralForCausalLM(hf.MistralConfig(**sizes)).eval()
    found = {}
    try:
        for name in ("eager", *ours.register_transformers()):
            model.set_attn_implementation(name)
            with torch.no_grad():
                found[name] = model(torch.arange(3, 23)[None]).logits
        attention = hf.AttentionInterface()["kernelseam"]
    finally:
        installed.register()
    assert attention.__module__ == "_of_the_hub.kernelseam.interop.transformers_attention"
    error = (found["kernelseam"] - found["eager"]).abs().max() / found["eager"].abs().max()
    assert error < 4e-6


def test_the_loader_of_kernels_takes_it(package: Path) -> None:
    kernels = pytest.importorskip("kernels", reason="Hugging Face's kernels is not installed")
    torch = pytest.importorskip("torch")
    ours = kernels.get_local_kernel(package)
    a, b = torch.randn(2, 8, 16), torch.randn(2, 16, 8)
    assert torch.allclose(ours.bmm(a, b), a @ b, atol=1e-5)
    layer = kernels.LocalLayerRepository(package, layer_name="Linear")
    mapping = {"Ours": {"cpu": {kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE: layer}}}
    named = kernels.use_kernel_forward_from_hub("Ours")(type("Ours", (torch.nn.Linear,), {}))
    module = torch.nn.Sequential(named(16, 8))
    expected = module(a)
    with kernels.use_kernel_mapping(mapping):
        mode = kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE
        kernelized = kernels.kernelize(module, mode=mode, device="cpu")
    assert torch.allclose(kernelized(a), expected, atol=1e-5)
    assert kernelized[0].forward.__func__ is ours.layers.Linear.forward


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("from kernelseam.errors import A, B as C", "from ...kernelseam.errors import (A, B as C)"),
        ("from kernelseam import errors", "from ...kernelseam import (errors)"),
        ("import kernelseam.plugins as d", "from ...kernelseam import plugins as d"),
        ("from kernelseam_cuda.sm90 import K", "from ...kernelseam_cuda.sm90 import (K)"),
        ("import pluggy", "from ...standins import pluggy"),
        ("if x: import pluggy  # why", "if x: from ...standins import pluggy  # why"),
        ("import numpy as np, os", "import numpy as np, os"),
        ("from hub import layers", "from ... import (layers)"),
        ('"import kernelseam.x"', '"import kernelseam.x"'),
    ],
)
def test_an_import_made_relative(line: str, expected: str) -> None:
    assert relative(f"{line}\n", ("kernelseam", "ops"), "x.py") == f"{expected}\n"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("import rich", "x.py:1: rich is not part of the package, nor allowed"),
        ("from kernelseam.cli import main", "x.py:1: kernelseam.cli is left out of the package"),
        ("import kernelseam.plugins", "x.py:1: import kernelseam.plugins binds the outermost name"),
        ("import kernelseam, os", "x.py:1: one import of several modules"),
        ("from . import x", "x.py:1: an import is relative already"),
    ],
)
def test_an_import_that_stops_the_build(line: str, message: str) -> None:
    with pytest.raises(NotPortable) as refused:
        relative(f"{line}\n", ("kernelseam", "ops"), "x.py")
    assert str(refused.value) == message
