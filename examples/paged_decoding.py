"""Decoding with a paged cache: a prompt at once, then token by token, each step held against dense
attention.

The model is one attention layer with random weights. Sequences of different lengths share a pool of
pages; a block table says which pages are whose, and grows by a page where a sequence fills its last
one.
"""

from __future__ import annotations

try:
    import kernelseam
    import numpy as np
except ModuleNotFoundError as e:
    raise SystemExit(f"{e.name} is missing: pip install kernelseam") from None

VOCABULARY, H, H_KV, D = 50, 8, 2, 32
PAGES, PAGE_SIZE, TABLE_WIDTH = 24, 8, 6
PROMPTS, STEPS = (13, 5, 16), 24
rng = np.random.default_rng(0)
embedding, to_q, to_k, to_v, to_logits = (
    rng.standard_normal(shape, np.float32) * np.float32(shape[0] ** -0.5)
    for shape in (
        (VOCABULARY, 64),
        (64, H * D),
        (64, H_KV * D),
        (64, H_KV * D),
        (H * D, VOCABULARY),
    )
)


class Cache:
    """Keys and values in pages, and whose pages they are."""

    def __init__(self, sequences: int) -> None:
        self.k, self.v = (
            np.full((PAGES, PAGE_SIZE, H_KV, D), np.nan, np.float32) for _ in range(2)
        )
        self.table = np.full((sequences, TABLE_WIDTH), -1, np.int32)
        self.lengths = np.zeros(sequences, np.int32)
        self.free = list(rng.permutation(PAGES))

    def append(self, b: int, k: np.ndarray, v: np.ndarray) -> None:
        """Put rows k and v [n, H_KV, D] behind those that sequence b has."""
        for key, value in zip(k, v, strict=True):
            page, row = divmod(int(self.lengths[b]), PAGE_SIZE)
            if row == 0:
                self.table[b, page] = self.free.pop()
            self.k[self.table[b, page], row], self.v[self.table[b, page], row] = key, value
            self.lengths[b] += 1


def project(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q [n, H, D], k and v [n, H_KV, D] of n tokens."""
    x = embedding[tokens]
    return (
        (x @ to_q).reshape(-1, H, D),
        (x @ to_k).reshape(-1, H_KV, D),
        (x @ to_v).reshape(-1, H_KV, D),
    )


def dense(tokens: np.ndarray) -> np.ndarray:
    """The layer's result [n, H, D] for a whole sequence, without a cache."""
    q, k, v = (x[None].swapaxes(1, 2) for x in project(tokens))
    return kernelseam.attention(q, k, v, causal=True)[0].swapaxes(0, 1)


def next_tokens(rows: np.ndarray) -> np.ndarray:
    """The likeliest token behind each row of the layer's result."""
    return (rows.reshape(len(rows), -1) @ to_logits).argmax(axis=1)


def main() -> None:
    cache = Cache(len(PROMPTS))
    prompts = [rng.integers(0, VOCABULARY, n) for n in PROMPTS]

    # All prompts in one launch: their rows one after the other, their keys already in pages.
    parts = [project(tokens) for tokens in prompts]
    for b, (_, k, v) in enumerate(parts):
        cache.append(b, k, v)
    offsets = np.cumsum([0, *PROMPTS]).astype(np.int32)
    out = kernelseam.attention_paged(
        np.concatenate([q for q, _, _ in parts]),
        cache.k,
        cache.v,
        cache.table,
        cache.lengths,
        cu_seqlens_q=offsets,
        max_seqlen_q=max(PROMPTS),
        causal=True,
    )
    worst = max(
        abs(out[a:b] - dense(t)).max()
        for a, b, t in zip(offsets, offsets[1:], prompts, strict=False)
    )
    print(
        f"prompts of {', '.join(map(str, PROMPTS))} tokens in {(cache.table >= 0).sum()} pages: "
        f"off by {worst:.1e}"
    )
    assert worst < 1e-5

    launches = 0
    last = out[offsets[1:] - 1]
    for _ in range(STEPS):
        drawn = next_tokens(last)
        q, k, v = project(drawn)
        for b, token in enumerate(drawn):
            prompts[b] = np.append(prompts[b], token)
            cache.append(b, k[b : b + 1], v[b : b + 1])
        with kernelseam.trace() as records:
            last = kernelseam.attention_paged(
                q[:, None], cache.k, cache.v, cache.table, cache.lengths
            )[:, 0]
        launches += len(records)
        worst = max(
            worst, *(abs(last[b] - dense(prompts[b])[-1]).max() for b in range(len(prompts)))
        )
    again = [list(next_tokens(dense(t[:-1])[-1:])) == [t[-1]] for t in prompts]
    print(
        f"{STEPS} tokens each in {launches} launches, {', '.join(map(str, cache.lengths))} keys in "
        f"{(cache.table >= 0).sum()} pages: off by {worst:.1e} at most from dense attention"
    )
    assert worst < 1e-5 and all(again)
    print("dense attention draws the same tokens")


if __name__ == "__main__":
    main()
