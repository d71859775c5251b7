# SPDX-License-Identifier: Apache-2.0
"""``python -m grouped_linear``: what is installed, and what each op runs, for a bug report.

No hardware is looked up in a list: every family of ops is called on every device, and the report
says what happened.

T rows, E groups, K in_features, N out_features.
"""

import ctypes
import importlib
import importlib.util
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from grouped_linear import __version__, ops
from grouped_linear.loading import host_module, library_path
from grouped_linear.meta_kernels.rules import ACTIVATIONS, dtype_name

E, K, N, ROWS = 2, 32, 16, 8  # small; the second group is partly filled

NOT_TOLD = "not told: this build has no _host"
DEQUANTIZED = "dequantized, torch's float32 GEMM"
IN_VECTORS = "AVX-512 VBMI; loops for other scales than powers of two"


#: Ops that take one path: its name on a CPU, and a call of some of them on a device.
Family = tuple[str | Callable[[ModuleType], str], Callable[[torch.device], None]]


def _draw(device: torch.device, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device=device).to(dtype)


def _offs(device: torch.device) -> Tensor:
    return ops.splits_to_offsets(torch.tensor([ROWS // 2, ROWS // 4], device=device), ROWS)


def _grouped_mm(dtype: torch.dtype) -> Callable[[torch.device], None]:
    def call(device: torch.device) -> None:
        x, w = _draw(device, ROWS, K, dtype=dtype), _draw(device, E, N, K, dtype=dtype)
        dy = _draw(device, ROWS, N, dtype=dtype)
        ops.grouped_mm(x, w.mT, _offs(device))
        ops.grouped_mm_wgrad(dy, x, _offs(device))

    return call


def _grouped_scaled_mm(device: torch.device) -> None:
    splits = torch.tensor([ROWS // 2, ROWS // 4], device=device)
    x, w = _draw(device, ROWS, K), _draw(device, E, N, K)
    y, offs, x_t, scale_x_t, w_t, scale_w = ops.block_scaled_linear(x, w, splits)
    ops.block_scaled_linear_grad(y, offs, x_t, scale_x_t, w_t, scale_w)


def _quantize(device: torch.device) -> None:
    x, w, offs = _draw(device, ROWS, K), _draw(device, E, N, K), _offs(device)
    ops.group_quantize(x, offs, columnwise=True)
    ops.group_quantize_current(x, offs)
    ops.group_quantize_mx(x, offs)
    ops.group_quantize_swiglu(x, offs)
    ops.quantize_weight(w)


def _route(device: torch.device) -> None:
    choices = torch.tensor([[0, 1]] * (ROWS // 2), device=device)
    weights, experts = ops.topk_experts(_draw(device, ROWS, K), E)
    ops.topk_experts_grad(weights, _draw(device, ROWS, K), experts)
    ops.sort_by_expert(choices, E)
    ops.gather_sum(_draw(device, ROWS, K), torch.arange(ROWS, device=device).view(-1, 2))
    ops.swiglu(_draw(device, ROWS, K), _offs(device))


FAMILIES: dict[str, Family] = {
    **{f"GEMM, {dtype_name(d)}": ("torch's GEMM", _grouped_mm(d)) for d in ACTIVATIONS},
    "GEMM, float8": (
        lambda host: "AVX-512 BF16" if host.has_bf16_units() else DEQUANTIZED,
        _grouped_scaled_mm,
    ),
    "quantization": (lambda host: IN_VECTORS if host.has_byte_permutes() else "loops", _quantize),
    "routing, SwiGLU": ("loops", _route),
}


def first_line(error: BaseException) -> str:
    """The first line of an error: later lines are torch's advice and stack."""
    return (str(error) or type(error).__name__).splitlines()[0]


def path_of(family: Family, device: torch.device, host: ModuleType | None) -> str:
    """The path of a family of ops on a device, see :func:`report`; on a GPU from a profile."""
    on_cpu, call = family
    try:
        call(device)
        if device.type == "cpu":
            if isinstance(on_cpu, str):
                return on_cpu
            return NOT_TOLD if host is None else on_cpu(host)
        torch.cuda.synchronize(device)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            call(device)
            torch.cuda.synchronize(device)
    except (RuntimeError, ValueError) as error:
        return f"fails: {first_line(error)}"
    kernels = " ".join(event.key for event in profile.key_averages())
    if "grouped_linear" not in kernels:
        return "runs; torch's profiler does not see which kernels"
    return ", ".join(sorted(set(re.findall(r"cuda::(sm\d+|simt)::", kernels)))) or "CUDA"


def built(host: ModuleType | None) -> str:
    """The devices that ``_C.so`` has kernels for."""
    if host is None:
        return NOT_TOLD
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


def cpu_name() -> str:
    """The CPU's name, from Linux."""
    try:
        found = re.search(r"^model name\s*: *(.+)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()


def gpu_name(index: int) -> str:
    """A GPU's name, compute capability, memory and number of SMs."""
    found = torch.cuda.get_device_properties(index)
    capability = f"compute capability {found.major}.{found.minor}"
    memory = f"{found.total_memory / 2**30:.0f} GiB"
    return f"{found.name}, {capability}, {memory}, {found.multi_processor_count} SMs"


def installed(host: ModuleType | None) -> Iterator[tuple[str, str]]:
    """The lines of the first part of the report: a name and its value."""
    cuda = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    libc = " ".join(platform.libc_ver())
    yield "grouped_linear", __version__
    yield "kernels", built(host)
    yield "library", str(library_path())
    yield "Python", platform.python_version()
    yield "torch", f"{torch.__version__}, {cuda}"
    yield "transformers", transformers()
    yield "system", f"{platform.system()} {platform.release()} {platform.machine()}, {libc}"
    yield "driver", driver()
    vectors = torch.backends.cpu.get_cpu_capability()
    yield "cpu", f"{cpu_name()}, {vectors}, {torch.get_num_threads()} threads"
    for index in range(torch.cuda.device_count()):
        yield f"cuda:{index}", gpu_name(index)


def report() -> str:
    """What is installed, and the path that each family of ops takes on each device, as text.

    A GPU's path is the folder of ``csrc/cuda/gemm`` whose kernels ran, ``CUDA`` for kernels that
    every GPU runs, or the sentence of the error.

    >>> print(report())  # doctest: +ELLIPSIS
    grouped_linear   0.1.0
    kernels          CPU...
    library          ..._C.so
    Python           3...
    """
    host = host_module()
    names = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    lines = [f"{name:<17}{value}" for name, value in installed(host)]
    for name in names:
        lines += ["", f"ops on {name}"]
        for title, family in FAMILIES.items():
            lines.append(f"  {title:<16}{path_of(family, torch.device(name), host)}")
    return "\n".join(lines)
