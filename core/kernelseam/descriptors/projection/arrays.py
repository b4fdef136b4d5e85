"""Fields of a projection's descriptor from arrays: their shapes and strides; nothing is copied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kernelseam.contract import ArrayInfo
from kernelseam.descriptors.common.layouts import KV_LAYOUTS, LAYOUTS, order
from kernelseam.descriptors.common.operands import axes, canonical, describe_arrays
from kernelseam.errors import InvalidValue

OPTIONAL = (
    *("bias", "cos", "sin", "positions", "block_table"),
    *("slot_mapping", "kv_lengths", "cu_seqlens", "k_scales", "v_scales"),
)
"""Optional operands of the projection to q, k and v."""


def labels_of(name: str, value: object, layouts: Mapping[str, str]) -> str:
    """The axis labels of a layout. Raises InvalidValue for an unknown one."""
    return layouts[order(name, value, layouts)]


def infos_of(given: Mapping[str, object], *needed: str) -> dict[str, ArrayInfo]:
    """The views of the given arrays; ``needed`` ones must be given. All on one device."""
    arrays = {n: x for n, x in given.items() if x is not None or n in needed}
    return dict(zip(arrays, describe_arrays(**arrays), strict=True))


class Read:
    """Fields of a descriptor, filled operand by operand; extents agree with those that are
    known."""

    def __init__(self, infos: Mapping[str, ArrayInfo]) -> None:
        self.infos = infos
        self.fields: dict[str, Any] = dict(infos)
        self.known: dict[str, int] = {}

    def take(
        self, name: str, labels: str, stride_axes: Mapping[str, str], called: str = ""
    ) -> None:
        """An operand with one axis a label; ``stride_axes``: label → its stride field's axis. Axes
        of other labels but the last have no stride field."""
        info = self.infos[name]
        extents = axes(name, info, labels, self.known)
        self.known.update(zip(labels.split(), extents, strict=True))
        for label, stride in zip(labels.split(), canonical(info), strict=True):
            if label in stride_axes:
                self.fields[f"stride_{called or name}_{stride_axes[label]}"] = stride

    def heads(self, name: str, labels: str, heads: str) -> None:
        """q, k, v and operands of their layout; ``heads``: the label of the axis H."""
        shown = labels.replace("H", heads)
        self.take(name, shown, {"B": "batch", "P": "batch", heads: "head", "S": "row", "N": "row"})

    def rotation(self) -> None:
        """Cosines and sines, where both are given: alike."""
        if not {"cos", "sin"} <= self.infos.keys():
            return
        for name in ("cos", "sin"):
            self.take(name, "max_position rotary_dim/2", {"max_position": "row"}, "cos")
        cos, sin = (canonical(self.infos[n])[0] for n in ("cos", "sin"))
        if cos != sin:
            raise InvalidValue(
                "sin",
                f"rows {sin} elements apart",
                f"those of cos are {cos} elements apart",
                "Let them be alike",
            )
        self.fields["rotary_dim"] = 2 * self.known["rotary_dim/2"]
        self.fields["max_position"] = self.known["max_position"]

    def places(self, lead: str) -> None:
        """Operands that say where tokens lie in pages, as far as they are given; ``lead``: "B " of
        tokens with a batch axis."""
        for name, called in (("slot_mapping", "slots"), ("positions", "positions")):
            if name in self.infos:
                self.take(name, f"{lead}S", {"B": "batch", "S": "row"}, called)
        entries = "B"
        if "cu_seqlens" in self.infos:
            entries = "sequences"
            self.take("cu_seqlens", "sequences+1", {})
            self.known["sequences"] = self.known["sequences+1"] - 1
            self.fields["sequences"] = self.known["sequences"]
        elif not lead and (table := self.infos.get("block_table")) and {1, *table.shape[:1]} != {1}:
            rule = f"must say which rows an entry has: block_table is of {table.shape[0]}"
            raise InvalidValue("cu_seqlens", None, rule, "Give it, or rows with a batch axis")
        if "kv_lengths" in self.infos:
            self.take("kv_lengths", entries, {})
        if "block_table" in self.infos:
            self.take("block_table", f"{entries} width", {entries: "row"}, "table")
            self.fields["table_width"] = self.known["width"]

    def scales(self, name: str, pages: str) -> None:
        """Scales of pages: [H_kv] or one for all heads, given; with pages' axes, written."""
        info, heads = self.infos[name], self.known["H_kv"]
        known = self.fields.get("scales")
        if len(info.shape) == 3:
            labels = pages.replace("H", "H_kv").replace(" D", "")
            self._take_any(name, labels, {"P": "page", "H_kv": "head", "N": "row"})
            self.fields["scales"] = "tokens"
        elif info.shape in ((), (1,), (heads,)):
            step = info.strides[0] if info.shape == (heads,) and heads > 1 else 0
            self.fields |= {
                f"stride_{name}_{a}": s
                for a, s in zip(("page", "head", "row"), (0, step, 0), strict=True)
            }
            self.fields["scales"] = "heads"
        else:
            raise InvalidValue(
                name,
                f"an array of shape {list(info.shape)}",
                f"must be [H_kv={heads}], one number, or as the pages have rows",
                "Give the scales of heads, or memory for those of tokens",
            )
        if known not in (None, self.fields["scales"]):
            rule = f"k_scales are of {known}"
            raise InvalidValue(name, f"of {self.fields['scales']}", rule, "Let them be alike")

    def _take_any(self, name: str, labels: str, axes: Mapping[str, str]) -> None:
        """An operand whose axes may all be apart."""
        info, names = self.infos[name], labels.split()
        wanted = [self.known[n] for n in names]
        if list(info.shape) != wanted:
            shown = ", ".join(f"{n}={x}" for n, x in zip(names, wanted, strict=True))
            raise InvalidValue(
                name,
                f"an array of shape {list(info.shape)}",
                f"must be [{shown}]",
                "Check the axes",
            )
        for label, step in zip(names, canonical(info), strict=True):
            self.fields[f"stride_{name}_{axes[label]}"] = step

    def rows(self, name: str, labels: str) -> None:
        """An operand [B, S, columns], or [S, columns]."""
        self.take(name, labels, {"B": "batch", "S": "row"})


def qkv_fields(
    arrays: Mapping[str, object], layout: str, kv_layout: str, options: dict[str, Any]
) -> dict[str, Any]:
    """Extents and strides for the descriptor, and the views in place of the arrays; ``options`` are
    passed on.

    Raises InvalidValue for ranks and extents that do not fit.
    """
    labels, pages = (
        labels_of("layout", layout, LAYOUTS),
        labels_of("kv_layout", kv_layout, KV_LAYOUTS),
    )
    options = dict(options)
    infos = infos_of({**arrays, **{n: options.pop(n, None) for n in OPTIONAL}}, *arrays)
    read, lead = Read(infos), "B "
    if len(infos["input"].shape) == 2:  # one entry
        lead, labels = "", labels.replace("B ", "")
        read.known["B"] = 1
    read.rows("input", f"{lead}S hidden")
    read.heads("q", labels, "H")
    paged = "block_table" in infos or "slot_mapping" in infos
    for name in ("k", "v"):
        read.heads(name, pages if paged else labels, "H_kv")
    known = read.known
    known["columns"] = (known["H"] + 2 * known["H_kv"]) * known["D"]
    read.take("weight", "columns hidden", {"columns": "row"})
    if "bias" in infos:
        read.take("bias", "columns", {})
    read.rotation()
    read.places(lead)
    for name in ("k_scales", "v_scales"):
        if name in infos and paged:
            read.scales(name, pages)
    if paged:
        read.fields |= {"pages": known["P"], "page_size": known["N"]}
    extents = {
        "batch": "B",
        "S": "S",
        "hidden": "hidden",
        "num_heads": "H",
        "kv_heads": "H_kv",
        "head_dim": "D",
    }
    return {**read.fields, **{n: known[label] for n, label in extents.items()}, **options}


def output_fields(
    arrays: Mapping[str, object], layout: str, options: dict[str, Any]
) -> dict[str, Any]:
    """The same for the projection of an attention's result."""
    options = dict(options)
    infos = infos_of({**arrays, **{n: options.pop(n, None) for n in ("bias", "residual")}}, *arrays)
    read = Read(infos)
    lead = of_attn_out(read, ("attn_out",), layout)
    read.take("weight", "hidden columns", {"hidden": "row"})
    if "bias" in infos:
        read.take("bias", "hidden", {})
    for name in ("out", "residual"):
        if name in infos:
            read.rows(name, f"{lead}S hidden")
    return {**read.fields, **output_extents(read), **options}


def of_attn_out(read: Read, names: Sequence[str], layout: str) -> str:
    """Take attn_out, or an operand of its layout: [B, S, columns], [S, columns], or its heads in a
    layout. "B " where there is a batch axis."""
    labels = labels_of("layout", layout, LAYOUTS)
    lead = ""
    for name in names:
        rank = len(read.infos[name].shape)
        if rank == 4:
            lead = "B "
            read.heads(name, labels, "H")
            known = read.known
            known["columns"] = known["H"] * known["D"]
        else:
            lead = "B " if rank == 3 else ""
            read.rows(name, f"{lead}S columns")
    return lead


def output_extents(read: Read) -> dict[str, int]:
    """The extents of the descriptors; without a heads axis, one head over all columns."""
    known = {"B": 1, "H": 1, "D": read.known["columns"], **read.known}
    names = {"batch": "B", "S": "S", "hidden": "hidden", "num_heads": "H", "head_dim": "D"}
    return {n: known[label] for n, label in names.items()}


def qkv_bwd_fields(arrays: Mapping[str, object], layout: str) -> dict[str, Any]:
    """The same for the gradients of the projection to q, k and v."""
    labels = labels_of("layout", layout, LAYOUTS)
    infos = infos_of(arrays, "dq", "dk", "dv")
    read, lead = Read(infos), "B "
    if len(infos["dq"].shape) == 3:  # one entry
        lead, labels = "", labels.replace("B ", "")
        read.known["B"] = 1
    read.heads("dq", labels, "H")
    for name in ("dk", "dv"):
        read.heads(name, labels, "H_kv")
    known = read.known
    known["columns"] = (known["H"] + 2 * known["H_kv"]) * known["D"]
    _gradient_operands(read, f"{lead}S hidden", ("input", "d_input"), "columns hidden", "columns")
    extents = {"batch": "B", "S": "S", "num_heads": "H", "kv_heads": "H_kv", "head_dim": "D"}
    return {
        **read.fields,
        **{n: known[label] for n, label in extents.items()},
        "hidden": known.get("hidden", 0),
    }


def output_bwd_fields(arrays: Mapping[str, object], layout: str) -> dict[str, Any]:
    """The same for the gradients of the projection of an attention's result."""
    infos = infos_of(arrays, "d_output")
    read = Read(infos)
    lead = of_attn_out(read, [n for n in ("attn_out", "d_attn_out") if n in infos], layout)
    if not lead and len(infos["d_output"].shape) == 3:
        lead = "B "
    _gradient_operands(read, f"{lead}S hidden", ("d_output",), "hidden columns", "hidden")
    read.known.setdefault("columns", 0)
    return {**read.fields, **output_extents(read)}


def _gradient_operands(read: Read, rows: str, names: Sequence[str], weight: str, bias: str) -> None:
    for name in names:
        if name in read.infos:
            read.rows(name, rows)
    for name in ("weight", "d_weight"):
        if name in read.infos:
            read.take(name, weight, {weight.split()[0]: "row"})
    if "d_bias" in read.infos:
        read.take("d_bias", bias, {})
