"""The runtime on a HIP library whose device memory is the host's: written here in C, called through
hip-python.

Everything between our Python and the library's functions runs as on a device: hip-python's
conversions, packed arguments, handles, statuses. Each test runs in a fork of a Python that has
loaded the library, as hip-python does so once.
"""

# ruff: noqa: E501 — the sources within have lines of their own

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kernelseam_rocm", reason="kernelseam-rocm is not installed")
COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")

LIBRARY = r"""
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
typedef int E;
static int current, failing_launch; static double now; static char blob[8192]; static size_t blob_size;
static int64_t log_[4096]; static int logged;
static struct { char bytes[256]; size_t size; unsigned grid[3], block[3], shared; int64_t stream; } last;
void stub_properties(const void* p, size_t n) { memcpy(blob, p, n); blob_size = n; }
int stub_log(int64_t* out) { memcpy(out, log_, sizeof(log_)); return logged; }
void* stub_last(void) { return &last; }
void stub_fail_launches(int yes) { failing_launch = yes; }
static void note(int64_t x) { if (logged < 4096) log_[logged++] = x; }
E hipGetDeviceCount(int* n) { *n = 2; return 0; }
E hipGetDevice(int* i) { *i = current; return 0; }
E hipSetDevice(int i) { if (i > 1) return 101; note(1000 + i); current = i; return 0; }
E hipGetDevicePropertiesR0600(void* p, int i) { memcpy(p, blob, blob_size); ((char*)p)[4] = '0' + i; return 0; }
E hipMalloc(void** p, size_t n) { if (n > (1ull << 40)) return 2; *p = malloc(n); note(2000 + current); return 0; }
static char* pinned;
E hipHostMalloc(void** p, size_t n, unsigned flags) { *p = pinned = malloc(n); note(8000 + flags); return 0; }
E hipFree(void* p) { free(p); note(3000); return 0; }
E hipMemcpy(void* d, const void* s, size_t n, int kind) {
  if (kind == 1 && s != pinned) return 1;
  memcpy(d, s, n); note(4000 + kind); return 0;
}
E hipDeviceSynchronize(void) { note(5000 + current); return 0; }
E hipEventCreate(void** e) { *e = calloc(1, sizeof(double)); return 0; }
E hipEventDestroy(void* e) { free(e); note(6000); return 0; }
E hipEventRecord(void* e, void* s) { now += 0.25; *(double*)e = now; return 0; }
E hipEventElapsedTime(float* ms, void* a, void* b) { *ms = *(double*)b - *(double*)a; return 0; }
static char modules[2];
E hipModuleLoadData(void** m, const void* image) { *m = modules + current; note(7000 + current); return 0; }
E hipModuleGetFunction(void** f, void* m, const char* name) {
  if (strcmp(name, "scale")) return 500;
  note(7100 + ((char*)m - modules)); *f = (void*)0x77; return 0;
}
E hipMemsetAsync(void* p, int value, size_t n, void* stream) {
  if (failing_launch) return 1;
  memset(p, value, n); note(9000 + (int64_t)stream); return 0;
}
E hipFuncGetAttribute(int* v, int which, void* f) { *v = 100 + which; return 0; }
E hipRuntimeGetVersion(int* v) { *v = 70253211; return 0; }
const char* hipGetErrorString(E e) {
  return e == 2 ? "out of memory" : e == 500 ? "named symbol not found" : e == 1 ? "invalid argument" : "no such device";
}
struct Args { double* x; int n; double factor; };
E hipModuleLaunchKernel(void* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                        unsigned shared, void* stream, void** params, void** extra) {
  if (failing_launch || f != (void*)0x77 || params || extra[0] != (void*)1 || extra[2] != (void*)2 || extra[4] != (void*)3)
    return 1;
  last.size = *(size_t*)extra[3]; memcpy(last.bytes, extra[1], last.size);
  unsigned grid[3] = {gx, gy, gz}, block[3] = {bx, by, bz};
  memcpy(last.grid, grid, 12); memcpy(last.block, block, 12); last.shared = shared; last.stream = (int64_t)stream;
  struct Args* a = (struct Args*)last.bytes;
  for (int i = 0; i < a->n; i++) a->x[i] *= a->factor;
  return 0;
}
"""

PREAMBLE = """
import ctypes, json, os, struct, sys, traceback
import numpy as np
from kernelseam.contract import Device, LaunchConfig
from kernelseam.dtypes import DType
from kernelseam.errors import *
from kernelseam_rocm import bindings, codeobject, toolchain
from kernelseam_rocm.runtime import HipRuntime
stub = ctypes.CDLL(sys.argv[1])
bindings.DRIVERS = ("/dev/null",)
hip = bindings.hip()
props = hip.hipDeviceProp_t()
size, start = props.c_sizeof(), int(props)
def place(attribute):  # where a text lies in the structure, found by writing
    for at in range(size - 1):
        ctypes.memset(start, 0, size)
        ctypes.memset(start + at, ord("g"), 1)
        if bindings.text(getattr(props, attribute))[:1] == "g":
            return at
places = {a: place(a) for a in ("name", "gcnArchName")}
ctypes.memset(start, 0, size)
for attribute, text in (("name", b"Card ?"), ("gcnArchName", b"gfx942:sramecc+:xnack-")):
    ctypes.memmove(start + places[attribute], text, len(text))
for attribute, value in dict(multiProcessorCount=304, totalGlobalMem=2**37, clockRate=2_100_000, sharedMemPerBlock=65536,
                             memoryClockRate=2_600_000, memoryBusWidth=8192).items():
    setattr(props, attribute, value)
stub.stub_properties(ctypes.c_void_p(start), ctypes.c_size_t(size))
def log():
    out = (ctypes.c_int64 * 4096)()
    return list(out[:stub.stub_log(out)])
def say(**facts):
    print(json.dumps(facts, default=str))
runtime = HipRuntime()
devices = runtime.devices()
"""

SERVE = """
for line in sys.stdin:
    pid = os.fork()
    if not pid:
        status = 1
        try:
            exec(json.loads(line), globals())
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""

LOAD = """
codeobject.parse = lambda binary: codeobject.CodeObject("amdgcn-amd-amdhsa--gfx942", {"scale": {
    ".args": [{".offset": o, ".size": s, ".value_kind": "by_value"} for o, s in ((0, 8), (8, 4), (16, 8))]
    + [{".offset": 24, ".size": 4, ".value_kind": "hidden_block_count_x"}],
    ".vgpr_count": 32, ".sgpr_count": 16, ".wavefront_size": 64, ".max_flat_workgroup_size": 256,
    ".private_segment_fixed_size": 0, ".group_segment_fixed_size": 0,
}}, {"scale": (0, b"")})
chain = toolchain.HipToolchain(runtime)
"""


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ROCm prefix with the library in it."""
    if COMPILER is None:
        pytest.skip("a C compiler is missing")
    folder = tmp_path_factory.mktemp("rocm")
    (folder / "lib").mkdir()
    source = folder / "hip.c"
    source.write_text(LIBRARY)
    library = folder / "lib" / "libamdhip64.so"
    subprocess.run(
        [COMPILER, "-shared", "-fPIC", "-O1", "-w", "-o", str(library), str(source)], check=True
    )
    return folder


Run = Callable[[str], Any]


@pytest.fixture(scope="module")
def run(prefix: Path) -> Iterator[Run]:
    """``run(code)``: what the code says in a Python whose HIP runtime is the library."""
    lib = prefix / "lib"
    path = os.pathsep.join(p for p in sys.path if p)
    env = {**os.environ, "ROCM_PATH": str(prefix), "LD_LIBRARY_PATH": str(lib), "PYTHONPATH": path}
    command = [sys.executable, "-c", PREAMBLE + SERVE, str(lib / "libamdhip64.so")]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env) as process:
        asked, answers = process.stdin, process.stdout
        assert asked is not None and answers is not None

        def say(code: str) -> Any:
            print(json.dumps(textwrap.dedent(code)), file=asked, flush=True)
            said = answers.readline()
            assert said.startswith("{") and answers.readline() == "0\n", said
            return json.loads(said)

        yield say


def test_devices_and_their_limits(run: Run) -> None:
    output = run(
        """
        d = devices[1]
        say(names=[str(d) for d in devices], name=d.name, limits=[
            d.limits.compute_units, d.limits.shared_bytes_per_block, d.limits.memory_bytes, d.limits.bytes_per_second,
            d.limits.operations_per_second["float16"], d.limits.operations_per_second["float64"]], absence=runtime.absence)
    """,
    )
    assert output["names"] == ["rocm:0 (gfx942)", "rocm:1 (gfx942)"]
    assert (output["name"], output["absence"]) == ("Card1?", "")
    units, shared, memory, bandwidth, half, double = output["limits"]
    assert (units, shared, memory) == (304, 65536, 2**37)
    assert bandwidth == pytest.approx(2 * 2.6e9 * 1024)
    assert (half, double) == (pytest.approx(304 * 2.1e9 * 2048), pytest.approx(304 * 2.1e9 * 128))


def test_arrays_go_there_and_back(run: Run) -> None:
    output = run(
        """
        host = np.arange(24, dtype=np.float32).reshape(4, 6)[:, ::2]
        array = runtime.from_host(host, devices[1])
        info = runtime.describe(array)
        back = runtime.to_host(array)
        empty = runtime.to_host(runtime.empty((0, 3), DType.bfloat16, devices[0]))
        half = runtime.from_host(np.ones((2, 2), DType.bfloat16.numpy), devices[0])
        say(same=bool((back == host).all()), shape=back.shape, strides=info.strides, device=str(info.device), kind=info.kind,
            empty=[empty.shape, str(empty.dtype)], half=[str(half.dtype), float(runtime.to_host(half).sum())], log=log())
    """,
    )
    assert output["same"] and output["shape"] == [4, 3] and output["strides"] == [3, 1]
    assert (output["device"], output["kind"]) == ("rocm:1 (gfx942)", "kernelseam")
    assert (output["empty"], output["half"]) == ([[0, 3], "bfloat16"], ["bfloat16", 4.0])
    # Onto device 1 and back to 0 each time: allocate, pin what the copy passes through, and copy;
    # then wait for the device's work and copy.
    assert output["log"][:9] == [1001, 2001, 8001, 4001, 1000, 1001, 5001, 4002, 1000]


def test_host_memory_is_staged_in_pinned_memory_piece_by_piece(run: Run) -> None:
    """One buffer for all copies of all devices: pinned once. What is not staged, the library
    refuses to copy."""
    output = run(
        """
        from kernelseam_rocm import runtime as module
        from kernelseam.descriptors.common.address_lists import stage
        module._STAGED = 64
        long, short = np.arange(37.0), np.array([2**63 + 16, 32, 48], np.uint64)
        first, (second, pointer) = runtime.from_host(long, devices[0]), stage(short, runtime, devices[1])
        marks = log()
        say(pinned=marks.count(8001), copies=marks.count(4001), first=runtime.to_host(first).tolist(),
            second=runtime.to_host(second).view(np.uint64).tolist(), same=runtime.describe(second).pointer == pointer)
    """,
    )
    assert output == {
        "pinned": 1,
        "copies": 6,
        "first": [float(i) for i in range(37)],
        "second": [2**63 + 16, 32, 48],
        "same": True,
    }


def test_memory_that_is_not_there(run: Run) -> None:
    output = run(
        """
        try: runtime.empty((2**41,), DType.float16, devices[0])
        except OutOfDeviceMemory as e: say(message=str(e), memory_error=isinstance(e, MemoryError))
    """,
    )
    assert output == {
        "message": "hipMalloc failed with hipErrorOutOfMemory (2): out of memory",
        "memory_error": True,
    }


def test_the_device_before_is_restored_even_after_an_error(run: Run) -> None:
    output = run(
        """
        with runtime.activate(devices[0]): pass
        try:
            with runtime.activate(devices[1]):
                inside = bindings.call("hipGetDevice")
                raise ValueError
        except ValueError: pass
        say(inside=inside, after=bindings.call("hipGetDevice"), log=log())
    """,
    )
    assert output == {"inside": 1, "after": 0, "log": [1001, 1000]}


def test_launches_get_the_arguments_as_packed(run: Run) -> None:
    output = run(
        LOAD
        + textwrap.dedent("""
        x = runtime.from_host(np.arange(5.0), devices[1])
        kernel = chain.load(b"binary", "scale", devices[1])
        again = chain.load(b"binary", "scale", devices[1])
        arguments = struct.pack("<Qi4xd", x.pointer, 5, 2.5)
        launch = kernel.prepare(LaunchConfig((7, 1, 1), (64, 2, 1), 1024), arguments)
        launch(0x1234); launch(0x99)
        class Last(ctypes.Structure):
            _fields_ = [("bytes", ctypes.c_char * 256), ("size", ctypes.c_size_t), ("grid", ctypes.c_uint * 3),
                        ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint), ("stream", ctypes.c_int64)]
        stub.stub_last.restype = ctypes.POINTER(Last)
        last = stub.stub_last().contents
        say(x=runtime.to_host(x).tolist(), same=ctypes.string_at(ctypes.addressof(last), 24) == arguments, size=last.size,
            grid=list(last.grid), block=list(last.block), shared=last.shared, stream=last.stream, loads=log().count(7001))
    """),
    )
    assert output == {
        "x": [0.0, 6.25, 12.5, 18.75, 25.0],
        "same": True,
        "size": 24,
        "grid": [7, 1, 1],
        "block": [64, 2, 1],
        "shared": 1024,
        "stream": 0x99,
        "loads": 1,
    }


def test_each_device_has_modules_of_its_own(run: Run) -> None:
    """A module belongs to the device that was current when it was loaded: its functions run there
    alone."""
    output = run(
        LOAD
        + textwrap.dedent("""
        for index in (0, 1, 0, 1): chain.load(b"binary", "scale", devices[index])
        chain.load(b"another", "scale", devices[1])
        say(log=[x for x in log() if x // 1000 in (1, 7)])
    """),
    )
    loaded, function = 7000, 7100
    assert output["log"] == [
        loaded,
        function,
        1001,
        loaded + 1,
        function + 1,
        1000,
        function,
        1001,
        function + 1,
        1000,
        1001,
        loaded + 1,
        function + 1,
        1000,
    ]


def test_what_the_runtime_says_of_a_kernel(run: Run) -> None:
    """Registers and memory; where parameters lie it does not say: that is read off the binary."""
    output = run(
        LOAD
        + textwrap.dedent("""
        f = chain.load(b"binary", "scale", devices[1]).facts
        say(name=f.name, registers=f.registers, scratch=f.scratch_bytes, shared=f.shared_bytes, parameters=f.parameters)
    """),
    )
    assert output == {
        "name": "scale",
        "registers": 104,
        "scratch": 103,
        "shared": 101,
        "parameters": [[0, 8], [8, 4], [16, 8]],
    }


def test_memory_is_set_in_the_streams_order(run: Run) -> None:
    output = run(
        """
        x = runtime.from_host(np.ones(4, np.float32), devices[1])
        launch = runtime.prepare_memset(x.pointer + 4, 0, 8, devices[1])
        before = runtime.to_host(x).tolist()
        launch(0x42)
        after, log_ = runtime.to_host(x).tolist(), log()
        stub.stub_fail_launches(1)
        try: launch(0)
        except DeviceError as e: said = str(e).replace(hex(x.pointer + 4), "HERE")
        say(before=before, after=after, set=[n - 9000 for n in log_ if n >= 9000], said=said)
    """,
    )
    assert output == {
        "before": [1, 1, 1, 1],
        "after": [1, 0, 0, 1],
        "set": [0x42],
        "said": "hipMemsetAsync of 8 bytes at HERE failed with hipErrorInvalidValue (1): invalid "
        "argument",
    }


def test_launches_that_it_has_not_are_refused_by_name(run: Run) -> None:
    output = run(
        LOAD
        + textwrap.dedent("""
        said = []
        kernel = chain.load(b"binary", "scale", devices[0])
        for more in ({"cluster": (2, 1, 1)}, {"programmatic": True}, {"cooperative": True}):
            try: kernel.prepare(LaunchConfig((2, 1, 1), (64, 1, 1), **more), bytes(24))
            except DeviceError as e: said.append(str(e))
        from kernelseam.contract import TensorMap
        q = TensorMap("q", DType.float16, (64, 8), (1, 64), (64, 8))
        said.append(chain.refuse_tensor_map(q, "gfx942", 16))
        try: chain.encode_tensor_map(q, 0)
        except DeviceError as e: said.append(str(e))
        say(said=said)
    """),
    )["said"]
    assert output == [
        "backend rocm launches no clusters: cluster (2, 1, 1)",
        "backend rocm has no programmatic dependent launch",
        "backend rocm has no cooperative launch",
        "it loads q by a tensor map, gfx942 has none",
        "backend rocm has no tensor maps: q cannot have one",
    ]


def test_launches_that_cannot_be(run: Run) -> None:
    output = run(
        LOAD
        + textwrap.dedent("""
        said = []
        def told(call):
            try: call()
            except Exception as e: said.append([type(e).__name__, str(e)])
        kernel = chain.load(b"binary", "scale", devices[0])
        told(lambda: kernel.prepare(LaunchConfig((1, 1, 1), (64, 1, 1)), bytes(20)))
        launch = kernel.prepare(LaunchConfig((1, 1, 1), (64, 1, 1)), bytes(24))
        stub.stub_fail_launches(1)
        told(lambda: launch(0))
        parse = codeobject.parse
        codeobject.parse = lambda binary: (lambda c: codeobject.CodeObject(c.target, {"other": c.kernels["scale"]}, {"other": (0, b"")}))(parse(b""))
        told(lambda: chain.load(b"binary", "other", devices[0]))
        say(said=said)
    """),
    )["said"]
    assert output == [
        [
            "InvalidValue",
            "arguments = 20 bytes: kernel scale takes 24. Pack them by the kernel's signature.",
        ],
        [
            "DeviceError",
            (
                "hipModuleLaunchKernel (grid (1, 1, 1), block (64, 1, 1), 0 bytes shared) failed "
                "with hipErrorInvalidValue (1): invalid argument"
            ),
        ],
        [
            "DeviceError",
            "hipModuleGetFunction failed with hipErrorNotFound (500): named symbol not found",
        ],
    ]


def test_times_are_the_devices(run: Run) -> None:
    output = run(
        """
        streams = []
        seconds = runtime.time(streams.append, devices[1], 3)
        say(seconds=seconds, streams=streams, freed=log().count(6000), synchronized=log().count(5001))
    """,
    )
    assert output == {"seconds": [0.00025] * 3, "streams": [0, 0, 0], "freed": 6, "synchronized": 1}


def test_what_lies_elsewhere_is_not_copied(run: Run) -> None:
    output = run(
        """
        try: runtime.to_host(np.zeros(3))
        except InvalidValue as e: say(message=str(e))
    """,
    )
    assert (
        output["message"] == "array = ndarray: must lie on a device of backend rocm. Move it there."
    )
