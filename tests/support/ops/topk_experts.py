# SPDX-License-Identifier: Apache-2.0
"""topk_experts: the k experts of the largest scores, and their weights."""

import torch

from support import reference, variants
from support.groups import Groups
from support.op_info import Arguments, OpInfo, Options, Output, Outputs, Sample
from support.tensors import FP32, lay_out


def sample(groups: Groups, dtype: torch.dtype, layout: str, options: Options) -> Arguments:
    logits = torch.randn(groups.T, options.pop("E", 40)).to(dtype)
    arguments = {"logits": lay_out(logits, layout), "k": options.pop("k", 3)}
    if options.pop("bias", False):
        arguments["expert_bias"] = torch.randn(logits.size(1))
    return arguments


def expected(sample: Sample) -> Outputs:
    function, bias_E = sample.get("score_function"), sample.get("expert_bias")
    logits_TE = sample["logits"].detach().double()
    scores_TE = reference.scores_of_experts(logits_TE, function)
    by_TE = logits_TE if bias_E is None else scores_TE + bias_E
    experts = reference.topk_experts(by_TE, sample["k"])
    score_Tk, normalize = scores_TE.gather(1, experts), sample.get("normalize")
    weights = reference.weights_of_experts(score_Tk, normalize, sample.get("scaling_factor"))
    allowed = variants.SCORE_ERROR * weights.abs()
    if normalize:  # logits may cancel in their sum
        allowed = allowed * score_Tk.abs().sum(1, True) / score_Tk.sum(1, True).abs()
    return [Output(weights, allowed, FP32, same_bits=True), Output(experts)]


OP = OpInfo(
    sample=sample,
    expected=expected,
    variants={
        "one": {"E": 1, "k": 1},
        "all": {"E": 33, "k": 33},
        "most": {"E": 1024, "k": 100},
        **variants.STRIDES,
        **variants.SCORES,
        "bias": {"bias": True, "score_function": "sigmoid", "normalize": True},
        "bias_of_softmax": {"bias": True, "score_function": "softmax", "E": 300},
        "all_of_softmax": {"E": 1024, "k": 100, "score_function": "softmax", "normalize": True},
        "grad": {"score_function": "softmax", "requires_grad": ("logits",)},
    },
    every_tensor="bias",
    too_large=(({"logits": 0}, {}),),
    benchmark="bench_group_quantize",
)
