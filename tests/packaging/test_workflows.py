"""The workflows are well formed, and what they run is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

yaml: Any = pytest.importorskip("yaml", reason="PyYAML is missing, which mkdocs brings")
ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def test_there_are_workflows() -> None:
    assert [p.stem for p in WORKFLOWS] == ["ci", "wheels"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda p: p.stem)
def test_a_workflow(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    # YAML 1.1 reads the key "on" as true
    assert set(workflow) <= {"name", True, "permissions", "concurrency", "jobs"}
    assert workflow[True] and workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert job["runs-on"] and job["timeout-minutes"] <= 30
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step)
            first = step.get("run", "").split(" ")[0]
            if first.startswith("."):
                assert (ROOT / first).stat().st_mode & 0o100, f"{first} is no program"
        for folder in job.get("strategy", {}).get("matrix", {}).get("distribution", ()):
            assert (ROOT / folder / "pyproject.toml").is_file()
