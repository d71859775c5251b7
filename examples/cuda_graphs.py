# SPDX-License-Identifier: Apache-2.0
"""A plain training loop: CUDA graphs, micro-batches, routing that changes.

    pip install tqdm matplotlib
    python examples/cuda_graphs.py

A small model predicts a byte of Python's source from the eight before it, by a layer of
FP8 experts. Weights are quantized in the first micro-batch of a step, and the GEMMs
that compute gradients add them to `main_grad`. Which micro-batch is the first is a
tensor, as the routing is: one graph serves them all.

On a GPU torch.compile captures forward and backward in CUDA graphs once and replays
them. On a CPU the same code runs compiled, without graphs. The table tells how often it
was compiled.
"""

import argparse
import inspect
import time
from pathlib import Path

import torch
from matplotlib import pyplot as plt
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from grouped_linear import Float8BlockScaling, GroupedMLP

SEEN, WIDTH, EXPERTS, MICRO_BATCHES, ROWS = 8, 256, 8, 4, 512


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = (
            nn.Embedding(256, WIDTH // SEEN),
            nn.Linear(WIDTH, 256),
        )
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        recipe = Float8BlockScaling()
        self.experts = GroupedMLP(
            EXPERTS,
            WIDTH,
            WIDTH,
            recipe=recipe,
            cache_weights=True,
            fuse_wgrad_accumulation=True,
        )

    def forward(self, windows: Tensor, first: Tensor) -> Tensor:
        x = self.embedding(windows[:, :SEEN]).flatten(1)
        x = x + self.experts(x, *self.router(x).softmax(dim=-1).topk(2), first)
        return cross_entropy(self.head(x), windows[:, SEEN])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--plot", type=Path, default=Path("cuda_graphs_losses.png"))
    options = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    source = bytearray(inspect.getsource(argparse).encode())
    text = torch.frombuffer(source, dtype=torch.uint8).to(device).long()
    windows = text.unfold(0, SEEN + 1, 1)

    model = Model().to(device)
    for p in model.parameters():
        p.grad = torch.zeros_like(
            p
        )  # stays: a graph's own memory is written over in each replay
    for p in model.experts.parameters():
        p.main_grad = p.grad  # the optimizer finds there what the GEMMs added up
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    forward = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    flags = [torch.tensor(i == 0, device=device) for i in range(MICRO_BATCHES)]

    losses, times = [], []
    for _ in tqdm(range(options.steps), desc="steps"):
        start, total = time.perf_counter(), 0.0
        for first in flags:
            torch.compiler.cudagraph_mark_step_begin()
            loss = forward(
                windows[torch.randint(len(windows), (ROWS,), device=device)], first
            )
            (loss / MICRO_BATCHES).backward()
            total = total + loss.detach() / MICRO_BATCHES
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)  # keeps the memory
        losses.append(float(total))  # waits for the device
        times.append(time.perf_counter() - start)

    print(f"\n{'device':24}{device:>10}")
    print(f"{'graphs compiled':24}{counters['stats']['unique_graphs']:10}")
    print(f"{'first step, s':24}{times[0]:10.1f}")
    print(f"{'fastest step, ms':24}{1e3 * min(times):10.1f}")
    print(f"{'first loss':24}{losses[0]:10.3f}")
    print(f"{'last loss':24}{losses[-1]:10.3f}")
    plt.plot(losses)
    plt.xlabel("step")
    plt.ylabel("loss")
    plt.savefig(options.plot)
    print(f"loss curve: {options.plot}")


if __name__ == "__main__":
    main()
