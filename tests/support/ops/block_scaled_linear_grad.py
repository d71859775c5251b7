# SPDX-License-Identifier: Apache-2.0
"""block_scaled_linear_grad: a block-scaled layer's backward."""

import torch

from support import expected as must
from support import reference, variants
from support.groups import Groups
from support.op_info import Arguments, OpInfo, Options, Outputs, Sample
from support.tensors import FP32, quantized_columns, rows, weight


def sample(groups: Groups, dtype: torch.dtype, layout: str, options: Options) -> Arguments:
    w = weight(groups, FP32)
    _, scale_w, w_t = reference.quantize_weight(w, reference.Scaling())
    x_t, scale_x_t = quantized_columns(groups, groups.K, options.pop("share_scales", False))
    dy = rows(groups, groups.N, dtype, layout)
    of_x, of_w = {"x_t": x_t, "scale_x_t": scale_x_t}, {"w_t": w_t, "scale_w": scale_w}
    return {"dy": dy, "offs": groups.offs(), **of_x, **of_w}


def expected(sample: Sample) -> Outputs:
    dy, offs, scaling = sample["dy"], sample["offs"], must.scaling_of(sample)
    x_t, w_t = sample["x_t"], sample["w_t"]
    outputs: Outputs = [None, None, None]
    if w_t is not None:
        q, scale = reference.quantize_rowwise(dy, scaling)
        numbers = reference.dequantize_rowwise(q, scale, offs)
        w = reference.dequantize_weight(w_t.mT, sample["scale_w"])
        outputs[0] = must.gemm(numbers, w, offs, dy.dtype, scaled=True)
    if x_t is not None:
        dy_t, scale_dy_t = reference.quantize_columnwise(dy, offs, scaling)
        end, dtype = must.valid_rows(offs, len(dy)), sample.get("out_dtype") or dy.dtype
        pairs = ((dy_t, scale_dy_t), (x_t, sample["scale_x_t"]))
        columns = (reference.dequantize_columnwise(*pair, offs, end) for pair in pairs)
        outputs[1] = must.wgrad(*columns, offs, dtype, scaled=True)
    if sample.get("bias_grad"):
        outputs[2] = must.bias_grad(dy, offs)
    return outputs


OP = OpInfo(
    sample=sample,
    expected=expected,
    variants={
        "bias": {"bias_grad": True, "out_dtype": FP32},
        "of_x": {"x_t": None, "scale_x_t": None},
        "of_w": {"w_t": None, "scale_w": None, **variants.EXACT},
        "expanded": {"layout": "expanded"},
        **variants.SHARED,
    },
    shares_kernels=True,
    too_large=(({"dy": 0}, {}),),
    benchmark="bench_host",
)
