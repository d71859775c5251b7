# SPDX-License-Identifier: Apache-2.0
"""quantize_weight_list: quantize_weight of a tensor an expert."""

import torch

from support import expected as must
from support import variants
from support.groups import Groups
from support.op_info import Arguments, OpInfo, Options, Output, Outputs, Sample
from support.tensors import weight


def sample(groups: Groups, dtype: torch.dtype, layout: str, options: Options) -> Arguments:
    return {"w": list(weight(groups, dtype, layout))}


def expected(sample: Sample) -> Outputs:
    q, scale, q_t = must.weight(torch.stack(sample["w"]), must.scaling_of(sample))
    return [Output(q), Output(scale), *must.if_asked(sample.get("columnwise"), [Output(q_t)])]


OP = OpInfo(
    sample=sample,
    expected=expected,
    variants={"rowwise": {"columnwise": False}, "exact_scales": variants.EXACT, **variants.STRIDES},
    shares_kernels=True,
    benchmark="bench_group_quantize",
)
