"""What a plugin fills in: the protocols between the core and a vendor, versioned as one.

The core calls these and nothing else of a plugin. A backend brings a *runtime* (devices, memory,
streams, arrays), may bring a *toolchain* (compile and load kernels), and may bring *kernels* and
*implementations* of its own.
"""

from kernelseam.contract.archs import ArchRow, Coefficients, LibraryRate
from kernelseam.contract.arrays import (
    ArrayInfo,
    QuickRuntime,
    Ready,
    Runtime,
    host_array,
    host_copy,
)
from kernelseam.contract.binaries import NOT_KNOWN, KernelFacts, SourceBundle
from kernelseam.contract.devices import EMULATED, HOST, Device, DeviceLimits
from kernelseam.contract.launches import Composition, Launch, Launches, Memset
from kernelseam.contract.launching import Extents, LaunchConfig, LoadedKernel
from kernelseam.contract.plans import (
    WORKSPACE_ALIGNMENT,
    Implementation,
    LaunchRecord,
    PlanParts,
    Step,
)
from kernelseam.contract.plugin import Backend, PluginInfo
from kernelseam.contract.problems import Cost, OperandRule, Problem
from kernelseam.contract.tensor_map import TENSOR_MAP_BYTES, TensorMap, WithoutTensorMaps
from kernelseam.contract.toolchain import Toolchain

CONTRACT_VERSION = 2
"""Raised with every incompatible change of this package; a plugin that names another is kept
out."""

__all__ = [
    "Memset",
    "Launches",
    "Launch",
    "Composition",
    "LibraryRate",
    "Coefficients",
    "CONTRACT_VERSION",
    "EMULATED",
    "HOST",
    "NOT_KNOWN",
    "TENSOR_MAP_BYTES",
    "WORKSPACE_ALIGNMENT",
    "ArchRow",
    "ArrayInfo",
    "Backend",
    "Cost",
    "Device",
    "DeviceLimits",
    "Extents",
    "Implementation",
    "KernelFacts",
    "LaunchConfig",
    "LaunchRecord",
    "LoadedKernel",
    "OperandRule",
    "PlanParts",
    "PluginInfo",
    "Problem",
    "QuickRuntime",
    "Ready",
    "Runtime",
    "SourceBundle",
    "Step",
    "TensorMap",
    "Toolchain",
    "WithoutTensorMaps",
    "host_array",
    "host_copy",
]
