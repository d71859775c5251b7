"""Calls of the ops of weights and of their states.

T rows, E groups, K in_features, N out_features. Arguments are on the CPU. Operands hold NaN past
the last group's rows, and row numbers there are none.
"""

from collections.abc import Iterator

import torch

from grouped_linear.selftest import expected as must
from grouped_linear.selftest import reference
from grouped_linear.selftest.case import (
    BF16,
    FP32,
    POWERS,
    Arguments,
    Case,
    written,
)
from grouped_linear.selftest.expected import Output, Outputs
from grouped_linear.selftest.operands import (
    Groups,
    weight,
)
from grouped_linear.selftest.reference import E4M3, Scaling


def weights(groups: Groups, dtype: torch.dtype) -> Iterator[Case]:
    """Weights to FP8: one tensor or one an expert, into new tensors or in place."""
    w_ENK, E = weight(groups, dtype), groups.E
    listed = [w.clone() for w in w_ENK]
    block, current = must.weight(w_ENK, POWERS), must.current_weight(w_ENK)
    yield Case("quantize_weight", {"w": w_ENK}, block)
    for_dgrad: Arguments = {"w": w_ENK, "rowwise": False}
    yield Case("quantize_weight", for_dgrad, [None, *block[1:]], "columnwise")
    exact = {"power_of_two_scales": False, "amax_epsilon": 0.5}
    yield Case("quantize_weight", {"w": w_ENK, **exact}, must.weight(w_ENK, Scaling(False, 0.5)))
    yield Case("quantize_weight_list", {"w": listed}, block)
    yield Case("quantize_weight_current", {"w": w_ENK}, current)
    scale, amax = 0.005 + 0.01 * torch.rand(E), torch.rand(E)
    q = reference.quantize_with(w_ENK, scale.view(-1, 1, 1), E4M3)
    largest = Output(torch.maximum(amax, w_ENK.float().abs().amax((1, 2))))
    delayed: Outputs = [Output(q), Output(must.transposed(q))]
    arguments: Arguments = {"amax": amax, "w": w_ENK, "scale": scale}
    yield Case("quantize_weight_delayed", arguments, [*delayed, largest])

    flat, ends = w_ENK.reshape(E * groups.N, groups.K), torch.arange(1, E + 1) * groups.N
    rounded = (reference.round_mx_rowwise(flat), reference.round_mx_columnwise(flat, ends))
    in_mx: Outputs = [Output(t.view(w_ENK.shape).to(BF16)) for t in rounded]
    of_state: Outputs = [delayed[0], Output(scale), delayed[1], largest]
    state = {"amax": amax, "state": scale}
    q, scale_q, q_t = (torch.randn(o.expected.shape).to(o.expected.dtype) for o in block if o)
    of_experts = torch.rand(E)
    for refresh in (None, torch.tensor(True), torch.tensor(False)):
        old = refresh is not None and not refresh
        given: Arguments = {"w": listed if refresh is None else [w_ENK], "refresh": refresh}
        by_block = {**given, "q": q, "scale": scale_q, "q_t": q_t}
        by_group = {**given, "q": q, "scale": of_experts, "q_t": q_t}
        by_mx = {**given, "w_rowwise": w_ENK.to(BF16) + 1, "w_columnwise": w_ENK.to(BF16) - 1}
        for op, arguments, outputs in (
            ("refresh_weight_", by_block, block),
            ("refresh_weight_current_", by_group, current),
            ("refresh_weight_delayed_", {**state, **by_group}, of_state),
            ("refresh_weight_mx_", by_mx, in_mx),
        ):
            if old:
                outputs = [Output(arguments[name]) for name in written(op)]
            yield Case(op, arguments, outputs, "not now" if old else "")


def optimizer(groups: Groups, dtype: torch.dtype) -> Iterator[Case]:
    """Adam over a quantized weight, with stochastic rounding."""
    q, scale, q_t = reference.quantize_weight(weight(groups, FP32), POWERS)
    grad, m, v, max_v = (weight(groups, dtype) for _ in range(4))
    for maximum in (None, max_v.square()):
        parts = {"q": q, "scale": scale, "q_t": q_t if maximum is None else None, "grad": grad}
        moments = {"exp_avg": m, "exp_avg_sq": v.square(), "max_exp_avg_sq": maximum}
        of_step = {"step": torch.tensor(3.0), "lr_tensor": None, "grad_scale": None}
        options = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-6}
        arguments = {**parts, **moments, **of_step, "found_inf": None, **options}
        yield Case("adam_weight_", arguments, must.adam(arguments))


def update_scales() -> Iterator[Case]:
    """The scales of delayed scaling at the end of a step."""
    for steps, margin, most_recent in (((4, 1), 0, False), ((1024, 300), 3, True)):
        sizes, fp8_max = (5, 10), [448.0, 57344.0]
        scale = [torch.rand(E) + 0.1 for E in sizes]
        amax = [torch.randn(E).clamp(min=0) for E in sizes]
        history = [torch.randn(h, E).clamp(min=0) for h, E in zip(steps, sizes, strict=True)]
        rolled = [
            reference.update_scales(*of_one, margin, most_recent)
            for of_one in zip(scale, amax, history, fp8_max, strict=True)
        ]
        outputs: Outputs = [Output(r.scale) for r in rolled]
        outputs += [Output(torch.zeros(E)) for E in sizes]
        outputs += [Output(r.amax_history) for r in rolled]
        lists = {"scale": scale, "amax": amax, "amax_history": history, "fp8_max": fp8_max}
        options = {"margin": margin, "most_recent": most_recent}
        yield Case("update_scales_", {**lists, **options}, outputs)
