# SPDX-License-Identifier: Apache-2.0
"""group_quantize_swiglu: the bytes of quantizing swiglu's result."""

import torch

from support import expected as must
from support import variants
from support.groups import Groups
from support.op_info import Arguments, OpInfo, Options, Outputs, Sample
from support.tensors import rows


def sample(groups: Groups, dtype: torch.dtype, layout: str, options: Options) -> Arguments:
    return {"gate_up": rows(groups, 2 * groups.K, dtype, layout), "offs": groups.offs()}


def expected(sample: Sample) -> Outputs:
    gate_up, offs, form = sample["gate_up"], sample["offs"], must.form_of(sample)
    given = {name: sample.get(name) for name in must.FORM}
    h_TK = torch.ops.grouped_linear.swiglu(gate_up, offs, **given)
    scaling, share = must.scaling_of(sample), sample.get("share_scales")
    return [
        *must.if_asked(sample.get("rowwise"), must.rowwise(h_TK, offs, scaling)),
        *must.if_asked(sample.get("columnwise"), must.columnwise(h_TK, offs, scaling, share)),
        *must.if_asked(sample.get("keep_h"), [must.swiglu(gate_up, offs, form)]),
    ]


OP = OpInfo(
    sample=sample,
    expected=expected,
    variants={
        "both": {"columnwise": True, "keep_h": True},
        "shared": {"columnwise": True, "share_scales": True},
        "columnwise": {"rowwise": False, "columnwise": True},
        "exact_scales": {"columnwise": True, **variants.EXACT},
        **variants.with_columns(variants.SWIGLU),
    },
    unspecified=("rows", "columns", "blocks", "blocks"),
    too_large=(({"gate_up": 0}, {}),),
    benchmark="bench_group_quantize",
)
