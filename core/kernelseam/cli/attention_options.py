"""The options that describe an attention, shared by every command that takes one."""

from __future__ import annotations

from dataclasses import field, fields, replace
from typing import Annotated, Any, TypeVar, get_type_hints

import numpy as np
import typer

from kernelseam.cli import shapes
from kernelseam.cli.asked import over_placeholders
from kernelseam.cli.with_options import WithOptions
from kernelseam.descriptors.attention.options import ScoreNumbers
from kernelseam.descriptors.attention.problem import AttentionProblem
from kernelseam.descriptors.common.options import options_of, scalars_of
from kernelseam.descriptors.common.protocol import Descriptor
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue
from kernelseam.frozen import dataclass
from kernelseam.samples.attention_bwd_case import BackwardCase
from kernelseam.samples.attention_case import AttentionCase
from kernelseam.samples.mods import in_files
from kernelseam.samples.operand_layout import OperandLayout

EXTENTS = ("batch", "heads", "seq_len", "kv_seq_len", "head_dim", "kv_heads", "value_dim")
PAGE_SIZE = 16
_NUMBERS = scalars_of(ScoreNumbers)
T = TypeVar("T")


def _flag(default: T, help: str, **typer_options: Any) -> T:
    """An option that no other command has, by the field's name."""
    return field(default=default, metadata={"flag": {"help": help, **typer_options}})


@dataclass(frozen=True)
class AttentionOptions(ScoreNumbers):
    """The attention that the command line asks for."""

    batch: shapes.Batch = None
    heads: shapes.Heads = None
    seq_len: shapes.SeqLen = None
    kv_seq_len: shapes.KvSeqLen = None
    head_dim: shapes.HeadDim = None
    kv_heads: shapes.KvHeads = None
    value_dim: shapes.ValueDim = None
    causal: shapes.Causal = False
    dtype: shapes.Dtype = None
    layout: shapes.AttentionLayout = "bhsd"
    precision: shapes.Precision = None
    window: str | None = _flag(None, "LEFT,RIGHT: a sliding window; a side left out has no bound.")
    alibi: bool = _flag(False, "Slopes 2^(-8(h+1)/H).")
    bias: str | None = _flag(None, "An additive bias of this dtype: float32, or that of --dtype.")
    mask_density: float | None = _flag(
        None, "A random mask with this share of visible keys.", min=0, max=1
    )
    sinks: bool = _flag(False, "A random sink for each head.")
    prefix: int | None = _flag(None, "Leading keys that every query sees (prefix LM).", min=0)
    kv_lengths: bool = _flag(False, "Random key lengths, up to --kv-seq-len.")
    score_mod: str | None = _flag(
        None, "A function (score, b, h, q_idx, kv_idx).", metavar="FILE:NAME"
    )
    mask_mod: str | None = _flag(None, "A function (b, h, q_idx, kv_idx).", metavar="FILE:NAME")
    block_mask: int | None = _flag(
        None, "Queries and keys of blocks that --mask-mod is given by.", min=1
    )
    paged: bool = _flag(False, "Keys and values in shuffled pages.")
    page_size: int | None = _flag(None, f"Keys per page. [{PAGE_SIZE}]", min=1)
    shared_pages: int | None = _flag(
        None, "Leading pages of all entries, read once for all of them.", min=0
    )
    latent: bool = _flag(False, "Values are the first columns of the keys (MLA).")
    varlen: bool = _flag(False, "Packed sequences of random lengths, up to --seq-len.")
    backward: bool = _flag(False, "Compute the gradients.")
    any_order: bool = _flag(
        False, "Gradients may be summed in any order (nondeterministic, faster)."
    )
    return_lse: bool = _flag(False, "Return the log-sum-exp of the scores, too.")
    kv_dtype: str | None = _flag(
        None, "Of keys and values stored in 8 bits: float8_e4m3fn or float8_e4m3fnuz."
    )
    q_dtype: str | None = _flag(
        None, "Of queries, keys and values all stored in 8 bits; --dtype is the result's."
    )
    kv_scales: str | None = _flag(
        None,
        "Random scales of --kv-dtype, and of --q-dtype: one a tensor, heads, entries (and "
        "heads) or blocks.",
    )
    scale_block: int | None = _flag(
        None, "Keys that share a scale, with --kv-scales blocks.", min=1
    )
    row_scale_block: int | None = _flag(None, "Columns that share a scale in latent rows.", min=1)
    batch_invariant: bool = _flag(False, "A row's bits do not depend on the rest of the batch.")

    def __post_init__(self) -> None:
        """Refuse options that exclude each other; the descriptor checks the rest."""
        shapes.one_of("layout", self.layout, "bhsd", "bshd")
        if self.kv_scales is not None:
            shapes.one_of("--kv-scales", self.kv_scales, "tensor", "heads", "entries", "blocks")
        refused = {
            "--page-size": (not self.paged, "it is that of pages", "Give --paged too"),
            "--shared-pages": (not self.paged, "they are pages", "Give --paged too"),
            "--block-mask": (self.mask_mod is None, "it is how --mask-mod is given", "Give it too"),
            "--latent": (self.backward, "it has no gradients", "Leave one of the two out"),
            "--kv-lengths": (
                self.varlen and not self.paged,
                "the sequences of --varlen have lengths of their own",
                "Give one of the two",
            ),
            "--layout": (
                self.varlen and self.layout != "bhsd",
                "the rows of --varlen lie in one order",
                "Leave it out",
            ),
            "--backward": (self.paged, "pages have no gradients", "Leave --paged out"),
            "--kv-dtype": (
                self.backward,
                "keys and values of 8 bits have no gradients",
                "Leave one of the two out",
            ),
            "--q-dtype": (
                self.backward or self.kv_dtype is not None,
                "queries, keys and values of 8 bits share their dtype and have no gradients",
                "Leave --backward and --kv-dtype out",
            ),
            "--kv-scales": (
                self.kv_dtype is None and self.q_dtype is None,
                "scales are for keys and values of 8 bits",
                "Give --kv-dtype too",
            ),
            "--row-scale-block": (
                not (self.latent and self.kv_dtype),
                "scales lie in the rows of latent keys of 8 bits",
                "Give --latent and --kv-dtype too",
            ),
            "--any-order": (not self.backward, "it is about gradients", "Give --backward too"),
            "--return-lse": (self.backward, "gradients take it in any case", "Leave it out"),
            "--prefix": (
                not self.causal and self.window is None,
                "every key is seen anyway",
                "Give --causal or --window too",
            ),
        }
        for option, (wrong, rule, remedy) in refused.items():
            value = getattr(self, option.removeprefix("--").replace("-", "_"))
            if wrong and shapes.given(value):
                raise InvalidValue(option, "given" if value is True else value, rule, remedy)
        if (self.scale_block is not None) != (self.kv_scales == "blocks"):
            rule = "blocks of keys have scales with --kv-scales blocks"
            raise InvalidValue("--scale-block", self.scale_block, rule, "Give both or neither")

    @property
    def changes(self) -> tuple[str, ...]:
        """The given options that change the result: any other than dense, unmasked attention with
        plain scores."""
        names = (
            "causal",
            "window",
            *_NUMBERS,
            "alibi",
            "bias",
            "mask_density",
            "sinks",
            "prefix",
            "kv_lengths",
            "score_mod",
            "mask_mod",
        )
        return tuple(n.replace("_", "-") for n in names if shapes.given(getattr(self, n)))

    def refuse_for_file(self) -> None:
        """Refuse options whose values come from the file."""
        for name in EXTENTS:
            if (value := getattr(self, name)) is not None:
                raise InvalidValue(
                    f"--{name.replace('_', '-')}",
                    value,
                    "the extents are the file's",
                    "Leave it out",
                )
        for option, dtype in (("--kv-dtype", self.kv_dtype), ("--q-dtype", self.q_dtype)):
            if dtype is not None:
                raise InvalidValue(option, dtype, "the dtypes are the file's", "Leave it out")
        for name in ("varlen", "paged", "latent"):
            if getattr(self, name):
                raise InvalidValue(
                    f"--{name}", "given", "the file's arrays are dense", "Leave it out, or --input"
                )

    def case(self, seed: int = 0) -> AttentionCase:
        heads, seq_len = shapes.default(self.heads, 8), shapes.default(self.seq_len, 512)
        head_dim = shapes.default(self.head_dim, 64)
        return self._case(
            seed,
            shapes.dtype_of(
                "float16" if self.dtype is None else self.dtype,
                "dtype",
                narrow="--q-dtype, or --kv-dtype for keys and values alone",
            ),
            shapes.default(self.batch, 1),
            heads,
            shapes.default(self.kv_heads, heads),
            seq_len,
            shapes.default(self.kv_seq_len, seq_len),
            head_dim,
            shapes.default(self.value_dim, head_dim),
        )

    def case_of(self, problem: AttentionProblem, seed: int = 0) -> AttentionCase:
        """The case of a file's arrays, with the extents of ``problem``."""
        p, s = problem, problem.spec
        return self._case(
            seed, s.dtype, p.batch, p.num_heads, p.kv_heads, p.S_q, p.S_k, s.head_dim, s.value_dim
        )

    def _case(
        self,
        seed: int,
        dtype: DType,
        batch: int,
        heads: int,
        kv_heads: int,
        S_q: int,
        S_k: int,
        head_dim: int,
        value_dim: int,
    ) -> AttentionCase:
        rng = np.random.default_rng(seed)

        def lengths(longest: int) -> tuple[int, ...]:
            """One entry has the longest."""
            drawn = rng.integers(min(longest, 1), longest + 1, batch)
            return (*(int(n) for n in drawn[1:]), *((longest,) if batch else ()))

        tokens, tight = OperandLayout(order="brh", aligned=False), OperandLayout(aligned=False)
        dense = tokens if self.layout == "bshd" else tight
        queries, keys = (tokens if x else dense for x in (self.varlen, self.varlen or self.paged))
        case = AttentionCase(
            f"seed {seed}",
            dtype,
            head_dim,
            value_dim,
            S_q,
            S_k,
            batch,
            heads,
            kv_heads,
            lse=self.return_lse or self.backward,
            q=queries,
            k=keys,
            v=keys,
            out=queries,
            causal=self.causal,
            scale=None if head_dim else 1.0,
            window=_window(self.window),
            precision=self.precision,
            **{n: getattr(self, n) for n in _NUMBERS},
            alibi=tuple(2.0 ** (-8 * (h + 1) / heads) for h in range(heads)) if self.alibi else (),
            bias=None if self.bias is None else shapes.dtype_of(self.bias, "--bias"),
            bias_layout=OperandLayout(aligned=False, broadcast="b"),
            mask="" if self.mask_density is None else "random",
            mask_layout=OperandLayout(aligned=False, broadcast="h"),
            sinks=tuple(float(x) for x in rng.standard_normal(heads)) if self.sinks else (),
            prefix=None if self.prefix is None else (self.prefix,) * batch,
            batch_invariant=self.batch_invariant,
            latent=self.latent,
            row_scale_block=self.row_scale_block,
            dtype_q=shapes.stored_dtype(self.q_dtype, "--q-dtype"),
            dtype_kv=shapes.stored_dtype(self.q_dtype, "--q-dtype")
            or shapes.stored_dtype(self.kv_dtype, "--kv-dtype"),
            scales=self.kv_scales or "",
            scale_block=self.scale_block,
            mods=in_files(self.score_mod, self.mask_mod),
            blocks=None if self.block_mask is None else (self.block_mask, self.block_mask),
        )
        if self.varlen:
            case = replace(case, q_sequences=lengths(S_q))
        if self.paged:
            size = PAGE_SIZE if self.page_size is None else self.page_size
            kv_lengths = lengths(S_k) if self.kv_lengths or self.varlen else (S_k,) * batch
            case = replace(case, page_size=size, kv_lengths=kv_lengths)
            return case if self.shared_pages is None else _shared(case, self.shared_pages)
        if self.varlen:
            return replace(case, k_sequences=case.q_sequences if S_q == S_k else lengths(S_k))
        return replace(case, kv_lengths=lengths(S_k)) if self.kv_lengths else case

    def backward_case(self, case: AttentionCase) -> BackwardCase:
        """The gradients of a case, including those of its bias and sinks."""
        return BackwardCase(
            case.name,
            case,
            case.out,
            case.q,
            case.k,
            case.v,
            bias_gradient=case.bias is not None,
            dbias=OperandLayout(aligned=False),
            sink_gradient=bool(case.sinks),
            deterministic=not self.any_order,
        )

    def descriptor(self) -> Descriptor:
        """The descriptor, over placeholder addresses. Raises InvalidValue."""
        case = self.case()
        return over_placeholders(self.backward_case(case) if self.backward else case)


def _shared(case: AttentionCase, pages: int) -> AttentionCase:
    """All entries of a paged case begin with the same pages."""
    fewest = min((n // case.page_size for n in case.kv_lengths or ()), default=0)
    if pages > fewest:
        raise InvalidValue(
            "--shared-pages",
            pages,
            f"the shortest entry fills {fewest}",
            "Give fewer, or more keys",
        )
    shared = tuple(pages * (b > 0) for b in range(case.batch))
    return replace(case, shared_pages=shared, prefix_groups=1)


def _window(text: str | None) -> tuple[int | None, int | None] | None:
    if text is None:
        return None
    sides = [side.strip() for side in text.split(",")]
    if len(sides) != 2 or not all(side in ("", "-") or side.isdecimal() for side in sides):
        raise InvalidValue(
            "--window",
            text,
            "must be LEFT,RIGHT",
            "For example 127,0; a side left out has no bound",
        )
    left, right = (int(side) if side.isdecimal() else None for side in sides)
    return left, right


def _hints() -> dict[str, Any]:
    """The types of the fields with typer's options, those of the record with its words."""
    hints = get_type_hints(AttentionOptions, include_extras=True)
    words = {f.name: f.metadata["flag"] for f in fields(AttentionOptions) if "flag" in f.metadata}
    words |= {n: {"help": o.says} for n, o in options_of(AttentionOptions).items()}
    for name, more in words.items():
        flag = f"--{name.replace('_', '-')}"
        hints[name] = Annotated[hints[name], typer.Option(flag, **more)]
    return hints


with_attention_options = WithOptions(AttentionOptions, hints=_hints())
"""A decorator of a command whose first parameter is an AttentionOptions."""
