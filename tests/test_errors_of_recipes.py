"""One sentence a mistake in the recipes' ops, held as tests/test_errors.py holds the others."""

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline

from grouped_linear import ops
from support.devices import OPS
from support.errors import BAD_EPSILONS, BAD_OFFS, GROUPS_3, like, offs, sentences
from support.reference import E4M3, E5M2
from support.samples import make
from support.tensors import BF16, FP32

BAD_ROWS = [
    {"x": torch.zeros(12)},
    {"x": torch.zeros(12, 144, dtype=torch.float64)},
    {"x": torch.zeros(12, 72)},
    *BAD_OFFS,
    {"rowwise": False},
]
BAD_SCALES = [
    {"scale": torch.ones(3, 1)},
    {"scale": torch.ones(3, dtype=BF16)},
    {"scale": torch.ones(2)},
    {"amax": torch.ones(1, 3)},
    {"amax": torch.ones(3, dtype=BF16)},
    {"amax": torch.ones(2)},
    {"amax": torch.ones(3, 2)[:, 0]},
]


def test_group_quantize_current() -> None:
    good = make("group_quantize_current", GROUPS_3, BF16)
    mistakes = [*BAD_ROWS, {"out_dtype": torch.bfloat16}, *BAD_EPSILONS]
    assert_expected_inline(
        sentences(good, mistakes),
        """\
group_quantize_current: x must be 2-D, got 1-D
group_quantize_current: x must be bfloat16, float16 or float32, got float64
group_quantize_current: K must be a positive multiple of 16, got 72
group_quantize_current: offs must be 1-D, got 2-D
group_quantize_current: offs must be int32, got int64
group_quantize_current: E must be between 1 and 1024, got 0
group_quantize_current: E must be between 1 and 1024, got 1025
group_quantize_current: rowwise or columnwise must be true, got neither
group_quantize_current: out_dtype must be float8_e4m3fn or float8_e5m2, got bfloat16
group_quantize_current: amax_epsilon must be finite and not negative, got -0.5
group_quantize_current: amax_epsilon must be finite and not negative, got inf
group_quantize_current: amax_epsilon must be finite and not negative, got nan""",
    )


def test_group_quantize_delayed() -> None:
    good = make("group_quantize_delayed", GROUPS_3, BF16)
    mistakes = [*BAD_ROWS, {"out_dtype": torch.float8_e4m3fnuz}, *BAD_SCALES]
    assert_expected_inline(
        sentences(good, mistakes),
        """\
group_quantize_delayed: x must be 2-D, got 1-D
group_quantize_delayed: x must be bfloat16, float16 or float32, got float64
group_quantize_delayed: K must be a positive multiple of 16, got 72
group_quantize_delayed: offs must be 1-D, got 2-D
group_quantize_delayed: offs must be int32, got int64
group_quantize_delayed: E must be between 1 and 1024, got 0
group_quantize_delayed: E must be between 1 and 1024, got 1025
group_quantize_delayed: rowwise or columnwise must be true, got neither
group_quantize_delayed: out_dtype must be float8_e4m3fn or float8_e5m2, got float8_e4m3fnuz
group_quantize_delayed: scale must be 1-D, got 2-D
group_quantize_delayed: scale must be float32, got bfloat16
group_quantize_delayed: E differs: scale has 2, offs has 3
group_quantize_delayed: amax must be 1-D, got 2-D
group_quantize_delayed: amax must be float32, got bfloat16
group_quantize_delayed: E differs: amax has 2, offs has 3
group_quantize_delayed: amax must be contiguous""",
    )


@pytest.mark.parametrize("op", ["group_quantize_mx", "group_round_mx"])
def test_mx(op: str) -> None:
    said = sentences(make(op, GROUPS_3, BF16), BAD_ROWS)
    assert said.count(op) == len(BAD_ROWS)
    assert_expected_inline(
        said.replace(op, "op"),
        """\
op: x must be 2-D, got 1-D
op: x must be bfloat16, float16 or float32, got float64
op: K must be a positive multiple of 16, got 72
op: offs must be 1-D, got 2-D
op: offs must be int32, got int64
op: E must be between 1 and 1024, got 0
op: E must be between 1 and 1024, got 1025
op: rowwise or columnwise must be true, got neither""",
    )


def bad_weights() -> list[dict[str, torch.Tensor]]:
    w = make("quantize_weight", GROUPS_3, BF16)["w"]
    return [
        {"w": torch.zeros(32, 144)},
        {"w": w.double()},
        {"w": like(w, 0, None, None)},
        {"w": like(w, 1025, 16, 16)},
        {"w": like(w, None, 24, None)},
        {"w": like(w, None, None, 8)},
    ]


def test_quantize_weight_current() -> None:
    good = make("quantize_weight_current", GROUPS_3, BF16)
    assert_expected_inline(
        sentences(good, [*bad_weights(), *BAD_EPSILONS]),
        """\
quantize_weight_current: w must be 3-D, got 2-D
quantize_weight_current: w must be bfloat16, float16 or float32, got float64
quantize_weight_current: E must be between 1 and 1024, got 0
quantize_weight_current: E must be between 1 and 1024, got 1025
quantize_weight_current: N must be a positive multiple of 16, got 24
quantize_weight_current: K must be a positive multiple of 16, got 8
quantize_weight_current: amax_epsilon must be finite and not negative, got -0.5
quantize_weight_current: amax_epsilon must be finite and not negative, got inf
quantize_weight_current: amax_epsilon must be finite and not negative, got nan""",
    )


def test_quantize_weight_delayed() -> None:
    good = make("quantize_weight_delayed", GROUPS_3, BF16)
    assert_expected_inline(
        sentences(good, [*bad_weights(), *BAD_SCALES]),
        """\
quantize_weight_delayed: w must be 3-D, got 2-D
quantize_weight_delayed: w must be bfloat16, float16 or float32, got float64
quantize_weight_delayed: E must be between 1 and 1024, got 0
quantize_weight_delayed: E must be between 1 and 1024, got 1025
quantize_weight_delayed: N must be a positive multiple of 16, got 24
quantize_weight_delayed: K must be a positive multiple of 16, got 8
quantize_weight_delayed: scale must be 1-D, got 2-D
quantize_weight_delayed: scale must be float32, got bfloat16
quantize_weight_delayed: E differs: scale has 2, w has 3
quantize_weight_delayed: amax must be 1-D, got 2-D
quantize_weight_delayed: amax must be float32, got bfloat16
quantize_weight_delayed: E differs: amax has 2, w has 3
quantize_weight_delayed: amax must be contiguous""",
    )


def test_quantize_weight_list() -> None:
    good = make("quantize_weight_list", GROUPS_3, BF16)
    w = good["w"]
    mistakes = [
        {"w": 1025 * w[:1]},
        {"w": [torch.zeros(144)]},
        {"w": [w[0].double()]},
        {"w": [w[0][:24]]},
        {"w": [w[0][:, :8]]},
        {"w": [w[0], torch.zeros(144)]},
        {"w": [w[0], w[1].float()]},
        {"w": [w[0], w[1][:16]]},
        {"w": [w[0], w[1][:, :16]]},
        *BAD_EPSILONS,
    ]
    assert_expected_inline(
        sentences(good, mistakes),
        """\
quantize_weight_list: E must be between 1 and 1024, got 1025
quantize_weight_list: w must be 2-D, got 1-D
quantize_weight_list: w must be bfloat16, float16 or float32, got float64
quantize_weight_list: N must be a positive multiple of 16, got 24
quantize_weight_list: K must be a positive multiple of 16, got 8
quantize_weight_list: w must be 2-D, got 1-D
quantize_weight_list: w must be bfloat16, got float32
quantize_weight_list: N differs: w has 16, the first w has 32
quantize_weight_list: K differs: w has 16, the first w has 144
quantize_weight_list: amax_epsilon must be finite and not negative, got -0.5
quantize_weight_list: amax_epsilon must be finite and not negative, got inf
quantize_weight_list: amax_epsilon must be finite and not negative, got nan""",
    )
    with pytest.raises(RuntimeError, match=r"^quantize_weight_list: E must be .* 1024, got 0$"):
        ops.quantize_weight_list([])


def bad_experts(name: str, experts: list[torch.Tensor]) -> list[dict[str, Any]]:
    return [
        {name: []},
        {name: 1025 * experts[:1]},
        {name: [experts[0], experts[1][0]]},
        {name: [experts[0], experts[1].double()]},
        {name: [experts[0], experts[1][:16]]},
        {name: [experts[0], experts[1][:, :16]]},
    ]


REFRESHED = [op for op in OPS if op.startswith("refresh_weight_")]


@pytest.mark.parametrize("op", REFRESHED)
def test_refresh_weight(op: str) -> None:
    good = make(op, GROUPS_3, BF16)
    packed = [torch.stack(good["w"])]
    mistakes = [{"w": [bad["w"]]} for bad in bad_weights()]
    mistakes += bad_experts("w", good["w"])
    mistakes += BAD_EPSILONS * ("amax_epsilon" in {a.name for a in good.schema.arguments})
    mistakes += [{"refresh": torch.tensor([True])}, {"refresh": torch.tensor(1)}]
    for name in [name for name in good.written if name != "amax"]:
        kept = good[name]
        mistakes += [{name: kept[None]}, {name: kept.double()}, {name: kept[:2]}]
        if kept.dim() == 3 and kept.size(1) > 1:
            mistakes += [{name: kept.transpose(1, 2).contiguous().transpose(1, 2), "w": packed}]
    if op == "refresh_weight_delayed_":
        mistakes += [{"state": good["state"][:2]}, {"state": good["state"].double()}]
        mistakes += [{"amax": good["amax"][:2]}, {"amax": torch.ones(6)[::2]}]
    said = sentences(good, mistakes)
    assert all(line.startswith(f"{op}: ") for line in said.splitlines())
    if op == "refresh_weight_delayed_":
        assert_expected_inline(
            said,
            """\
refresh_weight_delayed_: E differs: state has 3, w has 1
refresh_weight_delayed_: w must be bfloat16, float16 or float32, got float64
refresh_weight_delayed_: E must be between 1 and 1024, got 0
refresh_weight_delayed_: E must be between 1 and 1024, got 1025
refresh_weight_delayed_: N must be a positive multiple of 16, got 24
refresh_weight_delayed_: K must be a positive multiple of 16, got 8
refresh_weight_delayed_: E must be between 1 and 1024, got 0
refresh_weight_delayed_: E must be between 1 and 1024, got 1025
refresh_weight_delayed_: w must be 2-D, got 1-D
refresh_weight_delayed_: w must be bfloat16, got float64
refresh_weight_delayed_: N differs: w has 16, the first w has 32
refresh_weight_delayed_: K differs: w has 16, the first w has 144
refresh_weight_delayed_: refresh must be 0-D, got 1-D
refresh_weight_delayed_: refresh must be bool, got int64
refresh_weight_delayed_: q must be 3-D, got 4-D
refresh_weight_delayed_: q must be float8_e4m3fn, got float64
refresh_weight_delayed_: q must be [3, 32, 144], got [2, 32, 144]
refresh_weight_delayed_: q must be contiguous
refresh_weight_delayed_: scale must be 1-D, got 2-D
refresh_weight_delayed_: scale must be float32, got float64
refresh_weight_delayed_: scale must be [3], got [2]
refresh_weight_delayed_: q_t must be 3-D, got 4-D
refresh_weight_delayed_: q_t must be float8_e4m3fn, got float64
refresh_weight_delayed_: q_t must be [3, 144, 32], got [2, 144, 32]
refresh_weight_delayed_: q_t must be contiguous
refresh_weight_delayed_: E differs: state has 2, w has 3
refresh_weight_delayed_: state must be float32, got float64
refresh_weight_delayed_: E differs: amax has 2, w has 3
refresh_weight_delayed_: amax must be contiguous""",
        )


def test_adam_weight() -> None:
    good = make("adam_weight_", GROUPS_3, BF16, amsgrad=True, lr_tensor=0.1, grad_scale=2.0)
    good = good.but(found_inf=torch.tensor(0.0))
    q, grad = good["q"], good["grad"]
    mistakes: list[dict[str, Any]] = [
        *({"q": q[0]}, {"q": q.float()}, {"q": q[:0]}, {"q": q[:, :24]}, {"q": q[..., :24]}),
        {"q": torch.zeros(3, 144, 32).to(q.dtype).transpose(1, 2)},
        {"scale": good["scale"][:2]},
        *({"q_t": good["q_t"].float()}, {"q_t": good["q_t"][:, :16]}),
        *({"grad": grad.double()}, {"grad": grad[:2]}, {"exp_avg": good["exp_avg"].float()}),
        {"grad": grad.transpose(1, 2).contiguous().transpose(1, 2)},
        {"exp_avg_sq": good["exp_avg_sq"][:, :16]},
        {"max_exp_avg_sq": good["max_exp_avg_sq"].half()},
        *({"step": torch.tensor([1.0])}, {"step": torch.tensor(1)}),
        {"lr_tensor": torch.tensor(0.1, dtype=torch.float64)},
        *({"grad_scale": torch.ones(1)}, {"found_inf": torch.ones(1)}),
        *({"lr": float("inf")}, {"beta1": 1.0}, {"beta1": -0.5}, {"beta2": float("nan")}),
        *({"weight_decay": float("nan")}, {"eps": float("inf")}, *BAD_EPSILONS),
    ]
    assert_expected_inline(
        sentences(good, mistakes),
        """\
adam_weight_: q must be 3-D, got 2-D
adam_weight_: q must be float8_e4m3fn, got float32
adam_weight_: E must be between 1 and 1024, got 0
adam_weight_: N must be a positive multiple of 16, got 24
adam_weight_: K must be a positive multiple of 16, got 24
adam_weight_: q must be contiguous
adam_weight_: scale must be [3, 1, 2], got [2, 1, 2]
adam_weight_: q_t must be float8_e4m3fn, got float32
adam_weight_: q_t must be [3, 144, 32], got [3, 16, 32]
adam_weight_: grad must be bfloat16, float16 or float32, got float64
adam_weight_: grad must be [3, 32, 144], got [2, 32, 144]
adam_weight_: exp_avg must be bfloat16, got float32
adam_weight_: grad must be contiguous
adam_weight_: exp_avg_sq must be [3, 32, 144], got [3, 16, 144]
adam_weight_: max_exp_avg_sq must be bfloat16, got float16
adam_weight_: step must be 0-D, got 1-D
adam_weight_: step must be float32, got int64
adam_weight_: lr_tensor must be float32, got float64
adam_weight_: grad_scale must be 0-D, got 1-D
adam_weight_: found_inf must be 0-D, got 1-D
adam_weight_: lr must be finite, got inf
adam_weight_: beta1 must be at least 0 and below 1, got 1
adam_weight_: beta1 must be at least 0 and below 1, got -0.5
adam_weight_: beta2 must be at least 0 and below 1, got nan
adam_weight_: weight_decay must be finite, got nan
adam_weight_: eps must be finite, got inf
adam_weight_: amax_epsilon must be finite and not negative, got -0.5
adam_weight_: amax_epsilon must be finite and not negative, got inf
adam_weight_: amax_epsilon must be finite and not negative, got nan""",
    )


def test_lists_of_experts() -> None:
    product = make("grouped_mm_list", GROUPS_3, BF16)
    grads = make("grouped_mm_wgrad_list_", GROUPS_3, BF16)
    scaled = make("grouped_scaled_mm_wgrad_list_", GROUPS_3, BF16)
    b, main_grad = product["b"], grads["main_grad"]
    lines = [
        sentences(
            product,
            [
                *bad_experts("b", b),
                {"b": [b_e.float() for b_e in b]},
                {"b": [b_e[:, :16] for b_e in b]},
                {"b": [b_e[:24] for b_e in b]},
                {"b": b[:2]},
                {"transpose_b": False},
                {"out_dtype": torch.float64},
            ],
        ),
        *(
            sentences(
                sample,
                [
                    *bad_experts("main_grad", main_grad),
                    {"main_grad": [g.half() for g in main_grad]},
                    {"main_grad": main_grad[:2]},
                    {"main_grad": [g[:16] for g in main_grad]},
                    {"main_grad": [g.t().contiguous().t() for g in main_grad]},
                    {"overwrite": torch.tensor(1)},
                ],
            )
            for sample in (grads, scaled)
        ),
    ]
    assert_expected_inline(
        "\n".join(lines),
        """\
grouped_mm_list: E must be between 1 and 1024, got 0
grouped_mm_list: E must be between 1 and 1024, got 1025
grouped_mm_list: b must be 2-D, got 1-D
grouped_mm_list: b must be bfloat16, got float64
grouped_mm_list: N differs: b has 16, the first b has 32
grouped_mm_list: K differs: b has 16, the first b has 144
grouped_mm_list: b must be bfloat16, got float32
grouped_mm_list: K differs: a has 144, b has 16
grouped_mm_list: N must be a positive multiple of 16, got 24
grouped_mm_list: E differs: b has 2, offs has 3
grouped_mm_list: K differs: a has 144, b has 32
grouped_mm_list: out_dtype must be bfloat16, float16 or float32, got float64
grouped_mm_wgrad_list_: E must be between 1 and 1024, got 0
grouped_mm_wgrad_list_: E must be between 1 and 1024, got 1025
grouped_mm_wgrad_list_: main_grad must be 2-D, got 1-D
grouped_mm_wgrad_list_: main_grad must be float32, got float64
grouped_mm_wgrad_list_: N differs: main_grad has 16, the first main_grad has 32
grouped_mm_wgrad_list_: K differs: main_grad has 16, the first main_grad has 144
grouped_mm_wgrad_list_: main_grad must be float32 or bfloat16, got float16
grouped_mm_wgrad_list_: E differs: main_grad has 2, offs has 3
grouped_mm_wgrad_list_: N differs: main_grad has 16, dy has 32
grouped_mm_wgrad_list_: main_grad must be contiguous, got strides 1, 32
grouped_mm_wgrad_list_: overwrite must be bool, got int64
grouped_scaled_mm_wgrad_list_: E must be between 1 and 1024, got 0
grouped_scaled_mm_wgrad_list_: E must be between 1 and 1024, got 1025
grouped_scaled_mm_wgrad_list_: main_grad must be 2-D, got 1-D
grouped_scaled_mm_wgrad_list_: main_grad must be float32, got float64
grouped_scaled_mm_wgrad_list_: N differs: main_grad has 16, the first main_grad has 32
grouped_scaled_mm_wgrad_list_: K differs: main_grad has 16, the first main_grad has 144
grouped_scaled_mm_wgrad_list_: main_grad must be float32 or bfloat16, got float16
grouped_scaled_mm_wgrad_list_: E differs: main_grad has 2, offs has 3
grouped_scaled_mm_wgrad_list_: N differs: main_grad has 16, dy has 32
grouped_scaled_mm_wgrad_list_: main_grad must be contiguous, got strides 1, 32
grouped_scaled_mm_wgrad_list_: overwrite must be bool, got int64""",
    )


def test_update_scales() -> None:
    good = make("update_scales_", GROUPS_3, BF16)
    scale, amax, history = good["scale"], good["amax"], good["amax_history"]
    mistakes = [
        {"scale": []},
        {"amax": amax[:1]},
        {"amax_history": history[:1]},
        {"fp8_max": [448.0]},
        {"margin": -1},
        {"margin": 65},
        {"scale": [scale[0][None], scale[1]]},
        {"scale": [scale[0].double(), scale[1]]},
        {"scale": [scale[0], torch.ones(12)[::2]]},
        {"amax": [amax[0], amax[1].double()]},
        {"amax": [amax[0], amax[0]]},
        {"amax_history": [history[0][0], history[1]]},
        {"amax_history": [history[0].double(), history[1]]},
        {"amax_history": [history[0][:, :2], history[1]]},
        {"amax_history": [history[0][:0], history[1]]},
        {"amax_history": [torch.ones(3, 4).t(), history[1]]},
        {"fp8_max": [448.0, 0.0]},
        {"fp8_max": [float("inf"), 448.0]},
    ]
    assert_expected_inline(
        sentences(good, mistakes),
        """\
update_scales_: scale must not be empty
update_scales_: the number of states differs: amax has 1, scale has 2
update_scales_: the number of states differs: amax_history has 1, scale has 2
update_scales_: the number of states differs: fp8_max has 1, scale has 2
update_scales_: margin must be between 0 and 64, got -1
update_scales_: margin must be between 0 and 64, got 65
update_scales_: scale must be 1-D, got 2-D
update_scales_: scale must be float32, got float64
update_scales_: scale must be contiguous
update_scales_: amax must be float32, got float64
update_scales_: E differs: amax has 3, scale has 6
update_scales_: amax_history must be 2-D, got 1-D
update_scales_: amax_history must be float32, got float64
update_scales_: E differs: amax_history has 2, scale has 3
update_scales_: amax_history must have a row, got none
update_scales_: amax_history must be contiguous
update_scales_: fp8_max must be positive and finite, got 0
update_scales_: fp8_max must be positive and finite, got inf""",
    )
    with pytest.raises(RuntimeError, match=r"^update_scales_: scale must not be empty$"):
        ops.update_scales_([], [], [], [])


def test_grouped_scaled_mm_per_group() -> None:
    good = make("grouped_scaled_mm", GROUPS_3, BF16, per_group=E5M2)
    a, b = good["a"], good["b"]
    mistakes = [
        {"a": a[0]},
        {"a": a.to(BF16)},
        {"a": a[:, :24], "b": b[:, :24]},
        {"b": b.to(E5M2)},
        {"b": b[:, :128]},
        {"scale_a": torch.ones(3, dtype=BF16)},
        {"scale_a": torch.ones(2)},
        {"scale_a": torch.ones(2, 12)},
        {"scale_b": torch.ones(3, 1, 2)},
        {"scale_b": torch.ones(3, dtype=torch.float64)},
        {"scale_b": torch.ones(4)},
        {"offs": offs(2)},
    ]
    assert_expected_inline(
        sentences(good, mistakes),
        """\
grouped_scaled_mm: a must be 2-D, got 1-D
grouped_scaled_mm: a must be float8_e4m3fn or float8_e5m2, got bfloat16
grouped_scaled_mm: K must be a positive multiple of 16, got 24
grouped_scaled_mm: b must be float8_e4m3fn, got float8_e5m2
grouped_scaled_mm: K differs: a has 144, b has 128
grouped_scaled_mm: scale_a must be float32, got bfloat16
grouped_scaled_mm: E differs: scale_a has 2, offs has 3
grouped_scaled_mm: a must be float8_e4m3fn, got float8_e5m2
grouped_scaled_mm: scale_b must be 1-D, got 3-D
grouped_scaled_mm: scale_b must be float32, got float64
grouped_scaled_mm: E differs: scale_b has 4, offs has 3
grouped_scaled_mm: E differs: b has 3, offs has 2""",
    )


def test_grouped_scaled_mm_wgrad_per_group() -> None:
    good = make("grouped_scaled_mm_wgrad", GROUPS_3, BF16, per_group=E5M2)
    dy_t, x_t = good["dy_t"], good["x_t"]
    mistakes = [
        {"dy_t": dy_t[0]},
        {"dy_t": dy_t.to(FP32)},
        {"dy_t": dy_t[:, :, :64]},
        {"dy_t": dy_t[:, :24]},
        {"x_t": x_t[0]},
        {"x_t": x_t.view(torch.uint8).view(E5M2)},
        {"x_t": x_t[:1]},
        {"scale_dy_t": torch.ones(3, dtype=BF16)},
        {"scale_dy_t": torch.ones(2)},
        {"scale_dy_t": torch.ones(dy_t.shape[:2])},
        {"scale_x_t": torch.ones(x_t.shape[:2])},
        {"scale_x_t": torch.ones(4)},
        {"offs": offs(2)},
    ]
    assert_expected_inline(
        sentences(good.but(x_t=x_t.view(E4M3)), mistakes),
        """\
grouped_scaled_mm_wgrad: dy_t must be 3-D, got 2-D
grouped_scaled_mm_wgrad: dy_t must be float8_e4m3fn or float8_e5m2, got float32
grouped_scaled_mm_wgrad: dy_t must hold blocks of 128 rows, got 64
grouped_scaled_mm_wgrad: N must be a positive multiple of 16, got 24
grouped_scaled_mm_wgrad: x_t must be 3-D, got 2-D
grouped_scaled_mm_wgrad: x_t must be float8_e4m3fn, got float8_e5m2
grouped_scaled_mm_wgrad: the number of blocks differs: dy_t has 3, x_t has 1
grouped_scaled_mm_wgrad: scale_dy_t must be float32, got bfloat16
grouped_scaled_mm_wgrad: E differs: scale_dy_t has 2, offs has 3
grouped_scaled_mm_wgrad: dy_t must be float8_e4m3fn, got float8_e5m2
grouped_scaled_mm_wgrad: scale_x_t must be 1-D, got 2-D
grouped_scaled_mm_wgrad: E differs: scale_x_t has 4, offs has 3
grouped_scaled_mm_wgrad: E differs: scale_dy_t has 3, offs has 2""",
    )
