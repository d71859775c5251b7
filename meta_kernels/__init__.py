# SPDX-License-Identifier: Apache-2.0
"""Fake kernels: rules, output shapes and FLOPs of every op, without its arithmetic."""

if __name__ != "grouped_linear.meta_kernels":
    raise ImportError(f"import grouped_linear.meta_kernels, not {__name__}")

from grouped_linear.meta_kernels import flops as flops
from grouped_linear.meta_kernels import layer as layer
from grouped_linear.meta_kernels import matmul as matmul
from grouped_linear.meta_kernels import mxfp4 as mxfp4
from grouped_linear.meta_kernels import quantize as quantize
from grouped_linear.meta_kernels import routing as routing
from grouped_linear.meta_kernels import state as state
