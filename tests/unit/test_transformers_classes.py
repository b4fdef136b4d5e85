"""Every class of Transformers' mappings of causal and sequence-to-sequence LMs, masked LMs, vision
and audio, in a small configuration of random weights: our attention beside eager attention.
docs/transformers-classes.md has the outcome, and names each class that is not compared."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from kernelseam.interop import transformers as interop

torch = pytest.importorskip("torch", reason="torch is not installed")
hf = pytest.importorskip(
    "transformers", reason="transformers is missing: pip install transformers", exc_type=ImportError
)

from kernelseam.interop.transformers_attention import attention_forward  # noqa: E402
from transformers_small import classes, inputs, made, result  # noqa: E402

pytestmark = [
    pytest.mark.slow("makes and runs 500 models: twenty minutes"),
    pytest.mark.filterwarnings("ignore"),  # of what models do
]

PAGE = (Path(__file__).parents[2] / "docs/transformers-classes.md").read_text(encoding="utf-8")
BOUND = 1e-5
"""Of an error, relative to the largest logit: float32 through two to eight layers."""


def listed(section: str) -> set[str]:
    """The classes that a section of the page names."""
    return set(re.findall(r"`(\w+)`", PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]))


SECTIONS = ("No attention to choose", "Padded rows", "Padding on the right", "Not configured")
OWN, PADDED, NO_RIGHT, LEFT = (listed(s) for s in SECTIONS)
SAME = f"Transformers {hf.__version__}" in PAGE


@pytest.fixture
def calls() -> Any:
    """How often our attention is called."""
    found: list[int] = []

    def counted(*operands: Any, **options: Any) -> Any:
        found.append(1)
        return attention_forward(*operands, **options)

    interop.register()
    hf.AttentionInterface.register("kernelseam", counted)
    yield found
    interop.register()


def close(found: Any, expected: Any) -> bool:
    if torch.equal(found.nan_to_num(), expected.nan_to_num()):  # some have no finite results
        return True
    return bool((found - expected).abs().max() <= BOUND * expected.abs().max())


@pytest.mark.parametrize(("name", "kind"), list(classes()), ids=[c[0] for c in classes()])
def test_a_class(name: str, kind: str, calls: list[int]) -> None:
    try:
        model = made(name, kind)
    except ValueError as error:
        assert not SAME or name in LEFT
        pytest.skip(f"{name} is not configured: {error}")
    for side in ("none", "left", "right"):
        given = inputs(model, side)
        if side != "none" and "attention_mask" not in given or side == "right" and name in NO_RIGHT:
            continue
        model.set_attn_implementation("sdpa" if side != "none" and name in PADDED else "eager")
        expected = result(model, given)
        model.set_attn_implementation("kernelseam")
        assert close(result(model, given), expected), side
    if model.can_generate() and model.main_input_name == "input_ids" and name not in PADDED:
        given = {n: x for n, x in inputs(model, "left").items() if n != "decoder_input_ids"}
        options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": 127}
        model.set_attn_implementation("eager")
        try:
            tokens = model.generate(**given, **options)
        except (AttributeError, ImportError, TypeError, ValueError):  # needs more than a forward
            tokens = None
        model.set_attn_implementation("kernelseam")
        if tokens is not None:
            assert torch.equal(model.generate(**given, **options), tokens)
    assert not SAME or (name in OWN) == (not calls)
    assert not SAME or name not in LEFT


def test_the_page_names_classes_that_there_are() -> None:
    if not SAME:
        pytest.skip(f"the page is of another Transformers than {hf.__version__}")
    assert {name for name, _ in classes()} >= OWN | PADDED | NO_RIGHT | LEFT
