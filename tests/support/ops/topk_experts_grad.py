# SPDX-License-Identifier: Apache-2.0
"""topk_experts_grad: the gradient of experts' weights by the logits."""

import torch

from support import reference, variants
from support.groups import Groups
from support.op_info import Arguments, OpInfo, Options, Output, Outputs, Sample
from support.tensors import lay_out
from support.tolerances import rounded


def sample(groups: Groups, dtype: torch.dtype, layout: str, options: Options) -> Arguments:
    E, k = options.pop("E", 40), options.pop("k", 3)
    logits = torch.randn(groups.T, E).to(dtype)
    experts = torch.rand(groups.T, E).topk(k).indices
    d_weights = torch.randn(groups.T, k)
    return {
        "d_weights": lay_out(d_weights, layout),
        "logits": lay_out(logits, layout),
        "experts": lay_out(experts, layout) if layout == "transposed" else experts,
    }


def expected(sample: Sample) -> Outputs:
    function, normalize = sample.get("score_function"), sample.get("normalize")
    factor, experts, dtype = sample.get("scaling_factor"), sample["experts"], sample["logits"].dtype
    logits_TE, d_Tk = sample["logits"].double().requires_grad_(), sample["d_weights"].double()
    scores_TE = reference.scores_of_experts(logits_TE, function)
    score_Tk = scores_TE.gather(1, experts)
    weights = reference.weights_of_experts(score_Tk, normalize, factor)
    (gradient,) = torch.autograd.grad(weights, logits_TE, d_Tk)

    # Of each term its magnitude: what may cancel, and what the sum of the chosen may lose.
    scores_TE, score_Tk = scores_TE.detach().abs(), score_Tk.detach()
    sum_T1, sizes_T1 = score_Tk.sum(1, True).abs(), score_Tk.abs().sum(1, True)
    terms_Tk, means_T1 = d_Tk.abs(), (d_Tk * score_Tk).abs().sum(1, True)
    slope_TE = torch.ones_like(scores_TE) if function == "none" else scores_TE
    chosen_TE = torch.zeros_like(scores_TE).scatter(1, experts, 1.0)
    if normalize:
        terms_Tk = (terms_Tk + means_T1 / sum_T1) / sum_T1 * (sizes_T1 / sum_T1)
    magnitude_TE = torch.zeros_like(scores_TE).scatter(1, experts, terms_Tk)
    if function == "softmax" and not normalize:
        magnitude_TE, chosen_TE = magnitude_TE + means_T1, 1
    error = variants.SCORE_ERROR * abs(factor) * magnitude_TE * slope_TE * chosen_TE
    allowed = torch.where(error > 0, rounded(gradient, error, dtype), 0)
    return [Output(gradient.detach() * (error > 0), allowed.detach(), dtype, same_bits=True)]


OP = OpInfo(
    sample=sample,
    expected=expected,
    variants={
        "one": {"E": 1, "k": 1, "score_function": "sigmoid"},
        "all": {"E": 33, "k": 33, "score_function": "softmax"},
        "most": {"E": 1024, "k": 100, "score_function": "softmax", "normalize": True},
        **variants.STRIDES,
        **variants.SCORES,
    },
    too_large=(({"d_weights": 0, "logits": 0, "experts": 0}, {}),),
    benchmark="bench_group_quantize",
)
