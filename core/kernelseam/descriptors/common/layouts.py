"""Orders of axes, by name."""

from __future__ import annotations

from collections.abc import Mapping

from kernelseam.descriptors.common.validation import choice

LAYOUTS = {"bhsd": "B H S D", "bshd": "B S H D"}
"""The order of the axes of dense q, k, v and out."""
KV_LAYOUTS = {"nhd": "P N H D", "hnd": "P H N D"}
"""The order of the axes of paged k and v: pages, rows of a page, heads, columns."""


def order(name: str, value: object, orders: Mapping[str, str]) -> str:
    """The name of an order of axes. Raises InvalidValue for one that is not in ``orders``."""
    return choice(name, value, orders, "Name the order of the axes")
