"""The problems that commands are about: an operation's options, and the object that they make,
which has a ``descriptor``."""

from __future__ import annotations

from collections.abc import Mapping

from kernelseam.cli.attention_options import with_attention_options
from kernelseam.cli.grouped import GroupOptions
from kernelseam.cli.projection import projection
from kernelseam.cli.shapes import product
from kernelseam.cli.with_options import WithOptions

with_product_options = WithOptions(
    product, GroupOptions.of, joined=lambda asked, groups: groups.over(asked)
)
"""A decorator of a command whose first parameter is a product, or what groups make of it."""
PROBLEMS: Mapping[str, tuple[WithOptions, str]] = {
    "attention": (with_attention_options, "an attention, or its gradients"),
    "gemm": (with_product_options, "a batched GEMM, or a grouped one"),
    "projection": (
        WithOptions(projection),
        "the projection before an attention, or that after it",
    ),
}
"""By operation: the decorator of its commands, and its name in words."""
