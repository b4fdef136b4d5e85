"""One problem of another project's tests, and the verdict on what kernelseam makes of it.

The rule is FlashAttention's: the largest error may be twice that of the same formula computed in
the problem's dtype (three times for gradients), and what rounding a result once more would cost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from kernelseam.interop import torch as ours

Shape = tuple[int, ...]
FACTOR, GRADIENT_FACTOR = 2, 3
DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}


@dataclass(frozen=True)
class Case:
    """An attention. Shapes are [batch, heads, rows, dim]."""

    name: str
    q: Shape
    k: Shape
    v: Shape
    dtype: str = "f32"
    scale: float | None = None
    softcap: float | None = None
    causal: str = ""
    """"top left" or "bottom right": where the diagonal begins or ends."""
    window: tuple[int | None, int | None] | None = None
    """Keys to the left and right of the diagonal that ends at the bottom right."""
    slopes: bool = False
    """ALiBi as FlashAttention has it: minus the distance to the diagonal, times a head's slope."""
    bias: Shape | None = None
    mask: Shape | None = None
    """Shape of a mask of bool."""
    score_mod: Callable[..., Any] | None = None
    mask_mod: Callable[..., Any] | None = None
    q_lengths: tuple[int, ...] | None = None
    """Packed sequences, with ``k_lengths``; the batch is then their number."""
    k_lengths: tuple[int, ...] | None = None
    page_size: int = 0
    """Keys in pages, of which each entry has its ``k_lengths``."""
    gradients: bool = False

    @property
    def elements(self) -> int:
        """Scores: what a case costs."""
        return self.q[0] * self.q[1] * self.q[2] * self.k[2]


@dataclass(frozen=True)
class Operands:
    """The tensors of a case, in its dtype."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    bias: torch.Tensor | None
    mask: torch.Tensor | None
    slopes: torch.Tensor | None


def operands(case: Case) -> Operands:
    """Of seeded values: normal ones, masks that hide a quarter but never a whole row."""
    random = torch.Generator().manual_seed(len(case.name) + case.elements)
    dtype = DTYPES[case.dtype]

    def normal(shape: Shape) -> torch.Tensor:
        return torch.randn(shape, generator=random).to(dtype)

    mask = None
    if case.mask is not None:
        mask = torch.rand(case.mask, generator=random) > 0.25
        mask[..., 0] = True
    slopes = torch.rand(case.q[1], generator=random) * 0.3 if case.slopes else None
    bias = None if case.bias is None else normal(case.bias)
    return Operands(normal(case.q), normal(case.k), normal(case.v), bias, mask, slopes)


def visible(case: Case, given: Operands) -> torch.Tensor:
    """Which keys a query sees: bool, broadcast against [batch, heads, S_q, S_k]."""
    s_q, s_k = case.q[2], case.k[2]
    i, j = torch.arange(s_q)[:, None], torch.arange(s_k)[None, :]
    rows, columns = torch.tensor(s_q), torch.tensor(s_k)
    if case.q_lengths is not None:
        rows = torch.tensor(case.q_lengths)[:, None, None, None]
    if case.k_lengths is not None:
        columns = torch.tensor(case.k_lengths)[:, None, None, None]
    seen = (i < rows) & (j < columns)
    diagonal = i + columns - rows if case.causal != "top left" else i
    if case.causal:
        seen = seen & (j <= diagonal)
    if case.window is not None:
        left, right = case.window
        seen = seen & ((j >= diagonal - left) if left is not None else True)
        seen = seen & ((j <= diagonal + right) if right is not None else True)
    if given.mask is not None:
        seen = seen & given.mask
    if case.mask_mod is not None:
        seen = seen & case.mask_mod(*_indices(case))
    return seen


def _indices(case: Case) -> tuple[torch.Tensor, ...]:
    batch, heads, s_q, _ = case.q
    b, h = torch.arange(batch)[:, None, None, None], torch.arange(heads)[:, None, None]
    return b, h, torch.arange(s_q)[:, None], torch.arange(case.k[2])[None, :]


def formula(case: Case, given: Operands, q: Any, k: Any, v: Any, dtype: Any) -> torch.Tensor:
    """softmax(score)·v, every step in one dtype; rows that see nothing are 0."""
    q, k, v = (x.to(dtype) for x in (q, k, v))
    group = case.q[1] // case.k[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    score = q @ k.mT * (case.q[3] ** -0.5 if case.scale is None else case.scale)
    if case.softcap is not None:
        score = case.softcap * torch.tanh(score / case.softcap)
    b, h, i, j = _indices(case)
    if given.slopes is not None:
        distance = (i + case.k[2] - case.q[2] - j).abs()
        score = score - given.slopes.to(dtype)[h] * distance
    if given.bias is not None:
        score = score + given.bias.to(dtype)
    if case.score_mod is not None:
        score = case.score_mod(score, b, h, i, j).to(dtype)
    seen = visible(case, given).expand(score.shape)
    score = score.masked_fill(~seen, float("-inf"))
    weights = torch.softmax(score, -1).masked_fill(~seen.any(-1, keepdim=True), 0.0)
    return weights @ v


def computed(case: Case, given: Operands, q: Any, k: Any, v: Any) -> torch.Tensor:
    """By kernelseam, through the function that the case's layout has; [batch, heads, S_q, dim]."""
    options: dict[str, Any] = {
        "scale": case.scale,
        "softcap": case.softcap,
        "window": case.window,
        "causal": case.causal == "bottom right",
        "bias": given.bias,
        "mask": given.mask,
        "alibi_slopes": None if given.slopes is None else -given.slopes,
        "score_mod": case.score_mod,
        "mask_mod": case.mask_mod,
    }
    if case.slopes:  # its distance is absolute, ours grows to the left
        options |= {"alibi_slopes": None, "score_mod": _alibi(case, given)}
    if case.page_size:
        return _paged(case, q, k, v, options)
    if case.q_lengths is not None:
        return _packed(case, q, k, v, options)
    if case.causal == "top left":
        if given.bias is None and given.mask is None and case.softcap is None:
            return ours.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=case.scale, enable_gqa=case.q[1] != case.k[1]
            )
        assert given.mask is None
        options["mask"] = torch.ones(case.q[2], case.k[2]).tril().bool()
    result: torch.Tensor = ours.attention(q, k, v, **options)
    return result


def _alibi(case: Case, given: Operands) -> Callable[..., Any]:
    slopes, shift = given.slopes, case.k[2] - case.q[2]
    assert slopes is not None

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score - slopes[h] * abs(q_idx + shift - kv_idx)

    return score_mod


def _packed(case: Case, q: Any, k: Any, v: Any, options: dict[str, Any]) -> torch.Tensor:
    assert case.q_lengths is not None and case.k_lengths is not None

    def rows(x: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
        return torch.cat([x[b, :, :n].transpose(0, 1) for b, n in enumerate(lengths)])

    def ends(lengths: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor((0, *lengths)).cumsum(0).to(torch.int32)

    out = ours.attention_varlen(
        rows(q, case.q_lengths),
        rows(k, case.k_lengths),
        rows(v, case.k_lengths),
        ends(case.q_lengths),
        ends(case.k_lengths),
        max(case.q_lengths),
        max(case.k_lengths),
        **options,
    )
    parts = out.split(list(case.q_lengths))
    height = case.q[2]
    return torch.stack(
        [torch.nn.functional.pad(p.transpose(0, 1), (0, 0, 0, height - p.shape[0])) for p in parts]
    )


def _paged(case: Case, q: Any, k: Any, v: Any, options: dict[str, Any]) -> torch.Tensor:
    assert case.k_lengths is not None
    batch, heads, length, dim = case.k
    width, size = -(-length // case.page_size), case.page_size

    def pages(x: torch.Tensor) -> torch.Tensor:
        padded = torch.nn.functional.pad(x, (0, 0, 0, width * size - length))
        cut = padded.reshape(batch, heads, width, size, -1).permute(0, 2, 3, 1, 4)
        return cut.reshape(batch * width, size, heads, -1).flip(0).contiguous()

    table = torch.arange(batch * width).flip(0).reshape(batch, width).to(torch.int32)
    lengths = torch.tensor(case.k_lengths, dtype=torch.int32)
    out = ours.attention_paged(q.transpose(1, 2), pages(k), pages(v), table, lengths, **options)
    assert isinstance(out, torch.Tensor)
    return out.transpose(1, 2)


def verdict(case: Case) -> str | None:
    """None where the case passes, else what is wrong."""
    given = operands(case)

    def run(function: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        leaves = [x.detach().requires_grad_(case.gradients) for x in (given.q, given.k, given.v)]
        out = function(*leaves)
        if not case.gradients:
            return [out.detach()]
        out.backward(torch.ones_like(out) * 0.5)
        return [out.detach(), *[x.grad for x in leaves if x.grad is not None]]

    def by_formula(dtype: torch.dtype) -> Callable[..., torch.Tensor]:
        return lambda q, k, v: formula(case, given, q, k, v, dtype)

    try:
        found = run(lambda q, k, v: computed(case, given, q, k, v))
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    exact = run(lambda q, k, v: formula(case, given, q, k, v, torch.float64))
    plain = run(by_formula(DTYPES[case.dtype]))
    for n, (mine, right, low) in enumerate(zip(found, exact, plain, strict=True)):
        name = ("out", "dq", "dk", "dv")[n]
        error = (mine.double() - right).abs().max().item()
        theirs = (low.double() - right).abs().max().item()
        rounded = right.to(DTYPES[case.dtype])
        step = ((rounded + 0.3 - 0.3).double() - rounded.double()).abs().max().item()
        allowed = (GRADIENT_FACTOR if n else FACTOR) * theirs + 2 * step
        if not error <= allowed:
            return f"{name} is {error:.3g} away from float64, {allowed:.3g} is allowed"
    return None
