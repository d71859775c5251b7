"""The names that users rely on: public functions with their arguments, and the keys of checkpoints.

Accept a changed snapshot with EXPECTTEST_ACCEPT=1, after reading the diff: it breaks users' code.
"""

import inspect
import textwrap
from typing import Any

import pytest
from expecttest import assert_expected_inline
from torch import nn

import grouped_linear
from grouped_linear import (
    DelayedScaling,
    GroupedLinear,
    GroupedMLP,
    Recipe,
    ops,
    parallel,
    te,
)
from support.recipes import RECIPES


def arguments_of(function: Any) -> str:
    """Arguments and their defaults; types may get other names."""
    parameters = inspect.signature(function).parameters.values()
    named = [p.replace(annotation=inspect.Parameter.empty) for p in parameters if p.name != "self"]
    return str(inspect.Signature(named))


def lines(names: dict[str, Any]) -> str:
    return "\n".join(
        textwrap.fill(f"{name}{arguments_of(function)}", 96, subsequent_indent="    ")
        for name, function in sorted(names.items())
    )


def test_names() -> None:
    assert_expected_inline(
        "\n".join(sorted(grouped_linear.__all__)),
        """\
Activation
DelayedScaling
Float8BlockScaling
Float8CurrentScaling
Format
GeGLU
GroupedLinear
GroupedMLP
Lora
MXFP8BlockScaling
Recipe
SquaredReLU
SwiGLU
check_batch_invariant
compare
convert
grouped_linear
grouped_mlp
grouped_mlp_sorted
ops
record_routing
replay_routing
te
update_scales
watch""",
    )


def test_dir_shows_what_a_user_calls() -> None:
    assert dir(grouped_linear) == sorted([*grouped_linear.__all__, "__version__"])


def test_arguments() -> None:
    public = {name: getattr(grouped_linear, name) for name in grouped_linear.__all__}
    callables = {n: c for n, c in public.items() if callable(c) and n != "Recipe"}  # a type to name
    methods = {
        f"{layer.__name__}.{name}": getattr(layer, name)
        for layer, names in (
            (GroupedLinear, ("forward", "reset_parameters", "from_linears")),
            (GroupedMLP, ("forward", "reset_parameters", "from_experts")),
        )
        for name in names
    }
    assert_expected_inline(
        lines(callables | methods),
        """\
Activation()
DelayedScaling(margin=0, amax_history_len=1024, amax_compute_algo='max')
Float8BlockScaling(power_of_two_scales=True, amax_epsilon=0.0, share_x_scales=True,
    wgrad=torch.float8_e4m3fn, *, requantize_weights=False)
Float8CurrentScaling(power_of_two_scales=False, amax_epsilon=0.0,
    gradient_dtype=torch.float8_e4m3fn, *, requantize_weights=False)
Format(dtype=None, scaling=None, power_of_two_scales=False, amax_epsilon=0.0,
    share_scales=False, wgrad_dtype=None, quantize=None, state=None, records=True, watched=None)
GeGLU(approximate='none')
GroupedLinear(num_experts, in_features, out_features, bias=True, device=None, dtype=None, *,
    recipe=None, cache_weights=False, fuse_wgrad_accumulation=False, weights=None, lora=None)
GroupedLinear.forward(x, m_splits, is_first_microbatch=None)
GroupedLinear.from_linears(linears, *, recipe=None, weights=None, cache_weights=False,
    fuse_wgrad_accumulation=False)
GroupedLinear.reset_parameters()
GroupedMLP(num_experts, hidden_size, intermediate_size, *, bias=False,
    activation=SwiGLU(alpha=1.0, beta=0.0, limit=None, interleaved=False, cubic=0.0),
    save_gate_up_in_fp8=False, recipe=None, cache_weights=False, fuse_wgrad_accumulation=False,
    weights=None, lora=None, dtype=None, device=None)
GroupedMLP.forward(x, top_k_weights, top_k_index, is_first_microbatch=None, *, max_rows=None)
GroupedMLP.from_experts(experts, *, recipe=None, weights=None, cache_weights=False,
    fuse_wgrad_accumulation=False, save_gate_up_in_fp8=False)
GroupedMLP.reset_parameters()
Lora(rank, alpha=None, dropout=0.0, rslora=False, dtype=None)
MXFP8BlockScaling()
SquaredReLU()
SwiGLU(alpha=1.0, beta=0.0, limit=None, interleaved=False, cubic=0.0)
check_batch_invariant(model)
compare(model, step, *, roles=False, compiled=False)
convert(model, recipe=None, *, weights=None, recipes=None, save_gate_up_in_fp8=False)
grouped_linear(x, weight, m_splits, bias=None, recipe=None, state=None, *, lora=None)
grouped_mlp(x, top_k_weights, top_k_index, gate_up_proj, down_proj, recipe=None, state=None, *,
    gate_up_proj_bias=None, down_proj_bias=None, activation=SwiGLU(alpha=1.0, beta=0.0,
    limit=None, interleaved=False, cubic=0.0), max_rows=None, save_gate_up_in_fp8=False,
    gate_up_lora=None, down_lora=None)
grouped_mlp_sorted(x, m_splits, gate_up_proj, down_proj, row_weights=None, recipe=None,
    state=None, *, gate_up_proj_bias=None, down_proj_bias=None, activation=SwiGLU(alpha=1.0,
    beta=0.0, limit=None, interleaved=False, cubic=0.0), save_gate_up_in_fp8=False,
    gate_up_lora=None, down_lora=None)
record_routing(model, batch_size, max_tokens, *, weights=False)
replay_routing(model, routing)
update_scales(model, group=None)
watch(model, *, every=1, rows=4, to=None)""",
    )


def test_te() -> None:
    assert_expected_inline(
        lines({"GroupedLinear": te.GroupedLinear, "backward_dw": te.GroupedLinear.backward_dw}),
        """\
GroupedLinear(num_gemms, in_features, out_features, sequence_parallel=False,
    fuse_wgrad_accumulation=False, tp_group=None, tp_size=1, get_rng_state_tracker=None,
    rng_tracker_name=None, init_method=None, bias=True, return_bias=False, params_dtype=None,
    parallel_mode=None, device=None, ub_overlap_rs=False, ub_overlap_ag=False, ub_name=None,
    delay_wgrad_compute=False, save_original_input=False, single_grouped_weight=False,
    single_grouped_bias=False, *, recipe=None, cache_weights=False, weights=None)
backward_dw()""",
    )


def test_parallel() -> None:
    methods = {
        f"TokenDispatcher.{name}": getattr(parallel.TokenDispatcher, name)
        for name in ("dispatch", "combine")
    }
    assert_expected_inline(
        lines({name: getattr(parallel, name) for name in parallel.__all__} | methods),
        """\
AllGather(mesh, num_experts, *, capacity_factor=None, fp8=False, check_tokens=False)
AllToAll(mesh, num_experts, *, capacity_factor=None, fp8=False, check_tokens=False)
AllToAllV(mesh, num_experts, *, capacity_factor=None, fp8=False, check_tokens=False)
Dispatched(x, top_k_weights, top_k_index, max_rows=None, handle=None)
ExpertParallel(dispatch='all_gather', *, capacity_factor=None, fp8=False, check_tokens=False)
TokenDispatcher(*args, **kwargs)
TokenDispatcher.combine(y, dispatched)
TokenDispatcher.dispatch(x, top_k_weights, top_k_index)""",
    )


def test_arguments_of_ops() -> None:
    functions = {
        n: f for n, f in vars(ops).items() if inspect.isfunction(f) and not n.startswith("_")
    }
    own = {n: f for n, f in functions.items() if f.__module__.startswith("grouped_linear.ops")}
    assert_expected_inline(
        lines(own),
        """\
adam_weight_(q, scale, q_t, master, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, step,
    lr_tensor=None, grad_scale=None, found_inf=None, *, lr=0.001, beta1=0.9, beta2=0.999,
    weight_decay=0.01, eps=1e-08, decoupled_weight_decay=True, maximize=False, amax_epsilon=0.0,
    power_of_two_scales=True)
addmm(c, a, b)
block_scaled_linear(x, w, m_splits, bias=None, *, amax_epsilon=0.0, power_of_two_scales=True,
    share_scales=False, columnwise_x=True, columnwise_w=True)
block_scaled_linear_grad(dy, offs, x_t, scale_x_t, w_t, scale_w, *, amax_epsilon=0.0,
    power_of_two_scales=True, bias_grad=False, out_dtype=None)
dequantize_mxfp4(q, scale, out_dtype=torch.bfloat16)
gather_dot(a, y, rows)
gather_sum(y, rows, weight=None)
group_dequantize(q, scale, offs, out_dtype)
group_dequantize_t(q_t, scale_t, offs, num_rows, out_dtype)
group_quantize(x, offs, rows=None, *, amax_epsilon=0.0, power_of_two_scales=True, rowwise=True,
    columnwise=False, bias_grad=False, share_scales=False)
group_quantize_current(x, offs, out_dtype=torch.float8_e4m3fn, *, amax_epsilon=0.0,
    power_of_two_scales=False, rowwise=True, columnwise=False, bias_grad=False)
group_quantize_delayed(x, offs, scale, amax=None, out_dtype=torch.float8_e4m3fn, *,
    rowwise=True, columnwise=False, bias_grad=False)
group_quantize_mx(x, offs, *, rowwise=True, columnwise=False, bias_grad=False)
group_quantize_swiglu(gate_up, offs, *, amax_epsilon=0.0, power_of_two_scales=True,
    rowwise=True, columnwise=False, keep_h=False, share_scales=False,
    activation=SwiGLU(alpha=1.0, beta=0.0, limit=None, interleaved=False, cubic=0.0))
group_quantize_swiglu_grad(dh, gate_up, weight, offs, *, amax_epsilon=0.0,
    power_of_two_scales=True, rowwise=True, columnwise=False, bias_grad=False,
    h_columnwise=False, keep_h=False, share_h_scales=False, activation=SwiGLU(alpha=1.0,
    beta=0.0, limit=None, interleaved=False, cubic=0.0))
group_round_mx(x, offs, *, rowwise=True, columnwise=False, bias_grad=False)
grouped_bias_grad(dy, offs)
grouped_mm(a, b, offs, bias=None, out_dtype=None, rows=None, a_low=None, b_low=None)
grouped_mm_list(a, b, offs, bias=None, out_dtype=None, *, transpose_b=False, rows=None)
grouped_mm_mxfp4(a, b, scale_b, offs, bias=None, scale_a=None, out_dtype=None, *,
    transpose_b=True, rows=None, a_low=None, b_low=None)
grouped_mm_swiglu(a, b, offs, bias=None, rows=None, *, keep_gate_up=True,
    activation=SwiGLU(alpha=1.0, beta=0.0, limit=None, interleaved=False, cubic=0.0))
grouped_mm_swiglu_grad(a, b, gate_up, weight, offs, rows=None, *, activation=SwiGLU(alpha=1.0,
    beta=0.0, limit=None, interleaved=False, cubic=0.0))
grouped_mm_wgrad(dy, x, offs, out_dtype=None, dy_rows=None, x_rows=None)
grouped_mm_wgrad_(main_grad, dy, x, offs, overwrite=None, dy_rows=None, x_rows=None)
grouped_mm_wgrad_list_(main_grad, dy, x, offs, overwrite=None, dy_rows=None, x_rows=None)
grouped_scaled_mm(a, b, scale_a, scale_b, offs, bias=None, out_dtype=torch.bfloat16, rows=None,
    a_low=None, b_low=None)
grouped_scaled_mm_wgrad(dy_t, x_t, scale_dy_t, scale_x_t, offs, out_dtype=torch.bfloat16)
grouped_scaled_mm_wgrad_(main_grad, dy_t, x_t, scale_dy_t, scale_x_t, offs, overwrite=None)
grouped_scaled_mm_wgrad_list_(main_grad, dy_t, x_t, scale_dy_t, scale_x_t, offs, overwrite=None)
quantize_mxfp4(w)
quantize_weight(w, *, amax_epsilon=0.0, power_of_two_scales=True, columnwise=True, rowwise=True)
quantize_weight_current(w, *, amax_epsilon=0.0, power_of_two_scales=False, columnwise=True)
quantize_weight_delayed(w, scale, amax=None, *, columnwise=True)
quantize_weight_list(w, *, amax_epsilon=0.0, power_of_two_scales=True, columnwise=True)
refresh_weight_(q, scale, q_t, w, refresh=None, *, amax_epsilon=0.0, power_of_two_scales=True)
refresh_weight_current_(q, scale, q_t, w, refresh=None, *, amax_epsilon=0.0,
    power_of_two_scales=False)
refresh_weight_delayed_(q, scale, q_t, amax, w, state, refresh=None)
refresh_weight_mx_(w_rowwise, w_columnwise, w, refresh=None)
scatter_rows(x, rows, num_rows)
sort_by_expert(experts, num_experts)
splits_to_offsets(m_splits, num_rows, *, alignment=1, stride=1, out_dtype=None)
swiglu(gate_up, offs, activation=SwiGLU(alpha=1.0, beta=0.0, limit=None, interleaved=False,
    cubic=0.0))
swiglu_grad(dh, gate_up, weight, offs, activation=SwiGLU(alpha=1.0, beta=0.0, limit=None,
    interleaved=False, cubic=0.0))
topk_experts(logits, k, expert_bias=None, *, score_function='none', normalize=False,
    scaling_factor=1.0)
topk_experts_grad(d_weights, logits, experts, *, score_function='none', normalize=False,
    scaling_factor=1.0)
transpose_weight(q)
update_scales_(scale, amax, amax_history, fp8_max, *, margin=0, most_recent=False)
watch_operand_(stats, turn, operand, x, q=None, scale=None, offs=None, *, rows=None,
    q_rows=None, gate_up=None, weight=None, scale_t=None, routed=None, most=4,
    activation=SwiGLU(alpha=1.0, beta=0.0, limit=None, interleaved=False, cubic=0.0))""",
    )


def keys_of(layer: nn.Module) -> list[str]:
    return [f"{key} {tuple(value.shape)}" for key, value in layer.state_dict().items()]


STATELESS = {name: r for name, r in RECIPES.items() if not isinstance(r, DelayedScaling)}


@pytest.mark.parametrize("recipe", STATELESS.values(), ids=STATELESS)
@pytest.mark.parametrize("cache_weights", [False, True], ids=["", "cached"])
def test_keys_of_checkpoints(cache_weights: bool, recipe: Recipe | None) -> None:
    """A weight cache adds no key, nor does a recipe without a state."""
    options: dict[str, Any] = {"recipe": recipe, "cache_weights": cache_weights}
    assert keys_of(GroupedLinear(2, 16, 32, **options)) == ["weight (2, 32, 16)", "bias (2, 32)"]
    assert keys_of(GroupedLinear(2, 16, 32, bias=False, **options)) == ["weight (2, 32, 16)"]
    assert keys_of(GroupedMLP(2, 16, 32, bias=True, **options)) == [
        "gate_up_proj (2, 64, 16)",
        "down_proj (2, 16, 32)",
        "gate_up_proj_bias (2, 64)",
        "down_proj_bias (2, 16)",
    ]


def test_keys_of_checkpoints_with_scales() -> None:
    recipe = DelayedScaling(amax_history_len=3)
    layer, mlp = GroupedLinear(2, 16, 32, recipe=recipe), GroupedMLP(2, 16, 32, recipe=recipe)
    assert_expected_inline(
        "\n".join(keys_of(layer)),
        """\
weight (2, 32, 16)
bias (2, 32)
weight_state.x.scale (2,)
weight_state.x.amax (2,)
weight_state.x.amax_history (3, 2)
weight_state.weight.scale (2,)
weight_state.weight.amax (2,)
weight_state.weight.amax_history (3, 2)
weight_state.dy.scale (2,)
weight_state.dy.amax (2,)
weight_state.dy.amax_history (3, 2)""",
    )
    assert_expected_inline(
        "\n".join(keys_of(mlp)),
        """\
gate_up_proj (2, 64, 16)
down_proj (2, 16, 32)
gate_up_proj_state.x.scale (2,)
gate_up_proj_state.x.amax (2,)
gate_up_proj_state.x.amax_history (3, 2)
gate_up_proj_state.weight.scale (2,)
gate_up_proj_state.weight.amax (2,)
gate_up_proj_state.weight.amax_history (3, 2)
gate_up_proj_state.dy.scale (2,)
gate_up_proj_state.dy.amax (2,)
gate_up_proj_state.dy.amax_history (3, 2)
down_proj_state.x.scale (2,)
down_proj_state.x.amax (2,)
down_proj_state.x.amax_history (3, 2)
down_proj_state.weight.scale (2,)
down_proj_state.weight.amax (2,)
down_proj_state.weight.amax_history (3, 2)
down_proj_state.dy.scale (2,)
down_proj_state.dy.amax (2,)
down_proj_state.dy.amax_history (3, 2)""",
    )


def test_keys_of_checkpoints_with_a_parameter_per_expert() -> None:
    layer = te.GroupedLinear(2, 16, 32)
    assert_expected_inline(
        "\n".join(keys_of(layer)),
        """\
weight0 (32, 16)
weight1 (32, 16)
bias0 (32,)
bias1 (32,)""",
    )
