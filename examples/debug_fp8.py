# SPDX-License-Identifier: Apache-2.0
"""Find three planted faults of FP8 training by what `watch` counts.

    python examples/debug_fp8.py

A layer of eight FP8 experts learns to copy its input. One expert has an outlier in its
weights, weights in BF16 lose the steps of a small learning rate, and the router never
chooses one expert. Each is found by a line of the table; docs/debugging_fp8.md has the
way.

On a GPU the layer is compiled and the statistics come out of the compiled graph.
"""

import argparse

import torch
from torch import Tensor, nn

from grouped_linear import Float8BlockScaling, GroupedMLP
from grouped_linear.contrib import Statistics, watch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Model(nn.Module):
    def __init__(self, **options: object) -> None:
        super().__init__()
        self.router = nn.Linear(64, 8)
        recipe = Float8BlockScaling()
        self.experts = GroupedMLP(8, 64, 128, recipe=recipe, **options)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(dim=-1).topk(2)
        return self.experts(x, weights, chosen)


def train(model: Model, steps: int, lr: float = 1e-4) -> Statistics:
    """Train and return what the last step has counted, and moved since the first."""
    torch.manual_seed(1)
    dtype = model.router.weight.dtype
    x = torch.randn(512, 64, device=DEVICE).to(dtype)
    seen = watch(model, every=steps - 1)
    # On a CPU compiling takes longer than all steps.
    forward = torch.compile(model, fullgraph=True) if DEVICE == "cuda" else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    read = None
    for _ in range(steps):
        optimizer.zero_grad()
        (forward(x) - x).square().mean().backward()
        optimizer.step()
        read = seen.step() or read
    assert read is not None
    return read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    steps = max(parser.parse_args().steps, 2)
    found = []

    torch.manual_seed(0)
    model = Model().to(DEVICE)
    with torch.no_grad():
        model.experts.down_proj[3, 5, 7] = 3e4
    read = train(model, steps)
    print(read, end="\n\n")
    worst = read.worst(role="weight", n=1)[0]
    found.append(("outlier", f"{worst.layer} {worst.role}, expert {worst.expert}"))

    for dtype in (torch.bfloat16, torch.float32):
        torch.manual_seed(0)
        read = train(Model().to(DEVICE, dtype), steps, lr=3e-6)
        moved = min(row.moved for row in read.operands if row.role == "weight")
        name = str(dtype).removeprefix("torch.")
        found.append((f"steps in {name}", f"{moved:.1%} of the weights moved"))

    torch.manual_seed(0)
    model = Model().to(DEVICE)
    with torch.no_grad():
        model.router.bias[2] = -20
    load = train(model, steps).loads[0]
    found.append(("dead expert", f"expert {load.idle[0]} has no token"))

    for name, line in found:
        print(f"{name:24}{line}")


if __name__ == "__main__":
    main()
