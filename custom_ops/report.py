# SPDX-License-Identifier: Apache-2.0
"""``python -m grouped_linear``: what is installed, and whether a layer runs on each device."""

import ctypes
import importlib
import platform
import re
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import torch

from grouped_linear import Float8BlockScaling, GroupedLinear, __version__
from grouped_linear.loading import host_module, library_path


def first_line(error: BaseException) -> str:
    """The first line of an error: later lines are torch's advice and stack."""
    return (str(error) or type(error).__name__).splitlines()[0]


def built(host: ModuleType | None) -> str:
    """The devices that ``_C.so`` has kernels for."""
    if host is None:
        return "not told: this build has no _host"
    if host.CUDA_VERSION is None:
        return "CPU, without CUDA: nvcc was missing, or GROUPED_LINEAR_CUDA_ARCHS=OFF"
    return f"CPU, and CUDA {host.CUDA_VERSION} for {host.CUDA_ARCHITECTURES}"


def driver() -> str:
    """The version of the NVIDIA driver and the newest CUDA that it supports."""
    cuda, kernel = ctypes.c_int(), Path("/proc/driver/nvidia/version")
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(cuda))
    except OSError:
        return "none"
    found = re.search(r"\b\d{3,}\.[\d.]+", kernel.read_text() if kernel.exists() else "")
    newest = f"{cuda.value // 1000}.{cuda.value % 1000 // 10}"
    return f"{found[0] if found else 'unknown version'}, for CUDA up to {newest}"


def transformers() -> str:
    """The installed transformers, and whether the integration accepts it."""
    try:
        importlib.import_module("grouped_linear.integrations.transformers")
    except ImportError as error:
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == "transformers"
        return "not installed" if is_missing else f"not supported: {first_line(error)}"
    return f"{version('transformers')}, supported"


def runs(device: torch.device) -> str:
    """Whether an FP8 layer runs there, by which GEMMs; or the sentence of its error."""
    try:
        layer = GroupedLinear(2, 32, 16, recipe=Float8BlockScaling(), device=device)
        x = torch.ones(8, 32, device=device, requires_grad=True)
        layer(x, torch.tensor([4, 2], device=device)).sum().backward()
        if device.type == "cpu":
            return "a layer runs"
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            layer(x, torch.tensor([4, 2], device=device)).sum().backward()
            torch.cuda.synchronize(device)
    except (RuntimeError, ValueError) as error:
        return f"a layer fails: {first_line(error)}"
    gemm = re.search(r"cuda::(sm\d+)::", " ".join(event.key for event in profile.key_averages()))
    return f"a layer runs, its GEMMs in {gemm[1]}" if gemm else "a layer runs"


def report() -> str:
    """The installed versions, and whether a layer runs on each device, as text.

    >>> print(report())  # doctest: +ELLIPSIS
    grouped_linear   0.1.0...
    """
    host, cpu, cuda = host_module(), Path("/proc/cpuinfo"), torch.version.cuda
    model = re.search(r"^model name\s*: *(.+)", cpu.read_text() if cpu.exists() else "", re.M)
    vectors = torch.backends.cpu.get_cpu_capability()
    if host is not None and host.has_bf16_units():
        vectors += ", AVX-512 BF16 for FP8 GEMMs"
    lines = [
        ("grouped_linear", __version__),
        ("kernels", built(host)),
        ("library", str(library_path())),
        ("Python", platform.python_version()),
        ("torch", f"{torch.__version__}, built {f'for CUDA {cuda}' if cuda else 'without CUDA'}"),
        ("transformers", transformers()),
        ("system", platform.platform()),
        ("driver", driver()),
        ("cpu", f"{model[1] if model else platform.machine()}, {vectors}"),
        ("", f"{torch.get_num_threads()} threads; {runs(torch.device('cpu'))}"),
    ]
    for i in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(i)
        size = f"{gpu.total_memory / 2**30:.0f} GiB, {gpu.multi_processor_count} SMs"
        name = f"{gpu.name}, compute capability {gpu.major}.{gpu.minor}"
        lines += [(f"cuda:{i}", f"{name}, {size}"), ("", runs(torch.device("cuda", i)))]
    return "\n".join(f"{name:<17}{value}" for name, value in lines)
