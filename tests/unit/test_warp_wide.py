"""No operation of a whole warp stands where its lanes have parted: it would wait for the others."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("core/kernelseam/kernels", "cuda_kernels")
APART = re.compile(r"\blane\(\)|\bthread_lane\b|\bthread_index\(\) ==")
"""In a condition on which lanes of a warp may differ."""
TOGETHER = re.compile(
    r"\b(warp_index|uniform|shuffle_xor|any_lane|warp_bits|warp_barrier|block_barrier|block_any"
    r"|__shfl\w*_sync|__ballot_sync|__any_sync|__all_sync|__syncwarp|__syncthreads)\("
)
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/|^ *#[^\n]*", re.DOTALL | re.MULTILINE)


def closed(text: str, at: int, pair: str) -> int:
    """The place behind the bracket that closes the one at ``at``."""
    depth = 0
    for i in range(at, len(text)):
        depth += (text[i] == pair[0]) - (text[i] == pair[1])
        if depth == 0:
            return i + 1
    raise ValueError(text[at : at + 80])


def statement(text: str, at: int) -> int:
    """The place behind the statement that begins at ``at``, with its else."""
    at += len(text[at:]) - len(text[at:].lstrip())
    word = re.match(r"(if( constexpr)?|for|while) *(?=\()", text[at:])
    if word:
        at = statement(text, closed(text, at + word.end(), "()"))
        if word[0].startswith("if") and (more := re.match(r"\s*else\b", text[at:])):
            at = statement(text, at + more.end())
        return at
    if text[at] == "{":
        return closed(text, at, "{}")
    while text[at] != ";":
        brackets = {"(": "()", "{": "{}", "[": "[]"}.get(text[at])
        at = closed(text, at, brackets) if brackets else at + 1
    return at + 1


def parted(text: str) -> Iterator[str]:
    """Statements with an operation of a whole warp, by conditions on which lanes may differ."""
    text = COMMENT.sub("", text)
    for found in re.finditer(r"\bif (?=\()", text):
        behind = closed(text, found.end(), "()")
        if not APART.search(text[found.end() : behind]):
            continue
        controlled = text[behind : statement(text, found.start())]
        if TOGETHER.search(controlled):
            yield text[found.start() : behind] + controlled


def test_lanes_that_parted_do_not_wait_for_each_other() -> None:
    files = [p for folder in FOLDERS for p in sorted((ROOT / folder).rglob("*.h"))]
    assert len(files) > 80
    found = {str(p.relative_to(ROOT)): list(parted(p.read_text(encoding="utf-8"))) for p in files}
    assert {name: texts for name, texts in found.items() if texts} == {}


@pytest.mark.parametrize(
    "text",
    [
        "if (lane() == 0) found[warp_index()] = x;",
        "if (thread_index() == 4) { a(); } else if (P == 3 && warp_index() > 8) b(); c();",
        "if (a) b(); else if (thread_lane < 4) { for (;;) x = shuffle_xor(x, 1); }",
    ],
)
def test_such_places_are_seen(text: str) -> None:
    assert len(list(parted(text))) == 1


def test_what_all_lanes_do_is_none() -> None:
    assert not list(parted("if (warp_index() == 0) warp_barrier(); if (lane() == 0) a[w] = 1;"))
