# SPDX-License-Identifier: Apache-2.0
"""torchtitan's mixture-of-experts block as it is, and with experts of grouped_linear.

    pip install torchtitan==0.3.0 spmd_types triton
    python examples/torchtitan_moe.py

The block is the one of torchtitan's DeepSeek-V3 debug model: router, experts, shared
expert. Each copy learns the same random function of its input. `convert` replaces the
experts' forward; parameters, names and checkpoints stay torchtitan's. In a training of
torchtitan's call it at the start of `parallelize_fn`: docs/from_other_libraries.md.

On a GPU the same script runs there. FP8 gains time from some 500 tokens an expert on:
--tokens 16384.
"""

import argparse
import copy
import sys
import time

import torch
from tqdm import tqdm

from grouped_linear import Float8BlockScaling, convert

try:
    from torchtitan.models import deepseek_v3
except ImportError as error:
    sys.exit(f"{error}: pip install torchtitan==0.3.0 spmd_types triton")


def train(
    moe: torch.nn.Module, x: torch.Tensor, target: torch.Tensor, steps: int
) -> list[float]:
    optimizer = torch.optim.AdamW(moe.parameters(), lr=1e-3)
    losses = []
    for _ in tqdm(range(steps), desc="steps"):
        loss = (moe(x).float() - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # waits for the device
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=512)
    options = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = deepseek_v3.model_registry("debugmodel").model.layers[-1].moe
    blocks = {"torchtitan": config.build().to(device, torch.bfloat16)}
    with torch.no_grad():
        blocks["torchtitan"].init_states()
    blocks["converted, BF16"] = copy.deepcopy(blocks["torchtitan"])
    blocks["converted, FP8"] = copy.deepcopy(blocks["torchtitan"])
    print(convert(blocks["converted, BF16"]))
    print(convert(blocks["converted, FP8"], Float8BlockScaling()))

    x = torch.randn(1, options.tokens, 256, device=device, dtype=torch.bfloat16)
    target = torch.nn.Linear(256, 256, device=device)(x.float()).tanh().detach()
    rows = []
    for name, moe in blocks.items():
        start = time.perf_counter()
        losses = train(moe, x, target, options.steps)
        milliseconds = 1e3 * (time.perf_counter() - start) / options.steps
        rows.append(f"{name:18}{losses[0]:12.4f}{losses[-1]:12.4f}{milliseconds:12.1f}")
    print(
        f"\n{'experts':18}{'first loss':>12}{'last loss':>12}{'ms a step':>12}",
        *rows,
        sep="\n",
    )


if __name__ == "__main__":
    main()
