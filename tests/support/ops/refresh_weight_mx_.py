# SPDX-License-Identifier: Apache-2.0
"""refresh_weight_mx_: a weight rounded to MXFP8 into tensors that are kept."""

import torch

from support import expected as must
from support import reference, variants
from support.groups import Groups
from support.op_info import Arguments, OpInfo, Options, Outputs, Sample
from support.tensors import BF16, listed, weight


def sample(groups: Groups, dtype: torch.dtype, layout: str, options: Options) -> Arguments:
    given = {"w": listed(groups, dtype, layout, options), "refresh": None}
    columnwise = weight(groups, BF16) if options.pop("columnwise", True) else None
    return {**given, "w_rowwise": weight(groups, BF16), "w_columnwise": columnwise}


def expected(sample: Sample) -> Outputs:
    w = must.one_weight(sample["w"])
    E, N, K = w.shape
    flat, ends = w.reshape(E * N, K), torch.arange(1, E + 1) * N
    rounded = (reference.round_mx_rowwise(flat), reference.round_mx_columnwise(flat, ends))
    return must.refreshed(sample, [t.view(w.shape).to(BF16) for t in rounded])


OP = OpInfo(
    sample=sample,
    expected=expected,
    variants=variants.refreshing(),
    every_tensor="yes",
    shares_kernels=True,
)
