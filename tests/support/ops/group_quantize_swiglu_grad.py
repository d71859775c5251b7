# SPDX-License-Identifier: Apache-2.0
"""group_quantize_swiglu_grad: the bytes of quantizing swiglu_grad's results."""

import torch

from support import expected as must
from support import variants
from support.groups import Groups
from support.op_info import Arguments, OpInfo, Options, Outputs, Sample
from support.tensors import per_row, rows


def sample(groups: Groups, dtype: torch.dtype, layout: str, options: Options) -> Arguments:
    arguments = {"dh": rows(groups, groups.K, dtype, layout)}
    arguments["gate_up"] = rows(groups, 2 * groups.K, dtype, layout)
    return {**arguments, "weight": per_row(groups, layout), "offs": groups.offs()}


def expected(sample: Sample) -> Outputs:
    inputs = {name: sample[name] for name in ("dh", "gate_up", "weight", "offs")}
    offs, scaling = sample["offs"], must.scaling_of(sample)
    given = {name: sample.get(name) for name in must.FORM}
    d_gate_up, h, _ = torch.ops.grouped_linear.swiglu_grad(**inputs, **given)
    valid = must.valid_rows(offs, len(h))
    d_gate_up[valid:] = torch.nan
    share = sample.get("share_h_scales")
    return [
        *must.if_asked(sample.get("rowwise"), must.rowwise(d_gate_up, offs, scaling)),
        *must.if_asked(sample.get("columnwise"), must.columnwise(d_gate_up, offs, scaling)),
        *must.if_asked(sample.get("bias_grad"), [must.bias_grad(d_gate_up, offs)]),
        *must.if_asked(sample.get("h_columnwise"), must.columnwise(h, offs, scaling, share)),
        *must.if_asked(sample.get("keep_h"), [must.Output(h[:valid], shape=(*h.shape,))]),
        must.swiglu_grad(*inputs.values(), must.form_of(sample))[2],
    ]


OP = OpInfo(
    sample=sample,
    expected=expected,
    variants={
        "both": {"columnwise": True, "bias_grad": True},
        "bias": {"bias_grad": True},
        "columnwise": {"rowwise": False, "columnwise": True},
        "all": {"columnwise": True, "bias_grad": True, "h_columnwise": True},
        "shared": {"columnwise": True, "h_columnwise": True, "share_h_scales": True},
        "rowwise_and_h": {"h_columnwise": True},
        "columnwise_and_h": {"rowwise": False, "columnwise": True, "h_columnwise": True},
        "h_itself": {"columnwise": True, "keep_h": True},
        "h_twice": {"h_columnwise": True, "keep_h": True},
        "exact_scales": {"columnwise": True, "h_columnwise": True, **variants.EXACT},
        **{
            name: {"h_columnwise": True, **options}
            for name, options in variants.with_columns(variants.SWIGLU).items()
        },
    },
    unspecified=(
        *("rows", "columns", "blocks", "blocks"),
        None,  # bias_grad
        *("blocks", "blocks", "rows"),  # of h
    ),
    too_large=(({"dh": 0, "gate_up": 0, "weight": 0}, {}),),
    benchmark="bench_group_quantize",
)
