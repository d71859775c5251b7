"""Calls every op once a dtype, small, with unaligned and empty groups and rows past the last one.

For compute-sanitizer, which would take hours over the whole suite::

    compute-sanitizer --tool racecheck python tests/every_op.py

T rows, E groups, K in_features, N out_features. Numbers are checked by the tests, not here.
"""

import torch

from grouped_linear import SwiGLU, ops

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
E = 5
# T, K, N and the rows of each group
CASES = ((130, 144, 272, (0, 43, 61, 0, 26)), (300, 272, 144, (300, 0, 0, 0, 0)))


def call_every_op(T: int, K: int, N: int, sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE).to(dtype)

    offs = ops.splits_to_offsets(torch.tensor(sizes, device=DEVICE), T)
    x, dy, w, bias = draw(T, K), draw(T, N), draw(E, N, K), draw(E, N)
    main_grad = torch.zeros(E, N, K, device=DEVICE)
    splits = torch.tensor(sizes, device=DEVICE)
    _, *for_backward = ops.block_scaled_linear(x, w, splits, bias)
    ops.block_scaled_linear_grad(dy, *for_backward, bias_grad=True)
    ops.grouped_mm(x, w.mT, offs, bias)
    ops.grouped_mm(dy, w, offs)
    ops.grouped_mm_wgrad(dy, x, offs)
    ops.grouped_mm_wgrad(dy, x, offs, torch.float32)
    ops.grouped_mm_wgrad_(main_grad, dy, x, offs)
    ops.grouped_bias_grad(dy, offs)

    xq = ops.group_quantize(x, offs, columnwise=True, bias_grad=True)
    dyq = ops.group_quantize(dy, offs, power_of_two_scales=False, columnwise=True)
    order = torch.randperm(T, device=DEVICE)
    ops.group_quantize(x, offs, order, columnwise=True, bias_grad=True)
    ops.group_quantize(x, offs, order.int())
    shared = ops.group_quantize(x, offs, columnwise=True, share_scales=True)
    choices = torch.stack([order, order.flip(0)], dim=1)
    ops.topk_experts(x, 8)
    ops.sort_by_expert(choices % (E + 1), E)
    ops.sort_by_expert(choices.int() - 7, 100)
    ops.gather_sum(x, choices, torch.rand(T, 2, device=DEVICE))
    ops.gather_sum(x, choices.int())
    ops.gather_dot(x, x, choices)
    places = torch.randperm(2 * T, device=DEVICE).view(T, 2)
    ops.scatter_rows(x, places, 2 * T)
    gate_up = draw(T, 2 * K)
    ops.swiglu(gate_up, offs)
    weight = torch.randn(T, device=DEVICE)
    ops.swiglu_grad(x, gate_up, weight, offs)
    for F in (64, 320):  # narrow and wide
        up, down = draw(E, 2 * F, K).mT, draw(E, K, F)
        for rows in (None, choices[:, 0].contiguous()):
            both, _ = ops.grouped_mm_swiglu(x, up, offs, rows=rows)
            ops.grouped_mm_swiglu_grad(x, down, both, weight, offs, rows)
    ops.group_quantize_swiglu(gate_up, offs, columnwise=True, keep_h=True)
    ops.group_quantize_swiglu(gate_up, offs, columnwise=True, share_scales=True)
    both = {"columnwise": True, "h_columnwise": True}
    ops.group_quantize_swiglu_grad(x, gate_up, weight, offs, columnwise=True, bias_grad=True)
    ops.group_quantize_swiglu_grad(x, gate_up, weight, offs, bias_grad=True, **both)
    ops.group_quantize_swiglu_grad(x, gate_up, weight, offs, share_h_scales=True, **both)
    ops.group_quantize_swiglu_grad(x, gate_up, weight, offs, h_columnwise=True)
    wide_x, wide = draw(T, 128), draw(T, 256)  # no tile has columns of gate and of up
    ops.group_quantize_swiglu_grad(wide_x, wide, weight, offs, bias_grad=True, **both)
    ops.group_quantize_swiglu_grad(wide_x, wide, weight, offs)
    for form in (SwiGLU(limit=1.0, cubic=0.1), SwiGLU(alpha=1.702, beta=1.0, interleaved=True)):
        ops.swiglu(gate_up, offs, form)
        ops.swiglu_grad(x, gate_up, weight, offs, form)
        ops.group_quantize_swiglu(gate_up, offs, columnwise=True, keep_h=True, activation=form)
        ops.group_quantize_swiglu_grad(x, gate_up, weight, offs, activation=form, **both)
        ops.group_quantize_swiglu_grad(wide_x, wide, weight, offs, activation=form, **both)
        odd_x, odd = draw(T, K + 3)[:, 1:-2], draw(T, 2 * K + 3)[:, 1:-2]  # rows not aligned
        ops.swiglu(odd, offs, form)
        ops.swiglu_grad(odd_x, odd, weight, offs, form)
        ops.group_quantize_swiglu(odd, offs, columnwise=True, activation=form)
        ops.group_quantize_swiglu_grad(odd_x, odd, weight, offs, activation=form, **both)
    wq = ops.quantize_weight(w)
    ops.quantize_weight(w, rowwise=False)
    ops.grouped_scaled_mm(xq.q, wq.q.mT, xq.scale, wq.scale.mT, offs, bias, dtype)
    ops.grouped_scaled_mm(dyq.q, wq.q_t.mT, dyq.scale, wq.scale, offs)
    columns = dyq.q_t, xq.q_t, dyq.scale_t, xq.scale_t, offs
    ops.grouped_scaled_mm_wgrad(*columns)
    ops.grouped_scaled_mm_wgrad(dyq.q_t, shared.q_t, dyq.scale_t, shared.scale_t, offs)
    ops.grouped_scaled_mm_wgrad_(main_grad, *columns, torch.tensor(True, device=DEVICE))
    scale, amax = torch.full((E,), 0.01, device=DEVICE), torch.zeros(E, device=DEVICE)
    both = {"columnwise": True, "bias_grad": True}
    e5m2 = torch.float8_e5m2
    ops.group_quantize_current(x, offs, **both)
    ops.group_quantize_current(dy, offs, e5m2, rowwise=False, columnwise=True)
    ops.group_quantize_delayed(x, offs, scale, amax, **both)
    ops.group_quantize_delayed(dy, offs, scale, None, e5m2)
    ops.group_quantize_mx(x, offs, **both)
    ops.group_round_mx(x, offs, **both)
    ops.group_round_mx(dy, offs)
    ops.quantize_weight_list(list(w))
    ops.quantize_weight_current(w)
    ops.quantize_weight_delayed(w, scale, amax)
    rounded = torch.empty(2, E, N, K, dtype=torch.bfloat16, device=DEVICE)
    for experts in (w, list(w), [w_e.clone() for w_e in w]):
        for flag in (None, *torch.tensor([True, False], device=DEVICE)):
            ops.refresh_weight_(wq.q, wq.scale, wq.q_t, experts, flag)
            ops.refresh_weight_current_(wq.q, scale.clone(), wq.q_t, experts, flag)
            ops.refresh_weight_delayed_(wq.q, scale.clone(), None, amax, experts, scale, flag)
            ops.refresh_weight_mx_(*rounded, experts, flag)
    for experts in (list(w), [w_e.clone() for w_e in w]):
        ops.grouped_mm_list(x, experts, offs, bias, transpose_b=True)
        ops.grouped_mm_list(dy, experts, offs)
    for grads in (list(main_grad), [grad.clone() for grad in main_grad]):
        ops.grouped_mm_wgrad_list_(grads, dy, x, offs)
        ops.grouped_scaled_mm_wgrad_list_(grads, *columns)
    moments = (draw(E, N, K), draw(E, N, K).square(), draw(E, N, K).square())
    step = torch.tensor(2.0, device=DEVICE)
    for maximum, columns_of_w in ((None, wq.q_t), (moments[2], None)):
        q_parts = (wq.q, wq.scale, columns_of_w)
        of_step = (*q_parts, draw(E, N, K), *moments[:2], maximum, step)
        ops.adam_weight_(*of_step)
        ops.adam_weight_(*of_step, step, step, 0 * step, stochastic_rounding=False)
    histories = [torch.zeros(steps, E, device=DEVICE) for steps in (1, 300)]
    ops.update_scales_([scale, scale.clone()], [amax, amax.clone()], histories, [448.0, 57344.0])
    ops.group_dequantize(xq.q, xq.scale, offs, dtype)
    for quantized in (xq, shared):
        ops.group_dequantize_t(quantized.q_t, quantized.scale_t, offs, T, dtype)


if __name__ == "__main__":
    for case in CASES:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            call_every_op(*case, dtype)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    print(f"every op ran on {DEVICE}")
