"""``kernelseam.interop.diffusers`` with the real diffusers, on small models that are made here."""

from __future__ import annotations

import logging
import subprocess
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kernelseam.errors import InvalidValue
from kernelseam.interop import diffusers as interop

torch = pytest.importorskip("torch", reason="torch is missing")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what diffusers imports
    diffusers = pytest.importorskip("diffusers", reason="diffusers is missing")
    from diffusers import FluxTransformer2DModel, WanTransformer3DModel
    from diffusers.models import attention_dispatch as dispatcher

Models = dict[str, Callable[[], tuple[Any, dict[str, Any]]]]


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    logging.getLogger("diffusers").setLevel(logging.ERROR)
    active = dispatcher._AttentionBackendRegistry._active_backend
    assert interop.register() == ("kernelseam",)
    yield
    dispatcher._AttentionBackendRegistry.set_active_backend(active)


def normal(seed: int, *shape: int) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def flux() -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(0)
    model = FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )
    return model, {
        "hidden_states": normal(1, 2, 16, 4),
        "encoder_hidden_states": normal(2, 2, 7, 32),
        "pooled_projections": normal(3, 2, 32),
        "timestep": torch.tensor([1.0, 0.5]),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(7, 3),
    }


def wan() -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(0)
    model = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=32,
        ffn_dim=32,
        num_layers=2,
    )
    return model, {
        "hidden_states": normal(1, 1, 4, 2, 8, 8),
        "encoder_hidden_states": normal(2, 1, 9, 16),
        "timestep": torch.tensor([3]),
    }


MODELS: Models = {"flux": flux, "wan": wan}


@pytest.mark.parametrize("name", MODELS)
def test_models_and_a_training_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from kernelseam.interop import diffusers_attention

    calls: list[Any] = []
    actual: dict[str, Any] = {}

    def counted(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments[0].shape)
        return sdpa(*arguments, **options)

    sdpa = diffusers_attention.scaled_dot_product_attention
    monkeypatch.setattr(diffusers_attention, "scaled_dot_product_attention", counted)
    for backend in ("native", "kernelseam"):
        model, inputs = MODELS[name]()
        model.set_attention_backend(backend)
        assert bool(calls) is False
        out = model(**inputs, return_dict=False)[0]
        out.square().mean().backward()
        actual[backend] = (out.detach(), {n: p.grad for n, p in model.named_parameters()})
    assert len(calls) == {"flux": 2, "wan": 4}[name]
    torch.testing.assert_close(actual["kernelseam"][0], actual["native"][0], rtol=1e-4, atol=1e-5)
    slopes, expected = actual["kernelseam"][1], actual["native"][1]
    assert sum(g is not None for g in slopes.values()) > 10
    for parameter, slope in slopes.items():
        if expected[parameter] is None:
            assert slope is None
        else:
            torch.testing.assert_close(slope, expected[parameter], rtol=1e-3, atol=1e-6)


MASKS = {
    "none": lambda: None,
    "keys": lambda: torch.arange(11)[None] < torch.tensor([[11], [6]]),
    "rows": lambda: normal(5, 9, 11) > -1,
    "added": lambda: normal(5, 2, 1, 9, 11),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("gqa", [False, True])
def test_what_the_dispatcher_passes(mask: str, gqa: bool) -> None:
    heads = 2 if gqa else 4
    q, k, v = normal(0, 2, 9, 4, 16), normal(1, 2, 11, heads, 16), normal(2, 2, 11, heads, 16)
    given = {"attn_mask": MASKS[mask](), "enable_gqa": gqa, "scale": 0.2}
    expected = dispatcher.dispatch_attention_fn(q, k, v, **given)
    with dispatcher.attention_backend("kernelseam"):
        actual = dispatcher.dispatch_attention_fn(q, k, v, **given)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    named = dispatcher.dispatch_attention_fn(q, k, v, **given, backend="kernelseam")
    assert torch.equal(named, actual)
    if mask == "none":
        causal = {**given, "is_causal": True, "backend": "kernelseam"}
        expected = dispatcher.dispatch_attention_fn(q, k, v, **given, is_causal=True)
        actual = dispatcher.dispatch_attention_fn(q, k, v, **causal)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_compiled_whole() -> None:
    model, inputs = flux()
    model.set_attention_backend("kernelseam")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        expected = model(**inputs, return_dict=False)[0]
        actual = compiled(**inputs, return_dict=False)[0]
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_what_is_refused() -> None:
    q = normal(0, 1, 4, 2, 16)
    dispatch = dispatcher.dispatch_attention_fn
    with pytest.raises(InvalidValue) as caught:
        dispatch(q, q, q, dropout_p=0.5, backend="kernelseam")
    assert str(caught.value) == ("dropout_p = 0.5: must be 0. Drop out outside of the attention.")
    with pytest.raises(InvalidValue) as caught:
        dispatch(q, q, q, backend="kernelseam", parallel_config=types.SimpleNamespace())
    assert str(caught.value) == (
        "_parallel_config = SimpleNamespace: context parallelism is diffusers' own, for its "
        'backends. Choose one of them: model.set_attention_backend("native").'
    )
    with pytest.raises(InvalidValue, match=r"^window = 3: is not an option .*attention_kwargs"):
        dispatch(q, q, q, attention_kwargs={"window": 3}, backend="kernelseam")
    given = dispatch(q, q, q, attention_kwargs={"window": None}, backend="kernelseam")
    assert torch.equal(given, dispatch(q, q, q, backend="kernelseam"))


def test_registering_again_changes_nothing() -> None:
    names = list(dispatcher.AttentionBackendName)
    assert interop.register() == ("kernelseam",) and list(dispatcher.AttentionBackendName) == names
    assert [n.value for n in names].count("kernelseam") == 1
    assert dispatcher.AttentionBackendName.KERNELSEAM == "kernelseam"


def test_another_diffusers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as changed:
        changed.setattr(diffusers, "__version__", "0.35.1")
        with pytest.raises(InvalidValue) as caught:
            interop.register()
    assert str(caught.value) == (
        "diffusers = 0.35.1: must be 0.42 or later. pip install 'diffusers>=0.42' (tested with "
        "0.42.1)."
    )
    monkeypatch.delattr(dispatcher, "_AttentionBackendRegistry")
    with pytest.raises(InvalidValue, match="its attention dispatcher is not the one that is known"):
        interop.register()


def test_importing_it_imports_no_diffusers() -> None:
    code = (
        "import sys, kernelseam.interop.diffusers as d; sys.modules['diffusers'] = None\n"
        "try:\n    d.register()\nexcept ValueError as e:\n    print(e)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == (
        "diffusers = None: is not installed. pip install 'diffusers>=0.42' (tested with 0.42.1).\n"
    )
