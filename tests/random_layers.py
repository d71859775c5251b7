# SPDX-License-Identifier: Apache-2.0
"""Runs layers of random options on a GPU beside the CPU and compares them.

    python tests/random_layers.py --layers 2000 --seed 0
    compute-sanitizer --padding 64 python tests/random_layers.py --layers 100   # .ci/sanitize_gpu

Prints each layer that differs, and ends with 1 if there is one.
"""

import argparse
import sys

import torch

from support.random_layer import difference, drawn


def main() -> int:
    """Run them; 1 if one differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the first; the next has one more")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("random layers: there is no GPU", file=sys.stderr)
        return 1
    # torch then fills new memory with NaN: what a kernel leaves out shows.
    torch.use_deterministic_algorithms(True, warn_only=True)
    worst, wrong = 0.0, 0
    for seed in range(options.seed, options.seed + options.layers):
        text, run, allowed = drawn(seed)
        off = difference(run("cuda"), run("cpu"))
        worst = max(worst, off / allowed)
        if not off <= allowed:
            wrong += 1
            print(f"differs by {off:.3g}, {allowed} allowed: {text}", flush=True)
    print(f"{options.layers} layers from seed {options.seed} on: {wrong} differ, the largest "
          f"difference is {worst:.2f} of what is allowed")  # fmt: skip
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
