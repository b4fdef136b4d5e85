"""usage: python tools/hub_package.py FOLDER

Builds kernelseam for Hugging Face's kernel hub, in FOLDER: ``build/torch-universal``, which
``kernels.get_local_kernel(Path(FOLDER))`` loads, with a card and the licence.

The package is a copy of the core and the CUDA plugin, beside ``tools/hub``, that can be loaded
under any name: every import of theirs is made relative, and imports of the distributions in
``STANDINS`` are of the modules in ``tools/hub/standins``. Nothing else is changed. What no call
needs is left out; a module that imports what is left out stops the build.
"""

from __future__ import annotations

import ast
import hashlib
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NAME, VARIANT = "kernelseam", "torch-universal"
HUB = ROOT / "tools/hub"
PACKAGES = {
    "kernelseam": ROOT / "core/kernelseam",
    "kernelseam_cuda": ROOT / "plugins/cuda/kernelseam_cuda",
}
LEFT_OUT = (
    *(
        "cli",
        "__main__",
        "parity",
        "samples",
        "pytest_options",
        "bundling",
        "distributed",
        "tuning",
    ),
    *("interop.jax", "interop.vllm", "interop.diffusers"),
)
"""Modules of the core, by the beginning of their names."""
STANDINS = ("ml_dtypes", "platformdirs", "pluggy")
ALLOWED = frozenset({"torch", "numpy", "filelock", "cuda", "transformers"})
"""What may be imported beside the standard library: torch, NumPy and what torch's wheels require;
transformers where a user registers with it."""
TEXTS = (".h", ".md", ".json")
_SKIPPED = ("__pycache__", "py.typed")


class NotPortable(Exception):
    """A module that cannot be a part of the package."""


def relative(source: str, package: tuple[str, ...], where: str) -> str:
    """A module's source with its imports of the package's own modules made relative.

    ``package`` is the module's, below the root: ("kernelseam", "ops"). Raises NotPortable for an
    import of what is neither here nor allowed.
    """
    lines = source.splitlines(keepends=True)
    for node in sorted(_imports(source), key=lambda n: n.lineno, reverse=True):
        dots = "." * (len(package) + 1)
        if isinstance(node, ast.Import):
            new = _import(node, dots, where)
        else:
            if node.level:
                raise NotPortable(f"{where}:{node.lineno}: an import is relative already")
            new = _from(node, dots, where)
        if new is None:
            continue
        first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
        before = lines[first].encode()[: node.col_offset].decode()
        after = lines[last].encode()[node.end_col_offset :].decode()
        lines[first : last + 1] = [before + new + after]
    return "".join(lines)


def _imports(source: str) -> Iterator[ast.Import | ast.ImportFrom]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node


def _import(node: ast.Import, dots: str, where: str) -> str | None:
    """``import a.b as c`` → ``from ..a import b as c``; None where it stays as it is."""
    changed = [a for a in node.names if _place(a.name, where, node) is not None]
    if not changed:
        return None
    if len(node.names) > 1:
        raise NotPortable(f"{where}:{node.lineno}: one import of several modules")
    (alias,) = changed
    parent, _, name = alias.name.rpartition(".")
    if parent and alias.asname is None:
        raise NotPortable(f"{where}:{node.lineno}: import {alias.name} binds the outermost name")
    named = f" as {alias.asname}" if alias.asname else ""
    of = "standins" if alias.name in STANDINS else parent
    return f"from {dots}{of} import {name}{named}"


def _from(node: ast.ImportFrom, dots: str, where: str) -> str | None:
    assert node.module is not None
    place = _place(node.module, where, node)
    if place is None:
        return None
    names = ", ".join(a.name + (f" as {a.asname}" if a.asname else "") for a in node.names)
    return f"from {dots}{place} import ({names})"


def _place(module: str, where: str, node: ast.stmt) -> str | None:
    """Where a module lies below the root; None for one that is imported as it is. Raises
    NotPortable."""
    top = module.partition(".")[0]
    if top == "hub":
        return module.removeprefix("hub").removeprefix(".")
    if top in PACKAGES:
        if is_left_out(module):
            raise NotPortable(f"{where}:{node.lineno}: {module} is left out of the package")
        return module
    if top in STANDINS:
        return f"standins.{module}"
    if top in sys.stdlib_module_names or top in ALLOWED:
        return None
    raise NotPortable(f"{where}:{node.lineno}: {module} is not part of the package, nor allowed")


def is_left_out(module: str) -> bool:
    name = module.removeprefix("kernelseam.")
    return name != module and name.startswith(LEFT_OUT)


def build(folder: Path) -> Path:
    """Write the package below a folder that has none yet; returns that of the variant. Raises
    NotPortable, FileExistsError."""
    variant = folder / "build" / VARIANT
    variant.mkdir(parents=True)
    _copy(HUB, variant, ())
    for name, sources in PACKAGES.items():
        _copy(sources, variant / name, (name,))
    metadata = {
        "id": f"_{NAME}_{_digest(variant)}",
        "name": NAME,
        "version": 1,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": "cuda"},
    }
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    shutil.copy(ROOT / "LICENSE", folder / "LICENSE")
    (folder / "README.md").write_text(
        f"---\nlicense: apache-2.0\ntags: [kernels]\n---\n\n{_card()}"
    )
    return variant


def _copy(sources: Path, to: Path, package: tuple[str, ...]) -> None:
    to.mkdir(exist_ok=True)
    for path in sorted(sources.iterdir()):
        if path.name in _SKIPPED or path.name.startswith("."):
            continue
        name = ".".join((*package, path.stem))
        if path.is_dir():
            if not is_left_out(name):
                _copy(path, to / path.name, (*package, path.name))
        elif path.suffix == ".py":
            if not is_left_out(name):
                where = str(path.relative_to(ROOT))
                (to / path.name).write_text(relative(path.read_text(), package, where))
        elif path.suffix in TEXTS:
            shutil.copy(path, to / path.name)
        else:
            raise NotPortable(f"{path.relative_to(ROOT)}: a file of a kind that is not copied")
    if not any(to.iterdir()):
        to.rmdir()


def _digest(folder: Path) -> str:
    """Of all files: the package's name where it is loaded, so that no two share modules or
    operators."""
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def _card() -> str:
    """The repository's card, from the page of the documentation."""
    return (ROOT / "docs/hub.md").read_text()


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        raise SystemExit(__doc__)
    folder = Path(sys.argv[1])
    try:
        variant = build(folder)
    except (NotPortable, FileExistsError) as e:
        raise SystemExit(f"hub_package.py: {e}") from e
    files = [p for p in variant.rglob("*") if p.is_file()]
    size = sum(p.stat().st_size for p in files)
    print(f"{variant}: {len(files)} files, {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
