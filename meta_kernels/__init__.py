"""Fake kernels: rules, output shapes and FLOPs of every op, without its arithmetic."""

if __name__ != "grouped_linear.meta_kernels":
    raise ImportError(f"import grouped_linear.meta_kernels, not {__name__}")

from grouped_linear.meta_kernels import (
    flops,
    gather,
    layer,
    matmul,
    mx,
    offsets,
    optimizer,
    per_group,
    quantize,
    refresh,
    swiglu_gemm,
    watch,
)

__all__ = [
    "flops",
    "gather",
    "layer",
    "matmul",
    "mx",
    "offsets",
    "optimizer",
    "per_group",
    "quantize",
    "refresh",
    "swiglu_gemm",
    "watch",
]
