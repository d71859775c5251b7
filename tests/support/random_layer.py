# SPDX-License-Identifier: Apache-2.0
"""A layer of random options and a call of it, on a GPU beside the CPU.

E experts, T tokens, C choices of a token.
"""

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from grouped_linear import (
    Float8BlockScaling,
    Format,
    GeGLU,
    GroupedLinear,
    GroupedMLP,
    Lora,
    Recipe,
    SquaredReLU,
    SwiGLU,
)
from support.layers import with_numbers_in_adapters
from support.recipes import MORE_RECIPES

DTYPES = (torch.bfloat16, torch.bfloat16, torch.float16, torch.float32)
ACTIVATIONS = (
    SwiGLU(),
    SwiGLU(),
    SwiGLU(1.702, 1.0, 7.0, interleaved=True),
    SwiGLU(1.0, 0.0, 3.0),
    GeGLU("tanh"),
    SquaredReLU(),
)
WEIGHTS = (None, None, "both", "fp8", "mxfp4")

# What a GPU's sums in another order may move, as a share of a result's norm: one rounding of the
# dtype, and in FP8, whose tensor cores keep some 14 bits of a sum, now and then a neighbouring
# number of three bits in what the next GEMM reads. In few rows one such number weighs more.
ALLOWED = {torch.bfloat16: 0.01, torch.float16: 0.004, torch.float32: 1e-4}
ALLOWED_IN_FP8, ALLOWED_IN_FEW_ROWS = 0.04, 0.15

Call = Callable[[str], list[Tensor]]


ALL = {
    **MORE_RECIPES,
    "qat": Float8BlockScaling(qat="mxfp4"),
    "qat_16_bits": Recipe(weight=Format(qat="mxfp4")),
}


def _rows(draw: random.Random) -> int:
    return draw.choice([0, 1, draw.randint(2, 40), draw.randint(40, 300), draw.randint(300, 1500)])


def _sizes(draw: random.Random, E: int, T: int) -> list[int]:
    """Sizes of groups, some of them empty, that may leave rows of no group."""
    ends = sorted(draw.choice([draw.randint(0, T), T]) for _ in range(E))
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


def _layer_options(draw: random.Random) -> dict[str, Any]:
    recipe = ALL[draw.choice([*ALL])]
    weights = draw.choice(WEIGHTS)
    if weights is not None and not (recipe or Recipe()).keeps_weights_as(weights):
        weights = None
    options: dict[str, Any] = {"recipe": recipe, "weights": weights, "dtype": draw.choice(DTYPES)}
    options["bias"] = draw.random() < 0.5
    if draw.random() < 0.25:
        options["lora"] = Lora(draw.choice([1, 4, 16, 40]))
    return options


def _features(draw: random.Random, options: dict[str, Any], most: int) -> int:
    recipe = options["recipe"] or Recipe()
    in_mx = options["weights"] == "mxfp4" or recipe.weight.qat or recipe.weight.scaling == "mx"
    step = 32 if in_mx else 16
    return step * draw.choice([1, 2, 3, 8, 9, draw.randint(1, most // step), most // step])


def drawn(seed: int) -> tuple[str, Call, float]:
    """The text of a layer and its call, a function that runs both on a device, and what is allowed.

    The function gives the output, then the gradients, on the CPU.
    """
    draw = random.Random(seed)
    options = _layer_options(draw)
    E, T = draw.choice([1, 2, 3, 8, 16, 40, 130]), _rows(draw)
    most = 768 if T < 300 else 400
    sizes = [_features(draw, options, most) for _ in range(2)]
    kind = draw.choice([GroupedLinear, GroupedMLP, GroupedMLP])
    C = draw.randint(1, min(8, E))
    if kind is GroupedMLP:
        T = min(T, 1000)
        options["activation"] = draw.choice(ACTIVATIONS)
        options["save_gate_up_in_fp8"] = draw.random() < 0.25
        options["recompute_gate_up"] = not options["save_gate_up_in_fp8"] and draw.random() < 0.25
    splits = _sizes(draw, E, T)
    given = [draw.random() < 0.9 for _ in range(2)]  # which inputs have a gradient
    strided, grad = draw.random() < 0.3, draw.random() < 0.85
    # Large tokens, but where a sum's order may decide on which side of a limit a gate lies, and its
    # gradient with it, or whether float16 overflows.
    limited = getattr(options.get("activation"), "limit", None) is not None
    may_spike = not limited and options["dtype"] != torch.float16
    spike = draw.choice([1.0, 1.0, 100.0]) if may_spike else 1.0

    @torch.random.fork_rng(devices=[])
    def run(device: str) -> list[Tensor]:
        torch.manual_seed(seed)
        layer: nn.Module = with_numbers_in_adapters(kind(E, *sizes, **options), std=0.1).to(device)
        in_features, out_features = sizes[0], sizes[1] if kind is GroupedLinear else sizes[0]
        dtype = options["dtype"]
        x = torch.randn(T, 2 * in_features)
        x[:: max(1, T // 3)] *= spike
        x = x.to(dtype).to(device)[:, :in_features]
        x = (x if strided else x.contiguous()).detach().requires_grad_(given[0] and grad)
        args: list[Any] = [x, torch.tensor(splits, device=device)]
        if kind is GroupedMLP:
            scores = torch.rand(T, E)
            of_none = torch.rand(T, C) < 0.1 if E % 2 else torch.zeros(T, C, dtype=torch.bool)
            experts = scores.topk(C).indices.masked_fill(of_none, E)
            weights = torch.rand(T, C).to(device).requires_grad_(given[1] and grad)
            args = [x, weights, experts.to(device)]
        dy = torch.randn(T, out_features).to(dtype).to(device)
        with torch.set_grad_enabled(grad):
            y = layer(*args)
        if y.requires_grad:
            y.backward(dy)
        leaves = [a for a in args if isinstance(a, Tensor)] + [*layer.parameters()]
        return [t.detach().cpu() for t in (y, *(leaf.grad for leaf in leaves)) if t is not None]

    rounds = options["recipe"] is not None or options.get("save_gate_up_in_fp8", False)
    in_fp8 = ALLOWED_IN_FP8 if T >= 32 else ALLOWED_IN_FEW_ROWS
    allowed = in_fp8 if rounds else ALLOWED[options["dtype"]]
    inputs = f"T={T}, C={C}" if kind is GroupedMLP else f"m_splits={splits}, T={T}"
    call = f"{inputs}, gradients={given if grad else False}, strided={strided}, spike={spike}"
    text = f"{kind.__name__}({E}, {sizes[0]}, {sizes[1]}, {options}) of {call}"
    return f"seed {seed}: {text}", run, allowed


def difference(actual: list[Tensor], expected: list[Tensor]) -> float:
    """The largest relative norm of a difference; infinite where a number is missing."""
    if [t.shape for t in actual] != [t.shape for t in expected]:
        return float("inf")
    worst = 0.0
    for a, e in zip(actual, expected, strict=True):
        if not a.numel():
            continue
        if not a.isfinite().equal(e.isfinite()):
            return float("inf")
        a, e = (t.nan_to_num(0, 0, 0).double() for t in (a, e))
        norm = e.norm().item()
        worst = max(worst, (a - e).norm().item() / norm if norm else a.norm().item())
    return worst
