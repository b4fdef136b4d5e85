"""Results of empty reductions, through the shared kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from empty_reductions import CASES, Case
from kernelseam.descriptors import Attention, AttentionBwd
from kernelseam.errors import Unsupported
from kernelseam.planning import plan
from kernelseam.plugins import Plugins
from kernelseam_hostcpp import HostArray

Array = np.ndarray[Any, Any]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_shared(hostcpp: Plugins, case: Case) -> None:
    if case.refused:  # by name, before any launch
        with pytest.raises(
            Unsupported, match=rf"shared: {case.refused} = 0: it takes 1 and more\."
        ):
            case.call(HostArray)
        return
    case.check([x.host for x in case.call(HostArray)])


@pytest.mark.parametrize("deterministic", [True, False])
def test_without_sequences_there_are_no_offsets(hostcpp: Plugins, deterministic: bool) -> None:
    """Addresses of what is never read may be null: also where rows belong to nobody."""
    rows = {
        "q": (4, 2, 16),
        "k": (6, 2, 16),
        "v": (6, 2, 16),
        "out": (4, 2, 16),
        "lse": (2, 4),
        "sinks": (2,),
    }
    arrays = {n: np.ones(shape, np.float32) for n, shape in rows.items()}
    gradients = {f"d{n}": np.full(rows[n], np.nan, np.float32) for n in ("q", "k", "v", "sinks")}
    forward = Attention(
        batch=0,
        num_heads=2,
        S_q=3,
        S_k=5,
        head_dim=16,
        total_q=4,
        total_k=6,
        cu_seqlens_q=0,
        cu_seqlens_k=0,
        dtype="float32",
        return_lse=True,
        sinks=0,
    )
    bwd = AttentionBwd(forward=forward, dsinks=0, deterministic=deterministic)
    operands = {n: x.ctypes.data for n, x in {**arrays, **gradients, "dout": arrays["out"]}.items()}
    plan(bwd, backend="hostcpp").bind(**operands)()
    assert (gradients["dsinks"] == 0).all()
    # rows of no sequence are not written
    assert all(np.isnan(gradients[n]).all() for n in ("dq", "dk", "dv"))
