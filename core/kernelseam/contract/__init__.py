"""The contract: the protocols that a plugin implements, with one version number.

The core calls these and nothing else of a plugin. A backend brings a *runtime* (devices, memory,
streams, arrays), may bring a *toolchain* (compile and load kernels), and may bring *kernels* and
*implementations* of its own.
"""

from kernelseam.contract.archs import ArchRow, Coefficients, LibraryRate, devices_of_sheets, of_arch
from kernelseam.contract.arrays import (
    ArrayInfo,
    CallState,
    FastRuntime,
    GraphRuntime,
    Runtime,
    host_array,
    host_copy,
)
from kernelseam.contract.binaries import NOT_KNOWN, KernelFacts, SourceBundle
from kernelseam.contract.devices import ABSENT, EMULATED, HOST, Device, DeviceLimits
from kernelseam.contract.launches import Composition, Launch, Launches, Memset
from kernelseam.contract.launching import Extents, LaunchConfig, LoadedKernel, ReusableKernel
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
from kernelseam.contract.toolchain import AddressFirstEncoder, TensorMapEncoder, Toolchain

CONTRACT_VERSION = 2
"""Incremented with every incompatible change; a plugin with another version is not loaded."""

__all__ = [
    "Memset",
    "Launches",
    "Launch",
    "Composition",
    "LibraryRate",
    "Coefficients",
    "CONTRACT_VERSION",
    "ABSENT",
    "AddressFirstEncoder",
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
    "ReusableKernel",
    "OperandRule",
    "PlanParts",
    "PluginInfo",
    "Problem",
    "FastRuntime",
    "GraphRuntime",
    "CallState",
    "Runtime",
    "SourceBundle",
    "Step",
    "TensorMap",
    "TensorMapEncoder",
    "Toolchain",
    "WithoutTensorMaps",
    "devices_of_sheets",
    "of_arch",
    "host_array",
    "host_copy",
]
