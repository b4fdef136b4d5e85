"""A rank's queries over the keys at hand: the calls of a plan, their states joined in float32, and
their gradients. A state is (result, LSE) of the keys seen so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from kernelseam.distributed.mods import Mods
from kernelseam.distributed.plan import Part
from kernelseam.interop import torch_attention

Tensor = Any


@dataclass(frozen=True, eq=False)
class Options:
    """What every call of one attention shares."""

    forward: Mapping[str, Any]
    """Numbers of scores, backend, implementation, batch_invariant."""
    backward: Mapping[str, Any]
    """Numbers of scores, backend, implementation, deterministic."""
    slopes: Tensor | None = None
    """[H] or [B, H]."""
    lengths: Tensor | None = None
    """int32 [B]: keys of the whole below it are seen (a prefix), or alone (lengths)."""
    states: Any = None
    """The dtype of a call's result before it is joined; None: that of sums."""
    mods: Mods | None = None
    """Scores and masks that depend on where queries and keys lie in the whole."""
    narrow: bool = False
    """The result is of q's dtype and nothing is joined to it later: one call that sees all keys may
    round it."""


@dataclass(eq=False)
class State:
    """Results [B, H, S_q, D_v] and LSEs [B, H, S_q] over the keys seen so far, in float32 (float64
    where q is)."""

    shape: tuple[int, ...]
    like: Tensor
    _out: Tensor | None = None
    _lse: Tensor | None = None

    @property
    def out(self) -> Tensor:
        self._begin()
        return self._out

    @property
    def lse(self) -> Tensor:
        self._begin()
        return self._lse

    def _begin(self) -> None:
        """Where nothing is joined yet, no key was seen."""
        if self._out is None:
            wide = wider(self.like.dtype)
            self._out = self.like.new_zeros(self.shape, dtype=wide)
            self._lse = self.like.new_full(self.shape[:-1], -torch.inf, dtype=wide)

    def add(self, first: int, out: Tensor, lse: Tensor, rounded: bool = False) -> None:
        """Join what rows first … saw of other keys; the state may keep both tensors. ``rounded``:
        nothing else will be joined, and the result may stay of its dtype."""
        rows = out.shape[2]
        if self._out is None and rows == self.shape[2]:
            self._out, self._lse = out if rounded else out.to(lse.dtype), lse
            return
        out = out.to(lse.dtype)
        so_far, sums = self.out[:, :, first : first + rows], self.lse[:, :, first : first + rows]
        # The part's share, e^b / (e^a + e^b). One that saw no key has none, whatever the other is;
        # NaN stays NaN.
        share = torch.sigmoid(lse - sums).masked_fill_(lse == -torch.inf, 0)
        so_far.lerp_(out, share.unsqueeze(-1))
        torch.logaddexp(sums, lse, out=sums)


def wider(dtype: Any) -> Any:
    """The dtype of sums."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def add_parts(
    state: State,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parts: Sequence[Part],
    options: Options,
    last: bool = False,
) -> None:
    """Join the state with what q [B, H, S_q, D] sees of k [B, H_kv, S_k, D] and v. ``last``: there
    are no other keys, before or after."""
    wide = wider(q.dtype)
    alone = last and options.narrow and len(parts) == 1 and parts[0].m == q.shape[2]
    narrow = alone or options.states == q.dtype
    for part in parts:
        operands, given, moved = _call(part, q, k, v, options)
        # The descriptor's results are q's dtype or float32.
        asked = {"out_dtype": "float32"} if wide == torch.float32 and not narrow else {}
        out, lse = torch_attention.forward(
            operands, {**options.forward, **given, **asked, "return_lse": True}
        )
        if part.offsets is not None:
            out, lse = out.transpose(0, 1).unsqueeze(0), lse.unsqueeze(0)
        state.add(part.query, out, lse if moved is None else lse + moved, alone)


def add_gradients(
    grads: tuple[Tensor, Tensor, Tensor],
    given: tuple[Tensor | None, Tensor | None],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    parts: Sequence[Part],
    options: Options,
) -> None:
    """Add to dq, dk and dv what comes of these keys, given the gradients of the result and of the
    LSE over all keys, and both of them."""
    for part in parts:
        operands, asked, moved = _call(part, q, k, v, options)
        rows = slice(part.query, part.query + part.m)
        keys = slice(part.key, part.key + part.n)
        of_rows = [None if x is None else x[:, :, rows] for x in (*given, out, lse)]
        if moved is not None:
            of_rows[3] = of_rows[3] - moved
        dout, dlse, result, sums = of_rows
        if part.offsets is not None:
            dout, result = (None if x is None else x[0].transpose(0, 1) for x in (dout, result))
            dlse, sums = (None if x is None else x[0] for x in (dlse, sums))
        gradients = torch_attention.gradients(
            dout,
            dlse,
            operands,
            result,
            sums,
            bias_gradient=False,
            sink_gradient=False,
            **options.backward,
            **asked,
        )
        for total, x, where in zip(grads, gradients[:3], (rows, keys, keys), strict=True):
            if part.offsets is not None:
                x = x.transpose(0, 1).unsqueeze(0)
            total[:, :, where] += x


def _call(
    part: Part, q: Tensor, k: Tensor, v: Tensor, options: Options
) -> tuple[dict[str, Tensor], dict[str, Any], Tensor | None]:
    """(operands, options, what the rows' LSEs lack) of a part's call."""
    q = q[:, :, part.query : part.query + part.m]
    k, v = (x[:, :, part.key : part.key + part.n] for x in (k, v))
    operands = {"q": q, "k": k, "v": v}
    given: dict[str, Any] = {}
    if part.window != (None, None):
        given["causal"] = part.window == (None, 0)
        if not given["causal"]:
            given["window"] = part.window
    if part.prefix or part.lengths:
        assert options.lengths is not None
        name = "prefix_lengths" if part.prefix else "kv_lengths"
        operands[name] = (options.lengths - part.first_key).clamp_(0, part.n).to(torch.int32)
    if options.mods is not None:
        given["score_mod"] = options.mods.of(part)
    moved = None
    if part.slopes == "diagonal":
        operands["alibi_slopes"] = options.slopes
    elif part.slopes:
        operands["bias"], moved = _apart(part, q, options.slopes)
    if part.offsets is not None:
        for name in "qkv":
            operands[name] = operands[name][0].transpose(0, 1)
        offsets = _on_device(part.offsets, q.device)
        operands["cu_seqlens_q"] = operands["cu_seqlens_k"] = offsets
        most = max(b - a for a, b in zip(part.offsets, part.offsets[1:], strict=False))
        given["max_seqlen_q"] = given["max_seqlen_k"] = most
    return operands, given, moved


def _apart(part: Part, q: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
    """ALiBi where all keys lie on one side: −slope·|d| is a number of the key, a bias that repeats
    along the queries, and one of the query, which moves its LSE and nothing else. Both are of
    distances within the part, so that they are small where the part is."""
    slope = slopes.to(wider(q.dtype)).reshape(-1, q.shape[1], 1)
    key = torch.arange(part.n, device=q.device, dtype=slope.dtype)
    row = torch.arange(part.m, device=q.device, dtype=slope.dtype)
    if part.slopes == "before":
        gap = part.first_query - (part.first_key + part.n - 1)
        key, row = part.n - 1 - key, row + gap
    else:
        gap = part.first_key - (part.first_query + part.m - 1)
        row = part.m - 1 - row + gap
    return (-slope * key).unsqueeze(2), -slope * row


@lru_cache(maxsize=64)
def _on_device(offsets: tuple[int, ...], device: Any) -> Tensor:
    return torch.tensor(offsets, dtype=torch.int32, device=device)
