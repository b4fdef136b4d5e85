"""Sums of listed rows of torch tensors on a GPU: ours beside torch's in float64."""

from __future__ import annotations

from unittest import mock

import pytest
from torch_gpu import torch

pytestmark = pytest.mark.gpu
from kernelseam.interop.torch_library import bags as bags_module  # noqa: E402
from kernelseam.interop.torch_library.bags import Bags  # noqa: E402

UNIT = {torch.float16: 2**-11, torch.bfloat16: 2**-8, torch.float32: 2**-24, torch.float64: 2**-53}


@pytest.mark.parametrize(("columns", "stride"), [(2048, 2048), (512, 520), (33, 33), (64, 71)])
@pytest.mark.parametrize("dtype", UNIT, ids=str)
def test_sums(dtype: object, columns: int, stride: int) -> None:
    torch.manual_seed(columns)
    x = torch.randn(3000, stride, device="cuda").to(dtype)[:, :columns]
    places = torch.randint(0, 1000, (3000,), device="cuda", dtype=torch.int32)
    places[places == 7] = 8
    bags = Bags.of(places, 1001)
    with mock.patch.object(bags_module, "embedding_bag") as by_torch:
        found, again = bags.added(x), bags.added(x)
        part = bags.part(100, 900).added(x)
        plus = torch.randn(2, 1001, columns, device="cuda").to(dtype)
        more = bags.added(x, plus=plus).double() - found.double()
    assert not by_torch.called, "one launch of ours"
    assert torch.equal(found, again) and torch.equal(found[100:900], part)
    wide = x.double()
    wanted, sizes = (bags._by_torch(y.contiguous()) for y in (wide, wide.abs()))
    assert not found[[7, 1000]].any()
    of_plus = plus.double().sum(0)
    assert float((more - of_plus).abs().max()) < 8 * UNIT[dtype] * float(wanted.abs().max() + 8)
    assert float(((found.double() - wanted).abs() / sizes.clamp(min=1e-3)).max()) < 4 * UNIT[dtype]
