# SPDX-License-Identifier: Apache-2.0
"""block_scaled_linear: a block-scaled layer's forward."""

import torch

from support import expected as must
from support import reference, variants
from support.groups import Groups
from support.op_info import Arguments, OpInfo, Options, Output, Outputs, Sample
from support.operands import bias
from support.tensors import rows, weight


def sample(groups: Groups, dtype: torch.dtype, layout: str, options: Options) -> Arguments:
    x, w = rows(groups, groups.K, dtype, layout), weight(groups, dtype, layout)
    arguments = {"x": x, "w": w, "m_splits": torch.tensor(groups.m_splits)}
    return arguments | bias(groups, dtype, options)


def expected(sample: Sample) -> Outputs:
    x, w, scaling = sample["x"], sample["w"], must.scaling_of(sample)
    offs = sample["m_splits"].cumsum(0).int()
    q, scale, q_t = must.weight(w, scaling)
    quantized = reference.quantize_rowwise(x, scaling)
    y = must.gemm(
        reference.dequantize_rowwise(*quantized, offs),
        reference.dequantize_weight(q, scale).mT,
        offs,
        x.dtype,
        sample.get("bias"),
        scaled=True,
    )
    x_t = must.columnwise(x, offs, scaling, sample.get("share_scales"))
    return [
        y,
        Output(offs),
        *must.if_asked(sample.get("columnwise_x"), x_t),
        *must.if_asked(sample.get("columnwise_w"), [Output(q_t)]),
        Output(scale),
    ]


OP = OpInfo(
    sample=sample,
    expected=expected,
    variants={
        "bias": {"bias": True},
        "rowwise": {"columnwise_x": False, "columnwise_w": False},
        "exact_scales": variants.EXACT,
        "strided": {"layout": "strided"},
        **variants.SHARED,
    },
    every_tensor="bias",
    unspecified=(None, None, "blocks", "blocks"),
    shares_kernels=True,
    too_large=(({"x": 0}, {}),),
    benchmark="bench_host",
)
