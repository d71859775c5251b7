# SPDX-License-Identifier: Apache-2.0
"""``python -m grouped_linear``: what is installed, and whether a layer runs on each device."""

import ctypes
import importlib
import importlib.util
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
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
    try:
        cuda = ctypes.c_int()
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(cuda))
    except OSError:
        return "none"
    found = "unknown version"
    if tool := shutil.which("nvidia-smi"):
        command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
        said = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.split()
        found = said[0] if said else found
    return f"{found}, for CUDA up to {cuda.value // 1000}.{cuda.value % 1000 // 10}"


def transformers() -> str:
    """The installed transformers, and whether the integration accepts it."""
    if importlib.util.find_spec("transformers") is None:
        return "not installed"
    try:
        importlib.import_module("grouped_linear.integrations.transformers")
    except ImportError as error:
        return f"not supported: {first_line(error)}"
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
    kernels = " ".join(event.key for event in profile.key_averages())
    gemms = sorted(set(re.findall(r"cuda::(sm\d+)::", kernels)))
    return f"a layer runs, its GEMMs in {gemms[0]}" if gemms else "a layer runs"


def installed() -> Iterator[tuple[str, str]]:
    """The lines of the report: a name and its value."""
    host, libc = host_module(), " ".join(platform.libc_ver())
    cuda = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    cpu = Path("/proc/cpuinfo")
    name = re.search(r"^model name\s*: *(.+)", cpu.read_text() if cpu.exists() else "", re.M)
    vectors = torch.backends.cpu.get_cpu_capability()
    if host is not None and host.has_bf16_units():
        vectors += ", AVX-512 BF16 for FP8 GEMMs"
    yield "grouped_linear", __version__
    yield "kernels", built(host)
    yield "library", str(library_path())
    yield "Python", platform.python_version()
    yield "torch", f"{torch.__version__}, {cuda}"
    yield "transformers", transformers()
    yield "system", f"{platform.system()} {platform.release()} {platform.machine()}, {libc}"
    yield "driver", driver()
    yield "cpu", f"{name[1] if name else platform.machine()}, {vectors}"
    yield "", f"{torch.get_num_threads()} threads; {runs(torch.device('cpu'))}"
    for i in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(i)
        memory = f"{gpu.total_memory / 2**30:.0f} GiB, {gpu.multi_processor_count} SMs"
        yield f"cuda:{i}", f"{gpu.name}, compute capability {gpu.major}.{gpu.minor}, {memory}"
        yield "", runs(torch.device("cuda", i))


def report() -> str:
    """What is installed, and whether a layer runs on each device, as text.

    >>> print(report())  # doctest: +ELLIPSIS
    grouped_linear   0.1.0
    kernels          CPU...
    library          ..._C.so
    Python           3...
    """
    return "\n".join(f"{name:<17}{value}" for name, value in installed())
