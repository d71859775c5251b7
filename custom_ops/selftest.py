# SPDX-License-Identifier: Apache-2.0
"""``python -m grouped_linear --selftest``: each layer under each recipe, a step on each device.

T tokens or rows, E experts, C experts of a token, H features of a token, F features inside.
"""

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from grouped_linear import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    GroupedLinear,
    GroupedMLP,
    MXFP8BlockScaling,
)
from grouped_linear.report import first_line, report

T, E, C, H, F = 500, 6, 2, 160, 288
SIZES = 0, 130, 3, 0, 257, 64  # unaligned and empty groups, and rows past the last one
#: The largest error of a row, beside the root mean square of the rows. 16-bit numbers keep 8 bits,
#: e4m3 keeps 4 of each operand. A GPU adds in another order, and may round h to a neighbour.
IN_16_BITS, IN_FP8 = 0.02, 0.25
RECIPES: dict[str, tuple[dict[str, Any], float]] = {
    "BF16": ({}, IN_16_BITS),
    "Float8BlockScaling": ({"recipe": Float8BlockScaling()}, IN_FP8),
    '  weights="both"': ({"recipe": Float8BlockScaling(), "weights": "both"}, IN_FP8),
    '  weights="fp8"': ({"recipe": Float8BlockScaling(), "weights": "fp8"}, IN_FP8),
    '  weights="mxfp4"': ({"recipe": Float8BlockScaling(), "weights": "mxfp4"}, IN_FP8),
    'BF16, weights="mxfp4"': ({"weights": "mxfp4"}, IN_16_BITS),
    "Float8CurrentScaling": ({"recipe": Float8CurrentScaling()}, IN_FP8),
    "DelayedScaling": ({"recipe": DelayedScaling()}, IN_FP8),
    "MXFP8BlockScaling": ({"recipe": MXFP8BlockScaling()}, IN_FP8),
}
LAYERS: dict[str, Callable[..., Any]] = {
    "GroupedLinear": lambda **options: GroupedLinear(E, H, F, dtype=torch.bfloat16, **options),
    "GroupedMLP": lambda **options: GroupedMLP(E, H, F, dtype=torch.bfloat16, **options),
}
ASK = "Please paste all of this into an issue of the project, also where nothing failed."
HOW = """
A forward and a backward of each layer: on the CPU beside float64 arithmetic without a recipe, on a
GPU beside the CPU, twice, the second time in memory full of NaN. Errors are of the worst row."""


def arguments(layer: Any) -> tuple[Tensor, ...]:
    """A call's: x, then sizes of groups, or weights and choices of a router."""
    x = torch.randn(T, H).bfloat16()
    if isinstance(layer, GroupedLinear):
        x[sum(SIZES) :] = torch.nan
        return x, torch.tensor(SIZES)
    return x, *torch.randn(T, E).softmax(1).topk(C)


def step(call: Any, named: Any, x: Tensor, *routing: Tensor) -> dict[str, Tensor]:
    """The output and the gradients by x and the named parameters, in float64 on the CPU."""
    leaves = {"x": x.detach().requires_grad_()} | {n: p for n, p in named if p.requires_grad}
    y = call(leaves["x"], *routing)
    torch.manual_seed(1)
    dy = torch.randn(y.shape).to(y)
    grads = torch.autograd.grad(y, list(leaves.values()), dy)
    named = [("y", y), *zip(leaves, grads, strict=True)]
    return {name: t.detach().cpu().double() for name, t in named}


def in_float64(layer: Any, x: Tensor, *routing: Tensor) -> dict[str, Tensor]:
    """The results of :func:`step` in plain torch, without a recipe; `+ 0` gives plain tensors."""
    p: Any = {}
    for name, parameter in layer.named_parameters():
        w = layer.dequantize(name) if layer.frozen_weight(name) else parameter.detach() + 0
        p[name] = w.double().requires_grad_(parameter.requires_grad)

    def linear(x: Tensor, m_splits: Tensor) -> Tensor:
        rows = x.tensor_split(m_splits.cumsum(0).tolist())
        parts = [r @ w.T + b for r, w, b in zip(rows[:E], p["weight"], p["bias"], strict=True)]
        return torch.cat([*parts, x.new_zeros(len(rows[E]), F)])

    def mlp(x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for e in range(E):
            gate, up = (x @ p["gate_up_proj"][e].T).chunk(2, 1)
            weight = (weights * (chosen == e)).sum(1, keepdim=True)
            y = y + weight * ((silu(gate) * up) @ p["down_proj"][e].T)
        return y

    return step(linear if "weight" in p else mlp, p.items(), x.double(), *routing)


def error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    """The largest error of a row, and its tensor: infinite for NaN, and where zeros are not."""
    errors = []
    for name, t in expected.items():
        off, size = (found[name] - t).norm(dim=-1), t.norm(dim=-1)
        off[(size == 0) & (off != 0)] = torch.inf
        worst = (off / size.square().mean().sqrt()).max().nan_to_num(torch.inf, torch.inf)
        errors.append((worst.item(), name))
    return max(errors)


def check(kind: str, recipe: str, device: torch.device) -> tuple[str, bool]:
    """The line of a layer under a recipe, and whether it is right."""
    options, bound = RECIPES[recipe]
    torch.manual_seed(0)
    layer = LAYERS[kind](**options)
    given = arguments(layer)
    try:
        if device.type == "cpu":
            expected = in_float64(layer, *given)
        else:
            on_cpu = copy.deepcopy(layer)
            expected = step(on_cpu, on_cpu.named_parameters(), *given)
        layer, given = layer.to(device), tuple(t.to(device) for t in given)
        found = step(layer, layer.named_parameters(), *given)
        begin = time.perf_counter()
        step(layer, layer.named_parameters(), *given)
        spent = f"{1e3 * (time.perf_counter() - begin):8.1f} ms"
        torch.use_deterministic_algorithms(True, warn_only=True)  # fills empty memory with NaN
        again = step(layer, layer.named_parameters(), *given)
    except (RuntimeError, ValueError) as failed:
        return f"FAILS: {first_line(failed)}", False
    finally:
        torch.use_deterministic_algorithms(False)
    off, name = error(found, expected)
    right = off <= bound
    if right and not all(torch.equal(t, again[name]) for name, t in found.items()):
        return "FAILS: the same call again gives other bits", False
    return f"{'ok   ' if right else 'FAILS'} {off:8.2%} of {name:<12} {spent}", right


def main() -> int:
    """Print the report and a line for each layer and recipe: 0 where all are right, else 1."""
    print(report(), HOW, sep="\n", flush=True)
    if not torch.cuda.is_available():
        print("torch sees no GPU here: the CPU alone is checked, beside float64 arithmetic.")
    failed = 0
    for device in map(torch.device, ["cpu", "cuda"][: 1 + torch.cuda.is_available()]):
        for kind in LAYERS:
            print(f"\n{kind} on {device}", flush=True)
            for recipe in RECIPES:
                line, right = check(kind, recipe, device)
                print(f"  {recipe:<24}{line}", flush=True)
                failed += not right
    print(f"\n{f'{failed} FAILED' if failed else 'nothing failed'}", ASK, sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
