"""What an option that was just added must do, through every interface: ``python added_option.py``
within a tree that has ``distance_penalty``, on the host platform of tests and on NumPy."""

from __future__ import annotations

import inspect
import json
import math
import subprocess
import sys
from importlib.metadata import EntryPoint
from typing import Any

import kernelseam as ks
import numpy as np
import torch
from kernelseam import plugins
from kernelseam.distributed.options import shared
from kernelseam.errors import InvalidValue
from kernelseam.interop import torch as ks_torch

PENALTY = 0.25
ATTEND: Any = ks.attention
RNG = np.random.default_rng(0)
Q, K, V = (
    RNG.standard_normal(s).astype("f4") for s in ((2, 4, 9, 16), (2, 2, 20, 16), (2, 2, 20, 16))
)


def expected(q: Any, k: Any, v: Any) -> Any:
    """softmax(q·k/√D − PENALTY·|j − i − (S_k − S_q)|)·v by torch, of arrays as above."""
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    shift = k.shape[2] - q.shape[2]
    distance = torch.arange(k.shape[2]) - torch.arange(q.shape[2])[:, None] - shift
    scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[3]) - PENALTY * distance.abs()
    return scores.softmax(-1) @ v


def descriptor() -> None:
    given: dict[str, Any] = {"distance_penalty": PENALTY}
    problem: Any = ks.Attention.from_arrays(Q, K, V, np.empty_like(Q), **given).problem()
    assert problem.distance_penalty == PENALTY and "distance_penalty" in str(problem)
    try:
        ATTEND(Q, K, V, distance_penalty="far")
    except InvalidValue as e:
        assert str(e).startswith("distance_penalty = far: must be a real number"), e
    else:
        raise AssertionError("a text was taken")


def numpy_and_oracle() -> None:
    """``check``: held to the oracle."""
    given: dict[str, Any] = {"distance_penalty": PENALTY}
    out = np.empty_like(Q)
    ks.plan(ks.Attention.from_arrays(Q, K, V, out, **given)).bind(check=True)()
    np.testing.assert_allclose(out, expected(*map(torch.from_numpy, (Q, K, V))), atol=1e-5)
    plain = ks.attention(Q, K, V)
    assert np.abs(out - plain).max() > 0.1, "the option changes nothing"


def shared_kernel() -> None:
    """On the host platform, held to the oracle."""
    loaded = plugins.discover([EntryPoint("hostcpp", "kernelseam_hostcpp", plugins.GROUP)])
    assert loaded.failures == ()
    plugins._plugins = loaded
    from kernelseam_hostcpp.runtime import HostArray

    half = [x.astype("f2") for x in (Q, K, V)]
    out = np.full_like(half[0], np.nan)
    given: dict[str, Any] = {"distance_penalty": PENALTY}
    arrays = [HostArray(x) for x in (*half, out)]
    planned = ks.plan(ks.Attention.from_arrays(*arrays, **given), implementation="shared")
    planned.bind(check=True)()
    want = expected(*(torch.from_numpy(x).float() for x in half))
    np.testing.assert_allclose(out.astype("f4"), want, atol=4e-3)
    plugins._plugins = None


def torchs_function_and_operator() -> None:
    """With gradients, and in the schema."""
    given: dict[str, Any] = {"distance_penalty": PENALTY}
    ours, theirs = ([torch.tensor(x, requires_grad=True) for x in (Q, K, V)] for _ in range(2))
    ks_torch.attention(*ours, **given).square().sum().backward()
    expected(*theirs).square().sum().backward()
    for name, x, y in zip("qkv", ours, theirs, strict=True):
        np.testing.assert_allclose(x.grad, y.grad, atol=2e-4, rtol=1e-4, err_msg=f"d{name}")
    for operator in ("attention", "attention_bwd", "attention_varlen", "attention_paged"):
        schema = str(getattr(torch.ops.kernelseam, operator).default._schema)
        assert "float? distance_penalty=None" in schema, schema
    compiled = torch.compile(
        lambda q, k, v: ks_torch.attention(q, k, v, **given), backend="aot_eager", fullgraph=True
    )
    plain = [x.detach() for x in ours]
    torch.testing.assert_close(compiled(*plain), expected(*plain), atol=1e-5, rtol=1e-4)


def signatures() -> None:
    """Of functions that do not spell it out, too."""
    for function in (ks.attention, ks.attention_varlen, ks.attention_paged, ks.attention_bwd):
        assert inspect.signature(function).parameters["distance_penalty"].default is None


def ranks_refuse_it() -> None:
    """Until ``distributed/options.py`` says that a part of queries and keys may compute it."""
    try:
        shared({"scale": None, "softcap": None, "distance_penalty": PENALTY})
    except InvalidValue as e:
        assert str(e).startswith(f"distance_penalty = {PENALTY}: depends on where queries"), e
    else:
        raise AssertionError("each rank would have its own diagonal")


def command_line() -> None:
    arguments = ["attention", "--batch", "2", "--heads", "2", "--seq-len", "9", "--head-dim", "16"]
    arguments += ["--distance-penalty", str(PENALTY), "--backend", "numpy", "--verify", "--json"]
    found = subprocess.run(
        [sys.executable, "-m", "kernelseam", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    result = json.loads(found.stdout)
    assert result["passed"] and "distance_penalty" in result["runs"][0]["problem"], result


if __name__ == "__main__":
    descriptor()
    numpy_and_oracle()
    shared_kernel()
    torchs_function_and_operator()
    signatures()
    ranks_refuse_it()
    command_line()
