"""``docs/add-an-option.md``, followed with an option made up here: a number by which scores fall
with the distance from the diagonal, added to a copy of the product."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE = "core/kernelseam"
NAME = "distance_penalty"
LIKE = "softcap"
MOST_FILES = 7
Edits = dict[str, list[tuple[str, str]]]
EDITS: Edits = {
    f"{CORE}/descriptors/attention/options.py": [
        (
            '        "Scores are softcap*tanh(x/softcap).",\n    )\n',
            f'    {NAME}: float | None = scalar(None, finite, "Scores lose it times distances.")\n',
        ),
        (f"    {LIKE}: bool = False\n", f"    {NAME}: bool = False\n"),
        (f"    {LIKE}: float = 0.0\n", f"    {NAME}: float = 0.0\n"),
        (f"    {LIKE} = auto()\n", f"    {NAME} = auto()\n"),
        (f"    {LIKE}: float | None\n", f"    {NAME}: float | None\n"),
    ],
    f"{CORE}/reference/attention_scores.py": [
        (f"    | SpecOption.{LIKE}\n", f"    | SpecOption.{NAME}\n"),
        (f"    {LIKE}: float = 0.0\n", f"    {NAME}: float = 0.0\n"),
        (
            "            np.multiply(s, cap, out=s)\n",
            (
                f"        if self.{NAME}:\n"
                "            key, query = np.arange(keys) + (j - i - self.offset), np.arange(n)\n"
                "            distance = np.abs(np.subtract.outer(key, query)).astype(s.dtype)\n"
                f"            s -= distance[:, None] * s.dtype.type(self.{NAME})\n"
            ),
        ),
    ],
    f"{CORE}/oracle/formulas.py": [
        (
            " if self.alibi_slopes is None else float(self.alibi_slopes[b, h])\n",
            f"        slope += self.{NAME} or 0.0\n",
        ),
    ],
    f"{CORE}/kernels/attention/scores.h": [
        ("static constexpr ScoreKind KIND = ", "Config::DISTANCE_PENALTY || "),
        ("  float scale_log2, cap, cap_inverse", ", distance_penalty"),
        ("scale_log2, cap, cap_inverse", ", distance_penalty"),
        (
            "    else x *= scale_log2;\n",
            (
                "    if (Config::DISTANCE_PENALTY) {\n      const int d = j - i - shift();\n      "
                "x -= distance_penalty * (float)(d < 0 ? -d : d);\n    }\n"
            ),
        ),
    ],
    f"{CORE}/kernels/attention/scores.py": [
        (f"    | SpecOption.{LIKE}\n", f"    | SpecOption.{NAME}\n"),
        ('        ("cap_inverse", "f32"),\n', f'        ("{NAME}", "f32"),\n'),
        (
            f'        **members(spec, "causal", "window", "prefix", "mask", "alibi", "{LIKE}"),\n',
            f'        "DISTANCE_PENALTY": spec.{NAME},\n',
        ),
        (
            '        "cap_inverse": p.scale / cap,\n',
            f'        "{NAME}": p.{NAME} * LOG2_E,\n',
        ),
    ],
    f"{CORE}/kernels/config.py": [
        (
            '    "SOFTCAP": "scores are capped",\n',
            '    "DISTANCE_PENALTY": "scores fall with the distance",\n',
        ),
    ],
}
"""File → texts that stand in it, and what is written after each, wherever it stands."""


def edited(text: str, edits: list[tuple[str, str]]) -> str:
    for anchor, added in edits:
        assert anchor in text, f"{anchor!r} is gone: follow the page, and mend this test"
        if anchor == "scale_log2, cap, cap_inverse":  # where it is handed on
            text = text.replace(anchor + "}", anchor + added + "}")
        else:
            text = text.replace(anchor, anchor + added)
    return text


def files_of(section: str) -> list[str]:
    """The files that the steps of a section of the page name."""
    page = (ROOT / "docs" / "add-an-option.md").read_text("utf-8")
    found = re.search(rf"^## {section}\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    assert found is not None, section
    steps = "".join(re.findall(r"^\d+\. .*\n(?:   .*\n)*", found[1], re.MULTILINE))
    return list(dict.fromkeys(re.findall(r"`([\w/]+\.(?:py|h))`", steps)))


def test_the_page_names_the_files_that_a_number_takes() -> None:
    named = [f"{CORE}/{f}" for f in files_of("A number")]
    assert named == list(EDITS) and len(named) <= MOST_FILES
    for file, edits in EDITS.items():
        edited((ROOT / file).read_text("utf-8"), edits)


@pytest.mark.parametrize("section", ["An operand", "A mask"])
def test_the_page_names_files_that_exist(section: str) -> None:
    named = files_of(section)
    assert named, section
    for file in named:
        assert (ROOT / CORE / file).is_file(), file


@pytest.mark.slow("a kernel is compiled as C++, and torch compiles a function: 14 s")
def test_an_option_takes_effect_everywhere(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        pytest.skip("a C++ compiler is missing")
    shutil.copytree(
        ROOT / CORE, tmp_path / "kernelseam", ignore=shutil.ignore_patterns("__pycache__")
    )
    for file, edits in EDITS.items():
        path = tmp_path / Path(file).relative_to("core")
        path.write_text(edited(path.read_text("utf-8"), edits), "utf-8")
    paths = [tmp_path, ROOT / "tests" / "plugins" / "hostcpp"]
    found = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "helpers" / "added_option.py")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
