"""On an NVIDIA GPU: results of empty reductions, over memory that held NaN."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from empty_reductions import CASES, Array, Case
from kernelseam.errors import Unsupported
from kernelseam_cuda import arrays
from nvidia_gpu import cupy

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _memory_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = arrays.empty

    def made(*args: Any) -> Any:
        x = empty(*args)
        x[...] = np.nan
        return x

    monkeypatch.setattr(arrays, "empty", made)


def there(x: Array) -> Any:
    """An array of the host's in device memory, with its strides of 0."""
    if not x.size:
        return cupy.asarray(x)
    return cupy.broadcast_to(
        cupy.asarray(x[tuple(slice(0, 1) if s == 0 else slice(None) for s in x.strides)]), x.shape
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cuda(case: Case) -> None:
    if case.refused:  # by name, before any launch
        with pytest.raises(
            Unsupported, match=rf"shared: {case.refused} = 0: it takes 1 and more[.;]"
        ):
            case.call(there)
        return
    case.check([x.get() for x in case.call(there)])
