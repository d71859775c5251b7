# SPDX-License-Identifier: Apache-2.0
"""adam_weight_: a step of Adam over a weight and its FP8 numbers."""

import torch
from torch import Tensor

from support import expected as must
from support import reference, variants
from support.groups import Groups
from support.op_info import Arguments, OpInfo, Options, Output, Outputs, Sample
from support.operands import kept_weight
from support.tensors import FP16, FP32, mxfp4_blocks, weight
from support.tolerances import ROUNDING


def sample(groups: Groups, dtype: torch.dtype, layout: str, options: Options) -> Arguments:
    groups = mxfp4_blocks(groups, options)
    grad, exp_avg, exp_avg_sq, max_exp_avg_sq = (weight(groups, dtype) for _ in range(4))
    amsgrad = options.pop("amsgrad", False)
    scalars = {
        name: torch.tensor(options.pop(name)) if name in options else None
        for name in ("lr_tensor", "grad_scale", "found_inf")
    }
    return {
        **kept_weight(groups, options),  # overwritten, whatever they hold
        "master": weight(groups, dtype),
        "grad": grad,
        "exp_avg": exp_avg,
        "exp_avg_sq": exp_avg_sq.square(),
        "max_exp_avg_sq": max_exp_avg_sq.square() if amsgrad else None,
        "step": torch.tensor(3.0),
        **scalars,
        "lr": 0.1,
        "beta1": 0.9,
        "beta2": 0.99,
        "weight_decay": 0.1,
        "eps": 1e-6,
    }


def expected(sample: Sample) -> Outputs:
    if number(sample, "found_inf", 0.0):
        return [Output(sample[name]) for name in sample.written]
    w, *moments = after(sample)
    grad, dtype = sample["grad"].double(), sample["grad"].dtype
    lost = (ROUNDING[dtype] + 2.0**-20) * w.abs() + 2.0**-25 * (dtype == FP16) + 1e-6
    lost += 2.0**-20 * sample["master"].double().abs()
    of_master = Output(w, lost, dtype)
    w, in_float = w.to(dtype).double(), 2.0**-17 + 2 * ROUNDING[dtype]  # rounded, then quantized
    _, scale, _ = must.weight(w.float(), must.scaling_of(sample), sample.get("mxfp4_dim"))
    blocks = scale.double().repeat_interleave(128, 1).repeat_interleave(128, 2)
    blocks = blocks[:, : w.size(1), : w.size(2)]
    exact = w / blocks
    # The nearest of e4m3's numbers, of 3 bits of mantissa. float32 rounds w, and what it is a sum
    # of, by some units of 2^-24, which moves a tie.
    step = 2.0 ** (exact.abs().clamp(min=2.0**-6).log2().floor() - 3)
    if sample.get("mxfp4_dim") is not None:
        step = mxfp4_steps(exact, w, blocks, sample.get("mxfp4_dim"))
    beside = 0.5 * step + in_float * exact.abs() + 1e-6 / blocks
    of_grad = Output(sample["grad"])
    if sample["grad_scale"] is not None:
        unscaled = grad / sample["grad_scale"]
        lost = (ROUNDING[dtype] + 2.0**-22) * unscaled.abs() + 2.0**-25
        of_grad = Output(unscaled, lost, dtype, same_bits=True)
    outputs: Outputs = [
        Output(exact, beside, reference.E4M3, same_bits=True),
        Output(scale.double(), 2.0**-18 * scale.double(), FP32, same_bits=True),
    ]
    if sample["q_t"] is not None:
        turned = (t.transpose(1, 2) for t in (exact, beside))
        outputs.append(Output(*turned, reference.E4M3, same_bits=True))
    outputs += [of_master, of_grad]
    for name, expected in zip(MOMENTS, moments, strict=True):
        if expected is not None:
            # one rounding to the dtype, and a few in float32
            lost = (ROUNDING[dtype] + 2.0**-20) * expected.abs() + 2.0**-25 * (dtype == FP16)
            lost += 2.0**-20 * (sample[name].double().abs() + grad.abs())
            outputs.append(Output(expected, lost, dtype, same_bits=True))
    return outputs


def mxfp4_steps(exact: Tensor, w: Tensor, blocks: Tensor, dim: int) -> Tensor:
    """How far MXFP4's numbers are apart; above the largest, twice how far a number is above."""
    _, scale = reference.quantize_mxfp4(w if dim == -1 else w.mT)
    one = torch.exp2(scale.double() - 127).repeat_interleave(32, -1)
    one = (one if dim == -1 else one.mT) / blocks
    magnitude = exact.abs() / one
    step = 2.0 ** (magnitude.clamp(min=1.0).log2().floor() - 1)
    return one * torch.where(magnitude > 6, 2 * (magnitude - 6), step)


MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


def number(sample: Sample, name: str, default: float) -> float:
    t = sample[name]
    return default if t is None else t.item()


def after(sample: Sample) -> tuple[Tensor, ...]:
    """The weight and its moments after the step, in float64."""
    names = ("lr", "beta1", "beta2", "weight_decay", "eps", "maximize", "decoupled_weight_decay")
    options = {name: sample.get(name) for name in names}
    options["lr"] = number(sample, "lr_tensor", options["lr"])
    options["grad_scale"] = number(sample, "grad_scale", 1.0)
    moments = [sample[name] for name in MOMENTS]
    return reference.adam(
        sample["master"], sample["grad"], *moments, int(sample["step"].item()), **options
    )


OP = OpInfo(
    sample=sample,
    expected=expected,
    variants={
        "rowwise": {"columnwise": False},
        "amsgrad": {"amsgrad": True, "maximize": True, "lr_tensor": 0.03},
        "adam": {"decoupled_weight_decay": False, "grad_scale": 3.0, "found_inf": 0.0},
        "skipped": {"grad_scale": 2.0, "found_inf": 1.0},
        "exact_scales": variants.EXACT,
        "mxfp4": {"mxfp4_dim": -1},
        "mxfp4_amsgrad": {"mxfp4_dim": -1, "amsgrad": True, "columnwise": False},
        "mxfp4_transposed": {"mxfp4_dim": -2},
    },
    shares_kernels=True,
    too_large=(({"q": 1}, {}),),
    benchmark="bench_adam",
)
