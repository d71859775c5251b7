# SPDX-License-Identifier: Apache-2.0
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
from grouped_linear import DelayedScaling, GroupedLinear, GroupedMLP, Recipe, parallel, recipes, te
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
convert
grouped_linear
grouped_mlp
grouped_mlp_sorted
ops
te
update_scales""",
    )


def test_names_of_recipes() -> None:
    """Those that a custom format or a state needs, besides recipes."""
    assert set(recipes.__all__) - set(grouped_linear.__all__) == {
        "DelayedScalingState",
        "Layouts",
        "OperandState",
        "Operands",
    }


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
Float8BlockScaling(power_of_two_scales=True, amax_epsilon=0, share_x_scales=True,
    wgrad=torch.float8_e4m3fn, *, requantize_weights=False, qat=None)
Float8CurrentScaling(power_of_two_scales=False, amax_epsilon=0,
    gradient_dtype=torch.float8_e4m3fn, *, requantize_weights=False)
Format(dtype=None, scaling=None, power_of_two_scales=False, amax_epsilon=0, share_scales=False,
    wgrad_dtype=None, quantize=None, state=None, records=True, qat=None, qat_dim=-1,
    observer=None)
GeGLU(approximate='none')
GroupedLinear(num_experts, in_features, out_features, bias=True, device=None, dtype=None, *,
    recipe=None, cache_weights=False, fuse_wgrad_accumulation=False, weights=None, lora=None)
GroupedLinear.forward(x, m_splits, is_first_microbatch=None)
GroupedLinear.from_linears(linears, *, recipe=None, weights=None, cache_weights=False,
    fuse_wgrad_accumulation=False)
GroupedLinear.reset_parameters()
GroupedMLP(num_experts, hidden_size, intermediate_size, *, bias=False,
    activation=SwiGLU(alpha=1, beta=0, limit=None, interleaved=False, cubic=0),
    save_gate_up_in_fp8=False, recompute_gate_up=False, recipe=None, cache_weights=False,
    fuse_wgrad_accumulation=False, weights=None, lora=None, dtype=None, device=None)
GroupedMLP.forward(x, top_k_weights, top_k_index, is_first_microbatch=None, *, max_rows=None)
GroupedMLP.from_experts(experts, *, recipe=None, weights=None, cache_weights=False,
    fuse_wgrad_accumulation=False, save_gate_up_in_fp8=False, recompute_gate_up=False)
GroupedMLP.reset_parameters()
Lora(rank, alpha=None, dropout=0, rslora=False, dtype=None)
MXFP8BlockScaling()
SquaredReLU()
SwiGLU(alpha=1, beta=0, limit=None, interleaved=False, cubic=0)
convert(model, recipe=None, *, weights=None, recipes=None, save_gate_up_in_fp8=False)
grouped_linear(x, weight, m_splits, bias=None, recipe=None, state=None, *, lora=None)
grouped_mlp(x, top_k_weights, top_k_index, gate_up_proj, down_proj, recipe=None, state=None, *,
    gate_up_proj_bias=None, down_proj_bias=None, activation=SwiGLU(alpha=1, beta=0, limit=None,
    interleaved=False, cubic=0), max_rows=None, save_gate_up_in_fp8=False,
    recompute_gate_up=False, gate_up_lora=None, down_lora=None)
grouped_mlp_sorted(x, m_splits, gate_up_proj, down_proj, row_weights=None, recipe=None,
    state=None, *, gate_up_proj_bias=None, down_proj_bias=None, activation=SwiGLU(alpha=1,
    beta=0, limit=None, interleaved=False, cubic=0), save_gate_up_in_fp8=False,
    recompute_gate_up=False, gate_up_lora=None, down_lora=None)
update_scales(model, group=None)""",
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


@pytest.mark.parametrize("layer", [GroupedLinear, GroupedMLP])
def test_keys_of_checkpoints_with_scales(layer: Any) -> None:
    weights = keys_of(layer(2, 16, 32))
    states = [
        f"{weight.split()[0]}_state.{operand}.{part}"
        for weight in weights
        if "bias" not in weight
        for operand in ("x", "weight", "dy")
        for part in ("scale (2,)", "amax (2,)", "amax_history (3, 2)")
    ]
    assert keys_of(layer(2, 16, 32, recipe=DelayedScaling(amax_history_len=3))) == weights + states
