"""Changes of arguments that several ops refuse, for their pages."""

import torch
from torch import Tensor

from support.op_info import Arguments, Sample
from support.tensors import BF16, FP32

I32 = torch.int32


def offs(n: int) -> Tensor:
    return torch.zeros(n, dtype=I32)


def like(t: Tensor, *sizes: int | None) -> Tensor:
    """Zeros of t's dtype. A size of None is the size of t."""
    return torch.zeros(
        *(own if s is None else s for s, own in zip(sizes, t.shape, strict=True)), dtype=FP32
    ).to(t.dtype)


BAD_SCORING = [
    {"score_function": "tanh"},
    *({"scaling_factor": x} for x in (1e39, float("-inf"), float("nan"))),
]


BAD_EPSILONS = [{"amax_epsilon": e} for e in (-0.5, float("inf"), float("nan"))]


BAD_OFFS = [
    {"offs": torch.zeros(1, 3, dtype=I32)},
    {"offs": torch.zeros(3, dtype=torch.int64)},
    {"offs": offs(0)},
    {"offs": offs(1025)},
]


BAD_FORMS = [
    *({name: x} for name in ("alpha", "beta") for x in (1e39, float("-inf"), float("nan"))),
    *({"limit": x} for x in (0.0, -1.5, float("nan"))),
    *({"cubic": x} for x in (-0.5, 1e39, float("nan"))),
]


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


def gathered_mistakes(good: Sample) -> list[Arguments]:
    y = good["y"]
    return [
        {"y": y[0]},
        {"y": y.double()},
        {"y": like(y, None, 24)},
        {"rows": good["rows"][0]},
        {"rows": good["rows"].short()},
    ]


def swiglu_mistakes(good: Sample) -> list[Arguments]:
    gate_up = good["gate_up"]
    return [
        {"gate_up": torch.zeros(12)},
        {"gate_up": gate_up.double()},
        {"gate_up": like(gate_up, None, 33)},
        {"gate_up": like(gate_up, None, 48)},
        *BAD_OFFS,
        *BAD_FORMS,
    ]


def swiglu_grad_mistakes(good: Sample) -> list[Arguments]:
    dh, gate_up, weight = good["dh"], good["gate_up"], good["weight"]
    return [
        {"dh": torch.zeros(12)},
        {"gate_up": torch.zeros(12)},
        {"dh": dh.double()},
        {"gate_up": gate_up.float()},
        {"gate_up": like(gate_up, 11, None)},
        {"dh": like(dh, None, 24)},
        {"dh": like(dh, None, 128)},
        {"weight": weight[:, None]},
        {"weight": weight.to(BF16)},
        {"weight": like(weight, 11)},
        *BAD_OFFS,
        *BAD_FORMS,
    ]


def bias_mistakes(dtype: torch.dtype) -> list[Arguments]:
    return [
        {"bias": torch.zeros(32, dtype=dtype)},
        {"bias": torch.zeros(3, 32, dtype=torch.float64)},
        {"bias": torch.zeros(2, 32, dtype=dtype)},
        {"bias": torch.zeros(3, 16, dtype=dtype)},
    ]


def low_rank_mistakes(dtype: torch.dtype) -> list[Arguments]:
    """Of GEMMs of 12 rows, 3 groups and 32 columns."""
    a_low, b_low = torch.zeros(12, 32, dtype=dtype), torch.zeros(3, 32, 32, dtype=dtype)
    changes = [
        {"b_low": None},
        {"a_low": None},
        {"a_low": a_low[0]},
        {"b_low": b_low[0]},
        {"a_low": a_low.double()},
        {"b_low": b_low.double()},
        {"a_low": like(a_low, 11, None)},
        {"a_low": a_low[:5], "rows": torch.zeros(6, dtype=I32)},
        {"b_low": like(b_low, None, 16, None)},
        {"a_low": like(a_low, None, 24), "b_low": like(b_low, None, 24, None)},
        {"a_low": like(a_low, None, 0), "b_low": like(b_low, None, 0, None)},
        {"a_low": like(a_low, None, 528), "b_low": like(b_low, None, 528, None)},
        {"b_low": like(b_low, 2, None, None)},
        {"b_low": like(b_low, None, None, 16)},
    ]
    return [{"a_low": a_low, "b_low": b_low, **change} for change in changes]


def wgrad_mistakes(good: Sample) -> list[Arguments]:
    dy, x = good["dy"], good["x"]
    return [
        {"dy": torch.zeros(12)},
        {"x": torch.zeros(2, 6, 144)},
        {"dy": dy.double()},
        {"x": x.float()},
        {"x": like(x, 11, None)},
        {"dy": like(dy, None, 24)},
        {"x": like(x, None, 24)},
        *BAD_OFFS,
        {"dy_rows": torch.zeros(5)},
        {"x_rows": torch.zeros(5, 2, dtype=torch.int32)},
        {"x_rows": torch.zeros(5, dtype=torch.int32)},
        {"dy_rows": torch.zeros(12, dtype=torch.int32), "x_rows": torch.zeros(12).int()},
    ]


def scaled_wgrad_mistakes(good: Sample) -> list[Arguments]:
    dy_t, x_t = good["dy_t"], good["x_t"]
    scale_dy_t, scale_x_t = good["scale_dy_t"], good["scale_x_t"]
    return [
        {"dy_t": dy_t[0]},
        {"dy_t": dy_t.float()},
        {"dy_t": like(dy_t, None, None, 64)},
        {"dy_t": like(dy_t, None, 24, None)},
        {"scale_dy_t": scale_dy_t[0]},
        {"scale_dy_t": scale_dy_t.double()},
        {"scale_dy_t": like(scale_dy_t, 1, None)},
        {"scale_dy_t": like(scale_dy_t, None, 16)},
        {"x_t": x_t[0]},
        {"x_t": x_t.float()},
        {"x_t": like(x_t, None, None, 256)},
        {"x_t": like(x_t, None, 40, None)},
        {"scale_x_t": scale_x_t[0]},
        {"scale_x_t": scale_x_t.double()},
        {"scale_x_t": like(scale_x_t, 1, None)},
        {"scale_x_t": like(scale_x_t, None, 16)},
        {"x_t": like(x_t, 2, None, None), "scale_x_t": like(scale_x_t, 2, None)},
        *BAD_OFFS,
    ]


def main_grad_mistakes(good: Sample) -> list[Arguments]:
    main_grad = good["main_grad"]
    return [
        {"main_grad": main_grad[0]},
        {"main_grad": main_grad.half()},
        {"main_grad": like(main_grad, 2, None, None)},
        {"main_grad": like(main_grad, None, 16, None)},
        {"main_grad": like(main_grad, None, None, 128)},
        {"main_grad": main_grad.transpose(1, 2).contiguous().transpose(1, 2)},
        {"overwrite": torch.tensor([True])},
        {"overwrite": torch.tensor(1)},
    ]


def bad_experts(name: str, experts: list[torch.Tensor]) -> list[Arguments]:
    return [
        {name: []},
        {name: 1025 * experts[:1]},
        {name: [experts[0], experts[1][0]]},
        {name: [experts[0], experts[1].double()]},
        {name: [experts[0], experts[1][:16]]},
        {name: [experts[0], experts[1][:, :16]]},
    ]


def bad_weights() -> list[Arguments]:
    w = torch.zeros(3, 32, 144, dtype=BF16)
    return [
        {"w": torch.zeros(32, 144)},
        {"w": w.double()},
        {"w": like(w, 0, None, None)},
        {"w": like(w, 1025, 16, 16)},
        {"w": like(w, None, 24, None)},
        {"w": like(w, None, None, 8)},
    ]


def refresh_mistakes(good: Sample) -> list[Arguments]:
    """Of a weight of an expert a tensor; a kept tensor that is not contiguous is for one of all."""
    packed = [torch.stack(good["w"])]
    mistakes: list[Arguments] = [{"w": [bad["w"]]} for bad in bad_weights()]
    mistakes += bad_experts("w", good["w"])
    mistakes += BAD_EPSILONS * ("amax_epsilon" in {a.name for a in good.schema.arguments})
    mistakes += [{"refresh": torch.tensor([True])}, {"refresh": torch.tensor(1)}]
    for name in [name for name in good.written if name != "amax"]:
        kept = good[name]
        mistakes += [{name: kept[None]}, {name: kept.double()}, {name: kept[:2]}]
        if kept.dim() == 3 and kept.size(1) > 1:
            mistakes += [{name: kept.transpose(1, 2).contiguous().transpose(1, 2), "w": packed}]
    return mistakes


def main_grads_mistakes(good: Sample) -> list[Arguments]:
    main_grad = good["main_grad"]
    return [
        *bad_experts("main_grad", main_grad),
        {"main_grad": [g.half() for g in main_grad]},
        {"main_grad": main_grad[:2]},
        {"main_grad": [g[:16] for g in main_grad]},
        {"main_grad": [g.t().contiguous().t() for g in main_grad]},
        {"overwrite": torch.tensor(1)},
    ]
