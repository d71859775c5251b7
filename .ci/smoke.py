# SPDX-License-Identifier: Apache-2.0
"""Uses an installed grouped_linear once: layers by each recipe, eager and compiled.

``wheels.py check`` runs it in clean environments, in an empty folder. It needs torch alone, because
nothing else is a dependency of the package. A GPU that has kernels is used too.

T rows, E groups, K in_features, N out_features.
"""

import sys
from pathlib import Path

import torch

import grouped_linear
from grouped_linear import GroupedLinear, GroupedMLP, Recipe
from grouped_linear.loading import library_path
from grouped_linear.report import report

T, E, K, N = 96, 3, 64, 48
SIZES = (40, 0, 50)  # an empty group, and rows past the last one
RECIPES: dict[str, tuple[Recipe | None, float]] = {  # the largest error beside y's largest number
    "BF16": (None, 0.01),  # bf16 keeps 8 bits
    "Float8BlockScaling": (grouped_linear.Float8BlockScaling(), 0.08),  # e4m3 keeps 4 bits
    "Float8CurrentScaling": (grouped_linear.Float8CurrentScaling(), 0.08),
    "DelayedScaling": (grouped_linear.DelayedScaling(), 0.08),
    "MXFP8BlockScaling": (grouped_linear.MXFP8BlockScaling(), 0.08),
}


def error_of(y: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, as a share of the largest number."""
    return float((y.double() - expected).abs().max() / expected.abs().max())


def check_linear(device: str, recipe: Recipe | None, bound: float) -> None:
    """Forward and gradients are near float64's, and compiled they have the bits of eager."""
    torch.manual_seed(0)
    layer = GroupedLinear(E, K, N, bias=False, recipe=recipe, dtype=torch.bfloat16, device=device)
    x = torch.randn(T, K, dtype=torch.bfloat16, device=device, requires_grad=True)
    dy = torch.randn(T, N, dtype=torch.bfloat16, device=device)
    splits = torch.tensor(SIZES, device=device)

    y = layer(x, splits)
    y.backward(dy)
    eager = y, x.grad, layer.weight.grad
    y_64, dx_64 = torch.zeros(T, N).double(), torch.zeros(T, K).double()
    dw_64 = torch.zeros(E, N, K).double()
    begin = 0
    for e, size in enumerate(SIZES):
        rows = slice(begin, begin := begin + size)
        w_e = layer.weight[e].detach().double().cpu()
        y_64[rows] = x[rows].detach().double().cpu() @ w_e.T
        dx_64[rows] = dy[rows].double().cpu() @ w_e
        dw_64[e] = dy[rows].double().cpu().T @ x[rows].detach().double().cpu()
    for name, actual, expected in zip(("y", "dx", "dw"), eager, (y_64, dx_64, dw_64), strict=True):
        assert actual is not None
        error = error_of(actual.detach().cpu(), expected)
        assert error <= bound, f"{name} is off by {error:.3f} on {device}, {bound} at most"

    x.grad = layer.weight.grad = None
    y = torch.compile(layer, fullgraph=True)(x, splits)
    y.backward(dy)
    for actual, expected in zip((y, x.grad, layer.weight.grad), eager, strict=True):
        assert torch.equal(actual, expected), f"compiled and eager differ on {device}"


def check_mlp(device: str) -> None:
    """An expert layer has the same bits compiled, of sorted rows, and both."""
    recipe = grouped_linear.Float8BlockScaling(requantize_weights=True)
    mlp = GroupedMLP(4, K, 2 * K, recipe=recipe, dtype=torch.bfloat16, device=device)
    x = torch.randn(T, K, dtype=torch.bfloat16, device=device, requires_grad=True)
    experts = torch.arange(4, device=device).repeat_interleave(T // 4)[:, None]
    ones, splits = torch.ones(T, 1, device=device), torch.full((4,), T // 4, device=device)
    calls = (
        lambda: mlp(x, ones, experts),
        lambda: torch.compile(mlp, fullgraph=True)(x, ones, experts),
        lambda: mlp.forward_sorted(x, splits),
        lambda: torch.compile(mlp.forward_sorted, fullgraph=True)(x, splits),
    )
    results = []
    for call in calls:
        y = call()
        leaves = [x, *mlp.parameters()]
        results.append([y, *torch.autograd.grad(y, leaves, torch.ones_like(y))])
    for t in results[0]:
        assert t.isfinite().all()
        assert t.any()
    for other in results[1:]:
        for actual, expected in zip(other, results[0], strict=True):
            assert torch.equal(actual, expected), f"GroupedMLP's calls differ on {device}"


def main() -> None:
    """Print the report, then check on each device; raise where something is wrong."""
    print(report(), flush=True)
    here = Path(library_path()).resolve()
    assert Path(sys.prefix).resolve() in here.parents, f"not the installed one: {here}"
    from grouped_linear import _host  # every wheel has it

    devices = ["cpu"]
    if torch.cuda.is_available() and _host.CUDA_VERSION is not None:
        devices.append("cuda")
    for device in devices:
        for name, (recipe, bound) in RECIPES.items():
            check_linear(device, recipe, bound)
            print(f"{device} {name}: ok", flush=True)
        check_mlp(device)
        print(f"{device} GroupedMLP: ok", flush=True)


if __name__ == "__main__":
    main()
